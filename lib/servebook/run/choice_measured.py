"""Checks a choice against runs that measured it and its alternatives: the service level and the prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common import stats
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..config.params import VllmEngine
from ..hardware.catalog import Gpu
from ..predictor.choice import Choice, name, percent, replicas_of
from ..predictor.choice_search import Candidate
from ..predictor.refusal import Refusal
from ..predictor.set_ups import PricedGpu, SetUp
from ..predictor.steptime import VllmTimes
from .book import Book

SAME_LOAD = 0.02  # relative difference of loads that still count as a replica's share
RARE = 0.05  # probability at or above which a missed level contradicts the prediction


@dataclass(frozen=True)
class MeasuredChoice:
    """One measured set-up. values: {latency: (value, low, high)} at the level's percentiles, 95 % intervals."""

    candidate: Candidate
    engine: str
    run: str
    point: MeasuredPoint
    values: dict[str, tuple[float, float, float]]

    def meets(self, choice: Choice) -> bool:
        return all(self.values[m][0] <= limit for m, (limit, _) in choice.limits.items())


def check(choice: Choice, run_dirs: Sequence[Path]) -> dict[str, Any]:
    """{"stands": True, False, or None if the choice was not measured; "lines": the verdict in words; "measured": every
    set-up's figures}. Raises ServebookError for a folder without a point of the target load."""
    found = [m for folder in run_dirs for m in _of_run(choice, Book.at(folder))]
    if not found:
        folders = ", ".join(map(str, run_dirs))
        fix = "Measure what choose --write-params writes: one replica's share of the target load"
        raise ServebookError("no point of the target load was measured there", folders, fix)
    lines: list[str] = []
    for m in found:
        lines += _lines(choice, m)
    own = [m for m in found if _same(m.candidate.set_up, choice.chosen.set_up)]
    meeting = [m for m in found if m.meets(choice)]
    stands: bool | None = None
    if own:
        cheapest = min((m.candidate.cost_per_hour for m in meeting), default=math.inf)
        stands = own[0].meets(choice) and own[0].candidate.cost_per_hour <= cheapest * (1 + 1e-9)
    lines.append(_verdict(choice, own, meeting, stands))
    return {"stands": stands, "lines": lines, "measured": [_row(choice, m) for m in found]}


def _of_run(choice: Choice, book: Book) -> list[MeasuredChoice]:
    found = []
    for engine_name, engine in book.params.engines.items():
        if not isinstance(engine, VllmEngine):
            continue
        for point in book.stored_points():
            replicas = _replicas(choice, point)
            if point.engine != engine_name or replicas is None or point.verdict == "invalid":
                continue
            rows = book.requests(point.sweep)
            rows = rows[
                (rows["engine"] == engine_name) & (rows["point"] == point.point_id) & (rows["phase"] == "measured")
            ]
            rows = rows[rows["ok"].astype(bool)]
            gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
            if replicas * gpus > choice.space.max_gpus:
                continue
            values = {m: _percentile(rows[m], p) for m, (_, p) in choice.limits.items()}
            if any(math.isnan(v[0]) for v in values.values()):
                continue
            c = _candidate(choice, _set_up(choice, book, engine), replicas)
            if c is not None:
                found.append(MeasuredChoice(c, engine_name, book.params.run, point, values))
    return found


def _percentile(values: Any, p: float) -> tuple[float, float, float]:
    x = np.asarray(values.dropna(), dtype=float)
    value = stats.percentile(x, p)
    if value is None:
        return math.nan, math.nan, math.nan
    low, high = stats.percentile_interval(x, p) or (value, value)
    return value, low, high


def _replicas(choice: Choice, point: MeasuredPoint) -> int | None:
    """The number of replicas that share the target load if each gets this point's load; None: no number does."""
    target = choice.target
    if (point.prompt_tokens, point.output_tokens) != (target.prompt_tokens, target.output_tokens):
        return None
    if target.users is not None and point.kind == "concurrency" and point.concurrency:
        replicas = math.ceil(target.users / point.concurrency)
        return replicas if math.ceil(target.users / replicas) == point.concurrency else None
    if target.rate_per_s is not None and point.rate_per_s:
        count = target.rate_per_s / point.rate_per_s
        return round(count) if round(count) >= 1 and abs(count / round(count) - 1) < SAME_LOAD else None
    if target.trace_speed is not None and point.kind == "trace":
        return max(1, round(target.trace_speed / (float(point.point_id.lstrip("x")) or 1.0)))
    return None


