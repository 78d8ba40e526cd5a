"""Measures the missing points of one sweep on one engine, and continues if the engine fails.

A failing engine costs the point being measured: the point is marked with the reason, and the engine is started again
for the next point. If two consecutive points are lost, the rest of the sweep is skipped.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from ..common.errors import ServebookError, ServerBusy
from ..common.measured_point import MeasuredPoint
from ..config.engines import OpenAIEngine
from ..config.points import PointSpec
from ..run_folder import results
from ..run_folder.lock_and_signals import single_sweep
from ..run_folder.sessions import LOST, MEASURING
from . import live
from .working_run import WorkingRun

NO_RESTART = "{engine} had failed and is not started again (restart_after_failure: false)"
LOG_LINES = 8  # last lines of an engine's log, stored with a lost point


def measure(book: WorkingRun, sweep: str, engine: str, *, progress: bool = True) -> None:
    """Measure the missing points of one sweep on one engine; the engine is started only if there are any."""
    todo = book.point_status.todo(book.specs(engine, sweep))
    if todo:
        with (
            single_sweep(book.dir, sweep, engine),
            live.watching(book, todo),
            contextlib.ExitStack() as running,
        ):
            running.callback(results.write_points_csv, book.dir)  # also points lost to an interruption
            _Measuring(book, engine, running, progress).run(todo)


class Unanswered(Exception):
    """No request of the point was answered, although the engine works."""


class _Measuring:
    """One sweep on one engine; leaving `running` ends every server that this started."""

    def __init__(self, book: WorkingRun, engine: str, running: contextlib.ExitStack, progress: bool) -> None:
        self._book, self._engine, self._running, self._progress = book, engine, running, progress

    def run(self, todo: list[PointSpec]) -> None:
        book, engine, sweep = self._book, self._engine, todo[0].sweep
        predicted_s = {(p["sweep"], p["point"]): p.get("wall_s") for p in book.frozen_points(engine)}
        minutes = book.point_status.limit_minutes(sweep, engine)
        limit_s = None if minutes is None else 60 * minutes
        server, failed_in_a_row, why = self._running.enter_context(book.engine(engine)), 0, None
        started = time.monotonic()
        for k, spec in enumerate(todo):
            left_s = None if limit_s is None else limit_s - (time.monotonic() - started)
            wall_s = predicted_s.get((sweep, spec.point))
            if left_s is not None and (left_s <= 0 or (wall_s is not None and wall_s > left_s and k > 0)):
                book.tell(f"{sweep} {engine}: {book.point_status.stop_at_limit(todo[k:])}", True)
                break
            if why or not server.alive():
                if not book.may_restart(engine):
                    self._lose(todo[k:], NO_RESTART.format(engine=engine))
                    break
                book.tell(f"{engine}: {why or server.fault()}; starting it again", self._progress)
                restarting = time.monotonic()
                try:
                    server = self._running.enter_context(book.restart(engine))
                except ServebookError as error:
                    self._lose(todo[k:], f"{engine} could not be started again: {error}")
                    break
                started += time.monotonic() - restarting  # the time limit applies to measuring only
            unanswered: str | None = None  # the point is lost, but the engine works
            try:
                why = self._point(spec, server, left_s)
            except Unanswered as error:
                why, unanswered = None, str(error)
            if lost := why or unanswered:
                failed_in_a_row += 1
                self._lose([spec], f"{engine} {lost}", server.log_tail(LOG_LINES).splitlines())
                if failed_in_a_row == 2 and todo[k + 1 :]:
                    self._lose(todo[k + 1 :], f"{engine} had failed at two points in a row")
                    break
            else:
                failed_in_a_row = 0

    def _point(self, spec: PointSpec, server: Any, left_s: float | None) -> str | None:
        """Measure and store one point; returns why the engine failed, None if it did not.

        Raises Unanswered if the engine works but completed no request that counts.
        """
        book, name = self._book, f"{spec.sweep} {spec.engine} {spec.point}"
        if again := book.point_status.start(spec):
            book.tell(f"{name}: measured again, {again}", self._progress)
        with book.sessions.spending(LOST, engine=spec.engine, sweep=spec.sweep, point=spec.point) as spent:
            began = time.monotonic()
            try:
                point = self._load(spec, server, left_s)
            except ServerBusy as error:
                raise Unanswered(f"answered nothing: {error}") from None
            except ServebookError:
                if why := server.fault(self._answer_deadline_s):
                    return str(why)
                raise
            if (not point.requests or point.failures or point.hung) and (why := server.fault(self._answer_deadline_s)):
                return str(why)  # results of a dying server are discarded
            if not point.requests:  # nothing was measured: the point is not complete
                raise Unanswered(f"completed no request that counts: {point.stop_reason}")
            book.point_status.complete(spec, replace(point, wall_s=round(time.monotonic() - began, 3)))
            spent["what"] = MEASURING
        book.tell(f"{name} done", self._progress)
        return None

    def _load(self, spec: PointSpec, server: Any, left_s: float | None) -> MeasuredPoint:
        from ..load import measure_point_sync

        book, engine = self._book, self._book.params.engines[spec.engine]
        asked: dict[str, Any] = {}
        if isinstance(engine, OpenAIEngine):
            asked = {"text": engine.text, "count_tokens": engine.count_tokens}
            asked |= {"endpoint": "/v1/chat/completions"} if engine.chat else {}
        return measure_point_sync(
            spec,
            url=server.url,
            model=server.model,
            vocab=book.vocab(),
            load=book.params.load,
            slo=book.params.slo,
            run_dir=book.dir,
            batching=book.batching(spec.engine),
            floors=book.floors(spec),
            deadline_s=left_s,
            api_key=server.key(),
            on_progress=lambda text: book.tell_progress(spec, text),
            **asked,
        )

    @property
    def _answer_deadline_s(self) -> float:
        """How long one short request may take on an engine without other load."""
        return min(self._book.params.load.request_timeout_s, 60.0)

    def _lose(self, specs: list[PointSpec], why: str, log: list[str] | None = None) -> None:
        for spec in specs:
            self._book.point_status.mark_lost(spec, why, log or [])
            self._book.tell(f"{spec.sweep} {spec.engine} {spec.point} lost: {why}", self._progress)
