"""`servebook predict`: predictions of a run on the terminal, scored where measured points are given. Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..predictor import predict
from ..run.book import Book, find_params
from ..run_folder import published

# metric → the measured column, how it is shown
SHOWN = {
    "ttft_s": ("ttft_mean_s", 1e3, "TTFT ms"),
    "tpot_s": ("tpot_mean_s", 1e3, "TPOT ms"),
    "decode_tok_per_s": ("decode_tok_per_s", 1, "decode tok/s"),
    "output_tok_per_s": ("output_tok_per_s", 1, "output tok/s"),
}


def main(params_path: str, calibration: str | None, *, as_json: bool) -> int:
    """Print every predicted point; with measured points, calibrate on those at C = 1 and score the others."""
    book = Book.open(params_path)
    if calibration is None:
        measured: list[dict[str, Any]] = []
        prediction = predict.predict_run(book.params, book.shape, book.gpu)
    else:
        measured, facts = published.read(find_params(calibration))
        prediction = predict.predict_published(book.params, book.shape, book.gpu, measured, facts)
    if as_json:
        prediction["scored"] = errors(prediction["points"], measured)
        print(json.dumps({k: v for k, v in prediction.items() if k != "inputs"}, indent=1))
    else:
        print(text(prediction["points"], measured))
    return 0


def errors(predicted: Iterable[Mapping[str, Any]], measured: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and largest |error| and the share inside the interval, by engine and metric, over the points at C > 1."""
    found: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for p, m in zip(predicted, measured, strict=False):
        for metric, (column, _, _) in SHOWN.items():
            said, seen = (p["metrics"] or {}).get(metric), m.get(column)
            if said and seen and (p["concurrency"] or 2) > 1:
                inside = said["low"] <= seen <= said["high"]
                found.setdefault((p["engine"], metric), []).append((abs(said["value"] / seen - 1), inside))
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


def text(predicted: list[dict[str, Any]], measured: list[dict[str, Any]]) -> str:
    """One line a point: predicted with its 80 % interval, measured and the error where there is a measurement."""
    lines = []
    for i, p in enumerate(predicted):
        seen = measured[i] if i < len(measured) else {}
        lines.append(f"{p['sweep']} {p['engine']} {p['point']}" + ("" if p["fits"] else f": {p['note']}"))
        for metric, (column, scale, name) in SHOWN.items():
            said = p["metrics"].get(metric)
            if not said:
                continue
            line = (
                f"  {name:<13}{said['value'] * scale:>10.4g}  [{said['low'] * scale:.4g}, {said['high'] * scale:.4g}]"
            )
            if seen.get(column):
                line += f"  measured {seen[column] * scale:.4g}, {said['value'] / seen[column] - 1:+.1%}"
            lines.append(line)
    if scored := errors(predicted, measured):
        lines.append("points at C > 1, from the C = 1 points alone:")
        for s in scored:
            lines.append(
                f"  {s['engine']:<8}{SHOWN[s['metric']][2]:<13} mean |error| {s['mean_abs_error']:.1%}, "
                f"largest {s['worst_error']:.1%}, "
                f"{s['inside_share']:.0%} of {s['points']} inside the 80 % interval"
            )
    return "\n".join(lines)
