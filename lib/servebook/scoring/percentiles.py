"""Predicted and measured distributions: mean, p50, p90, p99 of the three latencies, and prefix-cache hits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from ..common.predicted_point import PredictedPoint, PredictedValue

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
COLUMNS = [
    "engine", "point", "latency", "statistic", "predicted", "low", "high", "measured", "error_share", "inside",
]  # fmt: skip
SUMMARY = ["latency", "statistic", "n", "mean_error", "median_error", "inside", "judged"]


def scores(points: pd.DataFrame, predicted: Iterable[PredictedPoint], sweep: str) -> pd.DataFrame:
    """One row per point, latency and statistic of a sweep that was predicted and measured; for points with repeated
    prompts also hit_share (statistic "share"). Columns: COLUMNS; in seconds, except hit_share."""
    rows = []
    by_point = {(p["engine"], p["point"]): p for p in predicted if p["sweep"] == sweep and p.get("fits", True)}
    for m in points[points["sweep"] == sweep].to_dict("records") if len(points) else []:
        p = by_point.get((m["engine"], m["point"]))
        if p is None or m.get("verdict") == "invalid":
            continue
        for latency in LATENCIES:
            spans: dict[str, PredictedValue] = dict(p.get("percentiles", {}).get(latency, {}))
            if (mean := p["metrics"].get(latency)) is not None:  # type: ignore[call-overload]
                spans["mean"] = mean
            for statistic in STATISTICS:
                seen, span = m.get(f"{latency.removesuffix('_s')}_{statistic}_s"), spans.get(statistic)
                if span is None or seen is None or not seen > 0:
                    continue
                low, high = span["low"], span["high"]
                inside = None if low is None or high is None else low <= seen <= high
                rows.append(
                    [m["engine"], m["point"], latency, statistic, span["value"], low, high, seen,
                     span["value"] / seen - 1, inside]
                )  # fmt: skip
        hits, seen = p.get("hit_share"), m.get("cache_hit_share")
        if hits is not None and seen is not None and seen == seen:
            error = hits / seen - 1 if seen else None
            rows.append([m["engine"], m["point"], "hit_share", "share", hits, None, None, seen, error, None])
    return pd.DataFrame(rows, columns=pd.Index(COLUMNS))


def summary(points: pd.DataFrame, predicted: Sequence[PredictedPoint], sweeps: Iterable[str]) -> pd.DataFrame:
    """The scores of all points of some sweeps, a row per latency and statistic: n, the mean and the median of
    |error|, how many lay inside their interval, and of how many that have one. Columns: SUMMARY."""
    frames = [scores(points, predicted, sweep) for sweep in sweeps]
    every = pd.concat([f for f in frames if len(f)], ignore_index=True) if any(map(len, frames)) else pd.DataFrame()
    rows = []
    for latency in LATENCIES if len(every) else ():
        for statistic in STATISTICS:
            own = every[(every["latency"] == latency) & (every["statistic"] == statistic)]
            if own.empty:
                continue
            errors, judged = own["error_share"].astype(float).abs(), own["inside"].dropna()
            inside = int(judged.astype(bool).sum())
            rows.append([latency, statistic, len(own), errors.mean(), errors.median(), inside, len(judged)])
    return pd.DataFrame(rows, columns=pd.Index(SUMMARY))
