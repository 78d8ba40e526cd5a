"""predictions.json: predictions frozen before the points they predict are measured.

As long as nothing is measured, a new prediction of a stage replaces the old one. Afterwards it is stored as an
`additional` entry with only the points not measured by then. So the newest prediction of a point is always the valid
one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from .. import __version__
from ..common import files
from ..common.measured_point import PointKey
from ..common.predicted_point import FrozenPredictions, PredictedPoint, Prediction, StagePrediction
from ..config.points import CALIBRATION
from ..scoring.standing import key, of_stage
from . import provenance, results
from .layout import RunFiles


def freeze(
    run_dir: Path, stage: str, prediction: Prediction, measured: Collection[PointKey] | None = None
) -> StagePrediction:
    """Write a prediction into predictions.json; returns the stage's valid entry (see above).

    stage: "datasheet" or "calibrated:<engine>". As long as no point that the stage predicts is measured (for a
    calibrated stage: no point of that engine beyond its calibration), a new prediction replaces the previous one.
    Afterwards frozen predictions stay, and an additional entry is written for points that are not measured yet and have
    a new prediction. Unchanged inputs, or nothing new, write nothing. The first entry of a stage is marked `late` if
    such a point is already measured. measured: those points; default: all in the folder.
    """
    path = RunFiles(run_dir).predictions
    stored = read(run_dir)
    before = of_stage(stored["frozen"], stage)
    digest = provenance.sha256(prediction["inputs"])
    if kept := unchanged(run_dir, stage, prediction["inputs"]):
        return kept
    seen = _measured(run_dir)
    overtaken = any(_held_out(k, stage) for k in seen)
    predicted: list[PredictedPoint] = _finite(prediction["points"])
    additional = overtaken and before is not None
    if before is not None and additional:
        known = {key(p): p for p in before["points"]}
        seen = set(seen if measured is None else measured)
        predicted = [p for p in predicted if key(p) not in seen and known.get(key(p)) != p]
        if not predicted:
            return before
    entry: StagePrediction = {
        "stage": stage,
        "time_utc": provenance.now_utc(),
        "inputs_sha256": digest,
        "servebook_version": __version__,
        "late": overtaken and before is None,  # nothing was frozen before the first measurement
        "additional": additional,
        "constants": prediction["constants"],
        "capacity_per_s": prediction["capacity_per_s"],
        "servers": prediction["servers"],
        "points": predicted,
    }
    stored["frozen"].append(_finite(entry))
    files.write_json(path, stored)
    return of_stage(stored["frozen"], stage) or entry


def unchanged(run_dir: Path, stage: str, inputs: Mapping[str, Any]) -> StagePrediction | None:
    """The stage's valid entry if it was predicted from these inputs, so that it need not be predicted again."""
    before = of_stage(read(run_dir)["frozen"], stage)
    return before if before is not None and before.get("inputs_sha256") == provenance.sha256(inputs) else None


def frozen_capacity(run_dir: Path, stage: str) -> dict[str, float]:
    """The capacities that a stage's rates are shares of, once a measurement has made them final; {} before."""
    before = of_stage(read(run_dir)["frozen"], stage)
    final = any(_held_out(k, stage) for k in _measured(run_dir))
    return dict(before["capacity_per_s"]) if before and final else {}


def _measured(run_dir: Path) -> set[PointKey]:
    """Every complete point."""
    return {p.key for p in results.read_points(run_dir)}


def _held_out(key: PointKey, stage: str) -> bool:
    """Whether the stage predicts the point without having been calibrated on it."""
    engine = stage.partition(":")[2]
    return not engine or (key[1] == engine and key[0] != CALIBRATION)


def _finite(value: Any) -> Any:
    """Infinite and NaN values as null, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def read(run_dir: Path) -> FrozenPredictions:
    """The content of predictions.json, also of earlier versions; an empty one if there is no file."""
    stored = files.read_object(RunFiles(run_dir).predictions, "frozen")
    return cast(FrozenPredictions, stored or {"frozen": []})
