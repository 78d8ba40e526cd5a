"""A grid of parameter files, and the task that runs each on a rented machine; SkyPilot itself is doubled."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from servebook.cli.command import main
from servebook.cli.grid import write_grid
from servebook.common.errors import ServebookError
from servebook.config import params

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "skypilot" / "launch.py"
_spec = importlib.util.spec_from_file_location("launch", LAUNCH)
assert _spec and _spec.loader
launch = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launch)


def test_one_valid_file_a_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(ROOT / "params/h200-qwen2.5-7b.yaml")
    sets = ["--set", "hardware.gpu=H200,A100-80GB-SXM", "--set", "sweeps.short_prompts.concurrency=[1],[1, 2]"]
    assert main(["grid", base, *sets, "--into", str(tmp_path)]) == 0
    made = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in made) and len(made) == 4
    runs = [params.read_file(p) for p in made]
    assert [p.stem for p in made] == [r.run for r in runs] and runs[3].run == "h200-qwen2.5-7b-A100-80GB-SXM-1-2"
    assert [(r.hardware.gpu, r.sweeps["short_prompts"].concurrency) for r in runs] == [
        ("H200", [1]), ("H200", [1, 2]), ("A100-80GB-SXM", [1]), ("A100-80GB-SXM", [1, 2]),
    ]  # fmt: skip
    assert runs[0].load == params.read_file(base).load  # the rest is base's


def test_another_source_of_the_model_takes_the_place_of_the_first(tmp_path: Path) -> None:
    text = (ROOT / "params/demo.yaml").read_text().replace("config: tiny-qwen2", "path: ../models/m")
    base = tmp_path / "params" / "base.yaml"
    base.parent.mkdir()
    base.write_text(text)
    (one,) = write_grid(base, ["model.config=qwen2.5-0.5b"], tmp_path / "grid")
    assert params.read_file(one).model.config == "qwen2.5-0.5b" and params.read_file(one).model.path is None
    (two,) = write_grid(base, ["load.seed=7"], tmp_path / "far" / "grid")
    assert params.read_file(two).model.path == "../../models/m"  # still the same folder


def test_a_setting_changes_no_place_that_an_alias_repeats(tmp_path: Path) -> None:
    text = (ROOT / "params/demo.yaml").read_text()
    base = tmp_path / "base.yaml"
    base.write_text(re.sub("(?m)^sweeps:$", f"sweeps:\n  one: &one {ONE}\n  two: *one", text))
    (made,) = write_grid(base, ["sweeps.one.prompt_tokens=32"], tmp_path / "grid")
    sweeps = params.read_file(made).sweeps
    assert (sweeps["one"].prompt_tokens, sweeps["two"].prompt_tokens) == (32, 16)


ONE = "{kind: concurrency, prompt_tokens: 16, output_tokens: 8, concurrency: [1]}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["hardwre.gpu=H200"], r"hardwre.gpu does not exist. In the place of hardwre there is run, title"),
        (["load.seed=010"], r"--set load.seed, line 1: 010 is read as octal. Write 10"),
        (["load.seed=" + ",".join(map(str, range(99))), "load.min_seconds=1,2,3,4,5,6"], "1,188 combinations"),
        (["hardware.gpu"], r"'hardware.gpu' is not a setting. Write KEY=A,B"),
        (["hardware.gpu=H20x"], r"H20x"),
        (["engines.vllm.max_num_seq=1"], r"unknown key engines.vllm.max_num_seq. Did you mean max_num_seqs"),
        (["load.seed=1,1"], r"two combinations are both 'demo-0.01-1'"),
    ],
)
def test_a_grid_that_cannot_be_meant_writes_nothing(tmp_path: Path, settings: list[str], said: str) -> None:
    with pytest.raises(ServebookError, match=said):
        write_grid(ROOT / "params/demo.yaml", ["load.jitter_s=0.01,0.02", *settings], tmp_path / "grid")
    assert not (tmp_path / "grid").exists()


def test_every_gpu_that_the_engines_ask_for_is_rented() -> None:
    data = params.read_file(ROOT / "params/h200-qwen2.5-7b.yaml").model_dump()
    data["hardware"] = {"gpu": "A100-80GB-SXM"}
    data["engines"]["vllm"] |= {"tensor_parallel_size": 2, "data_parallel_size": 2}
    assert launch.gpus_of(params.RunParams.model_validate(data)) == "A100-80GB:4"
    launch_it, fetch, down = launch.commands(ROOT / "params/a40-qwen2.5-7b.yaml", None)
    assert launch_it[launch_it.index("--gpus") + 1] == "A40:1" and "PARAMS=params/a40-qwen2.5-7b.yaml" in launch_it
    assert fetch[2].startswith("a40-qwen2-5-7b:") and down[-1] == "a40-qwen2-5-7b"
    with pytest.raises(ServebookError, match="which GPU to rent"):
        launch.commands(ROOT / "params/demo.yaml", None)


@pytest.mark.parametrize(("status", "done"), [(0, True), (1, False)])
def test_results_come_back_and_the_machine_is_given_back_whatever_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, done: bool
) -> None:
    for name in ("sky", "rsync"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$1" >> "{tmp_path}/calls"\n[ "$1" != launch ] || exit {status}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    (tmp_path / "params").mkdir()
    text = (ROOT / "params/a40-qwen2.5-7b.yaml").read_text()
    (tmp_path / "params" / "a40-qwen2.5-7b.yaml").write_text(text)
    assert launch.run_one(tmp_path / "params" / "a40-qwen2.5-7b.yaml", None) is done
    assert (tmp_path / "calls").read_text().splitlines() == ["sky launch", "rsync -az", "sky down"]


def test_interrupted_it_still_gives_the_machine_back(tmp_path: Path) -> None:
    for folder in ("bin", "skypilot", "params"):
        (tmp_path / folder).mkdir()
    for name in ("sky", "rsync"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$1" >> "{tmp_path}/calls"\n[ "$1" != launch ] || exec sleep 60\n')
        program.chmod(0o755)
    shutil.copy(LAUNCH, tmp_path / "skypilot")
    shutil.copy(ROOT / "params/a40-qwen2.5-7b.yaml", tmp_path / "params")
    command = [sys.executable, "skypilot/launch.py", "params/a40-qwen2.5-7b.yaml"]
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    running = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    calls = tmp_path / "calls"
    for _ in range(600):
        if calls.exists() and calls.read_text():
            break
        time.sleep(0.1)
    time.sleep(0.3)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) == 130
    assert calls.read_text().splitlines() == ["sky launch", "rsync -az", "sky down"]


def test_the_task_asks_for_what_make_offers_and_says_so_where_skypilot_is_missing() -> None:
    """What SkyPilot's own loader says is `launch.py --check`: the loader is no dependency of this project."""
    task = yaml.safe_load((ROOT / "skypilot/servebook.yaml").read_text())
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
        targets = {line.split()[1] for line in script.splitlines() if line.strip().startswith("make ")}
        assert targets and targets <= {"check", "preflight", "report"}
    assert task["resources"]["autostop"]["down"] and (ROOT / task["envs"]["PARAMS"]).exists()
    env = {**os.environ, "PYTHONPATH": "", "HOME": "/nonexistent"}
    checked = subprocess.run([sys.executable, str(LAUNCH), "--check"], env=env, capture_output=True, text=True)
    if importlib.util.find_spec("sky") is None:
        assert checked.returncode == 1 and "SkyPilot is not installed here" in checked.stderr
    else:
        assert checked.returncode == 0, checked.stderr


