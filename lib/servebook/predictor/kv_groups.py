"""vLLM's KV cache layout: groups of layers that share a block table, and one pool of blocks for all groups.

Layers of one kind form one group. Different kinds (windows and full attention, states and KV) are split into groups
with the same number of layers, padded if necessary. A request takes blocks from each group: as many as its tokens need,
at most a window, or one or two for a state. Follows get_kv_cache_groups and get_max_concurrency_for_kv_cache_config of
vLLM 0.32 (vllm/v1/core/kv_cache_utils.py); a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..model.shape import AttentionLayers

LATENT_ALIGNMENT = 128  # models with latent attention and states: tokens per block are a multiple of this


@dataclass(frozen=True)
class Group:
    """Layers that share a block table. block: tokens per block; page: bytes per block and layer; window: tokens kept
    (None: all); blocks: a request's blocks, if their number does not depend on its length (states), else None."""

    layers: int
    block: int
    page: int
    window: int | None = None
    blocks: int | None = None

    def blocks_of(self, tokens: int, in_flight: int) -> int:
        """Maximum number of blocks of a request with `tokens` tokens. A window also holds the `in_flight` tokens."""
        if self.blocks is not None:
            return self.blocks
        if self.window is None:
            return -(-tokens // self.block)
        return -(-min(self.window - 1 + in_flight, tokens) // self.block) + 1


@dataclass(frozen=True)
class Pool:
    """A replica's blocks. in_flight: maximum tokens scheduled but not yet processed."""

    groups: tuple[Group, ...]
    blocks: int
    in_flight: int

    def blocks_of(self, tokens: int) -> int:
        """Blocks of a request with `tokens` tokens, over all groups."""
        return max(1, sum(g.blocks_of(tokens, self.in_flight) for g in self.groups))

    def concurrency(self, tokens: int) -> float:
        """Number of requests with `tokens` tokens that fit at once."""
        return self.blocks / self.blocks_of(tokens)

    def held(self, each: int) -> int:
        """Total tokens of the running requests that fit at once, with `each` tokens per request. Windows have freed the
        blocks that they have passed, so the tokens in flight count once for all requests. vLLM's log counts them for
        every request."""
        own = max(1, sum(g.blocks_of(each, 1) for g in self.groups))
        once = sum(-(-self.in_flight // g.block) for g in self.groups if g.window is not None)
        return max(self.tokens(each), int(max(self.blocks - once, 0) / own * each))

    def tokens(self, context: int) -> int:
        """Size in tokens as vLLM logs it: number of requests with `context` tokens that fit, times `context`."""
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
    """The KV pool of a rank with `available_bytes`. hybrid: whether blocks that a window has passed are freed (on a CPU
    vLLM keeps them)."""
    groups = grouped(kinds, block=block, hybrid=hybrid, prefix_caching=prefix_caching)
    if not groups:
        return Pool((), 1, in_flight)
    per_block = max(g.layers * g.page for g in groups)
    return Pool(groups, max(0, int(available_bytes // per_block)), in_flight)


def grouped(
    kinds: Sequence[AttentionLayers], *, block: int = 16, hybrid: bool = True, prefix_caching: bool = True
) -> tuple[Group, ...]:
    """The groups of a rank's layers. With chunked attention, blocks that a window has passed are not freed."""
    if any(a.kind == "chunked" for a in kinds) or not hybrid:
        whole = max((a.block for a in kinds if a.block and a.window is None), default=None)
        kinds = [replace(a, window=None, block=whole) if a.window and a.kind != "state" else a for a in kinds]
    states = [a for a in kinds if a.kind == "state"]
    cached = [a for a in kinds if a.kind != "state" and a.elements]
    if states and cached:
        block = _block_for_states(cached, states, block)
    specs = [Group(a.layers, a.block or block, _page(a, a.block or block), a.window) for a in cached]
    if any(a.block for a in cached):
        return _packed(specs)
    if not states:
        if len({g.window for g in specs}) <= 1:
            return _one(specs)
        return _split(_same_page(specs))
    each = 2 if prefix_caching else 1
    page = max((g.page for g in specs), default=0)
    specs += [Group(a.layers, block, max(a.state_bytes, page), None, each) for a in states]
    return _split(_same_page(specs)) if cached else _one(specs)


def _block_for_states(cached: Sequence[AttentionLayers], states: Sequence[AttentionLayers], block: int) -> int:
    """Tokens per block, such that a block of one layer's KV is at least as large as a state."""
    step = max(block, LATENT_ALIGNMENT) if any(a.kind == "latent" for a in cached) else block
    token = max(a.token_bytes for a in cached)
    return max(block, step * math.ceil(max(a.state_bytes for a in states) / (step * token)))


def _page(a: AttentionLayers, block: int) -> int:
    return a.alignment * math.ceil(round(block * a.token_bytes / a.alignment, 6))


def _packed(specs: Sequence[Group]) -> tuple[Group, ...]:
    """Groups for models whose layers prescribe their block sizes; a block holds the pages of all layers of a group side
    by side (_get_packed_kv_cache_groups). Layers with the same block and window form one group, or several where that
    keeps a block small."""
    kinds: dict[tuple[int, int | None], dict[int, int]] = {}
    for g in specs:
        pages = kinds.setdefault((g.block, g.window), {})
        pages[g.page] = pages.get(g.page, 0) + g.layers
    even = [pages for pages in kinds.values() if len(set(pages.values())) == 1]
    least = max((max(pages.values()) for pages in even if len(pages) > 1), default=0)
    size = _least_padding([max(pages.values()) for pages in even], least) if least else 0
    out = []
    for (block, window), pages in kinds.items():
        most = max(pages.values())
        parts = -(-most // size) if size and pages in even else 1
        for i in range(parts):
            layers = {p: n if parts == 1 else len(range(i, most, parts)) for p, n in pages.items()}
            out.append(Group(1, block, sum(p * n for p, n in layers.items()), window))
    return tuple(out)


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The group size, at least `least`, for which rounding every count up to a multiple adds the fewest layers; of
    several such sizes the largest."""
    return min(range(least, max(counts) + 1), key=lambda d: (sum(-n % d for n in counts), -d))


def _one(specs: Sequence[Group]) -> tuple[Group, ...]:
    """One group with all layers; pages of different sizes are concatenated."""
    if not specs:
        return ()
    layers = sum(g.layers for g in specs)
    total = sum(g.layers * g.page for g in specs)
    return (replace(specs[0], layers=1, page=total),) if len({g.page for g in specs}) > 1 else (
        replace(specs[0], layers=layers),
    )  # fmt: skip


def _same_page(specs: Sequence[Group]) -> list[Group]:
    """The groups with equal page sizes: more tokens per block if the largest size is a multiple, else padding."""
    page = max(g.page for g in specs)
    out = []
    for g in specs:
        if g.blocks is None and page % g.page == 0:
            out.append(replace(g, block=g.block * (page // g.page), page=page))
        else:
            out.append(replace(g, page=page))
    return out


def _split(specs: Sequence[Group]) -> tuple[Group, ...]:
    """Groups with equal numbers of layers: as many as the rarest kind has, or as the most common kind if that has fewer
    than 1.5 times as many."""
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
