"""A fault of the file system is one clear line, whatever stands in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from servebook import files
from servebook.errors import ServebookError


def test_a_file_where_a_folder_should_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ServebookError, match=r"taken.*cannot write"):
        files.write_text(tmp_path / "taken" / "run" / "x.json", "{}")
    with pytest.raises(ServebookError, match=r"taken.*cannot write"):
        files.write_text(tmp_path / "taken" / "x.json", "{}")
    assert (tmp_path / "taken").read_text() == "a file"