def test_another_card_leaves_the_price_of_the_first_and_every_title_tells_its_run(tmp_path: Path) -> None:
    base = ROOT / "params/h200-qwen2.5-7b.yaml"
    assert params.read_file(base).hardware.price_per_hour > 0
    a40, h200 = write_grid(base, ["hardware.gpu=A40,H200"], tmp_path)
    assert params.read_file(a40).hardware.price_per_hour == 0
    assert "# price_per_hour of A40 left out: set it" in a40.read_text() and "left out" not in h200.read_text()
    assert params.read_file(h200).hardware == params.read_file(base).hardware
    assert params.read_file(a40).title == f"{params.read_file(base).title}: hardware.gpu A40"
    (priced,) = write_grid(base, ["hardware.gpu=A40", "hardware.price_per_hour=0.4"], tmp_path)
    assert params.read_file(priced).hardware.price_per_hour == 0.4
    (titled,) = write_grid(base, ["hardware.gpu=A40", "title=Mine"], tmp_path)
    assert params.read_file(titled).title == "Mine"


def test_a_fault_names_the_combination_and_no_line_of_a_file_that_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ServebookError) as fault:
        write_grid(ROOT / "params/demo.yaml", ["load.seed=1", "load.max_seconds=-1"], tmp_path)
    assert "demo.yaml with load.seed 1, load.max_seconds -1: load.max_seconds: input" in str(fault.value)
    assert ", line" not in str(fault.value)
