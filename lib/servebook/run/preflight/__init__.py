"""Checks whether this machine can run the book: each check reports what it found and how to fix it.

The first six check what often breaks on a rented GPU machine (driver, nvcc, host compiler, C++, headers, ninja); the
others check further causes of lost runs. Checks try things where possible: they compile and run programs and write
files. They change nothing. Checks that need a GPU are "skipped" without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from ...common.errors import ServebookError
from ...common.files import ROOT
from ...config import params
from . import gpu, needs, system, toolchain
from .machine import Check, Finding, Machine

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "driver and CUDA runtime": toolchain.driver,
    "nvcc": toolchain.nvcc,
    "host compiler for nvcc": toolchain.host_compiler,
    "C++ toolchain": toolchain.cxx,
    "Python headers": toolchain.headers,
    "ninja": toolchain.ninja,
    "GPU as in the parameters": gpu.as_asked,
    "GPU idle, not throttled": gpu.state,
    "GPU memory": gpu.processes,
    "GPU ECC": gpu.ecc,
    "disk": system.disk,
    "output folder": system.output_folder,
    "shared memory": system.shared_memory,
    "temporary folder": system.temporary_folder,
    "open files": system.open_files,
    "clock": system.clock,
    "ports": needs.ports,
    "model": needs.model,
    "engines": needs.engines,
}


def run(run_params: params.RunParams | None, base: Path | None, run_dir: Path | None) -> list[Check]:
    """All checks, in display order. Without params only the machine itself is checked."""
    return checks_of(Machine(run_params, base, run_dir))


def checks_of(machine: Machine) -> list[Check]:
    def one(name: str) -> Check:
        try:
            status, detail, *fix = CHECKS[name](machine)
        except Exception as error:  # a check with a fault of its own must not hide the others
            status, detail, fix = "warn", f"could not be checked ({type(error).__name__}: {error})", ["Report this"]
        return Check(name, status, detail, fix[0] if fix else "")

    with ThreadPoolExecutor(8) as pool:  # most of them wait for a compiler or the network
        return list(pool.map(one, CHECKS))


def text(checks: Iterable[Check]) -> str:
    """The checks as lines for a terminal, each fault followed by its fix."""
    marks = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skipped": "–   "}
    checks, lines = list(checks), []
    for c in checks:
        lines.append(f"{marks[c.status]}  {c.name}: {c.detail}")
        if c.fix and c.status in ("warn", "fail"):
            lines.append(f"      → {c.fix}")
    failed, warned = (sum(c.status == s for c in checks) for s in ("fail", "warn"))
    lines.append(f"{len(checks)} checks: {failed} failed, {warned} warning{'' if warned == 1 else 's'}")
    return "\n".join(lines)


def refuse(checks: Iterable[Check]) -> None:
    """Raise ServebookError with the first failed check and its fix, if any failed."""
    failed = [c for c in checks if c.status == "fail"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise ServebookError(f"preflight failed{more}: {failed[0].detail}", failed[0].name, failed[0].fix)


def warnings(run_params: params.RunParams, base: Path) -> list[str]:
    """Warnings about allowed settings that the user should know before a run; one line each."""
    from ...model.reader import local_folder

    found, m = [], run_params.model
    paths = [("model.path", m.path)] if m.path else []
    remote_code = ["model.trust_remote_code"] if m.trust_remote_code else []
    for name, engine in run_params.engines.items():
        for key in ("extra_args", "command"):
            where, words = f"engines.{name}.{key}", _words(getattr(engine, key, None) or [])
            paths += [(where, word) for word in words if word.startswith(("/", "~", "../"))]
            remote_code += [f"--trust-remote-code in {where}"] if "--trust-remote-code" in words else []
            hosts = [value for option, value in pairwise(words) if option == "--host" and value not in LOOPBACK]
            found += [
                f"{where} lets the server listen on {host}: anyone who can reach this machine can use it"
                for host in hosts
            ]
    for key, path in paths:
        folder = local_folder(path, base)
        if not any(folder.is_relative_to(p) for p in (ROOT.resolve(), base.resolve())):
            found.append(f"{key} is outside the project: {folder}")
    if m.hub and not m.revision:
        commit = _cached_commit(m.hub)
        pin = f"model.revision: {commit}" if commit else "model.revision, a commit from the model's page on the Hub"
        found.append(f"model.hub {m.hub} can change at any time; pin it with {pin}")
    return found + [f"{key} is on: the model's own Python code is executed" for key in remote_code]


def _words(arguments: list[str]) -> list[str]:
    """The arguments, with --option=value as two words."""
    return [word for a in arguments for word in (a.split("=", 1) if a.startswith("--") else [a])]


def _cached_commit(hub: str) -> str | None:
    """The commit of the Hub's main branch when it was last downloaded here."""
    with contextlib.suppress(OSError):
        return (needs.hub_folder(hub) / "refs/main").read_text().strip()
    return None


__all__ = ["CHECKS", "Check", "Machine", "checks_of", "refuse", "run", "text", "warnings"]
