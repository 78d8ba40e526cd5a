"""Figures of traffic: how latencies spread over requests, and a finite run over time; predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..common.predicted_point import PredictedPoint
from ..scoring import percentiles as distributions_scored
from ..scoring.percentiles import LATENCIES, STATISTICS
from . import words
from .style import LIGHT, Canvas, FigureText, chart, engine_styles, y_axis


@chart
def percentiles(canvas: Canvas, points: pd.DataFrame, predicted: Sequence[PredictedPoint], sweep: str) -> Figure:
    """Mean, p50, p90 and p99 of TTFT, TPOT and end-to-end latency of each point: measured as marks (hollow
    where the audit doubts the point), predicted as bars with their 80 % interval."""
    scores = distributions_scored.scores(points, predicted, sweep)
    scores = scores[scores["latency"] != "hit_share"]
    title = "How latencies spread over requests, predicted and measured"
    figure, pairs = canvas.panels(len(LATENCIES), height=2.6)
    if scores.empty:
        for ax, _ in pairs:
            ax.set_axis_off()
        text = "Nothing to draw: no point of this sweep was both predicted and measured."
        figure.servebook = FigureText(f"percentiles-{sweep}", title, text, text)  # type: ignore[attr-defined]
        return figure
    names = list(dict.fromkeys(zip(scores["engine"], scores["point"], strict=True)))
    styles = engine_styles(list(dict.fromkeys(e for e, _ in names)))
    suspect = (
        points[(points["sweep"] == sweep) & (points["verdict"] == "suspect")] if "verdict" in points else points[:0]
    )
    doubted = set(zip(suspect["engine"], suspect["point"], strict=True))
    alt = []
    for (ax, _), (latency, label) in zip(pairs, LATENCIES.items(), strict=True):
        for k, (engine, point) in enumerate(names):
            own = scores[(scores["engine"] == engine) & (scores["point"] == point) & (scores["latency"] == latency)]
            at = np.array([STATISTICS.index(s) for s in own["statistic"]]) + 0.16 * (k - (len(names) - 1) / 2)
            colour = styles[engine].colour
            ax.vlines(at, own["low"].astype(float), own["high"].astype(float), color=colour, linewidth=4, alpha=0.25)
            ax.plot(at, own["predicted"], "_", color=colour, markersize=9, markeredgewidth=1.6)
            fill = LIGHT["paper"] if (engine, point) in doubted else colour
            ax.plot(at, own["measured"], "o", color=colour, markerfacecolor=fill, markersize=4.5)
            compared = (
                f"{r.statistic} {words.seconds(r.predicted)} / {words.seconds(r.measured)}" for r in own.itertuples()
            )
            alt.append(f"{engine} {point} {label}, predicted / measured: {', '.join(compared)}")
        ax.set_xticks(range(len(STATISTICS)), STATISTICS)
        y_axis(ax, label, "s", log=True)
    worst = scores.loc[scores["error_share"].astype(float).abs().idxmax()]
    takeaway = (
        f"The largest error is {LATENCIES[worst['latency']]} {worst['statistic']} of {worst['point']}: predicted "
        f"{words.seconds(worst['predicted'])}, measured {words.seconds(worst['measured'])}."
    )
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"percentiles-{sweep}", title, takeaway, f"Marks. {'; '.join(alt)}.",
        "Dots: measured, hollow where the audit doubts the point. Bars: predicted, with the 80 % "
        f"interval. Left to right: {', '.join(point for _, point in names)}.",
    )  # fmt: skip
    return figure


@chart
def over_time(
    canvas: Canvas,
    requests: pd.DataFrame,
    predicted: Sequence[PredictedPoint],
    sweep: str,
    server: pd.DataFrame | None = None,
) -> Figure:
    """The last point of a sweep over time: requests in flight, those that run and that wait in the server's queue,
    arrivals, completions and output rate; predicted by the simulation, measured from the requests and by the server's
    own gauges. requests: rows of the sweep; server: its points' series, with engine and point."""
    with_series = [p for p in predicted if p["sweep"] == sweep and p.get("series")]
    title = "The run over time, predicted and measured"
    rows = requests[requests["ok"].astype(bool)] if len(requests) else requests
    names = [
        p for p in with_series if len(rows) and ((rows["engine"] == p["engine"]) & (rows["point"] == p["point"])).any()
    ]
    if not names:
        figure, pairs = canvas.panels(1, height=1.5, stack=True)
        pairs[0][0].set_axis_off()
        text = "Nothing to draw: no finite run of this sweep was measured."
        figure.servebook = FigureText(f"over-time-{sweep}", title, text, text)  # type: ignore[attr-defined]
        return figure
    point = names[-1]
    own = rows[(rows["engine"] == point["engine"]) & (rows["point"] == point["point"])]
    seen, series = measured_series(own), point["series"]
    panels = _panels(series, seen, _gauges(server, point, seen["begun_s"]))
    figure, pairs = canvas.panels(len(panels), height=1.5 if len(panels) < 5 else 1.15, stack=True)
    colour = engine_styles([point["engine"]])[point["engine"]].colour
    for (ax, _), (label, expected, (at, found)) in zip(pairs, panels, strict=True):
        ax.plot(series["t_s"], expected, color=colour, linewidth=1.2, linestyle="--", label="predicted")
        form = "." if label in GAUGES.values() else "-"  # of a gauge nothing is known between scrapes
        ax.plot(at, found, form, color=colour, linewidth=1.2, label="measured")
        ax.set_ylim(0, max(1.0, 1.05 * float(np.max([*expected, *found], initial=0.0))))
        y_axis(ax, label, "", log=False)
        ax.set_xlim(0, max(float(np.max(series["t_s"])), float(seen["end_s"])))  # one time axis
        ax.tick_params(labelbottom=label == panels[-1][0])
    pairs[0][0].legend(loc="upper right", ncols=2, borderpad=0.1, labelcolor=LIGHT["muted"], handlelength=2)
    pairs[-1][0].set_xlabel("Time since the first request was due (s)")
    takeaway = _course(panels, seen, point)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"over-time-{sweep}", title, takeaway, f"Time series of {point['point']} on {point['engine']}. {takeaway}",
        f"{point['point']} on {point['engine']}, {len(own):,} requests.",
    )  # fmt: skip
    return figure


