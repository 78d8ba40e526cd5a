"""Tables of latency limits: where TTFT rises, load within the service level, tokens in slow steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from ..charts import words
from ..scoring import serving
from .markup import Html, columns, table

# name: (what the work is, its address)


def knee_table(points: pd.DataFrame, predicted: Iterable[Mapping[str, Any]]) -> Html:
    """The TTFT knee of each concurrency sweep, measured and predicted."""
    frame = serving.knees(points, predicted)
    if frame.empty:
        return Html("<p>This run has no concurrency sweep.</p>")

    def at(value: Any, largest: int) -> str:
        return f"none up to C = {largest}" if pd.isna(value) else f"C = {value:.0f}"

    rows = frame.to_dict("records")
    shown = columns({
        "Sweep": [r["sweep"] for r in rows], "Engine": [r["engine"] for r in rows],
        "Measured: p99 > 2 × p50": [at(r["by_p50"], r["largest"]) for r in rows],
        "Measured: p99 > 2 × mean": [at(r["by_mean"], r["largest"]) for r in rows],
        "Predicted": [
            f"{at(r['predicted'], r['largest'])} (p99 > 2 × {r['predicted_by']})" if r["predicted_by"] else None
            for r in rows
        ],
    })  # fmt: skip
    return table(shown, "The TTFT knee, measured and predicted")


def sellable_table(points: pd.DataFrame, slo: Any, *, percentile: str | None = None) -> Html:
    """The largest C up to which every percentile meets the targets, its output rate, and the largest rate over it.

    percentile: p50 or p99 alone; None: both."""
    frame = serving.sellable(points, slo)
    if percentile and len(frame):
        frame = frame[frame["percentile"] == percentile]
    if frame.empty:
        return Html("<p>The parameters set no targets (slo), or nothing was measured.</p>")
    limits = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("latency", slo.e2e_s))
    targets = [f"{name} ≤ {words.seconds(limit)}" for name, limit in limits if limit]
    rows = frame.sort_values(["sweep", "engine", "percentile"], kind="stable").to_dict("records")
    shown = columns({
        "Sweep": [r["sweep"] for r in rows], "Engine": [r["engine"] for r in rows],
        "Percentile": [r["percentile"] for r in rows],
        "Largest C up to which all pass": [
            "none" if pd.isna(r["concurrency"]) else f"{r['concurrency']:.0f}" for r in rows
        ],
        "Output tok/s there": [words.number(r["tok_per_s"]) for r in rows],
        "Most output tok/s": [words.number(r["most_tok_per_s"]) for r in rows],
        "Raw over sellable": [
            None if pd.isna(r["raw_to_sellable"]) else f"{words.number(r['raw_to_sellable'])}×" for r in rows
        ],
    })  # fmt: skip
    numbers = ("Largest C up to which all pass", "Output tok/s there", "Most output tok/s", "Raw over sellable")
    return table(shown, f"What can be sold under {words.listing(targets)}", right=numbers)


def slow_step_table(points: pd.DataFrame, engine: str) -> Html:
    """Prompt tokens that the slowest hundredth of an engine's steps must have carried."""
    frame = serving.slow_steps(points[points["engine"] == engine])
    if frame.empty:
        return Html("<p>No sweep was measured at C = 1 and beyond.</p>")
    headers = {
        "sweep": "Sweep", "engine": "Engine", "concurrency": "C", "itl_p50_s": "ITL p50", "itl_p99_s": "ITL p99",
        "prompt_tokens": "Prompt tokens in a slow step",
    }  # fmt: skip
    formats = {"itl_p50_s": words.seconds, "itl_p99_s": words.seconds, "prompt_tokens": words.number}
    caption = "What the slowest hundredth of the steps carried, back-solved from the gaps between tokens"
    return table(frame, caption, headers=headers, formats=formats)
