"""JupyterLab as a person uses it: explore answers to a slider, a sweep run by hand is watched and interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chromium
import jupyter_lab
import nbconvert
import psutil
import pytest
from servebook.engines import records
from servebook.run_folder import results

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PATH is None, reason="Chromium is not installed here"),
]
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
RUN = """
run: by-hand
title: A sweep that takes longer than anyone waits
model: {config: tiny-qwen2, weights: dummy}
hardware: {gpu: detect}
engines: {hf: {kind: naive, device: cpu}}
sweeps:
  short_prompts: {kind: concurrency, prompt_tokens: 64, output_tokens: 16, concurrency: [1, 2, 4]}
load: {warmup_requests: 2, min_requests: 5000, max_requests: 5000, max_seconds: 600, scrape_interval_s: 1}
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the notebooks: what is run here is saved there."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(NOTEBOOKS, root / "notebooks", ignore=shutil.ignore_patterns(".*"))
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, root: Path, outputs: Path) -> Iterator[str]:
    with jupyter_lab.server(root, tmp_path_factory.mktemp("home"), SERVEBOOK_OUTPUTS=str(outputs)) as url:
        yield url


@pytest.fixture
def lab(server: str) -> Iterator[jupyter_lab.Page]:
    with chromium.browser() as tab:
        yield jupyter_lab.Page(tab, server)


def saved(lab: jupyter_lab.Page, file: Path) -> dict:
    lab.save()
    return json.loads(file.read_text())


def outputs_of(book: dict) -> list[dict]:
    return [o for c in book["cells"] if c["cell_type"] == "code" for o in c["outputs"]]


def test_it_opens_where_one_starts(lab: jupyter_lab.Page) -> None:
    lab.open("notebooks/README.md", at="/")
    lab.until("here.node.querySelector('.jp-MarkdownViewer h1').textContent.startsWith('Start here')", "the start page")
    lab.tab.ask("here.node.querySelector('a[href*=explore]').click()")
    lab.front("notebooks/explore.ipynb")


def test_explore_answers_to_a_slider(lab: jupyter_lab.Page, root: Path) -> None:
    lab.open("notebooks/explore.ipynb")
    lab.notebook()
    lab.command("notebook:run-all-cells")
    panel = "here.content.widgets.at(-1).node"  # the notebook ends at it
    lab.until(
        f"{panel}.querySelectorAll('.sb-lab svg').length >= 4 && {panel}.querySelector('.noUi-handle')", "the panel"
    )
    jupyter_lab.until(lab.ran, "the end of the cells")
    drawn = f"{panel}.querySelector('.sb-lab').innerHTML.replaceAll('&nbsp;', ' ')"
    before = lab.tab.ask(drawn)
    # the concurrency's handle: the third slider; one step to the left
    lab.tab.ask(f"{panel}.querySelectorAll('.noUi-handle')[2].focus()")
    lab.press("ArrowLeft", 37)
    lab.until(f"{drawn}.includes('C = 96')", "the redrawn figures")
    after = lab.tab.ask(drawn)
    assert after.count("<svg") == before.count("<svg") == 2 and after != before
    assert lab.tab.ask(
        "[...here.node.querySelectorAll('.jp-RenderedHTMLCommon')].every(e => !/Traceback/.test(e.textContent))"
    )
    file = root / "notebooks/explore.ipynb"
    book = saved(lab, file)
    assert "widgets" not in book["metadata"]
    assert all(o["output_type"] != "error" for o in outputs_of(book))
    exporter = nbconvert.HTMLExporter(template_name="basic")  # with no kernel and no widget state
    page, _ = exporter.from_filename(str(file))
    assert "C\u00a0=\u00a096" in page and page.count("<svg") >= 6 and "need a running kernel" in page


@contextlib.contextmanager
def serving(params: Path, outputs: Path) -> Iterator[None]:
    """The run's engine, started by somebody else."""
    command = [sys.executable, "-m", "servebook.cli", "serve", str(params), "--engine", "hf"]
    env = {**os.environ, "SERVEBOOK_OUTPUTS": str(outputs)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert "serves" in (process.stdout.readline() if process.stdout else "")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.terminate()


@pytest.mark.parametrize("whose", ["its own", "a running one"])
def test_a_sweep_by_hand_is_watched_and_interrupted(
    lab: jupyter_lab.Page, root: Path, outputs: Path, tmp_path: Path, whose: str
) -> None:
    joins = whose == "a running one"
    run = outputs / ("joined" if joins else "by-hand")
    params = tmp_path / "by-hand.yaml"
    params.write_text(RUN.replace("run: by-hand", f"run: {run.name}"))
    name = f"03_short_prompts_{run.name}.ipynb"
    file = root / "notebooks" / name
    file.write_text((NOTEBOOKS / "03_short_prompts.ipynb").read_text().replace("params/demo.yaml", str(params)))
    with serving(params, outputs) if joins else contextlib.nullcontext():
        record = interrupted_sweep(lab, name, run)
        rows = results.read_rows(results.rows_path(run, "short_prompts", "hf", "c0001"))
        assert sum(r["ok"] for r in rows) >= 3 and sum(not r["ok"] for r in rows) <= 1  # the one that was in flight
        assert bool(records.processes_with(record["token"])) == joins, "what the notebook did not start goes on"
    assert records.processes_with(record["token"]) == [] and not records.is_same(record["guard"])
    book = saved(lab, file)
    [error] = [o for o in outputs_of(book) if o["output_type"] == "error"]
    assert len(error["traceback"]) == 1  # what is kept, and nothing of the load generator's insides
    kinds = {key for o in outputs_of(book) for key in o.get("data", {})}
    assert "widgets" not in book["metadata"] and "application/vnd.jupyter.widget-view+json" not in kinds
    assert 'class="bar"' not in json.dumps(book)


def interrupted_sweep(lab: jupyter_lab.Page, name: str, run: Path) -> dict:
    """Run a sweep's notebook, watch its figures grow, stop it by the button; returns the engine's process record."""
    lab.open(f"notebooks/{name}")
    lab.notebook()
    lab.command("notebook:run-all-cells")
    lab.until("here.node.querySelector('.sb-lab .bar')", "the progress")
    shown = "here.node.querySelector('.sb-lab').textContent.replaceAll('\\u00a0', ' ')"
    lab.until(f"/C = 1, so far: TTFT [\\d.]+ .*TPOT/.test({shown})", "figures so far")
    lab.until("here.node.querySelector('.sb-lab circle')", "a growing plot")
    record: dict = json.loads(records.record_of(run, "hf").read_text())["process"]
    assert psutil.pid_exists(record["server"]["pid"])
    lab.click("[data-command='notebook:interrupt-kernel']")
    lab.until(
        "/interrupted with 0 of 3 points done; the \\d+ requests of c0001/.test(here.node.textContent)",
        "the interruption",
    )
    jupyter_lab.until(lab.idle, "an idle kernel")
    return record
