"""Measures points, alone or as the stages of a ramp: from a spec to rows, series and figures.

One module, since all of it is one sequence of steps: connect, run the loops, summarize, write.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..config import arrivals, request_plan
from ..config.lengths import Length
from ..config.params import Load, Slo
from ..config.points import PointSpec, RepeatedPoint
from ..config.workloads import Workload
from ..run_folder import results
from ..run_folder.layout import RunFiles
from ..scoring.audit import judge
from . import finished, summary
from .client import Client, CountBy, Reply, now, without_secrets
from .loops import ClosedLoop, OpenLoop
from .metrics import Scraper
from .probe import Dialect, Probe, find_dialect, names
from .prompts import Bodies, Prompts
from .runtime import allow_many_sockets, in_thread, quiet_collector
from .watch import ProgressCallback, watch
from .window import PointProgress, Rule


def rule_of(spec: PointSpec, load: Load, deadline_s: float | None = None) -> Rule:
    """When the warm-up ends and when the point ends."""
    c, capped = spec.clients or 1, not spec.closed and spec.concurrency is not None
    if spec.requests is not None:
        n, limit = spec.requests, min(_finite_limit_s(spec, load), math.inf if deadline_s is None else deadline_s)
        return Rule(0, n, n, 0.0, limit, exactly=n, finite=True, capped=capped)
    limit = min(load.max_seconds, deadline_s) if deadline_s is not None else load.max_seconds
    if spec.fixed_requests is not None:
        n = spec.fixed_requests
        # one-time costs of the first request (caches, lazily built kernels) must not enter calibration
        return Rule(max(c, min(3, load.warmup_requests)), n, n, 0.0, limit, exactly=n)
    least, most = load.least_and_most(spec.clients)
    by_rounds = spec.clients and load.max_rounds is not None and most == load.max_rounds * c
    name = f"max_rounds ({load.max_rounds})" if by_rounds else ""
    return Rule(max(c, load.warmup_requests), least, most, load.min_seconds, limit, limit=name, capped=capped)


def _finite_limit_s(spec: PointSpec, load: Load) -> float:
    """A time after which the last request of a finite run has certainly ended, because of the request timeout."""
    count = spec.requests or 1
    last_s = 0.0 if spec.closed else float(request_plan.due_times(spec, load, count)[-1])
    rounds = -(-count // spec.concurrency) if spec.concurrency else 1
    return last_s + 1.0 + rounds * (load.request_timeout_s + load.jitter_s)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How points are measured: the server, the requests, the rules, and where results go.

    vocab: token ids that prompts may use; lower_vocabs: alternatives if the server lacks those ids. batching: whether
    the engine decodes requests together. run_dir: folder of rows and series (None: not stored). floors: see audit.
    deadline_s: limit on a stage's seconds besides load.max_seconds. rules: warm-up and end of each stage, instead of
    rule_of. prompt_set: points with the same set send the same prompts (otherwise every point has its own).
    prompt_lengths, output_lengths: instead of the spec's. text: words instead of token ids; always so at a chat
    endpoint. turns: requests per conversation, each with the whole conversation in its prompt (closed loop only).
    on_progress gets a short text about twice per second.
    """

    url: str
    model: str
    vocab: range | Sequence[int]
    lower_vocabs: Sequence[range] = ()
    load: Load
    slo: Slo
    run_dir: Path | None
    batching: bool
    floors: Mapping[str, float] | None = None
    on_progress: ProgressCallback | None = None
    deadline_s: float | None = None
    rules: Sequence[Rule] | None = None
    api_key: str | None = None
    prompt_set: str | None = None
    shared_prefix_tokens: int = 0
    replay_s: Sequence[float] = ()
    prompt_lengths: Length | None = None
    output_lengths: Length | None = None
    endpoint: str = "/v1/completions"
    text: bool = False
    turns: int = 1
    count_tokens: CountBy = "usage"

    @property
    def chat(self) -> bool:
        """Whether the endpoint takes messages."""
        return self.endpoint.endswith("/chat/completions")

    def set_of(self, spec: PointSpec) -> str | None:
        """The set whose prompts the point sends, None if it has its own."""
        return self.prompt_set or (spec.prompt_set if isinstance(spec, RepeatedPoint) else None)

    def plan_of(self, spec: PointSpec) -> request_plan.RequestPlan:
        """The plan of its requests."""
        return request_plan.of_point(spec, self.load) or request_plan.RequestPlan(
            Workload.of(
                self.prompt_lengths or spec.prompt_tokens, self.output_lengths or spec.output_tokens,
                shared_tokens=self.shared_prefix_tokens, turns=self.turns,
            ),
            self.load.seed, "lengths",
        )  # fmt: skip


