"""Replay of a stored run: every notebook is executed again on its frozen predictions and measurements."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..common.errors import ServebookError
from ..run_folder.layout import point_of
from . import pipeline
from .book import STORED, Book, ReplayedRun
from .notebook_execution import execute


def replay_run(run_dir: Path, on_step: Callable[[str], None] = lambda _: None) -> None:
    """Execute the notebooks of a stored run into its folder; on_step gets each step's name.

    Raises ServebookError if one fails.
    """
    run_dir = Path(run_dir).resolve()
    book = ReplayedRun.at(run_dir)
    if not book.stored_points():
        raise ServebookError("nothing is measured yet", str(run_dir), "Run `servebook run` first")
    before = os.environ.get(STORED)
    os.environ[STORED] = str(run_dir)  # inherited by the kernels: see Book.open
    try:
        every = pipeline.steps(book.params, str(book.files.params))
        steps = [s for s in every if s.engine is None or book.facts(s.engine)]
        with pipeline.forked_kernels(steps):
            for k, step in enumerate(steps, 1):
                on_step(f"[{k}/{len(steps)}] {step.copy_name.removesuffix('.ipynb')}")
                source = pipeline.NOTEBOOKS / f"{step.notebook}.ipynb"
                execute(source, book.files.notebooks / step.copy_name, step.parameters)
    finally:
        os.environ.pop(STORED) if before is None else os.environ.update({STORED: before})


def out_of_date(book: Book) -> str | None:
    """Why the executed notebooks do not show all stored data; None if they do. An interrupted run has points that no
    notebook shows, and lacks the last chapters."""
    stored: dict[tuple[str, str], list[Path]] = {}
    for path in book.files.points():
        stored.setdefault(point_of(path)[:2], []).append(path)
    if not stored:
        return None
    for step in pipeline.steps(book.params, ""):
        copy = book.files.notebooks / step.copy_name
        if step.engine and not book.facts(step.engine):
            continue  # never started: its points are listed as missing
        if not copy.exists():
            return f"{step.copy_name} is missing"
        points = stored.get((step.sweep, step.engine), []) if step.sweep and step.engine else []
        if any(p.stat().st_mtime > copy.stat().st_mtime for p in points):
            return f"{step.copy_name} is older than a point of its sweep"
    return None
