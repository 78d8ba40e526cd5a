"""The table of the prefix-cache experiment."""

from __future__ import annotations

from typing import Any

import pandas as pd

from .. import analysis
from ..charts import words
from .markup import Html, columns, table


def prefix_cache(points: Any, sweep: str) -> Html:
    """How much repeated prompts flatter: fresh beside same seed, and the ratios same / fresh."""
    found = analysis.prefix_cache(points, sweep)
    if found.empty:
        return Html("<p>No point of this sweep was measured.</p>")

    def told(column: str, form: Any) -> list[str]:
        return ["–" if pd.isna(v) else form(v) for v in found[column]]

    def times(value: float) -> str:
        return f"{words.number(value)}×"

    shown = columns({
        "Engine": list(found["engine"]),
        "C": [f"{c:.0f}" for c in found["concurrency"]],
        "TTFT fresh": told("ttft_mean_s_fresh", words.seconds),
        "TTFT same seed": told("ttft_mean_s_same", words.seconds),
        "TTFT ratio": told("ttft_ratio", times),
        "Output tok/s fresh": told("output_tok_per_s_fresh", words.number),
        "Output tok/s same seed": told("output_tok_per_s_same", words.number),
        "Output ratio": told("output_ratio", times),
        "Hits fresh": told("cache_hit_share_fresh", words.percent),
        "Hits same seed": told("cache_hit_share_same", words.percent),
    })  # fmt: skip
    numbers = tuple(c for c in shown.columns if c != "Engine")
    text = "What repeated prompts do: same seed against fresh; –: the engine caches no prefixes"
    return table(shown, text, right=numbers)
