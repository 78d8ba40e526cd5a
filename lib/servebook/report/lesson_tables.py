"""Tables for calculations in notebooks: rows computed in cells, next to the library's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ..charts import words
from .markup import Format, Html, columns, table

MISSING = "<p>Nothing of this was measured yet.</p>"


def rows_table(rows: Iterable[Sequence[Any]], headers: Sequence[str], caption: str) -> Html:
    """Rows as a table that is never folded. A heading that ends in ", s" holds seconds, one in ", share" a share; both
    are shown in the unit that reads best."""
    rows = [list(row) for row in rows]
    if not rows:
        return Html(MISSING)
    frame = pd.DataFrame(rows, columns=pd.Index(headers))
    shown: dict[str, Format] = {h: words.seconds for h in headers if h.endswith(", s")}
    shown |= {h: words.percent for h in headers if h.endswith(", share")}
    numbers = tuple(h for h in headers if h in shown)
    names = {h: h.removesuffix(", s").removesuffix(", share") for h in headers}
    return table(frame, caption, headers=names, formats=shown, right=numbers, fold=False)


def pool_check(
    predicted: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]], kv_bytes_per_token: float
) -> Html:
    """The KV pool as predicted before the engine started, next to the one in its log. predicted: {engine: its
    frozen limits (kv_cache_tokens, kv_cache_source)}; facts: {engine: reported limits}."""
    rows = []
    for engine, limits in predicted.items():
        logged = (facts.get(engine) or {}).get("kv_cache_tokens")
        if limits.get("kind") == "naive" or not logged:
            continue
        guess = limits["kv_cache_tokens"]
        rows.append([engine, guess, logged, guess / logged - 1, (guess - logged) * kv_bytes_per_token / 2**30,
                     limits.get("kv_cache_source")])  # fmt: skip
    if not rows:
        return Html("<p>No engine of this run has reported a KV pool.</p>")
    kept = list(zip(*rows, strict=True))
    shown = columns({
        "Engine": kept[0], "Predicted, tokens": [f"{v:,}" for v in kept[1]],
        "Logged, tokens": [f"{v:,}" for v in kept[2]],
        "Error": [words.percent(v, signed=True) for v in kept[3]], "Error, GiB": [words.number(v) for v in kept[4]],
        "Predicted from": kept[5],
    })  # fmt: skip
    numbers = ("Predicted, tokens", "Logged, tokens", "Error", "Error, GiB")
    return table(shown, "The KV pool: predicted before the engine started, and as it logged it", right=numbers)
