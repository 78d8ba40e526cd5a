"""Measured points as a DataFrame: one row per point, columns as in points.csv."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import pandas as pd

from ..common.measured_point import MeasuredPoint

PointsLike: TypeAlias = pd.DataFrame | Iterable[MeasuredPoint] | Iterable[Mapping[str, Any]]  # mappings: by column


def frame_of(points: PointsLike) -> pd.DataFrame:
    """The points as a new DataFrame; `repeats_prompts` is true or false."""
    if isinstance(points, pd.DataFrame):
        frame = points.copy()
    else:
        frame = pd.DataFrame([p.to_json() if isinstance(p, MeasuredPoint) else p for p in points])
    repeats = frame["repeats_prompts"] if "repeats_prompts" in frame else pd.Series(False, frame.index)
    frame["repeats_prompts"] = repeats.eq(True)
    return frame
