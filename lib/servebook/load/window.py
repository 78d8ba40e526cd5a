"""Decides when a point's measured window opens and ends, and which requests are measured.

The warm-up consists of the first completions; in an open loop it ends after a third of the point's time limit at the
latest. The window opens with the last of these completions, without a pause in the load, so that it contains neither
the initial burst nor the final drain. It ends when the confidence intervals of mean E2E and mean TTFT are narrow enough
(after enough requests and time), or when its maximum of requests or time is reached; `stop_reason` gives the reason.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from ..common import stats
from ..config.points import NARROW_E2E, NARROW_TTFT, OCCUPANCY_LOSS
from .client import Reply, now
from .finished import RequestLog


@dataclass(frozen=True)
class Rule:
    """When the warm-up ends and when the point ends. Seconds count from the point's start."""

    warmup: int
    min_requests: int
    max_requests: int
    min_seconds: float
    time_limit_s: float
    exactly: int | None = None  # the point ends after this many requests, whatever the intervals
    limit: str = ""  # what sets max_requests, in words, if it is not the parameter of that name
    capped: bool = False  # open loop: some requests wait at the client for others to end
    finite: bool = False  # all requests are measured, from the first's start to the last's end

    @property
    def most(self) -> str:
        """The maximum number of requests, named after the parameter that sets it."""
        return self.limit or f"max_requests ({self.max_requests})"


def converged(e2e_s: stats.Values, ttft_s: stats.Values, per_round: int = 1) -> bool:
    """Whether the 95 % intervals of mean E2E and mean TTFT are narrow enough to end a point."""
    for values, limit in ((e2e_s, NARROW_E2E), (ttft_s, NARROW_TTFT)):
        interval = stats.mean_interval(values, per_round)
        if interval is None or interval.relative_half_width > limit:
            return False
    return True


def _singles() -> array[float]:
    """An empty array with 4 bytes per value: a relative error of 1e-7 does not matter to an interval of a percent."""
    return array("f")


