"""Figures over what a sweep turns: concurrency (1a, 1b, 3), prompt length (4), arrival rate, repeated prompts.

Each takes the run's points (all of them: colours go by engine across the run), its predictions (the contents of
predictions.json, or None) and the sweep's name, and returns a Figure whose text is `figure.servebook`.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from ..common.predicted_point import FrozenPredictions, StagePrediction, repeats_prompts
from ..scoring import analysis, score
from . import captions, lines, words
from .lines import DECODE, E2E, OUTPUT, TPOT, TTFT, ChartMetric, Data
from .style import Canvas, FigureText, chart, plain_log, text_of, y_axis


def _finish_x(data: Data, x: str, pairs: list[tuple[Any, Any]], label: str, narrow: bool) -> None:
    for ax, below in pairs:
        plain_log(ax.xaxis, data.xs(x), room=8 if narrow or len(pairs) > 1 else 16)
        lines.finish_ratio(below, label, ax)


def _curves(
    canvas: Canvas, data: Data, metrics: list[ChartMetric], x: str, at: str, x_label: str, id: str, title: str,
    *, log: bool, ratio: bool = True,
) -> Figure:  # fmt: skip
    """Panels of curves over x with a ratio panel each: the shape of most figures here."""
    ratio = ratio and bool(len(data.predicted)) and bool(len(data.measured))
    figure, pairs = canvas.panels(len(metrics), ratio=ratio, height=2.5 if len(metrics) == 1 else 2.3)
    if not len(data.xs(x)):
        for ax, _ in pairs[1:]:
            ax.set_axis_off()
        return lines.empty(figure, pairs[0][0], id, title)
    drawn = []
    for (ax, below), metric in zip(pairs, metrics, strict=True):
        ends = lines.draw(ax, below, data, metric, x)
        if not log:
            ax.set_ylim(bottom=0)
        y_axis(ax, metric.label, metric.unit, log=log)
        drawn.append((ax, ends))
    _finish_x(data, x, pairs, x_label, canvas.narrow)
    lines.key(pairs[0][0], data, canvas.narrow)
    for ax, ends in drawn if not lines.long_names(data) else ():
        lines.label_ends(ax, ends, data)
    found = [words.sentence(captions.trends(data, m, x, at)) for m in metrics]
    if len(metrics) > 1:
        found = [f"{m.in_words[0].upper()}{m.in_words[1:]}: {f}" for m, f in zip(metrics, found, strict=True) if f]
    compared = captions.compare_at_last(data, metrics[0], x, at) if len(metrics) == 1 else ""
    takeaway = " ".join(s for s in [*found, compared, captions.errors_sentence(data, metrics, x)] if s)
    if not len(data.measured):
        takeaway = "Predicted only: nothing has been measured yet."
    kinds = "measured (solid) and predicted (dashed)" if len(data.predicted) else "measured"
    alt = f"Line chart, {kinds}, of {words.listing([m.in_words for m in metrics])} over {x_label.lower()}"
    alt += f", engines {words.listing(data.engines)}. "
    alt += " ".join(captions.values_in_words(data, m, x, at) for m in metrics)
    figure.servebook = FigureText(id, title + lines.workload(data), takeaway, alt, captions.sample_note(data))  # type: ignore[attr-defined]
    return figure


CONCURRENCY = ("concurrency", "C = {}", "Concurrency, requests in flight (log₂)")


@chart
def throughput(
    canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None, others: Any = None
) -> Figure:
    """Charts 1a and 1b: concurrency against decode throughput (running / TPOT; 1 / TPOT for the naive server)."""
    data = lines.gather(points, predictions, sweep, stage, others)
    title = "Concurrency against decode throughput"
    return _curves(canvas, data, [DECODE], *CONCURRENCY, f"throughput-{sweep}", title, log=False)


@chart
def output_rate(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, others: Any = None) -> Figure:
    """Concurrency against output tokens/s (wall clock), for points without a decode rate."""
    data = lines.gather(points, predictions, sweep, others=others)
    title = "Concurrency against output tokens/s"
    return _curves(canvas, data, [OUTPUT], *CONCURRENCY, f"output-{sweep}", title, log=False)


@chart
def latencies(
    canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None, others: Any = None
) -> Figure:
    """Chart 3: concurrency against TPOT and TTFT."""
    data = lines.gather(points, predictions, sweep, stage, others)
    title = "Concurrency against TPOT and TTFT"
    return _curves(canvas, data, [TPOT, TTFT], *CONCURRENCY, f"latencies-{sweep}", title, log=True)


@chart
def prompt_length(canvas: Canvas, points: Any, predictions: Any, sweep: str, *, stage: str | None = None) -> Figure:
    """Chart 4: prompt length against TTFT."""
    data = lines.gather(points, predictions, sweep, stage)
    x = ("prompt_tokens", "{} prompt tokens", "Prompt length, tokens (log₂)")
    return _curves(canvas, data, [TTFT], *x, f"prompt-length-{sweep}", "Prompt length against TTFT", log=True)


@chart
def arrival_rate(canvas: Canvas, points: Any, predictions: Any, sweep: str) -> Figure:
    """The open-loop control: arrival rate against TTFT and request latency."""
    data = lines.gather(points, predictions, sweep)
    x = ("rate_per_s", "{} requests/s", "Arrival rate, requests/s (log)")
    title = "Arrival rate against TTFT and request latency"
    return _curves(canvas, data, [TTFT, E2E], *x, f"arrival-rate-{sweep}", title, log=True)


@chart
def prefix_cache(canvas: Canvas, points: Any, sweep: str, predictions: Any = None) -> Figure:
    """Concurrency against TTFT and output tokens/s, a curve an engine and kind of prompts.

    predictions: as for the other sweeps, frozen for each kind of prompts; None: none are drawn."""
    frame = score.complete_frame(points)
    frame = frame[(frame["sweep"] == sweep) & (frame["requests"] > 0)].copy()
    same = frame["repeats_prompts"]
    # the audit keeps these points out of every other figure, as they repeat prompts; here they are the subject
    frame.loc[same & (frame["verdict"] == "invalid"), "verdict"] = "valid"
    caching = set(frame["engine"][same])
    frame["engine"] = [_by_prompts(e, r, caching) for e, r in zip(frame["engine"], same, strict=True)]
    data = lines.gather(frame, _by_prompts_frozen(predictions, sweep, caching), sweep)
    title = "Concurrency against TTFT and output rate, fresh prompts and repeated ones"
    figure = _curves(canvas, data, [TTFT, OUTPUT], *CONCURRENCY, f"prefix-cache-{sweep}", title, log=False)
    table = analysis.prefix_cache(points, sweep).dropna(subset=["ttft_ratio"])
    if len(table):
        text_of(figure).takeaway = _flattery(table)
    return figure


def _by_prompts(engine: str, repeats: bool, caching: set[str]) -> str:
    """An engine's name on the curve of its fresh or of its repeated prompts."""
    return engine if engine not in caching else f"{engine}, {'same' if repeats else 'fresh'}"


