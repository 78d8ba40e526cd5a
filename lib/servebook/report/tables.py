"""HTML that the notebooks put into the page: tables, headline figures, boxes. Everything is escaped here.

Functions return `Html`; as a cell's last expression it shows itself, marked as made here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .. import score
from ..charts import words
from .math import scroller

METRIC_NAMES = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "Request latency", "output_tok_per_s": "Output tok/s",
    "decode_tok_per_s": "Decode tok/s", "request_rate_per_s": "Requests/s",
}  # fmt: skip
Format = Callable[[Any], "str | Html"]


class Html(str):
    """HTML made by this module: trusted by the renderer, shown as HTML by Jupyter."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        plain = " ".join(html.unescape(_strip(self)).split())
        return {"text/html": str(self), "text/plain": plain}, {"servebook": {"trusted": "table"}}


def _strip(markup: str) -> str:
    import re

    return re.sub(r"<[^>]+>", " ", markup)


def esc(value: Any) -> str:
    """Text for HTML; Html stays as it is, what is unknown is a dash."""
    if isinstance(value, Html):
        return str(value)
    if value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NaT:
        return "–"
    return html.escape(str(value))


def table(
    frame: pd.DataFrame,
    caption: str,
    *,
    headers: Mapping[str, str] | None = None,
    formats: Mapping[str, Format] | None = None,
    row_header: bool = True,
) -> Html:
    """A DataFrame's columns as an accessible table: caption, header cells with scope, numbers to the right.

    headers: column to heading (columns left out keep their name); formats: column to a function of the value.
    """
    headers, formats = headers or {}, formats or {}
    right = {c for c in frame.columns if pd.api.types.is_numeric_dtype(frame[c]) or c in formats}
    right -= set(frame.columns[:1])

    def cls(column: str) -> str:
        return ' class="sb-right"' if column in right else ""

    head = "".join(f'<th scope="col"{cls(c)}>{esc(headers.get(c, str(c)))}</th>' for c in frame.columns)
    body = []
    for values in frame.itertuples(index=False, name=None):
        cells = []
        for i, (column, value) in enumerate(zip(frame.columns, values, strict=True)):
            shown = formats[column](value) if column in formats else _plain(value)
            tag = 'th scope="row"' if i == 0 and row_header else "td"
            cells.append(f"<{tag}{cls(column)}>{esc(shown)}</{tag.split()[0]}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    inner = (
        f"<table><caption>{esc(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )
    return Html(scroller(inner, caption))


def _plain(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return words.label(float(value)) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    return value


def _unit(metric: str) -> str:
    return {"output_tok_per_s": "tok/s", "decode_tok_per_s": "tok/s", "request_rate_per_s": "/s"}.get(metric, "s")


def _range(low: float, high: float, unit: str) -> str:
    if not (np.isfinite(low) and np.isfinite(high)):
        return "no interval"
    return f"{words.quantity(low, unit)} to {words.quantity(high, unit)}"


def verdict(name: str) -> Html:
    return Html(f'<span class="sb-verdict sb-{esc(name)}">{esc(name)}</span>')


def verdict_table(scores: pd.DataFrame, *, full: bool = False, caption: str | None = None) -> Html:
    """Predictions against measurements: one row per engine, stage and metric; with full, one per point as well."""
    if scores.empty:
        return Html("<p>No point was both predicted and measured.</p>")
    if full:
        rows = score.final(scores)
        return table(
            pd.DataFrame({
                "Point": [f"{r.sweep} {r.point}" for r in rows.itertuples()],
                "Engine": rows["engine"],
                "Metric": [METRIC_NAMES.get(m, m) for m in rows["metric"]],
                "Predicted": [_with_range(r.predicted, r.low, r.high, _unit(r.metric)) for r in rows.itertuples()],
                "Measured": [
                    _with_range(r.measured, r.measured_low, r.measured_high, _unit(r.metric)) for r in rows.itertuples()
                ],
                "Error": [words.percent(e, signed=True) for e in rows["error_share"]],
                "Verdict": [verdict(v) for v in rows["verdict"]],
            }),
            caption or "Every prediction with its 80 % interval, every measurement with its 95 % interval",
            formats={c: _plain for c in ("Predicted", "Measured", "Error")},
        )  # fmt: skip
    rows = score.summary(scores, by=("engine", "metric", "stage"))
    order = {m: i for i, m in enumerate(METRIC_NAMES)}
    rows = rows.sort_values(
        by=["engine", "metric", "stage"], key=lambda c: c.map(lambda v: order.get(v, v)) if c.name == "metric" else c
    )
    shown = pd.DataFrame({
        "Metric": [METRIC_NAMES.get(m, m) for m in rows["metric"]], "Engine": rows["engine"],
        "Prediction": [str(s).partition(":")[0] for s in rows["stage"]], "Points": rows["points"],
        "Mean |error|": rows["mean_abs_error"].map(words.percent),
        "Worst": [f"{words.percent(w, signed=True)}" for w in rows["worst_error"]],
        "Inside 80 %": rows["inside_share"].map(words.percent),
        "Verdict": [verdict(score.verdict(e)) for e in rows["mean_abs_error"]],
        "Hit / near / miss": [f"{r.hit} / {r.near} / {r.miss}" for r in rows.itertuples()],
    })  # fmt: skip
    return table(
        shown,
        caption or "Verdicts by engine and metric: hit within 10 %, near within 25 %, else a miss",
        formats={c: _plain for c in ("Mean |error|", "Worst", "Inside 80 %", "Hit / near / miss")},
    )


def _with_range(value: float, low: float, high: float, unit: str) -> Html:
    shown = f'<span class="sb-nowrap">{esc(words.quantity(value, unit))}</span>'
    if np.isfinite(low) and np.isfinite(high):
        shown += f' <span class="sb-soft sb-nowrap">[{esc(words.number(low))}, {esc(words.number(high))}]</span>'
        if unit == "s" and value < 1:
            shown = shown.replace(
                f"[{esc(words.number(low))}, {esc(words.number(high))}]",
                f"[{esc(words.number(low * 1e3))}, {esc(words.number(high * 1e3))}]",
            )
    return Html(shown)


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

    def audit(row: Any) -> Html:
        look = {"valid": "hit", "suspect": "near", "invalid": "miss"}.get(row.verdict, "near")
        reasons = row.reasons if isinstance(getattr(row, "reasons", None), list) else []
        more = f' <span class="sb-soft">{esc("; ".join(map(str, reasons)))}</span>' if reasons else ""
        return Html(f'<span class="sb-verdict sb-{look}">{esc(row.verdict)}</span>{more}')

    shown = pd.DataFrame({
        name: [words.label(v) for v in rows[x]], "Engine": rows["engine"],
        "n": [None if pd.isna(n) else int(n) for n in rows["requests"]],
        "Failed": [0 if pd.isna(n) else int(n) for n in rows["failures"]],
        "TTFT": [_with_range(r.ttft_mean_s, r.ttft_ci_low_s, r.ttft_ci_high_s, "s") for r in rows.itertuples()],
        "TPOT": [_with_range(r.tpot_mean_s, r.tpot_ci_low_s, r.tpot_ci_high_s, "s") for r in rows.itertuples()],
        "Latency p50 / p99": [f"{words.seconds(r.e2e_p50_s)} / {words.seconds(r.e2e_p99_s)}" for r in rows.itertuples()],
        "Decode tok/s": [words.number(v) for v in rows["decode_tok_per_s"]],
        "Output tok/s": [words.number(v) for v in rows["output_tok_per_s"]],
        "Audit": [audit(r) for r in rows.itertuples()],
    })  # fmt: skip
    numeric = ("n", "Failed", "TTFT", "TPOT", "Latency p50 / p99", "Decode tok/s", "Output tok/s")
    return table(
        shown,
        caption or f"Measured in {sweep}; brackets: 95 % interval of the mean",
        formats={c: _plain for c in numeric},
    )


def facts_table(facts: Mapping[str, Mapping[str, Any]], caption: str = "What each engine said of itself") -> Html:
    """Engines side by side, one row a fact; what an engine did not report says so."""
    hidden = {"pid", "url", "name", "port", "log"}
    keys = [k for k in dict.fromkeys(k for f in facts.values() for k in f) if k not in hidden]
    keys = [k for k in keys if any(f.get(k) not in (None, [], {}) for f in facts.values())]
    rows = [
        {"Fact": k.replace("_", " ")}
        | {name: _plain(f[k]) if f.get(k) is not None else "not reported" for name, f in facts.items()}
        for k in keys
    ]
    if not rows:
        return Html("<p>No engine has reported anything yet.</p>")
    return table(pd.DataFrame(rows), caption)


def box(title: str, pairs: Iterable[tuple[str, Any]]) -> Html:
    """A box of names and values."""
    inner = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in pairs)
    return Html(f'<div class="sb-box"><h4>{esc(title)}</h4><dl>{inner}</dl></div>')


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
        span = _range(best["output_tok_per_s_ci_low"], best["output_tok_per_s_ci_high"], "")
        what = f"output tokens/s, the most that {engine} gave ({_where(best)})"
        cards.append(
            card(words.number(best["output_tok_per_s"]), "tok/s", what, f"95 % interval {span}, n = {_count(best)}")
        )
        others = frame[(frame["engine"] != engine) & (frame["sweep"].isin(own["sweep"]))]
        both = own.merge(others, on=["sweep", "point"], suffixes=("", "_other"))
        if len(both):
            both = both.assign(ratio=both["output_tok_per_s"] / both["output_tok_per_s_other"])
            top = both.loc[both["ratio"].idxmax()]
            low, high = _ratio_interval(top)
            span = f"95 % interval {_range(low, high, '×')}" if np.isfinite(low) else "no interval"
            what = f"the output rate of {top['engine_other']} at the same load ({_where(top)}), the largest gap"
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


def _where(row: Any) -> str:
    load = f"{row['rate_per_s']:g} requests/s" if pd.notna(row["rate_per_s"]) else f"C = {row['concurrency']:.0f}"
    return f"{load}, {row['prompt_tokens']:,.0f} in, {row['output_tokens']:,.0f} out"


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
        first = both.sort_values(["concurrency", "prompt_tokens"]).iloc[0]
        ratios = both["output_tok_per_s"] / both["output_tok_per_s_other"]
        top = both.loc[ratios.idxmax()]
        parts.append(
            f"{engine} gives {words.number(ratios[first.name], 2)} times the output of {first['engine_other']} at "
            f"{_where(first)} and {words.number(ratios.max(), 2)} times at {_where(top)}"
        )
    final = score.final(scores) if len(scores) else scores
    if len(final):
        hits = words.percent((final["verdict"] == "hit").mean())
        parts.append(f"{hits} of the {len(final)} frozen predictions came within 10 % of what was measured")
    text = "; ".join(parts) or "This run has not measured anything that was predicted"
    return Html(f'<p class="sb-claim">{esc(text[0].upper() + text[1:] if not parts or not both.size else text)}.</p>')


WHY = {
    "compute": "the time there is bound by compute",
    "memory": "the time there is bound by memory traffic",
    "host": "the time there is bound by the host",
    "queue": "most of the time there is queueing",
    "mixed step": "decode tokens there ride in mixed steps with prefill",
}


def misses_prose(scores: pd.DataFrame, n: int = 5) -> Html:
    """What the prediction got wrong, written from the largest misses, each with its regime."""
    worst = score.largest_misses(scores, n) if len(scores) else scores
    worst = worst[worst["verdict"] != "hit"] if len(worst) else worst
    if worst.empty:
        if scores.empty:
            return Html("<p>Nothing was both predicted and measured, so nothing can be said to be wrong.</p>")
        return Html(f"<p>No prediction was off by more than {words.percent(score.HIT)}.</p>")
    items = []
    for row in worst.itertuples():
        unit, name = _unit(row.metric), METRIC_NAMES.get(row.metric, row.metric)
        way = "too high" if row.error_share > 0 else "too low"
        text = (
            f"<b>{esc(name)} of {esc(row.engine)} in {esc(row.sweep)} at {esc(row.point)}</b>: predicted "
            f"{esc(words.quantity(row.predicted, unit))}, measured {esc(words.quantity(row.measured, unit))}, so "
            f"{esc(words.percent(abs(row.error_share)))} {way}"
        )
        if row.inside is not None:
            text += ", inside the interval" if row.inside else ", outside the interval"
        why = WHY.get(row.regime)
        text += f". The prediction says that {why}" if why else ""
        if row.also:
            text += f". {row.also} more {'point' if row.also == 1 else 'points'} of this curve {'is a miss' if row.also == 1 else 'are misses'}"
        if row.data == "suspect":
            text += ". The audit calls this point suspect"
        items.append(f"<li>{text}.</li>")
    return Html(f"<ol>{''.join(items)}</ol>")


def reproducibility_box(provenance: Mapping[str, Any]) -> Html:
    """What the run was made with: every session's commit, locks, packages, machine, hardware, command."""
    sessions = provenance.get("sessions") or [provenance]
    parts = []
    for k, session in enumerate(sessions, 1):
        title = "Reproducibility" if len(sessions) == 1 else f"Reproducibility, session {k} of {len(sessions)}"
        parts.append(box(title, _flat(session)))
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


def limits_box(params: Any) -> Html:
    """What this run does not show, from its own parameters (RunParams or the same as a mapping)."""
    run = params.model_dump(mode="json") if hasattr(params, "model_dump") else dict(params)
    model, sweeps = run.get("model", {}), run.get("sweeps", {})
    load = run.get("load", {})
    lines = [
        "Prompts are random token ids of one length per point: no shared prefixes, no spread of lengths, no text that would end early."
    ]
    if model.get("weights") == "dummy":
        lines.append(
            "Weights are random. Step times do not depend on their values; the text that comes out means nothing, and speculative decoding or early stopping would behave otherwise."
        )
    kinds = {s.get("kind") for s in sweeps.values()}
    if kinds & {"concurrency", "prompt_length"}:
        lines.append(
            "Closed loop: a client sends its next request when the last one ends, so load never outruns the server. Real users do not wait for each other."
        )
    if "arrival_rate" in kinds:
        lines.append("The open-loop sweep draws arrivals from a simple process without daily or bursty patterns.")
    if load.get("max_seconds"):
        lines.append(
            f"A point ends after {load['max_seconds']:g} s at most, warm-up included: slow points rest on few requests, and their p99 is close to their slowest one."
        )
    lines.append("One server on one machine, client and server on the same host: no network between them.")
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    return Html(f'<div class="sb-box"><h4>What this run does not show</h4><ul>{items}</ul></div>')


def cost_box(seconds: float, price_per_hour: float, currency: str, *, extra: Sequence[tuple[str, Any]] = ()) -> Html:
    """Run time and what it cost at the hardware's price."""
    pairs: list[tuple[str, Any]] = [("run time", words.seconds(seconds))]
    if price_per_hour:
        pairs.append(("price", f"{price_per_hour:g} {currency} per hour"))
        pairs.append(("cost", f"{seconds / 3600 * price_per_hour:.2f} {currency}"))
    else:
        pairs.append(("cost", "no price is set for this hardware"))
    return box("Run time and cost", [*pairs, *extra])


def notes_box(title: str, lines: Iterable[str]) -> Html:
    """Short notes in a box: engines that did not start, sweeps that stopped early. Empty without lines."""
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    return Html(f'<div class="sb-box"><h4>{esc(title)}</h4><ul>{items}</ul></div>' if items else "")
