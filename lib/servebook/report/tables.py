"""What the notebooks put into the page: headline figures, verdicts, misses, boxes, each from the run's own data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .. import score
from ..charts import words
from .markup import (
    METRIC_NAMES,
    Html,
    audit,
    box,
    columns,
    esc,
    notes_box,
    place,
    plain,
    range_text,
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
            name: _flags(f[k]) if k == "flags" and f.get(k) else plain(f[k]) if f.get(k) is not None else "not reported"
            for name, f in facts.items()
        }
        for k in keys
    ]
    if not rows:
        return Html("<p>No engine has reported anything yet.</p>")
    return table(pd.DataFrame(rows), caption)


def _flags(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value))


def card(value: str, unit: str, what: str, interval: str) -> str:
    small = f' <span class="sb-unit">{esc(unit)}</span>' if unit else ""
    return (
        f'<li><span class="sb-big">{esc(value)}{small}</span><span class="sb-what">{esc(what)}</span>'
        f'<span class="sb-range">{esc(interval)}</span></li>'
    )


def headline(points: Any, scores: pd.DataFrame, *, hardware: str, versions: str, engine: str = "vllm") -> Html:
    """Three figures up front, with interval, hardware and versions: the best output rate, its ratio to the other
    engine at the same point, and how far the predictions lay off."""
    frame = score.points_frame(points)
    frame = frame[
        (frame["verdict"] != "invalid") & frame["output_tok_per_s"].notna() & (frame["sweep"] != "calibration")
    ]
    cards = []
    own = frame[frame["engine"] == engine]
    if own.empty and len(frame):
        engine = str(frame["engine"].iloc[0])
        own = frame[frame["engine"] == engine]
    if len(own):
        best = own.loc[own["output_tok_per_s"].idxmax()]
        span = range_text(best["output_tok_per_s_ci_low"], best["output_tok_per_s_ci_high"], "")
        what = f"output tokens/s, the most that {engine} gave ({where(best)})"
        cards.append(
            card(words.number(best["output_tok_per_s"]), "tok/s", what, f"95 % interval {span}, n = {_count(best)}")
        )
        others = frame[(frame["engine"] != engine) & (frame["sweep"].isin(own["sweep"]))]
        both = own.merge(others, on=["sweep", "point"], suffixes=("", "_other"))
        if len(both):
            both = both.assign(ratio=both["output_tok_per_s"] / both["output_tok_per_s_other"])
            top = both.loc[both["ratio"].idxmax()]
            low, high = _ratio_interval(top)
            span = f"95 % interval {range_text(low, high, '×')}" if np.isfinite(low) else "no interval"
            what = f"the output rate of {top['engine_other']} at the same load ({where(top)}), the largest gap"
            cards.append(card(words.number(top["ratio"], 2), "×", what, span))
    final = score.final(scores) if len(scores) else scores
    if len(final):
        errors = final["error_share"].abs()
        low, high = _bootstrap_mean(errors.to_numpy())
        inside = final["inside"].dropna().astype(float)
        note = f"95 % interval {words.percent(low)} to {words.percent(high)}, n = {len(final)} predictions"
        if len(inside):
            note += f"; {words.percent(inside.mean())} inside their 80 % interval"
        cards.append(
            card(words.percent(errors.mean()), "", "mean error of the predictions that were frozen before", note)
        )
    conditions = f'<p class="sb-conditions">{esc(hardware)} · {esc(versions)}</p>'
    return Html(f'<ul class="sb-cards">{"".join(cards)}</ul>{conditions}' if cards else "<p>Nothing was measured.</p>")


def _factor(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _count(row: Any) -> str:
    return "–" if pd.isna(row["requests"]) else f"{row['requests']:.0f}"


def _ratio_interval(row: Any) -> tuple[float, float]:
    # both intervals are independent: their half-widths add in quadrature on the log scale
    width = 0.0
    for tail in ("", "_other"):
        low, high = row[f"output_tok_per_s_ci_low{tail}"], row[f"output_tok_per_s_ci_high{tail}"]
        if not (low > 0 and high > 0):
            return math.nan, math.nan
        width += (math.log(high / low) / 2) ** 2
    return row["ratio"] * math.exp(-math.sqrt(width)), row["ratio"] * math.exp(math.sqrt(width))


def _bootstrap_mean(values: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(1).choice(values, size=(2000, len(values))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def claim(points: Any, scores: pd.DataFrame, *, engine: str = "vllm") -> Html:
    """The run in one sentence, from its figures."""
    frame = score.points_frame(points)
    frame = frame[(frame["verdict"] != "invalid") & (frame["sweep"] != "calibration")]
    parts = []
    both = frame[frame["engine"] == engine].merge(
        frame[frame["engine"] != engine], on=["sweep", "point"], suffixes=("", "_other")
    )
    both = both[both["output_tok_per_s_other"] > 0]
    if len(both):
        ratios = both["output_tok_per_s"] / both["output_tok_per_s_other"]
        top = both.loc[ratios.idxmax()]
        first = both[both["sweep"] == top["sweep"]].sort_values(["concurrency", "prompt_tokens", "rate_per_s"]).iloc[0]
        text = f"At {where(top)}, {engine} gives {_factor(ratios.max())} times the output of {top['engine_other']}"
        if first["point"] != top["point"]:
            text += f", against {_factor(ratios[first.name])} times at {place(first)}"
        parts.append(text)
    final = score.final(scores) if len(scores) else scores
    if len(final):
        hits = words.percent((final["verdict"] == "hit").mean())
        parts.append(f"{hits} of the {len(final)} frozen predictions came within 10 % of what was measured")
    text = "; ".join(parts) or "This run has not measured anything that was predicted"
    return Html(f'<p class="sb-claim">{esc(text)}.</p>')


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
    items = []
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
        items.append(f"<li><b>{esc(f'{name} of {row.engine} in {row.sweep} at {place(row)}')}</b>: {esc(text)}</li>")
    return Html(f"<ol>{''.join(items)}</ol>")


def reproducibility_box(provenance: Mapping[str, Any]) -> Html:
    """What the run was made with: commit, locks, packages, machine, hardware, command. A run of several sessions gives
    the first in full and what differs in each later one."""
    sessions = [_flat(s) for s in provenance.get("sessions") or [provenance]]
    if len(sessions) == 1:
        return box("Reproducibility", sessions[0])
    first = dict(sessions[0])
    parts = [box(f"Reproducibility: the first of {len(sessions)} sessions", sessions[0])]
    for k, session in enumerate(sessions[1:], 2):
        parts.append(box(f"Session {k}, where it differs", [(n, v) for n, v in session if first.get(n) != v]))
    return Html("".join(parts))


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in record.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            if value and all(not isinstance(v, Mapping | list) for v in value.values()):
                pairs.append((name, ", ".join(f"{k} {_word(v)}" for k, v in value.items())))
            else:
                pairs += _flat(value, f"{name}, ")
        elif isinstance(value, list):
            joiner = " " if key in ("command", "argv", "flags") else "; "
            if value:
                pairs.append((name, joiner.join(_word(v) for v in value)))
        else:
            pairs.append((name, _word(value)))
    return pairs


def _word(value: Any) -> str:
    return "unknown" if value is None else "yes" if value is True else "no" if value is False else str(value)


def limits_box(params: Any, title: str = "") -> Html:
    """What this run does not show, from its own parameters (RunParams or the same as a mapping)."""
    run = params.model_dump(mode="json") if hasattr(params, "model_dump") else dict(params)
    model, sweeps = run.get("model", {}), run.get("sweeps", {})
    load = run.get("load", {})
    lines = [
        "Prompts are random token ids of one length per point: no shared prefixes, no spread of lengths, "
        "no text that would end early."
    ]
    if model.get("weights") == "dummy":
        lines.append(
            "Weights are random. Step times do not depend on their values; the text that comes out means nothing, "
            "and speculative decoding or early stopping would behave otherwise."
        )
    kinds = {s.get("kind") for s in sweeps.values()}
    if kinds & {"concurrency", "prompt_length"}:
        lines.append(
            "Closed loop: a client sends its next request when the last one ends, so load never outruns the server. "
            "Real users do not wait for each other."
        )
    if "arrival_rate" in kinds:
        lines.append("The open-loop sweep draws arrivals from a simple process without daily or bursty patterns.")
    if load.get("max_seconds"):
        lines.append(
            f"A point ends after {load['max_seconds']:g} s at most, warm-up included: slow points rest on few "
            "requests, and their p99 is close to their slowest one."
        )
    lines.append("One server on one machine, client and server on the same host: no network between them.")
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    head = f"<h4>{esc(title)}</h4>" if title else ""
    return Html(f'<div class="sb-box">{head}<ul>{items}</ul></div>')


def cost_box(seconds: float, price_per_hour: float, currency: str, *, extra: Sequence[tuple[str, Any]] = ()) -> Html:
    """Run time and what it cost at the hardware's price."""
    pairs: list[tuple[str, Any]] = [("run time", words.seconds(seconds))]
    if price_per_hour:
        pairs.append(("price", f"{price_per_hour:g} {currency} per hour"))
        pairs.append(("cost", f"{seconds / 3600 * price_per_hour:.2f} {currency}"))
    else:
        pairs.append(("cost", "no price is set for this hardware"))
    return box("Run time and cost", [*pairs, *extra])


__all__ = [
    "METRIC_NAMES", "Html", "audit", "box", "claim", "columns", "cost_box", "esc", "facts_table", "headline",
    "limits_box", "misses_prose", "notes_box", "place", "points_table", "reproducibility_box", "table", "verdict",
    "verdict_table", "where", "with_range",
]  # fmt: skip
