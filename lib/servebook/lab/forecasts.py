"""Predictions to play with: one load, several side by side, a curve, a curve with measured points on it.

Every function takes settings by name (see Setting) and returns an object that shows itself in a cell and holds its
figures as attributes. Nothing is measured and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import model
from ..common.errors import ServebookError
from ..hardware import catalog as hardware
from ..predictor import capacity, explain
from ..predictor.predict import Forecaster
from ..predictor.scenario import Outcome, Scenario, whole_rounds
from . import runs
from .answers import Curve, Forecast, SideBySide
from .runs import Run
from .setting import SAMPLES, Setting, engine_of, of_run

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GLANCE_ARRIVALS = 200  # of an open loop
HOW = f"80 % intervals, from {SAMPLES} draws of the constants (a run's own come from more)."


def predict(setting: Setting | None = None, **settings: Any) -> Forecast:
    """One load predicted: `predict(model="qwen2.5-7b", gpu="H200", prompt_tokens=512, concurrency=16)`.

    settings: fields of Setting; `setting`: what they change, else Setting's defaults, or the run's where `run` is
    given. Raises ServebookError for an unknown name and a value that cannot be.
    """
    s = setting_from(setting, settings)
    f, spec = s.forecaster(), s.spec()
    point = f.point(spec)
    met = capacity.carry(f, spec, s.slo, 0.0).met_share if point["fits"] else None
    return Forecast(s, point, met, _kv_tokens(f), HOW)


def glance(setting: Setting | None = None, **settings: Any) -> Forecast:
    """The same from one simulation of fewer requests, without intervals: fast enough to follow a slider."""
    s = setting_from(setting, settings)
    f, spec = s.forecaster(), s.spec()
    refusal = f.server.refuses(s.prompt_tokens, s.output_tokens) or f.overload(spec)
    point: dict[str, Any] = {"metrics": {}, "fits": False, "note": refusal}
    if refusal:
        return Forecast(s, point, None, _kv_tokens(f))
    scenario = Scenario(f.server, spec, f.load, running_gauge=f.running_gauge)
    count = GLANCE_ARRIVALS if s.rate_per_s else whole_rounds(max(120, 3 * s.concurrency), s.concurrency)
    result = scenario.simulate(f.best, f.seed, count, log=True)
    outcome = scenario.summarize(result, f.best)
    if s.rate_per_s:  # a simulated window happens to hold more or fewer arrivals than the rate asks for
        tokens = outcome.output_tok_per_s * s.rate_per_s / outcome.request_rate_per_s
        outcome = replace(outcome, request_rate_per_s=s.rate_per_s, output_tok_per_s=tokens)
    parts = explain.breakdown(scenario, f.best, outcome, result)
    point |= {
        "metrics": {m: {"value": getattr(outcome, m)} for m in Outcome.METRICS}, "fits": True, "breakdown": parts,
        "waterfall": explain.waterfall(f.best, parts["tpot_s"]), "running_mean": outcome.running_mean,
    }  # fmt: skip
    how = f"A glance: one simulation of {count:,} requests. The interval follows."
    return Forecast(s, point, capacity.met_share(result, s.slo), _kv_tokens(f), how)


def _kv_tokens(f: Forecaster) -> int:
    """Of all replicas together."""
    return f.server.kv_tokens * f.server.layout.data


def compare(setting: Setting | None = None, /, **cases: Mapping[str, Any]) -> SideBySide:
    """A setting and changes to it side by side: `compare(s, fp8={"quantization": "fp8"}, a40={"gpu": "A40"})`."""
    s = setting or Setting()
    return SideBySide(
        {"as it is": glance(s)} | {name.replace("_", " "): glance(s, **changes) for name, changes in cases.items()}
    )


def what_if(setting: Setting | None = None, *, gpus: Sequence[str] = (), **settings: Any) -> SideBySide:
    """The usual questions side by side: fp8 weights, fp8 KV cache, half and twice the token budget, other GPUs."""
    s = setting_from(setting, settings)
    cases: dict[str, dict[str, Any]] = {}
    if not s.naive:
        if s.quantization is None:
            cases["fp8 weights"] = {"quantization": "fp8"}
        if s.kv_cache_dtype == "auto":
            cases["fp8 KV cache"] = {"kv_cache_dtype": "fp8"}
        budget, seats = s.forecaster().server.config.max_num_batched_tokens, s.forecaster().server.config.max_num_seqs
        if budget // 2 >= seats:
            cases[f"budget {budget // 2:,}"] = {"max_num_batched_tokens": budget // 2}
        cases[f"budget {2 * budget:,}"] = {"max_num_batched_tokens": 2 * budget}
    cases |= {name: {"gpu": name, "price_per_hour": 0.0} for name in gpus}
    return SideBySide({"as it is": glance(s)} | {name: _tried(s, changes) for name, changes in cases.items()})


def _tried(s: Setting, changes: Mapping[str, Any]) -> Forecast:
    """A case, or why there is none (a GPU without bfloat16, say)."""
    try:
        return glance(s, **changes)
    except ServebookError as error:
        return Forecast(s.but(**changes), {"metrics": {}, "fits": False, "note": error.line()}, None, 0)


def curve(setting: Setting | None = None, *, concurrency: Iterable[int] = CONCURRENCIES, **settings: Any) -> Curve:
    """TTFT, TPOT and output rate along the concurrency."""
    s = setting_from(setting, settings)
    return _curve(s, "explore", "concurrency", [s.but(concurrency=int(c), rate_per_s=None) for c in concurrency], [])


def against(
    run: str, sweep: str | None = None, engine: str | None = None, setting: Setting | None = None, **settings: Any
) -> Curve:
    """A run's measured points of a sweep laid over the prediction for its own setting, or for a changed one.

    run: a name of `all_runs()`, or a folder. sweep: its first unless given. The prediction has learned from the run's
    C = 1 points where the GPU is the run's.
    """
    stored = runs.load(run)
    name = engine or next(iter(measured_engines(stored)), None)
    if name is None or not (sweeps := stored.sweeps(name)):
        raise ServebookError(
            "no sweep was measured", run, f"It has points of {', '.join(measured_engines(stored)) or 'nothing'}"
        )
    if sweep is None:
        sweep = sweeps[0]
    if sweep not in sweeps:
        raise ServebookError(f"no sweep {sweep!r} of {name}", run, f"There are: {', '.join(sweeps)}")
    s = setting_from(setting or of_run(stored, name, sweep), settings)
    measured = stored.sweep(name, sweep)
    kind = kind_of(measured)
    axis = {"prompt_length": "prompt_tokens", "arrival_rate": "rate_per_s"}.get(kind, "concurrency")
    values = sorted({p[axis] for p in measured if p.get(axis)})
    at = [s.but(**{"rate_per_s": None} | {axis: v if axis == "rate_per_s" else int(v)}) for v in values]
    return _curve(s, sweep, kind, at, measured, name, run)


def _curve(
    s: Setting, sweep: str, kind: str, at: Sequence[Setting], measured: list[dict[str, Any]], engine: str | None = None,
    run: str | None = None,
) -> Curve:  # fmt: skip
    f = s.forecaster()
    name = engine or f.server.name
    shares = {
        (p["prompt_tokens"], p["output_tokens"], p.get("concurrency")): p.get("cache_hit_share") for p in measured
    }
    predicted = []
    for each in at:
        spec = each.spec(sweep, name)
        hit = shares.get((spec.prompt_tokens, spec.output_tokens, spec.concurrency)) or 0.0
        predicted.append(f.point(spec, hit if hit > HIT else 0.0))
    return Curve(s, sweep, kind, predicted, measured, run)


HIT = 0.02  # prefix-cache hits of a measured point above which its prediction takes them into account


def kind_of(measured: Sequence[Mapping[str, Any]]) -> str:
    """What a sweep's points differ in: concurrency, prompt_length or arrival_rate."""
    if any(p.get("rate_per_s") for p in measured):
        return "arrival_rate"
    return "prompt_length" if len({p["prompt_tokens"] for p in measured}) > 1 else "concurrency"


