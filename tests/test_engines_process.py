"""Servers are started whole, found again, and ended whole, whoever dies first. Real processes, a doubled server."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from servebook.common import files
from servebook.common.errors import ServebookError
from servebook.engines import guard, ports, process, records

DOUBLE = str(Path(__file__).with_name("engine_double.py"))


def double(
    mode: str = "serve", *, port: int | None = None, timeout_s: float = 20.0, env: dict | None = None
) -> process.Launch:
    return process.Launch(
        kind="vllm", model="m", timeout_s=timeout_s, port=port, env={**os.environ, **(env or {})},
        argv=lambda n: [sys.executable, DOUBLE, "--port", str(n), "--mode", mode],
        read_facts=lambda url, log: {"version": "9.9", "log_read": log.exists()},
    )  # fmt: skip


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether a process ends in time; a zombie that nobody collects has ended."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def child_of(server: process.ServerProcess) -> int:
    return int(server.log_tail(5).splitlines()[0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 1.0)


def test_started_joined_and_stopped(tmp_path: Path) -> None:
    server = process.launch("e", double(), tmp_path)
    record = json.loads((tmp_path / "engines/e.json").read_text())
    assert record["url"] == server.url and record["version"] == "9.9" and record["startup_s"] > 0
    joined = records.join(tmp_path, "e")
    assert joined is not None and joined.url == server.url and not joined.owned
    joined.stop()  # not its to end
    assert server.alive() and joined.alive()
    pid = server.pid
    server.stop()
    assert pid and gone(pid) and not joined.alive() and records.join(tmp_path, "e") is None
    record = json.loads((tmp_path / "engines/e.json").read_text())
    assert record["process"] is None and record["version"] == "9.9", "facts stay for the report"


def test_server_is_out_of_reach_of_the_terminal(tmp_path: Path) -> None:
    with process.launch("e", double(), tmp_path) as server:
        assert os.getsid(server.pid) != os.getsid(0) and os.getpgid(server.pid) != os.getpgid(0)


def test_a_server_may_hold_more_clients_than_the_shell_has_files(tmp_path: Path) -> None:
    """With 1,024 files the naive server turned away 500 of 1,500 clients, and whoever asked for its health."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = guard.OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, guard.OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with process.launch("e", double(), tmp_path) as server:
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("victim", ["server", "guard"])
def test_nothing_outlives_a_sigkill(tmp_path: Path, quick: None, victim: str) -> None:
    server = process.launch("e", double("child"), tmp_path)
    child, pid, guard = child_of(server), server.pid, server._guard.pid
    os.kill(pid if victim == "server" else guard, signal.SIGKILL)
    server.wait(8.0)
    assert not server.alive() and gone(pid)
    if victim == "guard":  # the child of a server whose guard is gone too is ended by the next start
        records.clear_stale(tmp_path, "e")
    assert gone(child)
    server.stop()


def test_owner_killed_ends_guard_server_and_children(tmp_path: Path) -> None:
    program = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_engines_process as t
t.process.GRACE_S = 1.0
server = t.process.launch("e", t.double("child"), Path({str(tmp_path)!r}))
print(server._guard.pid, server.pid, t.child_of(server), flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(p) for p in owner.stdout.readline().split()]
    assert len(pids) == 3 and all(psutil.pid_exists(p) for p in pids)
    owner.kill()
    owner.wait()
    assert all(gone(p) for p in pids)
    owner.stdout.close()


def test_frozen_server_is_ended(tmp_path: Path, quick: None) -> None:
    server = process.launch("e", double("child"), tmp_path)
    child, pid = child_of(server), server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert gone(pid) and gone(child)


def test_death_at_start_is_one_line_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(ServebookError) as caught:
        process.launch("e", double("die"), tmp_path)
    assert "exit status 1" in caught.value.what and "RuntimeError: the model does not fit" in caught.value.what
    assert caught.value.where == "engines.e" and "\n" not in str(caught.value)
    with pytest.raises(ServebookError, match=r"SIGKILL.*out-of-memory"):
        process.launch("e", double("kill"), tmp_path)


