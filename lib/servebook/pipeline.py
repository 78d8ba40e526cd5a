"""`servebook run`: papermill executes the notebooks in order, engines are started and stopped around them.

One engine at a time holds the hardware: 00 preflight, 01 prediction, then for every engine 02 serving and its
sweeps, then 07 analysis and 08 post over all of them, and the report. The engine belongs to this process, so
that no kernel's death leaves it running and no notebook's end stops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import engines
from .book import Book
from .errors import ServebookError
from .params import RunParams

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FIRST = ("00_preflight", "01_prediction")
SERVING = "02_serving"
LAST = ("07_analysis", "08_post")
# The notebook a sweep is told in when none is named after it
DEFAULT_NOTEBOOK = {
    "concurrency": "03_short_prompts",
    "prompt_length": "05_prompt_length",
    "arrival_rate": "06_arrival_rate",
}


@dataclass(frozen=True)
class Step:
    """One notebook execution: which notebook, with which parameters, into which executed copy."""

    notebook: str
    parameters: dict[str, Any]
    engine: str | None = None
    sweep: str | None = None

    @property
    def copy_name(self) -> str:
        parts = [self.notebook]
        if self.sweep and not self.notebook.endswith(f"_{self.sweep}"):
            parts.append(self.sweep)
        if self.engine:
            parts.append(self.engine)
        return ".".join(parts) + ".ipynb"


@dataclass
class Outcome:
    """What a run came to: the report if it was written, and every fault as one line."""

    report: Path | None = None
    faults: list[str] = field(default_factory=list)


def notebook_of(params: RunParams, sweep: str) -> str:
    """The notebook that tells a sweep: the one named after it, else its kind's."""
    named = sorted(NOTEBOOKS.glob(f"*_{sweep}.ipynb"))
    return named[0].stem if named else DEFAULT_NOTEBOOK[params.sweeps[sweep].kind]


def steps(params: RunParams, params_path: str) -> list[Step]:
    """Every notebook execution of a run, in order."""
    base = {"PARAMS": params_path}
    plan = [Step(name, base) for name in FIRST]
    for engine in params.engines:
        plan.append(Step(SERVING, {**base, "ENGINE": engine}, engine))
        plan += [
            Step(notebook_of(params, sweep), {**base, "ENGINE": engine, "SWEEP": sweep}, engine, sweep)
            for sweep, s in params.sweeps.items()
            if s.engines is None or engine in s.engines
        ]
    return plan + [Step(name, base) for name in LAST]


def chapters(params: RunParams, params_path: str, copies: Path) -> list[Path]:
    """The executed copies that become chapters, in order; a sweep's last copy holds every engine and stands for all."""
    chosen: dict[tuple[str, str | None], Path] = {}
    for step in steps(params, params_path):
        copy = copies / step.copy_name
        if copy.exists():
            chosen[step.notebook, step.sweep or step.engine] = copy
    return sorted(chosen.values(), key=lambda p: p.name)


def run(params_path: str, *, only: str | None = None, command: list[str] | None = None) -> Outcome:
    """Execute a run, or one stage of it (`only`: a notebook's name or its number, or "report").

    Raises ServebookError when a notebook fails; an engine that cannot be started is a fault of the outcome and the
    rest goes on. What is already measured is not measured again.
    """
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this Python, whatever else is called python3
    book = Book.open(params_path, create=True)
    plan = steps(book.params, params_path)
    if only and only != "report":
        plan = [s for s in plan if s.notebook == only or s.notebook.split("_")[0] == only or s.sweep == only]
        if not plan:
            names = ", ".join(sorted({s.notebook for s in steps(book.params, params_path)} | {"report"}))
            raise ServebookError(f"no stage {only!r}", "--only", f"Stages: {names}")
    elif only == "report":
        plan = []
    outcome = Outcome()
    with _single_run(book.dir), _orderly_sigterm():
        book.begin_session(command)
        started = time.monotonic()
        progress = Progress(book, len(plan))
        try:
            _execute(book, plan, progress, outcome)
        finally:
            book.end_session(time.monotonic() - started, outcome.faults)
            progress.close()
        outcome.report = report(book, params_path)
    return outcome


def report(book: Book, params_path: str) -> Path:
    """Render report.html and social.md from what is stored. Needs no engine and no GPU."""
    from .report.render import render
    from .report.social import write_social

    copies = chapters(book.params, params_path, book.dir / "notebooks")
    if not copies:
        raise ServebookError("no executed notebook to render", str(book.dir), "Run `servebook run` first")
    write_social(book.dir)
    return render(book.dir, copies)


