"""The naive engine: the project's own Transformers server (naive_server.py) as a child process."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import model
from ..common.errors import ServebookError
from ..config.params import NaiveEngine, RunParams
from .base import RunningEngine
from .environment import server_environment
from .facts import blank_facts
from .http import get_json
from .process import Launch, launch


def start(params: RunParams, name: str, run_dir: Path, base: Path) -> RunningEngine:
    """Start the naive engine of a run; returns when it answers. Raises ServebookError (see engines.start)."""
    engine = params.engines[name]
    assert isinstance(engine, NaiveEngine)
    return launch(name, prepare(params, name, engine, run_dir, base), run_dir)


def version() -> str | None:
    """The installed version of Transformers, None if it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"transformers {metadata.version('transformers')}"
    return None


def why_not(_engine: NaiveEngine) -> str | None:
    """Always None: nothing prevents it from running."""
    return None


def prepare(params: RunParams, name: str, engine: NaiveEngine, run_dir: Path, base: Path) -> Launch:
    """How to launch a run's naive engine. Raises ServebookError if it cannot serve the model."""
    where, m = f"engines.{name}", params.model
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        raise ServebookError("Transformers or torch is not installed", where, "`make report` installs the locked ones")
    if m.quantization or m.kv_cache_dtype != "auto":
        key = "quantization" if m.quantization else "kv_cache_dtype"
        raise ServebookError(
            f"the naive engine has no {getattr(m, key)} {key}", where, f"Leave model.{key} out, or this engine"
        )
    target = model.materialize(m, base, run_dir / "model")
    flags = ["--served-model-name", model.model_name(m), "--dtype", m.dtype, "--device", engine.device]
    flags += ["--dummy"] if m.weights == "dummy" else []
    flags += ["--revision", m.revision] if m.hub and m.revision else []
    flags += ["--trust-remote-code"] if m.trust_remote_code else []
    argv = [sys.executable, "-m", "servebook.engines.naive_server", "--model", str(target), *flags]
    return Launch(
        kind="naive",
        model=model.model_name(m),
        argv=lambda port: [*argv, "--port", str(port)],
        env=server_environment(m),
        timeout_s=engine.startup_timeout_s,
        port=engine.port,
        read_facts=lambda url, _log: _facts(url, flags),
    )


def _facts(url: str, flags: list[str]) -> dict[str, Any]:
    facts = get_json(f"{url}/facts")
    return {**blank_facts(), **(facts if isinstance(facts, dict) else {}), "flags": flags}
