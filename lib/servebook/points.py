"""The points of a run: what is predicted and measured, in order, and the name each one's files carry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .params import ArrivalRateSweep, ConcurrencySweep, NaiveEngine, PrefixCacheSweep, RunParams, VllmEngine

Kind = Literal["calibration", "concurrency", "prompt_length", "arrival_rate", "prefix_cache"]
CALIBRATION = "calibration"  # the sweep that the C = 1 points belong to


@dataclass(frozen=True, slots=True)
class PointSpec:
    """One point: a sweep, an engine, and the load it is measured under (closed loop unless a rate is given)."""

    sweep: str
    engine: str
    point: str
    kind: Kind
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    gamma_shape: float = 1.0
    fixed_requests: int | None = None  # measure exactly so many, without warm-up rules


@dataclass(frozen=True, slots=True)
class RepeatedPoint(PointSpec):
    """A point that sends, on purpose, the prompts that others of its set have sent before."""

    prompt_set: str = ""


def calibration_points(params: RunParams, engine: str) -> list[PointSpec]:
    """The C = 1 points that the predictor may learn from, in the order given."""
    return [
        PointSpec(
            CALIBRATION,
            engine,
            f"p{p.prompt_tokens:05d}-o{p.output_tokens:04d}",
            "calibration",
            p.prompt_tokens,
            p.output_tokens,
            concurrency=1,
            fixed_requests=p.requests,
        )
        for p in params.calibration
    ]


def sweep_points(params: RunParams, sweep: str, engine: str, capacity_per_s: float | None = None) -> list[PointSpec]:
    """The points of one sweep for one engine, cheapest load first.

    capacity_per_s: the request rate that shares_of_capacity are shares of; without it such a sweep has no points yet.
    """
    s = params.sweeps[sweep]
    if s.engines is not None and engine not in s.engines:
        return []
    if isinstance(s, ConcurrencySweep):
        return [
            PointSpec(sweep, engine, f"c{c:04d}", "concurrency", s.prompt_tokens, s.output_tokens, concurrency=c)
            for c in s.concurrency
        ]
    if isinstance(s, PrefixCacheSweep):
        return _prefix_cache_points(params, s, sweep, engine)
    if isinstance(s, ArrivalRateSweep):
        return [
            PointSpec(
                sweep,
                engine,
                f"r{rate:.3f}",
                "arrival_rate",
                s.prompt_tokens,
                s.output_tokens,
                rate_per_s=rate,
                arrivals=s.arrivals,
                gamma_shape=s.gamma_shape,
            )
            for rate in rates(s, capacity_per_s)
        ]
    return [
        PointSpec(sweep, engine, f"p{n:05d}", "prompt_length", n, s.output_tokens, concurrency=s.concurrency)
        for n in s.prompt_tokens
    ]


def _prefix_cache_points(params: RunParams, s: PrefixCacheSweep, sweep: str, engine: str) -> list[PointSpec]:
    """Every C with fresh prompts; then, where the engine may cache prefixes, every C with the same prompts."""
    tokens = s.prompt_tokens, s.output_tokens
    fresh = [PointSpec(sweep, engine, f"fresh-c{c:04d}", s.kind, *tokens, concurrency=c) for c in s.concurrency]
    how = params.engines[engine]
    if isinstance(how, NaiveEngine) or (isinstance(how, VllmEngine) and not how.prefix_caching):
        return fresh
    same = [
        RepeatedPoint(
            sweep, engine, f"same-c{c:04d}", s.kind, *tokens, concurrency=c, prompt_set=f"{sweep}/{engine}"
        )
        for c in s.concurrency
    ]  # fmt: skip
    return [*fresh, *same]


def rates(sweep: ArrivalRateSweep, capacity_per_s: float | None) -> Iterable[float]:
    """Requests per second of an open-loop sweep; shares are rounded so that a point's name stays what it was."""
    if sweep.rates_per_s:
        return list(sweep.rates_per_s)
    if capacity_per_s is None:
        return []
    return [max(0.001, round(share * capacity_per_s, 3)) for share in sweep.shares_of_capacity]
