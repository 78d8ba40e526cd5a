"""Predictions that the posts' authors made before measuring: NAME.predicted.csv beside the published points."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..common.measured_point import MeasuredPoint
from ..config.points import CALIBRATION

# the tables of a predicted.csv in the order of a post; the last one is the post's prediction
TABLES = ("decode_only", "mixed", "fifo")
FIGURES = ("ttft_s", "tpot_s", "decode_tok_per_s", "output_tok_per_s")
QUANTITY = re.compile(r"(\w+) at C=(\d+)$")
UNITS = {"s": "_s", "tok/s": ""}


def read(points_csv: Path) -> list[dict[str, str]]:
    """The rows of NAME.predicted.csv beside NAME.csv, unchanged; [] if there is no such file."""
    path = points_csv.with_name(f"{points_csv.stem}.predicted.csv")
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def curves(rows: Iterable[Mapping[str, str]], measured: Iterable[MeasuredPoint]) -> list[dict[str, Any]]:
    """The predicted figures of points: {"sweep", "engine", "concurrency", "metric", "predicted"}, each once.

    rows: from `read`, with either one point per row (post 2) or one quantity per row (the write-up; its refined value
    if there is one). measured: the published points, which give the sweep and engine of such a quantity.
    """
    found: dict[tuple[str, str, int, str], float] = {}
    sweeps = {p.concurrency: (p.sweep, p.engine) for p in measured if p.sweep != CALIBRATION}
    for row in sorted(rows, key=_order):
        if "quantity" in row:
            match = QUANTITY.match(row["quantity"])
            value = row["predicted_refined"] or row["predicted"]
            if not match or not value or int(match[2]) not in sweeps:
                continue
            sweep, engine = sweeps[int(match[2])]
            metric = match[1] if match[1].endswith("_s") else match[1] + UNITS.get(row["unit"], "")
            found[sweep, engine, int(match[2]), metric] = float(value)
            continue
        for metric in FIGURES:
            if row.get(metric):
                found[row["sweep"], row["engine"], int(row["concurrency"]), metric] = float(row[metric])
    names = ("sweep", "engine", "concurrency", "metric")
    return [dict(zip(names, key, strict=True)) | {"predicted": value} for key, value in sorted(found.items())]


def _order(row: Mapping[str, str]) -> int:
    table = row.get("table")
    return TABLES.index(table) if table in TABLES else -1
