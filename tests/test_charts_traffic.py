"""Distributions and finite runs as tables and figures: what they show is what was predicted and measured."""

from __future__ import annotations

import numpy as np
import pandas as pd
from servebook import charts
from servebook.charts.traffic import measured_series
from servebook.config import params
from servebook.report import answer, markup, tables
from servebook.scoring import percentiles

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


def span(value):
    return {"value": value, "low": 0.8 * value, "high": 1.25 * value}


PREDICTED = [
    {
        "sweep": "bursts", "engine": "vllm", "point": "b00008", "fits": True, "hit_share": 0.5, "wall_s": 2.0,
        "metrics": {k: span(0.2) for k in LATENCIES},
        "percentiles": {k: {q: span(v) for q, v in (("p50", 0.15), ("p90", 0.3), ("p99", 0.4))} for k in LATENCIES},
        "series": {
            "t_s": [0.5, 1.5], "running": [6.0, 2.0], "waiting": [2.0, 0.0], "arrivals_per_s": [8.0, 0.0],
            "completions_per_s": [4.0, 4.0], "output_tok_per_s": [40.0, 40.0],
        },
    }
]  # fmt: skip
MEASURED = {"sweep": "bursts", "engine": "vllm", "point": "b00008", "verdict": "valid", "cache_hit_share": 0.4}
POINTS = pd.DataFrame(
    [MEASURED | {f"{k[:-2]}_{q}_s": v for k in LATENCIES for q, v in (("mean", 0.2), ("p50", 0.1), ("p99", 0.5))}]
)
ROWS = pd.DataFrame(
    [
        {
            "engine": "vllm", "point": "b00008", "ok": True, "scheduled_s": 1.0, "sent_s": 1.0, "first_s": 1.1,
            "end_s": 1.0 + 0.5 * (i + 1), "output_tokens": 10,
        }
        for i in range(4)
    ]
)  # fmt: skip


def test_scores_are_per_statistic_and_say_what_lies_inside():
    found = percentiles.scores(POINTS, PREDICTED, "bursts").set_index(["latency", "statistic"])
    assert found.loc[("ttft_s", "mean"), "error_share"] == 0 and bool(found.loc[("ttft_s", "mean"), "inside"])
    assert abs(found.loc[("ttft_s", "p50"), "error_share"] - 0.5) < 1e-9
    assert not found.loc[("ttft_s", "p50"), "inside"] and ("ttft_s", "p90") not in found.index  # not measured
    assert abs(found.loc[("hit_share", "share"), "error_share"] - 0.25) < 1e-9
    assert percentiles.scores(POINTS.assign(verdict="invalid"), PREDICTED, "bursts").empty
    assert percentiles.scores(POINTS, PREDICTED, "other").empty
    shown = tables.percentile_table(percentiles.scores(POINTS, PREDICTED, "bursts"))
    assert "prefix-cache hits" in shown and "+50.0%" in shown


def test_the_figures_draw_both_and_say_so():
    figure = charts.percentiles(POINTS, PREDICTED, "bursts")
    assert "largest error is" in charts.text_of(figure).takeaway and "p99 400 ms / 500 ms" in charts.text_of(figure).alt
    course = charts.over_time(ROWS, PREDICTED, "bursts")
    assert charts.text_of(course).takeaway.startswith("At most 4 requests were in flight, predicted 8")
    for nothing in (charts.percentiles(POINTS, [], "bursts"), charts.over_time(ROWS, [], "bursts")):
        assert charts.text_of(nothing).takeaway.startswith("Nothing to draw")


def test_queue_and_running_are_drawn_from_the_servers_own_gauges():
    server = pd.DataFrame(
        {"engine": "vllm", "point": "b00008", "t_s": [1.0, 2.0], "running": [3.0, 1.0], "waiting": [1.0, 0]}
    )
    figure = charts.over_time(ROWS, PREDICTED, "bursts", server)
    labels = [ax.get_ylabel() for ax in figure.axes if ax.get_ylabel()]
    assert labels == ["In flight", "Running", "In the queue", "Arrivals/s", "Completions/s", "Output tok/s"]
    running = next(ax for ax in figure.axes if ax.get_ylabel() == "Running")
    predicted, measured = (line.get_ydata().tolist() for line in running.lines[:2])
    assert (predicted, measured) == ([6.0, 2.0], [3.0, 1.0])
    assert running.lines[1].get_xdata().tolist() == [0.0, 1.0]  # from when the first request was due
    assert "1 of them were seen in the server's queue, predicted 2" in charts.text_of(figure).takeaway
    without = charts.over_time(ROWS, PREDICTED, "bursts", pd.DataFrame())
    assert "Running" not in [ax.get_ylabel() for ax in without.axes]


def test_distributions_are_scored_over_all_points():
    found = percentiles.summary(POINTS, PREDICTED, ["bursts", "other"]).set_index(["latency", "statistic"])
    p50 = found.loc[("ttft_s", "p50")]
    assert (p50["n"], p50["inside"], p50["judged"]) == (1, 0, 1) and abs(p50["mean_error"] - 0.5) < 1e-9
    shown = tables.distribution_scores(POINTS, PREDICTED, ["bursts"])
    assert "TTFT p50" in shown and "0 of 1" in shown and "prefix-cache hits" in shown
    assert not tables.distribution_scores(POINTS, [], ["bursts"])


def test_a_measured_run_over_time_keeps_its_totals():
    seen = measured_series(ROWS, slices=8)
    width = seen["t_s"][1] - seen["t_s"][0]
    assert np.isclose(sum(seen["completions_per_s"]) * width, 4) and np.isclose(
        sum(seen["output_tok_per_s"]) * width, 40
    )
    assert np.isclose(sum(seen["in_flight"]) * width, 0.5 + 1.0 + 1.5 + 2.0)


def test_the_requests_of_a_sweep_are_shown():
    p = params.read_file("params/traffic-demo.yaml")
    assert "Conversation" in tables.requests_table(p, "talks") and "Due" not in tables.requests_table(p, "talks")
    replay = tables.requests_table(p, "replay")
    assert "Due" in replay and "0.000" in replay and "from seed 1" in replay
    assert "Shared with others" in tables.requests_table(p, "rates")


def test_a_load_without_clients_or_a_rate_has_words():
    row = pd.Series(
        {
            "rate_per_s": np.nan, "concurrency": np.nan, "kind": "burst", "finite_requests": 24.0, "prompt_tokens": 120,
            "output_tokens": 20,
        }
    )  # fmt: skip
    assert answer.load(row) == "a burst of 24 requests, 120 tokens in and 20 out"
    assert markup.where(row) == "a burst of 24 requests, 120 in, 20 out"