def measured_engines(run: Run) -> list[str]:
    """Engines with points, those that batch first."""
    found = [n for n in run.params.engines if any(p["engine"] == n for p in run.points)]
    return sorted(found, key=lambda n: run.params.engines[n].kind == "naive")


def all_runs() -> list[str]:
    """Runs that `against` and the panel can load: own ones, the reference runs, published points."""
    return list(runs.names())


def all_models() -> list[str]:
    """Packaged models; a folder with config.json and a Hub id do as well."""
    return model.packaged()


def all_gpus() -> list[str]:
    """GPUs of the catalog."""
    return list(hardware.catalog())


def setting_from(base: Setting | None, changes: Mapping[str, Any]) -> Setting:
    """The setting that changes make of `base`, of the run that they name, or of the defaults."""
    if base is None and changes.get("run"):
        run = runs.load(changes["run"])
        asked, known = changes.get("engine") or "vllm", run.params.engines
        engine = asked if asked in known else engine_of(run, asked) or next(iter(known))
        base = of_run(run, engine, next(iter(run.sweeps(engine)), None))
    return (base or Setting()).but(**changes)


__all__ = [
    "Curve", "Forecast", "Setting", "SideBySide", "against", "all_gpus", "all_models", "all_runs", "compare",
    "curve", "glance", "measured_engines", "predict", "setting_from", "what_if",
]  # fmt: skip
