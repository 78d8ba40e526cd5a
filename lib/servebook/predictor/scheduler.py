"""vLLM V1's scheduling decisions, step by step: the number of tokens for each request. Independent of time.

Follows `vllm/v1/core/sched/scheduler.py` (0.32). Each step goes through `running` in admission order, then through
`waiting` first come, first served. A request gets the minimum of the tokens that it needs and those left in the budget.
Admission reserves KV blocks for the whole prompt. Without a free block, the newest running request is preempted and
recomputed. With asynchronous scheduling, one batch is queued behind the running one, and a finished request counts as
running and keeps its blocks until its last step has been processed.

For speed, decodes advance in lockstep: their state is stored relative to a shared decode clock, so that the cost of a
step does not depend on their number. Steps that break the lockstep (a preemption, a budget too small for all decodes)
are processed request by request. One module, since it is one state machine.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .kv_blocks import Block, BlockPool, PrefixTree, PromptSegments, Slot

WAITING, PREFILL, DECODE, DRAINING, FINISHED = range(5)  # DRAINING: last token scheduled, but its step not processed


@dataclass(frozen=True)
class SchedulerConfig:
    """vLLM's names and defaults. kv_blocks: usable blocks, without vLLM's null block."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    kv_blocks: int = 1 << 20
    block_size: int = 16
    long_prefill_token_threshold: int = 0
    reserve_full_prompt: bool = True  # scheduler_reserve_full_isl
    async_scheduling: bool = True
    prefix_caching: bool = True

    @property
    def depth(self) -> int:
        """Maximum batches in flight: one running, and with asynchronous scheduling one queued behind it."""
        return 2 if self.async_scheduling else 1


