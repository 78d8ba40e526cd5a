"""Predicts one load on one server, without a run: any model, hardware, engine settings and workload."""

from __future__ import annotations

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
    samples: int = SAMPLES,
    text: bool = False,
    **load: Any,
) -> PredictedPoint:
    """The predicted point (see Forecaster.point): means under `metrics`; p50, p90 and p99 of TTFT, TPOT and end-to-end
    latency under `percentiles`; each with its 80 % interval.

    load: fields of PointSpec. concurrency: a closed loop. rate_per_s (with arrivals, gamma_shape, concurrency as a
    cap): an open loop. kind: "burst" or "trace" (with speed). requests: a finite run of that many requests, measured
    from the first to the last.
    samples: draws of the constants for the intervals. text: whether prompts are sent as text, as most tools do, so that
    the server tokenizes them.
    """
    kind = load.pop("kind", "arrival_rate" if load.get("rate_per_s") else "concurrency")
    if kind == "trace":
        load.setdefault("requests", len(workload.rows()))
    how = Load(jitter_s=0.0, max_seconds=1e6)
    params = RunParams(
        run="load", title="", model=ModelParams(config=shape.name or "model", weights="dummy"),
        hardware=HardwareParams(gpu=gpu.name), engines={"engine": engine}, load=how,
    )  # fmt: skip
    facts = {"usage_per_event": not text}  # with text prompts (other tools), usage comes once, at the end of a stream
    f = forecaster(params, "engine", shape, gpu, facts=facts, samples=samples)
    f.text = text
    spec = PointSpec("load", "engine", "load", kind, *workload.mean_tokens(), workload=workload, **load)
    return f.point(spec)
