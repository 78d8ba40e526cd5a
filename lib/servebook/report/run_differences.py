"""What sets stored runs apart: the rates they give, their cost, what differs, what cannot be compared and why."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ..charts import words
from ..scoring import score
from .answer import million, money, side_by_side
from .markup import Html, esc, notes_box

DOUBTED = Html('<span class="sb-doubt" title="the audit of this run doubts the point">○</span>')
Runs = dict[str, dict[str, Any]]  # by name: points, frozen, params, gpu


def headline(runs: Runs, ratios: pd.DataFrame, base: str) -> Html:
    """Which run gives how much of the baseline's output rate, and what differs between the two."""
    parts = []
    for run, own in ratios.groupby("run", sort=False):
        low, high = own["ratio"].min(), own["ratio"].max()
        span = f"{words.number(low)} to {words.number(high)}" if high > 1.005 * low else words.number(low)
        count = f"{len(own)} shared point{'s' * (len(own) > 1)}"
        differs = words.listing(_differences(runs[str(run)], runs[base])) or "nothing that the parameters name"
        parts.append(
            f"{run} gives {span} times the output tokens/s of {base} over {count}{_costs(runs, own, str(run), base)}; "
            f"they differ in {differs}."
        )
    return Html(f'<p class="sb-claim">{esc(" ".join(parts))}</p>')


def _costs(runs: Runs, own: pd.DataFrame, run: str, base: str) -> str:
    """What a million output tokens cost on both at the shared point with the largest rate, where both have a price."""
    prices = [_price(runs[name]) for name in (run, base)]
    if not all(prices):
        return ""
    best = own.loc[own["output_tok_per_s"].idxmax()]
    one, two = (
        money(million(best[column], price))
        for column, price in zip(("output_tok_per_s", "output_tok_per_s_base"), prices, strict=True)
    )
    currency = (runs[run]["params"].get("hardware") or {}).get("currency", "USD")
    return f", so a million of them cost {currency} {one} against {two} at {best['where']}"


def _price(run: dict[str, Any]) -> float:
    """Price per hour of all hardware of the run; 0 if none was given."""
    return float((run["params"].get("hardware") or {}).get("price_per_hour") or 0.0)


def economics(runs: Runs, frame: pd.DataFrame) -> Html:
    """Tokens/s of one user and of one GPU, and the price of a million output tokens: a table a workload and engine that
    several runs measured."""
    rows = frame[(frame["kind"] == "concurrency") & frame["tpot_mean_s"].gt(0) & ~score.is_repeated(frame)]
    rows = rows[rows["output_tok_per_s"] > 0]
    rows = rows.assign(
        user=1 / rows["tpot_mean_s"],
        gpu=[r.output_tok_per_s / _gpus(runs[r.run], r.engine) for r in rows.itertuples()],
        cost=[million(r.output_tok_per_s, _price(runs[r.run])) or None for r in rows.itertuples()],
    )
    shown: dict[str, tuple[str, Any]] = {"user": ("tok/s/user", words.number), "gpu": ("tok/s/GPU", words.number)}
    if rows["cost"].notna().any():
        currency = {(r["params"].get("hardware") or {}).get("currency", "USD") for r in runs.values()}
        shown["cost"] = (f"{'/'.join(sorted(currency))} per 1M", lambda v: money(v) if v == v else "–")
    made = []
    for (engine, _), own in rows.groupby(["engine", "workload"], sort=True):
        if own["run"].nunique() > 1:
            of = f"{engine}, {own['prompt_tokens'].iloc[0]:,.0f} tokens in, {own['output_tokens'].iloc[0]:,.0f} out"
            # a run in the engine's place: a column each
            caption = f"{of}: tokens/s of one user (1 / TPOT), of one GPU, and the price of a million output tokens"
            made.append(side_by_side(own.assign(engine=own["run"]), shown, f"{caption}; ○: doubted", mark=DOUBTED))
    return Html("".join(made))


def _gpus(run: dict[str, Any], engine: str) -> int:
    how = (run["params"].get("engines") or {}).get(engine) or {}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return math.prod(int(how.get(size) or 1) for size in sizes)


def _differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """What two runs do not share, each with both values."""
    found = []
    for what, value in (
        ("model", lambda r: _model(r["params"])), ("GPU", lambda r: r["gpu"]),
        ("weights", lambda r: (m := r["params"].get("model") or {}).get("quantization") or m.get("dtype")),
        ("KV cache", lambda r: kv_cache(r["params"].get("model") or {})),
    ):  # fmt: skip
        mine, theirs = value(one), value(two)
        if mine != theirs:
            found.append(f"{what} ({mine} against {theirs})")
    return found


def _model(params: Any) -> Any:
    model = params.get("model") or {}
    return model.get("hub") or model.get("config") or model.get("path")


def kv_cache(model: Any) -> str | None:
    kind = model.get("kv_cache_dtype")
    return str(model.get("dtype") if kind in (None, "auto") else kind)


def apart(runs: Runs, frame: pd.DataFrame, ratios: pd.DataFrame, base: str) -> Html:
    """Runs that share no point with the baseline, engines that only one run has, and why."""
    own = frame[frame["run"] == base]
    lines = []
    for name in runs:
        rows = frame[frame["run"] == name]
        if name != base and name not in set(ratios["run"]):
            why = _differences(runs[name], runs[base])
            if not set(rows["engine"]) & set(own["engine"]):
                why.append(f"engine ({_listed(rows['engine'])} against {_listed(own['engine'])})")
            if not set(rows["workload"]) & set(own["workload"]):
                why.append(f"load ({_loads(rows)}; {base} has {_loads(own)})")
            lines.append(f"{name} with {base}: no load was measured in both. They differ in {words.listing(why)}.")
    for engine, rows in frame.groupby("engine", sort=True):
        if rows["run"].nunique() == 1:
            lines.append(f"Engine {engine}: measured in {rows['run'].iloc[0]} alone.")
    return notes_box("Not comparable", lines)


def _listed(values: Any) -> str:
    return words.listing(sorted({str(v) for v in values}))


def _loads(frame: pd.DataFrame) -> str:
    """The loads of a run's points in words: kinds with their lengths."""
    lengths_by_kind: dict[str, dict[str, None]] = {}
    for r in frame.itertuples():
        lengths = "" if r.kind == "prompt_length" else f"{r.prompt_tokens:,.0f} in, "
        lengths_by_kind.setdefault(str(r.kind), {})[f"{lengths}{r.output_tokens:,.0f} out"] = None
    return "; ".join(f"{kind.replace('_', ' ')} {' and '.join(each)}" for kind, each in lengths_by_kind.items())
