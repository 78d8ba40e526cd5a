"""Servers of other makers, started by their command and measured: transformers serve, and llama.cpp's Python server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from servebook import engines
from servebook.config import params
from servebook.config.params import Load, ModelParams, Slo
from servebook.config.points import PointSpec
from servebook.load.point import measure_point_sync
from servebook.load.window import Rule
from servebook.model import reader

pytestmark = pytest.mark.engine


def installed(*modules: str) -> Any:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def run_params(shape: dict[str, Any], /, **engine: Any) -> params.RunParams:
    return params.RunParams.model_validate(
        {
            "run": "t", "title": "t", "model": shape, "hardware": {"gpu": "A40"},
            "engines": {"other": {"kind": "openai", "max_model_len": 512, "startup_timeout_s": 240, **engine}},
        }
    )  # fmt: skip


@installed("transformers", "accelerate", "torch")
@pytest.mark.parametrize("chat", [False, True])
def test_transformers_serve(tmp_path: Path, chat: bool) -> None:
    import transformers

    folder = reader.materialize(ModelParams(config="tiny-qwen2", weights="dummy"), Path(), tmp_path / "model")
    tiny = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    tiny.generation_config.eos_token_id = None  # it takes no ignore_eos
    tiny.save_pretrained(folder)
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "{model}", "--port", "{port}"]
    run = run_params(
        {"path": str(folder)}, command=[*command, "--device", "cpu"], model="{model}", text=True, chat=chat,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )  # fmt: skip
    with engines.start(run, "other", tmp_path, base=tmp_path) as server:
        point = measure_point_sync(
            PointSpec("s", "other", "c0001", "concurrency", 16, 6, concurrency=1), url=server.url, model=server.model,
            vocab=range(256, 2000), load=Load(jitter_s=0.001), slo=Slo(), run_dir=None, batching=False,
            rule=Rule(1, 3, 3, 0.0, 120.0), text=True, **({"endpoint": "/v1/chat/completions"} if chat else {}),
        )  # fmt: skip
    assert (point.requests, point.failures, point.output_tokens_off) == (3, 0, 0)
    assert point.events_over_tokens == 0 and point.ttft_mean_s is not None  # its echo of the prompt is no token


@installed("llama_cpp", "gguf")
def test_llama_cpp_python(tmp_path: Path) -> None:
    from tiny_gguf import write_tiny_gguf

    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(file), "--port", "{port}", "--n_ctx", "512"]
    run = run_params({"config": "tiny-qwen2", "weights": "dummy"}, command=command, text=True, count_tokens="events")
    with engines.start(run, "other", tmp_path, base=tmp_path) as server:
        point = measure_point_sync(
            PointSpec("s", "other", "c0001", "concurrency", 8, 6, concurrency=1), url=server.url, model=server.model,
            vocab=range(256, 2000), load=Load(jitter_s=0.001), slo=Slo(), run_dir=None, batching=False,
            rule=Rule(1, 3, 3, 0.0, 60.0), text=True, count_tokens="events",
        )  # fmt: skip
    assert point.requests == 3 and point.verdict != "valid"
    assert any("reported no usage" in str(reason) for reason in point.reasons)
