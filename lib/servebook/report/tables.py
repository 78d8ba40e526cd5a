"""The one name that notebooks take tables, boxes and prose from; each of the modules behind it says what it holds."""

from .analysis_tables import cache, engine_gap, goodput, itl, knees, little, queue, suspects
from .boxes import cost_box, limit, limits, limits_box, reproducibility_box
from .headlines import claim, hardware_line, headline, trust
from .lesson_tables import pool_check, rows_table
from .markup import METRIC_NAMES, Html, box, columns, esc, notes_box, place, table, verdict, where, with_range
from .prediction_tables import (
    checks_table,
    constants,
    effective_rates,
    hardware_table,
    inconsistency_table,
    ink,
    pool_table,
    prediction_table,
    saturation_table,
    shape_table,
    stamps,
    step_table,
)
from .sweep_tables import cost, facts_table, missing, points_table, prefix_cache, stopped
from .verdict_tables import misses_prose, peers, score_summary, verdict_table

__all__ = [
    "METRIC_NAMES", "Html", "box", "cache", "checks_table", "claim", "columns", "constants", "cost", "cost_box",
    "effective_rates", "engine_gap", "esc", "facts_table", "goodput", "hardware_line", "hardware_table", "headline",
    "inconsistency_table", "ink", "itl", "knees", "limit", "limits", "limits_box", "little", "misses_prose",
    "missing", "notes_box", "peers", "place", "points_table", "pool_check", "pool_table", "prediction_table",
    "prefix_cache", "queue", "reproducibility_box", "rows_table", "saturation_table", "score_summary", "shape_table",
    "stamps", "step_table", "stopped", "suspects", "table", "trust", "verdict", "verdict_table", "where",
    "with_range",
]  # fmt: skip
