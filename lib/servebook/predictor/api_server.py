"""vLLM's API server: one core, an event loop in which new requests and the tokens of steps take turns."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple, Protocol

from .scheduler import Request
from .simulated_clients import TOKENIZE_S, SimulatedClients

# Turns of the loop from a request's first byte until it is sent to the engine: counted in vLLM 0.32, whose handlers
# wait for each other and for threads. With vLLM 0.26 the first requests after a pause reached the engine after 35 to
# 40 ms, while the loop sent a step's 64 events every 5.3 ms (two turns for each). Bounds: 10 to 16
PASSES = 14
CHUNK = 128
# what a token that is merged into another's event takes, in events: detokenizing it without JSON and a write. Of the
# main thread's samples at 256 clients 17 % were in process_outputs. Bounds: 0.1 to 0.3
MERGED = 0.2
# A thread that needs Python's interpreter lock waits this long for a thread that keeps it (sys.getswitchinterval's
# default). The tokenizer has a thread of its own and needs the lock twice, before and after its work outside Python
SWITCH_S = 0.005


# vLLM 0.10 to 0.23 (read in the wheels of 0.9.2, 0.10.0, 0.23.0 and 0.24.0) tokenizes prompts in batches: those that
# come within GATHER_S of the first one, or while the batch before is in the thread, at most GATHERED
# (AsyncMicrobatchTokenizer, vllm-project/vllm#19334 and #45759). A full loop notices the end of the wait, the end of
# the thread's work and its result one turn later each (GATHER_TURNS). Nothing of it is fitted
GATHER_S, GATHERED, GATHER_TURNS = 0.002, 32, 3


class RequestTimes(Protocol):
    """What the API server's core and the way to the engine take (seconds)."""

    event_s: float  # of the core per token event
    gathers_prompts: bool  # whether prompts are tokenized in batches

    def frontend(self, prompt_tokens: int) -> float:
        """Time before a request reaches the engine: HTTP, JSON, tokenizing, hashing."""

    def frontend_busy(self, prompt_tokens: int) -> float:
        """The part of frontend() that takes the API server's core."""

    def first_event(self, prompt_tokens: int) -> float:
        """Delay of the first token's event, which also takes the core."""

    def later_busy(self, prompt_tokens: int) -> float:
        """What else a request takes of the core, after its first token's event."""


class Outputs(NamedTuple):
    """`steps` equal steps' tokens, which are ready at `at` and then every `every` seconds; the requests among them
    whose first token or last token this is."""

    at: float
    tokens: int
    first: list[Request] = []  # noqa: RUF012
    last: list[Request] = []  # noqa: RUF012
    every: float = 0.0
    steps: int = 1