def _set_up(choice: Choice, book: Book, engine: VllmEngine) -> SetUp:
    """A measured engine as a set-up, at the searched price, otherwise the run's."""
    gpu: Gpu = book.gpu
    gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    card = next((c.set_up.card for c in choice.candidates if c.set_up.gpu.name == gpu.name), None)
    card = card or PricedGpu(gpu, book.params.hardware.price_per_hour / gpus or math.nan, f"run {book.params.run}")
    m = book.params.model
    return SetUp(card, m.quantization, m.kv_cache_dtype, engine)


def _same(a: SetUp, b: SetUp) -> bool:
    """Whether two set-ups are the same card with the same settings."""
    keys = (
        "max_num_batched_tokens", "max_num_seqs", "prefix_caching", "tensor_parallel_size", "pipeline_parallel_size",
        "data_parallel_size", "enable_expert_parallel",
    )  # fmt: skip
    return a.kind == b.kind and all(getattr(a.engine, k) == getattr(b.engine, k) for k in keys)


def _candidate(choice: Choice, s: SetUp, replicas: int) -> Candidate | None:
    """The measured set-up as a candidate of the search, judged at its number of replicas; None if it was not
    searched."""
    known = next((c for c in choice.candidates if _same(c.set_up, s)), None)
    if known is not None and known.replicas == replicas and known.judged is not None:
        return known
    shapes = choice.workshop.shapes
    if (s.quantization, s.kv_cache_dtype) not in shapes:
        return None
    server = choice.workshop.limits(s, *choice.target.longest())
    if isinstance(server, Refusal):
        return None
    times = choice.workshop.times(s, server)
    assert isinstance(times, VllmTimes)
    found = Candidate(s, server, times, replicas=replicas)
    search = choice.search_at(choice.target)
    found.estimate = search.estimated(found, replicas)
    found.judged = search.simulate_draws(found, replicas)
    return found


def _lines(choice: Choice, m: MeasuredChoice) -> list[str]:
    c, verdict = m.candidate, "meets" if m.meets(choice) else "misses"
    sure = f"{percent(c.judged.probability)} predicted" if c.judged else "predicted to fall behind"
    cost = f"{c.cost_per_hour:.2f} {choice.currency}/h"
    lines = [f"{m.run}, {m.engine}: {verdict} the level ({sure}); {replicas_of(c.replicas or 1, c.set_up)}, {cost}"]
    for latency, (limit, p) in choice.limits.items():
        value, low, high = m.values[latency]
        text = f"    {name(latency)} p{p:g} measured {value:.3g} s ({low:.3g} to {high:.3g}) of {limit:g} s"
        if c.judged:
            v = c.judged.values[latency]
            inside = "inside" if v["low"] <= value <= v["high"] else "outside"
            text += f"; predicted {v['value']:.3g} s, {inside} {v['low']:.3g} to {v['high']:.3g}"
        lines.append(text)
    probability = c.judged.probability if c.judged else 0.0
    if (probability if m.meets(choice) else 1 - probability) < RARE:
        lines.append(f"    the stated probability of {percent(probability)} is contradicted")
    return lines


def _verdict(
    choice: Choice, own: Sequence[MeasuredChoice], meeting: Sequence[MeasuredChoice], stands: bool | None
) -> str:
    if stands is None:
        return f"the choice itself was not measured: {choice.chosen.set_up.name}"
    if stands:
        name_of = own[0].candidate.set_up.name
        return f"the choice is confirmed: {name_of} meets the level, and nothing cheaper that was measured does"
    if not meeting:
        return "the choice is not confirmed: nothing that was measured meets the level"
    best = min(meeting, key=lambda m: m.candidate.cost_per_hour).candidate
    cost = f"{best.cost_per_hour:.2f} {choice.currency}/h"
    return f"the choice is not confirmed: {best.set_up.name} meets the level for {cost}"


def _row(choice: Choice, m: MeasuredChoice) -> dict[str, Any]:
    judged = m.candidate.judged
    return {
        **m.candidate.set_up.as_dict(), "run": m.run, "engine": m.engine, "point": m.point.point_id,
        "replicas": m.candidate.replicas, "cost_per_hour": m.candidate.cost_per_hour, "meets": m.meets(choice),
        "probability": judged.probability if judged else None,
        "predicted": judged.values if judged else None,
        "values": {k: dict(zip(("value", "low", "high"), v, strict=True)) for k, v in m.values.items()},
        "verdict": m.point.verdict,
    }  # fmt: skip
