"""The closed and the open loop, and the one rule for when a point's measured window opens and ends.

A ramp is one load whose concurrency or rate grows in stages; each stage has a Tracker, its own warm-up and window.

Warm-up is the first completions; the window opens at the last of them without a pause, so the starting burst and the
final drain stay outside while the load never changes. The window ends when the interval of the mean is narrow enough
(and enough requests and time have gone by), or when its requests or its time are used up: `stop_reason` says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import stats
from .client import Client, Reply, now
from .prompts import FRESH, Bodies, Talk
from .stream import TokenStream

NARROW_E2E, NARROW_TTFT = 0.02, 0.05  # relative half-widths of the 95 % intervals at which a window may end
OCCUPANCY_LOSS = 0.04  # jitter never exceeds this share of the mean latency, so in flight stays within 2 % of C


@dataclass(frozen=True)
class Rule:
    """When a point is warm and when it is done. Seconds count from the point's start."""

    warmup: int
    min_requests: int
    max_requests: int
    min_seconds: float
    time_limit_s: float
    exactly: int | None = None


def converged(measured: Sequence[Reply]) -> bool:
    """Whether the 95 % intervals of mean E2E and mean TTFT are narrow enough for a point to end."""
    good = [r for r in measured if r.ok]
    for name, limit in (("e2e_s", NARROW_E2E), ("ttft_s", NARROW_TTFT)):
        interval = stats.mean_interval([v for r in good if (v := getattr(r, name)) is not None])
        if interval is None or interval.relative_half_width > limit:
            return False
    return True


