"""vLLM's KV block pool: free blocks, eviction order, and the content of the prefix cache.

Follows `vllm/v1/core/block_pool.py` (0.32). Freed blocks with a hash go to the back of the free list, a request's last
block first. Blocks without a hash go to the front. New blocks are taken from the front, which evicts their content. A
hit removes a block from any place of the list. Two requests that compute the same block at once each keep a copy.

Only blocks that another request may hit are separate objects. A request's other blocks can be hit only by their owner
(the request itself after a preemption, or the next turn of its conversation). They form a run, of which only the length
is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

PromptSegments = Sequence[
    tuple[Hashable, int]
]  # the parts of a prompt: (stream of tokens, number of tokens from its start)


class Slot:
    """One entry of the prefix cache: a block of tokens after a given prefix, and the blocks that hold it."""

    __slots__ = ("block", "copies")

    def __init__(self) -> None:
        self.block: Block | None = None  # the block that a hit returns
        self.copies: list[Block] | None = None  # further blocks with the same tokens

    def add(self, block: Block) -> None:
        """Add a block that holds these tokens."""
        if self.block is None:
            self.block = block
        elif self.copies is None:
            self.copies = [block]
        else:
            self.copies.append(block)

    def remove(self, block: Block) -> None:
        """Remove an evicted block."""
        if self.block is block:
            self.block = self.copies.pop(0) if self.copies else None
        else:
            assert self.copies is not None
            self.copies.remove(block)


class Block:
    """A block that several requests may share. refs: number of requests that hold it; 0: it is in the free list."""

    __slots__ = ("refs", "slot")

    def __init__(self, slot: Slot) -> None:
        self.refs, self.slot = 1, slot


class _Node:
    """A stream of tokens after a given prefix: the slots of its blocks, and the streams that follow it."""

    __slots__ = ("following", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.following: dict[tuple[int, Hashable], _Node] = {}


class PrefixTree:
    """The slots of prompts by content: prompts with a common prefix get the same slots for it."""

    def __init__(self, block_size: int) -> None:
        self._size, self._root = block_size, _Node()

    def slots(self, segments: PromptSegments) -> list[Slot]:
        """One slot for each full block of these tokens."""
        node, at, out, size = self._root, 0, [], self._size
        for stream, tokens in segments:
            node = node.following.setdefault((at, stream), _Node())
            count = (at + tokens) // size - at // size  # blocks whose last token is in this stream
            if len(node.slots) < count:
                node.slots += [Slot() for _ in range(count - len(node.slots))]
            out += node.slots[:count]
            at += tokens
        return out


class _Run:
    """An entry of the free list: blocks that only their owner can hit, or no request."""

    __slots__ = ()


class BlockPool:
    """The free list. It is updated lazily, when its order matters: at a lookup, a hit and a release."""

    def __init__(self, blocks: int, caching: bool) -> None:
        self.free, self.caching = blocks, caching
        self._order: OrderedDict[Block | _Run, int] = OrderedDict({_Run(): blocks})  # {entry: its blocks}, front first
        self._runs: dict[Hashable, _Run] = {}  # {owner: the run that it can still hit}
        self._owners: dict[_Run, Hashable] = {}
        self._taken = 0  # blocks taken from the front, not yet applied to _order

    def take(self, blocks: int) -> None:
        """Take blocks from the front."""
        self.free -= blocks
        self._taken += blocks

    def _apply(self) -> None:
        n, self._taken, order = self._taken, 0, self._order
        while n > 0:
            key = next(iter(order))
            held = order[key]
            if held > n:
                order[key] = held - n
                return
            n -= held
            del order[key]
            if isinstance(key, Block):
                key.slot.remove(key)
            elif key in self._owners:
                del self._runs[self._owners.pop(key)]

    def found(self, slots: Sequence[Slot], usable: int, owner: Hashable) -> tuple[list[Block], int]:
        """(shared blocks from the prompt's start, number of blocks of its owner's run after them) that the cache
        holds, at most `usable` blocks in all."""
        if not self.caching:
            return [], 0
        self._apply()
        blocks: list[Block] = []
        for slot in slots[:usable]:
            if slot.block is None:
                return blocks, 0
            blocks.append(slot.block)
        run = self._runs.get(owner)
        return blocks, min(self._order[run], usable - len(blocks)) if run else 0

    def hold(self, blocks: Iterable[Block], run: int, owner: Hashable) -> None:
        """Remove blocks returned by `found` from the free list; the rest of the owner's run can no longer be hit."""
        order = self._order
        for block in blocks:
            if not block.refs:
                del order[block]
                self.free -= 1
            block.refs += 1
        if run:
            self.free -= run
            entry = self.forget(owner)
            assert entry is not None
            order[entry] -= run
            if not order[entry]:
                del order[entry]

    def forget(self, owner: Hashable) -> _Run | None:
        """Make the owner's run impossible to hit; its blocks stay in the free list. Returns the run, or None."""
        entry = self._runs.pop(owner, None)
        if entry is not None:
            del self._owners[entry]
        return entry

    def share(self, slot: Slot) -> Block:
        """A block in use that holds the slot's tokens, from now on visible to all requests."""
        block = Block(slot)
        slot.add(block)
        return block

    def release(self, blocks: Sequence[Block], hashed: int, others: int, owner: Hashable | None = None) -> None:
        """Free a request's blocks: shared ones, `hashed` of its own after them, and `others` without a hash. owner: who
        can hit the `hashed` ones again; None: no request."""
        if not self.caching:
            self.free += others + hashed
            self._taken -= others + hashed  # order is irrelevant
            return
        self._apply()
        order = self._order
        if others:
            self.free += others
            entry = next(iter(order), None)
            if entry is None or isinstance(entry, Block) or entry in self._owners:
                entry = _Run()
                order[entry] = others
                order.move_to_end(entry, last=False)
            else:
                order[entry] += others
        if hashed:
            self.free += hashed
            entry = next(reversed(order), None)
            if owner is not None:
                self.forget(owner)
                entry = self._runs[owner] = _Run()
                self._owners[entry] = owner
                order[entry] = hashed
            elif entry is None or isinstance(entry, Block) or entry in self._owners:
                order[_Run()] = hashed
            else:
                order[entry] += hashed
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                order[block] = 1
                self.free += 1
