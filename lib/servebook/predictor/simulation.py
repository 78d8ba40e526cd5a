"""Simulates clients and a server in simulated time: vLLM's engine loop and API server, or the naive FIFO server.

Deterministic for a given seed. A series of decode-only steps without arrival or completion is advanced at once: the
time of a decode step is linear in the context tokens that it reads, so the sum has a closed form.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any, Protocol

from .api_server import ApiLoop, Outputs, RequestTimes
from .power import Power
from .scheduler import Scheduler, SchedulerConfig, Step
from .simulated_clients import SimulatedClients, Traffic
from .simulation_result import Gauge, LogEntry, Result

LAST = 4  # steps of a series that are handed on one by one


class StepTimes(RequestTimes, Protocol):
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
        """Host seconds to launch a step that prefills, with `tokens` tokens in all; they block the engine. idle:
        the engine had waited for a request before."""


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
        self.api, self.power = ApiLoop(times, self.clients), Power()
        self.block_size, self.kv_blocks = config.block_size, config.kv_blocks
        self.queue: deque[tuple[Step, float]] = deque()  # launched steps and when each ends
        self.now = self.gpu_free = 0.0
        self.idle = True  # the engine waited for a request
        self.gauge = Gauge()
        self.log: list[LogEntry] | None = [] if log else None

    def run(self) -> Result:
        clients, scheduler, queue, limit = self.clients, self.scheduler, self.queue, self.load.max_seconds
        while not clients.over and self.now <= limit:
            self._take_in()
            if clients.over:
                break
            if scheduler.has_work:
                if self.skip and self._decode_on():
                    continue
                queue.append(self._launch(scheduler.schedule()))
                if len(queue) < self.depth:
                    continue
            elif not queue:
                self.now = self.api.ready[0][0] if self.api.ready else math.inf
                self.idle = True
                continue
            self._fetch(*queue.popleft())
        wall_s = min(max(self.now, clients.last_s), limit)
        return _result(clients, wall_s, self.gauge, preemptions=scheduler.preemptions, log=self.log or [])

    def _take_in(self) -> None:
        """Let the API server work up to now, and pass the requests that have reached the engine to the scheduler."""
        self.api.run(self.now, idle=not self.scheduler.has_work and not self.queue)
        ready = self.api.ready
        while ready and ready[0][0] <= self.now:
            r = heapq.heappop(ready)[2]
            if -(-(r.prompt_tokens + r.output_tokens - 1) // self.block_size) > self.kv_blocks:
                raise ValueError("a request needs more KV blocks than the pool has")
            self.scheduler.add(r)

    def _decode_on(self) -> bool:
        """Advance over several equal decode-only steps at once; False if at most one is possible."""
        scheduler, times, depth = self.scheduler, self.times, self.depth
        if (steady := scheduler.steady_steps()) <= 1:
            return False
        upcoming = self.api.quiet_until()
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
        self._put_series(steps, n, start, first, grow)
        if depth == 2:
            self.queue[0] = (scheduler.inflight[0], self.gpu_free)
        return True

    def _put_series(self, steps: int, tokens: int, start: float, first: float, grow: float) -> None:
        """Hand the tokens of equal steps to the API server. A request may come during the last few, so that these have
        their own times; those before are taken as evenly spaced."""
        k = 0 if self.depth == 2 else 1  # with two batches the one that was launched before is fetched first
        if (before := steps - LAST) > 1:
            begin, end = (start + _sum(n, first, grow) for n in (k, k + before - 1))
            self.api.put(Outputs(begin, tokens, every=(end - begin) / (before - 1), steps=before))
            k, steps = k + before, LAST
        for n in range(k, k + steps):
            self.api.put(Outputs(start + _sum(n, first, grow), tokens))

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
        tokens = step.decodes + sum(s for _, _, _, s in step.chunks)
        first = [r for r, _, _, samples in step.chunks if samples and r.first_s < 0]
        last = self.scheduler.update(step)
        if tokens:
            self.api.put(Outputs(self.now, tokens, first, last))
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
        clients.received += r.output_tokens
        clients.done(r, free)
    return _result(clients, free, gauge)
