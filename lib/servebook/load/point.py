"""Measure one point: from its spec to its rows, its series and its figures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import files, results, stats
from ..audit import audit
from ..errors import ServebookError
from ..params import Load, Slo
from ..points import PointSpec
from . import arrivals, summary
from .client import Client, Reply, now
from .loops import Rule, Tracker, closed_loop, open_loop
from .metrics import Scraper
from .prompts import Bodies, Prompts

# What else to ask for, richest first. ignore_eos keeps the length fixed; continuous usage tells how many tokens the
# first event carried. A server that refuses a field is asked without it.
_OPTIONS: list[dict[str, Any]] = [
    {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
]
_dialects: dict[tuple[str, str], dict[str, Any]] = {}  # what each server took; asked once a process
Progress = Callable[[str], None]


def rule_of(spec: PointSpec, load: Load, deadline_s: float | None = None) -> Rule:
    """When the point is warm and when it ends. At a large C the counts grow with it: whole rounds are measured."""
    c = spec.concurrency or 1
    limit = min(load.max_seconds, deadline_s) if deadline_s is not None else load.max_seconds
    if spec.fixed_requests is not None:
        n = spec.fixed_requests
        # what a first request pays once (caches, lazily built kernels) must not teach the predictor
        return Rule(max(c, min(3, load.warmup_requests)), n, n, 0.0, limit, exactly=n)
    least = max(load.min_requests, 2 * c)
    most = -(-max(load.max_requests, 2 * least) // c) * c
    return Rule(max(c, load.warmup_requests), least, most, load.min_seconds, limit)


async def measure_point(
    spec: PointSpec,
    *,
    url: str,
    model: str,
    vocab: range | Sequence[int],
    load: Load,
    slo: Slo,
    run_dir: Path | None,
    batching: bool,
    floors: Mapping[str, float] | None = None,
    on_progress: Progress | None = None,
    deadline_s: float | None = None,
    rule: Rule | None = None,
    api_key: str | None = None,
    prompt_set: str | None = None,
    shared_prefix_tokens: int = 0,
    replay_s: Sequence[float] = (),
    prompt_range: tuple[int, int] | None = None,
    output_range: tuple[int, int] | None = None,
    endpoint: str = "/v1/completions",
    text: bool = False,
) -> dict[str, Any]:
    """Load one server with one point's requests and return the point (results.POINT_KEYS and further keys).

    vocab: token ids that prompts may use. batching: whether the engine decodes requests together. run_dir: where rows,
    series and the point go (None: nowhere). floors: see audit. deadline_s: seconds that the point may take at most,
    beside load.max_seconds. rule: when the point is warm and done, if not as rule_of says. prompt_set: points that
    name the same set send the same prompts (else every point has its own). prompt_range, output_range: lengths
    uniform in a range instead of the spec's. text: words instead of token ids, always so at a chat endpoint.
    on_progress gets a short text about twice a second.
    Raises ServebookError when nothing answers, the server refuses the requests, or results cannot be written.
    """
    _allow_many_sockets()
    rule = rule or rule_of(spec, load, deadline_s)
    labels = _prompt_labels(spec, load, run_dir, prompt_set)
    chat = endpoint.endswith("/chat/completions")
    text = text or chat
    async with Client(url, endpoint=endpoint, api_key=api_key, timeout_s=load.request_timeout_s) as client:
        try:
            async with asyncio.timeout(rule.time_limit_s):
                await client.open_connections(min(spec.concurrency or 8, 1024))
                accepted = await _dialect(client, model, None if text else vocab, chat=chat)
        except TimeoutError:
            raise ServebookError(f"no answer within {rule.time_limit_s:g} s", url, "See the server's log") from None
        payload = {"model": model, "stream": True, "temperature": load.temperature}
        payload |= {k: v for k in ("top_p", "top_k") if (v := getattr(load, k)) is not None}
        payload |= accepted
        prompts = Prompts(
            vocab, prompt_range or spec.prompt_tokens, *labels, shared_tokens=shared_prefix_tokens, text=text
        )
        bodies = Bodies(prompts, payload, output_range or spec.output_tokens, chat=chat)
        scraper = Scraper(client.session, url, load.scrape_interval_s, now)
        await scraper.scrape()
        started_at, start = datetime.now(UTC), now()
        with _writer(spec, run_dir) as write, _quiet_collector():
            tracker = Tracker(
                rule, start, spec.concurrency, lambda r: write(summary.row(r, start)), spec.rate_per_s is not None
            )
            async with _watch(tracker, scraper, rule, on_progress) as health:
                if spec.rate_per_s is None and not replay_s:
                    await closed_loop(
                        client, bodies, tracker,
                        concurrency=spec.concurrency or 1, jitter_s=load.jitter_s, seed=str(labels),
                    )  # fmt: skip
                else:
                    due = arrivals.schedule(
                        "replay" if replay_s else spec.arrivals, spec.rate_per_s or 1.0, *labels,
                        gamma_shape=spec.gamma_shape, times_s=replay_s,
                    )  # fmt: skip
                    await open_loop(client, bodies, tracker, due=due)
    scraper.close()
    point = dict.fromkeys(results.POINT_KEYS) | {
        key: getattr(spec, key)
        for key in ("sweep", "engine", "kind", "point", "concurrency", "rate_per_s", "prompt_tokens", "output_tokens")
    }
    point |= summary.summarize(tracker, slo, batching=batching, scraper=scraper)
    point |= health | {"client_gap_mean_s": stats.mean(tracker.client_gaps)}
    point["seed"] = load.seed
    point["started_at"] = started_at.isoformat(timespec="seconds")
    expected = prompt_set is not None or shared_prefix_tokens > 0
    point["verdict"], point["reasons"] = audit(point, floors, cache_expected=expected)
    if run_dir is not None:
        series = results.series_path(run_dir, spec.sweep, spec.engine, spec.point)
        results.write_csv(series, scraper.columns(), scraper.rows(start))
        results.write_point(run_dir, point)
    return point


def measure_point_sync(spec: PointSpec, **arguments: Any) -> dict[str, Any]:
    """measure_point in a thread and event loop of its own, so that it also works inside a notebook's running loop."""
    outcome: list[Any] = []

    def work() -> None:
        # where allowed, this thread goes first: engines that fill every core would otherwise delay its time stamps
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        try:
            with asyncio.Runner(loop_factory=_fast_loop()) as runner:
                task = runner.get_loop().create_task(measure_point(spec, **arguments))
                holder.append((runner.get_loop(), task))
                outcome.extend((runner.get_loop().run_until_complete(task), None))
        except BaseException as error:
            outcome[:] = [None, error]

    holder: list[Any] = []
    thread = threading.Thread(target=work, name="servebook-load", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C: end the requests before passing it on
        if holder:
            loop, task = holder[0]
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        thread.join(5)
        raise
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _prompt_labels(spec: PointSpec, load: Load, run_dir: Path | None, prompt_set: str | None) -> tuple[object, ...]:
    """What a point's prompts are a function of. A run folder made anew and another attempt at a point get other
    prompts, for a server that still runs may have them in its prefix cache."""
    if run_dir is None:
        return (load.seed, prompt_set) if prompt_set else (load.seed, spec.sweep, spec.engine, spec.point)
    salt = run_dir / "requests" / "prompts.salt"
    if not salt.exists():
        files.write_text(salt, os.urandom(8).hex() + "\n")
    labels = (load.seed, run_dir.name, salt.read_text())
    if prompt_set:
        return (*labels, prompt_set)
    attempt = results.earlier_attempts(results.rows_path(run_dir, spec.sweep, spec.engine, spec.point))
    return (*labels, spec.sweep, spec.engine, spec.point, attempt)


async def _dialect(client: Client, model: str, vocab: range | Sequence[int] | None, *, chat: bool) -> dict[str, Any]:
    """What else the server takes in a request, tried once a process; text is sent where no token ids are given."""
    key = (client.endpoint, model)
    if key not in _dialects:
        prompt: Any = "one two" if vocab is None else [int(v) for v in vocab[:4]]
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        _dialects[key] = await client.accepted(_OPTIONS, {"model": model, **asked, "max_tokens": 2, "stream": True})
    return _dialects[key]


@contextlib.contextmanager
def _writer(spec: PointSpec, run_dir: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    if run_dir is None:
        yield lambda row: None
        return
    path = results.rows_path(run_dir, spec.sweep, spec.engine, spec.point)
    with contextlib.closing(results.RowWriter(path)) as writer:
        yield writer.write


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep the garbage collector from walking everything that was there before while time stamps are taken."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.asynccontextmanager
async def _watch(
    tracker: Tracker, scraper: Scraper, rule: Rule, on_progress: Progress | None
) -> AsyncIterator[dict[str, Any]]:
    """Scrape, measure the client itself, and report progress while the load runs; yields the client's health."""
    health: dict[str, Any] = {}
    lags: list[float] = []
    cpu_at_window = time.thread_time()

    async def lag() -> None:
        while True:
            due = now() + 0.02
            await asyncio.sleep(0.02)
            if tracker.window_start is not None:
                lags.append(max(0.0, now() - due))

    async def edges() -> None:
        nonlocal cpu_at_window
        await tracker.window_opened.wait()
        cpu_at_window = time.thread_time()
        await scraper.scrape()

    async def report() -> None:
        while on_progress:
            warm = tracker.window_start is None
            done, of = (tracker.warm, rule.warmup) if warm else (len(tracker.measured), rule.min_requests)
            seconds = f"{now() - tracker.start:.0f} s of at most {rule.time_limit_s:.0f} s"
            on_progress(f"{'warm-up' if warm else 'measured'} {done}/{of}, {seconds}")
            await asyncio.sleep(0.5)

    async def last_scrape() -> None:
        await tracker.stop.wait()
        health["client_cpu_s"] = time.thread_time() - cpu_at_window
        await scraper.scrape()

    tasks = [asyncio.create_task(t()) for t in (lag, edges, report, scraper.run)]
    closing = asyncio.create_task(last_scrape())
    try:
        yield health
        await closing
    finally:
        for task in (*tasks, closing):
            task.cancel()
        await asyncio.gather(*tasks, closing, return_exceptions=True)
        health["client_loop_lag_p99_s"] = stats.percentile(lags, 99)


def _allow_many_sockets() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))


__all__ = ["PointSpec", "Reply", "measure_point", "measure_point_sync", "rule_of"]
