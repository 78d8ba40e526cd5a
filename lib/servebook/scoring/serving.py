"""How serving differs from decode: predicted knees, the rate within a limit, prompt tokens in slow steps.

From points and frozen predictions alone; knows no formulas of step time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

KNEE = 2.0  # ratio of TTFT p99 to its median at the knee of a sweep


def _concurrency(points: pd.DataFrame) -> pd.DataFrame:
    frame = points[(points["kind"] == "concurrency") & (points["verdict"] != "invalid")]
    return frame.sort_values("concurrency")


def knees(points: pd.DataFrame, predicted: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The knee of each concurrency sweep: measured by p99 over p50, and measured and predicted by p99 over the mean.

    predicted: frozen points; those of earlier versions have ttft_p99_s and the mean but no median, so the prediction is
    compared by the mean (`predicted_by`). None if p99 never exceeds twice the other.
    """
    frozen = [p for p in predicted if p.get("kind") == "concurrency" and (p.get("metrics") or {}).get("ttft_s")]
    rows = []
    for (sweep, engine), own in _concurrency(points).groupby(["sweep", "engine"], sort=False):
        predicted = sorted((p for p in frozen if (p["sweep"], p["engine"]) == (sweep, engine)), key=_by_concurrency)
        over = {
            "by_p50": own[own["ttft_p99_s"] > KNEE * own["ttft_p50_s"]]["concurrency"],
            "by_mean": own[own["ttft_p99_s"] > KNEE * own["ttft_mean_s"]]["concurrency"],
        }
        first = {name: int(found.iloc[0]) if len(found) else None for name, found in over.items()}
        by = "p50" if predicted and all(p.get("percentiles") for p in predicted) else "mean"
        foreseen = [int(p["concurrency"]) for p in predicted if _tail(p, by) > KNEE]
        rows.append({
            "sweep": sweep, "engine": engine, **first, "predicted": foreseen[0] if foreseen else None,
            "predicted_by": by if predicted else None, "largest": int(own["concurrency"].max()),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _tail(point: Mapping[str, Any], by: str) -> float:
    """A predicted point's TTFT p99 over its median, or over its mean."""
    if by == "p50":
        ttft = point["percentiles"]["ttft_s"]
        return float(ttft["p99"]["value"] / ttft["p50"]["value"])
    return (point.get("ttft_p99_s") or 0.0) / float(point["metrics"]["ttft_s"]["value"])


def _by_concurrency(point: Mapping[str, Any]) -> int:
    return int(point["concurrency"] or 0)


def sellable(points: pd.DataFrame, slo: Any) -> pd.DataFrame:
    """Of each concurrency sweep the largest C up to which every C meets every target of `slo`, by p99 and by p50.

    Gives its output rate, and the sweep's largest output rate divided by it; NaN if the first C fails."""
    targets = [(m, limit) for m, limit in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)) if limit]
    rows: list[dict[str, Any]] = []
    if not targets:
        return pd.DataFrame(rows)
    for (sweep, engine), own in _concurrency(points).groupby(["sweep", "engine"], sort=False):
        own = own.sort_values("concurrency")
        most = own["output_tok_per_s"].max()
        for percentile in ("p99", "p50"):
            meets = pd.Series(True, index=own.index)
            for metric, limit in targets:
                meets &= own[f"{metric}_{percentile}_s"] <= limit
            meets = meets.cummin()  # a C that passes beyond one that fails is noise
            last = own[meets].iloc[-1] if meets.any() else None
            rows.append({
                "sweep": sweep, "engine": engine, "percentile": percentile,
                "concurrency": float("nan") if last is None else last["concurrency"],
                "tok_per_s": float("nan") if last is None else last["output_tok_per_s"],
                "most_tok_per_s": most,
                "raw_to_sellable": float("nan") if last is None else most / last["output_tok_per_s"],
            })  # fmt: skip
    return pd.DataFrame(rows)


def slow_steps(points: pd.DataFrame) -> pd.DataFrame:
    """The prompt tokens that the slowest hundredth of the steps must have carried: (ITL p99 − ITL p50) × the prefill
    rate of a single prompt (prompt tokens / TTFT at C = 1 of the same sweep)."""
    rows = []
    for (sweep, engine), own in _concurrency(points).groupby(["sweep", "engine"], sort=False):
        alone = own[own["concurrency"] == 1]
        if alone.empty or not alone["ttft_mean_s"].iloc[0] > 0:
            continue
        tokens_per_s = alone["prompt_tokens"].iloc[0] / alone["ttft_mean_s"].iloc[0]
        for p in own[own["concurrency"] > 1].itertuples():
            late_s = p.itl_p99_s - p.itl_p50_s
            rows.append({
                "sweep": sweep, "engine": engine, "concurrency": int(p.concurrency), "itl_p50_s": p.itl_p50_s,
                "itl_p99_s": p.itl_p99_s, "prompt_tokens": late_s * tokens_per_s,
            })  # fmt: skip
    return pd.DataFrame(rows)
