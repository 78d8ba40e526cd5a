"""Seconds of a step's weights: all dense matrices, and those experts that the step's tokens are routed to.

Each token is routed to k of E experts per layer. With uniform routing, n tokens touch E·(1 − (1 − k/E)^n) experts. A
skewed router touches fewer, as if it chose among `expert_spread`·E experts (1: uniform). Grouped kernels multiply the
experts' rows. They are faster the wider an expert is, and overlap less with the reads than dense kernels do:

    t = max(W/BW, F/R) + ω·min(W/BW, F/R), separately for the dense matrices and for the experts.

W: bytes of the weights that are read; BW: bandwidth; F: FLOPs; R: rate of the GEMMs; ω: fraction of the shorter that is
not hidden. The priors of the experts' constants (priors.py) follow the fused_moe tables in aiconfigurator 0.12.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..hardware.catalog import Gpu
from ..model.shape import LINEAR, ModelShape

# vLLM's 8-bit GEMMs (CUTLASS, sm_90) process more than 128 rows in tiles of this size: 129 to 256 rows take as long as
# 256 (measured on an H200 with vLLM 0.26, and the same in aiconfigurator's tables of H100 and H200)
EIGHT_BIT_TILE = 128
# with 17 to 32 rows these GEMMs read their weights at no more than this rate (283 MB: 98 µs on an H200, against 72 µs
# with 16 rows and 79 with 48; hardly a difference on an H100, whose memory is slower)
FEW_ROWS, FEW_ROWS_BYTES_PER_S = range(17, 33), 2.9e12


# kernels that unpack weights during the multiplication (Marlin and similar) reach this fraction of a 16-bit GEMM's
# rate: on Ampere, 4-bit checkpoints serve large batches 5 to 15 % slower than the same model in bf16
UNPACKING_SHARE = 0.72


def blend(read_s: float, multiply_s: float, loss: float) -> float:
    """Seconds of reads and multiplications that overlap except for the fraction `loss` of the shorter."""
    return max(read_s, multiply_s) + loss * min(read_s, multiply_s)


class WeightTimes:
    """Seconds of one rank's weights in a step, for given constants (see priors).

    Its methods' `tokens` are those of one replica, `routed_tokens` those of all data-parallel replicas, which share
    the experts."""

    def __init__(self, shape: ModelShape, gpu: Gpu, constants: Mapping[str, float], ranks: int = 1) -> None:
        """ranks: number of data-parallel replicas whose tokens are routed to this rank's experts."""
        c = constants
        bandwidth, share = gpu.bytes_per_s * c["bandwidth_share"], c["matmul_share"]
        self.experts, self.ranks = shape.experts, ranks
        self.loss, self.expert_loss = c["overlap_loss"], c.get("expert_overlap", c["overlap_loss"])
        self.spread = c.get("expert_spread", 1.0)
        self.dense_s = self._few_rows_s = shape.dense_read_bytes / bandwidth
        self._tiled = gpu.generation == "hopper" and shape.activation_quantization_bytes > 0
        if self._tiled:
            self._few_rows_s = max(self.dense_s, shape.dense_read_bytes / FEW_ROWS_BYTES_PER_S)
        self.all_experts_s = shape.expert_bytes / (bandwidth * c.get("expert_bandwidth", 1.0))
        self.sample_s = shape.lm_head_flops / (gpu.flops_per_s(shape.dtype) * share)
        self.dense_token_s = shape.activation_quantization_bytes / bandwidth
        self.expert_token_s = 0.0
        for m in shape.matrices:
            if m.part not in LINEAR or not m.multiplies:
                continue
            seconds = 2 * m.parameters / (gpu.flops_per_s(m.multiplies) * share)
            if m.stored_bytes < 0.75 * m.parameters * shape.element_bytes and self._unpacks(gpu, m.multiplies):
                seconds /= UNPACKING_SHARE
            if m.part == "experts":
                # per token of any replica: the share of its experts that this rank holds
                self.expert_token_s += seconds * shape.expert_share / c.get("expert_matmul", 1.0)
            else:
                self.dense_token_s += seconds

    @staticmethod
    def _unpacks(gpu: Gpu, multiplies: str) -> bool:
        """Whether a GPU multiplies quantized weights in 16 bits: the format requires it, or the GPU has no narrower
        units."""
        narrow = {"fp8": gpu.fp8_tflops, "int8": gpu.int8_tflops, "fp4": gpu.fp4_tflops}
        return not gpu.is_cpu and not narrow.get(multiplies)

    def touched_share(self, routed_tokens: float) -> float:
        """Share of a layer's experts that these tokens are routed to."""
        if self.experts is None or not routed_tokens:
            return 0.0
        chosen = min(self.experts.per_token / (self.experts.count * self.spread), 1.0)
        return float(self.spread * (1 - (1 - chosen) ** routed_tokens))

    def experts_s(self, routed_tokens: float) -> float:
        """Seconds of reading the touched experts and multiplying the tokens that are routed to them."""
        if self.experts is None:
            return 0.0
        return blend(
            self.all_experts_s * self.touched_share(routed_tokens),
            routed_tokens * self.expert_token_s,
            self.expert_loss,
        )

    def read_s(self, tokens: float) -> float:
        """Seconds of reading all weights for a step with `tokens` tokens per replica."""
        return self.dense_read_s(tokens) + self.all_experts_s * self.touched_share(tokens * self.ranks)

    def dense_read_s(self, tokens: float) -> float:
        """Seconds of reading the dense matrices for `tokens` tokens."""
        return self._few_rows_s if tokens in FEW_ROWS else self.dense_s

    def rows(self, tokens: float) -> float:
        """Rows that the dense GEMMs process for `tokens` tokens, with tile padding."""
        if not self._tiled or tokens <= EIGHT_BIT_TILE:
            return tokens
        return -(-tokens // EIGHT_BIT_TILE) * EIGHT_BIT_TILE

    def multiply_s(self, tokens: float, samples: float = 0) -> float:
        """Seconds of GEMMs: the layers for `tokens` tokens per replica, and the LM head for `samples` tokens."""
        dense = self.rows(tokens) * self.dense_token_s
        return dense + tokens * self.ranks * self.expert_token_s + samples * self.sample_s

    def step_s(self, tokens: float, samples: float, routed_tokens: float | None = None) -> float:
        """Seconds of reads and GEMMs of a step. routed_tokens None: every replica has `tokens`."""
        multiply = self.rows(tokens) * self.dense_token_s + samples * self.sample_s
        dense = blend(self.dense_read_s(tokens), multiply, self.loss)
        return dense + self.experts_s(tokens * self.ranks if routed_tokens is None else routed_tokens)
