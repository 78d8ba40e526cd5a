"""Starts servers as children of a guard process, finds running ones again by their record, ends them whole."""

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

from ..errors import ServebookError
from . import logs
from .base import Engine, blank_facts, healthy, read_record, served_models, write_record
from .ports import LOOPBACK, free_port, require_free

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 15.0
PORT_TRIES = 3
GPU_RELEASE_S, GPU_SLACK_GIB = 10.0, 0.3
TOKEN = "SERVEBOOK_SERVER"  # environment variable that marks a server and all its children as one start's


@dataclass(frozen=True)
class Launch:
    """How to start one server: its command line once the port is known, and how to learn its facts."""

    kind: str
    model: str  # the name it is served under; "": the first that it lists
    argv: Callable[[int], list[str]]
    env: dict[str, str]
    timeout_s: float
    port: int | None
    read_facts: Callable[[str, Path], dict[str, Any]]  # (url, log) once it answers


class Server(Engine):
    """A server this machine runs. Owned ones hold the guard's pipe: when this process ends, so does the server."""

    def __init__(self, name: str, launch: Launch, port: int, run_dir: Path) -> None:
        super().__init__(name, f"http://{LOOPBACK}:{port}", launch.model, {}, owned=True, log=log_of(run_dir, name))
        self.kind = launch.kind
        self._record = record_of(run_dir, name)
        self._started = time.monotonic()
        self._gpu_gib_before = gpu_gib_in_use()
        assert self.log is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._token = uuid.uuid4().hex
        # SPT_NOENV: setproctitle, which vLLM's processes use, would otherwise wipe the environment that shows the token
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
        except OSError:
            self.stop()
            raise

    def alive(self) -> bool:
        return self._guard.poll() is None

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(seconds)

    @property
    def exit_status(self) -> int | None:
        return self._guard.poll()

    def ready(self) -> bool:
        served = [m["id"] for m in served_models(self.url)] if healthy(self.url, timeout_s=2.0) else []
        if served and not self.model:
            self.model = self.facts["model"] = served[0]
        return self.model in served

    def note(self, facts: dict[str, Any]) -> None:
        """Add facts, with the time that the start took, and keep them beside the process's identity."""
        known = {k: self.facts[k] for k in ("kind", "name", "url", "model", "pid")}
        self.facts = {**facts, **known, "startup_s": round(time.monotonic() - self._started, 1)}
        self._write(self._process())

    def stop(self) -> None:
        if self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(GRACE_S + 10)
        except subprocess.TimeoutExpired:
            end_processes(_ours(self._token))
            self._guard.wait()
        except KeyboardInterrupt:  # the second Ctrl-C: now, not orderly
            self._guard.terminate()
            self._guard.wait(10)
            raise
        finally:
            if self._guard.stdout:
                self._guard.stdout.close()
            if self._guard.poll() is not None:
                self._note_memory_left()
                with contextlib.suppress(OSError):  # a full disk must not hide why the run ends
                    if not self._replaced():
                        self._write(None)

    def _note_memory_left(self) -> None:
        """Wait until the GPU's memory is back where it was before the start; say so where it is not."""
        if self._gpu_gib_before is None:
            return
        until = time.monotonic() + GPU_RELEASE_S
        while (left := (gpu_gib_in_use() or 0.0) - self._gpu_gib_before) > GPU_SLACK_GIB and time.monotonic() < until:
            time.sleep(0.2)
        self.facts["gpu_gib_left"] = round(max(left, 0.0), 2)
        if left > GPU_SLACK_GIB:
            logging.getLogger(__name__).warning(
                "%s has ended, but %.1f GiB of GPU memory are not free again", self.name, left
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
        write_record(self._record, {**self.facts, "process": process})

    def _replaced(self) -> bool:
        """Whether the record is another start's by now: this one had failed and was started again."""
        token = (read_record(self._record).get("process") or {}).get("token")
        return token not in (None, self._token)


def gpu_gib_in_use() -> float | None:
    """Memory in use on all NVIDIA GPUs in GiB, None where there is none to ask."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return sum(pynvml.nvmlDeviceGetMemoryInfo(h).used for h in handles) / 2**30 if handles else None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def launch(name: str, make: Launch, run_dir: Path) -> Server:
    """Start a server and return it when it answers /health and /v1/models.

    Raises ServebookError when it ends, does not answer in time, or its port is taken. Nothing is left running then.
    """
    where = f"engines.{name}"
    for attempt in range(PORT_TRIES):
        port = require_free(make.port, f"{where}.port") if make.port else free_port()
        try:
            server = Server(name, make, port, run_dir)
        except OSError as error:
            raise ServebookError(
                f"cannot start it ({error.strerror})", where, "Check disk space and permissions"
            ) from error
        try:
            _await_ready(server, make, where)
            server.note(make.read_facts(server.url, log_of(run_dir, name)))
            return server
        except PortTaken:
            server.stop()
            if make.port or attempt == PORT_TRIES - 1:
                require_free(port, f"{where}.port")
                raise ServebookError(f"port {port} was taken while it started", where, "Run again") from None
        except BaseException:
            server.stop()
            raise
    raise AssertionError("unreachable")


class PortTaken(Exception):
    """Somebody else bound the port between the check and the server's own bind."""


def _await_ready(server: Server, make: Launch, where: str) -> None:
    deadline = time.monotonic() + make.timeout_s
    assert server.log is not None
    while not server.ready():
        if not server.alive():
            lines = logs.tail(server.log, 400)
            if "address already in use" in "\n".join(lines).lower():
                raise PortTaken
            raise ServebookError(_obituary(server, lines), where, logs.fix(lines, server.log))
        if time.monotonic() > deadline:
            last = logs.clean((logs.tail(server.log, 1) or ["nothing"])[-1])
            raise ServebookError(
                f"did not answer within {make.timeout_s:g} s; its log ends with: {last}", where,
                f"Raise startup_timeout_s, or read {server.log}",
            )  # fmt: skip
        server.wait(0.1)


def _obituary(server: Server, lines: list[str]) -> str:
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
    return f"ended at start ({how}): {why}" if why else f"ended at start ({how}) without a word"


# --- records: finding a running engine again ----------------------------------------------------------------------


def log_of(run_dir: Path, name: str) -> Path:
    return run_dir / "engines" / f"{name}.log"


def record_of(run_dir: Path, name: str) -> Path:
    return run_dir / "engines" / f"{name}.json"


def identity(pid: int) -> dict[str, Any]:
    """What tells a process from a later one with the same pid: its start in clock ticks since boot, and the boot."""
    return {"pid": pid, "started_ticks": _started_ticks(pid), "boot": _boot_id()}


def is_same(record: dict[str, Any] | None) -> bool:
    """Whether the recorded process still lives (a zombie does not)."""
    if not record or record.get("boot") != _boot_id():
        return False
    ticks = _started_ticks(record["pid"])
    return ticks is not None and ticks == record.get("started_ticks")


def _started_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def join(run_dir: Path, name: str) -> Engine | None:
    """The engine of this run that already runs and answers, None otherwise. It stays its owner's."""
    record = read_record(record_of(run_dir, name))
    process = record.pop("process", None)
    if not process or not is_same(process.get("server")):
        return None
    if not healthy(record["url"], timeout_s=5.0):
        return None
    return Joined(name, record, process, log_of(run_dir, name))


class Joined(Engine):
    """A server that another process of this run owns."""

    def __init__(self, name: str, facts: dict[str, Any], process: dict[str, Any], log: Path) -> None:
        super().__init__(name, facts["url"], facts["model"], facts, owned=False, log=log)
        self.kind = facts["kind"]
        self._process = process

    def alive(self) -> bool:
        return is_same(self._process["server"])


def clear_stale(run_dir: Path, name: str) -> None:
    """End what an earlier run's engine of this name left behind; refuse if its owner is still at work.

    Ours are the processes that carry the recorded start's token in their environment, whatever their parent is now.
    """
    process = read_record(record_of(run_dir, name)).get("process")
    if not process:
        return
    ours = _ours(process["token"])
    if ours and is_same(process.get("owner")) and process["owner"]["pid"] != os.getpid():
        raise ServebookError(
            f"it already runs, started by process {process['owner']['pid']}", f"engines.{name}",
            "Wait for that run, or end it",
        )  # fmt: skip
    end_processes(ours)


def end_recorded(run_dir: Path, name: str) -> None:
    """End the engine of this name whoever of this run started it: it has failed, and is to be started again."""
    path = record_of(run_dir, name)
    record = read_record(path)
    if process := record.get("process"):
        end_processes(_ours(process["token"]))
        write_record(path, {**record, "process": None})


def _ours(token: str) -> list[int]:
    """Living processes that were started with a token."""
    mark, found = f"{TOKEN}={token}".encode(), []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def end_processes(pids: list[int], grace_s: float = 5.0) -> None:
    """SIGTERM to processes, SIGKILL after the grace; returns when they are gone."""
    import psutil

    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    for send in ("terminate", "kill"):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                getattr(process, send)()
        _, left = psutil.wait_procs(left, timeout=grace_s)


def _first_line(guard: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert guard.stdout is not None
    ready, _, _ = select.select([guard.stdout], [], [], 10.0)
    try:
        return dict(json.loads(guard.stdout.readline())) if ready else {}
    except ValueError:
        return {}
