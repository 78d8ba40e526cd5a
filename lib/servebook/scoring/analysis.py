"""Tables of the analysis notebook, computed from points alone: no formulas of step time.

Every function takes the run's points (one row per point, columns as MeasuredPoint) and returns a DataFrame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pandas as pd

from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import CAUSES, ROOFLINE, PredictedPoint
from ..common.reasons import ReasonCode
from .audit import LITTLE_TOLERANCE
from .points_frame import PointsLike, frame_of

SESSION_SLACK_S = 15.0  # the length of a killed session is at most this much too short


def _frame(points: PointsLike, kind: str | None = None) -> pd.DataFrame:
    frame = frame_of(points)
    if kind and len(frame):
        frame = frame[frame["kind"] == kind]
    return frame.reset_index(drop=True)


def little(points: Any) -> pd.DataFrame:
    """Little's law at every point: rate × mean latency, compared with the requests in flight.

    latency_from_sending_s is the W of `little_l`: an open loop's e2e_mean_s counts from when a request was due, while a
    request is in flight only once it was sent. judged: how the audit takes the difference.
    """
    frame = _frame(points)
    columns = [
        "sweep",
        "engine",
        "point",
        "concurrency",
        "request_rate_per_s",
        "little_l",
        "in_flight_mean",
        "little_error",
    ]
    table = frame[columns].copy()
    table["latency_from_sending_s"] = table["little_l"] / table["request_rate_per_s"]
    table["closes"] = table["little_error"].abs() <= LITTLE_TOLERANCE
    edges = frame["little_edge"].fillna(0) if "little_edge" in frame else [0.0] * len(frame)
    codes = frame["reason_codes"] if "reason_codes" in frame else [[]] * len(frame)
    errors = table["little_error"]
    table["judged"] = [_judged(*row) for row in zip(errors, edges, codes, strict=True)]
    return table


NOT_JUDGED = {
    ReasonCode.NO_FULL_ROUND: "less than one round of the clients",
    ReasonCode.FEW_ROUNDS: "too few rounds of the clients",
    ReasonCode.ONE_REQUEST: "one request",
    ReasonCode.SATURATED: "the queue grew",
}


def _judged(error: float, edge: float, codes: Any) -> str:
    """How the audit takes a difference: a window of few requests cannot test the law."""
    if pd.isna(error):
        return "–"
    if abs(error) <= LITTLE_TOLERANCE:
        return "closes"
    given = {ReasonCode(c) for c in (codes if isinstance(codes, list) else [])}
    if ReasonCode.LITTLES_LAW in given:
        return "open"
    if abs(error) <= LITTLE_TOLERANCE + edge:
        return f"within ±{100 * (LITTLE_TOLERANCE + edge):.0f} %, what the window's ends may cause"
    why = [text for code, text in NOT_JUDGED.items() if code in given]
    return f"not judged: {why[0]}" if why else "not judged"


def knees(points: Any) -> pd.DataFrame:
    """The TTFT knee of each concurrency sweep: the first C whose p99 exceeds twice its p50, None if there is none."""
    rows = []
    for (sweep, engine), group in _frame(points, "concurrency").groupby(["sweep", "engine"], sort=False):
        group = group.sort_values("concurrency")
        over = group[group["ttft_p99_s"] > 2 * group["ttft_p50_s"]]
        at = over.iloc[0] if len(over) else None
        rows.append(
            {
                "sweep": sweep,
                "engine": engine,
                "knee_concurrency": None if at is None else int(at["concurrency"]),
                "ttft_p50_s": None if at is None else at["ttft_p50_s"],
                "ttft_p99_s": None if at is None else at["ttft_p99_s"],
                "largest_concurrency": int(group["concurrency"].max()),
            }
        )
    return pd.DataFrame(rows)


def goodput(points: Any) -> pd.DataFrame:
    """Requests per second that met every SLO, the raw rate, and the ratio raw / good."""
    frame = _frame(points)
    table = frame[
        ["sweep", "engine", "point", "concurrency", "rate_per_s", "request_rate_per_s", "goodput_per_s"]
    ].copy()
    good = table["goodput_per_s"].where(table["goodput_per_s"] > 0)
    table["raw_to_good"] = table["request_rate_per_s"] / good
    return table


def queue(points: Any) -> pd.DataFrame:
    """λ·TTFT, the requests that wait for their first token, and the server's gauge of waiting requests."""
    frame = _frame(points)
    return frame[
        ["sweep", "engine", "point", "concurrency", "waiting_first_token", "server_waiting_mean", "server_running_mean"]
    ].copy()


