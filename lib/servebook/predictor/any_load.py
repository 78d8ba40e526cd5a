"""One load on one server, predicted without a run: any model, hardware, engine settings and workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.predicted_point import PredictedPoint
from ..config.params import Engine, HardwareParams, Load, ModelParams, RunParams
from ..config.points import PointSpec
from ..config.workloads import Workload
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape
from .forecaster import SAMPLES, forecaster


def predict_load(
    shape: ModelShape,
    gpu: Gpu,
    engine: Engine,
    workload: Workload,
    *,
    facts: Mapping[str, Any] | None = None,
    samples: int = SAMPLES,
    seed: int = 1,
    jitter_s: float = 0.0,
    text: bool = False,
    **load: Any,
) -> PredictedPoint:
    """The predicted point (see Forecaster.point): means under `metrics`, p50, p90 and p99 of TTFT, TPOT and end-to-end
    latency under `percentiles`, each with its 80 % interval.

    load: of PointSpec, concurrency for a closed loop, rate_per_s (with arrivals, gamma_shape, concurrency as a cap) for
    an open one, kind "burst" or "trace" (with speed); requests: a finite run of so many, measured from first to last.
    facts: what the server said of itself (kv_cache_tokens, max_num_batched_tokens, …). samples: draws of the constants
    for the intervals. text: prompts are sent as texts, as most tools do, and the server makes tokens of them.
    """
    kind = load.pop("kind", "arrival_rate" if load.get("rate_per_s") else "concurrency")
    if kind == "trace":
        load.setdefault("requests", len(workload.rows()))
    how = Load(jitter_s=jitter_s, max_seconds=1e6, seed=seed)
    params = RunParams(
        run="load", title="", model=ModelParams(config=shape.name or "model", weights="dummy"),
        hardware=HardwareParams(gpu=gpu.name), engines={"engine": engine}, load=how,
    )  # fmt: skip
    # other tools ask for usage once, at the end of a stream
    facts = {"usage_per_event": not text, **(facts or {})}
    f = forecaster(params, "engine", shape, gpu, facts=facts, samples=samples)
    f.text = text
    spec = PointSpec("load", "engine", "load", kind, *workload.mean_tokens(), workload=workload, **load)
    return f.point(spec)
