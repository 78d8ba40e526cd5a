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

import numpy as np

from ..hardware.catalog import Gpu
from ..model.shape import LINEAR, ModelShape
from .awq_kernel import WHOLE_FROM, awq_kernel

# Rows whose time an 8-bit GEMM takes (CUTLASS on Hopper, one scale per token), for the rows that it has. Its tiles have
# 64, 128 or twice 128 rows, and a partly filled tile takes longer than a full one. From aiconfigurator 0.12's tables of
# vLLM 0.24, layers of Llama-3.1-8B: 2.8, 3.6, 2.9, 3.8, 3.3 ms for 16, 17, 64, 65, 128 rows, 5.6 and 4.3 for 129 and
# 256, 9.4 and 6.6 for 257 and 512. With 0.6 of the peak rate and 0.3 of the shorter of reads and GEMMs not hidden, one
# list serves the H200 and the H100 (3.4, 3.8, 3.5, 4.1, 3.9, 5.8, 4.8, 8.9, 7.0 ms). On an H200 with vLLM 0.26 the
# kernel alone agrees with it: 2.3, 3.1, 2.5, 3.3, 2.8, 5.0, 3.9 ms up to 256 rows
EIGHT_BIT_ROWS = {
    1: 1, 16: 16, 17: 191, 32: 167, 48: 121, 64: 113, 65: 207, 80: 182, 96: 171, 128: 166,
    129: 364, 160: 337, 192: 292, 224: 262, 256: 257,
}  # fmt: skip
# Beyond 256 rows: tiles of this many, of which the last one, filled with so many rows, takes so many rows' time more
# than a full one. Measured on an H200 (vLLM 0.26's kernel alone, layers of Llama-3.1-8B, 33 sizes up to 4,097 rows):
# 9.2 ms for 257 to 288 rows, 6.7 for 320, 5.5 for 480 and 512; 11.7, 10.7, 9.1, 8.6 for 576, 640, 704, 768; 10.1 and
# 17.5 for 1,024 and 1,025. The mean over the tiles is told in rows at 0.6 of the peak rate and 0.85 of the kernel's own
# clocks (a bf16 GEMM reaches 0.79 of the peak alone and 0.67 in a server). The tables of both cards have the same at
# one row
EIGHT_BIT_TILE = 256
LAST_TILE_ROWS = {1: 350, 64: 270, 128: 210, 192: 65, 224: 0}
GRAPH_STEP = 8  # vLLM's CUDA graphs pad decode steps to multiples of 8 sequences


# kernels that unpack weights during the multiplication (Marlin and similar) reach this fraction of a 16-bit GEMM's
# rate: on Ampere, 4-bit checkpoints serve large batches 5 to 15 % slower than the same model in bf16
UNPACKING_SHARE = 0.72


def _interpolated(rows: float, table: Mapping[int, int]) -> float:
    """The table's value for that many rows, linear between its entries and constant beyond them."""
    return float(np.interp(rows, list(table), list(table.values())))


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
        self.dense_s = shape.dense_read_bytes / bandwidth
        self._tiled = gpu.generation == "hopper" and shape.activation_quantization_bytes > 0
        self.all_experts_s = shape.expert_bytes / (bandwidth * c.get("expert_bandwidth", 1.0))
        self.sample_s = shape.lm_head_flops / (gpu.flops_per_s(shape.dtype) * share)
        self.dense_token_s = shape.activation_quantization_bytes / bandwidth
        self.expert_token_s = 0.0
        self._awq = awq_kernel(shape, gpu)
        if self._awq:
            packed = sum(m.stored_bytes for m in shape.matrices if m.part in LINEAR)
            self._other_read_s = (shape.dense_read_bytes - packed) / bandwidth
            self._whole_read_s = self._other_read_s + self._awq.whole_bytes / bandwidth
        for m in shape.matrices:
            if m.part not in LINEAR or not m.multiplies:
                continue
            seconds = 2 * m.parameters / (gpu.flops_per_s(m.multiplies) * share)
            smaller = m.stored_bytes < 0.75 * m.parameters * shape.element_bytes
            if smaller and not self._awq and self._unpacks(gpu, m.multiplies):
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
        return self.dense_s + self.all_experts_s * self.touched_share(tokens * self.ranks)

    def rows(self, tokens: float) -> float:
        """Rows whose time the dense GEMMs take for `tokens` tokens, partly filled tiles included."""
        if not self._tiled:
            return tokens
        if tokens <= EIGHT_BIT_TILE:
            padded = tokens if tokens <= GRAPH_STEP else -(-tokens // GRAPH_STEP) * GRAPH_STEP
            return _interpolated(padded, EIGHT_BIT_ROWS)
        full = -(-tokens // EIGHT_BIT_TILE) * EIGHT_BIT_TILE
        filled = tokens - (full - EIGHT_BIT_TILE)
        return full + _interpolated(filled, LAST_TILE_ROWS)

    def multiply_s(self, tokens: float, samples: float = 0) -> float:
        """Seconds of GEMMs at full tiles: the layers for `tokens` tokens per replica, the LM head for `samples`."""
        dense = tokens * self.dense_token_s
        return dense + tokens * self.ranks * self.expert_token_s + samples * self.sample_s

    def _dense_s(self, tokens: float, samples: float) -> float:
        """Seconds of the dense matrices' reads and GEMMs."""
        if self._awq and tokens < WHOLE_FROM:
            return self._awq.step_s(tokens) + blend(self._other_read_s, samples * self.sample_s, self.loss)
        multiply = self.rows(tokens) * self.dense_token_s + samples * self.sample_s
        if self._awq:
            return self._awq.unpack_s + blend(self._whole_read_s, multiply, self.loss)
        return blend(self.dense_s, multiply, self.loss)

    def step_s(self, tokens: float, samples: float, routed_tokens: float | None = None) -> float:
        """Seconds of reads and GEMMs of a step. routed_tokens None: every replica has `tokens`."""
        dense = self._dense_s(tokens, samples)
        return dense + self.experts_s(tokens * self.ranks if routed_tokens is None else routed_tokens)