def _execute(book: Book, plan: list[Step], progress: Progress, outcome: Outcome) -> None:
    position, unavailable = 0, set()
    while position < len(plan):
        step = plan[position]
        group = [s for s in plan[position:] if s.engine == step.engine] if step.engine else [step]
        with contextlib.ExitStack() as stack:
            if step.engine and step.engine not in unavailable and book.missing(step.engine, [s.sweep for s in group]):
                progress.say(position, f"starting {step.engine}")
                try:
                    stack.enter_context(book.engine(step.engine))
                except ServebookError as error:
                    book.engine_failed(step.engine, str(error))
                    outcome.faults.append(f"{step.engine}: {error}")
                    unavailable.add(step.engine)
                    progress.note(f"{step.engine} did not start: {error}")
            for s in group:
                if s.engine in unavailable:
                    position += 1
                    continue
                progress.say(position, s.copy_name.removesuffix(".ipynb"))
                execute(NOTEBOOKS / f"{s.notebook}.ipynb", book.dir / "notebooks" / s.copy_name, s.parameters)
                position += 1


def execute(source: Path, target: Path, parameters: dict[str, Any]) -> None:
    """Run one notebook with papermill. A failure keeps the partial copy as NAME.failed.ipynb and raises ServebookError.

    The finished copy appears under its name only when every cell ran, so that a failed notebook is never published.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillException

    if not source.exists():
        raise ServebookError("no such notebook", str(source), "Restore notebooks/ from the repository")
    unknown = set(parameters) - set(papermill.inspect_notebook(str(source)))
    if unknown:  # papermill itself only warns, and runs with the defaults
        raise ServebookError(
            f"has no parameter {', '.join(sorted(unknown))}", source.name, "Add it to the cell tagged parameters"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name.replace(".ipynb", ".failed.ipynb"))
    try:
        papermill.execute_notebook(
            str(source),
            str(partial),
            parameters,
            kernel_name="python3",
            progress_bar=False,
            cwd=str(source.parent),
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of its own loopback sockets at every start
        )
    except (PapermillException, DeadKernelError, RuntimeError) as error:
        raise _notebook_fault(source, partial, error) from error
    cells = json.loads(partial.read_text())["cells"]
    unrun = [
        i for i, c in enumerate(cells) if c["cell_type"] == "code" and c["source"] and c.get("execution_count") is None
    ]
    if unrun:  # a cell that calls sys.exit(0), or a kernel that died, ends a notebook that papermill calls finished
        raise ServebookError(
            f"stopped before cell {unrun[0]} without an error", source.name, f"Open {partial} to see how far it came"
        )
    partial.replace(target)


def _notebook_fault(source: Path, partial: Path, error: Exception) -> ServebookError:
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    first_line = str(value).strip().splitlines()[0] if str(value).strip() else name
    what = first_line if name == "ServebookError" else f"{name}: {first_line}"
    return ServebookError(
        what.rstrip("."),
        _failed_cell(source, partial),
        f"The copy up to there is {partial}; mend it and run again: what is measured is kept",
    )


def _failed_cell(source: Path, partial: Path) -> str:
    """The notebook and the failed cell as its author counts, from 1, with the heading above it."""
    try:
        ran = json.loads(partial.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return source.name
    failed = next((c for c in ran if any(o["output_type"] == "error" for o in c.get("outputs", []))), None)
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    index = next((i for i, c in enumerate(cells) if failed and c.get("id") == failed.get("id")), None)
    if index is None:
        return source.name
    above = [
        line
        for c in cells[:index]
        if c["cell_type"] == "markdown"
        for line in "".join(c["source"]).splitlines()
        if line.startswith("#")
    ]
    return f"{source.name}, cell {index + 1}" + (f" (under {above[-1].lstrip('# ')!r})" if above else "")


@contextlib.contextmanager
def _single_run(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServebookError(
                "another run is writing here", str(run_dir), "Wait for it, or give this run another name"
            ) from None
        yield


@contextlib.contextmanager
def _orderly_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that engines are stopped and kernels ended on both."""

    def unwind(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progress:
    """The terminal's lines: step k/n, what is running, and the time left by the plan."""

    def __init__(self, book: Book, total: int) -> None:
        self._book, self._total, self._k, self._what = book, total, 0, ""
        self._started = time.monotonic()
        self._tty = sys.stderr.isatty()
        self._ended = threading.Event()
        self._last = ""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def say(self, index: int, what: str) -> None:
        self._k, self._what = index + 1, what
        left = self._book.seconds_left()
        about = f", about {left / 60:.0f} min of measuring left" if left and left >= 90 else ""
        self._print(f"[{self._k}/{self._total}] {what}{about}")

    def note(self, text: str) -> None:
        self._print(f"[{self._k}/{self._total}] {text}")

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(1.0):
            status = self._book.status()
            if status and status != self._last:
                self._last = status
                if self._tty:
                    print(
                        f"\r\033[K[{self._k}/{self._total}] {self._what}: {status}", end="", file=sys.stderr, flush=True
                    )
                elif status.endswith("done"):
                    self._print(f"[{self._k}/{self._total}] {status}")

    def _print(self, text: str) -> None:
        lead = "\r\033[K" if self._tty else ""
        print(f"{lead}{text}", file=sys.stderr, flush=True)


__all__ = ["Outcome", "Step", "chapters", "engines", "execute", "notebook_of", "report", "run", "steps"]
