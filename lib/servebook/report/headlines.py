"""The top of the post: a claim, three figures with intervals, the conditions, and which points the audit doubts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..charts import words
from ..charts.style import engine_order
from ..common import stats
from ..common.reasons import ReasonCode
from ..scoring import score
from .markup import Html, esc, place, range_text, where

RATE_NAMES = {"output_tok_per_s": "output", "decode_tok_per_s": "decode"}
RATES = {column: f"{name} tokens/s" for column, name in RATE_NAMES.items()}
FROZEN = "frozen beforehand"
NO_MARK = Html("")


def card(value: str, unit: str, what: str, interval: str, mark: Html = NO_MARK) -> str:
    """One of the figures at the top of the page. Its lines are separate blocks even without a style sheet (in Lab)."""
    small = f' <span class="sb-unit">{esc(unit)}</span>' if unit else ""
    return (
        f'<li><div class="sb-big">{esc(value)}{small}{mark}</div><div class="sb-what">{esc(what)}</div>'
        f'<div class="sb-range">{esc(interval)}</div></li>'
    )


def headline(
    points: Any, scores: pd.DataFrame, *, hardware: str, versions: str, engine: str = "vllm", how: str = FROZEN
) -> Html:
    """Three figures at the top of the page, with interval, hardware and versions: the engine's best output rate (decode
    rate, if no output rate is known), the largest ratio to another engine's rate at the same load, and the mean error
    of the predictions. how: how the predictions were made."""
    frame, rate = rated(points)
    cards = []
    own = frame[frame["engine"] == engine]
    if own.empty and len(frame):
        engine = str(frame["engine"].iloc[0])
        own = frame[frame["engine"] == engine]
    if len(own):
        best = own.loc[own[rate].idxmax()]
        span = interval_words(best[f"{rate}_ci_low"], best[f"{rate}_ci_high"], "")
        count = f", n = {best['requests']:.0f}" if pd.notna(best["requests"]) else ""
        what = f"{RATES[rate]}, {engine}'s peak ({where(best)})"
        cards.append(card(words.number(best[rate]), "tok/s", what, f"{span}{count}"))
        both = compared(frame, engine, rate)
        if len(both):
            top = both.loc[both["ratio"].idxmax()]
            spans = [(top[f"{rate}_ci_low{tail}"], top[f"{rate}_ci_high{tail}"]) for tail in ("", "_other")]
            span = interval_words(*stats.ratio_interval(top["ratio"], *spans), "×")
            name = RATE_NAMES[rate]
            what = f"the {name} rate of {top['engine_other']} at the same load ({where(top)}), the largest gap"
            cards.append(card(words.number(top["ratio"], 2), "×", what, span))
    final = score.final(scores) if len(scores) else scores
    if len(final):
        cards.append(error_card(final, how))
    conditions = f'<p class="sb-conditions">{esc(hardware)} · {esc(versions)}</p>'
    return Html(f'<ul class="sb-cards">{"".join(cards)}</ul>{conditions}' if cards else "<p>Nothing was measured.</p>")


def rated(points: Any) -> tuple[pd.DataFrame, str]:
    """The points that count for the top of the page, and the column of the rate to use."""
    frame = score.complete_frame(points)
    frame = frame[(frame["verdict"] != "invalid") & (frame["sweep"] != "calibration")]
    rate = next((r for r in RATES if frame[r].notna().any()), "output_tok_per_s")
    return frame[frame[rate] > 0].copy(), rate  # a copy, so that columns can be added


def compared(frame: pd.DataFrame, engine: str, rate: str) -> pd.DataFrame:
    """An engine's points beside the other engines' at the same load, with the ratio of their rates."""
    own, others = frame[frame["engine"] == engine], frame[frame["engine"] != engine]
    both = own.merge(others, on=["sweep", "point"], suffixes=("", "_other"))
    return both.assign(ratio=both[rate] / both[f"{rate}_other"])


def interval_words(low: float, high: float, unit: str) -> str:
    return f"95 % interval {range_text(low, high, unit)}" if np.isfinite(low) and np.isfinite(high) else "no interval"


def error_card(final: pd.DataFrame, how: str) -> str:
    """The predictions' mean absolute error, the metrics and points it covers, and the measurements' own uncertainty."""
    errors = final.assign(size=final["error_share"].abs())
    points = errors.groupby(["sweep", "engine", "point"])["size"]
    low, high = _bootstrap_mean(points.sum().to_numpy(), points.count().to_numpy())
    metrics, n = final["metric"].nunique(), points.ngroups
    over = f"{metrics} {'metric' if metrics == 1 else 'metrics'} at {n} {'point' if n == 1 else 'points'}"
    what = f"mean error of the {len(final)} predictions {how} ({over} of {words.listing(_engines(final))})"
    note = f"95 % interval {words.percent(low)} to {words.percent(high)}"
    half = ((final["measured_high"] - final["measured_low"]) / 2 / final["measured"]).dropna()
    if len(half):
        note += f"; the measured means are uncertain by ±{words.percent(half.median())} themselves (median)"
    return card(words.percent(errors["size"].mean()), "", what, note)


def _engines(frame: pd.DataFrame) -> list[str]:
    return sorted(frame["engine"].unique(), key=engine_order)


def hardware_line(params: Any, gpu: Any, provenance: Mapping[str, Any]) -> str:
    """Hardware, driver and model for the line under the headline."""
    first = ((provenance.get("sessions") or [{}])[0].get("gpu")) or {}
    count = first.get("gpus") or 1
    card = f"{count} × {gpu.name}" if count > 1 else gpu.name
    driver = f", driver {first['driver']}" if first.get("driver") else ""
    weights = ", random weights" if params.model.weights == "dummy" else ""
    name = params.model.hub or params.model.config or params.model.path
    return f"{card}{driver} · {name}, {params.model.dtype}{weights}"


CODE = ReasonCode
ABOUT = {
    CODE.REPEATED_PROMPTS: "prompts repeated on purpose",
    CODE.NOTHING_MEASURED: "nothing measured",
    CODE.MANY_FAILURES: "many requests failed",
    CODE.PROMPT_LENGTH: "prompts were not as long as asked",
    CODE.OUTPUT_LENGTH: "answers were not as long as asked",
    CODE.BELOW_FLOOR: "a mean is below its physical floor",
    CODE.SOME_FAILURES: "some requests failed",
    CODE.WARMUP_FAILURES: "requests failed in warm-up",
    CODE.HUNG_REQUESTS: "requests hung unanswered",
    CODE.TOKEN_COUNT: "client and server count tokens differently",
    CODE.NO_USAGE: "the server gives no token counts",
    CODE.COUNTERS_RESET: "the server was started again within the point",
    CODE.HIDDEN_REASONING: "reasoning tokens were not streamed",
    CODE.EXTRA_EVENTS: "streams had more token events than tokens",
    CODE.BUNCHED: "tokens were held back on their way",
    CODE.CACHE_HITS: "prompts were found in the prefix cache",
    CODE.PREEMPTIONS: "the KV cache overflowed",
    CODE.CLIENT_LIMITED: "the load client could not keep up",
    CODE.THROTTLED: "the GPU's clocks were slowed",
    CODE.POWER_CAPPED: "the GPU's power was capped",
    CODE.NO_FULL_ROUND: "not one round of the clients was measured",
    CODE.FEW_ROUNDS: "too few rounds of the clients were measured",
    CODE.ONE_REQUEST: "only one request was measured",
    CODE.SATURATED: "the queue grew from start to end",
    CODE.LITTLES_LAW: "Little's law is off",
    CODE.DRIFT: "latency drifted within the point",
    CODE.WIDE_INTERVAL: "the mean is not known well enough",
    CODE.FIRST_EVENT_SIZE: "the first event's token count is unknown",
    CODE.OTHER: "other reasons",
}


def trust(points: Any) -> Html:
    """One line under the headline if the audit doubts points: how many, and the most common reasons."""
    frame = score.complete_frame(points)
    repeated = score.is_repeated(frame)  # invalid on purpose, without a fault
    frame = frame[~repeated]
    doubted = frame[frame["verdict"].isin(["suspect", "invalid"])]
    if doubted.empty:
        return Html("")
    kinds: dict[str, int] = {}
    for codes in doubted.get("reason_codes", []):
        for kind in {ABOUT[ReasonCode(c)] for c in (codes if isinstance(codes, list) else [])}:
            kinds[kind] = kinds.get(kind, 0) + 1
    often = sorted(kinds.items(), key=lambda k: (-k[1], k[0]))[:2]
    why = words.listing([f"{what} ({n} {'point' if n == 1 else 'points'})" for what, n in often])
    lost = int((doubted["verdict"] == "invalid").sum())
    text = f"The audit doubts {len(doubted)} of the {len(frame)} points, drawn hollow in every figure" + (
        f": {why}" if why else ""
    )
    if lost:
        text += f"; {lost} of them {'is invalid' if lost == 1 else 'are invalid'} and left out"
    text += f" ({repeated.sum()} that repeat prompts on purpose not counted)" if repeated.any() else ""
    return Html(f'<p class="sb-caution">{esc(text)}.</p>')


def factor(value: float) -> str:
    """A ratio of rates as text: two decimals near 1, to show whether it is above or below."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _bootstrap_mean(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    # whole points are resampled: the errors of one point's metrics are correlated
    drawn = np.random.default_rng(1).integers(len(sums), size=(2000, len(sums)))
    low, high = np.percentile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def claim(points: Any, scores: pd.DataFrame, *, engine: str = "vllm", how: str = FROZEN) -> Html:
    """The run's main result in one sentence. how: as in headline."""
    frame, rate = rated(points)
    parts = []
    both = compared(frame, engine, rate)
    if len(both):
        top = both.loc[both["ratio"].idxmax()]
        first = both[both["sweep"] == top["sweep"]].sort_values(["concurrency", "prompt_tokens", "rate_per_s"]).iloc[0]
        name = RATE_NAMES[rate]
        text = f"At {where(top)}, {engine} gives {factor(top['ratio'])} times the {name} rate of {top['engine_other']}"
        if first["point"] != top["point"]:
            text += f", against {factor(first['ratio'])} times at {place(first)}"
        parts.append(text)
    final = score.final(scores) if len(scores) else scores
    if len(final):
        hits = words.percent((final["verdict"] == "hit").mean())
        parts.append(f"{hits} of the {len(final)} predictions {how} came within 10 % of what was measured")
    text = "; ".join(parts) or "This run has not measured any predicted point"
    return Html(f'<p class="sb-claim">{esc(text)}.</p>')
