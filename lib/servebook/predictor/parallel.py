"""A model on several GPUs: the share of each GPU, and their communication in a step.

Tensor parallel (tp): every matrix is split over tp ranks. There are two all-reduces per layer, after O and after down
(Megatron-LM, arXiv:1909.08053), one after the embedding, and a gather of the logits. Pipeline parallel (pp): the layers
are split into stages, which send their activations on. pp batches are in flight, one for each of pp groups of requests.
A token takes one pass through all stages, and the groups share one KV pool. Data parallel (dp): replicas, each with its
own requests and KV pool. Each of the dp · pp groups of requests is simulated separately, with its share of the load.
Experts are spread over all tp · dp ranks: whole experts with expert parallel, else a slice of each. The replicas then
step together: before the experts of every layer they gather each other's tokens, and after them scatter the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.errors import ServebookError
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape

# vLLM's custom all-reduce over NVLink, in a CUDA graph. Small messages take one shot (each rank reads the data of all
# others), larger ones two (each rank reduces a part, then all gather); from CUSTOM_BYTES on, NCCL's ring is used.
# NVLINK_LATENCY_S: an all-reduce of a few bytes, by generation (4.3 to 4.8 µs on 2 to 8 H100 and H200, 4.9 to 5.7 on
# A100, 6.6 to 7.4 on B200). SECOND_SHOT_S: the second shot. NVLINK_SHARE: fraction of the link's rate. PCIE_BASE_S and
# PCIE_HOP_S: NCCL's ring over PCIe (6, 13 and 25 µs on 2, 4 and 8 L40S or RTX Pro 6000). From communication benchmarks
# in aiconfigurator 0.12 (systems/data, vllm 0.14 to 0.24).
NVLINK_LATENCY_S = {"hopper": 4.5e-6, "ampere": 5.3e-6, "blackwell": 7e-6}
PCIE_BASE_S, PCIE_HOP_S, SECOND_SHOT_S = 9e-6, 1.5e-6, 3e-6
ONE_SHOT_BYTES = {2: 8 << 20, 4: 512 << 10, 8: 256 << 10}
CUSTOM_BYTES = 8 << 20
NVLINK_SHARE = 0.62
# {ranks: fraction of the link's rate} of NCCL's ring over PCIe with large messages: 0.30, 0.21 and 0.19 on RTX Pro
# 6000; 0.31 on two L40S, 0.08 and 0.02 on four and eight, which are attached to two CPU sockets
PCIE_SHARES = {2: 0.31, 4: 0.20, 8: 0.15}
# Without peer access (GeForce cards; many virtual machines, where vLLM logs "your platform lacks GPU P2P capability")
# NCCL goes through host memory. Messages for which its tuning model prefers the LL protocol (8-byte stores with flags)
# then move at LL_BYTES_PER_S: two RTX 2080 Ti over PCIe 3 (nccl-tests, AutoDL) take 12, 17, 25 and 40 µs for 8, 16, 32
# and 64 KB, and from 128 KB on 20 µs and 0.25 of the link's rate, about as with peer access. NCCL thinks that LL has
# half the bandwidth and saves LL_SAVES_S between two ranks (src/graph/tuning.cc from 2.12 on: 6.6 + 2 · 1.0 µs, Simple
# 8.4 + 2 · 5.7), and counts on some 0.7 of the link's rate
LL_BYTES_PER_S, LL_SAVES_S, LL_COUNTS_ON, SIMPLE_S = 2.3e9, 11.2e-6, 0.7, 8e-6
RING_SHARE, RING_BASE_S = {2: 0.80, 4: 1.15, 8: 1.25}, 10e-6  # relative to the custom kernel's share of the link
SEND_S = 10e-6  # latency from one stage to the next (aiconfigurator's p2p_latency)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, with vLLM's names."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False  # expert parallel: whole experts on each rank

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def groups(self) -> int:
        """Number of groups of requests that are scheduled independently."""
        return self.pipeline * self.data

    def check(self, shape: ModelShape, where: str = "engines") -> None:
        """Raises ServebookError if vLLM would reject this layout for the model."""
        tp, pp = self.tensor, self.pipeline
        if not self._splits(shape, tp):
            able = ", ".join(str(n) for n in range(1, 17) if self._splits(shape, n))
            what = f"{shape.heads} query heads, {shape.kv_heads} KV heads and an MLP of {shape.intermediate}"
            raise ServebookError(
                f"{shape.name} cannot be split over {tp} GPUs ({what} do not divide)",
                f"{where}.tensor_parallel_size",
                f"Possible are {able}",
            )
        if pp > shape.layers:
            raise ServebookError(
                f"{shape.name} has {shape.layers} layers, fewer than {pp} pipeline stages",
                f"{where}.pipeline_parallel_size",
                f"At most {shape.layers}",
            )

    def _splits(self, shape: ModelShape, tp: int) -> bool:
        for a in shape.attention:
            if a.kind in ("state", "indexer", "compressor"):
                continue
            if a.heads % tp or not (a.kv_heads % tp == 0 or tp % a.kv_heads == 0):
                return False
        if shape.experts and not self.expert and shape.experts.intermediate % (tp * self.data):
            return False
        return shape.intermediate % tp == 0

    def rank(self, shape: ModelShape) -> ModelShape:
        """The share of one tensor-parallel rank, over all stages. With fewer KV heads than ranks, each rank has one."""
        return shape.rank(self.tensor, self.tensor * self.data if shape.experts else 1)

    def stage(self, shape: ModelShape) -> ModelShape:
        """The share of one rank of the largest stage."""
        return self.rank(shape).stage(self.pipeline)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Weight bytes on the fullest GPU. With several stages, the first has the embedding, the last the LM head."""
        stage = self.stage(shape)
        if self.pipeline == 1:
            return stage.weight_bytes + stage.tower_bytes_beside
        ends = stage.embedding_bytes if stage.lm_head_parameters == 0 else stage.lm_head_bytes
        towers = sum(m.stored_bytes for m in stage.matrices if m.part == "tower") + stage.tower_bytes_beside
        layers = stage.weight_bytes - stage.embedding_bytes - (stage.lm_head_bytes if stage.lm_head_parameters else 0)
        return layers - (towers - stage.tower_bytes_beside) + max(stage.embedding_bytes + towers, ends)

    def kv_tokens(self, shape: ModelShape, bytes_per_gpu: float) -> int:
        """KV tokens that one replica holds if each of its GPUs has `bytes_per_gpu` for them."""
        return max(0, int(bytes_per_gpu // self.stage(shape).kv_bytes_per_token))

    def link_share(self, gpu: Gpu) -> float:
        """Fraction of the link's rate that large all-reduces between the ranks reach."""
        return NVLINK_SHARE if gpu.nvlink_gb_per_s else PCIE_SHARES[self._ranks]

    @property
    def _ranks(self) -> int:
        """Ranks of a stage, rounded up to a key of the all-reduce tables."""
        return 2 if self.tensor <= 2 else 4 if self.tensor <= 4 else 8

    def link_latency_s(self, gpu: Gpu) -> float:
        """Seconds of a small all-reduce between the ranks of a stage."""
        return self._small_s(gpu, self.tensor)

    @staticmethod
    def _small_s(gpu: Gpu, ranks: int) -> float:
        if gpu.nvlink_gb_per_s:
            return NVLINK_LATENCY_S.get(gpu.generation, 5e-6)
        return PCIE_BASE_S + 2 * (ranks - 1) * PCIE_HOP_S

    def all_reduce_s(self, gpu: Gpu, size_bytes: float, share: float | None = None) -> float:
        """Seconds of an all-reduce of `size_bytes` between a stage's ranks. share: fraction of the link's rate."""
        n = self.tensor
        if n == 1:
            return 0.0
        rate, latency = gpu.link_bytes_per_s * (share or self.link_share(gpu)), self.link_latency_s(gpu)
        ring = 2 * (n - 1) / n * size_bytes  # bytes that a rank sends (nccl-tests' bus bandwidth)
        if gpu.through_host:
            low_latency = ring <= LL_SAVES_S * LL_COUNTS_ON * gpu.link_bytes_per_s
            return latency + (ring / LL_BYTES_PER_S if low_latency else SIMPLE_S + ring / rate)
        if not gpu.nvlink_gb_per_s:
            return latency + ring / rate
        step = self._ranks
        shots = [latency + (n - 1) * size_bytes / rate]
        if size_bytes > ONE_SHOT_BYTES[step]:
            shots = [latency + SECOND_SHOT_S + ring / rate]
        if size_bytes >= CUSTOM_BYTES:
            shots = [RING_BASE_S + ring / (rate * RING_SHARE[step])]
        return shots[-1]

    def communicates(self, shape: ModelShape) -> bool:
        """Whether GPUs communicate in a step: those of a replica, or of replicas that share experts."""
        return self.gpus > self.data or (self.data > 1 and shape.experts is not None)

    def exchange_s(self, shape: ModelShape, gpu: Gpu, tokens: int, samples: int, share: float | None = None) -> float:
        """Seconds of communication in a step with `tokens` tokens, of which `samples` are sampled: two all-reduces per
        layer, one after the embedding, a gather of the logits, and the transfers between stages."""
        tp, hops, row = self.tensor, self.pipeline - 1, shape.hidden * shape.element_bytes
        rate = gpu.link_bytes_per_s * (share or self.link_share(gpu))
        seconds = 0.0
        if tp > 1:
            seconds += (2 * shape.layers + 1) * self.all_reduce_s(gpu, tokens * row, share)
            seconds += self.link_latency_s(gpu) + samples * (tp - 1) / tp * shape.vocab * shape.element_bytes / rate
        if self.data > 1 and shape.experts:
            # vLLM's allgather_reducescatter: twice per layer, a rank exchanges tokens with every other replica
            layers, others = shape.experts.layers, self.data - 1
            seconds += 2 * layers * (self._small_s(gpu, self.data) + tokens * others * row / tp / rate)
        if hops:
            seconds += hops * (
                SEND_S + tokens * 2 * row / tp / rate
            )  # hidden states and the residual, split over the ranks
        return seconds


ALONE = Layout()
