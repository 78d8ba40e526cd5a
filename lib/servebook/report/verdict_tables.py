"""Predictions against measurements, as tables and as sentences: verdicts, the largest misses, other predictors."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..charts import words
from ..scoring import score
from .markup import METRIC_NAMES, Format, Html, columns, esc, place, table, unit_of, verdict, with_range

BOUND = {
    "compute": "compute", "memory": "memory traffic", "host": "host", "queue": "queueing",
    "mixed step": "mixed steps", "links": "communication between GPUs",
}  # fmt: skip
OTHER_RATE = 0.05  # relative difference of actual and requested rate above which it is mentioned
WHY = {
    "compute": "compute",
    "memory": "memory traffic",
    "host": "the host",
    "queue": "queueing",
    "mixed step": "mixed steps, in which decodes wait for a prefill chunk",
    "links": "communication between the GPUs",
}


def score_summary(scores: pd.DataFrame) -> Html:
    """Mean absolute error and share inside the interval, by stage, engine and metric."""
    if scores.empty:
        return Html("<p>No point was both predicted and measured.</p>")
    frame = score.summary(scores)
    formats: dict[str, Format] = {
        "metric": _metric,
        "mean_abs_error": words.percent,
        "mean_error": _signed,
        "worst_error": _signed,
        "inside_share": words.percent,
    }
    headers = {
        "stage": "Stage",
        "engine": "Engine",
        "metric": "Metric",
        "points": "Points",
        "mean_abs_error": "Mean |error|",
        "mean_error": "Bias",
        "worst_error": "Largest",
        "worst_point": "at",
        "inside_share": "Inside 80 %",
    }
    return table(
        frame[list(headers)],
        "Error of each way of predicting, over the points that were not used for calibration",
        headers=headers,
        formats=formats,
    )


def _signed(share: float) -> str:
    return words.percent(share, signed=True)


def _metric(name: str) -> str:
    return METRIC_NAMES.get(name, name)


def verdict_table(
    scores: pd.DataFrame, *, full: bool = False, caption: str | None = None, metrics: Sequence[str] | None = None
) -> Html:
    """Predictions against measurements: one row per engine and metric, with the datasheet's error and the
    calibrated one. full: one row per point, for each engine's best stage. metrics: default: all."""
    scores = scores if metrics is None or scores.empty else scores[scores["metric"].isin(metrics)]
    if scores.empty:
        return Html("<p>No point was both predicted and measured.</p>")
    best = score.final(scores)
    if full:
        rows = list(best.itertuples())
        shown = columns({
            "Point": [f"{r.sweep}, {place(r)}" for r in rows],
            "Engine": [r.engine for r in rows],
            "Metric": [METRIC_NAMES.get(r.metric, r.metric) for r in rows],
            "Predicted": [with_range(r.predicted, r.low, r.high, unit_of(r.metric)) for r in rows],
            "Measured": [with_range(r.measured, r.measured_low, r.measured_high, unit_of(r.metric)) for r in rows],
            "Error": [words.percent(r.error_share, signed=True) for r in rows],
            "Verdict": [verdict(r.verdict) for r in rows],
        })  # fmt: skip
        text = "Every prediction with its 80 % interval, every measurement with its 95 % interval"
        return table(shown, caption or text, right=("Predicted", "Measured", "Error"))
    summary = score.summary(best, by=("engine", "metric"))
    plain = score.summary(scores[scores["stage"] == "datasheet"], by=("engine", "metric"))
    alone = {(r.engine, r.metric): r.mean_abs_error for r in plain.itertuples()}
    order = {m: i for i, m in enumerate(METRIC_NAMES)}
    rows = sorted(summary.itertuples(), key=lambda r: (r.engine, order.get(r.metric, 99)))
    shown = columns({
        "Metric": [METRIC_NAMES.get(r.metric, r.metric) for r in rows], "Engine": [r.engine for r in rows],
        "Points": [str(r.points) for r in rows],
        "Mean error": [words.percent(r.mean_abs_error) for r in rows],
        "From the datasheet alone": [words.percent(alone.get((r.engine, r.metric))) for r in rows],
        "Worst": [words.percent(r.worst_error, signed=True) for r in rows],
        "Inside 80 %": [words.percent(r.inside_share) for r in rows],
        "Hit / near / miss": [f"{r.hit} / {r.near} / {r.miss}" for r in rows],
        "Verdict": [verdict(score.verdict(r.mean_abs_error)) for r in rows],
    })  # fmt: skip
    if not alone:
        shown = shown.drop(columns="From the datasheet alone")
    text = "Verdicts by mean error: hit within 10 %, near within 25 %, else a miss; + means predicted too high"
    numbers = ("Points", "Mean error", "From the datasheet alone", "Worst", "Inside 80 %", "Hit / near / miss")
    return table(shown, caption or text, right=numbers)


