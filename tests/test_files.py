"""A fault of the file system is one clear line, whatever stands in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from servebook.cli.command import main
from servebook.common import files
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.run_folder import frozen_predictions, pack
from servebook.run_folder.stored_run import StoredRun


def test_a_file_where_a_folder_should_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ServebookError, match=r"taken.*cannot write"):
        files.write_text(tmp_path / "taken" / "run" / "x.json", "{}")
    with pytest.raises(ServebookError, match=r"taken.*cannot write"):
        files.write_text(tmp_path / "taken" / "x.json", "{}")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_fault_names_the_file_that_was_meant_and_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    target = tmp_path / "full" / "x.json"
    target.mkdir()  # root ignores permissions, not the kind of a path
    with pytest.raises(ServebookError) as fault, files.writing(target) as scratch:
        scratch.write_text("new")
    told = str(fault.value)
    assert str(target) in told and ".tmp" not in told and "Free space or permissions there, or write to" in told
    assert [p.name for p in target.parent.iterdir()] == ["x.json"]
    with pytest.raises(ServebookError, match=r"x\.json: cannot write"):
        pack._copy(Path(__file__), target)


def test_what_fails_otherwise_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(ZeroDivisionError), files.writing(tmp_path / "x") as scratch:
        scratch.write_text("half of the n")
        raise ZeroDivisionError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_a_link_stays_and_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As root a rename would put a file in the place of /dev/null."""
    (tmp_path / "store").write_text("old")
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "store").read_text() == "new"
    for name, why in (("fifo", "a device or a pipe"), ("loop", "symbolic links"), (".", "a folder")):
        for write in (lambda path: files.write_text(path, "x"), files.check_file):
            with pytest.raises(ServebookError, match=why):
                write(tmp_path / name)
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "loop").is_symlink()


def test_a_file_that_can_be_written_is_not_made_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    files.check_file(tmp_path / "old")
    files.check_file(tmp_path / "a/new")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "old"] and (tmp_path / "old").read_text() == "old"


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    page = str(tmp_path / "fifo")
    for arguments in (
        ["choose", "params/demo.yaml", "--html", page],
        ["predict", "no/such.yaml", "--html", page],
        ["score", "no/such.yaml", "--measured", "x", "--html", page],
        ["compare", "no/such", "no/other", "--out", page],
    ):
        assert main(arguments) == 1
        assert "a device or a pipe" in capsys.readouterr().err
    assert main(["post", "no/such", "--front-matter", "nope"]) == 1
    assert "no front matter for 'nope'. Choose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "cannot be read"), (b'{"asked": {}', "cannot be read"), (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"), (b"[1]", "is no JSON object with asked, gpu"),
        (b'{"asked": {}}', "is no JSON object with asked, gpu"), (b'"x"', "is no JSON object"),
    ],
)  # fmt: skip
def test_a_stored_file_that_is_damaged_is_one_line_with_a_way_out(tmp_path: Path, content: bytes, what: str) -> None:
    run = StoredRun(params.read_file(files.ROOT / "params/demo.yaml"), tmp_path, files.ROOT / "params")
    run.files.hardware.write_bytes(content)
    with pytest.raises(ServebookError, match=rf"hardware\.json: {what}.*Remove the file") as told:
        _ = run.gpu
    assert "\n" not in str(told.value)
    run.files.hardware.write_bytes(b'{"asked": %s, "gpu": {"nme": 1}}' % json.dumps(ASKED).encode())
    with pytest.raises(ServebookError, match="holds no hardware"):
        _ = run.gpu


ASKED = params.read_file(files.ROOT / "params/demo.yaml").hardware.model_dump(mode="json")


@pytest.mark.parametrize("name", ["predictions.json", "engines/vllm.json", "provenance.json"])
@pytest.mark.parametrize("content", ["[1]", "3", '{"frozen'])
def test_what_is_no_object_is_one_line_wherever_it_is_read(tmp_path: Path, name: str, content: str) -> None:
    run = StoredRun(params.read_file(files.ROOT / "params/demo.yaml"), tmp_path, files.ROOT / "params")
    (tmp_path / "engines").mkdir()
    (tmp_path / name).write_text(content)
    read = {"pre": lambda: frozen_predictions.read(tmp_path), "eng": run.all_facts, "pro": run.sessions.provenance}
    with pytest.raises(ServebookError, match=name):
        read[name[:3]]()
