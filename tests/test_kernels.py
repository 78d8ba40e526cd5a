"""Kernels forked from one process with the notebooks' imports (run/kernels.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from servebook.common.notebook_format import UNUSED
from servebook.run import kernels
from servebook.run.notebook_execution import execute
from test_pipeline import notebook

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="kernels are forked on Linux only")
CELL = """
import os, random, sys, numpy
imported = "servebook.report.tables" in sys.modules
changed, numpy.changed = hasattr(numpy, "changed"), True
path = [p for p in sys.path if os.path.realpath(p or ".") == os.getcwd()]
said = [os.getpid(), os.getppid(), os.getsid(0), imported, changed, os.environ["SAID"], os.path.basename(os.getcwd())]
print(*said, random.random(), numpy.random.rand(), __name__, len(path), sep="\\n")
"""


def said_by(folder: Path) -> list[str]:
    execute(notebook(folder, CELL), folder / "done.ipynb", {})
    cells = json.loads((folder / "done.ipynb").read_text())["cells"]
    return "".join(t for c in cells for o in c.get("outputs", []) for t in o["text"]).split("\n")[:-1]


def test_kernels_are_forked_with_the_imports_and_share_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAID", "before")
    ordinary = said_by(tmp_path)
    assert ordinary[3:7] == ["False", "False", "before", tmp_path.name]
    with kernels.forked():
        process = kernels._current
        assert process is not None
        monkeypatch.setenv("SAID", "later")
        first, second = said_by(tmp_path), said_by(tmp_path)
        parent = process._process.pid
        for said in (first, second):
            assert said[1:7] == [str(parent), said[0], "True", "False", "later", tmp_path.name]
            assert said[9:] == ordinary[9:], "a notebook's module and search path are those of an ordinary kernel"
        assert len({said[0] for said in (ordinary, first, second)}) == 3
        assert first[7] != second[7] and first[8] != second[8], "random numbers"
        psutil.Process(parent).kill()
        process._process.wait()
        assert said_by(tmp_path)[1] == str(os.getpid()), "without that process a kernel starts as usual"
    assert kernels._current is None


def test_the_process_ends_with_the_block_and_kernels_end_with_the_process(tmp_path: Path) -> None:
    with kernels.forked():
        process = kernels._current
        assert process is not None
        connection = tmp_path / "connection.json"
        kernel = process.fork(["-f", str(connection)], None, str(tmp_path))
        assert kernel is not None
        while not connection.exists():
            assert kernel.poll() is None
            time.sleep(0.05)
    assert process._process.poll() is not None
    assert kernel.wait(30) == 1
    kernel.kill()  # nothing is there any more


def test_nbformat_is_imported_without_the_parser_that_it_does_not_use() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import sys\nfrom servebook.common.notebook_format import quick_import\n"
         f"with quick_import():\n import nbformat\nprint({UNUSED!r} in sys.modules, bool(nbformat.validate))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.split() == ["False", "True"]
