"""What the notebooks put into the page: headline figures, verdicts, misses, boxes, each from the run's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .. import score
from ..charts import words
from .boxes import cost_box, flags_line, limit, limits, limits_box, reproducibility_box
from .headlines import claim, hardware_line, headline, trust
from .markup import (
    METRIC_NAMES,
    Format,
    Html,
    audit,
    box,
    columns,
    esc,
    notes_box,
    place,
    plain,
    table,
    unit_of,
    verdict,
    where,
    with_range,
)  # fmt: skip


def verdict_table(scores: pd.DataFrame, *, full: bool = False, caption: str | None = None) -> Html:
    """Predictions against measurements: one row per engine and metric, the datasheet's error beside the calibrated
    one; with full, one row per point of each engine's best stage."""
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


def points_table(points: Any, sweep: str, caption: str | None = None) -> Html:
    """What was measured in a sweep: one row a point, with n, intervals and the audit's verdict."""
    frame = score.points_frame(points)
    frame = frame[frame["sweep"] == sweep]
    if frame.empty:
        return Html("<p>No point of this sweep was measured.</p>")
    x = (
        "rate_per_s"
        if frame["rate_per_s"].notna().any()
        else "prompt_tokens"
        if frame["concurrency"].nunique() <= 1
        else "concurrency"
    )
    name = {"rate_per_s": "Rate, requests/s", "prompt_tokens": "Prompt tokens", "concurrency": "C"}[x]
    rows = frame.sort_values(["engine", x])
    each = list(rows.itertuples())

    shown = columns({
        name: [words.label(getattr(r, x)) for r in each], "Engine": [r.engine for r in each],
        "n": [plain(None if pd.isna(r.requests) else int(r.requests)) for r in each],
        "Failed": [plain(0 if pd.isna(r.failures) else int(r.failures)) for r in each],
        "TTFT": [with_range(r.ttft_mean_s, r.ttft_ci_low_s, r.ttft_ci_high_s, "s") for r in each],
        "TPOT": [with_range(r.tpot_mean_s, r.tpot_ci_low_s, r.tpot_ci_high_s, "s") for r in each],
        "Latency p50 / p99": [f"{words.seconds(r.e2e_p50_s)} / {words.seconds(r.e2e_p99_s)}" for r in each],
        "Decode tok/s": [words.number(r.decode_tok_per_s) for r in each],
        "Output tok/s": [words.number(r.output_tok_per_s) for r in each],
        "Audit": [audit(r.verdict) for r in each],
    })  # fmt: skip
    numbers = ("n", "Failed", "TTFT", "TPOT", "Latency p50 / p99", "Decode tok/s", "Output tok/s")
    made = table(shown, caption or f"Measured in {sweep}; brackets: 95 % interval of the mean", right=numbers)
    return Html(made + _reasons(each))


def _reasons(rows: Sequence[Any]) -> str:
    items = []
    for row in rows:
        reasons = getattr(row, "reasons", None)
        if isinstance(reasons, list) and reasons:
            head = f"{row.engine}, {place(row)}, {row.verdict}"
            items.append(f"<li><b>{esc(head)}:</b> {esc('; '.join(map(str, reasons)))}</li>")
    if not items:
        return ""
    title = f"Why the audit marked {len(items)} {'point' if len(items) == 1 else 'points'}"
    return f'<details class="sb-why"><summary>{title}</summary><ul>{"".join(items)}</ul></details>'


def facts_table(facts: Mapping[str, Mapping[str, Any]], caption: str = "What each engine said of itself") -> Html:
    """Engines side by side, one row a fact; what an engine did not report says so."""
    hidden = {"pid", "url", "name", "port", "log"}
    keys = [k for k in dict.fromkeys(k for f in facts.values() for k in f) if k not in hidden]
    keys = [k for k in keys if any(f.get(k) not in (None, [], {}) for f in facts.values())]
    rows = [
        {"Fact": k.replace("_", " ")}
        | {
            name: flags_line(f[k])
            if k == "flags" and f.get(k)
            else plain(f[k])
            if f.get(k) is not None
            else "not reported"
            for name, f in facts.items()
        }
        for k in keys
    ]
    if not rows:
        return Html("<p>No engine has reported anything yet.</p>")
    unknown = dict.fromkeys(k.replace("_", " ") for f in facts.values() for k in f if k not in {*keys, *hidden})
    said = f'<p class="sb-conditions">Not reported: {esc(words.listing(list(unknown)))}.</p>' if unknown else ""
    return Html(table(pd.DataFrame(rows), caption) + said)


BOUND = {
    "compute": "where compute does", "memory": "where memory traffic does", "host": "where the host does",
    "queue": "where requests queue", "mixed step": "where decodes ride in mixed steps",
}  # fmt: skip
WHY = {
    "compute": "the time there is bound by compute",
    "memory": "the time there is bound by memory traffic",
    "host": "the time there is bound by the host",
    "queue": "most of the time there is queueing",
    "mixed step": "decode tokens there ride in mixed steps with prefill",
}


def misses_prose(scores: pd.DataFrame, n: int = 5) -> Html:
    """What the prediction got wrong, written from the largest misses: one entry an engine and sweep, its worst metric
    first, each with its regime."""
    if scores.empty:
        return Html("<p>Nothing was both predicted and measured, so nothing can be said to be wrong.</p>")
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
            text += f" By the prediction, {why}."
        if row.also:
            more = "point of this curve is a miss" if row.also == 1 else "points of this curve are misses"
            text += f" {row.also} more {more}."
        here = [o for o in others if o.point == row.point]
        if here:
            rest = [f"{METRIC_NAMES.get(o.metric, o.metric)} {words.percent(o.error_share, signed=True)}" for o in here]
            text += f" At the same point: {words.listing(rest)}."
        if row.data == "suspect":
            text += " The audit calls this point suspect."
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
        parts.append(f"{len(own)} of {of} {BOUND.get(str(regime), 'with no cause named')}")
    low = int((missed["error_share"] < 0).sum())
    side = "all" if low in (0, len(missed)) else f"{max(low, len(missed) - low)} of them"
    direction = "low" if low * 2 >= len(missed) else "high"
    return (
        f"{len(missed)} of {len(final)} predictions are off by more than {words.percent(score.NEAR)}, {side} too "
        f"{direction}. By what the prediction says bounds the time: {words.listing(parts)}. The largest, one a curve:"
    )


__all__ = [
    "METRIC_NAMES", "Format", "Html", "audit", "box", "claim", "columns", "cost_box", "esc", "facts_table",
    "hardware_line", "headline", "limit", "limits", "limits_box", "misses_prose", "notes_box", "place", "points_table",
    "reproducibility_box", "table", "trust", "verdict", "verdict_table", "where", "with_range",
]  # fmt: skip
