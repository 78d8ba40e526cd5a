"""The content of predictions.json: values with intervals, predicted points, frozen stages.

They are mappings, not classes, because frozen predictions are hashed and scored exactly as stored. The types name every
key, so that mypy rejects a misspelt one.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from .measured_point import Metric

Regime = Literal["queue", "mixed step", "host", "memory", "compute", "links", "unknown"]  # what bounds a predicted time
Latency = Literal["ttft_s", "tpot_s"]  # the times with a breakdown
Parts = dict[str, float]  # seconds of a predicted time by cause (keys: CAUSES)
ROOFLINE = "roofline bound"  # the first part of a waterfall


class PredictedValue(TypedDict):
    """A predicted figure; low and high: its 80 % interval, if it has one."""

    value: float
    low: NotRequired[float | None]
    high: NotRequired[float | None]


class PredictedPoint(TypedDict):
    """A predicted point. fits is False if the server cannot serve it, or not at that rate; `note` says why."""

    sweep: str
    engine: str
    point: str
    metrics: dict[Metric, PredictedValue]
    kind: NotRequired[str]
    concurrency: NotRequired[int | None]
    rate_per_s: NotRequired[float | None]
    prompt_tokens: NotRequired[int]
    output_tokens: NotRequired[int]
    repeats_prompts: NotRequired[bool]
    workload: NotRequired[str | None]
    requests: NotRequired[int | None]
    percentiles: NotRequired[dict[str, dict[str, PredictedValue]]]
    ttft_p99_s: NotRequired[float]
    hit_share: NotRequired[float]
    series: NotRequired[Any]
    running_mean: NotRequired[float]
    wall_s: NotRequired[float]
    breakdown: NotRequired[dict[Latency, Parts]]
    waterfall: NotRequired[list[list[Any]]]
    fits: NotRequired[bool]
    note: NotRequired[str | None]
    refused: NotRequired[str]  # the reason in two words, if fits is False: "does not fit", "overloaded"


class Prediction(TypedDict):
    """The prediction of a run. capacity_per_s: by "sweep/engine"; inputs: everything the prediction was computed
    from."""

    points: list[PredictedPoint]
    constants: dict[str, Any]
    capacity_per_s: dict[str, float]
    servers: dict[str, Any]
    inputs: NotRequired[dict[str, Any]]


class StagePrediction(TypedDict):
    """A stage's predicted points. Frozen stages carry their time and inputs; peers and baselines only their inputs."""

    stage: str
    points: list[PredictedPoint]
    time_utc: NotRequired[str]
    inputs_sha256: NotRequired[str]
    servebook_version: NotRequired[str]
    late: NotRequired[bool]
    additional: NotRequired[bool]
    constants: NotRequired[dict[str, Any]]
    capacity_per_s: NotRequired[dict[str, float]]
    servers: NotRequired[dict[str, Any]]


class FrozenPredictions(TypedDict):
    """The content of predictions.json."""

    frozen: list[StagePrediction]


# Cause of a part of a predicted time → (its name in charts and tables, the regime it belongs to)
CAUSES: dict[str, tuple[str, Regime]] = {
    "weights_s": ("reading weights", "memory"),
    "experts_s": ("reading experts", "memory"),
    "kv_reads_s": ("reading KV", "memory"),
    "states_s": ("recurrent states", "memory"),
    "kv_recopy_s": ("KV recopy", "memory"),
    "compute_s": ("GEMMs not hidden", "compute"),
    "prefill_of_others_s": ("prefill of others", "mixed step"),
    "mixed_attention_s": ("mixed-step attention", "mixed step"),
    "own_prefill_s": ("own prefill", "compute"),
    "decodes_of_others_s": ("decodes of others", "mixed step"),
    "host_s": ("host", "host"),
    "launch_s": ("host launching", "host"),
    "power_cap_s": ("power cap", "compute"),
    "links_s": ("GPUs talking to each other", "links"),
    "replicas_s": ("prefill of other replicas", "mixed step"),
    "queue_s": ("queue", "queue"),
    "front_end_s": ("front end", "host"),
    "waiting_s": ("waiting", "queue"),
}


def interval(predicted: PredictedValue) -> tuple[float, float] | None:
    """(low, high) of the 80 % interval, None if there is none."""
    low, high = predicted.get("low"), predicted.get("high")
    return (low, high) if low is not None and high is not None else None


def holds(predicted: PredictedValue, measured: float) -> bool:
    """Whether the interval contains a measured value."""
    span = interval(predicted)
    return span is not None and span[0] <= measured <= span[1]


def repeats_prompts(point: PredictedPoint) -> bool:
    """Whether the point repeats earlier prompts on purpose; predictions of 0.1.0 and earlier mark it in the point's
    name."""
    if "repeats_prompts" in point:
        return point["repeats_prompts"]
    return point.get("kind") == "prefix_cache" and point["point"].startswith("same-")