def cache(points: Any) -> pd.DataFrame:
    """Share of prompt tokens served from the server's prefix cache; None if the server does not report it."""
    return _frame(points)[["sweep", "engine", "point", "prompt_tokens", "cache_hit_share", "preemptions"]].copy()


def prefix_cache(points: Any, sweep: str) -> pd.DataFrame:
    """The prefix-cache experiment, one row per engine and C: fresh prompts, repeated prompts (NaN if the engine does
    not cache), and the ratios repeated / fresh of mean TTFT and of output tokens/s."""
    frame = _frame(points)
    frame = frame[(frame["sweep"] == sweep) & (frame["requests"] > 0)]
    same = frame["repeats_prompts"]
    figures = ["ttft_mean_s", "tpot_mean_s", "output_tok_per_s", "cache_hit_share"]
    columns = ["engine", "concurrency", *figures]
    table = frame[~same][columns].merge(
        frame[same][columns], on=["engine", "concurrency"], how="left", suffixes=("_fresh", "_same")
    )
    table["ttft_ratio"] = table["ttft_mean_s_same"] / table["ttft_mean_s_fresh"]
    table["output_ratio"] = table["output_tok_per_s_same"] / table["output_tok_per_s_fresh"]
    return table.sort_values(["engine", "concurrency"], kind="stable").reset_index(drop=True)


def itl(points: Any) -> pd.DataFrame:
    """Inter-token latency p50 and p99 (the gap between events if an event carried several tokens)."""
    frame = _frame(points)
    table = frame[["sweep", "engine", "point", "concurrency", "itl_p50_s", "itl_p99_s", "itl_is_event_gap"]].copy()
    table["p99_to_p50"] = table["itl_p99_s"] / table["itl_p50_s"].where(table["itl_p50_s"] > 0)
    return table


def suspects(points: Any) -> pd.DataFrame:
    """Points that are not valid, with the reasons."""
    frame = _frame(points)
    table = frame[frame["verdict"] != "valid"][["sweep", "engine", "point", "verdict", "reasons"]].copy()
    table["reasons"] = ["; ".join(r) if isinstance(r, list) else str(r) for r in table["reasons"]]
    return table.reset_index(drop=True)


def engine_gap(points: Any, baseline: str, other: str) -> pd.DataFrame:
    """The factors of the gap between two engines at each C of each concurrency sweep.

    output_ratio = other / baseline output tokens/s; with equal lengths and C it is the ratio of request times (Little).
    step_ratio = baseline TPOT / other TPOT is the cost of a step. batch_ratio is the ratio of requests in the batch,
    prefilling ones included (decode tok/s × TPOT; 1 for a server that takes one at a time). rest_ratio is the
    remainder: the share of its time that such a request decodes, rather than prefills.
    """
    frame = _frame(points, "concurrency")
    one, two = (frame[frame["engine"] == e].set_index(["sweep", "concurrency"]) for e in (baseline, other))
    both = one.index.intersection(two.index)
    one, two = one.loc[both], two.loc[both]
    table = pd.DataFrame(index=both)
    table["output_ratio"] = two["output_tok_per_s"] / one["output_tok_per_s"]
    table["step_ratio"] = one["tpot_mean_s"] / two["tpot_mean_s"]
    batch = [f["decode_tok_per_s"] * f["tpot_mean_s"] for f in (one, two)]
    table["batch_ratio"] = batch[1] / batch[0]
    table["rest_ratio"] = table["output_ratio"] / (table["step_ratio"] * table["batch_ratio"])
    table["ttft_ratio"] = one["ttft_mean_s"] / two["ttft_mean_s"]
    return table.reset_index()


OLD_LABELS = {"roofline says": ROOFLINE}  # of predictions frozen until 0.1


