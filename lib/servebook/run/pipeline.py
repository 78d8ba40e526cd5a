"""`servebook run`: papermill executes the notebooks in order, engines are started and stopped around them.

One engine at a time holds the hardware: 00 preflight, 01 prediction, then for every engine 02 serving and its
sweeps, then 07 analysis and 08 post over all of them, and the report. The engine belongs to this process, so
that no kernel's death leaves it running and no notebook's end stops it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import engines
from ..common.errors import ServebookError
from ..common.files import ROOT
from ..config.params import RunParams
from ..engines.process import GPU_SLACK_GIB
from ..run_folder.lock_and_signals import orderly_signals, single_run
from ..run_folder.sessions import ENDING
from . import preflight
from .book import Book, find_params
from .measuring import NO_RESTART
from .notebook_execution import execute

NOTEBOOKS = ROOT / "notebooks"
FIRST = ("00_preflight", "01_prediction")
SERVING = "02_serving"
LAST = ("07_analysis", "08_post")
CHOICE = "choose"  # only if the parameters ask for it


@dataclass(frozen=True)
class NotebookStep:
    """One notebook execution: the notebook, its parameters, and its executed copy."""

    notebook: str
    parameters: dict[str, Any]
    engine: str | None = None
    sweep: str | None = None

    @property
    def copy_name(self) -> str:
        """The executed copy's file name: notebook, sweep if the notebook is not named after it, engine."""
        parts = [self.notebook]
        if self.sweep and not self.notebook.endswith(f"_{self.sweep}"):
            parts.append(self.sweep)
        if self.engine:
            parts.append(self.engine)
        return ".".join(parts) + ".ipynb"


@dataclass
class RunOutcome:
    """The result of a run: the report if it was written, every fault (something is missing) and warning as one line."""

    report: Path | None = None
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def notebook_of(params: RunParams, sweep: str) -> str:
    """The notebook of a sweep: the one named after it, otherwise its kind's."""
    named = sorted(NOTEBOOKS.glob(f"*_{sweep}.ipynb"))
    return named[0].stem if named else params.sweeps[sweep].notebook_name


def steps(params: RunParams, params_path: str) -> list[NotebookStep]:
    """Every notebook execution of a run, in order."""
    base = {"PARAMS": params_path}
    plan = [NotebookStep(name, base) for name in FIRST]
    for engine in params.engines:
        plan.append(NotebookStep(SERVING, {**base, "ENGINE": engine}, engine))
        plan += [
            NotebookStep(notebook_of(params, sweep), {**base, "ENGINE": engine, "SWEEP": sweep}, engine, sweep)
            for sweep, s in params.sweeps.items()
            if s.engines is None or engine in s.engines
        ]
    asked = (CHOICE,) if params.choose is not None and params.slo.target is not None else ()
    return plan + [NotebookStep(name, base) for name in (*LAST, *asked)]


def chapters(params: RunParams, params_path: str, copies: Path) -> list[Path]:
    """The executed copies that become chapters, in order; of a sweep, the last copy, which shows all engines."""
    chosen: dict[tuple[str, str | None], Path] = {}
    for step in steps(params, params_path):
        copy = copies / step.copy_name
        if copy.exists():
            chosen[step.notebook, step.sweep or step.engine] = copy
    return sorted(chosen.values(), key=lambda p: p.name)


def run(params_path: str, *, only: str | None = None, command: list[str] | None = None) -> RunOutcome:
    """Execute a run, or one stage of it (`only`: a notebook's name or its number, or "report").

    Raises ServebookError if a notebook fails that all others need. Other failing notebooks, and engines that fail or
    cannot be started, are faults of the outcome; the rest continues. Measured points are not measured again.
    """
    if not NOTEBOOKS.is_dir():
        raise ServebookError("the notebooks are not installed", str(NOTEBOOKS), "Run this in a checkout of servebook")
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this Python, not another one named python3
    os.environ.pop("JPY_SESSION_NAME", None)  # started from a notebook's cell, it is not watched by a person
    book = Book.open(params_path, create=True)
    params_path = _from_anywhere(params_path)
    plan = steps(book.params, params_path)
    if only and only != "report":
        plan = [s for s in plan if s.notebook == only or s.notebook.split("_")[0] == only or s.sweep == only]
        if not plan:
            names = ", ".join(sorted({s.notebook for s in steps(book.params, params_path)} | {"report"}))
            raise ServebookError(f"no stage {only!r}", "--only", f"Stages: {names}")
    elif only == "report":
        plan = []
    outcome = RunOutcome(warnings=preflight.warnings(book.params, book.base))
    with single_run(book.dir), orderly_signals():
        book.begin_session(command)
        progress = Progress(book, len(plan))
        try:
            _execute(book, plan, progress, outcome)
            outcome.warnings += filter(None, [book.left_out()])
            try:
                outcome.report = report(book, params_path)
            except ServebookError as error:
                if not outcome.faults:
                    raise
                outcome.faults.append(str(error))
        finally:
            progress.close()
            book.sessions.end(outcome.faults)
    return outcome


def forked_kernels(plan: list[NotebookStep]) -> contextlib.AbstractContextManager[None]:
    """The block in which these steps are executed, with forked kernels (see kernels)."""
    if not plan:
        return contextlib.nullcontext()
    from .kernels import forked  # jupyter_client takes a while to import

    return forked()


