"""The authors' own predictions on the pages of published points, each with the measured value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..charts import words
from ..scoring import score
from .markup import METRIC_NAMES, Html, columns, table, unit_of, verdict


def curves_table(lines: Sequence[Mapping[str, Any]], measured: Any) -> Html:
    """Each predicted figure of a point, with the published measurement of the same point if there is one."""
    points = score.measured_frame(score.complete_frame(measured))
    rows: list[tuple[Any, ...]] = []
    for line in lines:
        own = points[
            (points["sweep"] == line["sweep"]) & (points["engine"] == line["engine"])
            & (points["concurrency"] == line["concurrency"]) & (points["metric"] == line["metric"])
        ].dropna(subset=["measured"])  # fmt: skip
        value = float(own["measured"].iloc[0]) if len(own) else None
        unit = unit_of(line["metric"])
        error = line["predicted"] / value - 1 if value else None
        rows.append((
            line["engine"], f"C = {line['concurrency']}", METRIC_NAMES.get(line["metric"], line["metric"]),
            words.quantity(line["predicted"], unit), words.quantity(value, unit) if value else "not measured",
            words.percent(error, signed=True) if error is not None else None,
            verdict(score.verdict(abs(error))) if error is not None else None,
        ))  # fmt: skip
    if not rows:
        return Html("")
    names = ("Engine", "Load", "Metric", "The author predicted", "and measured", "Error", "Verdict")
    shown = columns({name: [r[i] for r in rows] for i, name in enumerate(names)})
    scored = [r for r in rows if r[6] is not None]
    caption = f"The author's own predictions, before measuring: {len(scored)} of {len(rows)} were measured"
    return table(shown, caption, right=("The author predicted", "and measured", "Error"))


def quantities_table(rows: Sequence[Mapping[str, str]]) -> Html:
    """The write-up's table as it is: each quantity with its first and its refined prediction and what came out."""
    quantities = [r for r in rows if "quantity" in r]
    if not quantities:
        return Html("")

    def cell(text: str, unit: str) -> str | None:
        return words.quantity(float(text), unit) if text else None

    shown = columns({
        "Quantity": [r["quantity"].replace("_", " ") for r in quantities],
        "Predicted": [cell(r["predicted"], r["unit"]) for r in quantities],
        "Refined": [cell(r["predicted_refined"], r["unit"]) for r in quantities],
        "Measured": [cell(r["measured"], r["unit"]) for r in quantities],
        "Note": [r["note"] or None for r in quantities],
    })  # fmt: skip
    return table(shown, "What the author predicted, and what became of it", right=("Predicted", "Refined", "Measured"))


def flattered(points: Sequence[Mapping[str, Any]], clean: Sequence[Mapping[str, Any]], measured: Any) -> Html:
    """Points with a warm prefix cache: predicted with and without the published hits, next to the measured values.
    points, clean: the same points predicted in the two ways."""
    frame = score.complete_frame(measured)
    rows = []
    for i, (p, q) in enumerate(zip(points, clean, strict=True)):
        hit = frame["cache_hit_share"].iloc[i]
        if not hit > 0 or p["sweep"] == "calibration" or not p.get("metrics") or not q.get("metrics"):
            continue
        with_hits, without = (x["metrics"]["output_tok_per_s"]["value"] for x in (p, q))
        seen = frame["output_tok_per_s"].iloc[i]
        rows.append((f"C = {p['concurrency']}", hit, with_hits, without, without / with_hits - 1, seen))
    if not rows:
        return Html("")
    kept = list(zip(*rows, strict=True))
    shown = columns({
        "Load": kept[0], "Prompt tokens from the cache": [words.percent(v) for v in kept[1]],
        "Predicted with these hits": [words.quantity(v, "tok/s") for v in kept[2]],
        "Predicted with fresh prompts": [words.quantity(v, "tok/s") for v in kept[3]],
        "Difference": [words.percent(v, signed=True) for v in kept[4]],
        "Measured": [words.quantity(v, "tok/s") if v > 0 else "not published" for v in kept[5]],
    })  # fmt: skip
    worst = min(rows, key=_difference)
    caption = (
        f"These points are flattered: with fresh prompts the output rate at {worst[0]} would be "
        f"{words.quantity(worst[3], 'tok/s')}, not {words.quantity(worst[2], 'tok/s')}"
    )
    return table(shown, caption, right=tuple(shown.columns[1:]))


def _difference(row: tuple[Any, ...]) -> float:
    return float(row[4])