@dataclass
class PointProgress:
    """Follows every request of a point; decides phases, the window, and the end."""

    rule: Rule
    start: float
    concurrency: int | None
    on_end: Callable[[Reply], None]
    open_loop: bool = False
    in_flight: set[Reply] = field(default_factory=set)
    finished: RequestLog = field(default_factory=RequestLog)
    measured: int = 0  # ended requests of the window, including failures
    window_start: float | None = None
    window_end: float | None = None
    stopped_at: float = 0.0  # may be later than the window's end: requests were awaited, or time ran out
    stop_reason: str = ""
    window_opened: asyncio.Event = field(default_factory=asyncio.Event)
    window_closed: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    fault: BaseException | None = None
    warm: int = 0
    last: bool = True  # no stage follows: requests in flight at the end are cut off
    before: PointProgress | None = None  # the ramp's previous stage
    carried: set[Reply] = field(default_factory=set)  # requests in flight when the next stage took over
    _e2e: array[float] = field(default_factory=_singles)  # of the window's answered requests, in the order they ended
    _ttft: array[float] = field(default_factory=_singles)
    _round_end: float | None = None  # end of the last whole round, or of the last request before there was one
    _failing: int = 0
    _e2e_sum: float = 0.0
    _e2e_count: int = 0
    _paused_s: float = 0.0
    _pauses: int = 0

    def __post_init__(self) -> None:
        if self.rule.warmup <= 0 and not self.rule.finite:
            self._open_window(self.start)

    @property
    def per_round(self) -> int:
        """Requests per round: closed-loop clients move in waves, so latencies repeat after one request per client."""
        return 1 if self.open_loop else self.concurrency or 1

    def take_over(self, before: PointProgress) -> None:
        """Take over the requests that an earlier stage of a ramp has in flight."""
        self.before, before.carried = before, set(before.in_flight)
        self.in_flight |= before.in_flight
        before.in_flight.clear()

    def launched(self, reply: Reply) -> None:
        """Count a request that is being sent as in flight."""
        self.in_flight.add(reply)
        if self.rule.finite and self.window_start is None:
            self._open_window(now() if reply.scheduled is None else reply.scheduled)

    def done(self, reply: Reply) -> None:
        """A request has ended: assign its phase, store it, and check whether the point is over."""
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
            self._measure(reply)
        elif reply.phase == "warmup" and reply.ok and self.window_start is None:
            self.warm += 1
            if self.warm >= self.rule.warmup or self._warm_up_is_long():
                self._open_window(reply.end or now())
        if reply.ok and reply.e2e_s is not None:
            self._e2e_sum, self._e2e_count, self._failing = self._e2e_sum + reply.e2e_s, self._e2e_count + 1, 0
        else:
            self._failing += 1
        self._decide(reply)

    def _warm_up_is_long(self) -> bool:
        """Whether an open loop's warm-up takes too long: a slow server would leave no time to measure. A closed loop
        needs its whole warm-up, since its clients begin at once."""
        return self.open_loop and now() - self.start >= self.rule.time_limit_s / 3

    def _measure(self, reply: Reply) -> None:
        self.measured += 1
        c = self.concurrency or 1
        if self.measured % c == 0 or self.measured < c:
            self._round_end = reply.end
        if reply.ok:
            self._e2e.append(reply.e2e_s or 0.0)  # an answered request has tokens, so both
            self._ttft.append(reply.ttft_s or 0.0)

    def _phase(self, reply: Reply) -> str:
        if self.window_start is None:
            return "warmup"
        if self.open_loop and reply.scheduled is not None:
            # by arrival: choosing by completion would leave out the slow requests
            if reply.scheduled < self.window_start:
                return "warmup"
            return "measured" if self.window_end is None or reply.scheduled <= self.window_end else "drain"
        return "measured"

    def _open_window(self, at: float) -> None:
        self.window_start = at
        self.window_opened.set()

    def _close_window(self, at: float) -> None:
        if self.window_end is None:
            self.window_end = at
            self.window_closed.set()

    def _decide(self, reply: Reply) -> None:
        at = reply.end or now()
        if self._failing >= max(10, 2 * (self.concurrency or 1)):
            self._end(f"{self._failing} requests in a row failed: {reply.error}", at)
        elif self.window_end is not None:  # open loop: the window is over, its last requests are awaited
            if not self.pending():
                self._end(self.stop_reason, self.window_end)
        elif self.window_start is not None and (reason := self._enough(at - self.window_start)):
            if self.open_loop:
                self.stop_reason = reason
                self._close_window(at)
                if not self.pending():
                    self._end(reason, at)
            else:
                self._end(reason, at)

    def _enough(self, seconds: float) -> str | None:
        rule, n, c = self.rule, self.measured, self.concurrency or 1
        if rule.exactly is not None:
            return f"all {n} requests done" if n >= rule.exactly else None
        # clients may move in waves: completions / seconds is the rate only after whole rounds
        if n % c:
            return None
        if n >= rule.max_requests:
            return f"{rule.most} reached"
        if n < rule.min_requests or seconds < rule.min_seconds or n % (c * math.ceil(8 / c)):
            return None
        return "interval narrow enough" if converged(self._e2e, self._ttft, self.per_round) else None

    def pending(self) -> list[Reply]:
        """Open loop: requests of the window that are still in flight."""
        end = self.window_end
        return [r for r in self.in_flight if self._phase(r) == "measured" and end is not None]

    def _end(self, reason: str, at: float) -> None:
        if not self.stop.is_set():
            if self.window_start is not None and self.warm < self.rule.warmup:
                reason += f", after a warm-up of only {self.warm} of {self.rule.warmup} requests"
            self.stop_reason, self.stopped_at = reason, now()
            self._close_window(at)
            self.stop.set()

    def end_arrivals(self, what: str) -> None:
        """Open loop: no more arrivals, so the window ends; its requests in flight are awaited."""
        if self.window_start is not None and self.window_end is None:
            self.stop_reason = f"{what} reached"
            self._close_window(now())
            if not self.pending():
                self._end(self.stop_reason, self.window_end or now())

    def out_of_time(self, what: str) -> None:
        """End the point if nothing else has; what: the limit that was reached."""
        if not self.stop.is_set():
            late = f"{what} reached" + (" in warm-up" if self.window_start is None else "")
            self._end(f"{self.stop_reason}, then {late}" if self.stop_reason else late, self._last_round())

    def _last_round(self) -> float:
        """Closed loop: the end of the last whole round, or of the last request if there was none."""
        return now() if self.open_loop or self._round_end is None else self._round_end

    def broke(self, fault: BaseException) -> None:
        """End the point with a fault, which Loop.stage raises."""
        self.fault = self.fault or fault
        self._end("fault", now())

    def finalize(self, reply: Reply) -> None:
        """Store a request that was cut off by the point's end."""
        self.in_flight.discard(reply)
        reply.phase = self._phase(reply) if self.open_loop else "drain"
        reply.stream.finish()
        reply.error = "not finished in the point's time" if reply.phase == "measured" else "cancelled at the end"
        reply.end = None
        if reply.phase == "measured":
            self.measured += 1
        self._keep(reply)

    def _keep(self, reply: Reply) -> None:
        try:
            self.on_end(reply)
            self.finished.add(reply)
            stage = self.before
            while stage is not None and reply in stage.carried:
                stage.carried.discard(reply)
                stage.finished.add(reply, "carried")
                stage = stage.before
        except Exception as error:  # a row that cannot be stored ends the point
            self.broke(error)

    def paused(self, seconds: float) -> None:
        """Add a client's pause, from an answer's end to the next request."""
        self._paused_s, self._pauses = self._paused_s + seconds, self._pauses + 1

    @property
    def pause_mean_s(self) -> float | None:
        """Mean of the clients' pauses; None if there were none."""
        return self._paused_s / self._pauses if self._pauses else None

    def jitter(self, limit_s: float, rng: random.Random) -> float:
        """U(0, limit), with the limit at most OCCUPANCY_LOSS times the mean latency so far."""
        if self._e2e_count:
            limit_s = min(limit_s, OCCUPANCY_LOSS * self._e2e_sum / self._e2e_count)
        return rng.uniform(0, limit_s)
