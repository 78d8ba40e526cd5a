"""Which frozen prediction counts for a point: the newest of its stage that was frozen before the point was measured."""

from __future__ import annotations

from collections.abc import Iterable

from ..common.measured_point import PointKey
from ..common.predicted_point import PredictedPoint, StagePrediction


def key(point: PredictedPoint) -> PointKey:
    """What names a point in a run."""
    return point["sweep"], point["engine"], point["point"]


def standing(frozen: Iterable[StagePrediction]) -> list[StagePrediction]:
    """The entries of predictions.json, oldest first, as one entry a stage: the newest one's, with the points and the
    capacities that count, points in the order in which they were first predicted."""
    stages: dict[str, StagePrediction] = {}
    for entry in frozen:
        before = stages.get(entry["stage"])
        if before is None or not entry.get("additional"):
            stages[entry["stage"]] = entry.copy()
            continue
        points = {key(p): p for p in before["points"]} | {key(p): p for p in entry["points"]}
        # rates are shares of what was frozen first
        capacity = {**entry.get("capacity_per_s", {}), **before.get("capacity_per_s", {})}
        stages[entry["stage"]] = {**entry, "points": list(points.values()), "capacity_per_s": capacity}
    return list(stages.values())


def of_stage(frozen: Iterable[StagePrediction], stage: str) -> StagePrediction | None:
    """The standing entry of a stage, None where nothing was frozen."""
    return next((e for e in standing(frozen) if e["stage"] == stage), None)
