"""Notebooks fail loudly: one deliberately broken notebook per way to fail, executed by the real papermill."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from servebook.cli import command as cli
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.run import pipeline
from servebook.run.book import Book
from servebook.run.notebook_execution import execute

ROOT = Path(__file__).parents[1]


def notebook(folder: Path, *cells: str) -> Path:
    nb = nbformat.v4.new_notebook()
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    first = nbformat.v4.new_code_cell("PARAMS = 'x'", metadata={"tags": ["parameters"]})
    nb.cells = [first, *(nbformat.v4.new_code_cell(c) for c in cells)]
    path = folder / "broken.ipynb"
    nbformat.write(nb, path)
    return path


@pytest.mark.parametrize(
    ("cells", "parameters", "expect"),
    [
        (["raise ValueError('no such thing')"], {}, r"broken\.ipynb, cell 2: ValueError: no such thing\."),
        (["print('before')", "import sys; sys.exit(0)", "print('after')"], {}, r"broken\.ipynb: stopped before cell"),
        (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "print('after')"], {}, r"broken\.ipynb"),
        (["1"], {"PARMAS": "typo"}, r"broken\.ipynb: has no parameter PARMAS"),
    ],
    ids=["raises", "sys.exit(0)", "kernel killed", "misspelt parameter"],
)
def test_a_broken_notebook_is_one_line_and_no_finished_copy(tmp_path, cells, parameters, expect):
    target = tmp_path / "out" / "broken.ipynb"
    for _ in range(2):  # the second time too: a failed copy must not pass for a finished one
        with pytest.raises(ServebookError, match=expect) as fault:
            execute(notebook(tmp_path, *cells), target, parameters)
        assert "\n" not in str(fault.value)
        assert not target.exists()
    if not parameters:
        assert json.loads((tmp_path / "out" / "broken.failed.ipynb").read_text())["cells"], "the partial copy is kept"


def test_a_servebook_error_in_a_cell_reaches_the_terminal_as_itself(tmp_path):
    cell = "from servebook.errors import ServebookError; raise ServebookError('the disk is full', '/x', 'Free some')"
    with pytest.raises(ServebookError, match=r"broken\.ipynb, cell 2: /x: the disk is full\. Free some\."):
        execute(notebook(tmp_path, cell), tmp_path / "broken.ipynb", {})


def test_a_finished_notebook_runs_in_its_own_folder_with_its_parameters(tmp_path):
    source = notebook(tmp_path, "import os; print(PARAMS, os.path.basename(os.getcwd()))")
    execute(source, tmp_path / "out" / "done.ipynb", {"PARAMS": "given"})
    outputs = [
        o["text"] for c in json.loads((tmp_path / "out/done.ipynb").read_text())["cells"] for o in c.get("outputs", [])
    ]
    assert any(tmp_path.name in "".join(t) and "given" in "".join(t) for t in outputs)
    assert not (tmp_path / "out" / "done.failed.ipynb").exists()


def test_every_engine_has_its_sweeps_between_prediction_and_analysis():
    run = params.read_file(ROOT / "params/demo.yaml")
    names = [s.copy_name for s in pipeline.steps(run, "params/demo.yaml")]
    assert names[:2] == ["00_preflight.ipynb", "01_prediction.ipynb"]
    assert names[2:7] == [
        "02_serving.hf.ipynb",
        "03_short_prompts.hf.ipynb",
        "04_long_prompts.hf.ipynb",
        "05_prompt_length.hf.ipynb",
        "06_arrival_rate.hf.ipynb",
    ]
    assert names[7] == "02_serving.vllm.ipynb"
    assert names[-2:] == ["07_analysis.ipynb", "08_post.ipynb"]
    assert len(set(names)) == len(names)


def test_a_chapter_is_the_copy_that_holds_every_engine(tmp_path):
    run = params.read_file(ROOT / "params/demo.yaml")
    for step in pipeline.steps(run, "params/demo.yaml"):
        (tmp_path / step.copy_name).touch()
    names = [p.name for p in pipeline.chapters(run, "params/demo.yaml", tmp_path)]
    assert names == [
        "00_preflight.ipynb",
        "01_prediction.ipynb",
        "02_serving.hf.ipynb",
        "02_serving.vllm.ipynb",
        "03_short_prompts.vllm.ipynb",
        "04_long_prompts.vllm.ipynb",
        "05_prompt_length.vllm.ipynb",
        "06_arrival_rate.vllm.ipynb",
        "06_prefix_cache.vllm.ipynb",
        "07_analysis.ipynb",
        "08_post.ipynb",
    ]
    (tmp_path / "03_short_prompts.vllm.ipynb").unlink()  # vLLM did not come that far
    assert "03_short_prompts.hf.ipynb" in [p.name for p in pipeline.chapters(run, "params/demo.yaml", tmp_path)]


def run_command(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "servebook.cli", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=600,
    )


@pytest.mark.parametrize(
    ("change", "expect"),
    [
        (("warmup_requests: 4", "warmup_request: 4"), "unknown key load.warmup_request. Did you mean warmup_requests?"),
        (("gpu: detect", "gpu: A4O"), "A40"),
        (("config: tiny-qwen2\n  weights: dummy", "path: ./nowhere\n  weights: dummy"), "nowhere"),
        (("config: tiny-qwen2", "config: tiny-qwen"), "tiny-qwen2"),
        (
            ("prompt_tokens: [64, 256, 512, 1024]", "prompt_tokens: [64, 8192]"),
            "sweeps.prompt_length asks for 8,192 prompt",
        ),
        (("prompt_tokens: 1024\n", "prompt_tokens: 2030\n"), "more than engines.vllm.max_model_len of 2,048"),
    ],
    ids=[
        "unknown key",
        "unknown GPU",
        "missing model folder",
        "unknown packaged config",
        "past the context",
        "past max_model_len",
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, change, expect):
    text = (ROOT / "params/demo.yaml").read_text()
    assert change[0] in text
    (tmp_path / "bad.yaml").write_text(text.replace(*change, 1))
    done = run_command("check", str(tmp_path / "bad.yaml"), SERVEBOOK_OUTPUTS=str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert expect in done.stderr
    assert not (tmp_path / "out").exists()


def test_two_runs_into_one_folder_the_second_is_refused(tmp_path):
    from servebook.run_folder.lock_and_signals import single_run

    with (
        single_run(tmp_path),
        pytest.raises(ServebookError, match="another run is writing here"),
        single_run(tmp_path),
    ):
        pass
    with pytest.raises(ServebookError, match="there is no run here"), single_run(tmp_path / "none"):
        pass


def test_an_interruption_within_a_finalizer_is_not_lost():
    from servebook.run_folder.lock_and_signals import orderly_signals

    class Ended:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)  # Python ignores what is raised here

    with pytest.raises(KeyboardInterrupt), orderly_signals():
        Ended()
        time.sleep(60)


def test_serve_says_how_to_measure_and_ctrl_c_is_its_end(tmp_path, monkeypatch, capsys):
    class Served:
        url, model = "http://127.0.0.1:8123", "tiny qwen"

        def alive(self):
            return True

        def wait(self, _):
            raise KeyboardInterrupt

    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(Book, "engine", lambda *_: contextlib.nullcontext(Served()))
    assert cli.main(["serve", "params/demo.yaml", "--engine", "hf"]) == 0
    told = capsys.readouterr()
    assert "servebook measure --url http://127.0.0.1:8123 --model 'tiny qwen'\n" in told.out
    assert told.out.endswith("\nhf ended\n") and told.err == ""


@pytest.mark.parametrize(("command", "kept"), [("_run", True), ("_capacity", False), ("_predict", False)])
def test_an_interrupted_command_says_that_figures_are_kept_where_it_measured(command, kept, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, command, interrupted)
    monkeypatch.setitem(cli.CALLS, command[1:], interrupted)
    assert cli.main([command[1:], "params/demo.yaml"]) == 130
    assert ("what was measured is kept" in capsys.readouterr().err) is kept


def test_an_unwritable_outputs_folder_is_one_line(tmp_path):
    (tmp_path / "file").touch()  # root ignores permissions, not the kind of a path
    done = run_command("run", "params/demo.yaml", SERVEBOOK_OUTPUTS=str(tmp_path / "file"))
    assert done.returncode == 1
    assert "cannot write the run's folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# In a process of its own: an interruption silences asyncio for the rest of the process
LEAVE_A_TASK = """
import asyncio, gc, signal, sys
from servebook.run_folder.lock_and_signals import orderly_signals

async def nobody_waits():
    raise RuntimeError("the kernel died")

async def leave():
    asyncio.get_running_loop().create_task(nobody_waits())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()

if sys.argv[1] == "interrupted":
    try:
        with orderly_signals():
            signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        pass
asyncio.run(leave())
"""


@pytest.mark.parametrize(("way", "traceback"), [("undisturbed", True), ("interrupted", False)])
def test_tasks_that_an_interruption_leaves_show_no_traceback(way, traceback):
    program = [sys.executable, "-c", LEAVE_A_TASK, way]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    assert ("never retrieved" in done.stderr) is traceback


def test_sigterm_unwinds_and_says_that_results_are_kept(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-m", "servebook.cli", "run", "params/demo.yaml", "--only", "01_prediction"],
        cwd=ROOT,
        env={**os.environ, "SERVEBOOK_OUTPUTS": str(tmp_path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert run.stderr is not None
    assert "[1/1] 01_prediction" in run.stderr.readline()
    run.send_signal(signal.SIGTERM)
    said = run.stderr.read()
    assert run.wait(timeout=300) == 130
    assert "what was measured is kept" in said
