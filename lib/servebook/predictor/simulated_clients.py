"""The clients of a simulated point: closed and open loops in simulated time, and the measurement window."""

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
# seconds per token of a byte-level BPE tokenizer on one thread: 3.5 to 4 µs on two shared cores of an AMD EPYC on
# 2026-11-30 (texts of 1,000 and 4,000 random tokens), assumed to be half of that on a GPU server's cores
TOKENIZE_S = 2e-6
KEPT = 20_000  # number of finished requests kept as objects; of the others only the columns are kept


@dataclass(frozen=True)
class Traffic:
    """The clients' load. Closed loop: `concurrency` clients, each pausing gap_s + U(0, jitter) between its requests,
    with the jitter limited to jitter_cap of the mean latency as in the real client. Open loop: arrivals_s; concurrency
    caps the requests in flight.

    Prompts are used in order; those of a conversation are sent one after the other by one client. The measurement
    window opens with the `warmup`-th completion and closes with the `requests`-th after it, or at max_seconds. A closed
    loop measures the requests that complete in the window, without draining. An open loop measures those that arrive in
    it, and waits for the last while arrivals continue. Without enough arrivals its window ends with the last one.
    finite: exactly `requests` are sent and all are measured, from the first start to the last end.
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
    seed: int = 1  # for the jitter
    finite: bool = False
    text: bool = False  # prompts are text, which the server tokenizes one after the other

    @property
    def open(self) -> bool:
        """Whether this is an open loop."""
        return len(self.arrivals_s) > 0 or self.concurrency is None

    @property
    def plan(self) -> RequestPlan | None:
        """The prompts as a plan with conversations; None if there are none."""
        return self.prompts if isinstance(self.prompts, RequestPlan) and self.prompts.has_conversations else None


class MeasuredRequests:
    """The measured requests' times and tokens as columns, in order of completion. kept: the first KEPT as objects."""

    TIMES = ("due_s", "sent_s", "ready_s", "scheduled_s", "first_s", "end_s")
    COUNTS = ("id", "prompt_tokens", "output_tokens", "cached_tokens")

    def __init__(self) -> None:
        self.kept: list[Request] = []
        self._times = [array("d") for _ in self.TIMES]
        self._counts = [array("q") for _ in self.COUNTS]

    def __len__(self) -> int:
        return len(self._counts[0])

    def add(self, r: Request) -> None:
        """Add a finished request."""
        if len(self.kept) < KEPT:
            self.kept.append(r)
        for column, name in zip(self._times, self.TIMES, strict=True):
            column.append(getattr(r, name))
        for counts, name in zip(self._counts, self.COUNTS, strict=True):
            counts.append(getattr(r, name))

    def column(self, name: str) -> np.ndarray:
        """A column: one time or count of every request."""
        if name in self.TIMES:
            return np.array(self._times[self.TIMES.index(name)])
        return np.array(self._counts[self.COUNTS.index(name)])

    def values(self, of: str) -> np.ndarray:
        """A time of every request: ttft_s, tpot_s (of requests with two or more output tokens), e2e_s, queue_s (ready
        to scheduled), or frontend_s. ttft_s and e2e_s count from the due time."""
        first, end = self.column("first_s"), self.column("end_s")
        if of == "tpot_s":
            tpots = latency.tpots_s(first, end, self.column("output_tokens"))
            return np.asarray(tpots[~np.isnan(tpots)])
        if of in ("ttft_s", "e2e_s"):
            return np.asarray((first if of == "ttft_s" else end) - self.column("due_s"))
        ready = self.column("ready_s")
        return np.asarray(self.column("scheduled_s") - ready if of == "queue_s" else ready - self.column("sent_s"))


class SimulatedClients:
    """Sends requests, follows their completions, and ends the point (`over`)."""

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
        self._arrived, self._head = 0, -1  # number of arrivals so far; index of the newest while the server lacks it
        self._held = False  # whether the next arrival waits for a completion, since the cap is reached
        self._spans: list[tuple[float, float, int]] = []  # first_s, end_s, tokens of an open loop's requests
        self._window = 0  # number of arrivals in the window
        self.received = 0  # output tokens that the server has sent so far, of finished and unfinished requests
        self._received_before = self._received_last = 0  # the same at the window's start and at the last completion
        if self.open:
            self._next_arrival()
            self.over = not self.due
        else:
            for client in range(load.concurrency or 0):
                self._begin(self.rng.uniform(0, load.jitter_s), client)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _begin(self, at: float, client: int) -> None:
        """Send a client's next prompt, or the first one of its next conversation."""
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
        """Create the next arrival, after the server has taken the one before. floor: earliest time to send it, if it
        had to wait for a completion."""
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
        """Note that the server has taken the request, and create the next arrival."""
        if r.id == self._head:
            self._head = -1
            self._next_arrival(r.sent_s)

    # --- ending -----------------------------------------------------------------------------------------------------

    def done(self, r: Request, at: float) -> None:
        """Note the completion of a request at `at`; a closed loop's client then sends its next one."""
        load = self.load
        r.end_s = self.last_s = at
        self._received_last = self.received
        self.ended += 1
        self._in_flight -= 1
        if self.open:
            self._opened(r, at)
            return
        if load.finite or self.ended > load.warmup:
            self.measured.add(r)
        elif self.ended == load.warmup:
            self.window_start, self._received_before = at, self.received
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
        """Handle a completion in an open loop, with the rules of the real client."""
        load, times = self.load, self.load.arrivals_s
        if self.plan is not None and (following := self.plan.follows(r.id)) is not None and following < len(times):
            due = max(at, float(times[following]))  # a turn waits for the one before to end
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
        """(start, end, output tokens received in between, whether all `requests` were measured) of the window."""
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
        elif self.load.finite:
            tokens = float(self.measured.column("output_tokens").sum())
        else:  # as the client counts: the tokens of requests that end in the window would be those of short answers
            tokens = float(self._received_last - self._received_before)
        return start, end, tokens, complete


def _tokens(first: float, last: float, output: int, start: float, end: float) -> float:
    """Output tokens of a finished request received in [start, end], assuming they are evenly spaced after the first."""
    tokens = float(start <= first <= end)
    span = max(0.0, min(last, end) - max(first, start))
    return tokens + (span / (last - first) * (output - 1) if span else 0.0)
