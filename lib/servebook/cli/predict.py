"""`servebook predict`: a run's predictions on the terminal, scored if measured points are given. Needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..charts import words
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint, Metric
from ..common.predicted_point import PredictedPoint, PredictedValue, holds, interval
from ..predictor import predict
from ..run.book import Book, find_params
from ..run_folder import published

# metric → (factor, heading)
SHOWN: dict[Metric, tuple[float, str]] = {
    "ttft_s": (1e3, "TTFT ms"),
    "tpot_s": (1e3, "TPOT ms"),
    "decode_tok_per_s": (1, "decode tok/s"),
    "output_tok_per_s": (1, "output tok/s"),
}


def main(params_path: str, calibration: str | None, *, as_json: bool) -> int:
    """Print every predicted point; with measured points, calibrate on those at C = 1 and score the others."""
    book = Book.open(params_path)
    if calibration is None:
        measured: list[MeasuredPoint] = []
        prediction = predict.predict_run(book.params, book.shape, book.gpu)
    else:
        measured, facts = published.read(find_params(calibration))
        prediction = predict.predict_published(book.params, book.shape, book.gpu, measured, facts)
    if as_json:
        shown = {k: v for k, v in prediction.items() if k != "inputs"}
        print(json.dumps(shown | {"scored": errors(prediction["points"], measured)}, indent=1))
    else:
        print(text(prediction["points"], measured))
    return 0


def errors(predicted: Iterable[PredictedPoint], measured: Iterable[MeasuredPoint]) -> list[dict[str, Any]]:
    """Mean and largest |error| and the share inside the interval, by engine and metric, over the points at C > 1."""
    found: dict[tuple[str, Metric], list[tuple[float, bool]]] = {}
    for p, m in zip(predicted, measured, strict=False):
        for metric in SHOWN:
            value, seen = (p["metrics"] or {}).get(metric), m.measured(metric)
            if value and seen and (p["concurrency"] or 2) > 1:
                error = abs(value["value"] / seen - 1)
                found.setdefault((p["engine"], metric), []).append((error, holds(value, seen)))
    return [
        {
            "engine": engine,
            "metric": metric,
            "points": len(each),
            "mean_abs_error": sum(e for e, _ in each) / len(each),
            "worst_error": max(e for e, _ in each),
            "inside_share": sum(i for _, i in each) / len(each),
        }
        for (engine, metric), each in found.items()
    ]


def text(predicted: list[PredictedPoint], measured: list[MeasuredPoint]) -> str:
    """A table with one line per point: predicted with its 80 % interval; for measured points predicted, measured and
    the error, marked * if the measured value lies outside the interval."""
    # the posts' tables have the decode rate or the output rate
    rate: Metric = "output_tok_per_s"
    if measured and not any(m.measured(rate) for m in measured):
        rate = "decode_tok_per_s"
    shown: tuple[Metric, ...] = ("ttft_s", "tpot_s", rate)
    head, cell = (_compared_head, _compared) if measured else (_predicted_head, _predicted)
    width = max([5, *(len(p["sweep"]) for p in predicted)]) + 2
    named = max([6, *(len(p["engine"]) for p in predicted)]) + 2
    placed = max([5, *(len(p["point"]) for p in predicted)]) + 1
    lines = [f"{'sweep':<{width}}{'engine':<{named}}{'point':<{placed}}" + "".join(map(head, shown)).rstrip()]
    for i, p in enumerate(predicted):
        seen = measured[i] if i < len(measured) else None
        line = f"{p['sweep']:<{width}}{p['engine']:<{named}}{p['point']:<{placed}}"
        line += "".join(cell(m, p["metrics"][m], seen) for m in shown if m in p["metrics"]) if p["fits"] else ""
        lines.append(f"{line}  {p['note'] or ''}".rstrip())
    if scored := errors(predicted, measured):
        lines += ["", "points at C > 1, predicted from the C = 1 points alone:"]
        lines.append(f"{'engine':<{named}}{'':<14}{'points':>7}{'mean |error|':>14}{'largest':>9}{'inside 80 %':>13}")
        for s in scored:
            lines.append(
                f"{s['engine']:<{named}}{SHOWN[s['metric']][1]:<14}{s['points']:>7}{s['mean_abs_error']:>14.1%}"
                f"{s['worst_error']:>9.1%}{s['inside_share']:>13.0%}"
            )
        lines.append("* outside the 80 % interval; --json has every metric with its interval")
    return "\n".join(lines)


def _predicted_head(metric: Metric) -> str:
    return f"{SHOWN[metric][1]:>14}  {'80 % interval':<16}"


def _predicted(metric: Metric, predicted: PredictedValue, _: MeasuredPoint | None) -> str:
    scale = SHOWN[metric][0]
    low, high = (words.number(v * scale) for v in interval(predicted) or (math.nan, math.nan))
    return f"{words.number(predicted['value'] * scale):>14}  {f'{low} to {high}':<16}"


def _compared_head(metric: Metric) -> str:
    return f"{SHOWN[metric][1]:>14}{'measured':>10}{'error':>8} "


def _compared(metric: Metric, predicted: PredictedValue, seen: MeasuredPoint | None) -> str:
    scale, _ = SHOWN[metric]
    value, found = predicted["value"], seen.measured(metric) if seen else None
    if not found:
        return f"{words.number(value * scale):>14}{'–':>10}{'':>8} "
    mark = " " if holds(predicted, found) else "*"
    return f"{words.number(value * scale):>14}{words.number(found * scale):>10}{value / found - 1:>+8.1%}{mark}"


def write_page(params_path: str, calibration: str | None, out: Path) -> int:
    """Predict the measured points of a CSV, calibrated on those at C = 1; write them and their scores as a page."""
    if not calibration:
        raise ServebookError("a page needs measured points", "--html", "Give them with --calibration CSV")
    from ..report.published import write_published

    book, source = Book.open(params_path), find_params(calibration)
    measured, facts = published.read(source)
    prediction = predict.predict_published(book.params, book.shape, book.gpu, measured, facts)
    clean = None
    if any(p.cache_hit_share for p in measured):
        fresh = [replace(p, cache_hit_share=None) for p in measured]
        clean = predict.predict_published(book.params, book.shape, book.gpu, fresh, facts)
    page = write_published(out, prediction, measured, book.params, book.gpu, source=source, clean=clean)
    print(page)
    return 0
