"""The tables of the chapters 00 to 07: each takes what a stage wrote and returns it as an accessible HTML table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from .. import analysis, score
from ..charts import words
from . import tables
from .tables import Html, esc, table

PLACE = {"sweep": "Sweep", "engine": "Engine", "load": "Load"}
PREDICTED = {
    "TTFT": ("ttft_s", "s"),
    "TPOT": ("tpot_s", "s"),
    "Decode tok/s": ("decode_tok_per_s", ""),
    "Output tok/s": ("output_tok_per_s", ""),
}
CONDITIONS = ["point", "concurrency", "rate_per_s", "prompt_tokens", "output_tokens"]


def _giga(value: float) -> str:
    return words.number(value / 1e9)


def _tera(value: float) -> str:
    return words.number(value / 1e12)


def _metric(name: str) -> str:
    return tables.METRIC_NAMES.get(name, name)


def _signed(share: float) -> str:
    return words.percent(share, signed=True)


def _times(value: float) -> str | None:
    return None if pd.isna(value) else f"{words.number(value)}×"


def _count(value: float | None) -> str | None:
    return None if value is None or pd.isna(value) else f"{value:,.0f}"


def placed(frame: pd.DataFrame, points: pd.DataFrame, caption: str, **how: Any) -> Html:
    """A table of points: sweep, engine and load in words, then the columns of `how["headers"]`."""
    keys = ["sweep", "engine", "point"]
    told = frame[keys].merge(points[["sweep", "engine", *CONDITIONS]], on=keys, how="left")
    values = {c: list(frame[c]) for c in how["headers"] if c not in PLACE}
    loads = [
        tables.place(row) if row.sweep != "calibration" else tables.where(told.loc[i])
        for i, row in enumerate(told.itertuples())
    ]
    shown = pd.DataFrame({"sweep": list(frame["sweep"]), "engine": list(frame["engine"]), "load": loads} | values)
    return table(shown, caption, headers=PLACE | how["headers"], formats=how.get("formats"))


def checks_table(checks: Iterable[Any]) -> Html:
    """Preflight's checks: name, status, what was seen, and the fix where one is needed."""
    checks = list(checks)
    fixes = [c.fix if c.status in ("warn", "fail") else "" for c in checks]
    shown: dict[str, list[Any]] = {
        "Check": [c.name for c in checks],
        "Status": [_status(c.status) for c in checks],
        "Seen": [c.detail for c in checks],
    }
    if any(fixes):
        shown["Fix"] = fixes
    return table(tables.columns(shown), "Preflight")


def _status(status: str) -> Html:
    look = {"ok": "hit", "warn": "near", "fail": "miss"}.get(status, "near")
    return Html(f'<span class="sb-verdict sb-{look}">{esc(status)}</span>')


def hardware_table(gpu: Any, params: Any) -> Html:
    """The datasheet figures that predictions are made from, with their source."""
    h, dtype = params.hardware, params.model.dtype
    flops = gpu.flops_per_s(dtype)
    rows = [
        ("hardware", gpu.name),
        ("peak, dense", f"{flops / 1e12:.4g} TFLOP/s in {dtype}"),
        ("memory bandwidth", f"{gpu.bytes_per_s / 1e9:.4g} GB/s"),
        ("memory", f"{gpu.memory_bytes / 2**30:.4g} GiB"),
        ("ridge point", f"{flops / gpu.bytes_per_s:.4g} FLOP/byte"),
        ("price", f"{h.price_per_hour:g} {h.currency} per hour" if h.price_per_hour else "none given"),
        ("source", gpu.source),
    ]
    return table(
        pd.DataFrame(rows, columns=["", "value"]).rename(columns={"": "Figure", "value": "Value"}),
        f"Hardware: {gpu.name}",
    )


