"""The decode model over the batch size, with its ceiling or with the measured rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import words
from .style import LIGHT, Canvas, EngineStyle, FigureText, chart, engine_styles, plain_log, y_axis


@chart
def saturation(
    canvas: Canvas,
    curve: pd.DataFrame | Sequence[Mapping[str, Any]],
    *,
    half_batch: float | None = None,
    ceiling_tok_per_s: float | None = None,
    measured: pd.DataFrame | Sequence[Mapping[str, Any]] | None = None,
    engine: str = "vllm",
    id: str = "saturation",
) -> Figure:
    """Saturation curve of decode: tokens/s over batch B, with the half-saturation batch and the ceiling.

    curve: rows of batch, tok_per_s; measured: rows of concurrency, tok_per_s and, where known, verdict. With measured
    rows both axes are logarithmic and end where the measurements end: both curves can be read then.
    """
    model = pd.DataFrame(curve, columns=["batch", "tok_per_s"]).sort_values("batch")
    points = pd.DataFrame([] if measured is None else measured, columns=["concurrency", "tok_per_s", "verdict"])
    points = points.dropna(subset=["concurrency", "tok_per_s"]).sort_values("concurrency")
    if len(points):
        model = model[model["batch"] <= 2 * points["concurrency"].max()]
    figure, [(ax, _)] = canvas.panels(1, height=2.7)
    look = engine_styles([engine])[engine]
    ax.plot(model["batch"], model["tok_per_s"], color=look.colour, linestyle=(0, (4, 2)), linewidth=1.5)
    alt: list[str] = []
    if len(points):
        found, alt = _served(ax, points, model, look)
    else:
        found = _saturation_marks(ax, half_batch, ceiling_tok_per_s)
        ax.set_ylim(bottom=0)
    ticks = [2.0**i for i in range(12) if model["batch"].min() <= 2**i <= model["batch"].max()]
    plain_log(ax.xaxis, ticks, room=6 if canvas.narrow else 12)
    ax.set_xlabel("Batch, sequences decoded together (log₂)")
    y_axis(ax, "Tokens/s" if len(points) else "Decode tokens/s", "", log=bool(len(points)))
    picked = model.iloc[:: max(1, len(model) // 8)]
    values = "; ".join(f"B = {words.number(r['batch'])}: {words.number(r['tok_per_s'])}" for _, r in picked.iterrows())
    measured_words = f" Measured, tok/s: {'; '.join(alt)}." if alt else ""
    title = "Served tokens/s against the decode model" if alt else "How decode throughput saturates with the batch"
    solid = " Solid: measured output tokens/s." if alt else ""
    solid += " Hollow: the audit doubts the point." if (points["verdict"] == "suspect").any() else ""
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        id, title, words.sentence(found),
        f"Curve of modelled decode tokens per second over batch: {values}.{measured_words}",
        f"Dashed: the decode-only model, no prefill in it.{solid}",
    )  # fmt: skip
    return figure


def _served(ax: Axes, points: pd.DataFrame, model: pd.DataFrame, look: EngineStyle) -> tuple[list[str], list[str]]:
    """Draws the measured rates; clauses on how far they lie below the model, and the values."""
    ax.plot(points["concurrency"], points["tok_per_s"], color=look.colour)
    for suspect, own in points.groupby(points["verdict"] == "suspect"):
        fill = LIGHT["paper"] if suspect else look.colour
        ax.plot(own["concurrency"], own["tok_per_s"], look.marker, color=look.colour, markerfacecolor=fill)
    over = np.interp(points["concurrency"], model["batch"], model["tok_per_s"]) / points["tok_per_s"]
    each = list(zip(points["concurrency"], points["tok_per_s"], over, strict=True))
    found = [
        f"at C = {words.number(c)} the decode model gives {words.number(served * factor)} tok/s, "
        f"{words.times(factor)} the {words.number(served)} that are served"
        for c, served, factor in each[:: max(1, len(each) - 1)]
    ]
    found[0] = f"{found[0][0].upper()}{found[0][1:]}"
    rows = points.to_dict("records")
    return found, [f"C = {words.number(r['concurrency'])}: {words.number(r['tok_per_s'])}" for r in rows]


def _saturation_marks(ax: Axes, half_batch: float | None, ceiling_tok_per_s: float | None) -> list[str]:
    """Draws ceiling and half-saturation batch; what they are, as clauses."""
    found = []
    if ceiling_tok_per_s:
        ax.axhline(ceiling_tok_per_s, color=LIGHT["muted"], linewidth=1)
        label = f"ceiling {words.number(ceiling_tok_per_s)} tok/s"
        ax.annotate(label, (0.02, ceiling_tok_per_s), (0, 4), xycoords=("axes fraction", "data"),
                    textcoords="offset points", fontsize=8.5, color=LIGHT["muted"])  # fmt: skip
        found.append(f"The decode model nears {words.number(ceiling_tok_per_s)} tok/s")
    if half_batch and ceiling_tok_per_s:
        ax.plot([half_batch] * 2, [0, ceiling_tok_per_s / 2], color=LIGHT["muted"], linewidth=1, linestyle=(0, (1, 2)))
        ax.plot(half_batch, ceiling_tok_per_s / 2, "o", color=LIGHT["ink"], markersize=4.5)
        ax.annotate(f"half at B = {words.number(half_batch)}", (half_batch, ceiling_tok_per_s / 2), (-7, 5), ha="right",
                    textcoords="offset points", fontsize=8.5, color=LIGHT["ink"])  # fmt: skip
        found.append(f"it reaches half of that at batch {words.number(half_batch)}")
    return found
