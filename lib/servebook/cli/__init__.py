"""The command `servebook`: parses, calls one package, prints. User errors are one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit status.

    While it still imports, Ctrl-C ends it with a line; a command that may have something to keep takes over from here.
    """
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _end)
    try:
        from .command import main as command

        return command(argv)
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_standard_streams() -> None:
    """Open those of 0, 1 and 2 that the caller has closed (cron, `<&-`): the next file or socket would take their
    number, and libuv ends a process whose event loop does."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _end(*_: object) -> None:
    os.write(2, b"\nservebook: interrupted\n")
    os._exit(130)