def waterfalls(
    points: Any, predicted: Iterable[PredictedPoint], engine: str, concurrency: int | None = None
) -> list[dict[str, Any]]:
    """The input of charts.waterfall for one C of each concurrency sweep of an engine: TPOT, then TTFT. concurrency:
    that C where it was measured; None: the largest.

    predicted: the engine's frozen points, each with its waterfall [(label, seconds)] from roofline to predicted TPOT
    and its breakdown {"ttft_s": seconds by cause}.
    """
    by_point = {(p["sweep"], p["point"]): p for p in predicted if p.get("waterfall")}
    drawn = []
    frame = _frame(points, "concurrency")
    own = frame[frame["engine"] == engine] if len(frame) else frame
    if concurrency is not None and len(own):
        own = own[own["concurrency"] == concurrency]
    suffix = "" if concurrency is None else f"-c{concurrency:04d}"
    for sweep, group in own.groupby("sweep", sort=False) if len(own) else []:
        for row in group.sort_values("concurrency", ascending=False).to_dict("records"):
            p = by_point.get((sweep, row["point"]))
            if p and (row["tpot_mean_s"] or 0) > 0:
                at = f"at C = {row['concurrency']:.0f}, {row['prompt_tokens']:,.0f} in"
                shared = {"engine": engine}
                (first_label, first_s), *rest = p["waterfall"]
                tpot = {
                    "parts": [
                        (OLD_LABELS.get(first_label, first_label), first_s),
                        *_small_together(rest, sum(v for _, v in p["waterfall"])),
                    ],
                    "measured": row["tpot_mean_s"],
                    "what": f"TPOT {at}",
                    "id": f"waterfall-{sweep}{suffix}",
                }
                drawn.append(tpot | shared)
                first = first_token_parts((p.get("breakdown") or {}).get("ttft_s") or {})
                if first and row.get("ttft_mean_s"):
                    ttft = {"parts": first, "measured": row["ttft_mean_s"], "what": f"TTFT {at}"}
                    drawn.append(ttft | {"id": f"waterfall-ttft-{sweep}{suffix}"} | shared)
                break
    return drawn


def first_token_parts(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """TTFT by cause: the prompt's own prefill, then the rest by size; parts below 0.5 % of the sum are combined."""
    named = [(CAUSES[n][0] if n in CAUSES else n.removesuffix("_s").replace("_", " "), v) for n, v in parts.items()]
    named.sort(key=lambda part: (part[0] != CAUSES["own_prefill_s"][0], -part[1]))
    return _small_together(named, sum(parts.values()))


def _small_together(parts: Sequence[Sequence[Any]], total_s: float) -> list[tuple[str, float]]:
    """Parts (label, seconds) with those below 0.5 % of the total combined; the combined part is dropped if it would
    show as 0."""
    kept = [(label, v) for label, v in parts if abs(v) >= 0.005 * total_s]
    small = sum(v for _, v in parts) - sum(v for _, v in kept)
    return [*kept, ("small parts", small)] if abs(small) >= 0.0005 * total_s and kept else kept


def run_cost(
    sessions: Iterable[Mapping[str, Any]], spent: Iterable[Mapping[str, Any]], price_per_hour: float
) -> dict[str, float]:
    """How the machine's time was spent and its cost, over the sessions that ran an engine.

    sessions: provenance's records; spent: sessions.Sessions.spent(). Returns seconds: wall_s in total, measuring_s
    within completed points, starting_s until engines answered, overhead_s the rest (notebooks, stopping engines,
    drawing, and lost_s: points lost to a fault or an interruption); their shares of wall_s; and the cost.
    """
    notes = [(_epoch_s(n["began_utc"]), n["seconds"], n["what"]) for n in spent]
    wall_s, inside = 0.0, set()
    for session in sessions:
        begin = _epoch_s(session["started_utc"])
        end = begin + (session["seconds"] or 0.0) + SESSION_SLACK_S
        own = {i for i, (at, _, _) in enumerate(notes) if begin <= at < end}
        if own:  # a session that only replayed the run costs nothing
            wall_s += max(session["seconds"] or 0.0, *(notes[i][0] + notes[i][1] - begin for i in own))
        inside |= own
    by_hand_s = sum(seconds for i, (_, seconds, _) in enumerate(notes) if i not in inside)
    wall_s += by_hand_s
    took = {f"{kind}_s": sum(s for _, s, what in notes if what == kind) for kind in ("measuring", "starting", "lost")}
    took |= {"wall_s": wall_s, "overhead_s": max(0.0, wall_s - took["measuring_s"] - took["starting_s"])}
    shares = {f"{k}_share": took[f"{k}_s"] / wall_s if wall_s else 0.0 for k in ("measuring", "starting", "overhead")}
    return {**took, **shares, "cost": wall_s / 3600 * price_per_hour}


def spent_on(points: Iterable[MeasuredPoint], facts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The `spent` input of run_cost for a run without time.jsonl: from its points and its engines' last starts."""
    begun = sorted(((at, p) for p in points if (at := p.started_at)), key=lambda b: b[0], reverse=True)
    measuring = [{"what": "measuring", "began_utc": at, "seconds": p.wall_s or p.seconds or 0.0} for at, p in begun]
    first = {p.engine: at for at, p in begun}  # an engine's start belongs to the session of that point
    return measuring + [
        {"what": "starting", "began_utc": first[name], "seconds": f["startup_s"]}
        for name, f in facts.items()
        if name in first and f.get("startup_s")
    ]


def _epoch_s(time_utc: str) -> float:
    return datetime.fromisoformat(time_utc).timestamp()
