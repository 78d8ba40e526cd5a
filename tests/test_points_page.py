"""The column reference of points.csv says what the class says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from servebook.common.measured_point import FURTHER_COLUMNS, POINT_COLUMNS

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("docs_points", DOCS / "points.py")
assert _spec is not None and _spec.loader is not None
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


def test_the_page_is_as_written() -> None:
    assert (DOCS / "points.md").read_text(encoding="utf-8") == page.text(), "python docs/points.py writes it again"


def test_every_column_has_a_line_with_a_meaning_and_every_time_its_unit() -> None:
    lines = dict(
        zip([*POINT_COLUMNS, *FURTHER_COLUMNS], page.rows(POINT_COLUMNS) + page.rows(FURTHER_COLUMNS), strict=True)
    )
    for column, line in lines.items():
        name, unit, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert name == f"`{column}`" and len(meaning) > 5
        if column.endswith("_s") and not column.endswith("_per_s"):
            assert unit == "s", column
        if column.endswith("_tok_per_s"):
            assert unit == "tokens/s", column