def _from_anywhere(typed: str) -> str:
    """A parameter file's path for the kernels, whose working folder is notebooks/: relative to the checkout if it is
    inside (pages do not name this machine's folders), otherwise absolute."""
    path = find_params(typed).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def report(book: Book, params_path: str, *, url: str | None = None) -> Path:
    """Render report.html, labbook.html and social.md from stored data. Needs no engine and no GPU.

    url: where the page will be published.
    """
    from ..report.render import render
    from ..report.social import write_social

    copies = chapters(book.params, params_path, book.files.notebooks)
    if not copies:
        raise ServebookError("no executed notebook to render", str(book.dir), "Run `servebook run` first")
    write_social(book.dir)
    return render(book.dir, copies, url=url)


def _execute(book: Book, plan: list[NotebookStep], progress: Progress, outcome: RunOutcome) -> None:
    with forked_kernels(plan), _Bench(book, progress, outcome) as bench:
        for position, step in enumerate(plan):
            progress.at(position)
            sweeps = [s.sweep for s in plan[position:] if s.engine == step.engine]
            if not bench.ready(step.engine, sweeps):
                bench.skip(step)
                continue
            progress.say(step.copy_name.removesuffix(".ipynb"))
            book.sessions.note(outcome.faults)
            source, target = NOTEBOOKS / f"{step.notebook}.ipynb", book.files.notebooks / step.copy_name
            try:
                execute(source, target, step.parameters, on_retry=progress.note)
            except ServebookError as error:
                if step.notebook in FIRST:
                    raise
                outcome.faults.append(str(error))
                progress.note(str(error))
            if step.engine and (lost := book.point_status.faults(step.engine, step.sweep)):
                outcome.faults += lost
                bench.failed(step.engine)


class _Bench:
    """The engine that uses the hardware, or none; it is started when something must be measured on it."""

    def __init__(self, book: Book, progress: Progress, outcome: RunOutcome) -> None:
        self._book, self._progress, self._outcome = book, progress, outcome
        self._engine: Any = None
        self._name: str | None = None
        self._unavailable: set[str] = set()
        self._given_up: set[str] = set()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def ready(self, name: str | None, sweeps: list[str | None]) -> bool:
        """Start the engine that the next steps need, if any; False if it cannot be started."""
        if name != self._name:
            self.clear()
        elif name and self._engine and not self._engine.alive():
            self.failed(name)
        self._name = name
        if name is None or self._engine or name in self._unavailable:
            return name not in self._unavailable
        if not self._book.point_status.missing(name, sweeps, engines.installed_version(self._book.params, name)):
            return True
        self._progress.say(f"starting {name}")
        try:
            self._engine = self._book.start(name)
        except ServebookError as error:
            self._book.engine_failed(name, str(error))
            self._outcome.faults.append(f"{name}: {error}")
            self._unavailable.add(name)
            self._progress.note(f"{name} did not start: {error}")
        return name not in self._unavailable

    def failed(self, name: str) -> None:
        """End the remaining processes of a failed engine; it is not started again if the parameters forbid that."""
        self.clear()
        if not self._book.may_restart(name):
            self._given_up.add(name)
            self._unavailable.add(name)

    def skip(self, step: NotebookStep) -> None:
        """Mark a step's points as lost because the engine is not started again."""
        if step.engine and step.engine in self._given_up:
            self._book.point_status.mark_rest_lost(step.engine, step.sweep, NO_RESTART.format(engine=step.engine))
            self._outcome.faults += self._book.point_status.faults(step.engine, step.sweep)

    def clear(self) -> None:
        """End the engine with all its processes, and check that the GPU's memory is free again."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        with self._book.sessions.spending(ENDING, engine=engine.name):
            engine.stop()
        if (left := engine.facts.get("gpu_gib_left") or 0.0) > GPU_SLACK_GIB:
            self._outcome.warnings.append(f"{engine.name} has ended, but {left:.1f} GiB of GPU memory are not back")


class Progress:
    """The terminal's output: step k/n, the current activity, and the time left by the plan."""

    def __init__(self, book: Book, total: int) -> None:
        self._book, self._total, self._k, self._what = book, total, 0, ""
        self._tty = sys.stderr.isatty()
        self._ended = threading.Event()
        self._last, self._telling = "", threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def at(self, index: int) -> None:
        """The step that begins, from 0."""
        self._k = index + 1

    def say(self, what: str) -> None:
        """Print what begins now, and the time left."""
        self._show_told()
        self._what = what
        left = self._book.seconds_left()
        about = f", about {left / 60:.0f} min of measuring left" if left and left >= 90 else ""
        self._print(f"[{self._k}/{self._total}] {what}{about}")

    def note(self, text: str) -> None:
        """A line about the step that runs."""
        self._show_told()
        self._print(f"[{self._k}/{self._total}] {text}")

    def close(self) -> None:
        """Print the remaining lines, and stop following."""
        self._ended.set()
        self._thread.join()
        self._show_told()

    def _follow(self) -> None:
        while not self._ended.wait(1.0):
            self._show_told()
            status = self._book.sessions.status()
            if self._tty and status and status != self._last:
                self._last = status
                line = f"\r\033[K[{self._k}/{self._total}] {self._what}: {status}"
                print(line, end="", file=sys.stderr, flush=True)

    def _show_told(self) -> None:
        """Print the notebooks' new messages: points complete, measured again or lost, engines started again."""
        with self._telling:
            for line in self._book.sessions.lines_sent():
                self._print(f"[{self._k}/{self._total}] {line}")

    def _print(self, text: str) -> None:
        lead = "\r\033[K" if self._tty else ""
        print(f"{lead}{text}", file=sys.stderr, flush=True)


__all__ = ["NotebookStep", "RunOutcome", "chapters", "notebook_of", "report", "run", "steps"]
