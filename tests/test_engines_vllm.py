"""vLLM's command line and environment from params; where it cannot run, one line; and the real server once."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from servebook import engines
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.config.params import RunParams
from servebook.engines import vllm
from test_engines_process import gone

MODEL: dict[str, Any] = {"config": "tiny-qwen2", "weights": "dummy", "dtype": "float32"}


def running(run: RunParams, name: str, run_dir: Path) -> engines.RunningEngine:
    """The engine that runs for this folder, else a new one."""
    return engines.join(run_dir, name) or engines.start(run, name, run_dir, base=run_dir)


def run_params(engine: dict[str, Any], model: dict[str, Any] = MODEL) -> params.RunParams:
    return params.RunParams.model_validate(
        {"run": "t", "title": "t", "model": model, "hardware": {"gpu": "detect"}, "engines": {"e": engine}}
    )


def command(engine: dict[str, Any], tmp_path: Path, model: dict[str, Any] = MODEL) -> list[str]:
    p = run_params({"kind": "vllm", **engine}, model)
    return vllm.prepare(p, "e", p.engines["e"], tmp_path, tmp_path).argv(8123)  # type: ignore[arg-type]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "runs_on_cpu", lambda: False)


def test_only_what_is_set_is_passed(tmp_path: Path, on_gpu: None) -> None:
    argv = command({}, tmp_path)
    for left_to_vllm in (
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--max-model-len",
        "--enforce-eager",
        "--quantization",
    ):
        assert left_to_vllm not in argv
    assert argv[argv.index("--host") + 1] == "127.0.0.1" and argv[argv.index("--port") + 1] == "8123"
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.9" and "--kv-cache-memory-bytes" not in argv
    assert argv[argv.index("--load-format") + 1] == "dummy" and "--trust-remote-code" not in argv
    assert (Path(argv[argv.index("--model") + 1]) / "config.json").exists()


def test_all_that_is_set_is_passed(tmp_path: Path, on_gpu: None) -> None:
    engine = {
        "max_num_batched_tokens": 4096, "max_num_seqs": 64, "max_model_len": 1024, "prefix_caching": False,
        "enforce_eager": True, "tensor_parallel_size": 2, "extra_args": ["--swap-space", "0"],
    }  # fmt: skip
    argv = command(engine, tmp_path, {**MODEL, "quantization": "fp8", "kv_cache_dtype": "fp8"})
    text = " ".join(argv)
    for part in (
        "--max-num-batched-tokens 4096", "--max-num-seqs 64", "--max-model-len 1024", "--no-enable-prefix-caching",
        "--enforce-eager", "--tensor-parallel-size 2", "--swap-space 0", "--quantization fp8", "--kv-cache-dtype fp8",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_several_gpus_and_the_executor_that_spreads_them(tmp_path: Path, on_gpu: None, executor: str) -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    text = " ".join(command({**sizes, "distributed_executor_backend": executor}, tmp_path))
    for part in ("tensor-parallel-size 4", "pipeline-parallel-size 2", "data-parallel-size 2",
                 f"distributed-executor-backend {executor}"):  # fmt: skip
        assert f"--{part}" in text
    assert "--distributed-executor-backend" not in command(sizes, tmp_path)  # vLLM's own choice


def test_what_is_not_given_is_not_stored() -> None:
    stored = params.VllmEngine(kind="vllm").model_dump(mode="json")
    assert "distributed_executor_backend" not in stored  # a point measured before the key existed stays valid
    given = params.VllmEngine(kind="vllm", distributed_executor_backend="mp").model_dump(mode="json")
    assert given["distributed_executor_backend"] == "mp"


def test_quantization_that_vllm_cannot_do(tmp_path: Path, on_gpu: None) -> None:
    with pytest.raises(ServebookError, match="does not quantize to int4"):
        command({}, tmp_path, {**MODEL, "quantization": "int4"})


def test_no_secret_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HF_TOKEN", "VLLM_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "planted-4711")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    engine = params.VllmEngine(kind="vllm", env={"NCCL_DEBUG": "WARN"})
    env = vllm.environment(params.ModelParams(**MODEL), engine, on_cpu=True)
    assert "planted-4711" not in env.values()
    assert env["TOKENIZERS_PARALLELISM"] == "false" and env["NCCL_DEBUG"] == "WARN" and env["HF_HUB_OFFLINE"] == "1"
    hub = vllm.environment(params.ModelParams(hub="a/b"), engine, on_cpu=False)
    assert hub["HF_TOKEN"] == "planted-4711" and "OPENAI_API_KEY" not in hub and hub.get("HF_HUB_OFFLINE") != "1"


def test_unsupported_processor_is_said_before_any_start() -> None:
    unsupported = vllm.why_unsupported(True, frozenset({"sse4_2", "fpu"}))
    assert unsupported is not None and "AVX2 or AVX-512" in unsupported[0]
    assert vllm.why_unsupported(True, frozenset({"avx2"})) is None


def test_missing_vllm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    p = run_params({"kind": "vllm"})
    with pytest.raises(ServebookError, match=r"engines.e: vLLM is not installed"):
        engines.start(p, "e", tmp_path, base=tmp_path)
    assert engines.check(p, "e") == "vLLM is not installed"


def test_unknown_engine_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ServebookError, match=r"no engine 'x'. This run has e"):
        running(run_params({"kind": "naive"}), "x", tmp_path)


@pytest.mark.engine
def test_real_vllm_serves_and_leaves_nothing(tmp_path: Path) -> None:
    p = run_params(
        {"kind": "vllm", "enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    )
    with running(p, "e", tmp_path) as engine:
        facts = engine.facts
        assert facts["version"] and facts["max_model_len"] == 1024 and facts["max_num_batched_tokens"] == 256
        assert facts["kv_cache_tokens"] > 1024 and facts["prefix_caching"] is True and facts["block_size"]
        connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=300)
        body = {"model": engine.model, "prompt": [300] * 20, "max_tokens": 5, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        usage = json.loads(connection.getresponse().read())["usage"]
        connection.close()
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 5)
        children = [c.pid for c in psutil.Process(engine.pid).children(recursive=True)]
        assert children, "the engine core is a process of its own"
        os.kill(engine.pid, signal.SIGKILL)  # the core outlives its API server unless somebody ends it
        engine.wait(10)
        assert not engine.alive() and all(gone(pid) for pid in children)
    assert engines.join(tmp_path, "e") is None