class Request:
    """One request: prompt_tokens, output_tokens, hit_tokens (prompt tokens assumed to be in the prefix cache).

    If contents are known, the cache hits follow from them instead. shared: leading parts of the prompt that other
    prompts may share. conversation: its requests each begin with the whole of the one before.
    """

    __slots__ = (
        "base", "blocks", "cached_tokens", "client", "computed", "conversation", "delivered", "drained", "due_s",
        "end_s", "finish", "first_s", "hit_tokens", "id", "joined", "last_turn", "output_tokens", "preemptions",
        "prompt_tokens", "ready_s", "scheduled_s", "sent_s", "seq", "shared", "slots", "stale", "state", "target",
    )  # fmt: skip

    def __init__(self, id: int, prompt_tokens: int, output_tokens: int, hit_tokens: int = 0, client: int = 0) -> None:
        self.id, self.client = id, client
        self.shared: PromptSegments = ()
        self.slots: Sequence[Slot] = ()
        self.conversation: Hashable = None
        self.last_turn = True
        self.blocks: list[Block] = []  # the shared blocks that it holds
        self.cached_tokens = 0  # prompt tokens found in the prefix cache when it was first admitted
        self.prompt_tokens, self.output_tokens, self.hit_tokens = prompt_tokens, output_tokens, hit_tokens
        self.state = WAITING
        self.computed = 0  # tokens with KV, including scheduled ones (while decoding: base + clock)
        self.target = prompt_tokens  # tokens to compute before the next one is sampled
        self.delivered = 0  # output tokens processed (not updated while decoding)
        self.base = self.finish = self.seq = 0  # finish: the decode clock after its last step; seq: order of admission
        self.joined = self.drained = -1  # index of the step that finished its prefill, and of its last step
        self.stale = 0  # steps in flight that were scheduled before its preemption
        self.preemptions = 0
        self.due_s = self.sent_s = self.ready_s = self.scheduled_s = self.first_s = self.end_s = -1.0

    @property
    def owner(self) -> Hashable:
        """The key for reuse of its unshared cached blocks: itself (after a preemption), or its conversation."""
        return self if self.conversation is None else self.conversation


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass. chunks: [(request, new tokens, tokens computed before, whether it samples a token)]; decodes:
    number of requests that decode one token; kv_tokens: context tokens that these decodes read."""

    index: int
    decodes: int = 0
    kv_tokens: int = 0
    chunks: list[tuple[Request, int, int, bool]] = field(default_factory=list)
    finishing: list[Request] = field(default_factory=list)  # requests whose last token this step samples
    skipped: set[Request] | None = None  # decoding requests left out of this step
    stale: list[tuple[Request, bool]] | None = None  # requests preempted since: (request, whether it sampled a token)
    tokens: dict[int, int] | None = None  # {request id: tokens}, only when tracing

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks


class Scheduler:
    """vLLM's scheduler: `add` requests, `schedule` a step, and `update` it after it has run, in scheduling order."""

    def __init__(self, config: SchedulerConfig, trace: bool = False) -> None:
        self.config, self.trace = config, trace
        self.pool = BlockPool(config.kv_blocks, config.prefix_caching)
        self.contents = PrefixTree(config.block_size)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}  # in admission order
        self.prefilling: dict[Request, None] = {}
        self.inflight: deque[Step] = deque()
        self.clock = 0  # number of decode steps so far
        self.decodes = 0  # number of decoding requests
        self.preemptions = 0
        self._base_sum = 0
        self._residue = [0] * config.block_size  # decodes that need a new block when clock % block_size == i
        self._finish: list[tuple[int, int, Request]] = []
        self._index = self._seq = self._newest_decode = 0

    # -- lockstep decodes -------------------------------------------------------------------------------------------
    def _join(self, r: Request, step: Step) -> None:
        """Make r a decoding request from the next step on; this step samples its first new token."""
        self.prefilling.pop(r, None)
        r.joined = step.index
        left = r.output_tokens - r.delivered - 1
        if left <= 0:
            self._drain(r, step)
            return
        r.state = DECODE
        r.base = r.computed - self.clock
        r.finish = self.clock + left
        self.decodes += 1
        self._base_sum += r.base
        self._residue[-r.base % self.config.block_size] += 1
        self._newest_decode = max(self._newest_decode, r.seq)
        heapq.heappush(self._finish, (r.finish, r.seq, r))

    def _leave(self, r: Request) -> None:
        r.computed = r.base + self.clock
        self.decodes -= 1
        self._base_sum -= r.base
        self._residue[-r.base % self.config.block_size] -= 1

    def _drain(self, r: Request, step: Step) -> None:
        r.state, r.drained, r.delivered = DRAINING, step.index, r.output_tokens
        step.finishing.append(r)

    def _tick(self, step: Step) -> None:
        self.clock += 1
        heap = self._finish
        while heap and heap[0][0] <= self.clock:
            finish, _, r = heapq.heappop(heap)
            if r.state == DECODE and r.finish == finish:
                self._leave(r)
                self._drain(r, step)

    def next_finish(self) -> int:
        """The decode clock at which the next decoding request gets its last token."""
        heap = self._finish
        while heap and (heap[0][2].state != DECODE or heap[0][2].finish != heap[0][0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else self.clock

    def kv_tokens(self) -> int:
        """Context tokens that the decodes of the next step read."""
        return self._base_sum + self.decodes * (self.clock + 1)

    # -- public ------------------------------------------------------------------------------------------------------
    def add(self, r: Request) -> None:
        """Queue a request. Its shared prompt parts (r.shared) are looked up by content."""
        if r.shared and self.config.prefix_caching:
            r.slots = self.contents.slots(r.shared)
        self.waiting.append(r)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Step:
        """The next step, with the tokens of each request; it is empty if no request can run."""
        step = Step(self._index)
        self._index += 1
        config = self.config
        threshold = config.long_prefill_token_threshold if len(self.running) + len(self.waiting) > 1 else 0
        threshold = threshold or config.max_num_batched_tokens
        if self.trace:
            step.tokens = {}
        preempted = False
        plan = self._lockstep(threshold)
        if plan is None:
            left, preempted = self._walk(step, threshold)
        else:
            left = plan[1]
            step.decodes, step.kv_tokens = self.decodes, self.kv_tokens()
            if self.trace:
                step.tokens = {r.id: 1 for r in self.running if r.state == DECODE}
            if self.decodes:
                self.pool.take(self._residue[self.clock % config.block_size])
                self._tick(step)
            for r, new in plan[0]:
                self._chunk(r, new, step)
        if not preempted and left and self.waiting:
            self._admit(step, left, threshold)
        for r, _, _, samples in step.chunks:
            if samples:
                self._join(r, step)
        if not step.empty:
            self.inflight.append(step)
        return step

    def update(self, step: Step) -> list[Request]:
        """The requests that finish with a step that has run; frees their blocks and running slots."""
        if step.empty:
            return []
        assert self.inflight.popleft() is step
        for r, sampled in step.stale or ():
            r.stale -= 1
            r.delivered += sampled
        if len(step.finishing) > 1:
            step.finishing.sort(key=lambda r: r.seq)
        for r in step.finishing:
            if r.state == WAITING:  # preempted while its last token was in flight
                self.waiting.remove(r)
                if r.last_turn:
                    self.pool.forget(r.owner)
            else:
                del self.running[r]
                self._free(r, r.computed // self.config.block_size, None if r.last_turn else r.owner)
            r.state = FINISHED
        return step.finishing

    # -- pure decode, many steps at once -------------------------------------------------------------------------------
    def steady_steps(self) -> int:
        """Number of next steps that are certain to be decode-only with the same requests, unless a request arrives."""
        if self.prefilling or not self.decodes or len(self.inflight) != self.config.depth - 1:
            return 0
        if self.inflight and (self.inflight[0].finishing or self.inflight[0].chunks or self.inflight[0].stale):
            return 0
        if self.decodes != len(self.running) or self.decodes > self.config.max_num_batched_tokens:
            return 0
        if self.waiting:
            head = self.waiting[0]
            fits = head.stale or self._reserve(head, 0, *self._found(head)) <= self.pool.free
            if fits and len(self.running) < self.config.max_num_seqs:
                return 0
        enough = (self.pool.free - self.decodes) * self.config.block_size // self.decodes
        return min(self.next_finish() - self.clock - 1, enough)

    def skip(self, steps: int) -> None:
        """Advance by `steps` (at most steady_steps()) decode-only steps."""
        full, rest = divmod(steps, self.config.block_size)
        blocks = full * self.decodes
        for i in range(rest):
            blocks += self._residue[(self.clock + i) % self.config.block_size]
        self.pool.take(blocks)
        self.clock += steps
        self._index += steps
        if self.inflight:
            kv = self._base_sum + self.decodes * self.clock
            self.inflight[0] = Step(self._index - 1, self.decodes, kv)

    # -- decisions -----------------------------------------------------------------------------------------------------
    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _lockstep(self, threshold: int) -> tuple[list[tuple[Request, int]], int] | None:
        """(chunks, budget left) of the running requests; None unless every decode gets its token without preemption."""
        left = self.config.max_num_batched_tokens - self.decodes
        if left < 0:
            return None
        blocks = self._residue[self.clock % self.config.block_size] if self.decodes else 0
        chunks = []
        for r in self.prefilling:
            new = min(r.target - r.computed, threshold, left)
            if not new:
                break
            left -= new
            chunks.append((r, new))
            blocks += self._blocks(r.computed + new) - self._blocks(r.computed)
        if blocks > self.pool.free:
            return None
        if not left and self.prefilling and self.decodes and next(iter(self.prefilling)).seq < self._newest_decode:
            return None  # a prompt admitted before a decode may use up the budget before that decode's turn
        return chunks, left

    def _chunk(self, r: Request, new: int, step: Step) -> None:
        blocks = self._blocks(r.computed + new) - self._blocks(r.computed)
        if blocks:
            self.pool.take(blocks)
        step.chunks.append((r, new, r.computed, r.computed + new >= r.target))
        r.computed += new
        if len(r.blocks) < len(r.slots):
            for slot in r.slots[len(r.blocks) : r.computed // self.config.block_size]:
                r.blocks.append(self.pool.share(slot))
        if step.tokens is not None:
            step.tokens[r.id] = new

    def _walk(self, step: Step, threshold: int) -> tuple[int, bool]:
        """(budget left, whether any request was preempted) after vLLM's own loop over the running requests."""
        left, preempted = self.config.max_num_batched_tokens, False
        order, at = list(self.running), 0
        decoded: list[Request] = []
        prefills: list[tuple[Request, int]] = []
        while at < len(order) and left:
            r = order[at]
            if r.state == DRAINING:
                at += 1
                continue
            computed = r.base + self.clock if r.state == DECODE else r.computed
            new = 1 if r.state == DECODE else min(r.target - computed, threshold, left)
            blocks = self._blocks(computed + new) - self._blocks(computed)
            while blocks > self.pool.free:
                victim = order.pop()
                self._preempt(victim)
                preempted = True
                if victim is r:
                    break
            if r.state == WAITING:
                break
            left -= new
            if r.state == DECODE:
                self.pool.take(blocks)
                decoded.append(r)
            else:
                self._chunk(r, new, step)
                prefills.append((r, new))
            at += 1
        step.decodes = len(decoded)
        step.kv_tokens = sum(r.base + self.clock + 1 for r in decoded)
        if step.tokens is not None:
            step.tokens.update({r.id: 1 for r in decoded})
        if decoded:
            got = set(decoded)
            step.skipped = {r for r in self.running if r.state == DECODE and r not in got}
            for r in step.skipped:
                self._shift(r)
            self._tick(step)
        return left, preempted

    def _shift(self, r: Request) -> None:
        """Postpone r by one decode step, as it gets no token in this one."""
        size = self.config.block_size
        self._residue[-r.base % size] -= 1
        r.base -= 1
        self._residue[-r.base % size] += 1
        self._base_sum -= 1
        r.finish += 1
        heapq.heappush(self._finish, (r.finish, r.seq, r))

    def _in_step(self, r: Request, step: Step) -> tuple[bool, bool]:
        """(whether r is in this step, whether it samples a token there)."""
        for other, _, _, samples in step.chunks:
            if other is r:
                return True, samples
        if r.state == PREFILL or step.index <= r.joined or (step.skipped and r in step.skipped):
            return False, False
        there = r.state == DECODE or step.index <= r.drained
        return there, there

    def _preempt(self, r: Request) -> None:
        del self.running[r]
        self.prefilling.pop(r, None)
        if r.state == DECODE:
            self._leave(r)
            r.delivered = r.output_tokens - (r.finish - self.clock)
        late = 0  # 1 if its newest token is not hashed yet, which happens when its next step is scheduled
        for step in self.inflight:
            there, sampled = self._in_step(r, step)
            if there:
                late = int(r.state != PREFILL and step.index > r.joined)
                step.stale = [*(step.stale or ()), (r, sampled)]
                r.stale += 1
                r.delivered -= sampled
        known = r.prompt_tokens + r.delivered
        self._free(r, min(r.computed, known - late) // self.config.block_size, r.owner)
        r.state, r.computed = WAITING, 0
        r.target = r.prompt_tokens + r.delivered
        r.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(r)

    def _free(self, r: Request, hashed: int, owner: Hashable) -> None:
        total, shared = self._blocks(r.computed), len(r.blocks)
        if not self.config.prefix_caching:
            hashed = 0
        self.pool.release(r.blocks, hashed - shared if hashed else 0, total - hashed, owner)
        r.blocks = []

    def _found(self, r: Request) -> tuple[list[Block], int, int]:
        """The prompt's blocks in the prefix cache: (shared blocks, number of its own, number given by hit_tokens)."""
        usable = (r.target - 1) // self.config.block_size  # the last token is always computed
        if not self.config.prefix_caching:
            return [], 0, 0
        shared, own = self.pool.found(r.slots, usable, r.owner)
        return shared, own, min(r.hit_tokens // self.config.block_size, usable)

    def _reserve(self, r: Request, new: int, shared: list[Block], own: int, given: int) -> int:
        """Free blocks needed to admit the request: for `new` tokens beyond those found, or for the whole prompt."""
        size = self.config.block_size
        hits = len(shared) + own
        needed = self._blocks(r.target if self.config.reserve_full_prompt else max(hits, given) * size + new)
        return needed - sum(b.refs > 0 for b in shared)

    def _admit(self, step: Step, left: int, threshold: int) -> None:
        size, skipped = self.config.block_size, []
        while left and self.waiting and len(self.running) < self.config.max_num_seqs:
            r = self.waiting[0]
            if r.stale:  # its tokens from before the preemption are still in flight
                skipped.append(self.waiting.popleft())
                continue
            r.target = r.prompt_tokens + r.delivered
            shared, own, given = self._found(r)
            hits = max(len(shared) + own, given)
            new = min(r.target - hits * size, threshold, left)
            if self._reserve(r, new, shared, own, given) > self.pool.free:
                break
            self.pool.hold(shared, own, r.owner)
            self.pool.take(hits - len(shared) - own)
            self.waiting.popleft()
            self.running[r] = None
            self._seq += 1
            r.state, r.seq, r.computed, r.blocks = PREFILL, self._seq, hits * size, shared
            if not r.preemptions:
                r.cached_tokens = r.computed
            self.prefilling[r] = None
            self._chunk(r, new, step)
            left -= new
        for r in reversed(skipped):
            self.waiting.appendleft(r)