def shape_table(frame: pd.DataFrame, model: str) -> Html:
    headers = {"quantity": "Quantity", "value": "Value", "unit": "Unit", "how": "How"}
    return table(frame, f"What config.json says of {model}", headers=headers, right=["value"])


def step_table(frame: pd.DataFrame, gpu: Any) -> Html:
    headers = {
        "prompt_tokens": "Prompt",
        "output_tokens": "Output",
        "prefill_flops": "Prefill TFLOP",
        "decode_bytes": "Decode step GB",
        "decode_flops": "Decode step GFLOP",
        "ttft_bound_s": "TTFT ≥ (overlap)",
        "ttft_additive_s": "TTFT ≥ (no overlap)",
        "tpot_bound_s": "TPOT ≥",
    }
    formats = {"prefill_flops": _tera, "decode_bytes": _giga, "decode_flops": _giga} | dict.fromkeys(
        ("ttft_bound_s", "ttft_additive_s", "tpot_bound_s"), words.seconds
    )
    return table(frame, f"One request alone at the datasheet rates of {gpu.name}", headers=headers, formats=formats)


def pool_table(frame: pd.DataFrame) -> Html:
    if frame.empty:
        return Html("<p>No engine of this run keeps a paged KV pool.</p>")
    headers = {
        "engine": "Engine",
        "pool_gib": "KV pool GiB",
        "pool_tokens": "Tokens",
        "prompt_tokens": "Prompt",
        "output_tokens": "Output",
        "max_sequences": "Sequences at once",
    }
    return table(frame, "Upper bound of the KV pool, activations not subtracted", headers=headers)


def saturation_table(frame: pd.DataFrame) -> Html:
    headers = {
        "variant": "Variant",
        "kv_gb_per_sequence": "KV GB/sequence",
        "half_batch": "Half at B",
        "ceiling_tok_per_s": "Ceiling tok/s",
    }
    return table(frame, "Saturation of decode, bandwidth only", headers=headers)


def inconsistency_table(frame: pd.DataFrame) -> Html:
    def told(row: dict[str, Any], value: str, what: str) -> Html:
        return Html(f"{esc(words.label(row[value]))} <span class='sb-soft'>{esc(row[what])}</span>")

    rows = frame.to_dict("records")
    shown = tables.columns(
        {
            "Quantity": [r["quantity"] for r in rows],
            "Post": [r["post"] for r in rows],
            "Unit": [r["unit"] for r in rows],
            "One value": [told(r, "first", "first_is") for r in rows],
            "Other value": [told(r, "second", "second_is") for r in rows],
            "Used here": [told(r, "used", "why") for r in rows],
        }
    )
    return table(shown, "Two values for one quantity, and the one used here")


def prediction_table(
    entries: Mapping[str, Any] | Sequence[Mapping[str, Any]], caption: str = "Predicted, with the 80 % interval"
) -> Html:
    """Every predicted point of one or several frozen entries; a point that does not fit says so instead of a number."""
    entries = [entries] if isinstance(entries, Mapping) else list(entries)
    cells: dict[str, list[Any]] = {n: [] for n in ("Sweep", "Engine", "Load", *PREDICTED)}
    for p in (p for e in entries for p in e["points"]):
        cells["Sweep"].append(p["sweep"])
        cells["Engine"].append(p["engine"])
        cells["Load"].append(tables.place(pd.Series(p)))
        fits = p.get("fits", True)
        for name, (metric, unit) in PREDICTED.items():
            m = (p.get("metrics") or {}).get(metric) if fits else None
            value, low, high = (
                float("nan") if m is None or m.get(k) is None else float(m[k]) for k in ("value", "low", "high")
            )
            missing = p.get("note") if name == "TTFT" and not fits else None
            cells[name].append(missing if math.isnan(value) else tables.with_range(value, low, high, unit))
    return table(tables.columns(cells), caption, right=list(PREDICTED))


