"""A run with servers that do not answer, in folders with odd names, read again where it was left."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servebook.common.errors import ServebookError, ServerBusy
from servebook.common.files import ROOT
from servebook.common.measured_point import MeasuredPoint
from servebook.config.points import PointSpec
from servebook.report import notes
from servebook.run import measuring, notebook_execution, pipeline
from servebook.run.book import Book
from servebook.run.replay import out_of_date
from servebook.run_folder.lock_and_signals import single_sweep


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    return Book.open(ROOT / "params/demo.yaml", create=True)


SERVER = SimpleNamespace(alive=lambda: True, fault=lambda s: None, log_tail=lambda n: "", url="", model="m")


def measured_with(book: Book, monkeypatch: pytest.MonkeyPatch, load: Any) -> list[PointSpec]:
    specs = book.specs("vllm", "short_prompts")
    monkeypatch.setattr(measuring._Measuring, "_load", lambda self, spec, *_: load(spec))
    monkeypatch.setattr(type(book), "engine", lambda self, name: contextlib.nullcontext(SERVER))
    measuring.measure(book, "short_prompts", "vllm")
    return specs


def test_a_point_of_no_request_is_not_done(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(spec: PointSpec) -> MeasuredPoint:
        return MeasuredPoint(
            sweep=spec.sweep, engine=spec.engine, point_id=spec.point, requests=0, failures=0, prompt_tokens=64,
            output_tokens=16, stop_reason="every request failed: HTTP 429: Rate limit reached",
        )  # fmt: skip

    specs = measured_with(book, monkeypatch, nothing)
    assert book.point_status.todo(specs) == specs
    faults = book.point_status.faults("vllm", "short_prompts")
    assert len(faults) == len(specs) and "HTTP 429: Rate limit reached" in faults[0]


def test_a_busy_server_costs_its_points_and_not_the_notebook(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(spec: PointSpec) -> MeasuredPoint:
        raise ServerBusy("the server is busy (HTTP 429)", "http://h", "Try again later")

    specs = measured_with(book, monkeypatch, busy)
    assert book.point_status.todo(specs) == specs and "HTTP 429" in book.point_status.faults("vllm", "short_prompts")[0]


def test_a_sweep_is_measured_by_one_at_a_time(book: Book) -> None:
    with single_sweep(book.dir, "short_prompts", "vllm"):
        with pytest.raises(ServebookError, match="another notebook or run measures it on vllm"):
            measuring.measure(book, "short_prompts", "vllm")
        with single_sweep(book.dir, "short_prompts", "hf"):
            pass


@pytest.mark.parametrize("name", ["a{", "a{x}", "}{", "a{PARAMS}"])
def test_papermill_leaves_braces_of_a_path_alone(name: str) -> None:
    from papermill.parameterize import parameterize_path

    assert parameterize_path(notebook_execution._literal(Path("/tmp") / name), {"PARAMS": "p"}) == f"/tmp/{name}"


def test_a_parameter_file_is_found_from_every_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT / "params")
    assert pipeline._from_anywhere("demo.yaml") == os.path.join("params", "demo.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("")
    assert pipeline._from_anywhere("own.yaml") == str((tmp_path / "own.yaml").resolve())


def test_notes_that_are_not_utf8_are_one_line_and_a_mark_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "ROOT", tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/r.md").write_bytes(b"one\nL\xe4ufer")
    with pytest.raises(ServebookError, match=r"notes/r\.md, line 2: is not UTF-8 text"):
        notes.read(tmp_path, "r")
    (tmp_path / "notes/r.md").write_bytes(b"\xef\xbb\xbf# Title")
    assert notes.read(tmp_path, "r") == "# Title"


def test_notebooks_that_lack_a_stored_point_are_out_of_date(book: Book) -> None:
    assert out_of_date(book) is None  # nothing is stored
    point = book.dir / "requests/short_prompts/vllm/c0001.json"
    point.parent.mkdir(parents=True)
    point.write_text("{}")
    assert out_of_date(book) == "00_preflight.ipynb is missing"
    copies = book.dir / "notebooks"
    copies.mkdir()
    for step in pipeline.steps(book.params, ""):
        (copies / step.copy_name).write_text("{}")
    (book.dir / "engines").mkdir()
    (book.dir / "engines/vllm.json").write_text('{"kind": "vllm"}')
    assert out_of_date(book) is None
    later = (copies / "00_preflight.ipynb").stat().st_mtime + 60
    os.utime(point, (later, later))
    assert "is older than a point of its sweep" in str(out_of_date(book))


def test_a_kernel_that_dies_at_its_start_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took the port that was meant for it."""
    import papermill

    source = tmp_path / "a.ipynb"
    source.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    tries: list[str] = []
    told: list[str] = []

    def dies(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kernel died before replying to kernel_info")

    def dies_once(source: str, target: str, *_: Any, **__: Any) -> None:
        tries.append(target)
        if len(tries) == 1:
            dies()
        Path(target).write_text('{"cells": []}')

    monkeypatch.setattr(papermill, "inspect_notebook", lambda path: {})
    monkeypatch.setattr(papermill, "execute_notebook", dies_once)
    notebook_execution.execute(source, tmp_path / "out.ipynb", {}, on_retry=told.append)
    assert len(tries) == 2 and told == ["the kernel of a.ipynb died; running it again"]
    monkeypatch.setattr(papermill, "execute_notebook", dies)
    with pytest.raises(ServebookError, match="its kernel died twice"):
        notebook_execution.execute(source, tmp_path / "out.ipynb", {})
