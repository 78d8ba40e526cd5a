"""What every engine offers, whoever started it: its URL, whether it lives, why it failed, and stopping it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from .http import answers, http_status

HEALTH_S = 10.0  # a server that does not answer /health for this long counts as frozen, even under load


class RunningEngine:
    """A server that answers. `owned`: this object ends it; a joined engine or a server at a URL is left running.

    url: base without /v1; model: the name to send; facts: the server's facts (keys: facts.FACT_KEYS).
    """

    kind: str  # the module of its kind in this package
    health_is_free = True  # a page of an unknown server may be expensive (LiteLLM makes a completion of every model)

    def __init__(
        self, name: str, url: str, model: str, facts: dict[str, Any], *, owned: bool, log: Path | None = None
    ) -> None:
        self.name, self.url, self.model, self.facts, self.owned, self.log = name, url, model, facts, owned, log

    @property
    def pid(self) -> int | None:
        """Process id of the server, None if it runs elsewhere."""
        return self.facts.get("pid")

    def alive(self) -> bool:
        """Whether the server still runs; if it runs elsewhere, whether it answers."""
        return answers(self.url, self.key()) is not None

    def wait(self, seconds: float) -> None:
        """Return when the server has ended, or after `seconds`."""
        until = time.monotonic() + seconds
        while self.alive() and (left := until - time.monotonic()) > 0:
            time.sleep(min(0.2, left))

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, '' if there is none."""
        from .logs import tail

        return "\n".join(tail(self.log, lines)) if self.log else ""

    def fault(self, deadline_s: float = 60.0) -> str | None:
        """Why it no longer serves; None if it answers a one-token request within the deadline."""
        if not self.alive():
            return self._how_it_ended() if self.log else f"no longer answers at {self.url}"
        health: list[tuple[str, Any, float]] = [("/health", None, min(HEALTH_S, deadline_s))]
        for path, body, within_s in (
            *(health if self.health_is_free else ()),
            ("/v1/completions", {"model": self.model, "prompt": "one", "max_tokens": 1}, deadline_s),
        ):
            asked = time.monotonic()
            status = http_status(self.url + path, body, timeout_s=within_s, key=self.key())
            if status is None:
                self.wait(within_s - (time.monotonic() - asked))  # connection refused: the server may be about to end
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
        how = (logs.ENDED.findall("\n".join(lines)) or ["for an unknown reason"])[-1]
        if how == "SIGKILL":
            return "ended (SIGKILL, often the system's out-of-memory killer)"
        return f"ended ({how})" + (f": {why}" if (why := logs.cause(lines)) else "")

    def stop(self) -> None:
        """End it with all processes it started, if it is owned; returns when nothing is left."""

    def key(self) -> str | None:
        """The API key that its requests need, None without one."""
        return None

    def __enter__(self) -> RunningEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
