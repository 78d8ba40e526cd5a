"""Predictions against measurements: error, verdict, share inside the interval, and the largest misses.

Input: the run's points (one row per point) and its frozen predictions. Knows nothing of models, GPUs or engines. Signs:
`error_share` = predicted / measured − 1, so +0.25 means predicted 25 % too high. `ratio` is the inverse, measured /
predicted; figures draw predicted / measured, so that above 1 means too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..common.measured_point import Metric
from ..common.predicted_point import CAUSES, FrozenPredictions, Latency, Parts, PredictedPoint, Regime, StagePrediction
from . import standing
from .points_frame import PointsLike, frame_of

# predictions.json, its "frozen" list, or a bare list of predicted points
PredictionsLike: TypeAlias = FrozenPredictions | Iterable[StagePrediction] | Iterable[PredictedPoint] | pd.DataFrame
HIT, NEAR = 0.10, 0.25  # largest |error_share| of each verdict

# predicted metric -> measured columns, of which the first with a value counts; then its 95 % interval, if any
MEASURED: dict[Metric, tuple[tuple[str, ...], tuple[str, str] | None]] = {
    "ttft_s": (("ttft_mean_s", "ttft_p50_s"), ("ttft_ci_low_s", "ttft_ci_high_s")),
    "tpot_s": (("tpot_mean_s", "tpot_p50_s"), ("tpot_ci_low_s", "tpot_ci_high_s")),
    "e2e_s": (("e2e_mean_s", "e2e_p50_s"), None),
    "output_tok_per_s": (("output_tok_per_s",), ("output_tok_per_s_ci_low", "output_tok_per_s_ci_high")),
    "decode_tok_per_s": (("decode_tok_per_s",), None),
    "request_rate_per_s": (("request_rate_per_s",), None),
}
KEY = ["sweep", "engine", "point"]
CONDITIONS = ["concurrency", "rate_per_s", "prompt_tokens", "output_tokens"]


def complete_frame(points: PointsLike) -> pd.DataFrame:
    """Points with every column that charts and scores read, from any accepted form; unknown values are NaN."""
    frame = frame_of(points)
    text = [*KEY, "kind", "verdict", "stop_reason"]
    numbers = [*CONDITIONS, "requests", "failures", "arrival_rate_per_s"]
    for columns, interval in MEASURED.values():
        numbers += [*columns, *(interval or ())]
    numbers += [f"{m}_{q}_s" for m in ("ttft", "tpot", "e2e") for q in ("p50", "p99")]
    for column in text:
        frame[column] = frame[column].astype(object) if column in frame else None
    for column in dict.fromkeys(numbers):
        frame[column] = pd.to_numeric(frame[column], errors="coerce") if column in frame else np.nan
    frame["decode_tok_per_s_ci_low"], frame["decode_tok_per_s_ci_high"] = _rate_interval(frame)
    return frame


def _rate_interval(frame: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    # decode rate = running / TPOT, so its interval is the inverted TPOT interval
    base = frame["decode_tok_per_s"] * frame["tpot_mean_s"]
    return base / frame["tpot_ci_high_s"], base / frame["tpot_ci_low_s"]


def prediction_frame(predictions: PredictionsLike) -> pd.DataFrame:
    """One row per stage × point × metric: value, low, high, regime.

    Accepts the content of predictions.json, its "frozen" list, or a bare list of predicted points. The newest
    prediction of a stage counts; predictions are frozen before their points are measured (see standing.py).
    """
    if isinstance(predictions, pd.DataFrame):
        return predictions
    given: list[Any] = list(predictions["frozen"] if isinstance(predictions, Mapping) else predictions)
    if given and "points" not in given[0]:
        given = [{"stage": "predicted", "points": given}]
    entries: list[StagePrediction] = given
    rows = []
    for entry in standing.standing(entries):
        for point in entry["points"]:
            regimes = point.get("breakdown") or {}
            for metric, predicted in point["metrics"].items():
                value, low, high = predicted["value"], predicted.get("low"), predicted.get("high")
                if value is None:
                    continue
                rows.append(
                    {"stage": entry["stage"]}
                    | {k: point.get(k) for k in [*KEY, *CONDITIONS]}
                    | {"metric": metric, "predicted": value, "low": low, "high": high}
                    | {"regime": regime(regimes, metric, point.get("output_tokens")), "fits": point.get("fits", True)}
                )
    columns = ["stage", *KEY, *CONDITIONS, "metric", "predicted", "low", "high", "regime", "fits"]
    frame = pd.DataFrame(rows, columns=columns)
    numbers = [*CONDITIONS, "predicted", "low", "high"]
    frame[numbers] = frame[numbers].apply(pd.to_numeric, errors="coerce").astype(float)  # also if there is no row
    return frame


def regime(breakdown: Mapping[Latency, Parts], metric: Metric = "ttft_s", output_tokens: int | None = None) -> Regime:
    """The predicted bound of `metric`; "unknown" without a breakdown.

    breakdown: seconds by cause of TTFT and TPOT. Request latency and the rates of whole requests combine both, with
    TPOT times the tokens after the first. The regime (see CAUSES) with the largest time is returned.
    """
    if metric in ("ttft_s", "tpot_s") and metric in breakdown:
        return _largest(breakdown[metric])
    first, token = breakdown.get("ttft_s", {}), breakdown.get("tpot_s", {})
    if metric == "decode_tok_per_s" or not output_tokens:
        return _largest(token)
    after = output_tokens - 1
    return _largest({k: first.get(k, 0.0) + after * token.get(k, 0.0) for k in {**first, **token}})


def _largest(parts: Parts) -> Regime:
    total: dict[Regime, float] = {}
    for cause, seconds in parts.items():
        if cause in CAUSES and np.isfinite(seconds):
            bound = CAUSES[cause][1]
            total[bound] = total.get(bound, 0.0) + seconds
    return max(total, key=total.__getitem__) if any(total.values()) else "unknown"


def measured_frame(points: PointsLike) -> pd.DataFrame:
    """Points in long form: one row per point × metric with measured, measured_low, measured_high and n."""
    frame = complete_frame(points)
    parts = []
    for metric, (columns, interval) in MEASURED.items():
        values = frame[columns[0]]
        for other in columns[1:]:
            values = values.fillna(frame[other])
        low, high = interval or (f"{metric}_ci_low", f"{metric}_ci_high")
        part = frame[[*KEY, "kind", "repeats_prompts", *CONDITIONS, "verdict", "arrival_rate_per_s"]].copy()
        part["metric"], part["measured"], part["n"] = metric, values, frame["requests"]
        part["measured_low"] = frame.get(low, np.nan)
        part["measured_high"] = frame.get(high, np.nan)
        parts.append(part.dropna(subset=["measured"]))
    parts = [p for p in parts if len(p)] or parts[:1]
    return pd.concat(parts, ignore_index=True)


def verdict(error_share: float) -> str:
    """hit (|error| ≤ 10 %), near (≤ 25 %) or miss."""
    size = abs(error_share)
    return "hit" if size <= HIT else "near" if size <= NEAR else "miss"


def is_repeated(points: pd.DataFrame) -> pd.Series:
    """Which points repeat prompts on purpose, for the prefix-cache experiment."""
    return points["repeats_prompts"]


def score(points: PointsLike, predictions: PredictionsLike) -> pd.DataFrame:
    """One row per stage × point × metric that was predicted and measured.

    Columns: stage, sweep, engine, point, the point's conditions, metric, predicted, low, high, measured, measured_low,
    measured_high, n, arrival_rate_per_s (arrivals in an open loop's window; rate_per_s is the requested rate),
    error_share, ratio, inside (None without an interval), verdict, regime, data ("valid" or "suspect"). Left out
    are invalid points, points that repeat prompts on purpose, and the calibration points of a calibrated stage, which
    the prediction was fitted to.
    """
    predicted = prediction_frame(predictions)
    frame = complete_frame(points)
    measured = measured_frame(frame[~is_repeated(frame)])
    measured = measured[(measured["verdict"] != "invalid") & (measured["measured"] > 0)]
    rows = predicted.merge(measured.drop(columns=CONDITIONS).rename(columns={"verdict": "data"}), on=[*KEY, "metric"])
    seen = (rows["sweep"] == "calibration") & rows["stage"].astype(str).str.startswith("calibrated")
    rows = rows[~seen & (rows["predicted"] > 0)].reset_index(drop=True)
    rows["error_share"] = rows["predicted"] / rows["measured"] - 1
    rows["ratio"] = rows["measured"] / rows["predicted"]
    known = rows["low"].notna() & rows["high"].notna()
    inside = (rows["low"] <= rows["measured"]) & (rows["measured"] <= rows["high"])
    rows["inside"] = inside.astype(object).where(known, None)
    rows["verdict"] = [verdict(e) for e in rows["error_share"]]
    rows["data"] = rows["data"].fillna("valid")
    return rows


def summary(scores: pd.DataFrame, by: Sequence[str] = ("stage", "engine", "metric")) -> pd.DataFrame:
    """Per group: points, mean absolute error (share of the measured value), mean signed error, worst error, share
    inside the predicted interval, and counts of hit, near and miss."""
    rows = []
    for key, group in scores.groupby(list(by), sort=True):
        inside = group["inside"].dropna()
        counts = group["verdict"].value_counts()
        worst = group.loc[group["error_share"].abs().idxmax()]
        rows.append(
            dict(zip(by, key, strict=True))
            | {
                "points": len(group),
                "mean_abs_error": group["error_share"].abs().mean(),
                "mean_error": group["error_share"].mean(),
                "worst_error": worst["error_share"],
                "worst_point": f"{worst['sweep']} {worst['point']}",
                "inside_share": inside.astype(float).mean() if len(inside) else np.nan,
            }
            | {v: int(counts.get(v, 0)) for v in ("hit", "near", "miss")}
        )
    tail = [
        "points",
        "mean_abs_error",
        "mean_error",
        "worst_error",
        "worst_point",
        "inside_share",
        "hit",
        "near",
        "miss",
    ]
    return pd.DataFrame(rows, columns=[*by, *tail])


def best_stage(scores_or_predictions: pd.DataFrame, engine: str) -> str | None:
    """The stage that charts show for an engine: its calibrated one, otherwise the datasheet one, otherwise the
    first."""
    own = scores_or_predictions[scores_or_predictions["engine"] == engine]["stage"].dropna().astype(str)
    for wanted in (f"calibrated:{engine}", "calibrated", "datasheet"):
        if (own == wanted).any():
            return wanted
    return None if own.empty else str(own.iloc[0])


def held_out(scores: pd.DataFrame, calibration_workloads: Iterable[tuple[int, int]]) -> pd.DataFrame:
    """The scores without the points used for calibration: calibration points and C = 1 points of the same lengths.

    calibration_workloads: (prompt tokens, output tokens) of the calibration points.
    """
    lengths = set(calibration_workloads)
    kept = [
        r.sweep != "calibration" and not (r.concurrency == 1 and (r.prompt_tokens, r.output_tokens) in lengths)
        for r in scores.itertuples()
    ]
    return scores[np.array(kept, dtype=bool)].reset_index(drop=True)


def final(scores: pd.DataFrame) -> pd.DataFrame:
    """The rows of each engine's best stage, whose predictions the charts draw."""
    keep = {e: best_stage(scores, e) for e in scores["engine"].unique()}
    return scores[scores["stage"] == scores["engine"].map(keep)].reset_index(drop=True)


def largest_misses(scores: pd.DataFrame, n: int = 5) -> pd.DataFrame:
    """The n largest errors, one per engine × sweep × metric (its worst point), with `also`: how many other points of
    that group are a miss. Each engine's best stage counts."""
    rows = final(scores)
    # on the log scale a factor of 2 too high and too low are equal misses
    rows = rows.assign(size=np.log(rows["ratio"]).abs())
    picked = []
    for _, group in rows.groupby(["engine", "sweep", "metric"], sort=True):
        worst = group.loc[group["size"].idxmax()].copy()
        worst["also"] = int((group["verdict"] == "miss").sum() - (worst["verdict"] == "miss"))
        picked.append(worst)
    if not picked:
        return rows.assign(also=0).head(0)
    return pd.DataFrame(picked).sort_values("size", ascending=False, kind="stable").head(n).reset_index(drop=True)


def held_out_of_run(points: Any, predictions: Any, run: dict[str, Any]) -> Any:
    """The scores that the page shows: without points used for calibration."""
    calibration_workloads = [(c["prompt_tokens"], c["output_tokens"]) for c in run.get("calibration") or []]
    return held_out(score(points, predictions), calibration_workloads)
