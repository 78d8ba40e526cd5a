"""Tables of the chapters before a sweep: the machine, the model's shape, what one step costs, what was frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ..charts import words
from ..common.measured_point import Metric
from ..common.predicted_point import StagePrediction, interval, repeats_prompts
from ..predictor.roofline import ridge_flop_per_byte
from .markup import Html, box, columns, esc, notes_box, place, table, with_range

PREDICTED: dict[str, tuple[Metric, str]] = {
    "TTFT": ("ttft_s", "s"),
    "TPOT": ("tpot_s", "s"),
    "Decode tok/s": ("decode_tok_per_s", ""),
    "Output tok/s": ("output_tok_per_s", ""),
}


def checks_table(checks: Iterable[Any]) -> Html:
    """Preflight's checks: name, status, finding, and the fix if one is needed."""
    checks = list(checks)
    if not checks:
        return Html("<p>What preflight saw is not stored with this run.</p>")
    fixes = [c.fix if c.status in ("warn", "fail") else "" for c in checks]
    shown: dict[str, list[Any]] = {
        "Check": [c.name for c in checks],
        "Status": [_status(c.status) for c in checks],
        "Seen": [c.detail for c in checks],
    }
    if any(fixes):
        shown["Fix"] = fixes
    return table(columns(shown), "Preflight")


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
        ("ridge point", f"{ridge_flop_per_byte(flops, gpu.bytes_per_s):.4g} FLOP/byte"),
        ("price", f"{h.price_per_hour:g} {h.currency} per hour" if h.price_per_hour else "none given"),
        ("source", gpu.source),
    ]
    return table(
        pd.DataFrame(rows, columns=["", "value"]).rename(columns={"": "Figure", "value": "Value"}),
        f"Hardware: {gpu.name}",
    )


def shape_table(frame: pd.DataFrame, model: str) -> Html:
    """closed_forms.shape_table: what config.json decides, and the bytes and FLOPs that follow."""
    headers = {"quantity": "Quantity", "value": "Value", "unit": "Unit", "how": "How"}
    return table(frame, f"What config.json says of {model}", headers=headers, right=["value"])


def step_table(frame: pd.DataFrame, gpu: Any) -> Html:
    """closed_forms.step_table: what a request alone costs, and its lower bounds."""
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


def _giga(value: float) -> str:
    return words.number(value / 1e9)


def _tera(value: float) -> str:
    return words.number(value / 1e12)


def pool_table(frame: pd.DataFrame) -> Html:
    """closed_forms.pool_table: the KV pool's upper bound, and how many sequences fit it."""
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
    """Half-saturation batch and ceiling of decode, by bandwidth alone."""
    headers = {
        "variant": "Variant",
        "kv_gb_per_sequence": "KV GB/sequence",
        "half_batch": "Half at B",
        "ceiling_tok_per_s": "Ceiling tok/s",
    }
    return table(frame, "Saturation of decode, bandwidth only", headers=headers)


def inconsistency_table(frame: pd.DataFrame) -> Html:
    """Where a post disagrees with itself: both values, and the one used here with its reason."""

    def shown_value(row: dict[str, Any], value: str, what: str) -> Html:
        return Html(f"{esc(words.label(row[value]))} <span class='sb-soft'>{esc(row[what])}</span>")

    rows = frame.to_dict("records")
    shown = columns(
        {
            "Quantity": [r["quantity"] for r in rows],
            "Post": [r["post"] for r in rows],
            "Unit": [r["unit"] for r in rows],
            "One value": [shown_value(r, "first", "first_is") for r in rows],
            "Other value": [shown_value(r, "second", "second_is") for r in rows],
            "Used here": [shown_value(r, "used", "why") for r in rows],
        }
    )
    return table(shown, "Two values for one quantity, and the one used here")


def prediction_table(
    entries: StagePrediction | Sequence[StagePrediction], caption: str = "Predicted, with the 80 % interval"
) -> Html:
    """Every predicted point of one or several frozen entries; a point that does not fit has a text instead of a
    number."""
    stages: list[StagePrediction] = [entries] if isinstance(entries, Mapping) else list(entries)
    cells: dict[str, list[Any]] = {n: [] for n in ("Sweep", "Engine", "Load", *PREDICTED)}
    for p in (p for e in stages for p in e["points"]):
        cells["Sweep"].append(p["sweep"])
        cells["Engine"].append(p["engine"])
        cells["Load"].append(place(pd.Series({"kind": None} | dict(p) | {"repeats_prompts": repeats_prompts(p)})))
        fits = p.get("fits", True)
        for name, (metric, unit) in PREDICTED.items():
            m = p["metrics"].get(metric) if fits else None
            value = math.nan if m is None or m["value"] is None else float(m["value"])
            low, high = (m and interval(m)) or (math.nan, math.nan)
            missing = p.get("note") if name == "TTFT" and not fits else None
            cells[name].append(missing if math.isnan(value) else with_range(value, low, high, unit))
    return table(columns(cells), caption, right=list(PREDICTED))


def frozen_stages(entries: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Html:
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
    return box("Frozen", pairs)


def stamps(predictions: Mapping[str, Any]) -> Html:
    """All frozen stages with their times."""
    return frozen_stages(predictions["frozen"]) if predictions.get("frozen") else Html("<p>Nothing was frozen.</p>")


def constants(entries: Sequence[Mapping[str, Any]]) -> Html:
    """The calibrated constants of each engine, prior and posterior, with notes on what the data do not determine."""
    parts = []
    for e in entries:
        for engine, fitted in e["constants"].items():
            rows = fitted["constants"]
            shown = {n: words.seconds if c["unit"] == "s" else words.label for n, c in rows.items()}
            frame = columns(
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
                table(frame, f"Constants of {engine} ({fitted['stage']})", right=["Value", "80 % interval", "Prior"])
            )
            parts.append(notes_box(f"Notes on the calibration of {engine}", fitted["notes"]))
    return Html("".join(parts))


def effective_rates(frame: pd.DataFrame, gpu: Any) -> Html:
    """Bandwidth and compute rate that C = 1 points reached, and their share of the datasheet."""
    if frame.empty:
        return Html("<p>No C = 1 point was measured.</p>")
    headers = {
        "sweep": "Sweep",
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