@dataclass
class Tracker:
    """Follows every request of a point; decides phases, the window, and the end."""

    rule: Rule
    start: float
    concurrency: int | None
    on_end: Callable[[Reply], None]
    open_loop: bool = False
    in_flight: set[Reply] = field(default_factory=set)
    ended: list[Reply] = field(default_factory=list)
    measured: list[Reply] = field(default_factory=list)  # in the order they ended, failures among them
    window_start: float | None = None
    window_end: float | None = None
    stopped_at: float = 0.0  # may be later than the window's end: a request was awaited, or time ran out
    stop_reason: str = ""
    client_gaps: list[float] = field(default_factory=list)
    window_opened: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    fault: BaseException | None = None
    warm: int = 0
    carried: list[Reply] = field(default_factory=list)  # in flight when the next stage of a ramp took over
    last: bool = True  # no stage follows: what is in flight at the end is cut off
    _failing: int = 0
    _e2e_sum: float = 0.0
    _e2e_count: int = 0

    def __post_init__(self) -> None:
        if self.rule.warmup <= 0:
            self._open_window(self.start)

    def take_over(self, before: Tracker) -> None:
        """Go on with what an earlier stage of a ramp has in flight."""
        before.carried = list(before.in_flight)
        self.in_flight |= before.in_flight
        before.in_flight.clear()

    def launched(self, reply: Reply) -> None:
        self.in_flight.add(reply)

    def done(self, reply: Reply) -> None:
        """A request has ended: give it its phase, keep it, and see whether the point is over."""
        self.in_flight.discard(reply)
        if self.stop.is_set():
            if self.last:
                self.finalize(reply)
            else:  # ended between two stages of a ramp
                self._keep(reply)
            return
        reply.phase = self._phase(reply)
        self._keep(reply)
        if reply.phase == "measured":
            self.measured.append(reply)
        elif reply.phase == "warmup" and reply.ok and self.window_start is None:
            self.warm += 1
            if self.warm >= self.rule.warmup:
                self._open_window(reply.end or now())
        if reply.ok and reply.e2e_s is not None:
            self._e2e_sum, self._e2e_count, self._failing = self._e2e_sum + reply.e2e_s, self._e2e_count + 1, 0
        else:
            self._failing += 1
        self._decide(reply)

    def _phase(self, reply: Reply) -> str:
        if self.window_start is None:
            return "warmup"
        if self.open_loop and reply.scheduled is not None:
            # by arrival: choosing by completion would leave out the slow ones
            if reply.scheduled < self.window_start:
                return "warmup"
            return "measured" if self.window_end is None or reply.scheduled <= self.window_end else "drain"
        return "measured"

    def _open_window(self, at: float) -> None:
        self.window_start = at
        self.window_opened.set()

    def _decide(self, reply: Reply) -> None:
        at = reply.end or now()
        if self._failing >= max(10, 2 * (self.concurrency or 1)):
            self._end(f"every request failed: {reply.error}", at)
        elif self.window_end is not None:  # open loop: its window is over, its last requests are awaited
            if not self.pending():
                self._end(self.stop_reason, self.window_end)
        elif self.window_start is not None and (reason := self._enough(at - self.window_start)):
            if self.open_loop:
                self.window_end, self.stop_reason = at, reason
                if not self.pending():
                    self._end(reason, at)
            else:
                self._end(reason, at)

    def _enough(self, seconds: float) -> str | None:
        rule, n, c = self.rule, len(self.measured), self.concurrency or 1
        if rule.exactly is not None:
            return f"all {n} requests done" if n >= rule.exactly else None
        # clients may move in waves: only after whole rounds is completions / seconds the rate
        if n % c:
            return None
        if n >= rule.max_requests:
            return f"max_requests ({rule.max_requests}) reached"
        if n < rule.min_requests or seconds < rule.min_seconds or n % (c * math.ceil(8 / c)):
            return None
        return "interval narrow enough" if converged(self.measured) else None

    def pending(self) -> list[Reply]:
        """Open loop: requests of the window that are still in flight."""
        end = self.window_end
        return [r for r in self.in_flight if self._phase(r) == "measured" and end is not None]

    def _end(self, reason: str, at: float) -> None:
        if not self.stop.is_set():
            self.stop_reason, self.stopped_at = reason, now()
            self.window_end = at if self.window_end is None else self.window_end
            self.stop.set()

    def out_of_time(self, what: str) -> None:
        if not self.stop.is_set():
            late = f"{what} reached" + (" in warm-up" if self.window_start is None else "")
            self._end(f"{self.stop_reason}, then {late}" if self.stop_reason else late, self._last_round())

    def _last_round(self) -> float:
        """Closed loop: the time at which the last whole round ended (the last request, if there was none)."""
        n, c = len(self.measured), self.concurrency
        if self.open_loop or not c or not n:
            return now()
        return self.measured[(n // c * c or n) - 1].end or now()

    def broke(self, fault: BaseException) -> None:
        self.fault = self.fault or fault
        self._end("fault", now())

    def finalize(self, reply: Reply) -> None:
        """A request that the end of the point cut off."""
        self.in_flight.discard(reply)
        reply.phase = self._phase(reply) if self.open_loop else "drain"
        reply.stream.finish()
        reply.error = "not finished in the point's time" if reply.phase == "measured" else "cancelled at the end"
        reply.end = None
        if reply.phase == "measured":
            self.measured.append(reply)
        self._keep(reply)

    def _keep(self, reply: Reply) -> None:
        self.ended.append(reply)
        try:
            self.on_end(reply)
        except Exception as error:  # a row that cannot be stored ends the point
            self.broke(error)

    def jitter(self, limit_s: float, rng: random.Random) -> float:
        """U(0, limit), the limit held below OCCUPANCY_LOSS of the latency so far."""
        if self._e2e_count:
            limit_s = min(limit_s, OCCUPANCY_LOSS * self._e2e_sum / self._e2e_count)
        return rng.uniform(0, limit_s)


class Loop:
    """A load that goes on from stage to stage: what is in flight when a stage of a ramp ends is not cut off."""

    def __init__(self, client: Client, bodies: Bodies) -> None:
        self.client, self.bodies = client, bodies
        self.tracker: Tracker | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.index = itertools.count()

    async def stage(self, tracker: Tracker, start: Callable[[], object]) -> None:
        """Until the stage's end or its time limit; `start` brings the load to what the stage asks for. After the last
        stage whatever is left is cancelled: a server that hangs cannot hold it up."""
        if self.tracker is not None:
            tracker.take_over(self.tracker)
        self.tracker = tracker
        over = tracker.last
        try:
            start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(tracker.stop.wait(), tracker.start + tracker.rule.time_limit_s - now())
            tracker.out_of_time("time limit")
            over = over or tracker.fault is not None
        except BaseException:
            over = True
            raise
        finally:
            if over:
                await self._cancel(tracker)
        if tracker.fault:
            raise tracker.fault

    async def _cancel(self, tracker: Tracker) -> None:
        left = list(self.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for reply in list(tracker.in_flight):
            tracker.finalize(reply)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and self.tracker:
            self.tracker.broke(error)

    @property
    def now_tracked(self) -> Tracker:
        assert self.tracker is not None
        return self.tracker


class ClosedLoop(Loop):
    """Holds exactly so many requests in flight, each client sending its next one a jitter after its last.

    turns: requests of a conversation, each of which says all that was said before and its own new prompt.
    """

    def __init__(self, client: Client, bodies: Bodies, *, jitter_s: float, seed: str, turns: int = 1) -> None:
        super().__init__(client, bodies)
        self.jitter_s, self.turns, self.rng, self.clients = jitter_s, turns, random.Random(seed), 0

    async def run(self, tracker: Tracker, concurrency: int) -> None:
        first = [self._prepare(FRESH) for _ in range(concurrency - self.clients)]
        self.clients = concurrency
        await self.stage(tracker, lambda: [self._spawn(self._one(*f)) for f in first])

    def _prepare(self, talk: Talk) -> tuple[Reply, bytes, Talk]:
        i = next(self.index)
        stream = TokenStream(keep=self.turns > 1)
        return Reply(i, *self.bodies.asked(i, talk), turn=talk.turn, stream=stream), self.bodies(i, talk), talk

    async def _one(self, reply: Reply, body: bytes, talk: Talk) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.jitter_s))
        failures = 0
        while True:
            self.now_tracked.launched(reply)
            await self.client.stream(body, reply)
            self.now_tracked.done(reply)
            ended, failures = reply.end or now(), 0 if reply.ok else failures + 1
            if self.now_tracked.last and self.now_tracked.stop.is_set():
                return
            goes_on = self.turns > 1 and reply.ok and talk.turn + 1 < self.turns
            reply, body, talk = self._prepare(self.bodies.after(reply.index, talk, reply.stream) if goes_on else FRESH)
            # a server that refuses is not hammered
            pause = min(0.25, 0.02 * 2**failures) if failures else self.now_tracked.jitter(self.jitter_s, self.rng)
            await asyncio.sleep(max(0.0, ended + pause - now()))
            self.now_tracked.client_gaps.append(now() - ended)


class OpenLoop(Loop):
    """Sends requests when they are due, whatever is still in flight; arrivals go on until the window's last ended."""

    async def run(self, tracker: Tracker, due: Iterator[float]) -> None:
        sender: list[asyncio.Task[None]] = []
        try:
            await self.stage(tracker, lambda: sender.append(self._spawn(self._send(tracker, due))))
        finally:
            for task in sender:
                task.cancel()

    async def _send(self, tracker: Tracker, due: Iterator[float]) -> None:
        clock_start = now() + 0.02
        for offset in due:
            index = next(self.index)
            body = self.bodies(index)
            at = clock_start + offset
            # the loop's timer is coarse (1 ms in uvloop): sleep short of it, then yield until it is time
            if (wait := at - now() - 0.0013) > 0:
                await asyncio.sleep(wait)
            while now() < at:
                await asyncio.sleep(0)
            reply = Reply(index, *self.bodies.asked(index), scheduled=at)
            tracker.launched(reply)
            self._spawn(self._one(reply, body))
        while tracker.in_flight:  # a replay has an end
            await asyncio.sleep(0.01)
        tracker.out_of_time("end of the replayed arrivals")

    async def _one(self, reply: Reply, body: bytes) -> None:
        await self.client.stream(body, reply)
        self.now_tracked.done(reply)