def test_silent_server_is_given_up_and_ended(tmp_path: Path) -> None:
    with pytest.raises(ServebookError, match=r"did not answer within 5 s; its log ends with: still loading"):
        process.launch("e", double("mute", timeout_s=5.0), tmp_path)
    assert json.loads((tmp_path / "engines/e.json").read_text())["process"] is None


def test_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(ServebookError, match=f"engines.e.port: port {taken} is in use"):
            process.launch("e", double(port=taken), tmp_path)
        # chosen free, taken before the server binds it: another is tried
        offers = iter([taken, ports.free_port()])
        monkeypatch.setattr(process, "free_port", lambda: next(offers))
        with process.launch("e", double(), tmp_path) as server:
            assert server.url != f"http://127.0.0.1:{taken}"


def test_given_port_is_used_again_at_once(tmp_path: Path) -> None:
    port = ports.free_port()
    for _ in range(2):
        with process.launch("e", double(port=port), tmp_path) as server:
            assert server.url.endswith(f":{port}")


def test_stale_record_ends_only_what_carries_its_token(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    leftover = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, records.TOKEN: "t1"}
    )
    while records.TOKEN not in environ_of(leftover.pid):  # the kernel shows it a moment after the start
        time.sleep(0.01)
    dead = {"pid": 1, "started_ticks": -1, "boot": "x"}
    record = {"kind": "vllm", "url": "http://127.0.0.1:1", "model": "m"}
    who = records.identity(stranger.pid) | {"started_ticks": 1}  # the pid went to somebody else since
    files.write_json(
        records.record_of(tmp_path, "e"),
        {**record, "process": {"token": "t1", "owner": dead, "guard": dead, "server": who}},
    )
    assert records.join(tmp_path, "e") is None
    records.clear_stale(tmp_path, "e")
    assert gone(leftover.pid) and stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_engine_of_a_living_owner_is_not_ended(tmp_path: Path) -> None:
    with process.launch("e", double(), tmp_path) as server:
        path = records.record_of(tmp_path, "e")
        record = json.loads(path.read_text())
        record["process"]["owner"] = records.identity(os.getppid())
        path.write_text(json.dumps(record))
        with pytest.raises(ServebookError, match="already runs"):
            records.clear_stale(tmp_path, "e")
        assert server.alive()


def test_gpu_memory_is_waited_for_and_its_rest_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(process, "GPU_RELEASE_S", 1.0)
    in_use = iter([1.0, 9.0, 5.0, 1.1])  # before the start, then until it is released
    monkeypatch.setattr(process, "gpu_gib_in_use", lambda: next(in_use))
    process.launch("e", double(), tmp_path).stop()
    assert json.loads((tmp_path / "engines/e.json").read_text())["gpu_gib_left"] == 0.1 and not caplog.records
    monkeypatch.setattr(process, "gpu_gib_in_use", iter([1.0, *[7.0] * 100]).__next__)
    process.launch("e", double(), tmp_path).stop()
    assert json.loads((tmp_path / "engines/e.json").read_text())["gpu_gib_left"] == 6.0
    assert "6.0 GiB of GPU memory are still in use" in caplog.text


def test_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engines").write_text("a file in the way")
    with pytest.raises(ServebookError, match=r"engines.e: cannot start the server \(File exists\)"):
        process.launch("e", double(), tmp_path)

    def full(*_: object) -> None:
        raise ServebookError("cannot write (No space left on device)")

    monkeypatch.setattr(process.files, "write_json", full)
    before = set(psutil.pids())
    with pytest.raises(ServebookError, match=r"No space left on device"):
        process.launch("e", double(), tmp_path / "other")
    started = [p for p in set(psutil.pids()) - before if records.TOKEN in environ_of(p)]
    assert all(gone(p) for p in started)


def environ_of(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}
