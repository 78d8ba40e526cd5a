"""While a load runs: the client's own cost, the server's and the GPU's series, and progress."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..common import stats
from .client import now
from .metrics import Scraper
from .window import PointProgress, Rule

ProgressCallback = Callable[[str], None]


@contextlib.asynccontextmanager
async def watch(
    tracker: PointProgress, scraper: Scraper, rule: Rule, on_progress: ProgressCallback | None
) -> AsyncIterator[dict[str, Any]]:
    """Scrape, measure the client itself, and report progress while the load runs; yields the client's health."""
    health: dict[str, Any] = {}
    lags = array("d")
    cpu_at_window = time.thread_time()

    async def lag() -> None:
        while True:
            due = now() + 0.02
            await asyncio.sleep(0.02)
            if tracker.window_start is not None and tracker.window_end is None:
                lags.append(max(0.0, now() - due))

    async def edges() -> None:
        nonlocal cpu_at_window
        await tracker.window_opened.wait()
        cpu_at_window = time.thread_time()
        await scraper.scrape()

    async def report() -> None:
        while on_progress:
            warm = tracker.window_start is None
            done, of = (tracker.warm, rule.warmup) if warm else (tracker.measured, rule.min_requests)
            seconds = f"{now() - tracker.start:.0f} s of at most {rule.time_limit_s:.0f} s"
            on_progress(f"{'warm-up' if warm else 'measured'} {done}/{of}, {seconds}")
            await asyncio.sleep(0.5)

    async def end() -> None:
        await tracker.window_closed.wait()
        health["client_cpu_s"] = time.thread_time() - cpu_at_window
        await scraper.scrape()
        if not tracker.stop.is_set():  # an open loop waits for its last requests
            await tracker.stop.wait()
            await scraper.scrape()

    tasks = [asyncio.create_task(t()) for t in (lag, edges, report, scraper.run)]
    closing = asyncio.create_task(end())
    try:
        yield health
        await closing
    finally:
        for task in (*tasks, closing):
            task.cancel()
        await asyncio.gather(*tasks, closing, return_exceptions=True)
        health["client_loop_lag_p99_s"] = stats.percentile(lags, 99)