def misses_prose(scores: pd.DataFrame, n: int = 5) -> Html:
    """What the prediction got wrong, written from the largest misses: one entry an engine and sweep, its worst metric
    first, each with its regime."""
    if scores.empty:
        return Html("<p>No point was both predicted and measured.</p>")
    worst = score.largest_misses(scores, len(scores))
    worst = worst[worst["verdict"] != "hit"]
    if worst.empty:
        return Html(f"<p>{esc(f'No prediction was off by more than {words.percent(score.HIT)}.')}</p>")
    items: list[str] = []
    for _, group in list(worst.groupby(["engine", "sweep"], sort=False))[:n]:
        row, *others = group.itertuples()
        unit, name = unit_of(row.metric), METRIC_NAMES.get(row.metric, row.metric)
        bounds = "" if row.inside is None else ", inside its interval" if row.inside else ", outside its interval"
        text = (
            f"predicted {words.quantity(row.predicted, unit)}, measured {words.quantity(row.measured, unit)}: "
            f"{words.percent(abs(row.error_share))} too {'high' if row.error_share > 0 else 'low'}{bounds}."
        )
        if why := WHY.get(row.regime):
            text += f" Predicted bottleneck: {why}."
        curve = scores[(scores["engine"] == row.engine) & (scores["sweep"] == row.sweep)].drop_duplicates("point")
        for o in curve[(curve["arrival_rate_per_s"] / curve["rate_per_s"] - 1).abs() > OTHER_RATE].itertuples():
            text += f" At {place(o)}, {words.number(o.arrival_rate_per_s)}/s actually arrived."
        if row.also:
            more = "point of this curve missed" if row.also == 1 else "points of this curve missed"
            text += f" {row.also} more {more}."
        here = [o for o in others if o.point == row.point]
        if here:
            rest = [f"{METRIC_NAMES.get(o.metric, o.metric)} {words.percent(o.error_share, signed=True)}" for o in here]
            text += f" At the same point: {words.listing(rest)}."
        if row.data == "suspect":
            text += " The audit doubts this point."
        items.append(f"<li><b>{esc(f'{name} of {row.engine}, {row.sweep} at {place(row)}')}</b>: {esc(text)}</li>")
    return Html(f"<p>{esc(_where_missed(scores))}</p><ol>{''.join(items)}</ol>")


def _where_missed(scores: pd.DataFrame) -> str:
    """How the misses divide over what bounds the time there."""
    final = score.final(scores)
    missed = final[final["verdict"] == "miss"]
    if missed.empty:
        return f"No prediction of {len(final)} was off by more than {words.percent(score.NEAR)}; the largest errors:"
    parts = []
    for regime, own in sorted(missed.groupby("regime"), key=lambda g: (-len(g[1]), str(g[0]))):
        of = int((final["regime"] == regime).sum())
        parts.append(f"{BOUND.get(str(regime), 'unknown')} {len(own)} of {of}")
    low = int((missed["error_share"] < 0).sum())
    side = "all" if low in (0, len(missed)) else f"{max(low, len(missed) - low)} of them"
    direction = "low" if low * 2 >= len(missed) else "high"
    return (
        f"{len(missed)} of {len(final)} predictions are off by more than {words.percent(score.NEAR)}, {side} too "
        f"{direction}. By predicted bottleneck: {words.listing(parts)}. The largest, one per curve:"
    )


def peers(found: pd.DataFrame) -> Html:
    """Mean absolute error of each peer and of the frozen predictions on the same points (columns of peers.beside)."""
    if found.empty:
        return Html("")
    rows = list(found.itertuples())
    shown = columns({
        "Peer": [r.peer for r in rows], "Engine": [r.engine for r in rows],
        "Metric": [METRIC_NAMES.get(r.metric, r.metric) for r in rows], "Points": [str(r.points) for r in rows],
        "Mean |error| of the peer": [words.percent(r.peer_error) for r in rows],
        "of this book, as frozen": [words.percent(r.own_error) for r in rows],
    })  # fmt: skip
    text = "Other predictors on the same points, C = 1 left out"
    return table(shown, text, right=("Points", "Mean |error| of the peer", "of this book, as frozen"))
