"""Clients against a simulated server, in simulated time: vLLM's engine loop, its API server, and the naive FIFO.

Deterministic for a seed. Stretches of pure decode, where nothing arrives and nothing ends, are taken in one go: a
decode step is linear in the context tokens that it reads, so many of them have a closed form.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .clients import Clients, Load, value
from .power import Power
from .scheduler import Request, Scheduler, SchedulerConfig, Step


class StepTimes(Protocol):
    """What the loop asks of a step-time model (seconds)."""

    def decode(self, decodes: int, kv_tokens: int) -> tuple[float, float]:
        """(a, b): a pure decode step takes a + b · kv_tokens."""

    def mixed(self, step: Step) -> tuple[float, float]:
        """What the GPU takes for a step that also prefills, and its power as a share of the board's cap."""

    def decode_draw(self, decodes: int, kv_tokens: float, seconds: float) -> float:
        """The power of a pure decode step, likewise."""

    def slowdown(self, drawn: float) -> float:
        """By how much a step that prefills is slower where so much power was drawn of late."""

    prepare_s: float  # what the host takes before any step's first kernel: scheduling it, preparing its inputs

    def launch(self, tokens: int) -> float:
        """What it then takes to launch one that prefills, of so many tokens; the engine does nothing else meanwhile."""

    event_s: float  # what the API server takes to pass a token on

    def frontend(self, prompt_tokens: int) -> float:
        """HTTP, JSON, tokenizing and hashing before a request reaches the engine."""

    def first_event(self, prompt_tokens: int) -> float:
        """By how much the event of a first token is late."""


class LogEntry(NamedTuple):
    """`steps` equal steps: decodes each, their mean kv_tokens, (request id, new, before, samples) chunks, the end, and
    the seconds lost to the power cap."""

    steps: int
    decodes: int
    kv_tokens: float
    chunks: tuple[tuple[int, int, int, bool], ...]
    end_s: float
    capped_s: float = 0.0


@dataclass
class Result:
    """Measured requests in the order they ended, and the window's figures. running_mean and waiting_mean are what
    vLLM's gauges show: set when a step has been processed, so a request is not in them before a step has ended."""

    requests: list[Request]
    window: tuple[float, float]
    wall_s: float
    running_mean: float
    waiting_mean: float
    output_tokens: float  # that arrived in the window
    preemptions: int = 0
    complete: bool = True  # every request that was asked for was measured
    log: list[LogEntry] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.window[1] - self.window[0]

    def mean(self, of: str) -> float:
        """Mean over requests of ttft_s, tpot_s, e2e_s, queue_s (ready → first scheduled) or frontend_s."""
        values = [v for r in self.requests if (v := value(r, of)) is not None]
        return sum(values) / len(values) if values else math.nan


class _ApiLoop:
    """The API server's one event loop: every token of a step is an event of event_s. A loop that has not finished
    with a step when the next one's tokens come is saturated: vLLM then merges a request's tokens into one event, so it
    falls no further behind, and a request, which takes PASSES turns of the loop, waits a step's events at each.
    Found on the H200 run of 2026-11-29: from 100 running requests on, events carried 1.2 to 1.3 tokens.
    """

    PASSES = 4

    def __init__(self, event_s: float) -> None:
        self.event_s = event_s
        self.turns: deque[tuple[float, float, float, bool]] = deque(maxlen=16)  # (at, over, its length, saturated)

    def events(self, tokens: int, at: float) -> float:
        """A step's tokens arrive: when the clients have theirs, on average."""
        turn, free = tokens * self.event_s, self.turns[-1][1] if self.turns else 0.0
        begun = min(max(free, at), at + turn)
        self.turns.append((at, begun + turn, turn, free > at))
        return begun + turn / 2

    def wait(self, sent: float) -> float:
        """Seconds that a request waits for the loop."""
        for at, over, turn, saturated in reversed(self.turns):
            if at <= sent:
                return self.PASSES * turn if saturated else max(0.0, over - sent)
        return 0.0