GAUGES = {"running": "Running", "waiting": "In the queue"}
Panel = tuple[str, Any, tuple[Any, Any]]  # label, predicted, (times, measured)


def _panels(series: Any, seen: dict[str, Any], gauges: dict[str, tuple[Any, Any]]) -> list[Panel]:
    at = seen["t_s"]
    panels: list[Panel] = [("In flight", np.add(series["running"], series["waiting"]), (at, seen["in_flight"]))]
    for name, label in GAUGES.items():
        if name in gauges:
            panels.append((label, series[name], gauges[name]))
    for name, label in (
        ("arrivals_per_s", "Arrivals/s"), ("completions_per_s", "Completions/s"), ("output_tok_per_s", "Output tok/s"),
    ):  # fmt: skip
        if name in series:
            panels.append((label, series[name], (at, seen[name])))
    return panels


def _gauges(
    server: pd.DataFrame | None, point: PredictedPoint, begun_s: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The server's own gauges of a point, as (times since the first request was due, values)."""
    if server is None or server.empty:
        return {}
    own = server[(server["engine"] == point["engine"]) & (server["point"] == point["point"])]
    gauges = {name: own[["t_s", name]].dropna() for name in GAUGES if name in own}
    return {
        name: (rows["t_s"].to_numpy(float) - begun_s, rows[name].to_numpy(float))
        for name, rows in gauges.items()
        if len(rows) > 1
    }


def _course(panels: Sequence[Panel], seen: dict[str, Any], point: PredictedPoint) -> str:
    """What the run did, in a sentence: how many were in flight and waited at most, and when the last one ended."""
    most = {label: (float(np.max(found)), float(np.max(expected))) for label, expected, (_, found) in panels}
    held, expected_held = most["In flight"]
    ended, expected_end = float(seen["end_s"]), float(point.get("wall_s") or 0.0)
    waited = ""
    queue = most.get(GAUGES["waiting"])
    if queue and any(queue):
        waited = (
            f" {words.number(queue[0])} of them were seen in the server's queue, predicted {words.number(queue[1])}."
        )
    return (
        f"At most {words.number(held)} requests were in flight, predicted {words.number(expected_held)}.{waited} The "
        f"last ended after {words.seconds(ended)}, predicted {words.seconds(expected_end)}."
    )


def measured_series(rows: pd.DataFrame, slices: int = 100) -> dict[str, Any]:
    """A finite run's requests in equal slices of its time, as simulation_result.over_time has the simulated ones."""
    begun = rows["scheduled_s"].fillna(rows["sent_s"]).min()
    sent, first, end = (rows[c].to_numpy(float) - begun for c in ("sent_s", "first_s", "end_s"))
    tokens = rows["output_tokens"].to_numpy(float)
    edges = np.linspace(0.0, float(np.nanmax(end)), slices + 1)
    width = edges[1] - edges[0]
    spans = [np.minimum(end, b) - np.maximum(sent, a) for a, b in pairwise(edges)]
    present = np.array([np.clip(span, 0, None).sum() for span in spans])
    done = [float(np.clip((e - first) / np.maximum(end - first, 1e-9), 0, 1) @ tokens) for e in edges]
    return {
        "t_s": (edges[:-1] + edges[1:]) / 2, "in_flight": present / width, "end_s": edges[-1], "begun_s": begun,
        "arrivals_per_s": np.histogram(rows["scheduled_s"].fillna(rows["sent_s"]) - begun, edges)[0] / width,
        "completions_per_s": np.histogram(end, edges)[0] / width, "output_tok_per_s": np.diff(done) / width,
    }  # fmt: skip
