"""Runs one server and ends all its processes: `python guard.py [--grace S] -- COMMAND...`. Needs no servebook.

The owner holds the write end of this process's stdin. When that pipe closes (the owner stopped the engine, or died,
even by SIGKILL), or on SIGTERM, the server and its remaining children get SIGTERM, and after the grace period SIGKILL.
A second SIGTERM skips the grace period. Orphans of the server are reparented to this process, so that a worker that
outlives its parent (vLLM's engine core does) is found and ended, too.

The server may open as many files as the system allows, up to OPEN_FILES; a shell's limit of 1,024 allows about 1,000
clients.

First line on stdout: {"pid": server's pid}. Exit status: the server's, 128 + N if signal N ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.5  # the pipe and SIGCHLD wake the guard at once; this only bounds a missed wake-up
ORPHAN_GRACE_S = 3.0
OPEN_FILES = 65_536


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # not Linux: no reparenting, only the process group can be signalled
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def descendants(root: int) -> list[int]:
    """Living processes below `root`, without zombies."""
    found = []
    for child in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(child.pid)
    return found


class Guard:
    """The server as a child process, from its start to the end of all its processes. Raises OSError if it cannot
    start."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self.grace_s = grace_s
        self.stop_signals = 0
        self.status: int | None = None
        self._wake_r, wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _allow_open_files()
        # the server dies with the guard: a SIGKILL of the guard must not leave it behind
        self.server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )  # fmt: skip

    def _on_stop(self, *_: object) -> None:
        self.stop_signals += 1

    def run(self) -> int:
        """Wait for the server, the owner or a signal, whichever comes first; returns the exit status."""
        print(json.dumps({"pid": self.server.pid}), flush=True)
        owner = 0
        while self.status is None and not self.stop_signals:
            ready, _, _ = select.select([owner, self._wake_r], [], [], POLL_S)
            if owner in ready and not os.read(owner, 4096):
                break
            self._drain()
            self._reap()
        if self.status is not None:  # it ended by itself: note that in the log
            how = f"exit status {self.status}" if self.status <= 128 else signal.Signals(self.status - 128).name
            print(f"\n[servebook] the server ended: {how}", file=sys.stderr, flush=True)
        self._end()
        return self.status if self.status is not None else 0

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_r, 4096):
                pass

    def _reap(self) -> None:
        """Collect all ended children, the server and adopted orphans alike."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server.pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = self.server.returncode = code if code >= 0 else 128 - code

    def _left(self) -> list[int]:
        return descendants(os.getpid())

    def _end(self) -> None:
        deadline = time.monotonic() + (self.grace_s if self.status is None else ORPHAN_GRACE_S)
        asked: set[int] = set()
        before = self.stop_signals
        while left := self._left():
            urgent = time.monotonic() > deadline or self.stop_signals > before
            # the server first: an orderly one ends its workers and logs fewer errors if they do not vanish
            targets = left if urgent or self.status is not None else [self.server.pid]
            for pid in targets:
                if urgent or pid not in asked:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if urgent else signal.SIGTERM)
                    asked.add(pid)
            time.sleep(0.05)
            had_ended = self.status is not None
            self._reap()
            if self.status is not None and not had_ended:
                deadline = min(deadline, time.monotonic() + ORPHAN_GRACE_S)
        self._reap()


def main(arguments: list[str]) -> int:
    """The program; 2 for missing arguments, 127 for a command that cannot be started."""
    grace_s = 15.0
    if arguments[:1] == ["--grace"]:
        grace_s, arguments = float(arguments[1]), arguments[2:]
    if arguments[:1] != ["--"] or len(arguments) < 2:
        print("usage: guard.py [--grace SECONDS] -- COMMAND...", file=sys.stderr)
        return 2
    try:
        guard = Guard(arguments[1:], grace_s)
    except OSError as error:
        print(f"cannot start {arguments[1]}: {error.strerror}", file=sys.stderr)
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
