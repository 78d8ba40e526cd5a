"""Simulates clients and a server in simulated time: vLLM's engine loop and API server, or the naive FIFO server.

Deterministic for a given seed. A series of decode-only steps without arrival or completion is advanced at once: the
time of a decode step is linear in the context tokens that it reads, so the sum has a closed form.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from .power import Power
from .scheduler import Request, Scheduler, SchedulerConfig, Step
from .simulated_clients import TOKENIZE_S, MeasuredRequests, SimulatedClients, Traffic


class StepTimes(Protocol):
    """The step-time model that the engine loop needs (seconds)."""

    def decode(self, decodes: int, kv_tokens: int) -> tuple[float, float]:
        """(a, b): a decode-only step takes a + b · kv_tokens."""

    def mixed(self, step: Step) -> tuple[float, float]:
        """(GPU seconds, power as a share of the board's cap) of a step that also prefills."""

    def decode_draw(self, decodes: int, kv_tokens: float, seconds: float) -> float:
        """Power of a decode-only step, as a share of the board's cap."""

    def slowdown(self, drawn: float) -> float:
        """Factor on the time of a step that prefills. drawn: recent mean power as a share of the board's cap."""

    prepare_s: float  # host time before a step's first kernel: scheduling, preparing inputs
    engine_sequence_s: float  # the same, additionally per request in the step

    def launch(self, tokens: int, idle: bool) -> float:
        """Host seconds to launch a step that prefills, with `tokens` tokens in all; they block the engine. idle: no
        step was running before."""

    event_s: float  # time of the API server per token event

    def frontend(self, prompt_tokens: int) -> float:
        """Time before a request reaches the engine: HTTP, JSON, tokenizing, hashing."""

    def frontend_busy(self, prompt_tokens: int) -> float:
        """The part of frontend() that the API server does for one request at a time."""

    def first_event(self, prompt_tokens: int) -> float:
        """Delay of the first token's event."""


class LogEntry(NamedTuple):
    """`steps` consecutive equal steps: decodes per step, mean kv_tokens, chunks as (request id, new tokens, tokens
    computed before, whether it samples), end of the last step, seconds lost to the power cap."""

    steps: int
    decodes: int
    kv_tokens: float
    chunks: tuple[tuple[int, int, int, bool], ...]
    end_s: float
    capped_s: float = 0.0


@dataclass
class Result:
    """Measured requests in order of completion, and the window's figures. running_mean and waiting_mean correspond to
    vLLM's gauges, which are updated when a step has been processed."""

    measured: MeasuredRequests
    window: tuple[float, float]
    wall_s: float
    running_mean: float
    waiting_mean: float
    output_tokens: float  # number received in the window
    preemptions: int = 0
    complete: bool = True  # whether all requested requests were measured
    log: list[LogEntry] = field(default_factory=list)
    gauge: Gauge = field(default_factory=lambda: Gauge())

    @property
    def requests(self) -> list[Request]:
        """The measured requests (only the first 20,000)."""
        return self.measured.kept

    @property
    def seconds(self) -> float:
        return self.window[1] - self.window[0]

    def mean(self, of: str) -> float:
        """Mean over requests of ttft_s, tpot_s, e2e_s, queue_s (ready → first scheduled) or frontend_s."""
        values = self.measured.values(of)
        return float(values.mean()) if len(values) else math.nan

    @property
    def hit_share(self) -> float:
        """Share of the measured requests' prompt tokens that were in the prefix cache."""
        asked = float(self.measured.column("prompt_tokens").sum())
        return float(self.measured.column("cached_tokens").sum()) / asked if asked else 0.0


LEAST_SHARE = 0.25  # share of the loop's time for new requests when saturated: it accepts one between two turns


class _ApiLoop:
    """The API server's event loop (one core). Each token of a step is one event and takes event_s. The loop is
    saturated if the next step's tokens arrive before it has sent those of the last. A new request needs PASSES turns of
    the loop; in a saturated loop it waits for one step's events at each. Steps of up to CHUNK tokens are processed as
    one batch: a saturated loop merges a request's two tokens into one event, so its backlog does not grow. Larger ones
    are processed in chunks (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE): nothing is merged and the backlog grows. Measured on an
    H200 with vLLM 0.26: above 100 running requests events carried 1.1 to 1.3 tokens; at 256 and 512 they carried 1.00,
    clients received 18,000 and 15,000 tokens/s, and the engine was idle part of the time.
    """

    PASSES, CHUNK = 4, 128

    def __init__(self, event_s: float) -> None:
        self.event_s = event_s
        self.turns: deque[tuple[float, float, float, bool]] = deque(maxlen=16)  # (start, end, length, saturated)

    def events(self, tokens: int, at: float) -> float:
        """The mean time at which clients receive a step's tokens, which are ready at `at`."""
        turn, free = tokens * self.event_s, self.turns[-1][1] if self.turns else 0.0
        begun = max(free, at)
        if tokens <= self.CHUNK:
            begun = min(begun, at + turn)
        self.turns.append((at, begun + turn, turn, free > at))
        return begun + turn / 2

    def behind(self, steps: int, tokens: int, since: float) -> None:
        """Add the backlog of `steps` consecutive steps of `tokens` tokens each, the first at `since`."""
        turn = tokens * self.event_s
        if steps > 0 and tokens > self.CHUNK:
            free = max(self.turns[-1][1] if self.turns else 0.0, since)
            self.turns.append((since, free + steps * turn, turn, free > since))

    def share(self, at: float) -> float:
        """Share of the loop's recent time that token events leave free. One core parses requests, tokenizes and sends
        events."""
        if len(self.turns) < 2 or self.event_s <= 0:
            return 1.0
        since, last = self.turns[-2][0], self.turns[-1]
        every = max(last[0] - since, at - last[0])
        return max(1.0 - last[2] / every, LEAST_SHARE) if every > last[2] else LEAST_SHARE

    def wait(self, sent: float) -> float:
        """Seconds that a request waits for the loop."""
        for at, over, turn, saturated in reversed(self.turns):
            if at <= sent:
                return self.PASSES * turn if saturated else max(0.0, over - sent)
        return 0.0


class Gauge:
    """Numbers of running and waiting requests as step functions of time."""

    def __init__(self, running: int = 0) -> None:
        self.since, self.running, self.waiting = array("d", [0.0]), array("l", [running]), array("l", [0])

    def note(self, at: float, running: int, waiting: int) -> None:
        """Set the numbers from time `at` on."""
        if running != self.running[-1] or waiting != self.waiting[-1]:
            self.since.append(at)
            self.running.append(running)
            self.waiting.append(waiting)

    def means(self, start: float, end: float) -> tuple[float, float]:
        """(mean running, mean waiting) over [start, end]."""
        if end <= start:
            return 0.0, 0.0
        edges = np.clip(np.append(np.array(self.since), end), start, end)
        spans = np.diff(edges)
        shares = (float((spans * np.array(v)).sum()) / (end - start) for v in (self.running, self.waiting))
        return next(shares), next(shares)


SLICES = 100  # time slices of a finite run


def over_time(result: Result) -> dict[str, list[float]]:
    """Time series of a finite run, in equal slices: t_s (middle of a slice), running and waiting requests, arrivals and
    completions per second, output tokens per second."""
    start, end = result.window
    if not end > start or not len(result.measured):
        return {}
    edges = np.linspace(start, end, SLICES + 1)
    width = (end - start) / SLICES
    m = result.measured
    running, waiting = zip(*(result.gauge.means(a, b) for a, b in pairwise(edges)), strict=True)
    first, last, tokens = m.column("first_s"), m.column("end_s"), m.column("output_tokens")
    # a request's tokens are assumed to be evenly spaced from its first to its last
    done = [np.clip((edge - first) / np.maximum(last - first, 1e-9), 0, 1) @ tokens for edge in edges]
    return {
        "t_s": [round(float(t), 4) for t in (edges[:-1] + edges[1:]) / 2 - start],
        "running": [round(v, 3) for v in running],
        "waiting": [round(v, 3) for v in waiting],
        "arrivals_per_s": [float(v) for v in np.histogram(m.column("due_s"), edges)[0] / width],
        "completions_per_s": [float(v) for v in np.histogram(last, edges)[0] / width],
        "output_tok_per_s": [round(float(v), 3) for v in np.diff(done) / width],
    }


def _result(clients: SimulatedClients, wall_s: float, gauge: Gauge, **more: Any) -> Result:
    start, end, tokens, complete = clients.window()
    running, waiting = gauge.means(start, end)
    return Result(
        clients.measured, (start, end), wall_s, running, waiting, tokens, complete=complete, gauge=gauge, **more
    )


def simulate(
    config: SchedulerConfig, times: StepTimes, load: Traffic, *, skip: bool = True, log: bool = False
) -> Result:
    """The result of the clients' load on vLLM. skip=False simulates every step separately, which is slower and gives
    the same result if a decode step's time is linear in its context tokens. Raises ValueError for a request larger than
    the KV pool."""
    return _Engine(config, times, load, skip, log).run()


class _Engine:
    """vLLM's engine loop: accept requests, schedule and launch a step, then wait for a step (with asynchronous
    scheduling, the one before). now: the host's clock; gpu_free: time at which the GPU has finished all launched
    steps."""

    def __init__(self, config: SchedulerConfig, times: StepTimes, load: Traffic, skip: bool, log: bool) -> None:
        self.times, self.load, self.skip = times, load, skip
        self.clients, self.scheduler, self.depth = SimulatedClients(load), Scheduler(config), config.depth
        self.api, self.power = _ApiLoop(times.event_s), Power()
        self.tokenize_s = TOKENIZE_S if load.text else 0.0
        self.block_size, self.kv_blocks = config.block_size, config.kv_blocks
        self.queue: deque[tuple[Step, float]] = deque()  # launched steps and when each ends
        self.ready: list[tuple[float, int, Request]] = []  # requests past the front end
        self.waited: set[int] = set()  # ids of requests that already waited for the API server's loop
        self.now = self.gpu_free = self.frontend_free = 0.0
        self.idle = True  # nothing ran since the last step
        self.gauge = Gauge()
        self.log: list[LogEntry] | None = [] if log else None

    def run(self) -> Result:
        clients, scheduler, queue, limit = self.clients, self.scheduler, self.queue, self.load.max_seconds
        while not clients.over and self.now <= limit:
            self._take_in()
            if scheduler.has_work:
                if self.skip and self._decode_on():
                    continue
                queue.append(self._launch(scheduler.schedule()))
                if len(queue) < self.depth:
                    continue
            elif not queue:
                self.now = self.ready[0][0] if self.ready else math.inf
                self.idle = True
                continue
            self._fetch(*queue.popleft())
        wall_s = min(self.now, limit)
        return _result(clients, wall_s, self.gauge, preemptions=scheduler.preemptions, log=self.log or [])

    def _take_in(self) -> None:
        """Pass sent requests through the front end (mostly in parallel), and ready ones to the scheduler."""
        due, ready, now = self.clients.due, self.ready, self.now
        while due and (max(due[0][0], self.frontend_free) <= now or not ready):
            sent, _, r = heapq.heappop(due)
            self.clients.taken(r)
            if -(-(r.prompt_tokens + r.output_tokens - 1) // self.block_size) > self.kv_blocks:
                raise ValueError("a request needs more KV blocks than the pool has")
            busy = self.times.frontend_busy(r.prompt_tokens)
            taken = (busy + self.tokenize_s * r.prompt_tokens) / self.api.share(now)
            self.frontend_free = max(self.frontend_free, sent) + taken
            r.ready_s = self.frontend_free + self.times.frontend(r.prompt_tokens) - busy
            heapq.heappush(ready, (r.ready_s, r.id, r))
        while ready and ready[0][0] <= now:
            r = heapq.heappop(ready)[2]
            if r.id not in self.waited and (wait := self.api.wait(r.sent_s)):
                self.waited.add(r.id)
                r.ready_s += wait
                heapq.heappush(ready, (r.ready_s, r.id, r))
            else:
                self.waited.discard(r.id)
                self.scheduler.add(r)

    def _decode_on(self) -> bool:
        """Advance over several equal decode-only steps at once; False if at most one is possible."""
        scheduler, times, depth = self.scheduler, self.times, self.depth
        if (steady := scheduler.steady_steps()) <= 1:
            return False
        upcoming = self.ready[0][0] if self.ready else math.inf
        if self.clients.due:  # not ready before it is sent and the front end is free
            upcoming = min(upcoming, max(self.clients.due[0][0], self.frontend_free))
        n, kv = scheduler.decodes, scheduler.kv_tokens()
        a, b = times.decode(n, kv)
        prepare = times.prepare_s + n * times.engine_sequence_s
        first, grow = a + b * kv + (prepare if depth == 1 else 0.0), b * n
        start = max(self.gpu_free, self.now + (prepare if depth == 2 else 0.0))
        steps = min(steady, _steps_before(upcoming - start, first, grow) + depth) if upcoming > start else 0
        if steps <= 1:
            return False
        scheduler.skip(steps)
        self.gpu_free = start + _sum(steps, first, grow)
        self.now = start + _sum(steps - 1, first, grow) if depth == 2 else self.gpu_free
        self.power.step(times.decode_draw(n, kv, first), start, self.gpu_free)
        if self.log is not None:
            self.log.append(LogEntry(steps, n, kv + n * (steps - 1) / 2, (), self.gpu_free))
        if (earlier := steps - 4) > 0 and n * times.event_s > first:
            self.api.behind(earlier, n, start)
        for back in range(min(steps, 4) - 1, -1, -1):  # enough to see whether the API server keeps up
            self.api.events(n, self.now - back * (first + grow * (steps - 1)))
        if depth == 2:
            self.queue[0] = (scheduler.inflight[0], self.gpu_free)
        return True

    def _launch(self, step: Step) -> tuple[Step, float]:
        """Prepare and launch a step; return it with the time at which the GPU finishes it."""
        if step.empty:
            return step, max(self.now, self.queue[-1][1]) if self.queue else self.now
        times, capped = self.times, 0.0
        self.now += times.prepare_s + (step.decodes + len(step.chunks)) * times.engine_sequence_s
        start = max(self.gpu_free, self.now)
        if step.chunks:
            tokens = step.decodes
            for r, new, _, _ in step.chunks:
                tokens += new
                if r.scheduled_s < 0:
                    r.scheduled_s = start
            self.now += times.launch(tokens, idle=self.idle)  # overlaps with the step still on the GPU
            seconds, draw = times.mixed(step)
            capped = seconds * (times.slowdown(self.power.drawn) - 1)
        else:
            a, b = times.decode(step.decodes, step.kv_tokens)
            seconds = a + b * step.kv_tokens
            draw = times.decode_draw(step.decodes, step.kv_tokens, seconds)
        done = start + seconds + capped
        self.power.step(draw, start, done)
        self.idle = False
        self.gpu_free = max(done, self.now) if step.chunks else done
        if self.log is not None:
            chunks = tuple((r.id, n, before, s) for r, n, before, s in step.chunks)
            self.log.append(LogEntry(1, step.decodes, step.kv_tokens, chunks, self.gpu_free, capped))
        return step, self.gpu_free

    def _fetch(self, step: Step, end: float) -> None:
        """Wait for a step's tokens and send them to the clients."""
        self.now = max(self.now, end)
        received = self.api.events(step.decodes + sum(s for _, _, _, s in step.chunks), self.now)
        for r, _, _, samples in step.chunks:
            if samples and r.first_s < 0:
                r.first_s = received + self.times.first_event(r.prompt_tokens)
        for r in self.scheduler.update(step):
            self.clients.done(r, max(received, r.first_s))
        self.gauge.note(self.now, len(self.scheduler.running), len(self.scheduler.waiting))


def _sum(steps: int, first: float, grow: float) -> float:
    """Seconds of `steps` steps, of which the first takes `first` and each next one `grow` longer."""
    return steps * first + grow * (steps * (steps - 1) / 2)


def _steps_before(seconds: float, first: float, grow: float) -> int:
    """The largest n for which n steps take less than `seconds`."""
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
    """The time model that the FIFO server needs (seconds)."""

    def frontend(self, prompt_tokens: int) -> float: ...

    def prefill(self, prompt_tokens: int) -> float: ...

    def decode_total(self, prompt_tokens: int, output_tokens: int) -> float: ...


def simulate_naive(times: ServiceTimes, load: Traffic) -> Result:
    """The result of the load on the naive server: one request at a time, first come, first served. With Poisson
    arrivals and equal requests this is an M/D/1 queue."""
    clients, gauge, free = SimulatedClients(load), Gauge(1), 0.0
    cost: dict[tuple[int, int], tuple[float, float, float]] = {}
    while not clients.over and clients.due:
        sent, _, r = heapq.heappop(clients.due)
        clients.taken(r)
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