async def measure_point(spec: PointSpec, *, rule: Rule | None = None, **options: Any) -> MeasuredPoint:
    """Load one server with one point's requests and return the point.

    rule: warm-up and end of the point, instead of rule_of. options: fields of LoadOptions.
    """
    return (await measure_ramp([spec], rules=[rule] if rule else None, **options))[0]


async def measure_ramp(specs: Sequence[PointSpec], **options: Any) -> list[MeasuredPoint]:
    """Load one server in stages without a pause between them, and return each stage's point.

    Every stage has its own warm-up and window; a closed loop's clients only increase, and an open loop's rate changes
    at once. Requests in flight at the end of a stage are warm-up requests of the next.

    options: fields of LoadOptions. Raises ServebookError if nothing answers, the server refuses the requests, or
    results cannot be written.
    """
    o = LoadOptions(**options)
    allow_many_sockets(max(s.concurrency or 1 for s in specs))
    rules = o.rules or [rule_of(spec, o.load, o.deadline_s) for spec in specs]
    plan = o.plan_of(specs[0])
    stages: list[_Stage] = []
    async with (
        Client(
            o.url, endpoint=o.endpoint, api_key=o.api_key, timeout_s=o.load.request_timeout_s, count_by=o.count_tokens
        ) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        dialect = await _connect(client, specs, rules[0], o, talks=plan.has_conversations)
        loops = _loops(client, specs[0], dialect, plan, o)
        stack.enter_context(quiet_collector())
        for spec, rule in zip(specs, rules, strict=True):
            scraper = Scraper(client.session, o.url, o.load.scrape_interval_s, now)
            await scraper.scrape()
            started_at, start = datetime.now(UTC), now()
            write = stack.enter_context(_writer(spec, o.run_dir))
            keep = partial(_keep, write, start) if o.run_dir else _forget
            clients = spec.concurrency if loops.closed else None
            tracker = PointProgress(rule, start, clients, keep, not loops.closed, last=spec is specs[-1])
            async with watch(tracker, scraper, rule, o.on_progress) as health:
                await loops.run(tracker, spec, o)
            stages.append(_Stage(spec, tracker, scraper, health, started_at))
    asked = {
        "url": without_secrets(o.url), "endpoint": without_secrets(client.endpoint), "model": o.model,
        "request_fields": names(dialect.fields), "count_tokens": o.count_tokens, **_told(dialect, o.text or o.chat),
    }  # fmt: skip
    cache_expected = o.set_of(specs[0]) is not None or plan.workload.repeats
    return [_point(stage, o, cache_expected, asked) for stage in stages]


async def _connect(client: Client, specs: Sequence[PointSpec], rule: Rule, o: LoadOptions, *, talks: bool) -> Dialect:
    """Open connections and find out which requests the server accepts. Raises ServebookError without an answer in
    time."""
    try:
        async with asyncio.timeout(rule.time_limit_s):
            await client.open_connections(min(max(s.concurrency or 8 for s in specs), 1024))
            probe = Probe(client, 0.9 * rule.time_limit_s, o.on_progress)
            vocabs = [o.vocab, *o.lower_vocabs]
            return await find_dialect(probe, o.model, vocabs, text=o.text or o.chat, chat=o.chat, ids=talks)
    except TimeoutError:
        raise ServebookError(f"no answer within {rule.time_limit_s:g} s", o.url, "See the server's log") from None


@dataclass(frozen=True)
class _Loops:
    """The closed and the open loop of one client; a ramp's stages use one of them."""

    closed_loop: ClosedLoop
    open_loop: OpenLoop
    closed: bool

    async def run(self, tracker: PointProgress, spec: PointSpec, o: LoadOptions) -> None:
        if self.closed:
            await self.closed_loop.run(tracker, spec.concurrency or 1)
        else:
            await self.open_loop.run(tracker, _due(spec, o.load, o.replay_s))


def _loops(
    client: Client, first: PointSpec, dialect: Dialect, plan: request_plan.RequestPlan, o: LoadOptions
) -> _Loops:
    load = o.load
    payload = {"model": o.model, "stream": True, "temperature": load.temperature}
    payload |= {k: v for k, v in (("top_p", load.top_p), ("top_k", load.top_k)) if v is not None}
    payload |= dialect.fields
    assert dialect.vocab is not None
    labels = _prompt_labels(first, load, o.run_dir, o.set_of(first))
    bodies = Bodies(Prompts(dialect.vocab, plan, *labels, text=o.text or o.chat), payload, chat=o.chat)
    # a point that is measured again has the same pauses
    seed = f"pauses {load.seed} {first.sweep} {first.engine} {first.point}"
    return _Loops(
        ClosedLoop(client, bodies, jitter_s=load.jitter_s, seed=seed, limit=first.requests),
        OpenLoop(client, bodies, cap=first.concurrency),
        first.closed and not o.replay_s,
    )


def _due(spec: PointSpec, load: Load, replay_s: Sequence[float]) -> Iterator[float]:
    """When a point's requests are due, in seconds from its start."""
    if spec.requests is not None:
        return iter(request_plan.due_times(spec, load, spec.requests).tolist())
    kind = "replay" if replay_s else spec.arrivals
    labels = request_plan.arrival_labels(spec, load)
    rate = spec.rate_per_s or 1.0
    return arrivals.schedule(kind, rate, *labels, gamma_shape=spec.gamma_shape, times_s=replay_s)


@dataclass(frozen=True)
class _Stage:
    spec: PointSpec
    tracker: PointProgress
    scraper: Scraper
    health: dict[str, Any]
    started_at: datetime


def _point(stage: _Stage, o: LoadOptions, cache_expected: bool, asked: Mapping[str, Any]) -> MeasuredPoint:
    """A measured stage as a judged point; its series is stored."""
    spec, tracker, scraper, load, slo = stage.spec, stage.tracker, stage.scraper, o.load, o.slo
    scraper.close()
    point = MeasuredPoint(
        sweep=spec.sweep,
        engine=spec.engine,
        kind=spec.kind,
        point_id=spec.point,
        concurrency=spec.clients,
        in_flight_cap=None if spec.closed else spec.concurrency,
        workload=spec.workload_name or None,
        finite_requests=spec.requests,
        speed=spec.speed if spec.kind == "trace" else None,
        rate_per_s=spec.rate_per_s,
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        client_gap_mean_s=tracker.pause_mean_s,
        seed=load.seed,
        temperature=load.temperature,
        top_p=load.top_p,
        top_k=load.top_k,
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        slo_e2e_s=slo.e2e_s,
        repeats_prompts=True if isinstance(spec, RepeatedPoint) else None,
        started_at=stage.started_at.isoformat(timespec="seconds"),
        **asked,
        **stage.health,
    )
    point = summary.summarize(point, tracker, slo, batching=o.batching, scraper=scraper)
    tracker.finished.close()
    verdict, reasons = judge(point, spec, o.floors, cache_expected=cache_expected)
    if o.run_dir is not None:
        series = results.series_path(o.run_dir, spec.sweep, spec.engine, spec.point)
        results.write_csv(series, scraper.columns(), scraper.rows(tracker.start))
    return replace(point, verdict=verdict, reasons=reasons)


def measure_point_sync(spec: PointSpec, **options: Any) -> MeasuredPoint:
    """measure_point in a thread and event loop of its own, so that it also works inside a notebook's running loop."""
    return in_thread(lambda: measure_point(spec, **options))


def measure_ramp_sync(specs: Sequence[PointSpec], **options: Any) -> list[MeasuredPoint]:
    """measure_ramp, as measure_point_sync."""
    return in_thread(lambda: measure_ramp(specs, **options))


def _prompt_labels(spec: PointSpec, load: Load, run_dir: Path | None, prompt_set: str | None) -> tuple[object, ...]:
    """The labels that determine a point's prompts. A new run folder and another attempt at a point get other prompts,
    because a running server may have the old ones in its prefix cache."""
    if run_dir is None:
        return (load.seed, prompt_set) if prompt_set else (load.seed, spec.sweep, spec.engine, spec.point)
    salt = RunFiles(run_dir).prompts_salt
    if not salt.exists():
        files.write_text(salt, os.urandom(8).hex() + "\n")
    labels = (load.seed, run_dir.name, salt.read_text())
    if prompt_set:
        return (*labels, prompt_set)
    attempt = results.earlier_attempts(results.rows_path(run_dir, spec.sweep, spec.engine, spec.point))
    return (*labels, spec.sweep, spec.engine, spec.point, attempt)


def _told(dialect: Dialect, text: bool) -> dict[str, Any]:
    """The probe requests that were sent, in words."""
    vocab = dialect.vocab or ()
    prompts = "words" if text else f"token ids {vocab[0]} to {vocab[-1]}"
    probes = f"{dialect.answered} of 2 tokens answered" + (f", {dialect.refused} refused" if dialect.refused else "")
    return {"prompts": prompts, "probes": probes, "notes": list(dialect.notes)}


def _keep(write: Callable[[Mapping[str, Any]], None], start: float, reply: Reply) -> None:
    write(finished.row(reply, start).to_json())


def _forget(_: Reply) -> None:
    pass


@contextlib.contextmanager
def _writer(spec: PointSpec, run_dir: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    if run_dir is None:
        yield lambda row: None
        return
    path = results.rows_path(run_dir, spec.sweep, spec.engine, spec.point)
    with contextlib.closing(results.RowWriter(path)) as writer:
        yield writer.write
