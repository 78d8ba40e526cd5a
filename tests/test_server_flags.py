"""Flags in extra_args: read into the prediction, or named as not modelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.config.engines import VllmEngine
from servebook.config.params import ModelParams
from servebook.hardware.catalog import catalog
from servebook.model.reader import load_shape
from servebook.predictor.server_limits import PredictedServer, server

SHAPE = load_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))


def served(*flags: str, **settings: object) -> PredictedServer:
    engine = VllmEngine(kind="vllm", extra_args=list(flags), **settings)  # type: ignore[arg-type]
    return server("vllm", engine, SHAPE, catalog()["H200"])


def test_a_flag_does_what_the_parameter_of_its_name_does() -> None:
    flags = served(
        "--max-num-batched-tokens=4096", "--max-num-seqs", "64", "--max-model-len 8k", "-tp", "2", "--enforce-eager",
        "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.8",
    )  # fmt: skip
    keys = served(
        max_num_batched_tokens=4096, max_num_seqs=64, max_model_len=8000, tensor_parallel_size=2, enforce_eager=True,
        prefix_caching=False, gpu_memory_utilization=0.8,
    )  # fmt: skip
    assert flags == keys and flags.captured_tokens == 0 and not flags.notes


def test_kv_cache_dtype_and_quantization_change_the_model() -> None:
    plain, kv, weights = served(), served("--kv-cache-dtype", "fp8_e4m3"), served("--quantization", "fp8")
    assert kv.shape.kv_bytes_per_token == plain.shape.kv_bytes_per_token // 2
    assert kv.kv_tokens > 1.9 * plain.kv_tokens
    assert weights.shape.weight_bytes < 0.6 * plain.shape.weight_bytes


def test_what_is_not_modelled_is_named_and_what_has_no_weight_is_not() -> None:
    said = served("--speculative-config", '{"method":"ngram"}', "--api-server-count=4", "--served-model-name", "x")
    assert said.notes == ("not modelled: --speculative-config, --api-server-count (engines.vllm.extra_args)",)
    assert not served("--disable-log-stats", "--reasoning-parser", "qwen3").notes


@pytest.mark.parametrize("flags", [("--max-num-seqs", "many"), ("--gpu-memory-utilization", "1.5"), ("-tp", "0")])
def test_a_value_that_is_none_is_one_line(flags: tuple[str, str]) -> None:
    with pytest.raises(ServebookError, match=r"engines\.vllm\.extra_args"):
        served(*flags)
