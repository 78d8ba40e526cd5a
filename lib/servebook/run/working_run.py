"""A run that is being worked on: what measuring needs of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from .. import engines
from ..common import files
from ..common.errors import ServebookError
from ..config.points import PointSpec
from ..predictor.floors import floors
from ..run_folder import provenance
from ..run_folder.sessions import STARTING
from ..run_folder.stored_run import StoredRun


class Listener(Protocol):
    """Receives a run's progress in place of the cell's output (see live.py)."""

    def line(self, text: str, printed: bool) -> None: ...

    def point_progress(self, text: str) -> None: ...


class WorkingRun(StoredRun):
    """A run's folder in use: engines, progress, limits on a point's figures."""

    listener: Listener | None = None

    # --- engines ------------------------------------------------------------------------------------------------

    def engine_names(self, only: str | None = None, sweep: str | None = None) -> list[str]:
        """The engines that a notebook works on: the given one, otherwise all that take part in the sweep."""
        if only and only not in self.params.engines:
            raise ServebookError(f"no engine {only!r}", "ENGINE", f"This run has {', '.join(self.params.engines)}")
        asked = [only] if only else list(self.params.engines)
        return [n for n in asked if sweep is None or self.takes_part(n, sweep)]

    @contextlib.contextmanager
    def engine(self, name: str) -> Iterator[Any]:
        """A running engine: the one of this run that already runs, otherwise a new one that ends with the block."""
        with self.start(name) as running:
            yield running

    def start(self, name: str) -> Any:
        """A running engine, as `engine`; the caller must stop it."""
        if running := engines.join(self.dir, name):
            return running
        with self.sessions.spending(STARTING, engine=name):
            started = engines.start(self.params, name, self.dir, base=self.base)
        if note := started.facts.get("note"):
            self.tell(str(note), True)
        return started

    def restart(self, name: str) -> Any:
        """A new engine in place of one that failed, whoever in this run started it; the caller must stop it."""
        with self.sessions.spending(STARTING, engine=name):
            return engines.restart(self.params, name, self.dir, self.base)

    def may_restart(self, name: str) -> bool:
        """Whether an engine that failed may be started again in the same session."""
        return self.params.engines[name].restart_after_failure

    def engine_failed(self, name: str, why: str) -> None:
        """Record that an engine did not start, for the report."""
        files.write_json(self.files.engine_failure(name), {"why": why, "time_utc": provenance.now_utc()})

    # --- measuring ----------------------------------------------------------------------------------------------

    def vocab(self) -> range:
        """Token ids for prompts: the upper part, without the special ids at the bottom."""
        return range(min(1000, self.shape.vocab // 4), self.shape.vocab - self.shape.vocab // 64)

    def batching(self, engine: str) -> bool:
        """Whether an engine decodes requests together."""
        return self.params.engines[engine].continuous_batching

    def floors(self, spec: PointSpec) -> dict[str, float]:
        """Times that no server on this hardware can beat: a point with a lower figure is invalid."""
        engine, facts = self.params.engines[spec.engine], self.facts(spec.engine)
        return floors(self.shape, self.gpu, engine, facts, prompt_tokens=spec.prompt_tokens)

    def tell(self, text: str, printed: bool) -> None:
        """Report the current activity, to other processes and, if printed, in the notebook."""
        self.sessions.set_status(text)
        if printed:
            self.sessions.send_line(text)
        if self.listener:
            self.listener.line(text, printed)
        elif printed:
            print(text, flush=True)

    def tell_progress(self, spec: PointSpec, text: str) -> None:
        """Report the progress of a point to other processes and to the listener."""
        self.sessions.set_status(f"{spec.sweep} {spec.engine} {spec.point}: {text}")
        if self.listener:
            self.listener.point_progress(text)

    def begin_session(self, command: list[str] | None) -> None:
        """Begin a session of the pipeline and delete the engine failures of the previous one."""
        for stale in self.files.engine_failures().values():
            stale.unlink()
        self.point_status.sync_with_params()
        self.sessions.begin(command)
