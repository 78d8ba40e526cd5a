"""A model spread over several GPUs: what each of them holds, and what they tell each other in a step.

Tensor parallel (tp): every matrix is split over tp ranks, which sum their results twice a layer, after O and after down
(Megatron-LM, arXiv:1909.08053), and once after the embedding, and gather the logits. Pipeline parallel (pp): the layers
are split into stages, which hand their activations on; pp batches are in flight, so each of pp groups of requests sees
one pass through all stages a token, and the groups share one KV pool. Data parallel (dp): replicas with requests and a
KV pool of their own. A group of requests (dp · pp of them) is simulated by itself, with its share of the load.
A mixture's experts are spread over all tp · dp ranks, whole ones with expert parallel, else a slice of each: replicas
then step together, gather each other's tokens before the experts of every layer and scatter the results after them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.errors import ServebookError
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape

# vLLM's custom all-reduce over NVLink, replayed in a graph: small messages in one shot (each rank reads what all
# others hold), larger ones in two (reduce a part each, then gather), and from CUSTOM_BYTES on NCCL's ring. Seconds of
# one of next to nothing by generation (4.3 to 4.8 µs on 2 to 8 H100 and H200, 4.9 to 5.7 on A100, 6.6 to 7.4 on
# B200); the second shot's; shares of the link's rate. NCCL's ring over PCIe: 6, 13 and 25 µs on 2, 4 and 8 L40S or
# RTX Pro 6000. From the measurements that aiconfigurator 0.12 carries (systems/data, vllm 0.14 to 0.24), which no
# model was run for.
NVLINK_LATENCY_S = {"hopper": 4.5e-6, "ampere": 5.3e-6, "blackwell": 7e-6}
PCIE_BASE_S, PCIE_HOP_S, SECOND_SHOT_S = 9e-6, 1.5e-6, 3e-6
ONE_SHOT_BYTES = {2: 8 << 20, 4: 512 << 10, 8: 256 << 10}
CUSTOM_BYTES = 8 << 20
NVLINK_SHARE = 0.62
# NCCL's ring over PCIe by ranks, large messages: RTX Pro 6000 0.30, 0.21 and 0.19 of the link; L40S 0.31, and 0.08 and
# 0.02 on four and eight, which sit on two sockets
PCIE_SHARES = {2: 0.31, 4: 0.20, 8: 0.15}
RING_SHARE, RING_BASE_S = {2: 0.80, 4: 1.15, 8: 1.25}, 10e-6  # of the custom kernel's share of the link
SEND_S = 10e-6  # from one stage to the next, beside the bytes (aiconfigurator's p2p_latency)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, under vLLM's own names for them."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False  # whole experts on each rank

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def groups(self) -> int:
        """Groups of requests that step by themselves."""
        return self.pipeline * self.data

    def check(self, shape: ModelShape, where: str = "engines") -> None:
        """Raises ServebookError where vLLM would refuse to split the model so."""
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
            if a.kind in ("state", "indexer"):
                continue
            if a.heads % tp or not (a.kv_heads % tp == 0 or tp % a.kv_heads == 0):
                return False
        if shape.experts and not self.expert and shape.experts.intermediate % (tp * self.data):
            return False
        return shape.intermediate % tp == 0

    def rank(self, shape: ModelShape) -> ModelShape:
        """What one rank of each stage holds and computes, over all stages. With fewer KV heads than ranks, one each."""
        return shape.rank(self.tensor, self.tensor * self.data if shape.experts else 1)

    def stage(self, shape: ModelShape) -> ModelShape:
        """One rank of the largest stage."""
        return self.rank(shape).stage(self.pipeline)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Weight bytes on the fullest GPU; of several stages the first holds the embedding, the last the LM head."""
        stage = self.stage(shape)
        if self.pipeline == 1:
            return stage.weight_bytes + stage.tower_bytes_beside
        ends = stage.embedding_bytes if stage.lm_head_parameters == 0 else stage.lm_head_bytes
        towers = sum(m.stored_bytes for m in stage.matrices if m.part == "tower") + stage.tower_bytes_beside
        layers = stage.weight_bytes - stage.embedding_bytes - (stage.lm_head_bytes if stage.lm_head_parameters else 0)
        return layers - (towers - stage.tower_bytes_beside) + max(stage.embedding_bytes + towers, ends)

    def kv_tokens(self, shape: ModelShape, bytes_per_gpu: float) -> int:
        """Tokens whose KV one replica holds where each of its GPUs has so many bytes for it."""
        return max(0, int(bytes_per_gpu // self.stage(shape).kv_bytes_per_token))

    def link_share(self, gpu: Gpu) -> float:
        """Of the link's rate, what large all-reduces between the ranks reach."""
        return NVLINK_SHARE if gpu.nvlink_gb_per_s else PCIE_SHARES[self._ranks]

    @property
    def _ranks(self) -> int:
        """Ranks of a stage, as the tables of all-reduces have them."""
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
        """Seconds of an all-reduce of so many bytes between the ranks of a stage. share: of the link's rate."""
        n = self.tensor
        if n == 1:
            return 0.0
        rate, latency = gpu.link_bytes_per_s * (share or self.link_share(gpu)), self.link_latency_s(gpu)
        ring = 2 * (n - 1) / n * size_bytes  # what a rank sends (nccl-tests' bus bandwidth)
        if not gpu.nvlink_gb_per_s:
            return latency + ring / rate
        step = self._ranks
        shots = [latency + (n - 1) * size_bytes / rate]
        if size_bytes > ONE_SHOT_BYTES[step]:
            shots = [latency + SECOND_SHOT_S + ring / rate]
        if size_bytes >= CUSTOM_BYTES:
            shots = [RING_BASE_S + ring / (rate * RING_SHARE[step])]
        return shots[-1]

    def talks(self, shape: ModelShape) -> bool:
        """Whether the GPUs of a replica, or of several that share their experts, talk to each other in a step."""
        return self.gpus > self.data or (self.data > 1 and shape.experts is not None)

    def exchange_s(self, shape: ModelShape, gpu: Gpu, tokens: int, samples: int, share: float | None = None) -> float:
        """Seconds that the GPUs of a replica talk to each other in a step of so many tokens, of which some are sampled:
        two all-reduces a layer and one after the embedding, a gather of the logits, and what stages hand on."""
        tp, hops, row = self.tensor, self.pipeline - 1, shape.hidden * shape.element_bytes
        rate = gpu.link_bytes_per_s * (share or self.link_share(gpu))
        seconds = 0.0
        if tp > 1:
            seconds += (2 * shape.layers + 1) * self.all_reduce_s(gpu, tokens * row, share)
            seconds += self.link_latency_s(gpu) + samples * (tp - 1) / tp * shape.vocab * shape.element_bytes / rate
        if self.data > 1 and shape.experts:
            # vLLM's allgather_reducescatter: a rank sends and receives every other replica's tokens, twice a layer
            layers, others = shape.experts.layers, self.data - 1
            seconds += 2 * layers * (self._small_s(gpu, self.data) + tokens * others * row / tp / rate)
        if hops:
            seconds += hops * (SEND_S + tokens * 2 * row / tp / rate)  # hidden states and the residual, each its part
        return seconds


ALONE = Layout()
