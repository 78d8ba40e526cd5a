"""Figures of what more load gives and takes: latency against throughput (2), one user's rate against the server's.

Arguments as those of sweeps.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from . import captions, lines, words
from .lines import Data
from .style import LIGHT, Canvas, FigureText, chart, place_last, tip, y_axis


@chart
def latency_throughput(canvas: Canvas, points: Any, predictions: Any, sweep: str) -> Figure:
    """Chart 2: p50 and p99 request latency against output tokens/s, one point per concurrency. Predictions that
    have only means are not drawn."""
    data = lines.gather(points, predictions, sweep)
    title = "Request latency against output throughput"
    figure, [(ax, _)] = canvas.panels(1, height=3.0)
    rows = data.points[data.points["verdict"] != "invalid"].dropna(subset=["output_tok_per_s"])
    rows = rows.assign(e2e_p50_s=rows["e2e_p50_s"].fillna(rows["e2e_mean_s"])).dropna(subset=["e2e_p50_s"])
    if rows.empty:
        return lines.empty(figure, ax, f"latency-throughput-{sweep}", title)
    ends, found, alt, drawn = [], [], [], 0
    for engine in data.engines:
        own, look = rows[rows["engine"] == engine].sort_values("concurrency"), data.styles[engine]
        predicted = _percentiles(data, predictions, engine, sweep)
        for percentile, width in (("p50", 1.4), ("p99", 0.9)) if len(predicted) else ():
            ax.plot(predicted["rate"], predicted[percentile], color=look.colour, linestyle=(0, (4, 2)), linewidth=width)
        drawn += len(predicted)
        if own.empty:
            continue
        ax.plot(own["output_tok_per_s"], own["e2e_p50_s"], color=look.colour, zorder=3)
        lines.marks(ax, own, "output_tok_per_s", "e2e_p50_s", look)
        for _, r in own.iterrows():
            tip(ax, r["output_tok_per_s"], r["e2e_p50_s"], f"{engine}, C = {r['concurrency']:.0f}: "
                f"{words.number(r['output_tok_per_s'])} tok/s, p50 {words.seconds(r['e2e_p50_s'])}, "
                f"p99 {words.seconds(r['e2e_p99_s'])}")  # fmt: skip
        tail = own.dropna(subset=["e2e_p99_s"])
        ax.plot(tail["output_tok_per_s"], tail["e2e_p99_s"], color=look.colour, linewidth=1, alpha=0.75, zorder=2)
        ax.plot(tail["output_tok_per_s"], tail["e2e_p99_s"], "_", color=look.colour, markersize=9, markeredgewidth=2)
        _number_points(ax, own, "output_tok_per_s", "e2e_p50_s", "concurrency")
        last = own.iloc[-1]
        ends.append((engine, float(last["output_tok_per_s"]), float(last["e2e_p50_s"])))
        top = own.loc[own["output_tok_per_s"].idxmax()]
        found.append(
            f"{engine} peaks at {words.number(top['output_tok_per_s'])} output tok/s (C = {top['concurrency']:.0f}), "
            f"where p50 of the request latency is {words.seconds(top['e2e_p50_s'])} and p99 "
            f"{words.seconds(top['e2e_p99_s'])}"
        )
        alt.append(f"{engine}: " + "; ".join(
            f"C = {r['concurrency']:.0f}: {words.number(r['output_tok_per_s'])} tok/s at p50 "
            f"{words.seconds(r['e2e_p50_s'])}, p99 {words.seconds(r['e2e_p99_s'])}" for _, r in own.iterrows()
        ) + ".")  # fmt: skip
    ax.set_xlim(left=0)
    y_axis(ax, "Request latency", "s", log=True)
    ax.set_xlabel("Output tokens/s, all requests together")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words.label(v)))
    p99 = Line2D([], [], color=LIGHT["muted"], marker="_", markersize=8, linewidth=1, label="p99")
    lines.key(ax, data, canvas.narrow, [p99], band=False)
    _name_curves(ax, ends, data)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"latency-throughput-{sweep}", title + lines.workload(data), words.sentence(found),
        "Line chart of request latency, p50 (thick) and p99 (thin), over output tokens per second; each point is a "
        f"concurrency. {' '.join(alt)}",
        "Numbers at the points: concurrency C. " + _note(data, drawn),
    )  # fmt: skip
    return figure


def _note(data: Data, drawn: int) -> str:
    """What is dashed in chart 2: predicted percentiles, or nothing where the frozen predictions hold means only."""
    if drawn or not len(data.predicted):
        return captions.sample_note(data, bars=False)
    counts = captions.sample_note(replace(data, predicted=data.predicted.iloc[:0]), bars=False)
    return f"{counts} Not drawn: the prediction, which was frozen as a mean, without percentiles."


def _percentiles(data: Data, predictions: Any, engine: str, sweep: str) -> pd.DataFrame:
    """Predicted output rate with p50 and p99 of the latency, of the engine's stage that the figure shows; empty where
    the frozen predictions hold no percentiles."""
    stages = set(data.predicted[data.predicted["engine"] == engine]["stage"])
    frozen = predictions.get("frozen", []) if isinstance(predictions, Mapping) else predictions or []
    rows = [
        {"concurrency": p["concurrency"], "rate": p["metrics"]["output_tok_per_s"]["value"]}
        | {q: p["percentiles"]["e2e_s"][q]["value"] for q in ("p50", "p99")}
        for entry in frozen if entry["stage"] in stages
        for p in entry["points"]
        if (p["engine"], p["sweep"]) == (engine, sweep) and (p.get("percentiles") or {}).get("e2e_s")
    ]  # fmt: skip
    return pd.DataFrame(rows).sort_values("concurrency") if rows else pd.DataFrame()


@chart
def frontier(canvas: Canvas, points: Any, predictions: Any, sweep: str) -> Figure:
    """Throughput-latency frontier: tokens/s that one user sees (1 / TPOT) against tokens/s of the whole server."""
    data = lines.gather(points, predictions, sweep)
    title = "What one user sees against what the server gives"
    figure, [(ax, _)] = canvas.panels(1, height=2.8)
    rows = data.points[data.points["verdict"] != "invalid"].dropna(subset=["output_tok_per_s", "tpot_mean_s"])
    rows = rows[rows["tpot_mean_s"] > 0].assign(user=lambda r: 1 / r["tpot_mean_s"])
    if rows.empty:
        return lines.empty(figure, ax, f"frontier-{sweep}", title)
    ends, found, alt = [], [], []
    for engine in data.engines:
        own, look = rows[rows["engine"] == engine].sort_values("concurrency"), data.styles[engine]
        predicted = _pairs(data, engine, "output_tok_per_s", "tpot_s")
        if len(predicted) > 0:
            ax.plot(
                1 / predicted["tpot_s"],
                predicted["output_tok_per_s"],
                color=look.colour,
                linestyle=(0, (4, 2)),
                linewidth=1.4,
            )
        if own.empty:
            continue
        ax.plot(own["user"], own["output_tok_per_s"], color=look.colour, zorder=3)
        lines.marks(ax, own, "user", "output_tok_per_s", look)
        for _, r in own.iterrows():
            both = f"{words.number(r['user'])} tok/s a user, {words.number(r['output_tok_per_s'])} tok/s in all"
            tip(ax, r["user"], r["output_tok_per_s"], f"{engine}, C = {r['concurrency']:.0f}: {both}")
        _number_points(ax, own, "user", "output_tok_per_s", "concurrency", above=True)
        first, top = own.iloc[0], own.loc[own["output_tok_per_s"].idxmax()]
        ends.append((engine, float(top["user"]), float(top["output_tok_per_s"])))
        clause = f"{engine} gives one user {words.number(first['user'])} tok/s at C = {first['concurrency']:.0f}"
        if top["concurrency"] != first["concurrency"]:
            clause += (
                f" and {words.number(top['user'])} at C = {top['concurrency']:.0f}, "
                f"where the server's total is {words.number(top['output_tok_per_s'])} tok/s"
            )
        found.append(clause)
        alt.append(f"{engine}: " + "; ".join(
            f"C = {r['concurrency']:.0f}: {words.number(r['user'])} tok/s a user, "
            f"{words.number(r['output_tok_per_s'])} tok/s in all" for _, r in own.iterrows()) + ".")  # fmt: skip
    ax.set_xlim(left=0)
    peaks = rows.groupby("engine")["output_tok_per_s"].max()
    log = bool(peaks.max() > 20 * peaks.min() > 0)  # else one engine would lie on the axis
    if not log:
        ax.set_ylim(bottom=0)
    ax.set_xlabel(
        "Tokens/s of one user (1 / TPOT)" if canvas.narrow else "Tokens/s of one user while decoding (1 / TPOT)"
    )
    y_axis(ax, "Server, output tok/s", "", log=log)
    lines.key(ax, data, canvas.narrow, band=False)
    _name_curves(ax, ends, data, up=13)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"frontier-{sweep}", title + lines.workload(data), words.sentence(found),
        f"Line chart of the server's output tokens per second over one user's decode rate. {' '.join(alt)}",
        "Up and to the right is better; numbers at the points: C. " + captions.sample_note(data, bars=False),
    )  # fmt: skip
    return figure


def _pairs(data: Data, engine: str, first: str, second: str) -> pd.DataFrame:
    own = data.predicted[data.predicted["engine"] == engine]
    wide = own.pivot_table(index="concurrency", columns="metric", values="predicted")
    if first not in wide or second not in wide:
        return pd.DataFrame()
    return wide[[first, second]].dropna().sort_index()


def _number_points(ax: Any, rows: pd.DataFrame, x: str, y: str, number: str, *, above: bool = False) -> None:
    """Write each point's number next to it, unless it would overlap the one before."""
    places = rows[[x, y]].to_numpy(dtype=float)
    labels = [
        ax.annotate(
            f"{value:.0f}", place, (6, 4 if above else -10), textcoords="offset points", ha="left", fontsize=7.5,
            color=LIGHT["muted"], annotation_clip=False,
        )
        for value, place in zip(rows[number], places, strict=True)
    ]  # fmt: skip

    def thin_out() -> None:
        at = ax.transData.transform(places) * 72 / ax.figure.dpi
        kept: list[tuple[float, float]] = []
        for label, place in zip(labels, at, strict=True):
            wide, low = 6 + 4.8 * len(label.get_text()), place[1] + (3 if above else -11)

            def hides(other: Any, left: float = place[0], wide: float = wide, low: float = low) -> bool:
                return bool(left + 3 < other[0] + 4 and other[0] - 4 < left + wide and abs(other[1] - low - 4) < 7)

            crowded = any(abs(place[0] - k[0]) < 13 and abs(place[1] - k[1]) < 9 for k in kept)
            if crowded or any(hides(other) for other in at if other is not place and tuple(other) != tuple(place)):
                label.set_visible(False)
            else:
                kept.append((float(place[0]), float(place[1])))

    place_last(ax.figure, thin_out)


def _name_curves(ax: Any, ends: list[tuple[str, float, float]], data: Data, up: int = 4) -> None:
    for name, x, y in ends:
        if np.isfinite(x) and np.isfinite(y):
            ax.annotate(
                name, (x, y), (9, up), textcoords="offset points", ha="left", va="bottom", fontweight="bold",
                color=data.styles[name].colour, annotation_clip=False,
            )  # fmt: skip
