"""The lab book's sweep figures: concurrency (1a, 1b, 2, 3), prompt length (4), arrival rate, frontier.

Each takes the run's points (all of them: colours go by engine across the run), its predictions (the contents of
predictions.json, or None) and the sweep's name, and returns a Figure whose text is `figure.servebook`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from . import captions, lines, words
from .lines import DECODE, E2E, OUTPUT, TPOT, TTFT, Data, Metric
from .style import LIGHT, Canvas, FigureText, chart, place_last, plain_log, y_axis


def _workload(data: Data) -> str:
    rows = data.points if len(data.points) else data.predicted
    tokens = [sorted(rows[c].dropna().unique()) for c in ("prompt_tokens", "output_tokens")]
    if all(len(t) == 1 for t in tokens):
        return f" ({tokens[0][0]:,.0f} in, {tokens[1][0]:,.0f} out)"
    return f" ({tokens[1][0]:,.0f} out)" if len(tokens[1]) == 1 else ""


def _empty(figure: Figure, ax: Any, id: str, title: str) -> Figure:
    ax.set_axis_off()
    ax.text(0.5, 0.5, "No point of this sweep was measured or predicted", ha="center", transform=ax.transAxes)
    text = "Nothing to draw: no point of this sweep was measured or predicted."
    figure.servebook = FigureText(id, title, text, text)  # type: ignore[attr-defined]
    return figure


def _finish_x(data: Data, x: str, pairs: list[tuple[Any, Any]], label: str, narrow: bool) -> None:
    for ax, below in pairs:
        plain_log(ax.xaxis, data.xs(x), room=8 if narrow or len(pairs) > 1 else 16)
        lines.finish_ratio(below, label, ax)


def _curves(
    canvas: Canvas, data: Data, metrics: list[Metric], x: str, at: str, x_label: str, id: str, title: str,
    *, log: bool, ratio: bool = True,
) -> Figure:  # fmt: skip
    """Panels of curves over x with a ratio panel each: the shape of most figures here."""
    ratio = ratio and bool(len(data.predicted)) and bool(len(data.measured))
    figure, pairs = canvas.panels(len(metrics), ratio=ratio, height=3.0 if len(metrics) == 1 else 2.7)
    if not len(data.xs(x)):
        for ax, _ in pairs[1:]:
            ax.set_axis_off()
        return _empty(figure, pairs[0][0], id, title)
    _finish = []
    for (ax, below), metric in zip(pairs, metrics, strict=True):
        ends = lines.draw(ax, below, data, metric, x)
        if not log:
            ax.set_ylim(bottom=0)
        y_axis(ax, metric.label, metric.unit, log=log)
        _finish.append((ax, ends))
    _finish_x(data, x, pairs, x_label, canvas.narrow)
    lines.key(pairs[0][0], data, canvas.narrow)
    for ax, ends in _finish:
        lines.label_ends(ax, ends, data)
    found = [words.sentence(captions.trends(data, m, x, at)) for m in metrics]
    if len(metrics) > 1:
        found = [f"{m.says[0].upper()}{m.says[1:]}: {f}" for m, f in zip(metrics, found, strict=True) if f]
    compared = captions.compare_at_last(data, metrics[0], x, at) if len(metrics) == 1 else ""
    takeaway = " ".join(s for s in [*found, compared, captions.errors_sentence(data, metrics, x)] if s)
    if not len(data.measured):
        takeaway = "Predicted only: nothing has been measured yet."
    kinds = "measured (solid) and predicted (dashed)" if len(data.predicted) else "measured"
    alt = f"Line chart, {kinds}, of {words.listing([m.says for m in metrics])} over {x_label.lower()}"
    alt += f", engines {words.listing(data.engines)}. "
    alt += " ".join(captions.values_in_words(data, m, x, at) for m in metrics)
    figure.servebook = FigureText(id, title + _workload(data), takeaway, alt, captions.sample_note(data))  # type: ignore[attr-defined]
    return figure


CONCURRENCY = ("concurrency", "C = {}", "Concurrency, requests in flight (log₂)")


@chart
def throughput(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """Charts 1a and 1b: concurrency against decode throughput (running / TPOT; 1 / TPOT for the naive server)."""
    data = lines.gather(points, predictions, sweep, stage)
    title = "Concurrency against decode throughput"
    return _curves(canvas, data, [DECODE], *CONCURRENCY, f"throughput-{sweep}", title, log=False)


@chart
def output_rate(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """Concurrency against output tokens/s by the wall clock, for points of which no decode rate is known."""
    data = lines.gather(points, predictions, sweep, stage)
    title = "Concurrency against output tokens/s"
    return _curves(canvas, data, [OUTPUT], *CONCURRENCY, f"output-{sweep}", title, log=False)


@chart
def latencies(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """Chart 3: concurrency against TPOT and TTFT."""
    data = lines.gather(points, predictions, sweep, stage)
    title = "Concurrency against TPOT and TTFT"
    return _curves(canvas, data, [TPOT, TTFT], *CONCURRENCY, f"latencies-{sweep}", title, log=True)


@chart
def prompt_length(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """Chart 4: prompt length against TTFT."""
    data = lines.gather(points, predictions, sweep, stage)
    x = ("prompt_tokens", "{} prompt tokens", "Prompt length, tokens (log₂)")
    return _curves(canvas, data, [TTFT], *x, f"prompt-length-{sweep}", "Prompt length against TTFT", log=True)


@chart
def arrival_rate(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """The open-loop control: arrival rate against TTFT and request latency."""
    data = lines.gather(points, predictions, sweep, stage)
    x = ("rate_per_s", "{} requests/s", "Arrival rate, requests/s")
    title = "Arrival rate against TTFT and request latency"
    return _curves(canvas, data, [TTFT, E2E], *x, f"arrival-rate-{sweep}", title, log=True)


@chart
def latency_throughput(
    canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None
) -> Figure:
    """Chart 2: request latency p50 and p99 against output tokens/s, one point a concurrency."""
    data = lines.gather(points, predictions, sweep, stage)
    title = "Request latency against output throughput"
    figure, [(ax, _)] = canvas.panels(1, height=3.6)
    rows = data.points[data.points["verdict"] != "invalid"].dropna(subset=["output_tok_per_s"])
    rows = rows.assign(e2e_p50_s=rows["e2e_p50_s"].fillna(rows["e2e_mean_s"])).dropna(subset=["e2e_p50_s"])
    if rows.empty:
        return _empty(figure, ax, f"latency-throughput-{sweep}", title)
    ends, found, alt = [], [], []
    for engine in data.engines:
        own, look = rows[rows["engine"] == engine].sort_values("concurrency"), data.styles[engine]
        said = _pairs(data, engine, "output_tok_per_s", "e2e_s")
        if len(said) > 0:
            ax.plot(said["output_tok_per_s"], said["e2e_s"], color=look.colour, linestyle=(0, (4, 2)), linewidth=1.4)
        if own.empty:
            continue
        ax.plot(own["output_tok_per_s"], own["e2e_p50_s"], color=look.colour, zorder=3)
        lines.marks(ax, own, "output_tok_per_s", "e2e_p50_s", look)
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
        f"latency-throughput-{sweep}", title + _workload(data), words.sentence(found),
        "Line chart of request latency, p50 (thick) and p99 (thin), over output tokens per second; each point is a "
        f"concurrency. {' '.join(alt)}",
        "Numbers at the points: concurrency C. " + captions.sample_note(data, bars=False),
    )  # fmt: skip
    return figure


@chart
def frontier(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """Throughput-latency frontier: tokens/s that one user sees (1 / TPOT) against tokens/s of the whole server."""
    data = lines.gather(points, predictions, sweep, stage)
    title = "What one user sees against what the server gives"
    figure, [(ax, _)] = canvas.panels(1, height=3.4)
    rows = data.points[data.points["verdict"] != "invalid"].dropna(subset=["output_tok_per_s", "tpot_mean_s"])
    rows = rows[rows["tpot_mean_s"] > 0].assign(user=lambda r: 1 / r["tpot_mean_s"])
    if rows.empty:
        return _empty(figure, ax, f"frontier-{sweep}", title)
    ends, found, alt = [], [], []
    for engine in data.engines:
        own, look = rows[rows["engine"] == engine].sort_values("concurrency"), data.styles[engine]
        said = _pairs(data, engine, "output_tok_per_s", "tpot_s")
        if len(said) > 0:
            ax.plot(
                1 / said["tpot_s"], said["output_tok_per_s"], color=look.colour, linestyle=(0, (4, 2)), linewidth=1.4
            )
        if own.empty:
            continue
        ax.plot(own["user"], own["output_tok_per_s"], color=look.colour, zorder=3)
        lines.marks(ax, own, "user", "output_tok_per_s", look)
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
    y_axis(ax, "Output tokens/s of the server", "", log=log)
    lines.key(ax, data, canvas.narrow, band=False)
    _name_curves(ax, ends, data, up=13)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"frontier-{sweep}", title + _workload(data), words.sentence(found),
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
    """A point's number beside it, left out where it would lie on the one before."""
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
        kept: list[Any] = []
        for label, place in zip(labels, at, strict=True):
            if any(abs(place[0] - k[0]) < 13 and abs(place[1] - k[1]) < 9 for k in kept):
                label.set_visible(False)
            else:
                kept.append(place)

    place_last(ax.figure, thin_out)


def _name_curves(ax: Any, ends: list[tuple[str, float, float]], data: Data, up: int = 4) -> None:
    for name, x, y in ends:
        if np.isfinite(x) and np.isfinite(y):
            ax.annotate(
                name, (x, y), (9, up), textcoords="offset points", ha="left", va="bottom", fontweight="bold",
                color=data.styles[name].colour, annotation_clip=False,
            )  # fmt: skip
