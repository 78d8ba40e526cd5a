"""Another tool's results as a page of their own: conditions, predicted against measured per percentile, and the gap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..config.params import RunParams
from ..hardware.catalog import Gpu
from ..scoring.score import verdict
from ..scoring.tool_result import LATENCIES
from ..scoring.tool_scores import ToolRow, ToolScore
from . import markup
from .page import Body, download, write_page


def write_tool_scores(out: Path, scores: Sequence[ToolScore], params: RunParams, gpu: Gpu, *, source: Path) -> Path:
    """Write the page and return its path. source: the file of results, which the page offers as it is."""
    body = Body()
    model = params.model.config or params.model.hub or params.run
    lead = f"What {model} on {gpu.name} should do under these loads, by the datasheet alone, and what was measured."
    body.add(f"<p>{markup.esc(lead)}</p>")
    for i, score in enumerate(scores, 1):
        body.section(f"{score.result.tool}: load {i} of {len(scores)}" if len(scores) > 1 else score.result.tool)
        body.add(f"<p><strong>{markup.esc(score.gap)}</strong></p>")
        body.add(markup.notes_box("Stated in the file", score.conditions))
        body.add(markup.notes_box("Assumed", score.assumed))
        if score.rows:
            body.add(_table(score.rows))
    title = f"{params.title or params.run}: a benchmark scored"
    context = {
        "title": title, "description": f"Results of {scores[0].result.tool} against what {gpu.name} should do.",
        "kicker": "Measured by another tool, predicted here", "run": source.stem, "stamp": [],
        "downloads": [download(source.name, source.read_bytes(), "application/json", "the results", source.name)],
    }  # fmt: skip
    return write_page(Path(out), [body.chapter(title)], [], context)


def _table(rows: Sequence[ToolRow]) -> str:
    frame = pd.DataFrame(
        [
            {
                "Figure": row.name, "Predicted": _figure(row, row.predicted),
                "80 % interval": f"{_figure(row, row.low)} to {_figure(row, row.high)}",
                "Measured": _figure(row, row.measured), "Error": f"{row.error:+.1%}", "Verdict": verdict(row.error),
            }
            for row in rows
        ]
    )  # fmt: skip
    return str(markup.table(frame, caption="Predicted against measured, per percentile", fold=False))


def _figure(row: ToolRow, value: float) -> str:
    return f"{value * 1e3:,.4g} ms" if row.metric in LATENCIES else f"{value:,.4g}"
