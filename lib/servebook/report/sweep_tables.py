"""Tables of measurements: a sweep's points, limits that servers reported, missing points, durations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ..charts import words
from ..scoring import analysis, score
from .boxes import cost_box, flags_line
from .markup import Html, audit, columns, esc, notes_box, place, plain, table, with_range


def points_table(points: Any, sweep: str) -> Html:
    """What was measured in a sweep: one row a point, with n, intervals and the audit's verdict."""
    frame = score.complete_frame(points)
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
    rows = frame.assign(again=score.is_repeated(frame)).sort_values(["engine", x, "again"])
    each = list(rows.itertuples())
    prompts = {"Prompts": ["repeated" if r.again else "fresh" for r in each]} if rows["again"].any() else {}

    shown = columns({
        name: [words.label(getattr(r, x)) for r in each], "Engine": [r.engine for r in each], **prompts,
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
    made = table(shown, f"Measured in {sweep}; brackets: 95 % interval of the mean", right=numbers)
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


def facts_table(facts: Mapping[str, Mapping[str, Any]]) -> Html:
    """Engines side by side, one row per fact; facts that an engine did not report are marked."""
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
    not_reported = f'<p class="sb-conditions">Not reported: {esc(words.listing(list(unknown)))}.</p>' if unknown else ""
    return Html(table(pd.DataFrame(rows), "Settings and limits that each engine reported") + not_reported)


def prefix_cache(points: Any, sweep: str) -> Html:
    """The effect of repeated prompts: fresh prompts, the same seed, and the ratios same / fresh."""
    found = analysis.prefix_cache(points, sweep)
    if found.empty:
        return Html("<p>No point of this sweep was measured.</p>")

    def shown_column(column: str, form: Any) -> list[str]:
        return ["–" if pd.isna(v) else form(v) for v in found[column]]

    def times(value: float) -> str:
        return f"{words.number(value)}×"

    shown = columns({
        "Engine": list(found["engine"]),
        "C": [f"{c:.0f}" for c in found["concurrency"]],
        "TTFT fresh": shown_column("ttft_mean_s_fresh", words.seconds),
        "TTFT same seed": shown_column("ttft_mean_s_same", words.seconds),
        "TTFT ratio": shown_column("ttft_ratio", times),
        "Output tok/s fresh": shown_column("output_tok_per_s_fresh", words.number),
        "Output tok/s same seed": shown_column("output_tok_per_s_same", words.number),
        "Output ratio": shown_column("output_ratio", times),
        "Hits fresh": shown_column("cache_hit_share_fresh", words.percent),
        "Hits same seed": shown_column("cache_hit_share_same", words.percent),
    })  # fmt: skip
    numbers = tuple(c for c in shown.columns if c != "Engine")
    text = "What repeated prompts do: same seed against fresh; –: the engine caches no prefixes"
    return table(shown, text, right=numbers)


def stopped(stops: Iterable[Mapping[str, Any]], sweep: str) -> Html:
    """Why a sweep ended before its last point; empty if it did not."""
    lines = [f"{s['engine']}: {s['loads']} not measured: {s['why']}" for s in stops if s["sweep"] == sweep]
    return notes_box("Where it stopped", lines)


def missing(
    failed: Mapping[str, str],
    stops: Iterable[Mapping[str, Any]],
    left_out: str | None = None,
    unfinished: Iterable[str] = (),
) -> Html:
    """What this run does not have: engines that did not start, sweeps that ended early, points that it did not come
    to, points of other parameters.

    Empty where all is there."""
    lines = [f"{engine} did not run: {why}" for engine, why in failed.items()]
    lines += [f"{s['sweep']}, {s['engine']}: {s['loads']} not measured: {s['why']}" for s in stops]
    lines += [*unfinished, *([left_out] if left_out else [])]
    text = "; ".join(lines)
    return Html(f'<p class="sb-caution">Missing in this run: {esc(text)}.</p>' if text else "")


def cost(spent: Mapping[str, float], hardware: Any, *, short: bool = False) -> Html:
    """Wall time, what it went into, and the price. short: as one sentence."""
    if short:
        price, took = spent["wall_s"] / 3600 * hardware.price_per_hour, words.seconds(spent["wall_s"])
        paid = f" and cost {hardware.currency} {price:.2f}" if price >= 0.005 else ""
        parts = (("measuring", "measuring"), ("starting", "starting engines"))
        shares = [f"{words.percent(spent[f'{k}_share'])} {what}" for k, what in parts]
        return Html(f'<p class="sb-conditions">{esc(f"The run took {took}{paid}: {words.listing(shares)}.")}</p>')
    kinds = (("measuring", "measuring"), ("engines starting", "starting"), ("everything else", "overhead"))
    extra = [(name, f"{words.seconds(spent[f'{k}_s'])} ({spent[f'{k}_share']:.0%})") for name, k in kinds]
    if spent["lost_s"]:
        extra.append(("of which lost to faults and interruptions", words.seconds(spent["lost_s"])))
    return cost_box(spent["wall_s"], hardware.price_per_hour, hardware.currency, extra=extra)
