"""Floors follow what was served: layout, cached prompts, quantization, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servebook.common.measured_point import MeasuredPoint
from servebook.config.engines import NaiveEngine, OpenAIEngine, VllmEngine
from servebook.config.params import HardwareParams, ModelParams
from servebook.hardware import catalog
from servebook.model import reader
from servebook.predictor.floors import floors
from servebook.scoring.audit import audit

H200 = catalog.resolve(HardwareParams(gpu="H200"))
SHAPE = reader.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path())


def of(facts: dict[str, Any] | None = None, shape: Any = SHAPE, prompt: int = 512, **given: Any) -> dict[str, float]:
    return floors(shape, H200, VllmEngine(kind="vllm", **given), facts or {}, prompt_tokens=prompt)


def test_one_gpu_is_the_roofline() -> None:
    rates = H200.flops_per_s("bfloat16"), H200.bytes_per_s
    assert of(prompt=8192)["ttft_floor_s"] == pytest.approx(SHAPE.prefill_flops(8192) / rates[0])
    assert of()["tpot_floor_s"] >= SHAPE.decode_weight_bytes / rates[1]


def test_gpus_of_a_replica_share_its_weights_and_flops() -> None:
    one, two = of(prompt=8192), of(prompt=8192, tensor_parallel_size=2)
    assert two["tpot_floor_s"] == pytest.approx(one["tpot_floor_s"] / 2, rel=0.05)
    assert two["ttft_floor_s"] == pytest.approx(one["ttft_floor_s"] / 2, rel=0.05)


def test_stages_of_a_pipeline_share_a_prompt_and_not_a_token() -> None:
    one, two = of(prompt=8192), of(prompt=8192, pipeline_parallel_size=2)
    assert two["ttft_floor_s"] == pytest.approx(one["ttft_floor_s"] / 2)
    assert two["tpot_floor_s"] == pytest.approx(one["tpot_floor_s"])


def test_replicas_make_no_request_faster() -> None:
    assert of(data_parallel_size=4) == of()


def test_the_fastest_arithmetic_of_quantized_weights_counts() -> None:
    fp8 = SHAPE.with_fp8_weights()
    assert of(shape=fp8, prompt=8192)["ttft_floor_s"] < 0.6 * of(prompt=8192)["ttft_floor_s"]
    assert of(shape=fp8)["tpot_floor_s"] < 0.7 * of()["tpot_floor_s"]


def test_no_floor_where_the_server_says_something_else_of_its_weights() -> None:
    assert of({"quantization": "fp8"}) == {}
    assert of({"quantization": "fp8"}, shape=SHAPE.with_fp8_weights())["tpot_floor_s"] > 0


def test_a_smaller_kv_cache_than_the_parameters_say_leaves_the_weights_alone() -> None:
    assert of({"kv_cache_dtype": "fp8"}, prompt=8192)["tpot_floor_s"] == of(prompt=0)["tpot_floor_s"]


def test_a_step_that_brings_several_tokens_has_no_floor_a_token() -> None:
    assert "tpot_floor_s" not in of(extra_args=["--speculative-config", "{}"])
    command = ["serve", "--speculative-algorithm", "EAGLE", "{port}"]
    engine = OpenAIEngine(kind="openai", command=command)
    assert "tpot_floor_s" not in floors(SHAPE, H200, engine, {}, prompt_tokens=512)


def test_the_naive_server_has_the_floors_of_one_gpu() -> None:
    assert floors(SHAPE, H200, NaiveEngine(kind="naive"), {}, prompt_tokens=512) == of()


@pytest.mark.parametrize(
    ("hits", "expected", "invalid"), [(None, False, True), (0.9, False, False), (None, True, False), (0.0, True, True)]
)
def test_a_cached_prompt_has_no_prefill_to_be_judged_by(hits: float | None, expected: bool, invalid: bool) -> None:
    point = MeasuredPoint(
        sweep="s", engine="e", point_id="c0001", requests=20, ttft_mean_s=0.03, cache_hit_share=hits, concurrency=1,
        in_flight_mean=1.0, prompt_tokens=512, output_tokens=128,
    )  # fmt: skip
    verdict, _ = audit(point, {"ttft_floor_s": 0.05}, cache_expected=expected)
    assert (verdict == "invalid") is invalid
