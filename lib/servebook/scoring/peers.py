"""Other predictors' predictions of a run's points: read from peers.csv in the run's folder, scored on the same points.

peers.csv has one row per peer and point: `peer` (name and version), sweep, engine, point, and any of ttft_s, tpot_s,
output_tok_per_s, decode_tok_per_s, e2e_s, request_rate_per_s; an empty field means no prediction. Further columns hold
the peer's settings and are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import Metric
from ..common.predicted_point import PredictedPoint, PredictedValue, StagePrediction

if TYPE_CHECKING:
    import pandas as pd

NEEDED = ("peer", "sweep", "engine", "point")


def read(path: Path) -> list[StagePrediction]:
    """One stage per peer, in the file's order, for score.score; [] if there is no file.

    Raises ServebookError for a missing column, a row without a point, and an impossible value.
    """
    from .score import MEASURED

    stages: dict[str, list[PredictedPoint]] = {}
    for where, row in files.read_csv(path, NEEDED) if path.exists() else []:
        if unnamed := [c for c in NEEDED if not row[c]]:
            raise ServebookError(f"{unnamed[0]} is empty", where, "Name the peer and its point")
        metrics: dict[Metric, PredictedValue] = {
            metric: {"value": _figure(metric, row[metric], where)} for metric in MEASURED if row.get(metric)
        }
        point: PredictedPoint = {
            "sweep": row["sweep"], "engine": row["engine"], "point": row["point"], "metrics": metrics
        }  # fmt: skip
        stages.setdefault(row["peer"], []).append(point)
    return [{"stage": peer, "points": points} for peer, points in stages.items()]


def _figure(metric: str, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ServebookError(f"{metric} is {text!r}", where, "Write a positive number, or leave the cell empty")
    return value


def beside(
    points: Any,
    frozen: Iterable[StagePrediction],
    peers: Iterable[StagePrediction],
    calibration_workloads: set[tuple[int, int]],
) -> pd.DataFrame:
    """Mean absolute errors of each peer and of each engine's best frozen stage, over the points that the peer predicts,
    without the calibration points (calibration_workloads: their prompt and output tokens) and without C = 1.

    Columns: peer, engine, metric, points, peer_error, own_error (shares of the measured value).
    """
    import pandas as pd

    from . import score

    own = score.final(score.held_out(score.score(points, list(frozen)), calibration_workloads))
    keys = [*score.KEY, "metric"]
    rows = []
    for peer in peers:
        theirs = score.score(points, [peer])
        both = own.merge(theirs[[*keys, "error_share"]], on=keys, suffixes=("", "_peer"))
        both = both[both["concurrency"].fillna(2) > 1]
        for (engine, metric), group in both.groupby(["engine", "metric"], sort=False):
            rows.append(
                {"peer": peer["stage"], "engine": engine, "metric": metric, "points": len(group)}
                | {"peer_error": group["error_share_peer"].abs().mean(), "own_error": group["error_share"].abs().mean()}
            )
    return pd.DataFrame(rows, columns=["peer", "engine", "metric", "points", "peer_error", "own_error"])
