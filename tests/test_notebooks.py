"""The committed notebooks stay clean, explain themselves, and hold no logic."""

import ast
import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def book(request):
    return json.loads(request.param.read_text())


def code(book):
    return [c for c in book["cells"] if c["cell_type"] == "code"]


def test_there_is_one_notebook_a_stage():
    assert [p.stem for p in NOTEBOOKS][:10] == [
        "00_preflight", "01_prediction", "02_serving", "03_short_prompts", "04_long_prompts", "05_prompt_length",
        "06_arrival_rate", "06_prefix_cache", "07_analysis", "08_post",
    ]  # fmt: skip


def test_no_outputs_no_papermill_metadata(book):
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code(book))
    assert "papermill" not in book["metadata"] and "widgets" not in book["metadata"]
    assert all("papermill" not in c["metadata"] for c in book["cells"])


def test_the_kernel_is_the_one_that_is_always_there(book):
    assert book["metadata"]["kernelspec"]["name"] == "python3"


def test_one_parameters_cell_of_literals(book):
    tagged = [c for c in code(book) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)


def test_it_opens_with_its_question_inputs_and_outputs(book):
    first = book["cells"][0]
    text = "".join(first["source"])
    assert first["cell_type"] == "markdown" and text.startswith("# ")
    assert ("**Question.**" in text and "Reads" in text and "Writes" in text) or "Reads everything" in text


def test_no_definitions_and_no_local_paths(book):
    for cell in code(book):
        source = "".join(cell["source"])
        tree = ast.parse(source)
        assert not any(
            isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) for n in ast.walk(tree)
        )
        assert not re.search(r"/(home|root|tmp|work|Users)/", source)
