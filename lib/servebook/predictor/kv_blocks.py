"""The free list of vLLM's KV blocks, as far as it decides what a preempted request finds again. Knows no scheduling."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable


class BlockPool:
    """The free list of KV blocks. Its order matters only for what a preempted request finds again in the prefix cache:
    hashed blocks go to the back (evicted least recently used first, a request's tail first), others to the front."""

    def __init__(self, blocks: int, caching: bool) -> None:
        self.free, self.caching = blocks, caching
        self._order: deque[list] = deque([[None, blocks]])  # [owner, blocks]
        self._owned: dict[Hashable, list] = {}
        self._taken = 0  # blocks taken from the front, not yet applied to _order

    def take(self, blocks: int) -> None:
        self.free -= blocks
        self._taken += blocks

    def _apply(self) -> None:
        n, self._taken = self._taken, 0
        while n:
            head = self._order[0]
            used = min(n, head[1])
            n -= used
            head[1] -= used
            if not head[1]:
                self._order.popleft()
                if head[0] is not None and self._owned.get(head[0]) is head:
                    del self._owned[head[0]]

    def release(self, blocks: int, hashed: int, owner: Hashable | None = None) -> None:
        self.free += blocks
        if not self.caching:
            self._taken -= blocks  # order is irrelevant
            return
        self._apply()
        if blocks > hashed:
            if self._order and self._order[0][0] is None:
                self._order[0][1] += blocks - hashed
            else:
                self._order.appendleft([None, blocks - hashed])
        if not hashed:
            return
        if owner is not None:
            segment: list = [owner, hashed]
            self._owned[owner] = segment
            self._order.append(segment)
        elif self._order and self._order[-1][0] is None and len(self._order) > 1:
            self._order[-1][1] += hashed
        else:
            self._order.append([None, hashed])

    def cached(self, owner: Hashable) -> int:
        """Blocks of a preempted request that were not evicted meanwhile: a prefix of it."""
        if not self.caching:
            return 0
        self._apply()
        segment = self._owned.get(owner)
        return segment[1] if segment else 0

    def reclaim(self, owner: Hashable, blocks: int) -> None:
        segment = self._owned.pop(owner)
        segment[0] = None
        segment[1] -= blocks
        if not segment[1]:
            self._order.remove(segment)
        self.free -= blocks
