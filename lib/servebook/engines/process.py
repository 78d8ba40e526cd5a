"""Starts servers as children of a guard process and ends them completely; records.py finds running ones."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..hardware.catalog import GIB, nvml, visible_handles
from . import logs
from .base import RunningEngine
from .facts import blank_facts
from .http import answers, healthy, served_models
from .ports import LOOPBACK, free_port, require_free
from .records import TOKEN, end_processes, identity, log_of, processes_with, read_record, record_of

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 15.0
PORT_TRIES = 3
GPU_RELEASE_S, GPU_SLACK_GIB = 10.0, 0.3


@dataclass(frozen=True)
class Launch:
    """How to start one server: its command line for a given port, and how to learn its facts."""

    kind: str
    model: str  # the served model name; "": the first that the server lists
    argv: Callable[[int], list[str]]
    env: dict[str, str]
    timeout_s: float
    port: int | None
    read_facts: Callable[[str, Path], dict[str, Any]]  # (url, log), called once the server answers
    # False: the server is ready even if /v1/models lacks the model (the list of transformers serve is empty)
    lists_models: bool = True


class ServerProcess(RunningEngine):
    """A server that this process has started. This process holds the pipe to the server's guard; when this process
    ends, the guard ends the server."""

    def __init__(self, name: str, launch: Launch, port: int, run_dir: Path) -> None:
        super().__init__(name, f"http://{LOOPBACK}:{port}", launch.model, {}, owned=True, log=log_of(run_dir, name))
        self.kind = launch.kind
        self._record = record_of(run_dir, name)
        self._lists_models = launch.lists_models
        self._started = time.monotonic()
        self._gpu_gib_before = gpu_gib_in_use()
        assert self.log is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._token = uuid.uuid4().hex
        # SPT_NOENV: setproctitle, used by vLLM's processes, would otherwise erase the environment that holds the token
        env = {**launch.env, TOKEN: self._token, "SPT_NOENV": "1"}
        with self.log.open("wb") as log_file:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), "--grace", str(GRACE_S), "--", *launch.argv(port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, env=env, start_new_session=True,
            )  # fmt: skip
        pid = _first_line(self._guard).get("pid")
        self.facts = blank_facts(kind=launch.kind, name=name, url=self.url, model=launch.model, pid=pid)
        try:
            self._write(self._process())
        except ServebookError:
            self.stop()
            raise

    def alive(self) -> bool:
        return self._guard.poll() is None

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(seconds)

    @property
    def exit_status(self) -> int | None:
        """The server's exit status, 128 + N if signal N ended it, None while it runs."""
        return self._guard.poll()

    def ready(self) -> bool:
        """Whether the server is healthy and serves its model. Without a given name, its first listed model is used."""
        if not healthy(self.url, timeout_s=2.0):
            return False
        if not self._lists_models:
            return answers(self.url) is not None
        served = [m["id"] for m in served_models(self.url)]
        if served and not self.model:
            self.model = self.facts["model"] = served[0]
        return self.model in served

    def note(self, facts: dict[str, Any]) -> None:
        """Add facts and the start-up time, and store them with the processes' identities."""
        known = {k: self.facts[k] for k in ("kind", "name", "url", "model", "pid")}
        self.facts = {**facts, **known, "startup_s": round(time.monotonic() - self._started, 1)}
        self._write(self._process())

    def stop(self) -> None:
        """End the server and all processes it started (killed after GRACE_S), wait until the GPU's memory is free, and
        clear its record."""
        if self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(GRACE_S + 10)
        except subprocess.TimeoutExpired:
            end_processes(processes_with(self._token))
            self._guard.wait()
        except KeyboardInterrupt:  # a second Ctrl-C: end at once
            self._guard.terminate()
            self._guard.wait(10)
            raise
        finally:
            if self._guard.stdout:
                self._guard.stdout.close()
            if self._guard.poll() is not None:
                self._note_memory_left()
                with contextlib.suppress(ServebookError):  # a full disk must not hide why the run ends
                    if not self._replaced():
                        self._write(None)

    def _note_memory_left(self) -> None:
        """Wait until the GPU's memory use is back at its level before the start; report if it is not."""
        if self._gpu_gib_before is None:
            return
        until = time.monotonic() + GPU_RELEASE_S
        while (left := (gpu_gib_in_use() or 0.0) - self._gpu_gib_before) > GPU_SLACK_GIB and time.monotonic() < until:
            time.sleep(0.2)
        self.facts["gpu_gib_left"] = round(max(left, 0.0), 2)
        if left > GPU_SLACK_GIB:
            logging.getLogger(__name__).warning(
                "%s has ended, but %.1f GiB of GPU memory are still in use", self.name, left
            )

    def _process(self) -> dict[str, Any]:
        pid = self.facts["pid"]
        return {
            "token": self._token,
            "owner": identity(os.getpid()),
            "guard": identity(self._guard.pid),
            "server": identity(pid) if pid else None,
        }

    def _write(self, process: dict[str, Any] | None) -> None:
        files.write_json(self._record, {**self.facts, "process": process})

    def _replaced(self) -> bool:
        """Whether the record belongs to a newer start: this server had failed and was started again."""
        token = (read_record(self._record).get("process") or {}).get("token")
        return token not in (None, self._token)


