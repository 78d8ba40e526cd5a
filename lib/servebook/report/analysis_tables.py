"""Tables of the analysis: where the gap comes from, and whether the measurements can be trusted."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ..charts import words
from ..scoring import analysis
from ..scoring.points_frame import frame_of
from .markup import Html, audit, columns, place, table, where

PLACE = {"sweep": "Sweep", "engine": "Engine", "load": "Load"}
CONDITIONS = ["point", "kind", "repeats_prompts", "concurrency", "rate_per_s", "prompt_tokens", "output_tokens"]


def placed(frame: pd.DataFrame, points: pd.DataFrame, caption: str, **how: Any) -> Html:
    """A table of points: sweep, engine and load in words, then the columns of `how["headers"]`."""
    keys = ["sweep", "engine", "point"]
    full = frame[keys].merge(frame_of(points)[["sweep", "engine", *CONDITIONS]], on=keys, how="left")
    values = {c: list(frame[c]) for c in how["headers"] if c not in PLACE}
    loads = [
        place(row) if row.sweep != "calibration" else where(full.loc[i]) for i, row in enumerate(full.itertuples())
    ]
    shown = pd.DataFrame({"sweep": list(frame["sweep"]), "engine": list(frame["engine"]), "load": loads} | values)
    return table(shown, caption, headers=PLACE | how["headers"], formats=how.get("formats"))


def _signed(share: float) -> str:
    return words.percent(share, signed=True)


def _times(value: float) -> str | None:
    return None if pd.isna(value) else f"{words.number(value)}×"


def _count(value: float | None) -> str | None:
    return None if value is None or pd.isna(value) else f"{value:,.0f}"


def engine_gap(points: pd.DataFrame, params: Any) -> Html:
    """The gap to the first naive engine (without one, to the first engine) at each concurrency, split into factors."""
    baseline = next((n for n, e in params.engines.items() if not e.continuous_batching), next(iter(params.engines)))
    parts = []
    for other in params.engines:
        if other == baseline:
            continue
        frame = analysis.engine_gap(points[points["verdict"] != "invalid"], baseline, other)
        if frame.empty:
            continue
        headers = {
            "sweep": "Sweep",
            "concurrency": "C",
            "output_ratio": "Output rate",
            "step_ratio": "= shorter step",
            "batch_ratio": "× requests in the batch",
            "rest_ratio": "× share of time decoding",
            "ttft_ratio": "TTFT",
        }
        formats = dict.fromkeys((c for c in headers if c.endswith("ratio")), _times)
        parts.append(
            table(frame, f"{other} against {baseline}; TTFT: how many times sooner", headers=headers, formats=formats)
        )
    return Html("".join(parts) or "<p>There are no two engines to compare.</p>")


def little(points: pd.DataFrame) -> Html:
    """Rate times latency against requests in flight, a row a point."""
    frame = analysis.little(points)
    if frame.empty:
        return Html("<p>Nothing was measured.</p>")
    headers = {
        "request_rate_per_s": "λ, /s",
        "latency_from_sending_s": "W, from sending",
        "little_l": "λ·W",
        "in_flight_mean": "L",
        "little_error": "λ·W / L − 1",
        "judged": "Judged",
    }
    formats = {"latency_from_sending_s": words.seconds, "little_error": _signed}
    holds = int(frame["closes"].sum())
    return placed(
        frame,
        points,
        f"Little's law closes within 2 % at {holds} of {len(frame)} points",
        headers=headers,
        formats=formats,
    )


def cache(points: pd.DataFrame) -> Html:
    """The share of prompt tokens that the prefix cache served, and preemptions, of points that report them."""
    frame = analysis.cache(points)
    frame = frame[frame["cache_hit_share"].notna()] if len(frame) else frame
    if frame.empty:
        return Html("<p>No engine of this run reports a prefix cache.</p>")
    served = int((frame["cache_hit_share"] > 0).sum())
    caption = f"The prefix cache served something at {served} of the {len(frame)} points that report it"
    headers = {"prompt_tokens": "Prompt", "cache_hit_share": "Served from cache", "preemptions": "Preemptions"}
    return placed(
        frame, points, caption, headers=headers, formats={"cache_hit_share": words.percent, "preemptions": _count}
    )


def knees(points: pd.DataFrame) -> Html:
    """Of each concurrency sweep the first C at which TTFT p99 exceeds twice its p50."""
    frame = analysis.knees(points)
    if frame.empty:
        return Html("<p>This run has no concurrency sweep.</p>")
    rows = frame.to_dict("records")
    shown = columns(
        {
            "Sweep": [r["sweep"] for r in rows],
            "Engine": [r["engine"] for r in rows],
            "Knee": [
                f"none up to C = {r['largest_concurrency']}"
                if pd.isna(r["knee_concurrency"])
                else f"C = {r['knee_concurrency']:.0f}"
                for r in rows
            ],
            "TTFT p50 there": [words.seconds(r["ttft_p50_s"]) if pd.notna(r["ttft_p50_s"]) else None for r in rows],
            "TTFT p99 there": [words.seconds(r["ttft_p99_s"]) if pd.notna(r["ttft_p99_s"]) else None for r in rows],
        }
    )
    return table(shown, "Where TTFT p99 first exceeds twice its p50", right=["TTFT p50 there", "TTFT p99 there"])


def goodput(points: pd.DataFrame, slo: Any) -> Html:
    """Requests per second within all limits of `slo`, and all requests per second, one row per point."""
    targets = [
        f"{name} ≤ {words.seconds(value)}"
        for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("latency", slo.e2e_s))
        if value
    ]
    if not targets:
        return Html("<p>The parameters set no targets (slo), so there is no goodput to give.</p>")
    frame = analysis.goodput(points)
    if frame.empty:
        return Html("<p>Nothing was measured.</p>")
    none = int((frame["goodput_per_s"] == 0).sum())
    headers = {
        "request_rate_per_s": "Raw, requests/s",
        "goodput_per_s": "Good, requests/s",
        "raw_to_good": "Raw / good",
    }
    formats = {"raw_to_good": lambda v: "nothing good" if pd.isna(v) else f"{words.number(v, 2)}×"}
    caption = f"Goodput under {words.listing(targets)}: nothing good at {none} of {len(frame)} points"
    return placed(frame, points, caption, headers=headers, formats=formats)


def itl(points: pd.DataFrame) -> Html:
    """Gaps between tokens, p50 and p99, a row a point."""
    frame = analysis.itl(points)
    if frame.empty:
        return Html("<p>Nothing was measured.</p>")
    headers = {"itl_p50_s": "p50", "itl_p99_s": "p99", "itl_is_event_gap": "Event gap", "p99_to_p50": "p99 / p50"}
    formats = {"itl_p50_s": words.seconds, "itl_p99_s": words.seconds, "p99_to_p50": _times}
    caption = "Gaps between tokens; an event gap where one event carried several tokens"
    return placed(frame, points, caption, headers=headers, formats=formats)


def queue(points: pd.DataFrame) -> Html:
    """Requests waiting for their first token (λ·TTFT), and the server's own gauges, one row per point."""
    frame = analysis.queue(points)
    if frame.empty:
        return Html("<p>Nothing was measured.</p>")
    headers = {
        "waiting_first_token": "λ·TTFT",
        "server_waiting_mean": "Server: waiting",
        "server_running_mean": "Server: running",
    }
    return placed(frame, points, "Requests that wait for their first token", headers=headers)


def suspects(points: pd.DataFrame) -> Html:
    """Every point that the audit doubts or throws out, with its reasons."""
    frame = analysis.suspects(points)
    if frame.empty:
        return Html(f"<p>All {len(points)} points passed every check of the audit.</p>")
    caption = f"{len(frame)} of {len(points)} points gave a reason for doubt"
    return placed(frame, points, caption, headers={"verdict": "Audit", "reasons": "Why"}, formats={"verdict": audit})
