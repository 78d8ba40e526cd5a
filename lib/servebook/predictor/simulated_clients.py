"""The load of a simulated point: closed and open loops in simulated time, and when it is over. Knows no server."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..common import latency
from ..config.points import OCCUPANCY_LOSS
from ..config.request_plan import Planned, RequestPlan
from .scheduler import Request

Prompt = Planned
# what a byte-level BPE takes a token of a text, on one thread: 3.5 to 4 us on two shared cores of an AMD EPYC on
# 2026-11-30 (texts of random tokens, 1,000 and 4,000 each), taken to be half of that on a GPU server's cores
TOKENIZE_S = 2e-6
KEPT = 20_000  # finished requests that are kept whole; of all others only what figures need


@dataclass(frozen=True)
class Traffic:
    """What the clients do. Closed loop: `concurrency` clients, each waiting gap + U(0, jitter) between its requests,
    the jitter held under jitter_cap of the mean latency as the real client does. Open loop: arrivals_s; concurrency
    caps what is in flight.

    prompts are taken in turn, those of a conversation one after the other by one client. The window opens with the
    `warmup`-th completion and closes with the `requests`-th after it or at max_seconds. A closed loop measures what
    completes in it, without draining; an open loop what arrives in it, and waits for the last while arrivals go on.
    Without enough arrivals its window ends with the last of them. finite: `requests` are sent and all are measured,
    from the first's start to the last's end.
    """

    prompts: Sequence[Planned]
    concurrency: int | None = None
    jitter_s: float = 0.0
    gap_s: float = 0.0
    jitter_cap: float = OCCUPANCY_LOSS
    arrivals_s: Sequence[float] | np.ndarray = ()
    warmup: int = 0
    requests: int = 100
    max_seconds: float = math.inf
    seed: int = 1  # of the jitter
    finite: bool = False
    text: bool = False  # prompts are texts, which the server turns into tokens one after the other

    @property
    def open(self) -> bool:
        """Whether requests arrive by themselves."""
        return len(self.arrivals_s) > 0 or self.concurrency is None

    @property
    def plan(self) -> RequestPlan | None:
        """The prompts as a plan that knows conversations."""
        return self.prompts if isinstance(self.prompts, RequestPlan) and self.prompts.talks else None


def seconds_of(r: Request, of: str) -> float | None:
    """Of a finished request: ttft_s, tpot_s (None of one token), e2e_s, queue_s (ready to scheduled), frontend_s; the
    first three from when it was due."""
    if of == "ttft_s":
        return r.first_s - r.due_s
    if of == "tpot_s":
        return latency.tpot_s(r.first_s, r.end_s, r.output_tokens)
    if of == "e2e_s":
        return r.end_s - r.due_s
    if of == "queue_s":
        return r.scheduled_s - r.ready_s
    return r.ready_s - r.sent_s


class MeasuredRequests:
    """The measured requests' times and tokens in the order they ended, as columns; the first ones as requests too."""

    TIMES = ("due_s", "sent_s", "ready_s", "scheduled_s", "first_s", "end_s")
    COUNTS = ("id", "prompt_tokens", "output_tokens", "cached_tokens")

    def __init__(self) -> None:
        self.kept: list[Request] = []
        self._times = [array("d") for _ in self.TIMES]
        self._counts = [array("q") for _ in self.COUNTS]

    def __len__(self) -> int:
        return len(self._counts[0])

    def add(self, r: Request) -> None:
        """Take a finished request."""
        if len(self.kept) < KEPT:
            self.kept.append(r)
        for column, name in zip(self._times, self.TIMES, strict=True):
            column.append(getattr(r, name))
        for counts, name in zip(self._counts, self.COUNTS, strict=True):
            counts.append(getattr(r, name))

    def column(self, name: str) -> np.ndarray:
        """A time or count of every request."""
        if name in self.TIMES:
            return np.array(self._times[self.TIMES.index(name)])
        return np.array(self._counts[self.COUNTS.index(name)])

    def values(self, of: str) -> np.ndarray:
        """As seconds_of, of every request that has it."""
        first, end = self.column("first_s"), self.column("end_s")
        if of == "tpot_s":
            tpots = latency.tpots_s(first, end, self.column("output_tokens"))
            return np.asarray(tpots[~np.isnan(tpots)])
        if of in ("ttft_s", "e2e_s"):
            return np.asarray((first if of == "ttft_s" else end) - self.column("due_s"))
        ready = self.column("ready_s")
        return np.asarray(self.column("scheduled_s") - ready if of == "queue_s" else ready - self.column("sent_s"))


