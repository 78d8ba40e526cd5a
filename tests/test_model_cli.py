"""`servebook model`: figures of a model, on the terminal and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from servebook.cli.command import main
from test_published_configs import files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a mixture's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(files()["Qwen--Qwen3-30B-A3B"]["config.json"]))
    return tmp_path


def test_json_has_the_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", str(folder / "config.json"), "--gpu", "H200", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 30_532_122_624 and said["active_parameters"] == pytest.approx(3.35e9, rel=0.01)
    assert said["weight_bytes"] == 2 * said["parameters"] and said["state_bytes_per_sequence"] == 0
    assert said["kv_bytes_per_token"] == 98_304
    # a server on an H200 at 0.92 of its memory had 744,672 tokens, one at 0.9 with a context of 16,384 732,496
    assert said["kv_cache_tokens"] == pytest.approx(732_496, rel=0.03)
    assert said["max_concurrency"] == pytest.approx(said["kv_cache_tokens"] / 40_960, abs=0.01)
    assert said["fewest_gpus"] == {"H200": 1}


def test_several_models_and_one_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", str(folder), "qwen3-8b", "no-such-model", "--context", "4096"]) == 1
    out, err = capsys.readouterr()
    assert "30.53e9 parameters, 3.35e9 active" in out and "qwen3-8b" in out and "fits 1 of" in out
    assert err.count("\n") == 1 and "no-such-model" in err


def test_it_needs_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from servebook.cli.command import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "model", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
