"""The map of the code is the code: every module is in it with its own first line, and imports keep to the layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("docs_map", DOCS / "map.py")
assert _spec and _spec.loader
code_map = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(code_map)


def test_the_map_is_up_to_date() -> None:
    assert (DOCS / "map.md").read_text() == code_map.text(), "python docs/map.py writes it again"


def test_imports_keep_to_the_layers() -> None:
    assert not code_map.against_the_layers()


@pytest.mark.parametrize("name", code_map.modules())
def test_a_module_says_in_one_line_what_it_is_for(name: str) -> None:
    said = code_map.purpose(code_map.modules()[name])
    assert 20 < len(said) <= 120 and said[-1] in ".:"


def test_a_module_that_reaches_forward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "model.py": "def f():\n    from .book import Book\n",
        "book.py": "from . import model\nif TYPE_CHECKING:\n    from .cli import main\n",
        "cli.py": "from servebook import book\n",
        "stray.py": "",
    }.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(code_map, "LIB", tmp_path)
    assert code_map.against_the_layers() == [
        "model (Model and hardware) imports book (The run)", "stray is in no layer of docs/map.py",
    ]  # fmt: skip
