"""What every engine offers, whoever started it, and the small HTTP client that asks a server about itself."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# Keys of every engine's facts; None is "not reported".
FACT_KEYS = (
    "kind", "name", "url", "pid", "version", "model", "attention_backend", "kv_cache_tokens", "kv_cache_gib",
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "prefix_caching", "chunked_prefill", "async_scheduling",
    "cuda_graphs", "cuda_graph_gib", "weights_gib", "activation_gib", "startup_s", "flags", "block_size", "dtype",
    "device", "threads", "quantization", "kv_cache_dtype", "executor",
)  # fmt: skip

HEALTH_S = 10.0  # a server that says nothing on /health for so long is frozen, however loaded


def blank_facts(**known: Any) -> dict[str, Any]:
    """Facts with every key present, None where not (yet) reported."""
    return {**dict.fromkeys(FACT_KEYS), **known}


def http_get(url: str, *, timeout_s: float = 5.0, key: str | None = None) -> bytes | None:
    """The body of a 2xx answer, None for anything else (refused, timed out, another status)."""
    try:
        with _open(url, None, timeout_s, key) as answer:
            return bytes(answer.read())
    except (OSError, ValueError, http.client.HTTPException):  # URLError and HTTPError are OSErrors
        return None


def http_status(url: str, json_body: Any, *, timeout_s: float, key: str | None = None) -> int | None:
    """The status of the answer to a GET, or to a POST where there is a body; None where none comes in time."""
    try:
        with _open(url, json.dumps(json_body).encode() if json_body else None, timeout_s, key) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException):
        return None


def healthy(url: str, *, timeout_s: float) -> bool:
    """Whether /health says so; a server without such a page has nothing against it."""
    status = http_status(f"{url}/health", None, timeout_s=timeout_s)
    return status is not None and (status < 300 or status == 404)


def _open(url: str, body: bytes | None, timeout_s: float, key: str | None) -> Any:
    headers = {"Content-Type": "application/json"} if body else {}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    proxies = [urllib.request.ProxyHandler({})] if "127.0.0.1" in url else []
    request = urllib.request.Request(url, data=body, headers=headers)
    return urllib.request.build_opener(*proxies).open(request, timeout=timeout_s)


def get_json(url: str, **options: Any) -> Any:
    """The JSON at a URL, None where there is none."""
    body = http_get(url, **options)
    try:
        return None if body is None else json.loads(body)
    except ValueError:
        return None


def served_models(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """Entries of /v1/models, [] where the server does not answer with any."""
    answer = get_json(f"{url}/v1/models", key=key)
    data = answer.get("data") if isinstance(answer, dict) else None
    return [m for m in data if isinstance(m, dict) and "id" in m] if isinstance(data, list) else []


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1))
    os.replace(partial, path)


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} where it is missing or not readable as one."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


class Engine:
    """A server that answers. `owned`: this object ends it; a joined engine or a foreign URL is left running.

    url: base without /v1; model: the name to send; facts: what it said of itself (keys of FACT_KEYS).
    """

    kind: str  # the module in this package that knows it

    def __init__(
        self, name: str, url: str, model: str, facts: dict[str, Any], *, owned: bool, log: Path | None = None
    ) -> None:
        self.name, self.url, self.model, self.facts, self.owned, self.log = name, url, model, facts, owned, log

    @property
    def pid(self) -> int | None:
        """Process id of the server, None for one that runs elsewhere."""
        return self.facts.get("pid")

    def alive(self) -> bool:
        """Whether the server still runs; for one that runs elsewhere, whether it answers."""
        return bool(served_models(self.url, self.key()))

    def wait(self, seconds: float) -> None:
        """Return when the server has ended, or after `seconds`."""
        until = time.monotonic() + seconds
        while self.alive() and (left := until - time.monotonic()) > 0:
            time.sleep(min(0.2, left))

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, '' where there is none."""
        from .logs import tail

        return "\n".join(tail(self.log, lines)) if self.log else ""

    def fault(self, deadline_s: float = 60.0) -> str | None:
        """Why it no longer serves, None where it answers a request of one token within the deadline."""
        if not self.alive():
            return self._how_it_ended() if self.log else f"no longer answers at {self.url}"
        for path, body, within_s in (
            ("/health", None, min(HEALTH_S, deadline_s)),
            ("/v1/completions", {"model": self.model, "prompt": "one", "max_tokens": 1}, deadline_s),
        ):
            asked = time.monotonic()
            status = http_status(self.url + path, body, timeout_s=within_s, key=self.key())
            if status is None:
                self.wait(within_s - (time.monotonic() - asked))  # refused: what is left of it may be ending
            if status is None and self.alive():
                return f"hangs: no answer from {path} within {within_s:g} s"
            if status is None:
                return self.fault(deadline_s)  # it has ended meanwhile
            if status >= 500:
                return f"answers {path} with HTTP {status}"
        return None

    def _how_it_ended(self) -> str:
        from . import logs

        assert self.log is not None
        lines = logs.tail(self.log, 400)
        how = (logs.ENDED.findall("\n".join(lines)) or ["nothing said how"])[-1]
        if how == "SIGKILL":
            return "ended (SIGKILL, often the system's out-of-memory killer)"
        return f"ended ({how})" + (f": {why}" if (why := logs.cause(lines)) else "")

    def stop(self) -> None:
        """End it if it is ours, with everything it started; returns when nothing is left."""

    def key(self) -> str | None:
        return None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
