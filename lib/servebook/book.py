"""A run as the notebooks, the pipeline and the command see it: one object that binds the stages to the run's folder.

Holds no formulas and no measuring of its own; every method reads what the stage before wrote and calls one room.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import (  # fmt: skip
    analysis,
    closed_forms,
    files,
    hardware,
    ink,
    model,
    params,
    points,
    predict,
    provenance,
    results,
    roofline,
)
from .errors import ServebookError
from .points import PointSpec

if TYPE_CHECKING:
    import pandas as pd

LOG_LINES = 8  # of an engine's log, kept with a point that it cost
ROOT = Path(__file__).parents[2]  # the checkout: the package is installed editable


def find_params(path: str | Path) -> Path:
    """A parameter file as typed: from the working folder, else from the checkout, so notebooks run from anywhere."""
    path = Path(path).expanduser()
    return path if path.exists() or path.is_absolute() or not (ROOT / path).exists() else ROOT / path


def outputs_folder() -> Path:
    """Where runs are kept: outputs/ of the checkout, or the folder in SERVEBOOK_OUTPUTS."""
    return Path(os.environ.get("SERVEBOOK_OUTPUTS") or ROOT / "outputs")


class Book:
    """One run: `params` (validated), `dir` (its folder), `base` (where relative paths in params start from)."""

    def __init__(self, run_params: params.RunParams, run_dir: Path, base: Path) -> None:
        self.params, self.dir, self.base = run_params, run_dir, base

    @classmethod
    def open(cls, params_path: str | Path, *, create: bool = False) -> Book:
        """The run of a parameter file. With create, its folder is made and the resolved parameters written into it."""
        path_as_typed, path = params_path, find_params(params_path)
        run_params = params.load(path)
        book = cls(run_params, outputs_folder() / run_params.run, path.resolve().parent)
        book._check_context(str(path_as_typed))
        book._refuse_secrets(str(path_as_typed))
        if create:
            book._create(params.dump(run_params))
        return book

    @classmethod
    def at(cls, run_dir: Path) -> Book:
        """A stored run by its folder (relative model paths are not needed again once it ran)."""
        resolved = run_dir / "params.yaml"
        if not resolved.exists():
            raise ServebookError(
                "no run is stored here", str(run_dir), "Give a folder under outputs/ that holds params.yaml"
            )
        return cls(params.load(resolved), run_dir, run_dir)

    def _check_context(self, where: str) -> None:
        """Refuse prompts that no engine of the run can take, before any work."""
        asked = {f"calibration[{i}]": (p.prompt_tokens, p.output_tokens) for i, p in enumerate(self.params.calibration)}
        for name, s in self.params.sweeps.items():
            asked[f"sweeps.{name}"] = (
                s.prompt_tokens if isinstance(s.prompt_tokens, int) else max(s.prompt_tokens),
                s.output_tokens,
            )
        limits = {f"{self.shape.name}'s context": self.shape.max_context_tokens}
        limits |= {
            f"engines.{n}.max_model_len": m
            for n, e in self.params.engines.items()
            if (m := getattr(e, "max_model_len", None))
        }
        for key, (prompt, output) in asked.items():
            for limit, tokens in limits.items():
                if prompt + output > tokens:
                    raise ServebookError(
                        f"{key} asks for {prompt:,} prompt and {output:,} output tokens, "
                        f"more than {limit} of {tokens:,}",
                        where,
                        "Shorten the prompt or the output, or raise the limit",
                    )

    def _refuse_secrets(self, where: str) -> None:
        """Refuse keys in the parameters: they are stored with the run and published with the report."""
        from .engines import secrets

        for name, engine in self.params.engines.items():
            if found := secrets.in_params(engine):
                raise ServebookError(f"engines.{name}.{found[0]}", where, found[1])

    def _create(self, resolved: str) -> None:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            stored = self.dir / "params.yaml"
            if not stored.exists() or stored.read_text() != resolved:
                files.write_text(stored, resolved)
        except OSError as error:
            raise ServebookError(
                f"cannot write the run's folder ({error.strerror})",
                str(self.dir),
                "Free space or permissions there, or set SERVEBOOK_OUTPUTS to another folder",
            ) from error

    # --- what is known before measuring -------------------------------------------------------------------------

    @cached_property
    def shape(self) -> model.ModelShape:
        return model.load_shape(self.params.model, self.base)

    @cached_property
    def gpu(self) -> hardware.Gpu:
        """The hardware, detected once per run: a second session on the same folder must not move the prediction."""
        stored = self.dir / "hardware.json"
        if stored.exists():
            record = json.loads(stored.read_text())
            if record["asked"] == self.params.hardware.model_dump(mode="json"):
                return hardware.Gpu(**record["gpu"])
        gpu = hardware.resolve(self.params.hardware)
        if self.dir.exists():
            record = {"asked": self.params.hardware.model_dump(mode="json"), "gpu": files.plain(gpu)}
            files.write_json(stored, record)
        return gpu

    def facts(self, engine: str) -> dict[str, Any]:
        """What a server said of itself when it last started, {} where it never did."""
        return files.read_json(self.dir / "engines" / f"{engine}.json") or {}

    def all_facts(self) -> dict[str, dict[str, Any]]:
        return {name: self.facts(name) for name in self.params.engines}

    # --- predictions --------------------------------------------------------------------------------------------

    def predict(self, engine: str | None = None) -> dict[str, Any]:
        """Predict and freeze: before anything is measured (no engine), or for one engine after its C = 1 points.

        Returns what stands in ink: points that are measured keep what was frozen before they were.
        """
        stage, of = "datasheet" if engine is None else f"calibrated:{engine}", None if engine is None else [engine]
        learned, facts = [], {}
        if engine is not None:
            learned = [p for p in self.stored_points() if p["engine"] == engine and p["sweep"] == points.CALIBRATION]
            facts = {engine: self.facts(engine)}
        prediction = predict.predict_run(
            self.params, self.shape, self.gpu, facts=facts, calibration=learned, engines=of,
            capacity_per_s=predict.capacity_in_ink(self.dir, stage),
        )  # fmt: skip
        # a point whose parameters or server changed is measured again, and predicted anew before
        kept = {
            (s.sweep, s.engine, s.point)
            for name in of or self.params.engines
            for sweep in (points.CALIBRATION, *self.params.sweeps)
            for s in self.specs(name, sweep)
            if self._kept(s)
        }
        return predict.freeze(self.dir, stage, prediction, kept)

    def frozen(self, stage: str) -> dict[str, Any] | None:
        """What a stage says in ink of every point (see ink), None where nothing was frozen."""
        return ink.of_stage(self.predictions()["frozen"], stage)

    def frozen_points(self, engine: str) -> list[dict[str, Any]]:
        """The best prediction there is of an engine's points: calibrated, else from the datasheet."""
        entry = self.frozen(f"calibrated:{engine}") or self.frozen("datasheet") or {"points": []}
        return [p for p in entry["points"] if p["engine"] == engine]

    # --- what to measure ----------------------------------------------------------------------------------------

    def specs(self, engine: str, sweep: str) -> list[PointSpec]:
        """The points of a sweep for an engine; shares of capacity become the rates that were frozen."""
        if sweep == points.CALIBRATION:
            return points.calibration_points(self.params, engine)
        entry = self.frozen(f"calibrated:{engine}") or self.frozen("datasheet") or {}
        capacity = (entry.get("capacity_per_s") or {}).get(f"{sweep}/{engine}")
        return points.sweep_points(self.params, sweep, engine, capacity)

    def missing(self, engine: str, sweeps: list[str | None]) -> bool:
        """Whether anything of these sweeps is still to be measured on the engine (None: its calibration)."""
        for sweep in sweeps:
            specs = self.specs(engine, sweep or points.CALIBRATION)
            unresolved = sweep is not None and not specs and self.frozen(f"calibrated:{engine}") is None
            if unresolved or any(not self._kept(s) and not self._past_limit(s) for s in specs):
                return True
        from . import engines

        facts, installed = self.facts(engine), engines.installed_version(self.params, engine)
        return not facts or (installed is not None and facts.get("version") not in (None, installed))

    def made_with(self, spec: PointSpec) -> dict[str, Any]:
        """What a point's figures depend on: the point, model, engine, load, and the server's version."""
        engine = self.params.engines[spec.engine]
        return {
            "spec": files.plain(spec),
            "model": self.params.model.model_dump(mode="json"),
            "engine": engine.model_dump(mode="json", exclude={"port", "startup_timeout_s"}),
            "load": self.params.load.model_dump(mode="json"),
            "version": self.facts(spec.engine).get("version"),
            "gpu": self.gpu.name,
        }

    def fingerprint(self, spec: PointSpec) -> str:
        """Digest of what a point was made with; it is kept as long as that stays the same."""
        return provenance.sha256(self.made_with(spec))

    @property
    def _ingredients_file(self) -> Path:
        return self.dir / "requests" / "made_with.json"

    def _why_again(self, spec: PointSpec, stored: dict[str, Any]) -> str:
        """Which parameters of a stored point are others now."""
        before = (files.read_json(self._ingredients_file) or {}).get(stored.get("fingerprint"))
        if before is None:
            return "its parameters or server changed" if stored.get("fingerprint") else "it was not finished"
        return "; ".join(files.differences(before, json.loads(json.dumps(self.made_with(spec))))) or "nothing changed"

    def _set_aside(self, spec: PointSpec) -> None:
        """Keep a point that is measured again, with its rows and series, under names that nothing reads."""
        rows = results.rows_path(self.dir, spec.sweep, spec.engine, spec.point)
        number = results.earlier_attempts(rows)
        for path in (rows, self._point_file(spec), results.series_path(self.dir, spec.sweep, spec.engine, spec.point)):
            if path.exists():
                path.replace(path.with_name(f"{path.name}.old{number}"))

    def _stored(self, spec: PointSpec) -> dict[str, Any] | None:
        return files.read_json(self._point_file(spec))

    def _kept(self, spec: PointSpec) -> bool:
        stored = self._stored(spec)
        return stored is not None and stored.get("fingerprint") == self.fingerprint(spec)

    def _point_file(self, spec: PointSpec) -> Path:
        return self.dir / "requests" / spec.sweep / spec.engine / f"{spec.point}.json"

    def _limit_file(self, sweep: str, engine: str) -> Path:
        return self.dir / "stops" / f"{sweep}.{engine}.json"

    def _past_limit(self, spec: PointSpec) -> bool:
        stopped = files.read_json(self._limit_file(spec.sweep, spec.engine)) or {}
        same_limit = stopped.get("minutes") == self._minutes(spec.sweep, spec.engine)
        return same_limit and (stopped.get("fingerprints") or {}).get(spec.point) == self.fingerprint(spec)

    def _minutes(self, sweep: str, engine: str) -> float | None:
        return self.params.sweeps[sweep].minutes_per_engine.get(engine) if sweep in self.params.sweeps else None

    def _fault_file(self, spec: PointSpec) -> Path:
        return self.dir / "stops" / f"{spec.sweep}.{spec.engine}.{spec.point}.json"

    def sweep_names(self, kind: str) -> list[str]:
        return [name for name, s in self.params.sweeps.items() if s.kind == kind]

    # --- engines ------------------------------------------------------------------------------------------------

    def engine_names(self, only: str | None = None, sweep: str | None = None) -> list[str]:
        """The engines a notebook works on: the one asked for, else all that take part in the sweep."""
        if only and only not in self.params.engines:
            raise ServebookError(f"no engine {only!r}", "ENGINE", f"This run has {', '.join(self.params.engines)}")
        taking_part = self.params.sweeps[sweep].engines if sweep else None
        return [n for n in self.params.engines if (not only or n == only) and (taking_part is None or n in taking_part)]

    @contextlib.contextmanager
    def engine(self, name: str) -> Iterator[Any]:
        """A running engine: the one this run already has, else a new one that ends with the block."""
        with self.start(name) as running:
            yield running

    def start(self, name: str) -> Any:
        """A running engine as `engine` gives it, for the caller to stop."""
        from . import engines

        return engines.ensure(self.params, name, self.dir, self.base)

    def engine_failed(self, name: str, why: str) -> None:
        """Record that an engine did not start, for the report."""
        files.write_json(self.dir / "engines" / f"{name}.failed.json", {"why": why, "time_utc": provenance.now_utc()})

    # --- measuring ----------------------------------------------------------------------------------------------

    def measure(self, sweep: str, engine: str, *, progress: bool = True) -> None:
        """Measure what is missing of one sweep on one engine; starts the engine only if something is."""
        if self.frozen("datasheet") is None:  # a sweep run by hand before 01: ink comes first all the same
            self.predict()
        missing = [s for s in self.specs(engine, sweep) if not self._kept(s)]
        todo = [s for s in missing if not self._past_limit(s)]
        if todo == missing:  # whatever a limit had left out is to be measured now, or is there
            self._limit_file(sweep, engine).unlink(missing_ok=True)
        if not todo:
            return
        with contextlib.ExitStack() as running:
            self._measure(todo, running, progress)

    def _measure(self, todo: list[PointSpec], running: contextlib.ExitStack, progress: bool) -> None:
        """Measure points in order. One at which the engine fails is marked with the reason, and the engine started
        again for the next; where two points in a row fail, the rest is left out."""
        sweep, engine = todo[0].sweep, todo[0].engine
        predicted = {(p["sweep"], p["point"]): p for p in self.frozen_points(engine)}
        minutes = self._minutes(sweep, engine)
        limit_s = None if minutes is None else 60 * minutes
        server, failed_in_a_row, why = running.enter_context(self.engine(engine)), 0, None
        started = time.monotonic()
        for k, spec in enumerate(todo):
            left_s = None if limit_s is None else limit_s - (time.monotonic() - started)
            wall_s = (predicted.get((sweep, spec.point)) or {}).get("wall_s")
            if left_s is not None and (left_s <= 0 or (wall_s is not None and wall_s > left_s and k > 0)):
                self._stop_here(todo[k:], minutes)
                break
            if why or not server.alive():
                self._tell(f"{engine}: {why or server.fault()}; starting it again", progress)
                restarting = time.monotonic()
                try:
                    server = running.enter_context(self._restarted(engine))
                except ServebookError as error:
                    self._lost(todo[k:], f"{engine} could not be started again: {error}", [], progress)
                    break
                started += time.monotonic() - restarting  # a limit is for measuring
            if why := self._measure_point(spec, server, left_s, progress):
                failed_in_a_row += 1
                self._lost([spec], f"{engine} {why}", server.log_tail(LOG_LINES).splitlines(), progress)
                if failed_in_a_row == 2 and todo[k + 1 :]:
                    self._lost(todo[k + 1 :], f"{engine} had failed at two points in a row", [], progress)
                    break
            else:
                failed_in_a_row = 0
        results.write_points_csv(self.dir)

    def _measure_point(self, spec: PointSpec, server: Any, left_s: float | None, progress: bool) -> str | None:
        """Measure and store one point; why the engine failed, None where it did not."""
        from .load import measure_point_sync

        name = f"{spec.sweep} {spec.engine} {spec.point}"
        stored = self._stored(spec)
        if stored:
            self._tell(f"{name}: measured again, {self._why_again(spec, stored)}", progress)
            self._set_aside(spec)
        ingredients = files.read_json(self._ingredients_file) or {}
        fingerprint = self.fingerprint(spec)
        if fingerprint not in ingredients:
            files.write_json(self._ingredients_file, {**ingredients, fingerprint: self.made_with(spec)})
        began = time.monotonic()
        try:
            point = measure_point_sync(
                spec,
                url=server.url,
                model=server.model,
                vocab=self.vocab(),
                load=self.params.load,
                slo=self.params.slo,
                run_dir=self.dir,
                batching=self.batching(spec.engine),
                floors=self.floors(spec),
                deadline_s=left_s,
                api_key=server.key(),
                on_progress=lambda text: self._tell(f"{name}: {text}", False),
            )
        except ServebookError:
            if why := server.fault(self._answer_deadline_s):
                return str(why)
            raise
        if (not point["requests"] or point["failures"] or point.get("hung")) and (
            why := server.fault(self._answer_deadline_s)
        ):
            self._point_file(spec).unlink(missing_ok=True)  # what a dying server did is no point; its rows stay
            return str(why)
        point["wall_s"] = round(time.monotonic() - began, 3)
        point["fingerprint"] = fingerprint
        files.write_json(self._point_file(spec), point)
        self._fault_file(spec).unlink(missing_ok=True)
        self._tell(f"{name} done", progress)
        return None

    @property
    def _answer_deadline_s(self) -> float:
        """How long one short request may take on an engine that nothing else loads any more."""
        return min(self.params.load.request_timeout_s, 60.0)

    def _restarted(self, name: str) -> Any:
        from . import engines

        return engines.restart(self.params, name, self.dir, self.base)

    def _lost(self, specs: list[PointSpec], why: str, log: list[str], progress: bool) -> None:
        """Mark points as not measured, for the report and the exit status."""
        for spec in specs:
            record = {"sweep": spec.sweep, "engine": spec.engine, "points": [spec.point], "fault": True, "log": log}
            files.write_json(self._fault_file(spec), {**record, "why": f"{spec.point} was not measured: {why}"})
            self._tell(f"{spec.sweep} {spec.engine} {spec.point} lost: {why}", progress)

    def _stop_here(self, left: list[PointSpec], minutes: float | None) -> None:
        sweep, engine, names = left[0].sweep, left[0].engine, [s.point for s in left]
        why = f"stopped after {minutes:g} min, the limit set for {engine} here; not measured: {', '.join(names)}"
        record = {"sweep": sweep, "engine": engine, "points": names, "minutes": minutes, "why": why}
        made_with = {"fingerprints": {s.point: self.fingerprint(s) for s in left}}
        files.write_json(self._limit_file(sweep, engine), record | made_with)
        self._tell(f"{sweep} {engine}: {why}", True)

    def vocab(self) -> range:
        """Token ids that prompts are drawn from: the upper part, clear of the special ids at the bottom."""
        return range(min(1000, self.shape.vocab // 4), self.shape.vocab - self.shape.vocab // 64)

    def batching(self, engine: str) -> bool:
        return self.params.engines[engine].kind != "naive"

    def floors(self, spec: PointSpec) -> dict[str, float]:
        """Times that no server on this hardware can beat: the point is suspect where a figure is below."""
        rates = (self.gpu.flops_per_s(self.shape.compute_dtype), self.gpu.bytes_per_s)
        return {
            "ttft_floor_s": roofline.ttft_bound_s(self.shape, *rates, prompt_tokens=spec.prompt_tokens),
            "tpot_floor_s": roofline.tpot_bound_s(self.shape, *rates, batch=1, context_tokens=spec.prompt_tokens),
        }

    # --- what came out ------------------------------------------------------------------------------------------

    def stored_points(self) -> list[dict[str, Any]]:
        return results.read_points(self.dir)

    def points(self, engines: list[str] | None = None) -> pd.DataFrame:
        """Every measured point, one row each (schema results.POINT_KEYS), of all engines or those given."""
        frame = results.points_frame(self.dir)
        return frame if engines is None else frame[frame["engine"].isin(engines)].reset_index(drop=True)

    def requests(self, sweep: str) -> pd.DataFrame:
        """Every request row of a sweep, with the point it belongs to."""
        import pandas as pd

        frames = []
        for p in self.stored_points():
            if p["sweep"] == sweep:
                rows = results.rows_frame(self.dir, sweep, p["engine"], p["point"])
                frames.append(
                    rows.assign(**{k: p[k] for k in ("sweep", "engine", "point", "concurrency", "rate_per_s")})
                )
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def largest_series(self, sweep: str, engine: str) -> pd.DataFrame:
        """The server's counters over time at the largest concurrency of a sweep; empty where it reported none."""
        import pandas as pd

        own = [p for p in self.stored_points() if p["sweep"] == sweep and p["engine"] == engine]
        if not own:
            return pd.DataFrame()
        return results.series_frame(self.dir, sweep, engine, max(own, key=lambda p: p["concurrency"] or 0)["point"])

    def predictions(self) -> dict[str, Any]:
        """The content of predictions.json."""
        return files.read_json(self.dir / "predictions.json") or {"frozen": []}

    def author_points(self) -> list[dict[str, Any]]:
        """The posts' closed forms for this run: at the datasheet's rates, or each engine's at its first C = 1 point."""
        rates = {}
        for engine, kind in self.engine_kinds().items():
            alone = [p for p in self.stored_points() if p["engine"] == engine and p["sweep"] == points.CALIBRATION]
            rates[engine] = roofline.Rates(self.gpu.bytes_per_s, self.gpu.flops_per_s(self.shape.compute_dtype))
            if alone and alone[0]["ttft_mean_s"] and alone[0]["tpot_mean_s"]:
                passes = roofline.NAIVE_KV_PASSES if kind == "naive" else 1
                p = alone[0]
                rates[engine] = roofline.Rates.measured(
                    self.shape,
                    prompt_tokens=p["prompt_tokens"],
                    ttft_s=p["ttft_mean_s"],
                    tpot_s=p["tpot_mean_s"],
                    kv_passes=passes,
                )
        return closed_forms.author_points(self.params, self.shape, rates, self.all_facts())

    def scores(self) -> pd.DataFrame:
        """Predictions of every stage against the points that were held out of calibration, the posts' way beside."""
        from . import score

        taught = {(p.prompt_tokens, p.output_tokens) for p in self.params.calibration}
        stages = [*self.predictions()["frozen"], {"stage": closed_forms.STAGE, "points": self.author_points()}]
        scored = score.score(self.points(), stages)
        held_out = [
            row.sweep != points.CALIBRATION
            and not (row.concurrency == 1 and (row.prompt_tokens, row.output_tokens) in taught)
            for row in scored.itertuples()
        ]
        return scored[held_out].reset_index(drop=True)

    def engine_kinds(self) -> dict[str, str]:
        return {name: engine.kind for name, engine in self.params.engines.items()}

    @property
    def main_engine(self) -> str:
        """The engine that the headline is about: the first that batches, else the first."""
        return next((n for n, kind in self.engine_kinds().items() if kind != "naive"), next(iter(self.params.engines)))

    def shown_facts(self, engines: list[str]) -> dict[str, dict[str, Any]]:
        """Facts without what names this machine's processes and folders."""
        hidden = {"pid", "url", "process", "flags", "log"}
        return {n: {k: v for k, v in self.facts(n).items() if k not in hidden} for n in engines}

    def versions_line(self) -> str:
        """Engine versions for the headline."""
        told = {n: self.facts(n) for n in self.params.engines}
        return ", ".join(f"{n} {f['version']}" for n, f in told.items() if f.get("version")) or "no engine ran"

    @property
    def figures(self) -> Path:
        return self.dir / "figures"

    def stopped(self) -> list[dict[str, Any]]:
        """Points that are missing: sweep, engine, points, why; `fault` where the engine failed, with its last `log`."""
        found = [json.loads(f.read_text()) for f in sorted((self.dir / "stops").glob("*.json"))]
        now = {*self.params.sweeps, points.CALIBRATION}
        return [s for s in found if s["sweep"] in now and s["engine"] in self.params.engines]

    def faults(self, engine: str, sweep: str | None) -> list[str]:
        """Points of a sweep (None: the calibration) that the engine's failing has cost, one line each."""
        at = engine, sweep or points.CALIBRATION
        return [
            f"{s['sweep']}, {engine}: {s['why']}"
            for s in self.stopped()
            if s.get("fault") and (s["engine"], s["sweep"]) == at
        ]

    def failed_engines(self) -> dict[str, str]:
        """Engines that did not start in the last session, with the reason."""
        found = sorted((self.dir / "engines").glob("*.failed.json"))
        return {f.name.removesuffix(".failed.json"): json.loads(f.read_text())["why"] for f in found}

    def cost(self) -> dict[str, float]:
        """What the run took and cost so far, over the sessions that measured something."""
        measured_at = [str(p["started_at"])[:19] for p in self.stored_points() if p.get("started_at")]
        records = self.provenance()["sessions"]
        begins = [str(r["started_utc"])[:19] for r in records]
        sessions = [
            record
            for record, begin, end in zip(records, begins, [*begins[1:], "9999"], strict=True)
            if any(begin <= at < end for at in measured_at)
        ]
        start_s = sum(f.get("startup_s") or 0.0 for f in self.all_facts().values())
        return analysis.run_cost(sessions, self.stored_points(), self.params.hardware.price_per_hour, start_s)

    def notes(self) -> Any:
        """The author's own words: notes/<run>.md, where it exists."""
        from IPython.display import Markdown

        path = ROOT / "notes" / f"{self.params.run}.md"
        return Markdown(path.read_text(encoding="utf-8")) if path.exists() else None

    # --- sessions -----------------------------------------------------------------------------------------------

    def begin_session(self, command: list[str] | None) -> None:
        """Open this session's record in provenance.json and forget the engine failures of the last one."""
        for stale in (self.dir / "engines").glob("*.failed.json"):
            stale.unlink()
        record = self.provenance()
        record["sessions"].append(
            {**provenance.collect(ROOT, command), "gpu": hardware.snapshot(), "seconds": None, "faults": []}
        )
        files.write_json(self.dir / "provenance.json", record)
        self._session_began = time.monotonic()

    def note_session(self, faults: list[str]) -> None:
        """Write how long this session has run so far: the analysis tells it, and a killed session leaves it."""
        record = self.provenance()
        record["sessions"][-1].update(seconds=round(time.monotonic() - self._session_began, 1), faults=faults)
        files.write_json(self.dir / "provenance.json", record)

    def end_session(self, faults: list[str]) -> None:
        self.note_session(faults)
        self._status_file.unlink(missing_ok=True)

    def provenance(self) -> dict[str, Any]:
        return files.read_json(self.dir / "provenance.json") or {"run": self.params.run, "sessions": []}

    @property
    def _status_file(self) -> Path:
        return self.dir / ".status"

    def _tell(self, text: str, aloud: bool) -> None:
        with contextlib.suppress(OSError):  # a status line is never worth a run
            files.write_text(self._status_file, text)
        if aloud:
            print(text, file=sys.stdout, flush=True)

    def status(self) -> str:
        """What the kernel is doing, one line, for the terminal."""
        try:
            return self._status_file.read_text()
        except OSError:
            return ""

    def seconds_left(self) -> float | None:
        """Predicted wall time of the points still to be measured; None before there is a prediction."""
        left = [
            p["wall_s"]
            for engine in self.params.engines
            for p in self.frozen_points(engine)
            if p.get("wall_s") and not (self.dir / "requests" / p["sweep"] / engine / f"{p['point']}.json").exists()
        ]
        return sum(left) if left else None
