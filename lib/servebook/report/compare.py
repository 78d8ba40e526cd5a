"""Several stored runs as one page: a table of ratios with intervals, and the sweeps' charts with one line a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from .. import charts
from ..charts import words
from ..common import files, stats
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import StagePrediction
from ..config.points import CALIBRATION
from ..run_folder import frozen_predictions, results, stored_params
from ..run_folder.layout import RunFiles
from ..scoring import score, standing
from . import run_differences
from .markup import Html, columns, table, where, with_range
from .page import Body, write_page
from .render import downloads

DRAWN = {
    "concurrency": (charts.throughput, charts.latencies),
    "prompt_length": (charts.prompt_length,),
    "arrival_rate": (charts.arrival_rate,),
}


def compare(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Write one page that sets stored runs side by side and return its path; the first run is the baseline.

    Raises ServebookError for fewer than two runs, a folder without a run, or runs that share no point.
    """
    folders = [Path(d) for d in run_dirs if not Path(d).is_file()]  # a shell's * names the files beside the runs too
    if len(folders) < 2:
        raise ServebookError("a single run cannot be compared", "compare", "Give two or more run folders")
    runs: dict[str, dict[str, Any]] = {}
    for run_dir in folders:
        points = results.read_points(run_dir)
        if not points:
            raise ServebookError(
                "no measured point is stored here", str(run_dir), "Give a folder under outputs/ that holds a run"
            )
        name = run_dir.name if run_dir.name not in runs else str(run_dir)
        frozen, asked = frozen_predictions.read(run_dir), stored_params.read(run_dir)
        runs[name] = {"points": points, "frozen": frozen, "params": asked, "gpu": _gpu(run_dir)}
    names = list(runs)
    title = f"{words.listing(names)} compared"
    body = _body(runs).chapter(title)
    return write_page(Path(out), [body], [], {
        "title": title, "description": f"Measured runs side by side, {names[0]} as the baseline.",
        "run": ", ".join(names), "stamp": [], "kicker": "Runs side by side",
        "downloads": [d for f in folders for d in downloads(f) if d["name"] == "points.csv"],
    })  # fmt: skip


def _gpu(run_dir: Path) -> str | None:
    """The hardware by the name it was found under, where the run stored it."""
    stored = files.read_object(RunFiles(run_dir).hardware, "gpu")
    return stored["gpu"]["name"] if stored else None


def _body(runs: dict[str, dict[str, Any]]) -> Body:
    body = Body()
    frame = _long(runs)
    base = next(iter(runs))
    ratios = ratio_frame(frame, base)
    body.add(run_differences.headline(runs, ratios, base))
    body.add(run_differences.apart(runs, frame, ratios, base))
    body.section("The runs")
    body.add(runs_table(runs))
    body.section("Ratios")
    body.add(ratio_table(ratios, base))
    body.section("What one user gets, what a GPU gives, and what it costs")
    body.add(run_differences.economics(runs, frame))
    for engine, own in frame.groupby("engine", sort=True):
        shared = own.groupby("workload")["run"].nunique()
        if not (shared > 1).any():
            continue  # one run alone has it: nothing to set side by side
        body.section(f"Engine {engine}")
        for workload, rows in own.groupby("workload", sort=True):
            if rows["run"].nunique() < 2:
                continue
            points, frozen = _as_engines(runs, str(engine), str(workload))
            kind = str(rows["kind"].iloc[0])
            draw = DRAWN.get(kind, DRAWN["concurrency"])
            for f in draw:
                body.add(charts.html_figure(f(points, frozen, f"{engine}-{workload}")))
    return body


def _workload(row: Any) -> str:
    """What was sent to a point, a MeasuredPoint or a row of its columns: runs name their sweeps as they like."""
    prompt = "" if row.kind == "prompt_length" else f"{row.prompt_tokens:.0f}-"
    return f"{row.kind}-{prompt}{row.output_tokens:.0f}".replace("_", "-")


def _long(runs: dict[str, dict[str, Any]]) -> pd.DataFrame:
    frames = []
    for name, run in runs.items():
        frame = score.complete_frame(run["points"])
        frame = frame[(frame["sweep"] != "calibration") & (frame["verdict"] != "invalid")].copy()
        frame["run"], frame["workload"] = name, [_workload(r) for _, r in frame.iterrows()]
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _as_engines(
    runs: dict[str, dict[str, Any]], engine: str, workload: str
) -> tuple[list[MeasuredPoint], list[StagePrediction]]:
    """One engine's points and predictions with the run in the engine's place, as the charts draw them."""
    points: list[MeasuredPoint] = []
    frozen: list[StagePrediction] = []
    sweep = f"{engine}-{workload}"
    for name, run in runs.items():
        kept = {}
        for p in run["points"]:
            if p.engine == engine and p.sweep != CALIBRATION and _workload(p) == workload:
                points.append(replace(p, engine=name, sweep=sweep))
                kept[(p.sweep, p.point_id)] = p
        forecast = score.prediction_frame(run["frozen"])
        best = score.best_stage(forecast, engine)
        for entry in standing.standing(run["frozen"]["frozen"]):
            if entry["stage"] == best:
                own = [p for p in entry["points"] if p["engine"] == engine and (p["sweep"], p["point"]) in kept]
                frozen.append({"stage": "datasheet" if best == "datasheet" else f"calibrated:{name}",
                               "points": [p | {"engine": name, "sweep": sweep} for p in own]})  # fmt: skip
    return points, frozen


