"""The hooks run from the project's own venv without a network, and find nothing to do in what is committed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
HOOKS = [h for r in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for h in r["hooks"]]


def test_hooks_are_local_and_cover_notebooks_lint_format_and_types() -> None:
    assert [h["id"] for h in HOOKS] == ["nbstripout", "ruff", "ruff-format", "mypy", "mdformat"]
    assert all(h["language"] == "system" for h in HOOKS)
    assert all(shutil.which(Path(shlex.split(h["entry"])[0]).name, path=Path(sys.executable).parent) for h in HOOKS)


def test_committed_notebooks_are_as_the_hook_leaves_them() -> None:
    _, *options = shlex.split(HOOKS[0]["entry"])
    notebooks = sorted(str(p) for p in (ROOT / "notebooks").glob("*.ipynb"))
    strip = [str(Path(sys.executable).with_name("nbstripout")), *options, "--verify", *notebooks]
    done = subprocess.run(strip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
