"""Numbers in files of other tools: parsing, counts, and mean and percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..common.errors import ServebookError
from .tool_result import STATISTICS

MOST_REQUESTS, MOST_TOKENS = 10_000_000, 1e13


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Mean and percentiles, {} for no values."""
    if not len(values):
        return {}
    points = np.percentile(values, (50, 90, 99))
    return {"mean": float(np.mean(values)), **dict(zip(STATISTICS[1:], map(float, points), strict=True))}


def number(value: Any) -> float | None:
    """A finite number, also if written as text; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def whole(value: Any) -> int | None:
    """A count of at least 1, otherwise None."""
    found = number(value)
    return int(found) if found is not None and found >= 1 and found == int(found) else None


def count(data: Mapping[str, Any], key: str, where: str, most: float = MOST_REQUESTS) -> int:
    """A required count. Raises ServebookError."""
    value = number(data.get(key))
    if not value or value < 1:
        raise ServebookError(f"has no {key}", where, "Give the results of a run whose requests were answered")
    if value > most:
        raise ServebookError(f"{key} is {value:.3g}", where, f"At most {most:,.0f} are read")
    return int(value)


def numbers(values: Any) -> list[float | None] | None:
    """A list of numbers, with None for null; None if it is not such a list."""
    if not isinstance(values, list):
        return None
    found = [number(v) for v in values]
    return found if all(n is not None or v is None for n, v in zip(found, values, strict=True)) else None


def column(rows: list[Mapping[str, str]], name: str, where: str, *, least: float = 0.0) -> list[float]:
    """A column's numbers, without empty and NaN cells; integers if the minimum is 1.

    Raises ServebookError.
    """
    values = []
    for line, row in enumerate(rows, 2):
        text = str(row.get(name) or "").strip()
        if text.lower() in ("", "nan", "null", "none"):
            continue
        value = number(text)
        if value is None or value < least or (least == 1 and value != int(value)):
            raise ServebookError(f"{name} is {text[:40]!r}", f"{where}, line {line}", "Write a number")
        values.append(value)
    return values
