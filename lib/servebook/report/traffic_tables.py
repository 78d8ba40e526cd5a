"""Tables of workloads: the requests that they consist of, and distributions, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ..charts import words
from ..common.predicted_point import PredictedPoint
from ..config import request_plan
from ..config.params import RunParams
from ..scoring import percentiles
from ..scoring.percentiles import LATENCIES
from .markup import Html, folded, notes_box, table

FIRST = 8  # requests shown


def requests_table(params: RunParams, sweep: str) -> Html:
    """The first requests of a sweep's first point: when each is due, its lengths, what its prompt shares."""
    engine = (params.sweeps[sweep].engines or list(params.engines))[0]
    spec = params.sweep_points(sweep, engine, 1.0)[0]
    plan = request_plan.of_point(spec, params.load)
    if plan is None:
        return notes_box(
            "Requests", [f"all of {spec.prompt_tokens} tokens in, {spec.output_tokens} out, none repeated"]
        )
    count = min(FIRST, spec.requests or FIRST, len(plan))
    due = [None] * count if spec.closed else [float(t) for t in request_plan.due_times(spec, params.load, count)]
    rows = []
    for i, at in enumerate(due):
        r = plan[i]
        talk = f"{r.conversation}, turn {r.turn + 1}" if r.conversation is not None else ""
        rows.append(
            [
                i,
                "" if at is None else f"{at:.3f} s",
                r.prompt_tokens,
                r.output_tokens,
                sum(n for _, n in r.shared),
                talk,
            ]
        )
    headers = ["Request", "Due", "Prompt tokens", "Output tokens", "Shared with others", "Conversation"]
    frame = pd.DataFrame(rows, columns=pd.Index(headers))
    if spec.closed:
        frame = frame.drop(columns="Due")
    if not frame["Conversation"].any():
        frame = frame.drop(columns="Conversation")
    return table(frame, caption=f"The first {count} requests of {sweep}, from seed {params.load.seed}", fold=False)


def percentile_table(scores: pd.DataFrame) -> Html:
    """percentiles.scores as a table."""
    shown: list[list[Any]] = []
    for r in scores.to_dict("records"):
        form = words.percent if r["latency"] == "hit_share" else words.seconds
        name = "prefix-cache hits" if r["latency"] == "hit_share" else f"{LATENCIES[r['latency']]} {r['statistic']}"
        span = "" if r["low"] is None or r["low"] != r["low"] else f"{form(r['low'])} to {form(r['high'])}"
        error = "" if r["error_share"] is None or r["error_share"] != r["error_share"] else f"{r['error_share']:+.1%}"
        shown.append([r["engine"], r["point"], name, form(r["predicted"]), span, form(r["measured"]), error])
    headers = ["Engine", "Point", "Figure", "Predicted", "80 % interval", "Measured", "Error"]
    return table(pd.DataFrame(shown, columns=pd.Index(headers)), caption="Distributions, predicted and measured")


def distribution_scores(points: pd.DataFrame, predicted: Sequence[PredictedPoint], sweeps: Iterable[str]) -> Html:
    """Errors of predicted means and percentiles over all points of some sweeps, with the single points folded;
    empty if no point was both predicted and measured."""
    sweeps = list(sweeps)
    found = percentiles.summary(points, predicted, sweeps)
    if found.empty:
        return Html("")
    rows = [
        [
            f"{LATENCIES[r['latency']]} {r['statistic']}", r["n"], words.percent(r["mean_error"]),
            words.percent(r["median_error"]), f"{r['inside']} of {r['judged']}" if r["judged"] else "",
        ]
        for r in found.to_dict("records")
    ]  # fmt: skip
    headers = ["Figure", "Points", "Mean |error|", "Median |error|", "Inside the 80 % interval"]
    every = [percentile_table(own) for s in sweeps if len(own := percentiles.scores(points, predicted, s))]
    return Html(
        table(
            pd.DataFrame(rows, columns=pd.Index(headers)),
            caption="How latencies spread over requests: means and percentiles, predicted against measured", fold=False,
        )
        + folded("Every point's distribution, predicted and measured", *every)
    )  # fmt: skip
