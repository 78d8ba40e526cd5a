"""A fault of the file system is one clear line, whatever stands in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from servebook.cli.command import main
from servebook.common import files
from servebook.common.errors import ServebookError
from servebook.run_folder import pack


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
