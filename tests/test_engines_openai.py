"""An engine that is only a URL: found, asked, left running; what is missing is one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servebook import engines, params
from servebook.engines import process
from servebook.engines.ports import free_port
from servebook.errors import ServebookError
from test_engines_process import DOUBLE, double


def run_params(**engine: str) -> params.RunParams:
    return params.RunParams.model_validate(
        {
            "run": "t", "title": "t", "hardware": {"gpu": "detect"},
            "model": {"config": "tiny-qwen2", "weights": "dummy"},
            "engines": {"far": {"kind": "openai", **engine}},
        }
    )  # fmt: skip


def test_found_asked_and_left_running(tmp_path: Path) -> None:
    with process.launch("e", double(), tmp_path / "theirs") as server:
        with engines.ensure(run_params(url=f"{server.url}/v1/"), "far", tmp_path, tmp_path) as far:
            assert (far.url, far.model, far.owned, far.pid) == (server.url, "m", False, None)
            assert (
                far.facts["version"] == "9.9"
                and far.facts["max_model_len"] == 4096
                and far.facts["kv_cache_tokens"] is None
            )
            assert far.alive() and far.log_tail() == ""
        assert server.alive()
        stored = json.loads((tmp_path / "engines/far.json").read_text())
        assert stored["kind"] == "openai" and stored["url"] == server.url
        with pytest.raises(ServebookError, match=r"engines.far.model: the server has no model 'x'. It serves m"):
            engines.start(run_params(url=server.url, model="x"), "far", tmp_path, base=tmp_path)
    assert not far.alive()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(
        ServebookError, match=r"engines.far.url: no OpenAI-compatible server answers at http://127.0.0.1:9/v1"
    ):
        engines.start(run_params(url="http://127.0.0.1:9"), "far", tmp_path, base=tmp_path)


def test_key_from_the_environment_is_sent_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_params(url="http://127.0.0.1:9", api_key_env="FAR_KEY")
    with pytest.raises(ServebookError, match=r"FAR_KEY is not set"):
        engines.start(asked, "far", tmp_path, base=tmp_path)
    monkeypatch.setenv("FAR_KEY", "planted-4711")
    port = free_port()
    server = subprocess.Popen([sys.executable, DOUBLE, "--port", str(port), "--key", "planted-4711"])
    try:
        asked = run_params(url=f"http://127.0.0.1:{port}", api_key_env="FAR_KEY")
        for _ in range(100):
            try:
                far = engines.start(asked, "far", tmp_path, base=tmp_path)
                break
            except ServebookError:
                time.sleep(0.1)
        assert far.alive() and "planted-4711" not in (tmp_path / "engines/far.json").read_text()
    finally:
        server.kill()
        server.wait()
