"""The fields of a predicted point other than its metrics: load, reason for having no figures, notes, time series."""

from __future__ import annotations

from typing import Any, TypedDict

from ..common.predicted_point import PredictedPoint
from ..config.points import PointSpec, RepeatedPoint
from .refusal import Refusal
from .scenario import Outcome, Scenario
from .simulation_result import Result, over_time


def load_fields(spec: PointSpec) -> PredictedPoint:
    """A predicted point with its load and no figures."""
    out: PredictedPoint = {
        "sweep": spec.sweep, "engine": spec.engine, "point": spec.point, "kind": spec.kind,
        "concurrency": spec.clients, "rate_per_s": spec.rate_per_s, "prompt_tokens": spec.prompt_tokens,
        "output_tokens": spec.output_tokens, "metrics": {},
    }  # fmt: skip
    if isinstance(spec, RepeatedPoint):
        out["repeats_prompts"] = True
    if spec.workload is not None or spec.requests is not None:
        out["workload"], out["requests"] = spec.workload_name or None, spec.requests
    return out


def unserved(spec: PointSpec, why: Refusal | None, wall_s: float = 0.0) -> PredictedPoint:
    """A predicted point without figures; its note is the reason."""
    out: PredictedPoint = {**load_fields(spec), "wall_s": wall_s, "breakdown": {}, "fits": False, "note": None}
    return {**out, "refused": why.headline, "note": str(why)} if why else out


class WorkloadFields(TypedDict, total=False):
    hit_share: float
    series: Any


def workload_fields(spec: PointSpec, central: Outcome, first: Result) -> WorkloadFields:
    """Fields that only workloads and finite runs have: the prefix cache's hit share, and time series."""
    out: WorkloadFields = {}
    if spec.workload is not None and spec.workload.repeats:
        out["hit_share"] = central.hit_share
    if spec.requests is not None:
        out["series"] = over_time(first)
    return out


def notes(
    scenario: Scenario, limit_s: float, central: Outcome, first: Result, expected: int, excess: str | None
) -> list[str]:
    """Notes on a predicted point: what its figures leave out or depend on.

    limit_s: load.max_seconds. expected: number of requests that the client will measure. excess: a text with arrival
    rate and capacity if the rate exceeds the capacity, else None.
    """
    out, spec, limit, server = [*scenario.server.notes], scenario.spec, limit_s, scenario.server
    c = spec.clients
    if spec.requests is not None:
        out.append(f"a finite run: all {spec.requests} requests are measured, with ramp-up and tail")
        if excess:
            out.append(f"overloaded ({excess}): figures depend on the number of requests")
    elif c and not spec.fixed_requests and expected < c:
        # clients are synchronized: a round ends as a whole, or not at all
        needed = first.window[0] + c / central.request_rate_per_s
        out.append(f"max_seconds ({limit:g} s) is too short for one measured round of all {c} clients ({needed:.0f} s)")
    elif central.window_s >= limit * (1 - 1e-9):  # a mean of equal numbers has rounding errors
        out.append(f"cut off at max_seconds ({limit:g} s)")
    if central.preemptions:
        out.append("the KV pool overflows: requests are preempted and recomputed")
    elif c and c > central.running_mean * 1.5 and not server.naive:
        out.append(f"only {central.running_mean:.0f} of {c} requests run at a time")
    if scenario.cached_prompts:
        found = sum(r.id < scenario.cached_prompts for r in first.requests) / max(len(first.requests), 1)
        out.append(f"{found:.0%} of its prompts are expected in the prefix cache")
    return out
