"""Which frozen prediction of a point is valid: its stage's newest one frozen before the point was measured."""

from __future__ import annotations

from collections.abc import Iterable

from ..common.measured_point import PointKey
from ..common.predicted_point import PredictedPoint, StagePrediction


def key(point: PredictedPoint) -> PointKey:
    """Identifies a point within a run."""
    return point["sweep"], point["engine"], point["point"]


def standing(frozen: Iterable[StagePrediction]) -> list[StagePrediction]:
    """The entries of predictions.json, oldest first, merged to one entry per stage: the newest one, with the valid
    points and capacities, points in the order of their first prediction."""
    stages: dict[str, StagePrediction] = {}
    for entry in frozen:
        before = stages.get(entry["stage"])
        if before is None or not entry.get("additional"):
            stages[entry["stage"]] = entry.copy()
            continue
        points = {key(p): p for p in before["points"]} | {key(p): p for p in entry["points"]}
        # rates are shares of the capacity frozen first
        capacity = {**entry.get("capacity_per_s", {}), **before.get("capacity_per_s", {})}
        stages[entry["stage"]] = {**entry, "points": list(points.values()), "capacity_per_s": capacity}
    return list(stages.values())


def of_stage(frozen: Iterable[StagePrediction], stage: str) -> StagePrediction | None:
    """The merged entry of a stage, None if nothing was frozen."""
    return next((e for e in standing(frozen) if e["stage"] == stage), None)
