"""Points that somebody published, as a page of their own: predicted from those at C = 1, set against the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import charts
from ..charts import words
from ..common.measured_point import MeasuredPoint
from ..run_folder import author_predictions
from ..scoring import score
from . import authors, tables
from .page import Body, download, write_page

STAGE = "calibrated"
RATES = {charts.throughput: "decode_tok_per_s", charts.output_rate: "output_tok_per_s"}
UNSEEN = "of points it had not seen"


def write_published(
    out: Path | str,
    prediction: Mapping[str, Any],
    measured: Sequence[MeasuredPoint],
    params: Any,
    gpu: Any,
    *,
    source: Path,
    clean: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of published points and return its path.

    prediction: what predict.predict_published gives for `measured`; clean: what it gives without their cache hits;
    source: the CSV, which the page offers as it is, with what the author had predicted beside it.
    """
    author_rows = author_predictions.read(source)
    theirs = author_predictions.curves(author_rows, measured)
    frozen = {"frozen": [{"stage": STAGE, "points": prediction["points"]}]}
    calibration_workloads = [(p.prompt_tokens, p.output_tokens) for p in measured if p.concurrency == 1]
    scores = score.held_out(score.score(measured, frozen), calibration_workloads)
    engine = next((n for n, e in params.engines.items() if e.continuous_batching), next(iter(params.engines)))
    body = Body()
    body.add(_lead(measured, params, gpu))
    body.add(tables.claim(measured, scores, engine=engine, how=UNSEEN))
    body.add(tables.headline(measured, scores, hardware=gpu.name, versions=source.stem, engine=engine, how=UNSEEN))
    points = score.complete_frame(measured)
    body.section("Predicted, and what was published")
    for sweep in dict.fromkeys(points["sweep"]):
        for draw in _drawn(points[points["sweep"] == sweep]):
            # the author's predictions are of concurrencies
            line = {} if draw is charts.prompt_length else {"others": theirs}
            body.add(charts.html_figure(draw(measured, frozen, sweep, **line)))
    if clean is not None and (made := authors.flattered(prediction["points"], clean["points"], measured)):
        body.section("How far the prefix cache flatters them")
        body.add(made)
    if author_rows:
        body.section("What the author had predicted")
        body.add(authors.quantities_table(author_rows) or authors.curves_table(theirs, measured))
    body.section("Every score")
    if len(scores):
        body.add(charts.html_figure(charts.predicted_vs_measured(scores)))
    body.add(tables.verdict_table(scores))
    body.add(tables.verdict_table(scores, full=True))
    body.section("What the prediction got wrong")
    body.add(tables.misses_prose(scores))
    body.section("What it was learned from")
    body.add(tables.constants([prediction]))
    body.add(tables.notes_box("What this page does not show", _limits(points)))
    title = f"{params.title or params.run}: published points, predicted"
    context = {
        "title": title,
        "description": f"Points on {gpu.name} that others published, set against what their C = 1 points predict.",
        "kicker": "Published by others, predicted here", "run": source.stem, "stamp": [],
        "downloads": [download(source.name, source.read_bytes(), "text/csv", "the published points", source.name)],
    }  # fmt: skip
    return write_page(Path(out), [body.chapter(title)], [], context)


def _lead(measured: Sequence[MeasuredPoint], params: Any, gpu: Any) -> str:
    sources = [str(s) for s in dict.fromkeys(p.source for p in measured) if s]
    alone = sum(p.concurrency == 1 for p in measured)
    text = (
        f"{len(measured)} points that others measured on {gpu.name}. The prediction learned from the {alone} at "
        "C = 1 and is set against the rest."
    )
    origin = f" They come from {words.listing(sources)}." if sources else ""
    return f"<p>{tables.esc(text + origin)}</p>"


def _limits(points: Any) -> list[str]:
    """Information that published points do not include, as far as their columns show."""
    found = [
        "Nothing here was measured by this project. What was published is means without intervals, rounded as the "
        "source rounds them, and how long each point ran is not known.",
        "The pauses of the authors' clients (jitter) are not published; in a closed loop they decide TTFT.",
    ]
    hits = points["cache_hit_share"]
    if (hits > 0).any():
        found.append(
            f"{int((hits > 0).sum())} of the {len(points)} points had prompts served from the prefix cache. The shares "
            "are the middle of published ranges."
        )
    return found


def _drawn(points: Any) -> list[Any]:
    """The charts that a sweep's columns allow."""
    if points["sweep"].iloc[0] == "calibration":
        return []
    if points["concurrency"].nunique() < 2:
        return [charts.prompt_length] if points["prompt_tokens"].nunique() > 1 else []
    known = {draw: points[column].notna().sum() for draw, column in RATES.items()}
    best = max(known, key=known.__getitem__)
    return [best, charts.latencies] if known[best] else [charts.latencies]
