"""The import point for notebooks of all tables, boxes and prose; the modules behind it have the code."""

import warnings
from typing import Any

from .analysis_tables import cache, engine_gap, goodput, itl, knees, little, queue, suspects
from .answer import answer, conditions, economics
from .baseline import beside
from .boxes import cost_box, limit, limits, limits_box, reproducibility_box
from .headlines import claim, hardware_line, headline, trust
from .lesson_tables import pool_check, rows_table
from .markup import METRIC_NAMES, Html, box, columns, esc, folded, notes_box, place, table, verdict, where, with_range
from .mechanism_tables import (
    gap_in_words,
    references,
    why_engines_differ,
)
from .prediction_tables import (
    checks_table,
    constants,
    effective_rates,
    frozen_stages,
    hardware_table,
    inconsistency_table,
    pool_table,
    prediction_table,
    saturation_table,
    shape_table,
    stamps,
    step_table,
)
from .service_level_tables import knee_table, sellable_table, slow_step_table
from .sweep_tables import cost, facts_table, missing, points_table, prefix_cache, stopped
from .traffic_tables import distribution_scores, percentile_table, requests_table
from .verdict_tables import misses_prose, peers, score_summary, verdict_table

__all__ = [
    "METRIC_NAMES",
    "Html",
    "answer",
    "beside",
    "box",
    "cache",
    "checks_table",
    "claim",
    "columns",
    "conditions",
    "constants",
    "cost",
    "cost_box",
    "distribution_scores",
    "economics",
    "effective_rates",
    "engine_gap",
    "esc",
    "facts_table",
    "folded",
    "frozen_stages",
    "gap_in_words",
    "goodput",
    "hardware_line",
    "hardware_table",
    "headline",
    "inconsistency_table",
    "itl",
    "knee_table",
    "knees",
    "limit",
    "limits",
    "limits_box",
    "little",
    "misses_prose",
    "missing",
    "notes_box",
    "peers",
    "percentile_table",
    "place",
    "points_table",
    "pool_check",
    "pool_table",
    "prediction_table",
    "prefix_cache",
    "queue",
    "references",
    "reproducibility_box",
    "requests_table",
    "rows_table",
    "saturation_table",
    "score_summary",
    "sellable_table",
    "shape_table",
    "slow_step_table",
    "stamps",
    "step_table",
    "stopped",
    "suspects",
    "table",
    "trust",
    "verdict",
    "verdict_table",
    "where",
    "why_engines_differ",
    "with_range",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "ink":  # the name that notebooks used until 0.1
        warnings.warn("tables.ink is now tables.frozen_stages", DeprecationWarning, stacklevel=2)
        return frozen_stages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
