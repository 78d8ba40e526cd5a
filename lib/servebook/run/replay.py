"""A stored run told again: every notebook executed anew on what was frozen and measured then; nothing is measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import files
from ..common.errors import ServebookError
from .book import STORED, Book
from .notebook_execution import execute

if TYPE_CHECKING:
    from .preflight import Check


class ToldAgain(Book):
    """A run as its notebooks see it while it is told again: what they would do was done, and stays."""

    def preflight(self) -> list[Check]:
        """The checks of the machine that measured, [] where none were kept."""
        from .preflight import Check

        return [Check(**c) for c in files.read_json(self.dir / self.PREFLIGHT) or []]

    def predict(self, engine: str | None = None) -> dict[str, Any]:
        """What stands in ink."""
        stage = "datasheet" if engine is None else f"calibrated:{engine}"
        if (entry := self.frozen(stage)) is None:
            raise ServebookError(
                f"nothing was frozen for the stage {stage}", str(self.dir), "Run `servebook run` first"
            )
        return entry

    def measure(self, sweep: str, engine: str, *, progress: bool = True) -> None:
        """Nothing: what was measured was measured."""


def retell(run_dir: Path, on_step: Callable[[str], None] = lambda _: None) -> None:
    """Execute the notebooks of a stored run into its folder; on_step is told which begins.

    Raises ServebookError where one fails.
    """
    from . import pipeline

    run_dir = Path(run_dir).resolve()
    book = ToldAgain.at(run_dir)
    if not book.stored_points():
        raise ServebookError("nothing is measured yet", str(run_dir), "Run `servebook run` first")
    before = os.environ.get(STORED)
    os.environ[STORED] = str(run_dir)  # inherited by the kernels: see Book.open
    try:
        every = pipeline.steps(book.params, str(run_dir / "params.yaml"))
        steps = [s for s in every if s.engine is None or book.facts(s.engine)]
        for k, step in enumerate(steps, 1):
            on_step(f"[{k}/{len(steps)}] {step.copy_name.removesuffix('.ipynb')}")
            source = pipeline.NOTEBOOKS / f"{step.notebook}.ipynb"
            execute(source, run_dir / "notebooks" / step.copy_name, step.parameters)
    finally:
        os.environ.pop(STORED) if before is None else os.environ.update({STORED: before})
