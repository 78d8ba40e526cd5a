"""Any OpenAI-compatible server: one that already runs at a URL (never stopped), or one started by `command`."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from .. import model
from ..common import files
from ..common.errors import ServebookError
from ..config.params import OpenAIEngine, RunParams
from . import secrets
from .base import RunningEngine
from .environment import server_environment
from .facts import blank_facts, count, from_metrics, from_sglang, merge
from .http import ABSENT, answers, get_json, http_get, http_status, served_models
from .process import Launch, launch
from .records import record_of

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


class Remote(RunningEngine):
    """A server at a URL; `alive` sends it a request, `stop` leaves it running."""

    kind = "openai"
    health_is_free = False

    def __init__(self, name: str, url: str, model: str, facts: dict[str, Any], key: str | None) -> None:
        super().__init__(name, url, model, facts, owned=False)
        self._api_key = key

    def key(self) -> str | None:
        return self._api_key


def start(params: RunParams, name: str, run_dir: Path, base: Path) -> RunningEngine:
    """The server at `url`, or the one that `command` starts, once it answers. Raises ServebookError."""
    engine = params.engines[name]
    assert isinstance(engine, OpenAIEngine)
    if engine.url:
        return connect(name, engine, run_dir)
    return launch(name, prepare(params, name, engine, run_dir, base), run_dir)


def version() -> str | None:
    """Only a running server reports its version."""
    return None


def why_not(engine: OpenAIEngine) -> str | None:
    """Why it cannot be used: nothing answers at its URL, or its command's program is missing; else None."""
    if engine.url:
        url = engine.url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(engine.api_key_env or "", "").strip() or None
        status = answers(url, key)
        if status in (401, 403):
            return f"{url}/v1/models refuses the key (HTTP {status})"
        return None if status is not None else f"nothing answers at {url}/v1/models"
    program = (engine.command or [""])[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    known = "{" in program or shutil.which(program, path=engine.env.get("PATH", path))
    return None if known else f"there is no program {program}"


def prepare(params: RunParams, name: str, engine: OpenAIEngine, run_dir: Path, base: Path) -> Launch:
    """How to launch a server by its `command`. Raises ServebookError for an unknown placeholder."""
    command, served_as = engine.command or [], model.model_name(params.model)
    where = f"engines.{name}.command"
    values = {k: v for k, v in engine.model_dump().items() if isinstance(v, int | float | str)}
    path = str(model.materialize(params.model, base, run_dir / "model"))
    values |= {"model": path, "name": served_as}
    for argument in command:
        for key in PLACEHOLDER.findall(argument):
            if key not in {*values, "port"}:
                near = difflib.get_close_matches(key, [*values, "port"], n=1)
                fix = (
                    f"Set {key} for this engine"
                    if key in OpenAIEngine.model_fields
                    else "Known: port, model, name, fields"
                )
                raise ServebookError(f"{{{key}}} has no value", where, f"Did you mean {{{near[0]}}}?" if near else fix)
    if engine.port is None and "{port}" not in " ".join(command):
        raise ServebookError("lacks {port}", where, "Pass {port} to the server, or set port for this engine")

    def argv(port: int) -> list[str]:
        known = {**values, "port": port}
        return [PLACEHOLDER.sub(lambda m: str(known[m[1]]), argument) for argument in command]

    return Launch(
        kind="openai",
        model=(engine.model or "").replace("{model}", path) or (served_as if "{name}" in " ".join(command) else ""),
        lists_models=engine.model is None,
        argv=argv,
        env={**server_environment(params.model), **engine.env},
        timeout_s=engine.startup_timeout_s,
        port=engine.port,
        read_facts=functools.partial(_started_facts, command=command),
    )


def connect(name: str, engine: OpenAIEngine, run_dir: Path) -> Remote:
    """The engine at the given URL. Raises ServebookError if it does not answer or lacks the requested model."""
    where = f"engines.{name}"
    assert engine.url
    url = engine.url.rstrip("/").removesuffix("/v1")
    key = secrets.key_of(engine.api_key_env, f"{where}.api_key_env")
    status, models = http_status(f"{url}/v1/models", None, timeout_s=5.0, key=key), served_models(url, key)
    if status in (401, 403):
        raise ServebookError(f"{url}/v1/models refuses the key (HTTP {status})", f"{where}.api_key_env", "Correct it")
    if status in (429, 503):
        what = f"the server at {url} is busy or still starting (HTTP {status} from /v1/models)"
        raise ServebookError(what, f"{where}.url", "Try again later")
    if status in ABSENT:
        status_text = "" if status is None else f" (HTTP {status})"
        raise ServebookError(
            f"no OpenAI-compatible server answers at {url}/v1/models{status_text}",
            f"{where}.url",
            "Start it, or correct the URL or the key",
        )
    ids = list(dict.fromkeys(m["id"] for m in models))
    if not ids and not engine.model:
        raise ServebookError("the server lists no model", f"{where}.url", f"Name it: {where}.model")
    # the list may omit a model that is served (a pinned model, a wildcard), so try a request of one token
    if engine.model and ids and engine.model not in ids and not _serves(url, key, engine):
        raise ServebookError(
            f"the server has no model {engine.model!r}", f"{where}.model", f"It serves {', '.join(ids[:5])}"
        )
    name_of = engine.model or ids[0]
    entry = next((m for m in models if m["id"] == name_of), {"id": name_of})
    facts = merge(_facts(url, key, entry), blank_facts(kind="openai", name=name, url=url, model=name_of))
    if not engine.model and len(ids) > 1:
        facts["note"] = f"{name} serves {len(ids)} models: {name_of}, the first, is measured ({where}.model names one)"
    files.write_json(record_of(run_dir, name), {**facts, "process": None})
    return Remote(name, url, name_of, facts, key)


def _serves(url: str, key: str | None, engine: OpenAIEngine) -> bool:
    """Whether the server answers a one-token request for the model of this name."""
    asked: dict[str, Any] = {"model": engine.model, "max_tokens": 1}
    asked |= {"messages": [{"role": "user", "content": "one"}]} if engine.chat else {"prompt": "one"}
    path = "/v1/chat/completions" if engine.chat else "/v1/completions"
    return http_status(url + path, asked, timeout_s=60.0, key=key) == 200


def _started_facts(url: str, _log: Path, *, command: list[str]) -> dict[str, Any]:
    return {**_facts(url, None, next(iter(served_models(url)), {})), "flags": command}


def _facts(url: str, key: str | None, entry: dict[str, Any]) -> dict[str, Any]:
    """The server's facts: SGLang's own page if there is one, /version, labels of the metrics."""
    info = get_json(f"{url}/get_server_info", key=key)
    facts = blank_facts(**from_sglang(info if isinstance(info, dict) else {}))
    version = get_json(f"{url}/version", key=key)
    metrics = (http_get(f"{url}/metrics", key=key) or b"").decode(errors="replace")
    told_version = version.get("version") if isinstance(version, dict) else None
    known: dict[str, Any] = {"version": str(told_version)[:80] if told_version else None}
    known["max_model_len"] = count(entry.get("max_model_len"))
    return merge(facts, {**known, **from_metrics(metrics)})