def ink(entries: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Html:
    """When predictions were frozen, and the hash of what went in."""
    entries = [entries] if isinstance(entries, Mapping) else list(entries)
    pairs = [
        (
            e["stage"],
            f"frozen {e['time_utc']}, {len(e['points'])} points, inputs {e['inputs_sha256'][:16]}…, "
            f"servebook {e['servebook_version']}",
        )
        for e in entries
    ]
    return tables.box("In ink", pairs)


def constants(entries: Sequence[Mapping[str, Any]]) -> Html:
    """The calibrated constants of each engine, prior beside posterior, and what the data could not tell apart."""
    parts = []
    for e in entries:
        for engine, told in e["constants"].items():
            rows = told["constants"]
            shown = {n: words.seconds if c["unit"] == "s" else words.label for n, c in rows.items()}
            frame = tables.columns(
                {
                    "Constant": [n.removesuffix("_s").replace("_", " ") for n in rows],
                    "Value": [shown[n](c["value"]) for n, c in rows.items()],
                    "80 % interval": [
                        f"{shown[n](c['low'])}\u00a0to\u00a0{shown[n](c['high'])}" for n, c in rows.items()
                    ],
                    "Prior": [f"{shown[n](c['prior'])}\u00a0±\u00a0{shown[n](c['prior_sd'])}" for n, c in rows.items()],
                    "Unit": ["" if c["unit"] == "s" else c["unit"] for c in rows.values()],
                    "Learned": ["yes" if c["sd_ratio"] < 0.9 else "no, still the prior" for c in rows.values()],
                    "Why bounded so": [c["why"] for c in rows.values()],
                }
            )
            if not any(frame["Unit"]):
                frame = frame.drop(columns="Unit")
            parts.append(
                table(frame, f"Constants of {engine} ({told['stage']})", right=["Value", "80 % interval", "Prior"])
            )
            apart = [f"{p['a']} and {p['b']} (correlation {p['correlation']:+.2f})" for p in told["cannot_tell_apart"]]
            said = any("cannot tell" in note for note in told["notes"])
            lines = [f"The data cannot tell apart: {words.listing(apart)}."] if apart and not said else []
            parts.append(tables.notes_box(f"What the data says of {engine}", [*lines, *told["notes"]]))
    return Html("".join(parts))


def effective_rates(frame: pd.DataFrame, gpu: Any) -> Html:
    if frame.empty:
        return Html("<p>No C = 1 point was measured.</p>")
    headers = {
        "engine": "Engine",
        "prompt_tokens": "Prompt",
        "ttft_s": "TTFT",
        "tpot_s": "TPOT",
        "gb_per_s": "GB/s",
        "bandwidth_share": "of datasheet",
        "tflop_per_s": "TFLOP/s",
        "compute_share": "of peak",
    }
    formats = {
        "ttft_s": words.seconds,
        "tpot_s": words.seconds,
        "bandwidth_share": words.percent,
        "compute_share": words.percent,
    }
    return table(frame, f"Effective rates at C = 1 against {gpu.name}", headers=headers, formats=formats)


def score_summary(scores: pd.DataFrame) -> Html:
    """Mean absolute error and share inside the interval, by stage, engine and metric."""
    if scores.empty:
        return Html("<p>No point was both predicted and measured.</p>")
    frame = score.summary(scores)
    formats: dict[str, tables.Format] = {
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
        "How far each way of predicting lay off, over the points held out from calibration",
        headers=headers,
        formats=formats,
    )


def engine_gap(points: pd.DataFrame, params: Any) -> Html:
    """The gap to the first naive engine at each concurrency, split into factors."""
    baseline = next((n for n, e in params.engines.items() if not e.batches), None)
    parts = []
    for other in params.engines:
        if baseline is None or other == baseline:
            continue
        frame = analysis.engine_gap(points, baseline, other)
        if frame.empty:
            continue
        headers = {
            "sweep": "Sweep",
            "concurrency": "C",
            "output_ratio": "Output rate",
            "step_ratio": "= step",
            "batch_ratio": "× batch",
            "rest_ratio": "× rest",
            "ttft_ratio": "TTFT",
        }
        formats = dict.fromkeys((c for c in headers if c.endswith("ratio")), _times)
        parts.append(
            table(frame, f"{other} against {baseline}; TTFT: how many times sooner", headers=headers, formats=formats)
        )
    return Html("".join(parts) or "<p>There are no two engines to compare.</p>")


def little(points: pd.DataFrame) -> Html:
    frame = analysis.little(points)
    if frame.empty:
        return Html("<p>Nothing was measured.</p>")
    headers = {
        "request_rate_per_s": "λ, /s",
        "e2e_mean_s": "W",
        "little_l": "λ·W",
        "in_flight_mean": "L",
        "little_error": "λ·W / L − 1",
        "closes": "Closes",
    }
    formats = {"e2e_mean_s": words.seconds, "little_error": _signed}
    holds = int(frame["closes"].sum())
    return placed(
        frame,
        points,
        f"Little's law closes within 2 % at {holds} of {len(frame)} points",
        headers=headers,
        formats=formats,
    )


def cache(points: pd.DataFrame) -> Html:
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
    frame = analysis.knees(points)
    if frame.empty:
        return Html("<p>This run has no concurrency sweep.</p>")
    rows = frame.to_dict("records")
    shown = tables.columns(
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
    frame = analysis.itl(points)
    if frame.empty:
        return Html("<p>Nothing was measured.</p>")
    headers = {"itl_p50_s": "p50", "itl_p99_s": "p99", "itl_is_event_gap": "Event gap", "p99_to_p50": "p99 / p50"}
    formats = {"itl_p50_s": words.seconds, "itl_p99_s": words.seconds, "p99_to_p50": _times}
    caption = "Gaps between tokens; an event gap where one event carried several tokens"
    return placed(frame, points, caption, headers=headers, formats=formats)


def queue(points: pd.DataFrame) -> Html:
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
    frame = analysis.suspects(points)
    if frame.empty:
        return Html(f"<p>All {len(points)} points passed every check of the audit.</p>")
    caption = f"{len(frame)} of {len(points)} points gave a reason for doubt"
    return placed(
        frame, points, caption, headers={"verdict": "Audit", "reasons": "Why"}, formats={"verdict": tables.audit}
    )


def stopped(stops: Iterable[Mapping[str, Any]], sweep: str) -> Html:
    """Why a sweep ended before its last point; empty where it did not."""
    return tables.notes_box("Where it stopped", [f"{s['engine']}: {s['why']}" for s in stops if s["sweep"] == sweep])


def missing(failed: Mapping[str, str], stops: Iterable[Mapping[str, Any]]) -> Html:
    """What this run does not have: engines that did not start, sweeps that ended early. Empty where all is there."""
    lines = [f"{engine} did not run: {why}" for engine, why in failed.items()]
    lines += [f"{s['sweep']}, {s['engine']}: {s['why']}" for s in stops]
    return tables.notes_box("What is missing, and why", lines)


def stamps(predictions: Mapping[str, Any]) -> Html:
    """All frozen stages with their times."""
    return ink(predictions["frozen"]) if predictions.get("frozen") else Html("<p>Nothing was frozen.</p>")


def cost(told: Mapping[str, float], hardware: Any) -> Html:
    """Wall time, what it went into, and the price."""
    kinds = (("measuring", "measuring"), ("engines starting", "starting"), ("everything else", "overhead"))
    extra = [(name, f"{words.seconds(told[f'{k}_s'])} ({told[f'{k}_share']:.0%})") for name, k in kinds]
    if told["lost_s"]:
        extra.append(("of which lost to faults and interruptions", words.seconds(told["lost_s"])))
    return tables.cost_box(told["wall_s"], hardware.price_per_hour, hardware.currency, extra=extra)
