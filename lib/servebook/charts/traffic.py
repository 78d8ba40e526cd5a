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
            told = (
                f"{r.statistic} {words.seconds(r.predicted)} / {words.seconds(r.measured)}" for r in own.itertuples()
            )
            alt.append(f"{engine} {point} {label}, predicted / measured: {', '.join(told)}")
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
def over_time(canvas: Canvas, requests: pd.DataFrame, predicted: Sequence[PredictedPoint], sweep: str) -> Figure:
    """The last point of a sweep over time: requests in flight, arrivals, completions and output rate; measured from its
    requests, predicted by the simulation. requests: rows of the sweep."""
    said = [p for p in predicted if p["sweep"] == sweep and p.get("series")]
    title = "The run over time, predicted and measured"
    rows = requests[requests["ok"].astype(bool)] if len(requests) else requests
    names = [p for p in said if len(rows) and ((rows["engine"] == p["engine"]) & (rows["point"] == p["point"])).any()]
    figure, pairs = canvas.panels(3 if names else 1, height=1.5, stack=True)
    if not names:
        pairs[0][0].set_axis_off()
        text = "Nothing to draw: no finite run of this sweep was measured."
        figure.servebook = FigureText(f"over-time-{sweep}", title, text, text)  # type: ignore[attr-defined]
        return figure
    point = names[-1]
    own = rows[(rows["engine"] == point["engine"]) & (rows["point"] == point["point"])]
    seen, series = measured_series(own), point["series"]
    colour = engine_styles([point["engine"]])[point["engine"]].colour
    in_flight = np.add(series["running"], series["waiting"])
    panels = (
        ("In flight", in_flight, seen["in_flight"]),
        ("Completions/s", series["completions_per_s"], seen["completions_per_s"]),
        ("Output tok/s", series["output_tok_per_s"], seen["output_tok_per_s"]),
    )
    for (ax, _), (label, expected, found) in zip(pairs, panels, strict=True):
        ax.plot(series["t_s"], expected, color=colour, linewidth=1.2, linestyle="--", label="predicted")
        ax.plot(seen["t_s"], found, color=colour, linewidth=1.2, label="measured")
        ax.set_ylim(bottom=0)
        y_axis(ax, label, "", log=False)
        ax.set_xlim(0, max(float(np.max(series["t_s"])), float(seen["end_s"])))  # one time axis
        ax.tick_params(labelbottom=label == panels[-1][0])
    pairs[0][0].legend(loc="upper right", ncols=2, borderpad=0.1, labelcolor=LIGHT["muted"], handlelength=2)
    pairs[-1][0].set_xlabel("Time since the first request was due (s)")
    most, expected_most = float(seen["in_flight"].max()), float(np.max(in_flight))
    ended, expected_end = float(seen["end_s"]), float(point.get("wall_s") or 0.0)
    most, expected_most = float(seen["in_flight"].max()), float(np.max(in_flight))
    ended, expected_end = float(seen["end_s"]), float(point.get("wall_s") or 0.0)
    takeaway = (
        f"At most {words.number(most)} requests were in flight, predicted {words.number(expected_most)}; the last "
        f"ended after {words.seconds(ended)}, predicted {words.seconds(expected_end)}."
    )
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"over-time-{sweep}", title, takeaway, f"Time series of {point['point']} on {point['engine']}. {takeaway}",
        f"{point['point']} on {point['engine']}, {len(own):,} requests.",
    )  # fmt: skip
    return figure


def measured_series(rows: pd.DataFrame, slices: int = 100) -> dict[str, Any]:
    """A finite run's requests in equal slices of its time, as simulation.over_time has the simulated ones."""
    begun = rows["scheduled_s"].fillna(rows["sent_s"]).min()
    sent, first, end = (rows[c].to_numpy(float) - begun for c in ("sent_s", "first_s", "end_s"))
    tokens = rows["output_tokens"].to_numpy(float)
    edges = np.linspace(0.0, float(np.nanmax(end)), slices + 1)
    width = edges[1] - edges[0]
    spans = [np.minimum(end, b) - np.maximum(sent, a) for a, b in pairwise(edges)]
    present = np.array([np.clip(span, 0, None).sum() for span in spans])
    done = [float(np.clip((e - first) / np.maximum(end - first, 1e-9), 0, 1) @ tokens) for e in edges]
    return {
        "t_s": (edges[:-1] + edges[1:]) / 2, "in_flight": present / width, "end_s": edges[-1],
        "completions_per_s": np.histogram(end, edges)[0] / width, "output_tok_per_s": np.diff(done) / width,
    }  # fmt: skip