class SimulatedClients:
    """Sends requests, follows their completions and says when the point is over."""

    def __init__(self, load: Traffic) -> None:
        self.load, self.rng, self.plan = load, random.Random(load.seed), load.plan
        self.due: list[tuple[float, int, Request]] = []  # (sent_s, id, request)
        self.measured = MeasuredRequests()
        self.open = load.open
        self.ended = self._sent = self._in_flight = self._conversations = 0
        self._e2e_sum = 0.0
        self.window_start = 0.0 if load.warmup == 0 or load.finite else math.nan
        self.window_end = math.inf
        self.last_s = 0.0
        self.over = False
        self._arrived, self._head = 0, -1  # of arrivals_s, so far; the newest of them, as long as it is not taken
        self._held = False  # the next arrival waits for another request's end: the cap is reached
        self._spans: list[tuple[float, float, int]] = []  # first_s, end_s, tokens of an open loop's requests
        self._window = 0  # arrivals in it
        if self.open:
            self._next_arrival()
            self.over = not self.due
        else:
            for client in range(load.concurrency or 0):
                self._begin(self.rng.uniform(0, load.jitter_s), client)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _begin(self, at: float, client: int) -> None:
        """A client starts on its next prompt, or conversation."""
        if self.plan is None:
            index: int | None = self._sent
        else:
            index = self.plan.begins(self._conversations)
            self._conversations += 1
        if index is not None and not (self.load.finite and self._sent >= self.load.requests):
            self._send(index, at, at, client)

    def _send(self, index: int, due: float, at: float, client: int) -> None:
        prompt = self.load.prompts[index % len(self.load.prompts)]
        r = Request(index, prompt.prompt_tokens, prompt.output_tokens, prompt.hit_tokens, client)
        if prompt.conversation is not None:
            r.conversation, r.last_turn = prompt.conversation, prompt.last_turn
        r.shared = prompt.shared
        r.due_s, r.sent_s = due, at
        heapq.heappush(self.due, (at, index, r))
        self._sent += 1
        self._in_flight += 1

    def _next_arrival(self, floor: float = 0.0) -> None:
        """The next request that arrives by itself; it is made when the one before it has been taken, or, where it has
        to wait for others to end, with their end (floor)."""
        times, plan, cap = self.load.arrivals_s, self.plan, self.load.concurrency
        while self._arrived < len(times):
            index = self._arrived
            if plan is not None and not plan.starts(index):
                self._arrived += 1
                continue
            if cap is not None and self._in_flight >= cap:
                self._held = True
                return
            self._arrived += 1
            self._head = index
            due = float(times[index])
            self._send(index, due, max(due, floor), 0)
            return

    def taken(self, r: Request) -> None:
        """The server has taken the request: the next arrival is on its way."""
        if r.id == self._head:
            self._head = -1
            self._next_arrival(r.sent_s)

    # --- ending -----------------------------------------------------------------------------------------------------

    def done(self, r: Request, at: float) -> None:
        load = self.load
        r.end_s = self.last_s = at
        self.ended += 1
        self._in_flight -= 1
        if self.open:
            self._opened(r, at)
            return
        if load.finite or self.ended > load.warmup:
            self.measured.add(r)
        elif self.ended == load.warmup:
            self.window_start = at
        self._e2e_sum += at - r.sent_s
        if len(self.measured) >= load.requests:
            self.over = True
            return
        jitter = min(load.jitter_s, load.jitter_cap * self._e2e_sum / self.ended)
        due = at + load.gap_s + self.rng.uniform(0, jitter)
        following = self.plan.follows(r.id) if self.plan is not None else None
        if following is None:
            self._begin(due, r.client)
        elif not (load.finite and self._sent >= load.requests):
            self._send(following, due, due, r.client)
        self.over = not self._in_flight

    def _opened(self, r: Request, at: float) -> None:
        """The open loop's rules, those of the real client."""
        load, times = self.load, self.load.arrivals_s
        if self.plan is not None and (following := self.plan.follows(r.id)) is not None and following < len(times):
            due = max(at, float(times[following]))  # a turn waits for the end of the one before
            self._send(following, due, due, 0)
        if self._held:
            self._held = False
            self._next_arrival(at)
        if load.finite:
            self.measured.add(r)
            self.over = self.ended == load.requests
            return
        self._spans.append((r.first_s, r.end_s, r.output_tokens))
        if self.ended == load.warmup:
            self.window_start = at
        if self.window_start <= r.due_s <= self.window_end:
            self.measured.add(r)
        if math.isinf(self.window_end) and len(self.measured) >= load.requests:
            self.window_end = at
            inside = np.searchsorted(times, (self.window_start, at))
            self._window = int(np.searchsorted(times, at, "right") - inside[0])
        closed = math.isfinite(self.window_end)
        self.over = self.ended == len(times) or (closed and len(self.measured) == self._window)

    def window(self) -> tuple[float, float, float, bool]:
        """(start, end, output tokens that arrived in between, whether all requests asked for were measured)"""
        start, end = self.window_start, self.last_s
        complete = len(self.measured) >= self.load.requests
        steady = self.open and not self.load.finite
        if steady:
            if math.isfinite(self.window_end):
                end = self.window_end
            elif self.over and len(self.load.arrivals_s):
                end, complete = float(self.load.arrivals_s[-1]), True
        start = end if math.isnan(start) else min(start, end)
        if steady:
            tokens = sum(_tokens(*span, start, end) for span in self._spans)
        else:
            tokens = float(self.measured.column("output_tokens").sum())
        return start, end, tokens, complete


def _tokens(first: float, last: float, output: int, start: float, end: float) -> float:
    """Output tokens of a finished request that arrived in [start, end], evenly spread after the first."""
    tokens = float(start <= first <= end)
    span = max(0.0, min(last, end) - max(first, start))
    return tokens + (span / (last - first) * (output - 1) if span else 0.0)
