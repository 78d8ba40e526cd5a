"""The state of a run's points: which stay valid, which are measured again and why, which are missing and why.

A point stays valid as long as the inputs of `made_with` are unchanged. A point lost to a fault or a time limit has a
file under stops/ until it is measured. Points that are no longer in the parameters are renamed so that nothing reads
them, and restored when the parameters contain them again. One module, since it is one class.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint, PointKey
from ..common.predicted_point import StagePrediction
from ..config import points
from ..config.params import RunParams
from ..config.points import PointSpec
from ..config.workloads import Workload
from ..hardware.catalog import Gpu
from . import provenance, results
from .layout import LEFT_OUT, OLD, RunFiles, point_of

# Server facts that affect the figures and are the same at every start with the same parameters
FACTS = (
    "version", "attention_backend", "device", "max_num_batched_tokens", "max_num_seqs", "prefix_caching",
    "async_scheduling", "executor",
)  # fmt: skip


class RunState(Protocol):
    """What PointStatus needs from its run (stored_run.StoredRun)."""

    params: RunParams
    dir: Path

    @property
    def gpu(self) -> Gpu:
        """The hardware."""

    def facts(self, engine: str) -> dict[str, Any]:
        """The facts that a server reported at its last start."""

    def specs(self, engine: str, sweep: str) -> list[PointSpec]:
        """The points of one sweep on one engine."""

    def all_specs(self) -> list[PointSpec]:
        """Every point of the run."""

    def takes_part(self, engine: str, sweep: str) -> bool:
        """Whether an engine takes part in a sweep."""

    def frozen(self, stage: str) -> StagePrediction | None:
        """The valid prediction of a stage."""


class PointStatus:
    """The state of one run's points, stored in its folder."""

    def __init__(self, run: RunState) -> None:
        self._run, self._files = run, RunFiles(run.dir)

    # --- what a point was made with -----------------------------------------------------------------------------

    def made_with(self, spec: PointSpec) -> dict[str, Any]:
        """The inputs that a point's figures depend on: point, model, engine, load, GPU, torch, server facts.

        None values and a spec's defaults are left out.
        """
        run = self._run
        how: dict[str, Any] = {"mode": "json", "exclude_none": True}
        no_input = {"port", "startup_timeout_s", "restart_after_failure"}
        return {
            "spec": {
                f.name: v.identity() if isinstance(v, Workload) else v
                for f in fields(spec)
                if (v := getattr(spec, f.name)) != f.default
            },
            "model": run.params.model.model_dump(**how),
            "engine": run.params.engines[spec.engine].model_dump(**how, exclude=no_input),
            "load": run.params.load.model_dump(**how),
            "facts": {k: v for k, v in run.facts(spec.engine).items() if k in FACTS and v is not None},
            "torch": _torch_version(),
            "gpu": run.gpu.name,
        }

    def fingerprint(self, spec: PointSpec) -> str:
        """Digest of made_with; a point is kept as long as it is unchanged."""
        return provenance.sha256(self.made_with(spec))

    def kept(self, spec: PointSpec) -> bool:
        """Whether the point is stored and still valid."""
        stored = self._stored(spec)
        if stored is None or stored.fingerprint == self.fingerprint(spec):
            return stored is not None
        before = self._ingredients().get(str(stored.fingerprint))
        return before is not None and self._same(before, spec, before)

    def todo(self, specs: Sequence[PointSpec]) -> list[PointSpec]:
        """The points of a sweep that must be measured now, in order."""
        missing = [s for s in specs if not self.kept(s)]
        todo = [s for s in missing if not self._past_limit(s)]
        if todo == missing and specs:  # forget earlier limits: their points are measured now or already there
            self._files.limit(specs[0].sweep, specs[0].engine).unlink(missing_ok=True)
        return todo

    def missing(self, engine: str, sweeps: Sequence[str | None], installed: str | None) -> bool:
        """Whether any point of these sweeps (None: the calibration) is still to be measured on the engine.

        installed: the engine's version on this machine, None if unknown.
        """
        for sweep in sweeps:
            specs = self._run.specs(engine, sweep or points.CALIBRATION)
            unresolved = sweep is not None and not specs and self._run.frozen(f"calibrated:{engine}") is None
            if unresolved or any(not self.kept(s) and not self._past_limit(s) for s in specs):
                return True
        facts = self._run.facts(engine)
        return not facts or (installed is not None and facts.get("version") not in (None, installed))

    # --- points of other parameters -----------------------------------------------------------------------------

    def sync_with_params(self) -> None:
        """Hide points measured with other parameters; restore those that match again.

        Points of a sweep with shares of a capacity stay while the capacity is not predicted yet.
        """
        run, ingredients = self._run, self._ingredients()
        has = {self._point_file(s): s for s in run.all_specs()}
        for path in self._files.points():
            sweep, engine, _ = point_of(path)
            named = sweep in run.params.sweeps and engine in run.params.engines and run.takes_part(engine, sweep)
            unknown = named and not run.specs(engine, sweep)
            if not unknown and not (path in has and self._of_these(path, has[path], ingredients)):
                path.replace(_aside(path))
        for path, spec in has.items():
            if _aside(path).exists() and not path.exists() and self._of_these(_aside(path), spec, ingredients):
                _aside(path).replace(path)

    def _of_these(self, path: Path, spec: PointSpec, ingredients: Mapping[str, Any]) -> bool:
        """Whether a stored point was made with these parameters, as far as known."""
        stored = results.read_point_file(path)
        made_with = (stored and ingredients.get(str(stored.fingerprint))) or {}
        return self._same(made_with, spec, [k for k in ("spec", "model", "engine", "load") if k in made_with])

    def _same(self, before: Mapping[str, Any], spec: PointSpec, parts: Iterable[str]) -> bool:
        """Whether a point's inputs equal the current ones.

        A parameter added by a later version counts as equal if it has its default.
        """
        now, run = json.loads(json.dumps(self.made_with(spec))), self._run
        asked = {"model": run.params.model, "engine": run.params.engines[spec.engine], "load": run.params.load}
        for part in parts:
            was, is_now = before[part], now.get(part)
            if part in asked:
                given = asked[part].model_dump(mode="json", exclude_defaults=True)
                is_now = {k: v for k, v in is_now.items() if k in was or k in given}
            if was != is_now:
                return False
        return True

    def left_out(self) -> str | None:
        """The number of stored points of other parameters, as a sentence; None if there are none."""
        count = len(self._files.left_out())
        if not count:
            return None
        return f"{count} stored point{'s are' if count > 1 else ' is'} of other parameters and left out"

    # --- one point's way ----------------------------------------------------------------------------------------

    def start(self, spec: PointSpec) -> str | None:
        """Record the inputs of a point before it is measured, and set an earlier attempt aside.

        Returns why it is measured again, None if there was no earlier attempt.
        """
        here = self._point_file(spec)
        if _aside(here).exists() and not here.exists():  # a point of other parameters becomes an earlier attempt
            _aside(here).replace(here)
        stored, why = self._stored(spec), None
        if stored:
            why = self._why_again(spec, stored)
        elif (rows := self._files.rows(*_key(spec))).exists():
            why = _cut_off(rows)
        if stored or why:
            self._set_aside(spec)
        ingredients, fingerprint = self._ingredients(), self.fingerprint(spec)
        if fingerprint not in ingredients:
            files.write_json(self._files.made_with, {**ingredients, fingerprint: self.made_with(spec)})
        return why

    def complete(self, spec: PointSpec, point: MeasuredPoint) -> None:
        """Store a measured point as complete."""
        results.write_point(self._files.dir, replace(point, fingerprint=self.fingerprint(spec)))
        self._fault_file(spec).unlink(missing_ok=True)

    def mark_lost(self, spec: PointSpec, why: str, log: Sequence[str] = ()) -> None:
        """Mark a point as not measured, for the report and the exit status. log: the engine's last lines."""
        record = {"sweep": spec.sweep, "engine": spec.engine, "points": [spec.point], "fault": True, "log": list(log)}
        files.write_json(self._fault_file(spec), {**record, "why": why})

    def mark_rest_lost(self, engine: str, sweep: str | None, why: str) -> None:
        """Mark the remaining points of a sweep (None: the calibration) as not measured."""
        for spec in self.todo(self._run.specs(engine, sweep or points.CALIBRATION)):
            self.mark_lost(spec, why)

    def stop_at_limit(self, left: Sequence[PointSpec]) -> str:
        """Mark the points that a sweep's time limit leaves out, and return a message."""
        sweep, engine, names = left[0].sweep, left[0].engine, [s.point for s in left]
        minutes = self.limit_minutes(sweep, engine)
        why = f"stopped after {minutes:g} min, the limit set for {engine} here"
        record = {"sweep": sweep, "engine": engine, "points": names, "minutes": minutes, "why": why}
        made_with = {"fingerprints": {s.point: self.fingerprint(s) for s in left}}
        files.write_json(self._files.limit(sweep, engine), record | made_with)
        return f"{points.loads_in_words(left)} not measured: {why}"

    def limit_minutes(self, sweep: str, engine: str) -> float | None:
        """A sweep's time limit on an engine, None if there is none."""
        sweeps = self._run.params.sweeps
        return sweeps[sweep].minutes_per_engine.get(engine) if sweep in sweeps else None

    # --- what is missing ----------------------------------------------------------------------------------------

    def stopped(self) -> list[dict[str, Any]]:
        """Missing points: sweep, engine, points, their loads in words, why; `fault` and the last `log` lines if the
        engine failed."""
        now, engines = {*self._run.params.sweeps, points.CALIBRATION}, self._run.params.engines
        stopped = []
        for file in self._files.stops():
            s = files.read_object(file, "sweep", "engine", "points", "why")
            if s["sweep"] in now and s["engine"] in engines:
                left = [p for p in self._run.specs(s["engine"], s["sweep"]) if p.point in s["points"]]
                if left:
                    stopped.append({**s, "loads": points.loads_in_words(left), "why": _only_why(s)})
        return stopped

    def unfinished(self, skip: Container[str] = ()) -> list[str]:
        """Points that were predicted but neither measured nor lost for a recorded reason, one line per sweep. skip:
        engines to leave out."""
        explained = {(s["sweep"], s["engine"], p) for s in self.stopped() for p in s["points"]}
        left: dict[tuple[str, str], list[PointSpec]] = {}
        for spec in self._run.all_specs():
            if self._stored(spec) is None and (spec.sweep, spec.engine, spec.point) not in explained:
                left.setdefault((spec.sweep, spec.engine), []).append(spec)
        return [
            f"{sweep}, {engine}: {points.loads_in_words(specs)} not measured when the run ended"
            for (sweep, engine), specs in left.items()
            if engine not in skip
        ]

    def faults(self, engine: str, sweep: str | None) -> list[str]:
        """Points of a sweep (None: the calibration) that were lost because the engine failed, one line each."""
        at = engine, sweep or points.CALIBRATION
        return [
            f"{s['sweep']}, {engine}: {s['loads']} not measured: {s['why']}"
            for s in self.stopped()
            if s.get("fault") and (s["engine"], s["sweep"]) == at
        ]

    # --- files --------------------------------------------------------------------------------------------------

    def _ingredients(self) -> dict[str, Any]:
        """The inputs of points, by fingerprint."""
        return files.read_object(self._files.made_with)

    def _point_file(self, spec: PointSpec) -> Path:
        return self._files.point(*_key(spec))

    def _fault_file(self, spec: PointSpec) -> Path:
        return self._files.fault(*_key(spec))

    def _stored(self, spec: PointSpec) -> MeasuredPoint | None:
        return results.read_point_file(self._point_file(spec))

    def _past_limit(self, spec: PointSpec) -> bool:
        stopped = files.read_object(self._files.limit(spec.sweep, spec.engine))
        same_limit = stopped.get("minutes") == self.limit_minutes(spec.sweep, spec.engine)
        return same_limit and (stopped.get("fingerprints") or {}).get(spec.point) == self.fingerprint(spec)

    def _why_again(self, spec: PointSpec, stored: MeasuredPoint) -> str:
        """The parameters of a stored point that have changed."""
        before = self._ingredients().get(str(stored.fingerprint))
        if before is None:
            return "its parameters or server changed" if stored.fingerprint else "it was not finished"
        return "; ".join(files.differences(before, json.loads(json.dumps(self.made_with(spec))))) or "nothing changed"

    def _set_aside(self, spec: PointSpec) -> None:
        """Rename the files of a point that is measured again, so that nothing reads them."""
        rows = self._files.rows(*_key(spec))
        number = results.earlier_attempts(rows)
        for path in (rows, self._point_file(spec), self._files.series(*_key(spec))):
            if path.exists():
                path.replace(path.with_name(f"{path.name}{OLD}{number}"))


def _key(spec: PointSpec) -> PointKey:
    return spec.sweep, spec.engine, spec.point


def _aside(path: Path) -> Path:
    return path.with_name(path.name + LEFT_OUT)


def _cut_off(rows: Path) -> str:
    """How far an unfinished attempt came; a truncated last row is cut off and reported."""
    try:
        found = results.read_rows(rows)
    except ServebookError as error:
        return f"its rows cannot be read ({error.where}: {error.what})"
    return "; ".join([f"it was cut off after {len(found)} requests", *found.notes])


@cache
def _torch_version() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return None


def _only_why(stop: Mapping[str, Any]) -> str:
    """Why points are missing, without their names, which files written until 0.1 have in the text, too."""
    names = ", ".join(stop["points"])
    return str(stop["why"]).removeprefix(f"{names} was not measured: ").removesuffix(f"; not measured: {names}")
