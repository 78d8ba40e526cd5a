"""The committed notebooks stay clean, explain themselves, and hold no logic."""

import ast
import json
import re
from pathlib import Path

import papermill
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from servebook.common.errors import ServebookError
from servebook.run import notebook_execution

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(p for p in FOLDER.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def book(request):
    return json.loads(request.param.read_text())


def code(book):
    return [c for c in book["cells"] if c["cell_type"] == "code"]


def test_there_is_one_notebook_a_stage():
    assert [p.stem for p in NOTEBOOKS][:11] == [
        "00_preflight", "01_prediction", "02_serving", "03_short_prompts", "04_long_prompts", "05_prompt_length",
        "06_arrival_rate", "06_prefix_cache", "06_traffic", "07_analysis", "08_post",
    ]  # fmt: skip


def test_no_outputs_no_papermill_metadata(book):
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code(book))
    assert set(book["metadata"]) <= {"kernelspec", "language_info"}
    assert all(set(c["metadata"]) <= {"tags"} for c in book["cells"]), "no papermill, collapsed, widget or editor state"
    assert not any(c.get("attachments") for c in book["cells"])
    ids = [c["id"] for c in book["cells"]]
    assert len(set(ids)) == len(ids)


def test_the_kernel_is_the_one_that_is_always_there(book):
    assert book["metadata"]["kernelspec"]["name"] == notebook_execution.KERNEL
    assert notebook_execution.KERNEL in KernelSpecManager().find_kernel_specs()


def test_papermill_can_read_every_parameter(caplog):
    """It warns on every run of a line that it cannot: one with two equals signs, be it in a comment."""
    for path in NOTEBOOKS:
        papermill.inspect_notebook(str(path))
    assert not caplog.records


def test_one_parameters_cell_of_literals(book):
    tagged = [c for c in code(book) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0] is code(book)[0], "papermill puts what it is given right after it"
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        assert isinstance(statement, ast.Assign) and len(statement.targets) == 1
        assert isinstance(statement.targets[0], ast.Name) and statement.targets[0].id.isupper()
        ast.literal_eval(statement.value)


def test_it_opens_with_its_question_inputs_and_outputs(book):
    first = book["cells"][0]
    text = "".join(first["source"])
    assert first["cell_type"] == "markdown" and text.startswith("# ")
    assert "**Question.**" in text and "Reads" in text
    # the post is the output, its opening says where words go that are to stay
    assert "Writes" in text or "servebook report" in text


def test_no_definitions_and_no_local_paths(book):
    for cell in book["cells"]:
        source = "".join(cell["source"])
        assert not re.search(r"/(home|root|tmp|work|Users)/", source)
        if cell["cell_type"] == "code":
            tree = ast.parse(source)  # no magics either
            definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
            assert not any(isinstance(n, definitions) for n in ast.walk(tree))


@pytest.mark.parametrize("name", ["07_analysis", "08_post"])
def test_an_unmeasured_run_is_one_line_and_no_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "outputs"))
    cells = [c for c in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    given = {"PARAMS": str(FOLDER.parent / "params/demo.yaml")}
    with pytest.raises(ServebookError) as refused:
        exec("".join(cells[1]["source"]), given)
    assert "Run notebooks 01 to 06 first" in refused.value.line() and "\n" not in refused.value.line()
    assert not (tmp_path / "outputs").exists()
