"""The points of a run: what is predicted and measured, in order, and the name each one's files carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .params import RunParams

CALIBRATION = "calibration"  # the sweep that the C = 1 points belong to
# What load client and predictor alike go by: the relative half-widths of the 95 % intervals of mean E2E and TTFT at
# which a point may end, and the share of the mean latency that a pause stays below (so in flight is within 2 % of C)
NARROW_E2E, NARROW_TTFT, OCCUPANCY_LOSS = 0.02, 0.05, 0.04


@dataclass(frozen=True, slots=True)
class PointSpec:
    """One point: a sweep, an engine, and the load it is measured under (closed loop unless a rate is given)."""

    sweep: str
    engine: str
    point: str
    kind: str  # of the sweep (sweeps.py), or "calibration"
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    gamma_shape: float = 1.0
    fixed_requests: int | None = None  # measure exactly so many, without warm-up rules


@dataclass(frozen=True, slots=True)
class RepeatedPoint(PointSpec):
    """A point that sends, on purpose, the prompts that others of its set have sent before; `point` says so first."""

    prompt_set: str = ""


SAME = "same-"  # how the name of a RepeatedPoint begins


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
    """The points of one sweep for one engine, cheapest load first; none where the engine takes no part.

    capacity_per_s: the request rate that shares_of_capacity are shares of; without it such a sweep has no points yet.
    """
    s = params.sweeps[sweep]
    if s.engines is not None and engine not in s.engines:
        return []
    return s.points(sweep, engine, params.engines[engine], capacity_per_s)
