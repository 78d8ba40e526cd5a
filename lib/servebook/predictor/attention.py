"""Time of attention and recurrent states in a step, for each kind of layer: full, windowed, latent, state.

Decode: the longer of reading the KV cache (up to the layer's window) and multiplying it. In latent attention the
multiplication can dominate, since every head uses the same cached vector. In a step that also prefills, each decode
token occupies `mixed_rows` rows of a query tile. Prefill: the FLOPs of its query-context pairs. State-space and
linear-attention layers read and write one state per sequence and step, and have a fixed number of FLOPs per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.catalog import Gpu
from ..model.shape import AttentionLayers, ModelShape

# Upper limit of the rate at which FlashAttention-3 reads an fp8 cache, whatever the memory bandwidth: 64 × 4,096 tokens
# of 8 heads take 211 µs on an H100 and 192 µs on an H200 (aiconfigurator 0.12, generation_attention of vLLM 0.24)
FP8_KV_ELEMENTS_PER_S = 2.75e12
HOPPER_KV_SHARE = 0.91  # of the datasheet's bandwidth, of a 16-bit cache in the same tables


def kv_bytes_per_s(shape: ModelShape, gpu: Gpu, share: float) -> float:
    """Bytes/s at which decodes read their KV cache. share: fraction of the datasheet's bandwidth."""
    rate = gpu.bytes_per_s * share
    if gpu.generation != "hopper" or shape.kv_bytes_per_element != 1:
        return rate
    # the limit is of the same kernel: a share other than the tables' (see priors) moves both
    return min(rate, FP8_KV_ELEMENTS_PER_S * share / HOPPER_KV_SHARE)


@dataclass(frozen=True)
class _Kind:
    """Times of all layers of one kind together. read_s, decode_pair_s: for a decode to read, and to multiply, one
    context token. pair_s: per query-context pair of a prefill. state_read_s: per sequence and step."""

    layers: AttentionLayers
    read_s: float
    decode_pair_s: float
    pair_s: float
    state_read_s: float


class AttentionTimes:
    """Seconds of attention for one model on one GPU. bandwidth: bytes/s; flops_per_s: reached by attention kernels.
    decode_rows: query rows that a decode token occupies in a step without prefills (only on a CPU; 0: reading the
    cache bounds the time). mixed_rows: the same in a step with prefills."""

    def __init__(
        self, shape: ModelShape, bandwidth: float, flops_per_s: float, decode_rows: float, mixed_rows: float
    ) -> None:
        self.decode_rows, self.mixed_rows = decode_rows, mixed_rows
        self.kinds = tuple(
            _Kind(
                a,
                a.layers * a.token_bytes / bandwidth,
                2 * a.layers * a.heads * a.decode_dim / a.tokens_per_state / flops_per_s,
                2 * a.layers * a.heads * (a.key_dim + a.value_dim) / a.tokens_per_state / flops_per_s,
                2 * a.layers * a.state_bytes / bandwidth,
            )
            for a in shape.attention
        )
        self.kv_token_s = sum(k.read_s for k in self.kinds)
        self.pair_s = sum(k.pair_s for k in self.kinds)
        self.state_s = sum(k.state_read_s for k in self.kinds)  # per sequence and step
        self.state_token_s = shape.state_flops_per_token / flops_per_s
        self.decode_token_s = sum(self._token_s(k, decode_rows) for k in self.kinds)
        self.mixed_token_s = sum(max(self._token_s(k, decode_rows), mixed_rows * k.pair_s) for k in self.kinds)
        self._windowed = any(k.layers.limit for k in self.kinds)

    def _token_s(self, k: _Kind, rows: float) -> float:
        """Seconds per context token of a decode: the longer of reading and multiplying it."""
        if k.layers.kind in ("latent", "indexer"):
            return max(k.read_s, k.decode_pair_s)
        return max(k.read_s, rows * k.pair_s)

    def decode_line(self, decodes: int, kv_tokens: float) -> tuple[float, float]:
        """(a, b): attention in a decode-only step takes a + b · kv_tokens seconds, linearized at this kv_tokens."""
        fixed, slope = decodes * (self.state_s + self.state_token_s), self.decode_token_s
        if self._windowed and decodes:
            each = kv_tokens / decodes
            for k in self.kinds:
                if k.layers.limit and each > k.layers.limit:
                    own = self._token_s(k, self.decode_rows)
                    fixed += decodes * k.layers.limit * own
                    slope -= own
        return fixed, slope

    def decodes_s(self, decodes: int, kv_tokens: float, mixed: bool = False) -> float:
        """Seconds of the decodes' attention. mixed: whether the step also prefills."""
        states = decodes * (self.state_s + self.state_token_s)
        if not decodes or not self._windowed:
            return states + kv_tokens * (self.mixed_token_s if mixed else self.decode_token_s)
        each, total = kv_tokens / decodes, 0.0
        for k in self.kinds:
            own = self._token_s(k, self.decode_rows)
            total += k.layers.attended(each) * (max(own, self.mixed_rows * k.pair_s) if mixed else own)
        return states + decodes * total

    def read_s(self, decodes: int, kv_tokens: float) -> float:
        """Seconds that the decodes take to read their KV cache and states."""
        states = decodes * self.state_s
        if not decodes or not self._windowed:
            return states + kv_tokens * self.kv_token_s
        return states + decodes * sum(k.layers.attended(kv_tokens / decodes) * k.read_s for k in self.kinds)

    def prefill_s(self, before: int, new: int) -> float:
        """Seconds of attention for `new` prompt tokens that follow `before` earlier ones."""
        states = new * self.state_token_s + (self.state_s if new else 0.0)
        if not self._windowed:
            return states + self.pair_s * new * (before + (new + 1) / 2)
        pairs = sum(k.pair_s * k.layers.tokens_per_state * k.layers.pairs(before, new) for k in self.kinds)
        return states + pairs
