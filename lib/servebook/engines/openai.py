"""Any OpenAI-compatible server that already runs: found, asked, never ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import ServebookError
from ..params import OpenAIEngine
from .base import Engine, blank_facts, get_json, http_get, served_models, write_record
from .facts import from_metrics, merge
from .process import record_of


class Remote(Engine):
    """A server at a URL; `alive` asks it, `stop` leaves it alone."""

    kind = "openai"

    def __init__(self, name: str, url: str, model: str, facts: dict[str, Any], key: str | None) -> None:
        super().__init__(name, url, model, facts, owned=False)
        self._api_key = key

    def key(self) -> str | None:
        return self._api_key


def connect(name: str, engine: OpenAIEngine, run_dir: Path) -> Remote:
    """The engine at the given URL. Raises ServebookError where it does not answer or lacks the model asked for."""
    where = f"engines.{name}"
    url = engine.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(engine.api_key_env) if engine.api_key_env else None
    if engine.api_key_env and not key:
        raise ServebookError(
            f"the environment variable {engine.api_key_env} is not set", f"{where}.api_key_env", "Set it to the key"
        )
    models = served_models(url, key)
    if not models:
        raise ServebookError(
            f"no OpenAI-compatible server answers at {url}/v1/models",
            f"{where}.url",
            "Start it, or mend the URL or key",
        )
    ids = [m["id"] for m in models]
    if engine.model and engine.model not in ids:
        raise ServebookError(
            f"the server has no model {engine.model!r}", f"{where}.model", f"It serves {', '.join(ids[:5])}"
        )
    entry = next(m for m in models if m["id"] == (engine.model or ids[0]))
    facts = merge(_facts(url, key, entry), blank_facts(kind="openai", name=name, url=url, model=entry["id"]))
    write_record(record_of(run_dir, name), {**facts, "process": None})
    return Remote(name, url, entry["id"], facts, key)


def _facts(url: str, key: str | None, entry: dict[str, Any]) -> dict[str, Any]:
    version = get_json(f"{url}/version", key=key)
    metrics = (http_get(f"{url}/metrics", key=key) or b"").decode(errors="replace")
    return blank_facts(
        version=version.get("version") if isinstance(version, dict) else None,
        max_model_len=entry.get("max_model_len"),
        **{k: v for k, v in from_metrics(metrics).items() if v is not None},
    )
