"""Weights in a step: dense matrices always, of a mixture's experts those that its tokens are routed to.

Each token of a step goes to k of E experts a layer. Taken as drawn alike, n tokens touch E·(1 − (1 − k/E)^n) of them;
a skewed router touches fewer, as if it had `expert_spread`·E experts to choose from (1: alike). Experts are read by
grouped kernels that reach less of the bandwidth than dense ones, and multiplied in tiles: an expert that few rows go to
fills a tile all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..hardware.catalog import Gpu
from ..model.shape import LINEAR, ModelShape

TILE_ROWS = 16  # the smallest tile of rows that grouped kernels multiply (fused_moe's BLOCK_SIZE_M)


class WeightTimes:
    """Seconds that a rank's weights take of a step, for given constants (see priors)."""

    def __init__(self, shape: ModelShape, gpu: Gpu, constants: Mapping[str, float], ranks: int = 1) -> None:
        """ranks: of an expert-parallel group, whose tokens all meet here."""
        c = constants
        bandwidth = gpu.bytes_per_s * c["bandwidth_share"]
        self.dense_s = shape.dense_read_bytes / bandwidth
        self.experts = shape.experts
        self.ranks = ranks
        self.spread = c.get("expert_spread", 1.0)
        self.all_experts_s = shape.expert_bytes / (bandwidth * c.get("expert_bandwidth", 1.0))
        self.dense_token_s = self.expert_token_s = 0.0
        for m in shape.matrices:
            if m.part in LINEAR and m.multiplies:
                rate = gpu.flops_per_s(m.multiplies) * c["matmul_share"]
                if m.part == "experts" and shape.experts:
                    # a rank of an expert-parallel group holds a part of the experts and meets that part of all choices
                    self.expert_token_s += (
                        2 * m.parameters * shape.expert_share * ranks / rate / c.get("expert_matmul", 1.0)
                    )
                else:
                    self.dense_token_s += 2 * m.parameters / rate
        self.dense_token_s += shape.activation_quantization_bytes / bandwidth

    def touched_share(self, tokens: float) -> float:
        """The share of a layer's experts that so many tokens of every rank are routed to."""
        if self.experts is None:
            return 0.0
        choices = max(self.experts.per_token / (self.experts.count * self.spread), 0.0)
        met = 1 - (1 - min(choices, 1.0)) ** (tokens * self.ranks)
        return met * self.spread

    def experts_s(self, tokens: float) -> float:
        """Reading the experts that are touched."""
        return self.all_experts_s * self.touched_share(tokens) if self.experts else 0.0

    def read_s(self, tokens: float) -> float:
        """Reading all weights that a step of so many tokens meets."""
        return self.dense_s + self.experts_s(tokens)

    def multiply_s(self, tokens: float) -> float:
        """GEMMs of so many tokens in the layers. An expert's rows fill whole tiles of TILE_ROWS."""
        if self.experts is None:
            return tokens * self.dense_token_s
        routed = tokens * self.ranks * self.experts.per_token
        filled = self.experts.count * self.touched_share(tokens) * TILE_ROWS
        rows = max(routed, min(filled, routed * TILE_ROWS)) / (self.experts.per_token * self.ranks)
        return tokens * self.dense_token_s + rows * self.expert_token_s
