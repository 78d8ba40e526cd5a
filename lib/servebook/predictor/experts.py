"""Weights in a step: dense matrices always, of a mixture's experts those that its tokens are routed to.

Each token of a step goes to k of E experts a layer. Taken as drawn alike, n tokens touch E·(1 − (1 − k/E)^n) of them;
a skewed router touches fewer, as if it had `expert_spread`·E to choose from (1: alike). An expert's rows are multiplied
by grouped kernels, the better the wider it is; they hide less of the reads than dense ones do:

    t = max(W/BW, F/R) + ω·min(W/BW, F/R), of the dense matrices and of the experts by themselves.

The experts' constants are priors' (see priors): they follow the tables of fused_moe that aiconfigurator 0.12 carries.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..hardware.catalog import Gpu
from ..model.shape import LINEAR, ModelShape

# rows that an 8-bit GEMM of vLLM's (CUTLASS, sm_90) multiplies beyond 128 come in tiles of so many: 129 to 256 rows
# take as long as 256 (measured on an H200 with vLLM 0.26, and the same in aiconfigurator's tables of H100 and H200)
EIGHT_BIT_TILE = 128
# and with 17 to 32 rows they read their weights no faster than so many bytes a second (283 MB: 98 µs on an H200, 72 µs
# with 16 rows and 79 with 48; on an H100, whose memory is slower, hardly a difference)
FEW_ROWS, FEW_ROWS_BYTES_PER_S = range(17, 33), 2.9e12


# of the rate of a 16-bit GEMM that kernels reach which unpack their weights as they multiply (Marlin and the like): on
# Ampere 4-bit checkpoints serve large batches 5 to 15 % slower than the same model in bf16
UNPACKING_SHARE = 0.72


def blend(read_s: float, multiply_s: float, loss: float) -> float:
    """The longer of the two, and what of the shorter it does not hide."""
    return max(read_s, multiply_s) + loss * min(read_s, multiply_s)


class WeightTimes:
    """Seconds that a rank's weights take of a step, for given constants (see priors)."""

    def __init__(self, shape: ModelShape, gpu: Gpu, constants: Mapping[str, float], ranks: int = 1) -> None:
        """ranks: replicas whose tokens all meet this rank's experts."""
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
                # of a token's choices, whichever replica's it is, those that fall to this rank's part of the experts
                self.expert_token_s += seconds * shape.expert_share / c.get("expert_matmul", 1.0)
            else:
                self.dense_token_s += seconds

    @staticmethod
    def _unpacks(gpu: Gpu, multiplies: str) -> bool:
        """Whether a card multiplies narrower weights in 16 bits: their format says so, or it has no narrower units."""
        narrow = {"fp8": gpu.fp8_tflops, "int8": gpu.int8_tflops, "fp4": gpu.fp4_tflops}
        return not gpu.is_cpu and not narrow.get(multiplies)

    def touched_share(self, met: float) -> float:
        """The share of a layer's experts that `met` tokens, of all replicas, are routed to."""
        if self.experts is None or not met:
            return 0.0
        chosen = min(self.experts.per_token / (self.experts.count * self.spread), 1.0)
        return float(self.spread * (1 - (1 - chosen) ** met))

    def experts_s(self, met: float) -> float:
        """Reading the experts that are touched, and multiplying them."""
        if self.experts is None:
            return 0.0
        return blend(self.all_experts_s * self.touched_share(met), met * self.expert_token_s, self.expert_loss)

    def read_s(self, tokens: float) -> float:
        """Reading all weights that a step of so many tokens of each replica meets."""
        return self.dense_read_s(tokens) + self.all_experts_s * self.touched_share(tokens * self.ranks)

    def dense_read_s(self, tokens: float) -> float:
        """Reading the dense matrices for so many tokens."""
        return self._few_rows_s if tokens in FEW_ROWS else self.dense_s

    def rows(self, tokens: float) -> float:
        """The rows that the dense GEMMs of so many tokens multiply."""
        if not self._tiled or tokens <= EIGHT_BIT_TILE:
            return tokens
        return -(-tokens // EIGHT_BIT_TILE) * EIGHT_BIT_TILE

    def multiply_s(self, tokens: float, samples: float = 0) -> float:
        """GEMMs of so many tokens of each replica in the layers, and of the LM head for so many samples."""
        dense = self.rows(tokens) * self.dense_token_s
        return dense + tokens * self.ranks * self.expert_token_s + samples * self.sample_s

    def step_s(self, tokens: float, samples: float, met: float | None = None) -> float:
        """Reads and GEMMs of a step together. met: tokens of all replicas; None: as many of each."""
        multiply = self.rows(tokens) * self.dense_token_s + samples * self.sample_s
        dense = blend(self.dense_read_s(tokens), multiply, self.loss)
        return dense + self.experts_s(tokens * self.ranks if met is None else met)
