"""Duration and cost of a run before it starts: seconds and cost of every point, and points to drop for a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..common.errors import ServebookError
from ..common.predicted_point import Prediction
from ..config.params import NaiveEngine, OpenAIEngine, RunParams
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .predict import predict_run

READ_BYTES_PER_S = 1.2e9  # assumed rate of reading weights from a local disk; downloads are not counted
POINT_OVERHEAD_S = 1.5  # connections, first scrape, writing
SHORTEST_POINT_S = 5.0  # shorter points give no useful figures


def start_seconds(params: RunParams, engine: str, shape: ModelShape, gpu: Gpu) -> float:
    """Seconds from an engine's start until it answers: assumed by kind, with weights read at 1.2 GB/s."""
    kind = params.engines[engine]
    load = shape.weight_bytes / READ_BYTES_PER_S if params.model.weights == "real" else 5.0
    if isinstance(kind, NaiveEngine):
        return 12.0 + load
    if isinstance(kind, OpenAIEngine) and kind.url:
        return 0.0
    if gpu.is_cpu:
        return 45.0 + load
    return 30.0 + load + (0.0 if kind.enforce_eager else 45.0)  # torch.compile and graph capture


def plan(
    params: RunParams,
    shape: ModelShape,
    gpu: Gpu,
    *,
    facts: Any = None,
    calibration: Any = None,
    budget_minutes: float | None = None,
    budget_cost: float | None = None,
    on_point: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The predicted seconds (with warm-up) and cost of every point and engine start, their total, and what to drop.

    With a budget, the longest points are marked as dropped until the rest is within it. The first point of every sweep
    is dropped last. An engine without points left is not started. longest_point_s: the load.max_seconds at which the
    first points of all sweeps would be within the budget; None if it is not needed, or if no limit suffices.

    Returns {"rows": [{sweep, engine, point, wall_s, cost, fits, note, dropped}], "total_s", "total_cost", "currency",
    "price_per_hour", "budget_s", "within_budget", "longest_point_s", …}. Raises ServebookError for a budget that is not
    a positive number, and for a budget in money without a price.
    """
    price = params.hardware.price_per_hour
    _check_budgets(budget_minutes, budget_cost, price)
    prediction = predict_run(params, shape, gpu, facts=facts, calibration=calibration, n_samples=2, on_point=on_point)
    rows = _rows(params, shape, gpu, prediction)
    total = sum(r["wall_s"] for r in rows)
    budgets = [60 * budget_minutes] if budget_minutes is not None else []
    if budget_cost is not None:
        budgets.append(3600 * budget_cost / price)
    most = min(budgets) if budgets else None
    limit = None if most is None else _longest_point(rows, most)
    kept = total if most is None else _drop(rows, most)
    return {
        "rows": rows,
        "total_s": total,
        "total_cost": total / 3600 * price,
        "kept_s": kept,
        "kept_cost": kept / 3600 * price,
        "currency": params.hardware.currency,
        "price_per_hour": price,
        "budget_s": most,
        "within_budget": most is None or kept <= most,
        "longest_point_s": limit,
        "assumptions": "engine start assumed by kind, weights read at 1.2 GB/s, no download, no queue for hardware",
    }


def _check_budgets(minutes: float | None, cost: float | None, price: float) -> None:
    for option, budget in (("--budget-minutes", minutes), ("--budget-cost", cost)):
        if budget is not None and not 0 < budget < math.inf:
            raise ServebookError(f"{budget:g} is not a budget", option, "Give a positive number")
    if cost is not None and not price:
        raise ServebookError(
            "--budget-cost needs a price", "hardware.price_per_hour",
            "Set it to the machine's price per hour, or use --budget-minutes",
        )  # fmt: skip


def _rows(params: RunParams, shape: ModelShape, gpu: Gpu, prediction: Prediction) -> list[dict[str, Any]]:
    """Engine starts and points with their seconds and cost; a sweep stops at its minutes_per_engine."""
    price = params.hardware.price_per_hour
    rows: list[dict[str, Any]] = []
    for engine in params.engines:
        rows.append(_row("start", engine, "start", start_seconds(params, engine, shape, gpu), price, True, None))
        spent: dict[str, float] = {}
        for p in (p for p in prediction["points"] if p["engine"] == engine):
            sweep = p["sweep"]
            minutes = params.sweeps[sweep].minutes_per_engine.get(engine) if sweep in params.sweeps else None
            wall, note = p["wall_s"] + POINT_OVERHEAD_S if p["wall_s"] else 0.0, p["note"]
            used = spent.get(sweep, 0.0)
            if minutes is not None and p["fits"] and used > 0 and used + wall > 60 * minutes:
                wall, note = 0.0, f"past minutes_per_engine ({minutes:g})"
                spent[sweep] = 60 * minutes  # a sweep stops at its first point that does not fit
            spent[sweep] = spent.get(sweep, 0.0) + wall
            rows.append(_row(sweep, engine, p["point"], wall, price, p["fits"], note))
    return rows


def _row(
    sweep: str, engine: str, point: str, wall_s: float, price: float, fits: bool, note: str | None
) -> dict[str, Any]:
    return {
        "sweep": sweep, "engine": engine, "point": point, "wall_s": wall_s, "cost": wall_s / 3600 * price, "fits": fits,
        "note": note, "dropped": False,
    }  # fmt: skip


FIXED = ("start", "calibration")  # rows that are needed for any other row of the engine


def _drop(rows: list[dict[str, Any]], budget_s: float) -> float:
    """Mark the longest points as dropped until the rest is within the budget; return the seconds kept."""
    total = sum(r["wall_s"] for r in rows)
    first = _first(rows)
    own = [r for r in rows if r["sweep"] not in FIXED and r["wall_s"] > 0]
    for r in sorted(own, key=lambda r: (any(r is f for f in first), -r["wall_s"])):
        if total <= budget_s:
            break
        r["dropped"] = True
        total -= r["wall_s"]
        if all(o["dropped"] for o in own if o["engine"] == r["engine"]):  # no point left: do not start the engine
            for o in (o for o in rows if o["engine"] == r["engine"] and o["sweep"] in FIXED):
                o["dropped"] = True
                total -= o["wall_s"]
    return float(total)


def _first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first point of every sweep and engine."""
    found = {(r["sweep"], r["engine"]): r for r in reversed(rows) if r["sweep"] not in FIXED and r["wall_s"] > 0}
    return list(found.values())


def _longest_point(rows: list[dict[str, Any]], budget_s: float) -> float | None:
    """Maximum whole seconds per point at which the first points of all sweeps are within the budget; None if it is not
    needed, or if no limit suffices."""
    fixed = sum(r["wall_s"] for r in rows if r["sweep"] in FIXED)
    first = sorted(r["wall_s"] for r in _first(rows))
    if not first or fixed + sum(first) <= budget_s:
        return None
    left = budget_s - fixed
    for i, seconds in enumerate(first):
        share = left / (len(first) - i)
        if seconds > share:
            limit = math.floor(share - POINT_OVERHEAD_S)
            return float(limit) if limit >= SHORTEST_POINT_S else None
        left -= seconds
    return None


def _least(rows: list[dict[str, Any]], engine: str) -> float:
    """Seconds of an engine's start, calibration and shortest point."""
    own = [r for r in rows if r["engine"] == engine and r["wall_s"] > 0]
    points = [r["wall_s"] for r in own if r["sweep"] not in FIXED]
    return sum(r["wall_s"] for r in own if r["sweep"] in FIXED) + min(points) if points else 0.0


def plan_text(plan: dict[str, Any]) -> str:
    """The plan as a table for the terminal."""
    money = plan["price_per_hour"] > 0
    lines = [f"{'sweep':<16}{'engine':<10}{'point':<14}{'seconds':>9}" + (f"{plan['currency']:>9}" if money else "")]
    for r in plan["rows"]:
        cost = f"{r['cost']:>9.3f}" if money else ""
        note = "drop for the budget" if r["dropped"] else "" if r["fits"] and not r["note"] else r["note"] or ""
        lines.append(f"{r['sweep']:<16}{r['engine']:<10}{r['point']:<14}{r['wall_s']:>9.0f}{cost}  {note}".rstrip())
    total = f"total {plan['total_s'] / 60:.1f} min"
    total += f", {plan['currency']} {plan['total_cost']:.2f}" if money else ""
    lines.append(total)
    if plan["budget_s"] is not None:
        kept, budget = plan["kept_s"] / 60, plan["budget_s"] / 60
        lines.append(f"without the dropped points {kept:.1f} min, within the budget of {budget:.1f} min")
        if plan["longest_point_s"]:
            limit = plan["longest_point_s"]
            lines.append(f"load.max_seconds: {limit:g} would keep the first point of every sweep within the budget")
        elif not any(r["wall_s"] and not r["dropped"] for r in plan["rows"]):
            needed = min(s for e in {r["engine"] for r in plan["rows"]} if (s := _least(plan["rows"], e)))
            lines.append(f"no point fits: start, calibration and the shortest point take {needed / 60:.1f} min")
    lines.append(plan["assumptions"])
    return "\n".join(lines)
