"""Figures that explain: roofline with the engines' steps, waterfall of a point's time, saturation curve, all scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..predictor.roofline import ridge_flop_per_byte
from ..scoring import score
from . import words
from .style import LIGHT, Canvas, FigureText, chart, engine_order, engine_styles, log_ticks, plain_log, tip, y_axis

PREFILL_MARKER = "^"  # filled like all others: hollow means doubted, in every figure


@chart
def roofline(
    canvas: Canvas,
    steps: pd.DataFrame | Sequence[Mapping[str, Any]],
    *,
    peak_flops_per_s: float,
    bytes_per_s: float,
    gpu: str,
    id: str = "roofline",
) -> Figure:
    """The GPU's roofline with measured steps on it.

    steps: rows of engine, phase ("prefill" or "decode"), label (short, e.g. "C = 8"), flops, bytes, seconds and, where
    known, whether the audit doubts it; a step's place is flops / bytes against flops / seconds.
    """
    frame = pd.DataFrame(steps, columns=["engine", "phase", "label", "flops", "bytes", "seconds", "doubted"])
    frame = frame[(frame["seconds"] > 0) & (frame["bytes"] > 0) & (frame["flops"] > 0)]
    frame = frame.assign(intensity=frame["flops"] / frame["bytes"], rate=frame["flops"] / frame["seconds"] / 1e12)
    engines = sorted(frame["engine"].unique(), key=engine_order)
    styles = engine_styles(engines)
    ridge, peak = ridge_flop_per_byte(peak_flops_per_s, bytes_per_s), peak_flops_per_s / 1e12
    figure, [(ax, _)] = canvas.panels(1, height=3.3)
    left = min([0.5, *(frame["intensity"] * 0.6)])
    right = max([ridge * 8, *(frame["intensity"] * 1.8)])
    roof_x = np.array([left, ridge, right])
    ax.plot(roof_x, np.minimum(roof_x * bytes_per_s / 1e12, peak), color=LIGHT["ink"], linewidth=1.6, zorder=2)
    ax.plot([ridge, ridge], [0, peak], color=LIGHT["muted"], linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    found, alt, named = [], [], set()
    for engine in engines:
        for phase, own in frame[frame["engine"] == engine].groupby("phase", sort=True):
            ends = _draw_steps(ax, own, styles[engine], str(phase))
            clause, sentence = _roof_words(f"{engine}'s {phase}", f"{engine} {phase}", own, bytes_per_s, peak, ridge)
            found.append(clause)
            alt.append(sentence)
            share = own["rate"] / np.minimum(own["intensity"] * bytes_per_s / 1e12, peak)
            for (_, r), s in zip(own.iterrows(), share, strict=True):
                reached = f"{words.number(r['rate'])} TFLOP/s, {words.percent(s)} of the roof"
                tip(ax, r["intensity"], r["rate"], f"{engine} {phase}, {r['label']}: {reached}")
            for _, row in ends.iterrows():
                if (phase, row["label"]) in named:  # the engines' steps of one kind lie close together
                    continue
                named.add((phase, row["label"]))
                ax.annotate(
                    row["label"], (row["intensity"], row["rate"]), (7, -9), textcoords="offset points", fontsize=7.5,
                    color=LIGHT["muted"],
                )  # fmt: skip
    lowest = min([peak / 1000, *(frame["rate"] * 0.5)])
    _roofline_axes(ax, (left, right), (ridge, peak), lowest)
    handles = _roofline_handles(styles, engines, prefills=bool((frame["phase"] == "prefill").any()))
    figure.legend(handles=handles, loc="outside upper left", ncols=2 if canvas.narrow else 6, borderpad=0)
    head = f"Roofline of {gpu}: {words.number(peak)} TFLOP/s, {words.number(bytes_per_s / 1e9)} GB/s, ridge at "
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        id, f"Roofline of {gpu} with the engines' steps", words.sentence(found) or "No step was measured.",
        f"{head}{words.number(ridge)} FLOP/byte. {' '.join(alt)}",
        f"Ridge at {words.number(ridge)} FLOP/byte; intensity counts weights and KV cache, not activations."
        + (" Hollow: the audit doubts the point." if frame["doubted"].eq(True).any() else ""),
    )  # fmt: skip
    return figure


def _draw_steps(ax: Axes, own: pd.DataFrame, look: Any, phase: str) -> pd.DataFrame:
    """Draw the steps of one engine and phase; return the first and last step of each workload."""
    marker = look.marker if phase == "decode" else PREFILL_MARKER
    # steps come workload by workload: where the intensity falls, the next workload begins
    workloads = (own["intensity"].diff() < -0.2 * own["intensity"]).cumsum()
    for _, line in own.groupby(workloads):
        ax.plot(line["intensity"], line["rate"], "-", color=look.colour, linewidth=0.8, alpha=0.5, zorder=3)
    for doubted, marks in own.groupby(own["doubted"].eq(True)):
        fill = LIGHT["paper"] if doubted else look.colour
        ax.plot(marks["intensity"], marks["rate"], marker, color=look.colour, markerfacecolor=fill, zorder=4)
    return pd.concat([line.iloc[[0, -1]] for _, line in own.groupby(workloads)])


def _roof_words(
    whose: str, name: str, own: pd.DataFrame, bytes_per_s: float, peak: float, ridge: float
) -> tuple[str, str]:
    """(a clause of the takeaway, a sentence of the text alternative) on the steps of one engine and phase."""
    share = own["rate"] / np.minimum(own["intensity"] * bytes_per_s / 1e12, peak)
    bound = "memory" if (own["intensity"] < ridge).all() else "compute" if (own["intensity"] > ridge).all() else ""
    side = f"on the {bound} side" if bound else "on both sides of the ridge"
    low, high = share.min(), share.max()
    reach = words.percent(high) if high - low < 0.02 else f"{words.percent(low)} to {words.percent(high)}"
    clause = f"{whose} steps lie {side} and reach {reach} of the roof"
    sentence = (f"{name}: " + "; ".join(
        f"{r['label']}: {words.number(r['intensity'])} FLOP/byte, {words.number(r['rate'])} TFLOP/s, "
        f"{words.percent(s)} of the roof" for (_, r), s in zip(own.iterrows(), share, strict=True)
    ) + ".")  # fmt: skip
    return clause, sentence


def _roofline_axes(ax: Axes, reach: tuple[float, float], roof: tuple[float, float], lowest: float) -> None:
    """Scales, labels and the roof's figures. reach: smallest and largest intensity; roof: ridge, peak in TFLOP/s."""
    (left, right), (ridge, peak) = reach, roof
    ax.set(xscale="log", xlim=(left, right), ylim=(lowest, peak * 2.2))
    y_axis(ax, "TFLOP/s reached", "", log=True)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words.number(v)))
    ax.xaxis.set_major_locator(FixedLocator(log_ticks(left, right)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("Operational intensity (FLOP/byte, log)")
    ax.annotate(f"ridge {words.number(ridge)}", (ridge, lowest), (4, 5), textcoords="offset points", fontsize=8,
                color=LIGHT["muted"])  # fmt: skip
    ax.annotate(f"{words.number(peak)} TFLOP/s", (right, peak), (-2, 4), textcoords="offset points", ha="right",
                fontsize=8, color=LIGHT["muted"])  # fmt: skip


def _roofline_handles(styles: Mapping[str, Any], engines: Sequence[str], *, prefills: bool) -> list[Line2D]:
    handles = [
        Line2D([], [], color=styles[e].colour, marker=styles[e].marker, linestyle="none", markersize=5, label=e)
        for e in engines
    ]
    if prefills:
        handles += [
            Line2D([], [], color=LIGHT["muted"], marker=marker, linestyle="none", markersize=5, label=phase)
            for phase, marker in (("decode", "o"), ("prefill", PREFILL_MARKER))
        ]  # fmt: skip
    return handles


@chart
def waterfall(
    canvas: Canvas,
    parts: Sequence[tuple[str, float]],
    measured: float | None,
    *,
    what: str,
    unit: str = "s",
    engine: str = "vllm",
    id: str = "waterfall",
    note: str = "",
) -> Figure:
    """A waterfall of the time, from the first part (the roofline bound) to the measured value.

    parts: (label, value) in order, in one unit; the first is the start. The unexplained remainder is drawn as a
    separate part before `measured`."""
    labels, values = [p[0] for p in parts], [p[1] for p in parts]
    explained = float(np.sum(values))
    kinds = ["cause"] * len(parts)
    if measured is not None:
        labels += ["not explained", "measured"]
        values += [measured - explained, measured]
        kinds += ["rest", "total"]
    scale, shown = (1e3, "ms") if unit == "s" and max(map(abs, values)) < 1 else (1.0, unit)
    figure, [(ax, _)] = canvas.panels(1, height=0.6 + 0.28 * len(values))
    look = engine_styles([engine])[engine]
    level = 0.0
    reach = max(np.cumsum(values[: len(parts)] or [0]).max(), measured or 0, explained) * scale
    for row, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        total = kind == "total"
        left = 0.0 if total else min(level, level + value)
        colour = look.colour if total else LIGHT["bad" if kind == "rest" else "muted"]
        ax.barh(row, abs(value) * scale, left=left * scale, color=colour, height=0.62, zorder=3)
        end = (value if total else max(level, level + value)) * scale
        text = words.number(value * scale)
        text = text if total or row == 0 else ("−" if value < 0 else "+") + text.lstrip("-")
        ax.text(end + reach * 0.012, row, text, va="center", fontsize=8.5, color=LIGHT["ink"])
        if not total:
            level += value
            if row + 1 < len(values):
                ax.plot([level * scale] * 2, [row - 0.31, row + 1.31], color=LIGHT["muted"], linewidth=0.7, zorder=2)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlim(0, reach * 1.14 or 1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"{what} ({shown})")
    steps = [f"{label}: {words.quantity(v, unit)}" for label, v in zip(labels, values, strict=True)]
    takeaway = _waterfall_takeaway(list(zip(labels, values, strict=True)), len(parts), explained, measured, unit)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        id, f"Where the time went: {what}", takeaway,
        f"Waterfall of {what} for {engine}. {'; '.join(steps)}.", note,
    )  # fmt: skip
    return figure


def _waterfall_takeaway(
    steps: list[tuple[str, float]], parts: int, explained: float, measured: float | None, unit: str
) -> str:
    """Where it starts, the largest addition, and what is left unexplained. parts: how many of the steps are causes."""
    first, value = steps[0]
    biggest = max(steps[1:parts] or [("", 0.0)], key=lambda p: abs(p[1]))
    takeaway = f"{first[:1].upper()}{first[1:]}: {words.quantity(value, unit)}"
    if biggest[0]:
        takeaway += f"; the largest addition is {biggest[0]} ({words.quantity(biggest[1], unit)})"
    if measured is not None and measured > 0:
        left_over, size = measured - explained, words.quantity(abs(measured - explained), unit)
        takeaway += f". Measured {words.quantity(measured, unit)}: {size} ({words.percent(abs(left_over) / measured)}) "
        takeaway += "more than explained" if left_over >= 0 else "less than predicted"
    return takeaway + "."


def _verdicts(rows: pd.DataFrame) -> str:
    """The numbers of hits, near predictions and misses, in a sentence."""
    total, hits = len(rows), int((rows["verdict"] == "hit").sum())
    misses = int((rows["verdict"] == "miss").sum())
    inside = rows["inside"].dropna()
    takeaway = (
        f"Of {total} predictions {hits} are hits (within {words.percent(score.HIT)}), {total - hits - misses} near "
        f"(within {words.percent(score.NEAR)}) and {misses} misses"
    )
    if len(inside):
        takeaway += f"; {words.percent(inside.astype(float).mean())} of the measurements fell inside the 80 % interval"
    return takeaway + "."


@chart
def predicted_vs_measured(canvas: Canvas, scores: pd.DataFrame) -> Figure:
    """Every score of the run: predicted ÷ measured, one row a metric, one mark a point, each engine's best stage."""
    rows = score.final(scores) if len(scores) else scores
    figure, [(ax, _)] = canvas.panels(1, height=0.9 + 0.42 * max(2, rows["metric"].nunique() if len(rows) else 2))
    title = "Every prediction against its measurement"
    if rows.empty:
        ax.set_axis_off()
        text = "No point was both predicted and measured."
        figure.servebook = FigureText("predicted-vs-measured", title, text, text)  # type: ignore[attr-defined]
        return figure
    engines = sorted(rows["engine"].unique(), key=engine_order)
    styles = engine_styles(engines)
    metrics = [m for m in score.MEASURED if (rows["metric"] == m).any()]
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "latency", "output_tok_per_s": "output tok/s",
             "decode_tok_per_s": "decode tok/s", "request_rate_per_s": "requests/s"}  # fmt: skip
    ax.axvspan(1 - score.NEAR, 1 + score.NEAR, color=LIGHT["band"], alpha=0.6, zorder=0)
    ax.axvspan(1 - score.HIT, 1 + score.HIT, color=LIGHT["grid"], zorder=0)
    ax.axvline(1, color=LIGHT["muted"], linewidth=1)
    for i, metric in enumerate(metrics):
        for j, engine in enumerate(engines):
            own = rows[(rows["metric"] == metric) & (rows["engine"] == engine)]
            y = i + (j - (len(engines) - 1) / 2) * 0.28
            look = styles[engine]
            for _, r in own.iterrows():
                place = f"{engine}, {r['sweep']} {r['point']}: {names.get(metric, metric)}"
                tip(ax, 1 / r["ratio"], y, f"{place} predicted {words.percent(r['error_share'], signed=True)}")
            for doubted, marks in own.groupby(own["data"] == "suspect"):
                fill = LIGHT["paper"] if doubted else look.colour
                ax.plot(1 / marks["ratio"], [y] * len(marks), look.marker, color=look.colour, markersize=5, alpha=0.75,
                        markerfacecolor=fill, markeredgewidth=1)  # fmt: skip
    reach = max(1.6, float(np.exp(np.log(rows["ratio"]).abs().max())) * 1.15)
    ax.set(xscale="log", xlim=(1 / reach, reach), ylim=(len(metrics) - 0.4, -0.6))
    choices = [0.1, 0.2, 0.5, 1, 2, 5, 10] if reach > 2.4 else [0.5, 0.7, 0.8, 1, 1.25, 1.5, 2]
    plain_ticks = [c for c in choices if 1 / reach < c < reach]
    plain_log(ax.xaxis, plain_ticks)
    ax.set_yticks(range(len(metrics)), [names.get(m, m) for m in metrics])
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("predicted ÷ measured (log)")
    handles = [
        Line2D([], [], color=styles[e].colour, marker=styles[e].marker, linestyle="none", markersize=5, label=e)
        for e in engines
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), borderpad=0)
    summary = score.summary(rows, by=("engine", "metric"))
    alt = "; ".join(
        f"{r['engine']} {names.get(r['metric'], r['metric'])}: mean error {words.percent(r['mean_abs_error'])}, worst "
        f"{words.percent(r['worst_error'], signed=True)} over {r['points']} points"
        for _, r in summary.iterrows()
    )
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        "predicted-vs-measured", title, _verdicts(rows),
        f"Strip chart of predicted divided by measured, by metric and engine. {alt}.",
        f"n = {len(rows)} point × metric pairs; dark band ±10 %, light band ±25 %; right of 1: predicted above "
        "measured. Hollow: the audit doubts the point.",
    )  # fmt: skip
    return figure
