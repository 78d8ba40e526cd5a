"""What is allowed and had better be known is one line on stderr, and changes no exit status."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from servebook import engines
from servebook.cli import command as cli
from servebook.config import params
from servebook.run import pipeline, preflight
from servebook.run.book import Book
from servebook.run_folder.sessions import Sessions

TEXT = """
run: r
title: t
model: {model}
hardware: {{gpu: detect}}
engines: {{e: {engine}}}
"""
SMALL = "{config: tiny-qwen2, weights: dummy}"


def warned(tmp_path: Path, model: str = SMALL, engine: str = "{kind: naive}") -> list[str]:
    return preflight.warnings(params.read_text(TEXT.format(model=model, engine=engine)), tmp_path / "project/params")


def test_paths_that_leave_the_project_are_said(tmp_path: Path) -> None:
    assert warned(tmp_path) == []
    assert warned(tmp_path, "{path: ./model, weights: dummy}") == []
    outside = warned(tmp_path, "{path: ../../elsewhere, weights: dummy}")
    assert outside == [f"model.path is outside the project: {tmp_path / 'elsewhere'}"]
    link = tmp_path / "project/params/link"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path)
    assert len(warned(tmp_path, "{path: ./link, weights: dummy}")) == 1, "a link is followed"
    extra = "{kind: vllm, extra_args: [--chat-template=/etc/t.jinja, --seed, '1']}"
    assert warned(tmp_path, engine=extra) == ["engines.e.extra_args is outside the project: /etc/t.jinja"]


def test_a_server_that_is_opened_to_the_network_is_said(tmp_path: Path) -> None:
    for flag in ("['--host=0.0.0.0']", "[--host, 0.0.0.0]"):
        (said,) = warned(tmp_path, engine=f"{{kind: vllm, extra_args: {flag}}}")
        assert said.startswith("engines.e.extra_args lets the server listen on 0.0.0.0")
    assert warned(tmp_path, engine="{kind: openai, command: [serve, --host, 127.0.0.1, --port, '{port}']}") == []
    (said,) = warned(tmp_path, engine="{kind: openai, command: [serve, --trust-remote-code, '{port}']}")
    assert said == "--trust-remote-code in engines.e.command is on: the model's own Python code is executed"


def test_a_model_without_a_revision_names_the_one_to_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "pin it with model.revision, a commit from" in warned(tmp_path, "{hub: some/model}")[0]
    ref = tmp_path / "hub/models--some--model/refs/main"
    ref.parent.mkdir(parents=True)
    ref.write_text("0123abc")
    assert "pin it with model.revision: 0123abc" in warned(tmp_path, "{hub: some/model}")[0]
    assert warned(tmp_path, "{hub: some/model, revision: 0123abc}") == []
    assert "trust_remote_code" in warned(tmp_path, "{hub: a/b, revision: x, trust_remote_code: true}")[0]


def test_check_says_it_on_stderr_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from servebook.model import reader as model

    (tmp_path / "p").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text((model.PACKAGED / "tiny-qwen2.json").read_text())
    path = tmp_path / "p/r.yaml"
    path.write_text(TEXT.format(model="{path: ../m, weights: dummy}", engine="{kind: naive}"))
    assert cli.main(["check", str(path)]) == 0
    said = capsys.readouterr()
    assert said.err == f"servebook: {path}: model.path is outside the project: {tmp_path / 'm'}\n"
    assert ": valid. " in said.out


def test_gpu_memory_that_is_not_back_is_a_warning_of_the_outcome(tmp_path: Path) -> None:
    outcome = pipeline.RunOutcome()
    for left in (0.1, 6.0):
        book = SimpleNamespace(sessions=Sessions("r", tmp_path))
        bench = pipeline._Bench(book, SimpleNamespace(), outcome)  # type: ignore[arg-type]
        bench._engine = SimpleNamespace(name="vllm", facts={"gpu_gib_left": left}, stop=lambda: None)
        bench.clear()
    assert outcome.warnings == ["vllm has ended, but 6.0 GiB of GPU memory are not back"] and not outcome.faults


def test_another_version_of_the_server_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "out"))
    (tmp_path / "r.yaml").write_text(TEXT.format(model=SMALL, engine="{kind: naive}"))
    book = Book.open(tmp_path / "r.yaml", create=True)
    installed = engines.installed_version(book.params, "e")
    assert installed is not None and installed.startswith("transformers ")
    (book.dir / "engines").mkdir()
    for version, again in ((installed, False), ("transformers 1.0", True)):
        (book.dir / "engines/e.json").write_text(json.dumps({"version": version}))
        assert book.point_status.missing("e", [None], installed) is again
