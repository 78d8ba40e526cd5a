"""The author's own words: notes/<run>.md, read when the page is rendered, with figures filled in from the run's data.

A figure is written as its place in the data, `{{ sweep/engine/point/column }}` with a column of points.csv, or
`{{ … /predicted metric }}` with a metric of predictions.json, so that a new run cannot leave an old number in the text.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..charts import words
from ..common.errors import ServebookError
from ..common.files import ROOT
from ..run_folder import frozen_predictions, results
from ..scoring import score
from .markup import unit_of

TAG = "author-notes"  # of the cell whose place in the post they take
_FIGURE = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")


def read(run_dir: Path | str, run: str | None = None) -> str | None:
    """The notes of a run as Markdown; None if there are none. Raises ServebookError for a figure that the run does
    not have."""
    run_dir = Path(run_dir)
    path = ROOT / "notes" / f"{run or run_dir.name}.md"
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors write the mark
    except OSError as error:
        raise ServebookError(f"cannot be read ({error.strerror})", f"notes/{path.name}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ServebookError("is not UTF-8 text", f"notes/{path.name}, line {line}", "Save it as UTF-8") from None
    return fill(text, run_dir, path.name)


def fill(text: str, run_dir: Path, name: str = "notes") -> str:
    """`text` with every {{ figure }} replaced; its unit is that of the column."""

    def figure(match: re.Match[str]) -> str:
        parts = match[1].split("/")
        value = _value(run_dir, *parts) if len(parts) == 4 and ".." not in parts else None
        if value is None:
            raise ServebookError(
                f"the run has no figure {match[1]!r}", name,
                "Write {{ sweep/engine/point/column }}, e.g. {{ short_prompts/vllm/c0008/ttft_mean_s }}",
            )  # fmt: skip
        return words.quantity(value, _unit(parts[-1]))

    return _FIGURE.sub(figure, text)


def _value(run_dir: Path, sweep: str, engine: str, point: str, column: str) -> float | None:
    if column.startswith("predicted "):
        frame = score.prediction_frame(frozen_predictions.read(run_dir))
        own = frame[(frame["stage"] == score.best_stage(frame, engine)) & (frame["engine"] == engine)]
        own = own[(own["sweep"] == sweep) & (own["point"] == point) & (own["metric"] == column.split()[1])]
        return float(own["predicted"].iloc[-1]) if len(own) else None
    stored = results.read_point(run_dir, sweep, engine, point)
    value = stored.to_json().get(column) if stored else None
    return float(value) if isinstance(value, int | float) else None


def _unit(column: str) -> str:
    metric = column.removeprefix("predicted ")
    if metric.endswith("_per_s"):
        return unit_of(metric)
    return "s" if metric.endswith("_s") else ""
