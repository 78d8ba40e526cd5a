"""Predicts every point of a run with an 80 % interval (forecaster.py), before it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import PredictedPoint, Prediction
from ..config.params import ArrivalRateSweep, RunParams
from ..config.points import PointSpec, RepeatedPoint
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .forecaster import SAMPLES, Forecaster, forecaster
from .server_limits import PredictedServer

__all__ = ["PUBLISHED_JITTER_S", "Forecaster", "forecaster", "inputs", "predict_published", "predict_run"]

PUBLISHED_JITTER_S = 0.05  # assumed client jitter of the posts, which state none: C = 1 figures allow 0 to 0.05


def predict_run(
    params: RunParams,
    shape: ModelShape,
    gpu: Gpu,
    *,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    calibration: Sequence[MeasuredPoint] | None = None,
    engines: Sequence[str] | None = None,
    capacity_per_s: Mapping[str, float] | None = None,
    n_samples: int = SAMPLES,
    on_point: Callable[[int, int], None] | None = None,
) -> Prediction:
    """The prediction of every point of the run, for all engines or those in `engines`.

    facts: {engine: the server's facts}. calibration: measured C = 1 points, on which each engine is calibrated.
    capacity_per_s: {"sweep/engine": a capacity that is already final}. on_point(done, total) is called before each
    point of an engine. Returns {"points": [...], "constants": {engine: ...}, "capacity_per_s": {"sweep/engine":
    requests/s to which a sweep's shares refer}, "servers": {engine: limits}, "inputs": all inputs of the prediction}.
    """
    out: Prediction = {"points": [], "constants": {}, "capacity_per_s": {}, "servers": {}}
    for name in engines or params.engines:
        measured = [p for p in calibration or () if p.engine == name]
        f = forecaster(params, name, shape, gpu, facts=(facts or {}).get(name), measured=measured, samples=n_samples)
        out["constants"][name] = f.calibration.as_dict()
        out["servers"][name] = _limits(f.server)
        specs = params.calibration_points(name)
        for sweep, s in params.sweeps.items():
            capacity = None
            if isinstance(s, ArrivalRateSweep) and (s.engines is None or name in s.engines):
                capacity = (capacity_per_s or {}).get(f"{sweep}/{name}") or f.capacity(
                    *s.tokens, s.example(sweep, name)
                )
                if capacity is not None:
                    capacity = round(capacity, 4)
                    out["capacity_per_s"][f"{sweep}/{name}"] = capacity
            specs += params.sweep_points(sweep, name, capacity)
        sent: dict[str, int] = {}  # prompts sent so far, by set of prompts
        for done, spec in enumerate(specs):
            if on_point is not None:
                on_point(done, len(specs))
            out["points"].append(point := f.point(spec, cached_prompts=_still_cached(f.server, spec, sent)))
            if isinstance(spec, RepeatedPoint) and point["fits"]:
                ended = point["wall_s"] * point["metrics"]["request_rate_per_s"]["value"]
                sent[spec.prompt_set] = max(sent.get(spec.prompt_set, 0), int(ended) + (spec.concurrency or 1))
    out["inputs"] = inputs(params, shape, gpu, facts, calibration)
    return out


def predict_published(
    params: RunParams,
    shape: ModelShape,
    gpu: Gpu,
    measured: Sequence[MeasuredPoint],
    facts: Mapping[str, Any] | None = None,
) -> Prediction:
    """The prediction of published points, calibrated on those at C = 1 only, in the order given.

    facts: {"engines": {name: …}} or {name: …}. A point's cache_hit_share is taken as the share of its prompts that the
    prefix cache held.
    """
    by_engine = (facts or {}).get("engines", facts or {})
    client = (facts or {}).get("load") or {}
    jitter = 0.0 if client.get("client") == "vllm bench serve" else client.get("jitter_s", PUBLISHED_JITTER_S)
    theirs = {"jitter_s": float(jitter), "max_seconds": 1e6}  # published points do not state their time limit
    params = params.model_copy(update={"load": params.load.model_copy(update=theirs)})
    out: Prediction = {"points": [], "constants": {}, "capacity_per_s": {}, "servers": {}}
    predicted: dict[int, PredictedPoint] = {}
    for name in dict.fromkeys(p.engine for p in measured):
        if name not in params.engines:
            raise ServebookError(
                f"the measured engine {name!r} is not in the parameters",
                "engines",
                f"There are {', '.join(params.engines)}",
            )
        own = [p for p in measured if p.engine == name]
        unique = {(p.prompt_tokens, p.output_tokens): p for p in own if p.concurrency == 1}
        f = forecaster(params, name, shape, gpu, facts=by_engine.get(name), measured=list(unique.values()))
        f.running_gauge = True
        out["constants"][name] = f.calibration.as_dict()
        out["servers"][name] = _limits(f.server)
        for p in own:
            kind = p.kind or "concurrency"
            spec = PointSpec(p.sweep, name, p.point_id, kind, p.prompt_tokens, p.output_tokens, p.concurrency)
            predicted[id(p)] = f.point(spec, p.cache_hit_share or 0.0)
    out["points"] = [predicted[id(p)] for p in measured]
    out["inputs"] = inputs(params, shape, gpu, facts, measured)
    return out


def _still_cached(s: PredictedServer, spec: PointSpec, sent: Mapping[str, int]) -> int:
    """Number of a repeated point's prompts, in the order sent, that are still cached from earlier points of its set."""
    if not isinstance(spec, RepeatedPoint) or s.kv_tokens <= 0:
        return 0
    return min(sent.get(spec.prompt_set, 0), s.kv_tokens // (spec.prompt_tokens + spec.output_tokens))


def _limits(s: PredictedServer) -> dict[str, Any]:
    return {
        "kind": s.kind, "max_num_batched_tokens": s.config.max_num_batched_tokens,
        "max_num_seqs": s.config.max_num_seqs, "max_model_len": s.max_model_len, "kv_cache_tokens": s.kv_tokens,
        "kv_cache_source": s.kv_source, "async_scheduling": s.config.async_scheduling,
        "problem": str(s.problem) if s.problem else None,
    }  # fmt: skip


def inputs(
    params: RunParams, shape: ModelShape, gpu: Gpu, facts: Any, calibration: Sequence[MeasuredPoint] | None
) -> dict[str, Any]:
    """All inputs of a prediction, as it states them."""
    keep = (
        "sweep", "engine", "point", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s",
        "server_prefill_mean_s", "server_queue_mean_s", "cache_hit_share", "started_at",
    )  # fmt: skip
    return {
        "params": params.model_dump(mode="json"),
        **({"workloads": {n: w.identity() for n, w in params.workloads.items()}} if params.workloads else {}),
        "shape": asdict(shape),
        "gpu": asdict(gpu),
        "facts": {k: dict(v) if isinstance(v, Mapping) else v for k, v in (facts or {}).items()},
        "calibration": [{k: stored[k] for k in keep} for stored in (p.to_json() for p in calibration or ())],
    }
