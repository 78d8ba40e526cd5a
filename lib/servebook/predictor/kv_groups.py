"""The KV cache as vLLM divides it: groups of layers that share block tables, blocks that all groups draw from one pool.

Layers that cache alike are one group. Unlike ones (windows beside full attention, states beside KV) are split into
groups of as many layers each, padded where they do not divide, and every request takes blocks for each group: as many
as its tokens need, a window's at most, one or two for a state. As vLLM 0.32's get_kv_cache_groups and
get_max_concurrency_for_kv_cache_config do (vllm/v1/core/kv_cache_utils.py); a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..model.shape import AttentionLayers

LATENT_ALIGNMENT = 128  # tokens that a block of a model with latent attention and states is a multiple of


@dataclass(frozen=True)
class Group:
    """Layers of one block table. block: tokens a block; page: bytes of a block of one layer; window: tokens that are
    kept (None: all); blocks: of a request whatever its length (states), else None."""

    layers: int
    block: int
    page: int
    window: int | None = None
    blocks: int | None = None

    def blocks_of(self, tokens: int, in_flight: int) -> int:
        """Blocks that a request of so many tokens holds at most; a window holds what is being computed, too."""
        if self.blocks is not None:
            return self.blocks
        if self.window is None:
            return -(-tokens // self.block)
        return -(-min(self.window - 1 + in_flight, tokens) // self.block) + 1


@dataclass(frozen=True)
class Pool:
    """A replica's blocks. in_flight: tokens that may be under way at once."""

    groups: tuple[Group, ...]
    bytes_per_block: int
    blocks: int
    in_flight: int

    def blocks_of(self, tokens: int) -> int:
        return max(1, sum(g.blocks_of(tokens, self.in_flight) for g in self.groups))

    def concurrency(self, tokens: int) -> float:
        """Requests of so many tokens that it holds at once."""
        return self.blocks / self.blocks_of(tokens)

    def tokens(self, context: int) -> int:
        """Its size in tokens as vLLM logs it: of requests as long as the longest context."""
        return int(self.concurrency(context) * context)


def pool(
    kinds: Sequence[AttentionLayers],
    available_bytes: float,
    *,
    block: int = 16,
    in_flight: int = 0,
    hybrid: bool = True,
    prefix_caching: bool = True,
) -> Pool:
    """The pool of a rank with so many bytes for it. hybrid: windows free what they left behind (not on a CPU, nor where
    attention is chunked)."""
    groups = grouped(kinds, block=block, hybrid=hybrid, prefix_caching=prefix_caching)
    if not groups:
        return Pool((), 1, 1, in_flight)
    per_block = max(g.layers * g.page for g in groups)
    return Pool(groups, per_block, max(0, int(available_bytes // per_block)), in_flight)


def grouped(
    kinds: Sequence[AttentionLayers], *, block: int = 16, hybrid: bool = True, prefix_caching: bool = True
) -> tuple[Group, ...]:
    """The groups of a rank's layers."""
    if any(a.kind == "chunked" for a in kinds) or not hybrid:
        kinds = [replace(a, window=None) if a.kind in ("chunked", "sliding") else a for a in kinds]
    states = [a for a in kinds if a.kind == "state"]
    cached = [a for a in kinds if a.kind != "state" and a.elements]
    if states and cached:
        block = _block_for_states(cached, states, block)
    specs = [Group(a.layers, block, math.ceil(block * a.token_bytes), a.window) for a in cached]
    if not states:
        if len({g.window for g in specs}) <= 1:
            return _one(specs)
        return _split(_same_page(specs))
    each = 2 if prefix_caching else 1
    page = max((g.page for g in specs), default=0)
    specs += [Group(a.layers, block, max(a.state_bytes, page), None, each) for a in states]
    return _split(_same_page(specs)) if cached else _one(specs)


def _block_for_states(cached: Sequence[AttentionLayers], states: Sequence[AttentionLayers], block: int) -> int:
    """Tokens a block, so many that a block of one layer's KV is no smaller than a state."""
    step = max(block, LATENT_ALIGNMENT) if any(a.kind == "latent" for a in cached) else block
    token = max(a.token_bytes for a in cached)
    return max(block, step * math.ceil(max(a.state_bytes for a in states) / (step * token)))


def _one(specs: Sequence[Group]) -> tuple[Group, ...]:
    """All layers in one group, pages of different sizes side by side."""
    if not specs:
        return ()
    layers = sum(g.layers for g in specs)
    total = sum(g.layers * g.page for g in specs)
    return (replace(specs[0], layers=1, page=total),) if len({g.page for g in specs}) > 1 else (
        replace(specs[0], layers=layers),
    )  # fmt: skip


def _same_page(specs: Sequence[Group]) -> list[Group]:
    """Blocks of the same bytes: more tokens a block where that divides, else padding."""
    page = max(g.page for g in specs)
    out = []
    for g in specs:
        if g.blocks is None and page % g.page == 0:
            out.append(replace(g, block=g.block * (page // g.page), page=page))
        else:
            out.append(replace(g, page=page))
    return out


def _split(specs: Sequence[Group]) -> tuple[Group, ...]:
    """Groups of as many layers as the rarest kind has, or as the commonest where that is not half as many again."""
    kinds: dict[Group, int] = {}
    for g in specs:
        key = replace(g, layers=0)
        kinds[key] = kinds.get(key, 0) + g.layers
    least, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * least else least
    out = []
    for key, layers in kinds.items():
        out += [replace(key, layers=size)] * -(-layers // size)
    return tuple(out)
