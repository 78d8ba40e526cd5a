"""The predictor for a setting, calibrated on the loaded run if that run used the setting's GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..common.errors import ServebookError
from ..common.predicted_point import PredictedPoint, PredictedValue, interval
from ..config.params import HardwareParams, Load, ModelParams, NaiveEngine, RunParams, VllmEngine
from ..config.points import PointSpec
from ..predictor import server_limits
from ..predictor.calibration import Z80
from ..predictor.forecaster import Forecaster, forecaster
from . import runs
from .setting import NAMES, SERVING, Setting, checked, engine_of

SAMPLES = 4  # draws behind an interval; a run's own predictions take 18
# Relative sd that a change of the weights' or the KV cache's type adds to what was learned without it: the residuals of
# the one such change that was measured, fp8 weights predicted from the bf16 run on an H200 (15 points, vLLM 0.26):
# rms 12 % of TPOT and of the output rate, and the reverse 8 and 10 %
TYPE_CHANGE = 0.12
PLACE = ("sweep", "engine", "point")


def of(s: Setting) -> Forecaster:
    """The predictor for a setting's server; kept, for it does not depend on the load."""
    return _forecaster(_server_of(s), _version(s))


def point(s: Setting, spec: PointSpec, hit_share: float = 0.0) -> PredictedPoint:
    """The predicted point of the setting's server; simulated once and then cached. The interval is wider if the
    setting changes the type of weights or KV cache that calibration used."""
    own = replace(spec, sweep="explore", engine="vllm", point="")
    found = _point(_server_of(s), _version(s), own, hit_share).copy()
    found["sweep"], found["engine"], found["point"] = spec.sweep, spec.engine, spec.point
    if not (extra := type_change(s)):
        return found
    found["metrics"] = {name: _widened(m, extra) for name, m in found["metrics"].items()}
    return found


@lru_cache(maxsize=1024)
def _point(server: Setting, version: int, spec: PointSpec, hit_share: float) -> PredictedPoint:
    return _forecaster(server, version).point(spec, hit_share)


def _server_of(s: Setting) -> Setting:
    """The setting without its load and its price."""
    blank = Setting(prompt_tokens=1, output_tokens=1, concurrency=1)
    keep = ("model", "gpu", "engine", "quantization", "kv_cache_dtype", "dtype", *SERVING, "run")
    return replace(blank, **{k: getattr(s, k) for k in keep})


def _version(s: Setting) -> int:
    """Another number when points came to the loaded run."""
    return runs.read_run(s.run).version if s.run else 0


def _widened(m: PredictedValue, sd: float) -> PredictedValue:
    value, span = m["value"], interval(m)
    if span is None or not 0 < span[0] <= value:
        return m
    half = math.hypot(math.log(span[1] / span[0]) / 2, Z80 * sd)
    return {"value": value, "low": value * math.exp(-half), "high": value * math.exp(half)}


def learns_from(s: Setting) -> runs.Run | None:
    """The run whose C = 1 points the constants come from: the loaded one, where the GPU is its own."""
    if s.run is None:
        return None
    run = runs.read_run(s.run)
    engine = s.engine if s.engine in run.params.engines else engine_of(run, s.engine)
    return run if engine is not None and s.card.name == run.gpu.name else None


def type_change(s: Setting) -> float:
    """The relative sd to add: TYPE_CHANGE if weights or KV cache have another type than in the calibration run."""
    if (run := learns_from(s)) is None:
        return 0.0
    shape, own = s.shape, run.shape
    types = ("weight_bits", "compute_dtype", "kv_bytes_per_element")
    return TYPE_CHANGE if any(getattr(shape, t) != getattr(own, t) for t in types) else 0.0


@lru_cache(maxsize=256)
def _forecaster(s: Setting, version: int) -> Forecaster:
    run = runs.read_run(s.run) if s.run else None
    known = list(run.params.engines) if run else []
    if s.engine not in (*NAMES, *known):
        raise ServebookError(
            f"no engine {s.engine!r}", "explore", f"There are: {', '.join({**NAMES, **dict.fromkeys(known)})}"
        )
    name = (s.engine if s.engine in known else engine_of(run, s.engine)) if run else None
    given = {} if s.naive else {k: v for k in SERVING if (v := getattr(s, k)) is not None}
    if run is None or name is None:
        made = NaiveEngine(kind="naive") if s.naive else checked(VllmEngine, kind="vllm", **given)
        return forecaster(_alone(NAMES[s.engine], made, Load()), NAMES[s.engine], s.shape, s.card, samples=SAMPLES)
    engine = run.params.engines[name]
    if isinstance(engine, VllmEngine):
        engine = checked(VllmEngine, **(engine.model_dump() | given))
    params = _alone(name, engine, run.params.load)
    if s.card.name != run.gpu.name:  # another GPU: nothing learned here is known to hold there
        return forecaster(params, name, s.shape, s.card, samples=SAMPLES)
    base = _calibrated(run.name, name, version)
    facts = run.facts.get(name) or {}
    as_run = replace(s.shape, name="") == replace(run.shape, name="") and all(
        given.get(k) in (None, getattr(run.params.engines[name], k, None)) for k in SERVING
    )
    if not as_run:
        # the constants are shares of datasheet figures, so they hold for other limits and weights on the same GPU
        limits = _still_true(facts, s, run)
        if not isinstance(engine, VllmEngine):  # assumed to have these settings, too, though not started with them
            limits |= given
        server = server_limits.server(name, engine, s.shape, run.gpu, limits)
        return Forecaster(server, base.calibration, base.load, SAMPLES, base.seed, running_gauge=base.running_gauge)
    return base


@lru_cache(maxsize=16)
def _calibrated(name: str, engine: str, version: int) -> Forecaster:
    """The predictor of a run's own engine, calibrated on its C = 1 points."""
    run = runs.read_run(name)
    f = forecaster(
        run.params, engine, run.shape, run.gpu, facts=run.facts.get(engine), measured=run.alone(engine), samples=SAMPLES
    )
    f.running_gauge = run.published
    return f


def _still_true(facts: Mapping[str, Any], s: Setting, run: runs.Run) -> dict[str, Any]:
    """The limits that the run's engine reported, without those that the setting changes."""
    gone = {k for k in SERVING if getattr(s, k) is not None}
    if replace(s.shape, name="") != replace(run.shape, name="") or s.gpus > 1:
        gone |= {"kv_cache_tokens", "kv_cache_gib"}
    return {k: v for k, v in facts.items() if k not in gone}


def _alone(name: str, engine: Any, load: Load) -> RunParams:
    """Parameters of a run with only this engine, for the predictor."""
    model_params, hardware_params = ModelParams(config="tiny-qwen2", weights="dummy"), HardwareParams(gpu="H200")
    return RunParams(
        run="explore", title="explore", model=model_params, hardware=hardware_params, engines={name: engine}, load=load
    )


__all__ = ["SAMPLES", "learns_from", "of", "point", "type_change"]