class ApiLoop:
    """The API server's event loop, which has one core. In each turn it does what was ready when the turn began:

    - The tokens of all steps that are ready, but not further than the next chunk of CHUNK tokens within a step
      (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE). If a request has several tokens, they become one event. So steps of up to CHUNK
      tokens merge and the loop keeps up with them; larger ones wait in a queue that grows, and nothing is merged.
    - One of the PASSES that each new request needs from its first byte to the engine. Requests that come together
      reach the engine together, and a full loop delays a request by as many turns.
    - Accepting one new connection (libuv from 1.45 on accepts no more in a turn).

    A step's prompts are last in its list of outputs, so that their first tokens are sent at the end of a turn.
    """

    def __init__(self, times: RequestTimes, clients: SimulatedClients) -> None:
        self.times, self.clients = times, clients
        self.clock = 0.0  # when the last turn ends
        self.outputs: deque[Outputs] = deque()
        self.ending = 0  # number of requests whose last token is among them
        self.sent = 0  # number of tokens of the first of the outputs that are sent
        self.dialing: deque[Request] = deque()  # requests whose connection is not accepted yet
        self.coming: list[tuple[float, int, Request]] = []  # (seconds of a pass, passes left, request)
        self.ready: list[tuple[float, int, Request]] = []  # heap of requests on their way to the engine, by arrival
        self.connections = self.inside = 0  # connections accepted so far; requests under way
        self.opens = clients.load.text  # our own client has opened its connections before
        self.turn_s = 0.0  # length of the last turn
        self.tokenizer_free = 0.0  # when the thread ends its batch
        self.gathered, self.gathered_end = 0, 0.0  # prompts of the next batch, and its end
        self.tokenize_s = TOKENIZE_S if clients.load.text else 0.0
        self.due = clients.due

    def put(self, outputs: Outputs) -> None:
        """Take the tokens of steps, in the order of steps."""
        self.outputs.append(outputs)
        self.ending += len(outputs.last)

    def next_turn(self) -> float:
        """When the next turn starts; infinite if there is nothing to do."""
        if self.coming or self.dialing:
            return self.clock
        at = self.outputs[0].at if self.outputs else math.inf
        if self.due and self.due[0][0] < at:
            at = self.due[0][0]
        return max(at, self.clock)

    def quiet_until(self) -> float:
        """A time before which no further request reaches the engine."""
        if self.coming or self.dialing:
            return self.clock
        at = self.ready[0][0] if self.ready else math.inf
        if self.due:
            at = min(at, max(self.due[0][0], self.clock))
        return min(at, self.clock) if self.ending else at

    def run(self, until: float, idle: bool) -> None:
        """Do all turns that start by `until`. idle: the engine has nothing to do, so go on until a request is ready."""
        while not self.clients.over:
            start = self.next_turn()
            if start > until and (not idle or self.ready or math.isinf(start)):
                return
            self._turn(start, max(start, until))

    def _turn(self, start: float, until: float) -> None:
        """Do one turn. until: a series of equal steps is advanced as far as that."""
        start = self._series(start, until)
        events, work, first, last = self._events(start)
        sending = work * self.times.event_s
        end = start + sending
        while self.due and self.due[0][0] <= start:
            self._connect(heapq.heappop(self.due)[2])
        if self.dialing:
            self._begin(self.dialing.popleft())
        if self.coming:
            end = self._pass(start + sending / 2, end, events)
        for r in first:
            late = self.times.first_event(r.prompt_tokens)
            end += late + self.times.later_busy(r.prompt_tokens)
            if r.first_s < 0:
                r.first_s = start + sending + late
        self.clock, self.turn_s = end, end - start
        self.ending -= len(last)
        self.inside -= len(last)
        for r in last:
            self.clients.done(r, max(start + sending / 2, r.first_s))

    def _series(self, start: float, until: float) -> float:
        """Advance at once over equal steps, during which no request comes, but for one of them. Returns when the turn
        with that one starts."""
        if not self.outputs or (o := self.outputs[0]).steps == 1:
            return start
        count, tokens, every = o.steps, o.tokens, o.every
        if self.coming or self.dialing:
            steps = 1
        else:
            limit = min(until, self.due[0][0]) if self.due else until
            work = tokens * self.times.event_s if tokens > CHUNK else 0.0
            every = max(every, work)
            begin = start if work >= o.every else o.at
            steps = count if math.isinf(limit) else min(count, max(1, int((limit - begin) / every) + 1))
            start = max(start + (steps - 1) * work, o.at + (steps - 1) * o.every)
            self.clients.received += (steps - 1) * tokens
        at = o.at + (steps - 1) * o.every
        self.outputs[0] = Outputs(at, tokens)
        if count > steps:
            self.outputs.insert(1, Outputs(at + o.every, tokens, every=o.every, steps=count - steps))
        return start

    def _events(self, start: float) -> tuple[int, float, list[Request], list[Request]]:
        """(events of a turn that starts at `start`, the same with what merged tokens cost besides, requests whose first
        token and whose last token they carry)."""
        outputs = self.outputs
        events = merged = small = 0
        first: list[Request] = []
        last: list[Request] = []
        while outputs and outputs[0].at <= start:
            o = outputs[0]
            if o.steps > 1:
                self._series(start, start)
                continue
            left = o.tokens - self.sent
            if left > CHUNK:
                events += CHUNK
                self.sent += CHUNK
                break
            outputs.popleft()
            self.sent = 0
            self.clients.received += o.tokens
            if o.tokens > CHUNK:
                events += left
            else:
                merged += min(small, o.tokens)
                small = max(small, o.tokens)
            first += o.first
            last += o.last
        events += small
        return events, events + MERGED * merged, first, last

    def _connect(self, r: Request) -> None:
        """A request is sent: over an open connection, or else over one that the loop has to accept first."""
        self.clients.taken(r)
        self.inside += 1
        if self.inside <= self.connections or not self.opens:
            self._begin(r)
        else:
            self.connections += 1
            self.dialing.append(r)

    def _begin(self, r: Request) -> None:
        self.coming.append((self.times.frontend_busy(r.prompt_tokens) / PASSES, PASSES, r))

    def _pass(self, at: float, end: float, events: int) -> float:
        """Let each new request do its next pass, beginning at `at`; returns when the turn ends. A lone request in an
        idle loop does them all. Without chunks to wait for, the loop has two turns for each step that it sends: it
        processes in one and sends in the other."""
        passes = 2 if 0 < events <= CHUNK else 1
        if not events and len(self.coming) == 1 and not self.dialing:
            passes = PASSES
        left = []
        for pass_s, passes_left, r in self.coming:
            now = min(passes, passes_left)
            at += now * pass_s
            end += now * pass_s
            if passes_left > now:
                left.append((pass_s, passes_left - now, r))
            else:
                self._through(r, at, len(left) > 0)
        self.coming = left
        return end

    def _through(self, r: Request, at: float, more: bool) -> None:
        """The loop has sent the request to the engine. more: the loop has other requests to do next."""
        if self.tokenize_s:
            full = more or bool(self.dialing) or bool(self.outputs and self.outputs[0].at <= at)
            at = self._tokenized(at, self.tokenize_s * r.prompt_tokens, full)
        r.ready_s = at + self.times.frontend(r.prompt_tokens) - self.times.frontend_busy(r.prompt_tokens)
        heapq.heappush(self.ready, (r.ready_s, r.id, r))

    def _tokenized(self, at: float, seconds: float, full: bool) -> float:
        """When the tokens of a prompt that takes `seconds` are there. full: the loop has other work."""
        locked = 2 * SWITCH_S if full else 0.0
        if not self.times.gathers_prompts:
            self.tokenizer_free = max(self.tokenizer_free, at) + locked + seconds
            return self.tokenizer_free
        locked += GATHER_TURNS * self.turn_s if full else GATHER_S
        if self.gathered == GATHERED or (self.gathered and at >= self.tokenizer_free):
            self.tokenizer_free, self.gathered = self.gathered_end, 0  # this prompt does not join it
        if at >= self.tokenizer_free:
            self.tokenizer_free = at + locked + seconds
            return self.tokenizer_free
        if not self.gathered:
            self.gathered_end = self.tokenizer_free + locked
        self.gathered += 1
        self.gathered_end += seconds
        return self.gathered_end
