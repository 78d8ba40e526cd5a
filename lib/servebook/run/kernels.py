"""Starts the notebooks' kernels: each is forked from a process that has their imports (kernel_process.py).

Where that is not possible, a kernel is a new process as usual.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

LAUNCHER = [sys.executable, "-m", "ipykernel_launcher"]


class ForkedKernel:
    """The process of a forked kernel, with the methods of Popen that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid, self._handle, self._ended = pid, -1, False
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True

    def poll(self) -> int | None:
        """None while it runs, afterwards 1: its exit status is not known here."""
        return self._exit_status(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end."""
        return self._exit_status(timeout)

    def _exit_status(self, timeout: float | None) -> int | None:
        if not self._ended and select.select([self._handle], [], [], timeout)[0]:
            self._ended = True
            os.close(self._handle)
        return 1 if self._ended else None

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing if it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """SIGKILL it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM it."""
        self.send_signal(signal.SIGTERM)


class KernelProcess:
    """The process that kernels are forked from. It is started at once and imports while other work goes on."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "servebook.run.kernel_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._answers = self._channel.makefile("rb")

    def fork(self, arguments: Sequence[str], env: dict[str, str] | None, cwd: str) -> ForkedKernel | None:
        """A new kernel; None if this process has ended."""
        asked = {"arguments": list(arguments), "env": env or dict(os.environ), "cwd": cwd}
        try:
            self._channel.sendall(json.dumps(asked).encode() + b"\n")
            answer = self._answers.readline()
        except OSError:
            return None
        return ForkedKernel(int(answer)) if answer else None

    def close(self) -> None:
        """End the process."""
        self._answers.close()
        self._channel.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()


_current: KernelProcess | None = None


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Notebooks that are executed in this block get forked kernels, on Linux."""
    global _current
    if _current is not None or not hasattr(os, "pidfd_open"):
        yield
        return
    _current = KernelProcess()
    try:
        yield
    finally:
        process, _current = _current, None
        process.close()


class _Provisioner(LocalProvisioner):
    """Launches a kernel by a fork if possible."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        forked = None
        if _current is not None and cmd[:3] == LAUNCHER:
            forked = _current.fork(cmd[3:], kwargs.get("env"), str(kwargs.get("cwd") or Path.cwd()))
        if forked is None:
            return await super().launch_kernel(cmd, **kwargs)
        self.process = forked  # type: ignore[assignment]
        self.pid = self.pgid = forked.pid  # it leads its session
        return self.connection_info


class Kernel(AsyncKernelManager):
    """jupyter_client's manager of one kernel, which is forked if possible."""

    async def _async_pre_start_kernel(self, **kw: Any) -> Any:
        if self.provisioner is None:
            self.provisioner = _Provisioner(kernel_id="", kernel_spec=self.kernel_spec, parent=self)
        return await super()._async_pre_start_kernel(**kw)
