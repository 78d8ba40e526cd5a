"""One run at a time per folder, and orderly shutdown on signals."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from ..common.errors import ServebookError


@contextlib.contextmanager
def single_run(run_dir: Path) -> Iterator[None]:
    """Lock the run's folder. Raises ServebookError if it is missing, not writable, or locked by another run."""
    try:
        lock = (run_dir / ".lock").open("w")
    except FileNotFoundError:
        raise ServebookError("there is no run here", str(run_dir), "Measure it first: servebook run PARAMS") from None
    except OSError as error:
        raise ServebookError(
            f"cannot write the run's folder ({error.strerror})", str(run_dir),
            "Change its permissions, or set SERVEBOOK_OUTPUTS to another folder",
        ) from None  # fmt: skip
    with lock:
        _hold(lock, fcntl.LOCK_EX, run_dir)
        yield


@contextlib.contextmanager
def single_sweep(run_dir: Path, sweep: str, engine: str) -> Iterator[None]:
    """Lock a sweep on an engine while it is measured: two notebooks would otherwise load the server at the same time
    and treat each other's rows as an earlier attempt. Raises ServebookError if another process measures it."""
    path = run_dir / "requests" / f".{sweep}.{engine}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServebookError(
                f"another notebook or run measures it on {engine} at this moment", f"sweep {sweep}", "Wait for it"
            ) from None
        yield


@contextlib.contextmanager
def not_running(run_dir: Path) -> Iterator[None]:
    """Read the run's folder while no run writes to it. Raises ServebookError if one does. Writes nothing."""
    try:
        lock = (run_dir / ".lock").open()
    except OSError:  # no run has written here since it was stored
        yield
        return
    with lock:
        _hold(lock, fcntl.LOCK_SH, run_dir)
        yield


def _hold(lock: IO[str], how: int, run_dir: Path) -> None:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except OSError:
        raise ServebookError(
            "another run is writing here", str(run_dir), "Wait for it, or give this run another name"
        ) from None


KEPT = "; what was measured is kept, run again to go on"


@contextlib.contextmanager
def orderly_signals(kept: str = KEPT) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal stop engines and kernels in order; a second signal ends the process at
    once.

    kept: appended to the message "ended at once".
    """
    asked = False

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if _swallows(frame):  # tried again when that has returned
            again = threading.Timer(0.02, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        if asked:
            _end_now(kept)
        asked = True
        # an interruption leaves tasks that nobody awaits; asyncio would print their tracebacks at exit
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, unwind) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _swallows(frame: FrameType | None) -> bool:
    """Whether Python would print and ignore what is raised here: in a finalizer, or in importlib's own callback."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or (code.co_name == "cb" and "importlib" in code.co_filename):
            return True
        frame = frame.f_back
    return False


def _end_now(kept: str) -> None:
    """SIGKILL all child processes and exit."""
    import psutil

    below = psutil.Process().children(recursive=True)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(below, timeout=5)
    os.write(2, f"\nservebook: ended at once{kept}\n".encode())
    os._exit(130)
