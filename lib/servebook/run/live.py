"""Live progress in JupyterLab of a run by hand: points done, time left, TTFT and TPOT so far, and a growing plot.

It reads the files that measuring writes, in a thread that takes a few milliseconds per second, because the load
generator runs in this process, too, and its time stamps must not wait. The notebook keeps the printed lines only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

from ..config.points import PointSpec
from .live_state import EVERY_S, Follower, State
from .working_run import WorkingRun


def in_lab() -> bool:
    """Whether a person watches: JupyterLab's server tells the kernel the notebook's name, papermill and nbclient do
    not."""
    if not os.environ.get("JPY_SESSION_NAME"):
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


@contextlib.contextmanager
def watching(book: WorkingRun, specs: Sequence[PointSpec]) -> Iterator[None]:
    """Show the progress of measuring these points while the block runs, if someone watches; else do nothing."""
    if not in_lab():
        yield
        return
    view = _View(Follower(book, specs))
    book.listener = view
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(view.follower.interrupted()) from None
    finally:
        book.listener = None
        view.close()


class Interrupted(KeyboardInterrupt):
    """The stop button: one line about what is kept, without a traceback through the load generator."""

    def _render_traceback_(self) -> list[str]:  # IPython looks this method up by name
        return [f"{self}. Run the cell again to go on."]


class _View:
    """One output of the cell, replaced about once per second and at the end by the printed lines."""

    def __init__(self, follower: Follower) -> None:
        from IPython.display import display

        self.follower, self._lines = follower, []  # type: tuple[Follower, list[str]]
        self._ended = threading.Event()
        self._handle = display(self._bundle(), raw=True, display_id=True)
        self._thread = threading.Thread(target=self._follow, name="servebook-live", daemon=True)
        self._thread.start()

    def line(self, text: str, printed: bool) -> None:
        if printed:
            self._lines.append(text)
        self.follower.line(text)

    def point_progress(self, text: str) -> None:
        self.follower.point_progress(text)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)
        self._handle.update({"text/plain": "\n".join(self._lines) or "no point was completed"}, raw=True)

    def _follow(self) -> None:
        while not self._ended.wait(EVERY_S):
            with contextlib.suppress(Exception):  # a picture must not fail the run
                self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        from . import live_view  # imports matplotlib, which only JupyterLab needs

        return live_view.progress(self.follower, self.follower.look(), self._lines[-3:]).bundle()


__all__ = ["Follower", "State", "in_lab", "watching"]
