"""The points of a run: what is predicted and measured, in order, and the name each one's files carry."""

from __future__ import annotations

from dataclasses import dataclass

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
