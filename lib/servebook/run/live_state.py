"""The progress of measuring a sweep, read from the run's folder while another thread writes it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.measured_point import MeasuredPoint, Metric
from ..config.points import PointSpec
from ..run_folder import results
from .working_run import WorkingRun

EVERY_S = 1.0
METRICS: tuple[Metric, ...] = ("ttft_s", "tpot_s")


@dataclass
class State:
    """The progress so far. done: (spec, its means) of every complete point of the sweep; now: the point being measured,
    with its means over `rows` requests; these are warm-up requests as long as there are no others."""

    done: list[tuple[PointSpec, Mapping[str, float | None]]]
    now: PointSpec | None
    means: Mapping[str, float | None]
    rows: int
    warm: bool
    left_s: float | None
    status: str


class Follower:
    """Follows a sweep on one engine through the run's folder. specs: its points that are measured now."""

    def __init__(self, book: WorkingRun, specs: Sequence[PointSpec]) -> None:
        self.run_dir, self.todo = book.dir, list(specs)
        self.sweep, self.engine = specs[0].sweep, specs[0].engine
        self.specs = book.specs(self.engine, self.sweep)
        self.predicted = {p["point"]: p for p in book.frozen_points(self.engine) if p["sweep"] == self.sweep}
        self.status, self.engine_is_up = "", False
        self.began = time.monotonic()
        self._points: dict[str, Mapping[str, float | None]] = {}
        self._before = {
            s.point: self._stored(s) for s in self.todo
        }  # measured again: the stored file is an earlier attempt's
        self._tail: _Tail | None = None
        self._now: PointSpec | None = None
        self._now_began = self.began

    def line(self, text: str) -> None:
        """Receive a line that is printed, too."""
        self.status = text

    def point_progress(self, text: str) -> None:
        """Receive the progress of a point, which means that the engine answers."""
        self.status, self.engine_is_up = text, True

    def look(self) -> State:
        """Read new data since the last call."""
        left = [s for s in self.todo if not self._complete(s)]
        now = left[0] if left and self.engine_is_up else None
        if now is not self._now:
            self._now, self._now_began = now, time.monotonic()
            self._tail = _Tail(self._rows_path(now)) if now else None
        means, rows, warm = self._tail.read() if self._tail else ({}, 0, True)
        done = [(s, self._points[s.point]) for s in self.specs if s.point in self._points or self._complete(s)]
        return State(done, now, means, rows, warm, self._left(left), self.status)

    def interrupted(self) -> str:
        """What an interruption keeps, on one line."""
        state = self.look()
        kept = len(self.todo) - sum(not self._complete(s) for s in self.todo)
        rows = self._tail.rows if self._tail else 0
        of_now = f"; the {rows} requests of {state.now.point} are in its rows" if state.now and rows else ""
        return f"{self.sweep} {self.engine}: interrupted with {kept} of {len(self.todo)} points done{of_now}"

    def _left(self, left: Sequence[PointSpec]) -> float | None:
        """Seconds of measuring left, by the frozen predictions."""
        known = [self.predicted[s.point] for s in left if s.point in self.predicted]
        walls = [p["wall_s"] for p in known if "wall_s" in p]
        if not walls or len(walls) < len(left):
            return None
        spent = time.monotonic() - self._now_began if self._now else 0.0
        return max(walls[0] - spent, 0.0) + sum(walls[1:])

    def _complete(self, spec: PointSpec) -> bool:
        if spec.point not in self._points:
            point = self._stored(spec)
            if point is None or point == self._before.get(spec.point):
                return False
            self._points[spec.point] = {m: point.measured(m) for m in METRICS}
        return True

    def _stored(self, spec: PointSpec) -> MeasuredPoint | None:
        return results.read_point(self.run_dir, spec.sweep, spec.engine, spec.point)

    def _rows_path(self, spec: PointSpec) -> Path:
        return results.rows_path(self.run_dir, spec.sweep, spec.engine, spec.point)


class _Tail:
    """The means over a point's rows, read as they are appended."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.began = path, 0, time.time()
        self.sums = {phase: {m: [0.0, 0] for m in METRICS} for phase in (True, False)}
        self.count = {True: 0, False: 0}

    @property
    def rows(self) -> int:
        """Answers read so far, including the warm-up's."""
        return sum(self.count.values())

    def read(self) -> tuple[dict[str, float | None], int, bool]:
        """(means, number of requests, whether they are the warm-up's)"""
        with contextlib.suppress(OSError):
            if self.path.stat().st_mtime >= self.began - 2 * EVERY_S:  # otherwise they are an earlier attempt's
                with self.path.open("rb") as rows:
                    rows.seek(self.offset)
                    data = rows.read()
                whole = data.rfind(b"\n") + 1
                self.offset += whole
                for line in data[:whole].splitlines():
                    self._add(json.loads(line))
        warm = not self.count[False]
        means = {m: total / n if n else None for m, (total, n) in self.sums[warm].items()}
        return {str(m): v for m, v in means.items()}, self.count[warm], warm

    def _add(self, row: Mapping[str, Any]) -> None:
        if not row.get("ok"):
            return
        warm = row.get("phase") != "measured"
        self.count[warm] += 1
        for metric in METRICS:
            if (value := row.get(metric)) is not None:
                self.sums[warm][metric][0] += value
                self.sums[warm][metric][1] += 1
