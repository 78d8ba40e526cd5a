"""The closed and the open loop: who sends which request when, and what ends with the point.

A ramp is one load whose concurrency or rate grows in stages; each stage has a Tracker, its own warm-up and window.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from .client import Client, Reply, now
from .prompts import FRESH, Bodies, Talk
from .stream import TokenStream
from .window import Tracker


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
    def current(self) -> Tracker:
        """The stage's tracker that requests count for now."""
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
        """One stage at so many clients, at least as many as before."""
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
            self.current.launched(reply)
            await self.client.stream(body, reply)
            self.current.done(reply)
            ended, failures = reply.end or now(), 0 if reply.ok else failures + 1
            if self.current.last and self.current.stop.is_set():
                return
            goes_on = self.turns > 1 and reply.ok and talk.turn + 1 < self.turns
            reply, body, talk = self._prepare(self.bodies.after(reply.index, talk, reply.stream) if goes_on else FRESH)
            # a server that refuses is not hammered
            pause = min(0.25, 0.02 * 2**failures) if failures else self.current.jitter(self.jitter_s, self.rng)
            await asyncio.sleep(max(0.0, ended + pause - now()))
            self.current.paused(now() - ended)


class OpenLoop(Loop):
    """Sends requests when they are due, whatever is still in flight; arrivals go on until the window's last ended."""

    async def run(self, tracker: Tracker, due: Iterator[float]) -> None:
        """One stage; due: seconds from its start, ascending (see arrivals)."""
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
            await asyncio.sleep(0)  # it leaves before the next body is made, also where arrivals outrun the client
        while tracker.in_flight:  # a replay has an end
            await asyncio.sleep(0.01)
        tracker.out_of_time("end of the replayed arrivals")

    async def _one(self, reply: Reply, body: bytes) -> None:
        await self.client.stream(body, reply)
        self.current.done(reply)
