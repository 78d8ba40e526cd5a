"""Records of servers, engines/<name>.json: which process runs what, and whether it lives."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..run_folder.layout import RunFiles
from .base import RunningEngine
from .http import healthy

TOKEN = "SERVEBOOK_SERVER"  # environment variable that marks a server and all its children as belonging to one start


def log_of(run_dir: Path, name: str) -> Path:
    """The path of an engine's log."""
    return RunFiles(run_dir).engine_log(name)


def record_of(run_dir: Path, name: str) -> Path:
    """The path of an engine's record."""
    return RunFiles(run_dir).engine_record(name)


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} if it is missing or unreadable."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def identity(pid: int) -> dict[str, Any]:
    """What distinguishes a process from a later one with the same pid: its start in clock ticks since boot, and the
    boot id."""
    return {"pid": pid, "started_ticks": _started_ticks(pid), "boot": _boot_id()}


def is_same(record: dict[str, Any] | None) -> bool:
    """Whether the recorded process still lives (a zombie does not)."""
    if not record or record.get("boot") != _boot_id():
        return False
    ticks = _started_ticks(record["pid"])
    return ticks is not None and ticks == record.get("started_ticks")


def _started_ticks(pid: int) -> int | None:
    # from /proc: psutil's create_time changes when the system clock is set, ticks since boot do not
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


def join(run_dir: Path, name: str) -> RunningEngine | None:
    """The engine of this run that already runs and answers, else None. Its owner stays responsible for it."""
    record = read_record(record_of(run_dir, name))
    process = record.pop("process", None)
    if not process or not is_same(process.get("server")):
        return None
    if not healthy(record["url"], timeout_s=5.0):
        return None
    return Joined(name, record, process, log_of(run_dir, name))


class Joined(RunningEngine):
    """A server owned by another process of this run."""

    def __init__(self, name: str, facts: dict[str, Any], process: dict[str, Any], log: Path) -> None:
        super().__init__(name, facts["url"], facts["model"], facts, owned=False, log=log)
        self.kind = facts["kind"]
        self._process = process

    def alive(self) -> bool:
        return is_same(self._process["server"])


def clear_stale(run_dir: Path, name: str) -> None:
    """End what an earlier run's engine of this name left running. Raises ServebookError if its owner is still active.

    Ours are the processes whose environment contains the recorded start's token, whatever their parent is now.
    """
    process = read_record(record_of(run_dir, name)).get("process")
    if not process:
        return
    left = processes_with(process["token"])
    if left and is_same(process.get("owner")) and process["owner"]["pid"] != os.getpid():
        raise ServebookError(
            f"it already runs, started by process {process['owner']['pid']}", f"engines.{name}",
            "Wait for that run, or end it",
        )  # fmt: skip
    end_processes(left)


def end_recorded(run_dir: Path, name: str) -> None:
    """End the engine of this name, whichever process of this run started it: it has failed and will be started
    again."""
    path = record_of(run_dir, name)
    record = read_record(path)
    if process := record.get("process"):
        end_processes(processes_with(process["token"]))
        files.write_json(path, {**record, "process": None})


def processes_with(token: str) -> list[int]:
    """Living processes that were started with this token."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TOKEN) == token:
                found.append(process.pid)
    return found


GRACE_S = 5.0  # between SIGTERM and SIGKILL


def end_processes(pids: list[int]) -> None:
    """SIGTERM to processes, SIGKILL after the grace period; returns when they are gone."""
    import psutil

    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    for send in ("terminate", "kill"):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                getattr(process, send)()
        _, left = psutil.wait_procs(left, timeout=GRACE_S)
