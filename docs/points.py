"""Writes docs/points.md, the columns of points.csv, from the class of a measured point: `python docs/points.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

from servebook.common.measured_point import FURTHER_COLUMNS, POINT_COLUMNS, MeasuredPoint

PAGE = Path(__file__).resolve().parent / "points.md"
HEAD = """# Columns of points.csv

One row a measured point; the same keys in `requests/<sweep>/<engine>/<point>.json`. An empty field: nothing reported
the figure, or it does not apply to this kind of load. Times are in seconds. `python docs/points.py` writes this page
from `lib/servebook/common/measured_point.py`; a test compares them.
"""


def rows(columns: tuple[str, ...]) -> list[str]:
    """A table row a column: its name, unit and meaning."""
    hints, lines = get_type_hints(MeasuredPoint, include_extras=True), []
    for column in columns:
        if column == "reason_codes":
            lines.append("| `reason_codes` |  | the codes of `reasons` (`lib/servebook/common/reasons.py`) |")
            continue
        hint = hints["point_id" if column == "point" else column]
        assert get_origin(hint) is Annotated, column
        _, unit, meaning = get_args(hint)
        lines.append(f"| `{column}` | {unit} | {meaning} |")
    return lines


def text() -> str:
    """The page."""
    head = ["| column | unit | meaning |", "| -- | -- | -- |"]
    further = ["", "## Further columns", "", "In the file only where a point has them.", "", *head]
    lines = [HEAD, *head, *rows(POINT_COLUMNS), *further, *rows(FURTHER_COLUMNS)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print("docs/points.md is written", file=sys.stdout)