def _by_prompts_frozen(
    predictions: FrozenPredictions | None, sweep: str, caching: set[str]
) -> FrozenPredictions | None:
    if not predictions:
        return None
    frozen: list[StagePrediction] = [
        # a stage of one engine is that of both its curves
        {**entry, "stage": entry["stage"].partition(":")[0], "points": [
            {**p, "engine": _by_prompts(p["engine"], repeats_prompts(p), caching)} for p in entry["points"]
            if p["sweep"] == sweep
        ]}
        for entry in predictions["frozen"]
    ]  # fmt: skip
    return {**predictions, "frozen": frozen}


def _flattery(table: Any) -> str:
    """A sentence on the effect of repeated prompts: the largest reduction of TTFT and the largest gain in output
    rate, among points with cache hits (among all points if hits are unknown)."""
    served = table[table["cache_hit_share_same"] > 0]
    table = served if len(served) else table
    ttft, rate = table.loc[table["ttft_ratio"].idxmin()], table.loc[table["output_ratio"].idxmax()]
    text = (
        f"With one seed for every C, {ttft['engine']}'s TTFT is at the least {words.number(ttft['ttft_ratio'])} times "
        f"that of fresh prompts, at C = {ttft['concurrency']:.0f}{_served(ttft)}; its output rate is at the most "
        f"{words.number(rate['output_ratio'])} times, at C = {rate['concurrency']:.0f}"
    )
    return text + ("." if rate["concurrency"] == ttft["concurrency"] else f"{_served(rate)}.")


def _served(row: Any) -> str:
    hit = row["cache_hit_share_same"]
    return f" ({words.percent(hit)} of the tokens from the cache)" if hit == hit else ""
