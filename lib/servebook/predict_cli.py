"""`servebook predict`: predictions of a run on the terminal, scored where measured points are given. Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import closed_forms, files, hardware, params, predict
from .book import Book, find_params
from .errors import ServebookError

NEEDED = {"sweep", "engine", "point", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s"}
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
        measured, facts = read_published(find_params(calibration))
        prediction = predict.predict_published(book.params, book.shape, book.gpu, measured, facts)
    if as_json:
        prediction["scored"] = errors(prediction["points"], measured)
        print(json.dumps({k: v for k, v in prediction.items() if k != "inputs"}, indent=1))
    else:
        print(text(prediction["points"], measured))
    return 0


def read_published(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measured points of a CSV (columns as in points.csv) and NAME.facts.json beside it, {} where there is none."""
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ServebookError(
            f"cannot read measured points ({error})",
            str(path),
            "Give a CSV such as outputs/published/a40-qwen2.5-7b.csv",
        ) from None
    if missing := NEEDED - set(frame.columns):
        raise ServebookError(
            f"lacks the columns {', '.join(sorted(missing))}", str(path), "outputs/published/README.md lists them"
        )
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows, files.read_json(path.parent / f"{path.stem}.facts.json") or {}


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


def capacity_main(
    params_path: str, prompt_tokens: int | None, output_tokens: int | None, others: list[str], *, as_json: bool
) -> int:
    """Print what every engine of a run carries under its slo; a stored run's C = 1 points and facts are used if there.

    others: "NAME" or "NAME=PRICE per hour" of GPUs in the catalog.
    """
    from . import capacity, points

    book = Book.open(params_path)
    slo = book.params.slo
    if slo.ttft_s is None and slo.tpot_s is None and slo.e2e_s is None:
        raise ServebookError("no service level to meet", f"{params_path}, slo", "Set slo: {ttft_s: 0.5, tpot_s: 0.05}")
    prompt, output = closed_forms.workloads(book.params)[0] if book.params.sweeps else (512, 128)
    prompt, output = prompt_tokens or prompt, output_tokens or output
    gpus = []
    for other in others:
        name, _, price = other.partition("=")
        try:
            gpus.append((hardware.resolve(params.HardwareParams(gpu=name)), float(price or 0)))
        except ValueError:
            raise ServebookError(
                f"{price!r} is no price", f"--gpu {other}", "Write NAME=PRICE, as in H200=3.50"
            ) from None
    learned = [p for p in book.stored_points() if p["sweep"] == points.CALIBRATION]
    rows = capacity.capacity(
        book.params, book.shape, book.gpu, prompt, output, facts=book.all_facts(), calibration=learned, other_gpus=gpus
    )
    print(json.dumps(rows, indent=1) if as_json else capacity_text(rows, prompt, output, slo, bool(learned)))
    return 0


def capacity_text(rows: list[dict[str, Any]], prompt: int, output: int, slo: params.Slo, learned: bool) -> str:
    """A line a case: the largest C and rate of which 90 % of requests meet the slo, output rate, cost."""
    targets = [f"{k.removesuffix('_s').upper()} ≤ {v:g} s" for k, v in slo.model_dump().items() if v is not None]
    source = "calibrated on the stored C = 1 points" if learned else "from the datasheet alone"
    lines = [f"{prompt} in, {output} out, 90 % of requests within {' and '.join(targets)}; {source}"]
    lines.append(f"{'engine':<8}{'case':<32}{'C':>6}{'tok/s':>9}{'rate/s':>9}{'tok/s':>9}{'per 1M tokens':>15}")
    for r in rows:
        c, rate = r["by_concurrency"], r["by_rate"]
        if c is None and rate is None:
            lines.append(f"{r['engine']:<8}{r['case']:<32}  {r['note']}")
            continue
        closed = f"{c['concurrency']:>6}{c['output_tok_per_s']:>9,.0f}" if c else f"{'–':>6}{'–':>9}"
        opened = f"{rate['rate_per_s']:>9.2f}{rate['output_tok_per_s']:>9,.0f}" if rate else f"{'–':>9}{'–':>9}"
        cost = rate and rate["cost_per_million_output_tokens"]
        lines.append(f"{r['engine']:<8}{r['case']:<32}{closed}{opened}" + (f"{cost:>15.3f}" if cost else f"{'–':>15}"))
    return "\n".join(lines)
