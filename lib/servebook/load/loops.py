"""The closed and the open loop: which request is sent when, and what happens to unfinished requests at the end.

A ramp is one load whose concurrency or rate grows in stages. Each stage is a point with its own PointProgress, warm-up
and window.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from .client import Client, Reply, now
from .prompts import FRESH, Bodies, Talk
from .stream import TokenStream
from .window import PointProgress

BURST_S, BURST_BYTES = 0.05, 1 << 26  # request bodies due within this time are made in advance, up to this many bytes


class Loop:
    """A load that continues from stage to stage of a ramp: requests in flight between two stages are not cut off."""

    def __init__(self, client: Client, bodies: Bodies) -> None:
        self.client, self.bodies = client, bodies
        self.tracker: PointProgress | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.index = itertools.count()

    async def stage(self, tracker: PointProgress, start: Callable[[], object]) -> None:
        """Run until the stage's end or its time limit; `start` begins the stage's load. After the last stage, or a
        fault, all remaining requests are cancelled, so a hanging server cannot block the loop."""
        if self.tracker is not None:
            tracker.take_over(self.tracker)
        self.tracker = tracker
        over = tracker.last
        try:
            start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(tracker.stop.wait(), tracker.start + tracker.rule.time_limit_s - now())
            if not tracker.stop.is_set():
                await self.at_limit(tracker)
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

    async def at_limit(self, tracker: PointProgress) -> None:
        """Called when a stage's time limit is reached. Does nothing unless overridden."""

    def prepared(
        self, index: int, talk: Talk, scheduled: float | None = None, body: bytes | None = None
    ) -> tuple[Reply, bytes, Talk]:
        """A request that is ready to be sent."""
        stream = TokenStream(keep=self.bodies.prompts.plan.has_conversations)
        reply = Reply(index, *self.bodies.asked(index, talk), scheduled=scheduled, turn=talk.turn, stream=stream)
        return reply, body or self.bodies(index, talk), talk

    async def _cancel(self, tracker: PointProgress) -> None:
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
    def current(self) -> PointProgress:
        """The tracker of the current stage."""
        assert self.tracker is not None
        return self.tracker


class ClosedLoop(Loop):
    """A fixed number of clients with one request each. A client sends its next request a short random pause after the
    last one has ended, and continues a conversation that it has begun. limit: total requests of a finite run."""

    def __init__(self, client: Client, bodies: Bodies, *, jitter_s: float, seed: str, limit: int | None = None) -> None:
        super().__init__(client, bodies)
        self.jitter_s, self.rng, self.clients, self.limit = jitter_s, random.Random(seed), 0, limit
        self.begun = itertools.count()
        self.sent = 0

    async def run(self, tracker: PointProgress, concurrency: int) -> None:
        """One stage with this many clients, at least as many as in the stage before."""
        begun = [self._begin() for _ in range(concurrency - self.clients)]
        self.clients = concurrency
        await self.stage(tracker, lambda: [self._spawn(self._one(*f)) for f in begun if f is not None])

    def _begin(self) -> tuple[Reply, bytes, Talk] | None:
        """The next prompt, or the first of the next conversation; None if there is none or the limit is reached."""
        number, plan = next(self.begun), self.bodies.prompts.plan
        index = plan.begins(number) if plan.has_conversations else number
        return None if index is None else self._prepare(index, FRESH)

    def _prepare(self, index: int, talk: Talk) -> tuple[Reply, bytes, Talk] | None:
        if self.limit is not None and self.sent >= self.limit:
            return None
        self.sent += 1
        return self.prepared(index, talk)

    async def _one(self, reply: Reply, body: bytes, talk: Talk) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.jitter_s))
        failures = 0
        while True:
            self.current.launched(reply)
            await self.client.stream(body, reply)
            self.current.done(reply)
            ended, failures = reply.end or now(), 0 if reply.ok else failures + 1
            if self.current.last and self.current.stop.is_set():
                return
            following = self.bodies.prompts.follows(reply.index) if reply.ok else None
            if following is None:
                prepared = self._begin()
            else:
                prepared = self._prepare(following, self.bodies.after(reply.index, talk, reply.stream))
            if prepared is None:
                return
            reply, body, talk = prepared
            # back off from a server that refuses requests
            pause = min(0.25, 0.02 * 2**failures) if failures else self.current.jitter(self.jitter_s, self.rng)
            await asyncio.sleep(max(0.0, ended + pause - now()))
            self.current.paused(now() - ended)


