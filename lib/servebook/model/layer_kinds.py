"""One kind of decoder layer as vLLM caches it, and helpers to find a layer's weights and its configuration's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# a sparse latent vector in fp8_ds_mla: 512 elements in fp8, 64 in 16 bits, four scales (vLLM 0.26 to 0.32)
SPARSE_ELEMENTS, SPARSE_FP8_BYTES = 576, 656


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """`layers` identical layers. kind, as vLLM caches them: full, sliding, chunked, latent, indexer, compressor, state.

    Per pair of query and context token, heads × (key_dim + value_dim) elements are multiplied in a prefill and heads ×
    decode_dim in a decode (where latent attention works on the latent vector). elements: cached per token. window:
    tokens that the cache keeps. limit: maximum context tokens per query (a window, a chunk, or the top-k of an
    indexer). state_bytes: per sequence. tokens_per_state: tokens that share one cached entry. block: tokens per block
    of a layer that has blocks of its own, each padded to a multiple of `alignment` bytes."""

    kind: str
    layers: int
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decode_dim: int = 0
    elements: int = 0
    element_bytes: float = 2  # per cached element
    window: int | None = None
    limit: int | None = None
    state_bytes: int = 0
    tokens_per_state: int = 1
    state_flops: int = 0  # per token
    block: int | None = None
    alignment: int = 1
    split: bool = True  # whether tensor parallelism divides the cache; latent vectors are copied to every rank

    @property
    def token_bytes(self) -> float:
        """Cached bytes per token and layer."""
        return self.elements * self.element_bytes / self.tokens_per_state

    def attended(self, context_tokens: float) -> float:
        """Context tokens that one query attends to."""
        return min(context_tokens, self.limit) if self.limit else context_tokens

    def pairs(self, start: int, tokens: int) -> float:
        """Number of causal query-context pairs of query tokens start+1 … start+tokens."""
        return causal_pairs(start, tokens, self.limit) / self.tokens_per_state

    def with_fp8(self) -> AttentionLayers:
        """The same layers with an fp8 cache. Sparse latent attention then has DeepSeek's format fp8_ds_mla (Hopper)."""
        if self.kind in ("state", "indexer", "compressor") or self.block:
            return self
        return replace(self, element_bytes=SPARSE_FP8_BYTES / SPARSE_ELEMENTS if self.sparse_vectors else 1)

    @property
    def sparse_vectors(self) -> bool:
        """Whether these are latent vectors of 576 elements, of which a query reads those that an indexer chose."""
        return self.kind == "latent" and bool(self.limit) and self.elements == SPARSE_ELEMENTS and not self.block

    def rank(self, tensor: int) -> AttentionLayers:
        """The share of one of `tensor` tensor-parallel ranks. With fewer KV heads than ranks, each rank has one."""
        if tensor == 1:
            return self
        if self.kind == "state":
            return replace(self, state_bytes=-(-self.state_bytes // tensor), state_flops=self.state_flops // tensor)
        if not self.split:
            copied = self.kind in ("indexer", "compressor")
            return self if copied else replace(self, heads=max(1, self.heads // tensor))
        kv = max(1, self.kv_heads // tensor)
        elements = self.elements * kv // max(self.kv_heads, 1)
        return replace(self, heads=max(1, self.heads // tensor), kv_heads=kv, elements=elements)


def causal_pairs(start: int, tokens: int, limit: int | None) -> int:
    """sum of min(i, limit) over i = start+1 … start+tokens"""
    end = start + tokens
    if limit is None or end <= limit:
        return (end * (end + 1) - start * (start + 1)) // 2
    below = max(limit - start, 0)
    return causal_pairs(start, below, None) + (tokens - below) * limit


def ends(weights: Mapping[str, tuple[int, ...]], *endings: str) -> tuple[int, ...] | None:
    return next((s for e in endings for n, s in weights.items() if f".{n}".endswith(f".{e}")), None)


def number(text: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
