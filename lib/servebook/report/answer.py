"""The first screen: three sentences that answer the page's title, its conditions, and where to read on.

One module, since all of it is one screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..charts import words
from ..charts.style import engine_order
from ..common import stats
from ..common.reasons import ReasonCode
from ..scoring import analysis, score
from .baseline import Baseline
from .headlines import RATE_NAMES, RATES, card, compared, error_card, factor, interval_words, rated
from .markup import Html, columns, esc, table, without_pace

WHY = "#can-the-measurements-be-trusted"
DOUBTED = Html(f'<a class="sb-doubt" href="{WHY}" title="the audit doubts this measurement">○</a>')
KEY = (
    f'<p class="sb-conditions">{DOUBTED} the audit, an automatic check, doubts this measurement (approximate at best); '
    "why is in “Can the measurements be trusted?”.</p>"
)


def answer(
    points: Any, scores: pd.DataFrame, params: Any, *, engine: str = "vllm", beside: Baseline | None = None,
    how: str = "frozen beforehand",
) -> Html:  # fmt: skip
    """Which engine won by how much, at what rate and cost, and the errors of the predictions, with a card for each.
    Figures of points that the audit doubts are marked ◦. beside: the run to compare with."""
    frame, rate = rated(points)
    own = frame[frame["engine"] == engine]
    if own.empty and len(frame):
        engine = str(frame["engine"].iloc[0])
        own = frame[frame["engine"] == engine]
    sentences, cards = [], []
    if len(own):
        for sentence, made in (
            _won(points, frame, engine, rate, params, beside),
            _rate(own, frame, engine, rate, params, beside),
        ):
            sentences.append(sentence)
            cards += made
    final = score.final(scores) if len(scores) else scores
    if len(final):
        sentences.append(_sure(final, how))
        cards.append(error_card(final, how))
    if not sentences:
        return Html('<p class="sb-claim">This run has not measured anything yet.</p>')
    text = " ".join(s for s in sentences if s)
    mark = KEY if "sb-doubt" in text + "".join(cards) else ""
    return Html(f'<p class="sb-claim">{text}</p><ul class="sb-cards">{"".join(cards)}</ul>{mark}')


def _won(
    points: Any, frame: pd.DataFrame, engine: str, rate: str, params: Any, beside: Baseline | None
) -> tuple[str, list[str]]:
    """What the run compares: two kinds of weights, two engines, or fresh prompts and repeated ones."""
    if beside is not None:
        return _against_baseline(beside)
    both = compared(frame, engine, rate)
    swept = both[both["kind"] == "concurrency"]
    both = swept if len(swept) else both  # the other sweeps are controls of this one
    if len(both):
        return _against_engine(both, engine, rate, params)
    sweeps = [name for name, s in params.sweeps.items() if s.kind == "prefix_cache"]
    for sweep in sweeps:
        table = analysis.prefix_cache(points, sweep).dropna(subset=["output_ratio"])
        if len(table):
            return _against_fresh(table, engine, params, frame, sweep)
    return "", []


def _against_baseline(b: Baseline) -> tuple[str, list[str]]:
    least, most = b.ratios.loc[b.ratios["ratio"].idxmin()], b.ratios.loc[b.ratios["ratio"].idxmax()]
    largest = b.ratios.loc[b.ratios["concurrency"].idxmax()]
    text = (
        f"{_upper(b.what)} give {words.number(least['ratio'])} to {words.number(most['ratio'])} times the output "
        f"tokens/s of {b.against} at the same load ({len(b.ratios)} loads, run {b.name}): "
        f"{words.number(largest['ratio'])} times at {load(largest)}"
    )
    mark = _doubt(largest)
    span = interval_words(most["low"], most["high"], "×")
    smallest = f"{words.number(least['ratio'])}×"
    what = f"the output rate with {b.against}, the largest gain ({load(most)}); the smallest: {smallest}"
    return f"{esc(text)}{mark}.", [card(words.number(most["ratio"]), "×", what, span, _doubt(most))]


def _against_engine(both: pd.DataFrame, engine: str, rate: str, params: Any) -> tuple[str, list[str]]:
    top = both.loc[both["ratio"].idxmax()]
    same = both[both["sweep"] == top["sweep"]].sort_values(["concurrency", "prompt_tokens", "rate_per_s"])
    first, name = same.iloc[0], RATE_NAMES[rate]
    one, two = server_name(engine, params), introduced(top["engine_other"], params)

    def rates(row: Any) -> str:
        return f"{words.number(row[rate])} against {words.number(row[rate + '_other'])} {RATES[rate]}"

    mark = _doubt(top) or _doubt(top, "verdict_other")
    won = f"{one} gives {factor(top['ratio'])} times the {name} rate of {two}"
    text = esc(f"{won} at {load(top)}: {rates(top)}") + mark
    if first["point"] != top["point"]:
        lengths = ["prompt_tokens", "output_tokens"]
        same_lengths = all(first[k] == top[k] for k in lengths)
        text += esc(f"; {factor(first['ratio'])} times at {load(first, short=same_lengths)}: {rates(first)}")
        text += _doubt(first) or _doubt(first, "verdict_other")
    spans = [(top[f"{rate}_ci_low{tail}"], top[f"{rate}_ci_high{tail}"]) for tail in ("", "_other")]
    span = interval_words(*stats.ratio_interval(top["ratio"], *spans), "×")
    what = (
        f"{one}'s {name} rate over that of {server_name(top['engine_other'], params)} at {load(top)}: the largest of "
        f"{len(both)} loads that both served"
    )
    return f"{text}.", [card(words.number(top["ratio"], 2), "×", what, span, mark)]


def _against_fresh(
    table: pd.DataFrame, engine: str, params: Any, frame: pd.DataFrame, sweep: str
) -> tuple[str, list[str]]:
    top, first = table.loc[table["output_ratio"].idxmax()], table.loc[table["ttft_ratio"].idxmin()]
    hits, gain = words.percent(top["cache_hit_share_same"]), words.percent(top["output_ratio"] - 1, signed=True)
    name, c = server_name(engine, params), f"C = {top['concurrency']:.0f}"
    own = frame[(frame["sweep"] == sweep) & (frame["engine"] == top["engine"]) & ~score.is_repeated(frame)]
    fresh_points = own[own["concurrency"] == top["concurrency"]]
    mark = _doubt(fresh_points.iloc[0]) if len(fresh_points) else Html("")
    text = (
        f"A benchmark that sends the same prompts at every concurrency makes {name} look up to "
        f"{gain.lstrip('+')} faster, at {c}"
    )
    why = (
        f": its prefix cache still holds {hits} of the prompt tokens. TTFT falls most at "
        f"C = {first['concurrency']:.0f}, to {words.number(first['ttft_ratio'])} times that of fresh prompts."
    )
    what = f"output rate that repeated prompts add, at most ({c}, {hits} of prompt tokens cached)"
    fresh, same = (words.number(top[f"output_tok_per_s_{k}"]) for k in ("fresh", "same"))
    made = card(gain, "", what, f"{same} against {fresh} output tok/s with fresh prompts", mark)
    return f"{esc(text)}{mark}{esc(why)}", [made]


def _rate(
    own: pd.DataFrame, frame: pd.DataFrame, engine: str, rate: str, params: Any, beside: Baseline | None
) -> tuple[str, list[str]]:
    """The engine's highest rate, and its cost per million tokens, compared with the other engines' lowest."""
    best, name = _highest(own, rate), server_name(engine, params)
    count = f", {best['requests']:,.0f} requests" if pd.notna(best["requests"]) else ""
    span = interval_words(best[f"{rate}_ci_low"], best[f"{rate}_ci_high"], "")
    mark = _doubt(best)
    what = f"{name}'s highest {RATE_NAMES[rate]} rate, at {load(best)}"
    cards = [card(words.number(best[rate]), "tok/s", what, span + count, mark)]
    text = f"{_upper(name)}'s highest rate is {words.number(best[rate])} {RATES[rate]}, at {load(best)}"
    if pd.notna(best["ttft_mean_s"]) and best["tpot_mean_s"] > 0:
        text += (
            f", where one user waits {words.seconds(best['ttft_mean_s'])} for the first token and then gets "
            f"{words.number(1 / best['tpot_mean_s'])} tokens/s"
        )
    price, currency = params.hardware.price_per_hour, params.hardware.currency
    if not price or rate != "output_tok_per_s":
        return f"{esc(text)}{mark}.", cards
    cost = million(best[rate], price)
    lengths = ["prompt_tokens", "output_tokens"]
    same = frame[(frame[lengths] == best[lengths]).all(axis=1) & (frame["engine"] != engine)]
    others = [_highest(points, rate) for _, points in same.groupby("engine")]
    each = [
        f"{currency} {money(million(o[rate], price))} with {server_name(str(o['engine']), params)} at its highest rate"
        f", {words.number(o[rate])} tokens/s"
        for o in others
    ]
    if beside is not None:  # the same load in the run that this one is set against
        keys = ["kind", "concurrency", "prompt_tokens", "output_tokens"]
        there = beside.ratios[(beside.ratios[keys] == best[keys]).all(axis=1)]
        each += [f"{currency} {money(million(v, price))} with {beside.against}" for v in there[f"{rate}_base"]]
    beside_it = f", against {words.listing(each)}" if each else ""
    at_price = f"At {currency} {price:.2f} an hour that is {currency} {money(cost)} per million output tokens"
    what = f"per million output tokens at that rate, prompts included ({currency} {price:.2f} an hour)"
    low, high = (million(best[f"{rate}_ci_{end}"], price) for end in ("high", "low"))
    spans = [f"95 % interval {money(low)} to {money(high)}"] if low > 0 and high < float("inf") else []
    cards.append(card(money(cost), currency, what, "; ".join([*spans, *each[:1]]), mark))
    return f"{esc(text)}{mark}. {esc(at_price)}{mark}{esc(beside_it)}.", cards


def _highest(points: pd.DataFrame, rate: str) -> pd.Series[Any]:
    """The point of the highest rate, of those whose requests in flight agree with their rate (Little's law) if any do:
    a rate above what was asked is a backlog that is worked off."""
    open_ = {ReasonCode.LITTLES_LAW, ReasonCode.SATURATED}
    codes = points["reason_codes"] if "reason_codes" in points else pd.Series(None, index=points.index)
    sound = points[[not (isinstance(c, list) and open_ & {ReasonCode(x) for x in c}) for c in codes]]
    return (sound if len(sound) else points).loc[lambda p: p[rate].idxmax()]


def _sure(final: pd.DataFrame, how: str) -> str:
    hits = int((final["verdict"] == "hit").sum())
    inside = final["inside"].dropna().astype(float)
    text = (
        f"The {len(final)} predictions, {how}, missed the measurements by "
        f"{words.percent(final['error_share'].abs().mean())} on average, and {hits} came within "
        f"{words.percent(score.HIT)}"
    )
    if len(inside):
        share = inside.mean()
        text += f"; {words.percent(share)} of the measurements lay inside the interval meant to hold 80 %"
        text += ", so the intervals were too wide" if share > 0.9 else ""
        text += ", so the intervals were too narrow" if share < 0.7 else ""
    return esc(text + ".")


def server_name(engine: str, params: Any) -> str:
    """An engine as a reader knows it: vLLM, else the run's name for it."""
    return "vLLM" if getattr(params.engines.get(engine), "kind", engine) == "vllm" else engine


def introduced(engine: str, params: Any) -> str:
    """An engine at its first mention."""
    if getattr(params.engines.get(engine), "kind", engine) == "naive":
        return f"a naive Transformers server ({engine}: one request at a time, no batching)"
    return server_name(engine, params)


def load(row: Any, *, short: bool = False) -> str:
    """A point's load in words: 8 concurrent requests, 512 tokens in and 128 out."""
    if pd.notna(row["rate_per_s"]):
        text = f"{words.number(row['rate_per_s'])} requests/s"
    elif pd.isna(row["concurrency"]):
        text = without_pace(row)
    else:
        c = int(row["concurrency"])
        text = f"{c:,} concurrent request{'s' * (c > 1)}"
    return text if short else f"{text}, {row['prompt_tokens']:,.0f} tokens in and {row['output_tokens']:,.0f} out"


def million(tok_per_s: float, price_per_hour: float) -> float:
    """The price of a million output tokens at a rate."""
    return price_per_hour / 3600 / tok_per_s * 1e6


def money(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else words.number(value, 2)


def _upper(text: str) -> str:
    return text if text.startswith("vLLM") else text[0].upper() + text[1:]


def _doubt(row: Any, column: str = "verdict", mark: Html = DOUBTED) -> Html:
    return mark if row[column] == "suspect" or row.get(f"{column}_base") == "suspect" else Html("")


def conditions(params: Any, gpu: Any, provenance: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> Html:
    """One line: card and driver, model, the types of its numbers, versions, date; below it where to read on."""
    first = (provenance.get("sessions") or [{}])[0]
    card_ = first.get("gpu") or {}
    count = card_.get("gpus") or 1
    m = params.model
    made = [f"{count} × {gpu.name}" if count > 1 else gpu.name]
    made[0] += f", driver {card_['driver']}" if card_.get("driver") else ""
    made.append(str(m.hub or m.config or m.path) + (" (random weights)" if m.weights == "dummy" else ""))
    made.append(
        f"{m.quantization or m.dtype} weights, {m.dtype if m.kv_cache_dtype == 'auto' else m.kv_cache_dtype} KV cache"
    )
    versions = [f"{name} {f['version']}" for name, f in facts.items() if f.get("version")]
    made.append(", ".join(versions) or "no engine ran")
    made += [str(first["started_utc"])[:10]] if first.get("started_utc") else []
    links = [
        ("#data", "Data"), ("#run-it-again", "Code and command"), ("labbook.html", "Lab book"),
        ("./", f"Run folder {params.run}"),
    ]  # fmt: skip
    shown = " · ".join(f'<a href="{href}">{esc(name)}</a>' for href, name in links)
    return Html(f'<p class="sb-conditions">{esc(" · ".join(made))}</p><p class="sb-links">{shown}</p>')


def economics(points: Any, params: Any) -> Html:
    """Rate per user and per GPU and cost per million output tokens, for each closed-loop point. One table per
    workload, one row per concurrency, with two engines side by side."""
    frame, rate = rated(points)
    frame = frame[frame["concurrency"].notna() & (frame["kind"] == "concurrency") & frame["tpot_mean_s"].gt(0)]
    if frame.empty:
        return Html("")
    price, currency = params.hardware.price_per_hour, params.hardware.currency
    gpus = frame["engine"].map(lambda name: gpus_of(params, name))
    frame = frame.assign(user=1 / frame["tpot_mean_s"], gpu=frame[rate] / gpus)
    shown: dict[str, tuple[str, Any]] = {"ttft_mean_s": ("TTFT", words.seconds), "user": ("tok/s/user", words.number),
             "gpu": ("tok/s/GPU", words.number)}  # fmt: skip
    if price:
        frame["cost"] = [million(v, price) for v in frame[rate]]
        shown["cost"] = (f"{currency} per 1M", money)
    tables = []
    for _, own in frame.groupby(["prompt_tokens", "output_tokens"], sort=True):
        of = f"{own['prompt_tokens'].iloc[0]:,.0f} tokens in, {own['output_tokens'].iloc[0]:,.0f} out"
        cost = f", and the price of a million output tokens at {currency} {price:g} an hour and GPU" if price else ""
        caption = f"{of}: tokens/s of one user (1 / TPOT) and of one GPU{cost or '; no price was given'}"
        tables.append(side_by_side(own, shown, caption))
    return Html("".join(tables))


def side_by_side(
    frame: pd.DataFrame, shown: Mapping[str, tuple[str, Any]], caption: str, *, mark: Html = DOUBTED
) -> Html:
    """A table with one row per concurrency. shown: {column: (heading, format)}, once per engine; mark: the mark of
    a doubted point."""
    engines = sorted(frame["engine"].unique(), key=engine_order)
    levels = sorted(frame["concurrency"].unique())
    rows: dict[str, list[Any]] = {"C": [f"{c:.0f}" for c in levels]}
    for column, (heading, form) in shown.items():
        for name in engines:
            own = frame[frame["engine"] == name].drop_duplicates("concurrency").set_index("concurrency")
            title = f"{name}: {heading}" if len(engines) > 1 else heading
            rows[title] = [
                Html(esc(form(own.loc[c, column])) + _doubt(own.loc[c], mark=mark)) if c in own.index else None
                for c in levels
            ]
    return table(columns(rows), caption, right=tuple(list(rows)[1:]), fold=False)


def gpus_of(params: Any, engine: str) -> int:
    """GPUs that an engine was started on."""
    how = params.engines.get(engine)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    product = 1
    for size in sizes:
        product *= getattr(how, size, 1) or 1
    return product


__all__ = ["answer", "conditions", "economics", "gpus_of", "load", "million", "money", "server_name", "side_by_side"]
