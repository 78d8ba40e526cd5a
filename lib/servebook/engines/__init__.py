"""Engines: start a server, wait until it answers, learn its facts, end it and all it started.

    with engines.start(params, name, run_dir, base=base) as engine:
        engine.url, engine.model, engine.facts

Each server runs under a guard process that ends it when its owner ends, however that happens. A kind of engine is the
module of its name in this package. It offers

    start(params, name, run_dir, base) -> Engine      see `start` below
    version() -> str | None                           what a start would bring, if known before
    why_not(engine) -> str | None                     why it cannot run here, if known; engine: its parameters
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from ..config.params import RunParams
from . import records
from .base import RunningEngine


def start(params: RunParams, name: str, run_dir: Path, *, base: Path) -> RunningEngine:
    """Start the engine `name` of a run and return it once it answers; the caller must stop it.

    Writes engines/<name>.log and engines/<name>.json in the run's folder. base: the folder of relative model paths.
    Raises ServebookError if it cannot run here, ends at start, does not answer in time, finds its port in use, or (a
    server that runs elsewhere) does not answer.
    """
    kind = _kind(params, name)
    records.clear_stale(run_dir, name)
    started: RunningEngine = kind.start(params, name, run_dir, base)
    return started


def join(run_dir: Path, name: str) -> RunningEngine | None:
    """The engine `name` of this run that already runs and answers, else None. Its owner ends it, not the caller."""
    return records.join(run_dir, name)


def restart(params: RunParams, name: str, run_dir: Path, base: Path) -> RunningEngine:
    """A new engine in place of one that failed, whoever in this run started it; the caller must stop it.

    Raises ServebookError as start does, and for a server that runs elsewhere and does not answer.
    """
    records.end_recorded(run_dir, name)
    return start(params, name, run_dir, base=base)


def installed_version(params: RunParams, name: str) -> str | None:
    """The version that the engine would have, None if it is not known before its start."""
    version: str | None = _kind(params, name).version()
    return version


def check(params: RunParams, name: str) -> str | None:
    """Why the engine cannot run on this machine, None if it can. Starts nothing."""
    reason: str | None = _kind(params, name).why_not(params.engines[name])
    return reason


def _kind(params: RunParams, name: str) -> Any:
    """The module of the engine's kind."""
    if name not in params.engines:
        raise ServebookError(f"no engine {name!r}", "engines", f"This run has {', '.join(params.engines)}")
    return importlib.import_module(f".{params.engines[name].kind}", __package__)


__all__ = ["RunningEngine", "check", "installed_version", "join", "restart", "start"]
