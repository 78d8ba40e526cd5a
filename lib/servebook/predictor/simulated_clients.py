"""The load of a simulated point: closed and open loops in simulated time, and when it is over. Knows no server."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..config.points import OCCUPANCY_LOSS
from .scheduler import Request


class Prompt(NamedTuple):
    """One kind of request; hit_tokens of it are found in the prefix cache."""

    prompt_tokens: int
    output_tokens: int
    hit_tokens: int = 0


@dataclass(frozen=True)
class Traffic:
    """What the clients do. Closed loop: `concurrency` clients, each waiting gap + U(0, jitter) between its requests,
    the jitter held under jitter_cap of the mean latency as the real client does. Open loop: arrivals_s.

    prompts are taken in turn. The window opens with the `warmup`-th completion and closes with the `requests`-th after
    it or at max_seconds. A closed loop measures what completes in it, without draining; an open loop what arrives in
    it, and waits for the last while arrivals go on. Without enough arrivals its window ends with the last of them.
    """

    prompts: Sequence[Prompt]
    concurrency: int | None = None
    jitter_s: float = 0.0
    gap_s: float = 0.0
    jitter_cap: float = OCCUPANCY_LOSS
    arrivals_s: Sequence[float] = ()
    warmup: int = 0
    requests: int = 100
    max_seconds: float = math.inf
    seed: int = 1  # of the jitter


def seconds_of(r: Request, of: str) -> float | None:
    """Of a finished request: ttft_s, tpot_s (None of one token), e2e_s, queue_s (ready to scheduled), frontend_s."""
    if of == "ttft_s":
        return r.first_s - r.sent_s
    if of == "tpot_s":
        return (r.end_s - r.first_s) / (r.output_tokens - 1) if r.output_tokens > 1 else None
    if of == "e2e_s":
        return r.end_s - r.sent_s
    if of == "queue_s":
        return r.scheduled_s - r.ready_s
    return r.ready_s - r.sent_s


def arrivals(kind: str, rate_per_s: float, count: int, seed: int, gamma_shape: float = 1.0) -> list[float]:
    """Arrival times of an open loop: poisson, constant, or gamma with a shape (1 = poisson, larger = more even)."""
    rng, at, out = random.Random(f"{kind}-{seed}"), 0.0, []
    for _ in range(count):
        if kind == "constant":
            at += 1 / rate_per_s
        elif kind == "gamma":
            at += rng.gammavariate(gamma_shape, 1 / (gamma_shape * rate_per_s))
        else:
            at += rng.expovariate(rate_per_s)
        out.append(at)
    return out


class Clients:
    """Sends requests, follows their completions and says when the point is over."""

    def __init__(self, load: Traffic) -> None:
        self.load, self.rng = load, random.Random(load.seed)
        self.due: list[tuple[float, int, Request]] = []  # (sent_s, id, request)
        self.measured: list[Request] = []
        self.finished: list[Request] = []  # of an open loop, measured or not
        self.ended = self._sent = self._arriving = 0
        self._e2e_sum = 0.0
        self.window_start = 0.0 if load.warmup == 0 else math.nan
        self.window_end = math.inf
        self.last_s = 0.0
        self.over = False
        if load.concurrency is None:
            for at in load.arrivals_s:
                self._send(at, 0)
            if not self.due:
                self.over = True
        else:
            for client in range(load.concurrency):
                self._send(self.rng.uniform(0, load.jitter_s), client)

    def _send(self, at: float, client: int) -> None:
        prompt = self.load.prompts[self._sent % len(self.load.prompts)]
        r = Request(self._sent, *prompt, client)
        r.sent_s = at
        heapq.heappush(self.due, (at, r.id, r))
        self._sent += 1

    def done(self, r: Request, at: float) -> None:
        load = self.load
        r.end_s = self.last_s = at
        self.ended += 1
        if load.concurrency is None:
            self._arrived(r, at)
            return
        if self.ended > load.warmup:
            self.measured.append(r)
        elif self.ended == load.warmup:
            self.window_start = at
        self._e2e_sum += at - r.sent_s
        if len(self.measured) >= load.requests:
            self.over = True
            return
        jitter = min(load.jitter_s, load.jitter_cap * self._e2e_sum / self.ended)
        self._send(at + load.gap_s + self.rng.uniform(0, jitter), r.client)

    def _arrived(self, r: Request, at: float) -> None:
        """The open loop's rules, those of the real client."""
        load, times = self.load, self.load.arrivals_s
        self.finished.append(r)
        if self.ended == load.warmup:
            self.window_start = at
        if self.window_start <= r.sent_s <= self.window_end:
            self.measured.append(r)
        if math.isinf(self.window_end) and len(self.measured) >= load.requests:
            self.window_end = at
            self._arriving = bisect_right(times, at) - bisect_left(times, self.window_start)
        closed = math.isfinite(self.window_end)
        self.over = self.ended == self._sent or (closed and len(self.measured) == self._arriving)

    def window(self) -> tuple[float, float, float, bool]:
        """(start, end, output tokens that arrived in between, whether all requests asked for were measured)"""
        start, end = self.window_start, self.last_s
        complete = len(self.measured) >= self.load.requests
        if self.load.concurrency is None:
            if math.isfinite(self.window_end):
                end = self.window_end
            elif self.over and self.load.arrivals_s:
                end, complete = self.load.arrivals_s[-1], True
        start = end if math.isnan(start) else min(start, end)
        if self.load.concurrency is None:
            tokens = sum(_tokens(r, start, end) for r in self.finished)
        else:
            tokens = float(sum(r.output_tokens for r in self.measured))
        return start, end, tokens, complete


def _tokens(r: Request, start: float, end: float) -> float:
    """Output tokens of a finished request that arrived in [start, end], evenly spread after the first."""
    tokens = float(start <= r.first_s <= end)
    span = max(0.0, min(r.end_s, end) - max(r.first_s, start))
    return tokens + (span / (r.end_s - r.first_s) * (r.output_tokens - 1) if span else 0.0)