class OpenLoop(Loop):
    """Sends requests when they are due, however many are in flight. Arrivals continue until the window's last request
    has ended.

    cap: maximum number of requests in flight; further ones wait in the client. A turn of a conversation waits for the
    answer to the previous turn.
    """

    def __init__(self, client: Client, bodies: Bodies, *, cap: int | None = None) -> None:
        super().__init__(client, bodies)
        self.cap = None if cap is None else asyncio.Semaphore(cap)
        self.sender: asyncio.Task[None] | None = None
        self.clock_start = 0.0
        self.due: Sequence[float] = ()  # due times of a trace with conversations
        self._turns = 0  # number of turns that wait for their due time

    async def run(self, tracker: PointProgress, due: Iterator[float]) -> None:
        """One stage; due: ascending seconds from its start (see arrivals)."""
        if self.bodies.prompts.plan.has_conversations:
            self.due = list(due)
            due = iter(self.due)

        def start() -> None:
            self.sender = self._spawn(self._send(tracker, due))

        try:
            await self.stage(tracker, start)
        finally:
            if self.sender:
                self.sender.cancel()

    async def at_limit(self, tracker: PointProgress) -> None:
        """Stop arrivals and wait for the window's requests in flight, up to one request's timeout."""
        if not tracker.last:
            return
        if self.sender:
            self.sender.cancel()
        tracker.end_arrivals("time limit")
        if not tracker.pending():  # in warm-up there is nothing to wait for
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tracker.stop.wait(), self.client.timeout_s)

    async def _send(self, tracker: PointProgress, due: Iterator[float]) -> None:
        plan = self.bodies.prompts.plan
        schedule = self._with_bodies(due)
        self.clock_start = now() + 0.02
        for offset, index, body in schedule:
            if plan.has_conversations and not plan.starts(index):
                continue  # see _turn
            at = self.clock_start + offset
            reply, body, talk = self.prepared(index, FRESH, at, body)
            # the event loop's timer is coarse (1 ms in uvloop): sleep a little less, then yield until it is time
            if (wait := at - now() - 0.0013) > 0:
                await asyncio.sleep(wait)
            while now() < at:
                await asyncio.sleep(0)
            tracker.launched(reply)
            self._spawn(self._one(reply, body, talk))
            await asyncio.sleep(0)  # send before the next body is made, even if arrivals exceed the client's rate
        while tracker.in_flight or self._turns:  # the schedule has ended: wait for what is left
            await asyncio.sleep(0.01)
        tracker.out_of_time("end of the replayed arrivals")

    def _with_bodies(self, due: Iterator[float]) -> Iterator[tuple[float, int, bytes | None]]:
        """(due, index, body): bodies due within BURST_S of the start are made before the first is sent; the others are
        None, made when they are sent."""
        begun: list[tuple[float, int, bytes]] = []
        size, rest = 0, due
        for offset in due:
            if offset > BURST_S or size > BURST_BYTES:
                rest = itertools.chain([offset], due)
                break
            index = next(self.index)
            begun.append((offset, index, self.bodies(index)))
            size += len(begun[-1][2])
        else:
            rest = iter(())
        return itertools.chain(begun, ((offset, next(self.index), None) for offset in rest))

    async def _one(self, reply: Reply, body: bytes, talk: Talk) -> None:
        if self.cap is None:
            await self.client.stream(body, reply)
        else:
            async with self.cap:
                await self.client.stream(body, reply)
        following = self.bodies.prompts.follows(reply.index)
        if following is not None and following < len(self.due):
            self._turns += 1
            goes_on = self.bodies.after(reply.index, talk, reply.stream) if reply.ok else FRESH
            self._spawn(self._turn(following, goes_on))
        self.current.done(reply)

    async def _turn(self, index: int, talk: Talk) -> None:
        """Send the next turn of a conversation when it is due, or at once if the previous answer came after that."""
        at = max(self.clock_start + self.due[index], now())
        prepared = self.prepared(index, talk, at)
        await asyncio.sleep(max(0.0, at - now()))
        self._turns -= 1
        self.current.launched(prepared[0])
        await self._one(*prepared)