def runs_table(runs: dict[str, dict[str, Any]]) -> Html:
    """What each run was: model, hardware, engines, points, failures."""
    rows: dict[str, list[Any]] = {k: [] for k in RUN_COLUMNS}
    for name, run in runs.items():
        p = run["params"]
        model, hardware = p.get("model") or {}, p.get("hardware") or {}
        rows["Run"].append(name)
        rows["Model"].append(model.get("hub") or model.get("config") or model.get("path"))
        rows["Hardware"].append(run["gpu"] or hardware.get("gpu") or (hardware.get("figures") or {}).get("name"))
        rows["Weights"].append(model.get("quantization") or model.get("dtype"))
        rows["KV cache"].append(run_differences.kv_cache(model))
        rows["Engines"].append(", ".join(p.get("engines") or {}))
        rows["Points"].append(f"{len(run['points'])}")
        price = hardware.get("price_per_hour")
        rows["Price per hour"].append(f"{price:g} {hardware.get('currency', 'USD')}" if price else None)
        rows["Cheapest, per 1M output tokens"].append(_cheapest(run))
    return table(columns(rows), "The runs compared", right=("Points", "Price per hour"))


RUN_COLUMNS = ("Run", "Model", "Weights", "KV cache", "Hardware", "Engines", "Points", "Price per hour",
               "Cheapest, per 1M output tokens")  # fmt: skip


def _cheapest(run: dict[str, Any]) -> str | None:
    """What a million output tokens cost at the run's best rate; None without a price."""
    hardware = run["params"].get("hardware") or {}
    frame = score.complete_frame(run["points"])
    rates = frame[frame["verdict"] != "invalid"]["output_tok_per_s"].dropna()
    if not hardware.get("price_per_hour") or rates.empty:
        return None
    cost = hardware["price_per_hour"] / 3600 / rates.max() * 1e6
    return f"{hardware.get('currency', 'USD')} {words.number(cost, 2)} at {words.number(rates.max())} tok/s"


def ratio_frame(frame: pd.DataFrame, base: str) -> pd.DataFrame:
    """Every point that the baseline and another run share: output rate and TTFT as ratios to the baseline, with the
    95 % interval of the rate's ratio."""
    keys = ["engine", "workload", "point"]
    columns = [*keys, "repeats_prompts", "concurrency",
               "rate_per_s", "prompt_tokens", "output_tokens", "output_tok_per_s",
               "output_tok_per_s_ci_low", "output_tok_per_s_ci_high", "ttft_mean_s", "tpot_mean_s"]  # fmt: skip
    columns += [c for c in ("verdict",) if c in frame]
    first = frame[frame["run"] == base][columns]
    both = frame[frame["run"] != base][["run", *columns]].merge(first, on=keys, suffixes=("", "_base"))
    rows = []
    for _, r in both.iterrows():
        ratio = r["output_tok_per_s"] / r["output_tok_per_s_base"]
        spans = [(r[f"output_tok_per_s_ci_low{tail}"], r[f"output_tok_per_s_ci_high{tail}"]) for tail in ("", "_base")]
        low, high = stats.ratio_interval(ratio, *spans)
        rows.append({
            "run": r["run"], "engine": r["engine"], "workload": r["workload"], "where": where(r),
            "output_tok_per_s": r["output_tok_per_s"], "output_tok_per_s_base": r["output_tok_per_s_base"],
            "ratio": ratio, "ratio_low": low, "ratio_high": high,
            "ttft_ratio": r["ttft_mean_s"] / r["ttft_mean_s_base"],
            "tpot_ratio": r["tpot_mean_s"] / r["tpot_mean_s_base"],
        })  # fmt: skip
    if not rows:
        held = "; ".join(f"{run} has {_held(own)}" for run, own in frame.groupby("run", sort=False))
        raise ServebookError(
            f"no run shares a point with {base} ({held})", "compare",
            "Compare runs that name their engines alike and send the same load: kind, tokens, concurrency or rate",
        )  # fmt: skip
    return pd.DataFrame(rows)


def _held(frame: pd.DataFrame) -> str:
    """What points a run has, by engine: "vllm: concurrency-512-128 (c0001, c0004)"."""
    by_engine = {
        engine: ", ".join(f"{w} ({', '.join(p['point'])})" for w, p in own.groupby("workload"))
        for engine, own in frame.groupby("engine")
    }
    return ", ".join(f"{engine}: {workloads}" for engine, workloads in by_engine.items())


def ratio_table(ratios: pd.DataFrame, base: str) -> Html:
    each = list(ratios.itertuples())

    def ratio(value: float) -> str:
        return f"{words.number(value)}×" if math.isfinite(value) else "–"

    shown = columns({
        "Point": [r.where for r in each], "Engine": [r.engine for r in each],
        "Run": [r.run for r in each], "Output tok/s": [words.number(r.output_tok_per_s) for r in each],
        "Baseline": [words.number(r.output_tok_per_s_base) for r in each],
        "Ratio": [with_range(r.ratio, r.ratio_low, r.ratio_high, "×") for r in each],
        "TTFT ratio": [ratio(r.ttft_ratio) for r in each], "TPOT ratio": [ratio(r.tpot_ratio) for r in each],
    })  # fmt: skip
    # what is the same in every row is written once
    same = {c: shown[c].iloc[0] for c in ("Engine", "Run") if shown[c].nunique() == 1}
    of = ", ".join(f"{c.lower()} {v}" for c, v in same.items())
    shown = shown.drop(columns=list(same))
    numbers = ("Output tok/s", "Baseline", "Ratio", "TTFT ratio", "TPOT ratio")
    caption = f"Ratios to the baseline {base}{f' ({of})' if of else ''}; brackets: 95 % interval of the rates' ratio"
    return table(shown, caption, right=numbers, fold=False)
