"""Flags in extra_args: read into the prediction, or named as not modelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.config.engines import VllmEngine
from servebook.config.params import ModelParams
from servebook.hardware.catalog import catalog
from servebook.model.reader import from_config, read_shape
from servebook.predictor.server_limits import PredictedServer, server
from test_published_configs import files

SHAPE = read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))


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


@pytest.mark.parametrize(
    ("typed", "meant"),
    [  # each pair is one setting to vLLM 0.32's own parser
        (("--max_num_seqs=64",), ("--max-num-seqs", "64")),
        (("--max-num-seq", "64"), ("--max-num-seqs", "64")),  # the start of one flag alone
        (("--max-num-seqs 64 --max-model-len 8K",), ("--max-num-seqs", "64", "--max-model-len", "8192")),
        (("--device-memory-utilization", ".8"), ("--gpu-memory-utilization", "0.8")),
        (("-O0",), ("--enforce-eager",)),
        (("-O", "0"), ("--optimization-level=0",)),
        (("--optimization-level", "2"), ()),
        (("-cc.cudagraph_mode=NONE",), ("--compilation-config", '{"cudagraph_mode": "NONE"}')),
        (("--cudagraph-capture-sizes", "1", "2", "64"), ("--max-cudagraph-capture-size", "64")),
        (('--compilation-config={"cudagraph_capture_sizes": [1, 64]}',), ("--max-cudagraph-capture-size=64",)),
        (("-cc.cudagraph_capture_sizes=[1, 64]",), ("--max-cudagraph-capture-size=64",)),
        (("--dtype", "half"), ()),
        (("-ep", "-dp", "2"), ("--enable-expert-parallel", "--data_parallel_size=2")),
        (("--enable-chunked-prefill", "--load-format", "dummy", "--no-enable-log-requests"), ()),
    ],
)
def test_every_form_of_a_flag_is_the_same_setting(typed: tuple[str, ...], meant: tuple[str, ...]) -> None:
    assert served(*typed) == served(*meant)
    assert not served(*typed).notes


def test_the_pool_may_be_given() -> None:
    by_blocks, by_bytes = served("--num-gpu-blocks-override", "1000"), served("--kv-cache-memory-bytes", "20G")
    assert by_blocks.kv_tokens == 16_000
    assert by_bytes.kv_tokens == 20 * 2**30 // (16 * SHAPE.kv_bytes_per_token) * 16


def test_the_longest_context_that_fits() -> None:
    for form in (("auto",), ("-1",)):
        fitted = served("--max-model-len", *form, "--num-gpu-blocks-override", "1000")
        assert (fitted.max_model_len, fitted.problem) == (16_000, None)


def test_fewer_captured_tokens() -> None:
    assert served("--max-cudagraph-capture-size", "64").captured_tokens == 64
    assert served("-cc.cudagraph_mode=NONE").captured_tokens == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--no-enable-chunked-prefill",), "--no-enable-chunked-prefill"),
        (("--hf-overrides", '{"max_position_embeddings": -1}'), "--hf-overrides"),
        (("--rope-scaling", '{"rope_type": "yarn", "factor": 4.0}'), "--rope-scaling"),
        (("--kv-transfer-config", '{"kv_connector":"NixlConnector"}'), "--kv-transfer-config"),
        (("--quantization", "mxfp4"), "--quantization mxfp4"),
        (("--compilation-config", '{"mode": 0}'), "--compilation-config (mode)"),
        (("-sc.num_speculative_tokens=3",), "--speculative-config.num-speculative-tokens"),
        (("--cpu-offload-gb=10",), "--cpu-offload-gb"),
        (("-dcp", "2"), "--decode-context-parallel-size"),
        (("-sc", '{"method": "mtp"}'), "--speculative-config"),
    ],
)
def test_each_flag_that_is_not_modelled_is_named_alone(flags: tuple[str, ...], named: str) -> None:
    assert served(*flags).notes == (f"not modelled: {named} (engines.vllm.extra_args)",)


def test_kv_cache_dtype_and_quantization_change_the_model() -> None:
    plain, kv, weights = served(), served("--kv-cache-dtype", "fp8_e4m3"), served("--quantization", "fp8")
    assert kv.shape.kv_bytes_per_token == plain.shape.kv_bytes_per_token // 2
    assert kv.kv_tokens > 1.9 * plain.kv_tokens
    assert weights.shape.weight_bytes < 0.6 * plain.shape.weight_bytes


def test_what_is_not_modelled_is_named_and_what_has_no_weight_is_not() -> None:
    said = served("--speculative-config", '{"method":"ngram"}', "--api-server-count=4", "--served-model-name", "x")
    assert said.notes == ("not modelled: --speculative-config, --api-server-count (engines.vllm.extra_args)",)
    assert not served("--disable-log-stats", "--reasoning-parser", "qwen3").notes


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-seqs", "many"),
        ("--gpu-memory-utilization", "1.5"),
        ("-tp", "0"),
        ("-cc", "3"),
        ("--kv-cache-dtype",),
    ],
)
def test_a_value_that_is_none_is_one_line(flags: tuple[str, ...]) -> None:
    with pytest.raises(ServebookError, match=r"engines\.vllm\.extra_args"):
        served(*flags)


def test_towers_are_left_out_or_said_to_be_counted() -> None:
    vision = from_config(files()["Qwen--Qwen2.5-VL-7B-Instruct"]["config.json"], name="x")
    card = catalog()["H200"]

    def with_flag(*flags: str) -> PredictedServer:
        return server("vllm", VllmEngine(kind="vllm", extra_args=list(flags)), vision, card)

    text, whole = with_flag("--language-model-only"), with_flag()
    assert text.kv_tokens > whole.kv_tokens and not any("towers" in n for n in text.notes)
    assert any("the towers are counted" in n for n in with_flag("--limit-mm-per-prompt", '{"image": 0}').notes)
    assert with_flag("--limit-mm-per-prompt", '{"image": 2}').notes == whole.notes
    assert not served("--limit-mm-per-prompt", '{"image": 0}', "--language-model-only").notes