def _result(clients: Clients, wall_s: float, gauge: list[tuple[float, int, int]], **more: Any) -> Result:
    start, end, tokens, complete = clients.window()
    running, waiting = _time_means(gauge, start, end)
    return Result(clients.measured, (start, end), wall_s, running, waiting, tokens, complete=complete, **more)


def _time_means(gauge: list[tuple[float, int, int]], start: float, end: float) -> tuple[float, float]:
    """Means over [start, end] of two step functions given as (since, value, value)."""
    if end <= start:
        return 0.0, 0.0
    running = waiting = 0.0
    last = (0.0, 0, 0)
    for entry in [*gauge, (end, 0, 0)]:
        span = max(0.0, min(entry[0], end) - max(last[0], start))
        running += last[1] * span
        waiting += last[2] * span
        last = entry
    return running / (end - start), waiting / (end - start)


def simulate(config: SchedulerConfig, times: StepTimes, load: Load, *, skip: bool = True, log: bool = False) -> Result:
    """vLLM's engine loop: take in requests, schedule, and with asynchronous scheduling only then wait for the step
    before. skip=False takes every step singly (same result, slower). Raises ValueError for a prompt over the pool."""
    for p in load.prompts:
        if -(-(p.prompt_tokens + p.output_tokens - 1) // config.block_size) > config.kv_blocks:
            raise ValueError("a request needs more KV blocks than there are")
    clients, scheduler, depth = Clients(load), Scheduler(config), config.depth
    queue: deque[tuple[Step, float]] = deque()
    ready: list[tuple[float, int, Request]] = []  # requests past the front end
    entries: list[LogEntry] = []
    gauge = [(0.0, 0, 0)]
    waited: set[int] = set()
    frontend_free = now = gpu_free = 0.0
    power = Power()
    frontend, due, loop, prepare = times.frontend, clients.due, _ApiLoop(times.event_s), times.prepare_s

    while not clients.over and now <= load.max_seconds:
        while due and (due[0][0] <= now or not ready):
            sent, _, r = heapq.heappop(due)
            frontend_free = max(frontend_free, sent) + frontend(r.prompt_tokens)
            r.ready_s = frontend_free
            heapq.heappush(ready, (r.ready_s, r.id, r))
        while ready and ready[0][0] <= now:
            r = heapq.heappop(ready)[2]
            if r.id not in waited and (wait := loop.wait(r.sent_s)):
                waited.add(r.id)
                r.ready_s += wait
                heapq.heappush(ready, (r.ready_s, r.id, r))
            else:
                scheduler.add(r)
        if scheduler.has_work:
            if skip and (steady := scheduler.steady_steps()) > 1:
                upcoming = ready[0][0] if ready else math.inf
                if due and due[0][0] < upcoming:
                    upcoming = due[0][0]  # it is not ready before it is sent
                n, decodes, kv = scheduler.decodes, scheduler.decodes, scheduler.kv_tokens()
                a, b = times.decode(decodes, kv)
                first, grow = a + b * kv + (prepare if depth == 1 else 0.0), b * n
                start = max(gpu_free, now + (prepare if depth == 2 else 0.0))
                steps = min(steady, _steps_before(upcoming - start, first, grow) + depth)
                if upcoming <= start:
                    steps = 0
                if steps > 1:
                    scheduler.skip(steps)
                    gpu_free = start + _sum(steps, first, grow)
                    power.step(times.decode_draw(n, kv, first), start, gpu_free)
                    now = start + _sum(steps - 1, first, grow) if depth == 2 else gpu_free
                    if log:
                        entries.append(LogEntry(steps, decodes, kv + n * (steps - 1) / 2, (), gpu_free))
                    for back in range(min(steps, 4) - 1, -1, -1):  # enough to see whether the loop keeps up
                        loop.events(n, now - back * (first + grow * (steps - 1)))
                    if depth == 2:
                        queue[0] = (scheduler.inflight[0], gpu_free)
                    continue
            step = scheduler.schedule()
            if step.empty:
                end = max(now, queue[-1][1]) if queue else now
            else:
                now += prepare
                start = max(gpu_free, now)
                if step.chunks:
                    tokens = step.decodes
                    for r, new, _, _ in step.chunks:
                        tokens += new
                        if r.scheduled_s < 0:
                            r.scheduled_s = start
                    now += times.launch(tokens)  # hidden as far as the GPU still runs the step before
                    seconds, draw = times.mixed(step)
                    capped = seconds * (times.slowdown(power.drawn) - 1)
                    gpu_free = max(start + seconds + capped, now)
                else:
                    a, b = times.decode(step.decodes, step.kv_tokens)
                    seconds, capped = a + b * step.kv_tokens, 0.0
                    draw = times.decode_draw(step.decodes, step.kv_tokens, seconds)
                    gpu_free = start + seconds
                end = gpu_free
                power.step(draw, start, start + seconds + capped)
                if log:
                    chunks = tuple((r.id, n, before, s) for r, n, before, s in step.chunks)
                    entries.append(LogEntry(1, step.decodes, step.kv_tokens, chunks, end, capped))
            queue.append((step, end))
            if len(queue) < depth:
                continue
        elif not queue:
            now = ready[0][0] if ready else math.inf
            continue
        step, end = queue.popleft()
        now = max(now, end)
        heard = loop.events(step.decodes + sum(s for _, _, _, s in step.chunks), now)
        for r, _, _, samples in step.chunks:
            if samples and r.first_s < 0:
                r.first_s = heard + times.first_event(r.prompt_tokens)
        for r in scheduler.update(step):
            clients.done(r, max(heard, r.first_s))
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        if (running, waiting) != gauge[-1][1:]:
            gauge.append((now, running, waiting))
    return _result(clients, min(now, load.max_seconds), gauge, preemptions=scheduler.preemptions, log=entries)


def _sum(steps: int, first: float, grow: float) -> float:
    """Seconds of `steps` steps, the first taking `first`, each next one `grow` longer."""
    return steps * first + grow * (steps * (steps - 1) / 2)


def _steps_before(seconds: float, first: float, grow: float) -> int:
    """The largest n whose n steps end before `seconds` have passed."""
    if seconds <= 0:
        return -1
    if math.isinf(seconds):
        return 1 << 40
    if grow < 1e-15:
        n = int(seconds / first)
    else:
        half = first - grow / 2
        n = int((math.sqrt(half * half + 2 * grow * seconds) - half) / grow)
    while n > 0 and _sum(n, first, grow) >= seconds:
        n -= 1
    while _sum(n + 1, first, grow) < seconds:
        n += 1
    return n


class ServiceTimes(Protocol):
    """What the FIFO asks of a naive server's model (seconds)."""

    def frontend(self, prompt_tokens: int) -> float: ...

    def prefill(self, prompt_tokens: int) -> float: ...

    def decode_total(self, prompt_tokens: int, output_tokens: int) -> float: ...


def simulate_naive(times: ServiceTimes, load: Load) -> Result:
    """One request at a time, first come first served. Open loop with equal requests: an M/D/1 queue."""
    clients, gauge, free = Clients(load), [(0.0, 1, 0)], 0.0
    cost: dict[tuple[int, int], tuple[float, float, float]] = {}
    while not clients.over and clients.due:
        sent, _, r = heapq.heappop(clients.due)
        key = (r.prompt_tokens, r.output_tokens)
        if key not in cost:
            front, prefill = times.frontend(r.prompt_tokens), times.prefill(r.prompt_tokens)
            cost[key] = front, prefill, times.decode_total(r.prompt_tokens, r.output_tokens)
        front, prefill, decode = cost[key]
        r.ready_s = sent + front
        r.scheduled_s = max(free, r.ready_s)
        r.first_s = r.scheduled_s + prefill
        free = r.first_s + decode
        if free > load.max_seconds and load.concurrency is not None:
            free = load.max_seconds
            break
        clients.done(r, free)
    return _result(clients, free, gauge)
