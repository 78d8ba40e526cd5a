"""A fault of the file system is one clear line, whatever stands in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
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
