"""CONTRIBUTING.md's worked examples, taken from the page and run in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^```sh (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COPIED = ("CONTRIBUTING.md", "README.md", "benchmarks", "docs", "lib", "notebooks", "params", "pyproject.toml", "tests")
RUNS = ("reference", "published")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy to change, with this environment as its .venv."""
    copy, leave = tmp_path / "checkout", shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints")
    for name in (*COPIED, *(f"outputs/{run}" for run in RUNS)):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=leave)
        else:
            shutil.copy(ROOT / name, target)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


def run(checkout: Path, example: str) -> str:
    """The example's commands in one shell that stops at the first that fails; what they printed."""
    outside = {k: v for k, v in os.environ.items() if k not in ("SERVEBOOK_OUTPUTS", "PYTEST_ADDOPTS")}
    env = {**outside, "PYTHONPATH": str(checkout / "lib"), "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", EXAMPLES[example]], cwd=checkout, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_there_is_one_for_each_thing_to_add() -> None:
    assert list(EXAMPLES) == ["gpu", "model", "engine", "sweep", "chart"]
    assert PAGE.count("```") == 2 * (len(EXAMPLES) + 1), "a block that no test runs, beside the set-up's"


def test_gpu(checkout: Path) -> None:
    said = run(checkout, "gpu")
    assert "total" in said
    assert "X1000" in (checkout / "params/a40-qwen2.5-7b-X1000.yaml").read_text()


def test_model(checkout: Path) -> None:
    assert "total" in run(checkout, "model")


def test_sweep(checkout: Path) -> None:
    said = run(checkout, "sweep")
    assert [w for w in ("c0001", "c0002", "c0004", "c0008", "c0016") if w not in said] == []


def test_chart(checkout: Path) -> None:
    assert "figures/ecdf-short_prompts.svg" in run(checkout, "chart")
    drawn = (checkout / "figures/ecdf-short_prompts.svg").read_text()
    assert "Share of requests" in drawn and "requests had their first token within" in drawn
    assert "`charts.ecdf`: Empirical distribution of TTFT" in (checkout / "docs/map.md").read_text()


@pytest.mark.engine
def test_engine(checkout: Path) -> None:
    """The whole book with a server that `command` starts: a real process, measured, reported, ended."""
    said = run(checkout, "engine")
    assert "predicted as if it were vLLM" in said
    report = checkout / "outputs/mine/report.html"
    assert str(report) in said
    page = report.read_text(encoding="utf-8") + report.with_name("labbook.html").read_text(encoding="utf-8")
    assert "A server of my own" in page and "Not reported: " in page
    points = (checkout / "outputs/mine/points.csv").read_text().splitlines()
    assert len(points) == 4 and all(",mine," in line for line in points[1:])
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(checkout) not in left
