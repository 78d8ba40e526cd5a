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


def test_imports_point_one_way() -> None:
    assert not code_map.wrong_imports()


def test_few_packages() -> None:
    assert len([p for p in code_map.LIB.iterdir() if p.name != "__pycache__"]) <= 16


@pytest.mark.parametrize("name", code_map.modules())
def test_a_module_says_in_one_line_what_it_is_for(name: str) -> None:
    said = code_map.purpose(code_map.modules()[name])
    assert 20 < len(said) <= 120 and said[-1] in ".:"


def test_a_module_that_reaches_forward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "model/reader.py": "def f():\n    from ..run.book import Book\n",
        "run/book.py": "from .. import model\nif TYPE_CHECKING:\n    from ..cli.command import main\n",
        "cli/command.py": "from servebook.run import book\n",
        "cli/plan.py": "from . import command, predict\n",
        "cli/predict.py": "def f():\n    from .plan import main\n",
        "stray.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(code_map, "LIB", tmp_path)
    wrong = code_map.wrong_imports()
    assert wrong[:3] == [
        "model.reader imports run.book, and run comes after model",
        "run.book imports cli.command, and cli comes after run",
        "stray is in no package of docs/map.py",
    ]
    assert len(wrong) == 5 and all(w.startswith("circle of imports: ") for w in wrong[3:])