def gpu_gib_in_use() -> float | None:
    """Memory in use on the NVIDIA GPUs that this process may use, in GiB; None without a GPU."""
    with nvml() as n:
        if n is None:
            return None
        try:
            handles = visible_handles(n)
            return sum(n.nvmlDeviceGetMemoryInfo(h).used for h in handles) / GIB if handles else None
        except n.NVMLError:
            return None


def launch(name: str, make: Launch, run_dir: Path) -> ServerProcess:
    """Start a server and return it when it is ready (see ServerProcess.ready).

    Raises ServebookError if it ends, is not ready in time, or its port is taken; nothing is left running then.
    """
    where = f"engines.{name}"
    for attempt in range(PORT_TRIES):
        port = require_free(make.port, f"{where}.port") if make.port else free_port()
        try:
            server = ServerProcess(name, make, port, run_dir)
        except OSError as error:
            raise ServebookError(
                f"cannot start the server ({error.strerror})", where, "Check disk space and permissions"
            ) from error
        try:
            _await_ready(server, make, where)
            server.note(make.read_facts(server.url, log_of(run_dir, name)))
            return server
        except PortTaken:
            server.stop()
            if make.port or attempt == PORT_TRIES - 1:
                require_free(port, f"{where}.port")
                raise ServebookError(f"port {port} was taken while the server started", where, "Run again") from None
        except BaseException:
            server.stop()
            raise
    raise AssertionError("unreachable")


class PortTaken(Exception):
    """Another process bound the port between the check and the server's own bind."""


def _await_ready(server: ServerProcess, make: Launch, where: str) -> None:
    deadline = time.monotonic() + make.timeout_s
    assert server.log is not None
    while not server.ready():
        if not server.alive():
            lines = logs.tail(server.log, 400)
            if "address already in use" in "\n".join(lines).lower():
                raise PortTaken
            raise ServebookError(_how_it_ended(server, lines), where, logs.fix(lines, server.log))
        if time.monotonic() > deadline:
            last = logs.clean((logs.tail(server.log, 1) or ["nothing"])[-1])
            raise ServebookError(
                f"did not answer within {make.timeout_s:g} s; its log ends with: {last}", where,
                f"Raise startup_timeout_s, or read {server.log}",
            )  # fmt: skip
        server.wait(0.1)


def _how_it_ended(server: ServerProcess, lines: list[str]) -> str:
    status = server.exit_status or 0
    how = f"exit status {status}"
    if status > 128:
        with contextlib.suppress(ValueError):
            how = signal.Signals(status - 128).name
    if how == "SIGILL":
        return "ended at start by SIGILL: this build needs instructions that the processor lacks"
    if how == "SIGKILL":
        how += ", often the system's out-of-memory killer"
    why = logs.cause(lines)
    return f"ended at start ({how}): {why}" if why else f"ended at start ({how}) without a message in its log"


def _first_line(guard: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert guard.stdout is not None
    ready, _, _ = select.select([guard.stdout], [], [], 10.0)
    try:
        return dict(json.loads(guard.stdout.readline())) if ready else {}
    except ValueError:
        return {}
