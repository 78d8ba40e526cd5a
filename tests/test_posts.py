"""docs/posts.md keeps its promises: every notebook, section and function that it names is there."""

import importlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "posts.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s]+?(?:\([^)]*\)[^)\s]*)*)\)")  # an address may hold a pair of brackets


def headings(notebook: Path) -> set[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    lines = [line for c in cells if c["cell_type"] == "markdown" for line in "".join(c["source"]).splitlines()]
    return {line.lstrip("#").strip().replace(" ", "-") for line in lines if line.startswith("#")}


def test_every_link_leads_to_a_section_that_is_there() -> None:
    links = LINK.findall(TEXT)
    assert len(links) > 60
    for link in links:
        file, _, section = link.partition("#")
        path = (ROOT / "docs" / file).resolve()
        assert path.exists(), link
        if section:
            assert section in headings(path), link


def test_every_function_is_there() -> None:
    names = [
        cells[3].strip().strip("`") for line in TEXT.splitlines() if len(cells := line.strip("|").split(" | ")) == 5
    ]
    names = [n for n in names if re.fullmatch(r"[\w.]+\.\w+", n)]
    assert len(names) > 40
    for name in names:
        parts, found = ["servebook", *name.split(".")], None
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[cut:]:
                found = getattr(found, attribute)
            break
        assert found is not None and not isinstance(found, type(importlib)), name


def test_each_post_has_its_part_and_each_row_says_what_differs() -> None:
    assert re.findall(r"^## (.+?)(?::|$)", TEXT, re.MULTILINE)[:3] == ["Post 1", "Post 2", "Write-up"]
    rows = [line.strip("|").split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "--" not in line]
    assert all(len(row) == 5 and row[4].strip() for row in rows)


def test_params_that_it_names_are_shipped() -> None:
    named = set(re.findall(r"`(params/[\w.-]+\.yaml)`", TEXT))
    assert named and all((ROOT / name).exists() for name in named)
