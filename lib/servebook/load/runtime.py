"""How the client runs: its own thread and event loop, no garbage collection pauses, enough sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, cast

from ..common.errors import ServebookError

T = TypeVar("T")
SPARE_FILES = 64  # besides the connections


def in_thread(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new thread and return its result, even if this thread's own loop is running."""
    outcome: list[Any] = []

    def work() -> None:
        # raise this thread's priority where allowed: engines that use every core would delay its time stamps
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        try:
            with asyncio.Runner(loop_factory=_fast_loop()) as runner:
                task = runner.get_loop().create_task(start())
                holder.append((runner.get_loop(), task))
                outcome.extend((runner.get_loop().run_until_complete(task), None))
        except BaseException as error:
            outcome[:] = [None, error]

    holder: list[Any] = []
    thread = threading.Thread(target=work, name="servebook-load", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C: end the requests before passing it on
        if holder:
            loop, task = holder[0]
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        thread.join(5)
        raise
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector from scanning existing objects while time stamps are taken."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def allow_many_sockets(connections: int) -> None:
    """Raise this process's limit on open files; ServebookError if the maximum is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, hard) if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft < connections + SPARE_FILES:
        fault = f"{connections} connections at once, where this process may open {soft} files"
        raise ServebookError(fault, "file-descriptor limit", f"ulimit -n {connections + SPARE_FILES}")
