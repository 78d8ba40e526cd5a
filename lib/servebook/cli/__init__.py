"""The command `servebook`: parses, calls one package, prints. User errors are one line."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit status.

    While it still imports, Ctrl-C ends it with a line; a command that may have something to keep takes over from here.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _end)
    try:
        from .command import main as command

        return command(argv)
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, b"\nservebook: interrupted\n")
    os._exit(130)
