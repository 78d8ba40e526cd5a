"""The table of other predictors beside this one."""

from __future__ import annotations

import pandas as pd

from ..charts import words
from .markup import METRIC_NAMES, Html, columns, table


def peers(found: pd.DataFrame) -> Html:
    """Mean absolute error of each peer and of the frozen predictions on the same points (peers.beside's columns)."""
    if found.empty:
        return Html("")
    rows = list(found.itertuples())
    shown = columns({
        "Peer": [r.peer for r in rows], "Engine": [r.engine for r in rows],
        "Metric": [METRIC_NAMES.get(r.metric, r.metric) for r in rows], "Points": [str(r.points) for r in rows],
        "Mean |error| of the peer": [words.percent(r.peer_error) for r in rows],
        "of this book, as frozen": [words.percent(r.own_error) for r in rows],
    })  # fmt: skip
    text = "Other predictors on the same points, C = 1 left out"
    return table(shown, text, right=("Points", "Mean |error| of the peer", "of this book, as frozen"))
