"""A run as notebooks, pipeline and command see it: one object that connects the stages with the run's folder.

Stored data is in stored_run, the state of points in point_status, measuring in measuring, times in sessions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..common.files import ROOT
from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import StagePrediction
from ..config import params, points
from ..predictor import predict
from ..run_folder import frozen_predictions
from ..run_folder.layout import RunFiles
from . import measuring, preflight
from .preflight import Check
from .working_run import WorkingRun

STORED = "SERVEBOOK_STORED"  # a stored run's folder: any opened book is that run, replayed (see replay)


def find_params(path: str | Path) -> Path:
    """A parameter file as typed: relative to the working folder, otherwise to the checkout, so notebooks run from
    anywhere."""
    path = Path(path).expanduser()
    return path if path.exists() or path.is_absolute() or not (ROOT / path).exists() else ROOT / path


def outputs_folder() -> Path:
    """The folder of all runs: outputs/ of the checkout, or SERVEBOOK_OUTPUTS."""
    return Path(os.environ.get("SERVEBOOK_OUTPUTS") or ROOT / "outputs")


class Book(WorkingRun):
    """A run that can be worked on: opened from its parameters, predicted, served, measured."""

    @classmethod
    def open(cls, params_path: str | Path, *, create: bool = False) -> Book:
        """The run of a parameter file. With create, its folder is made and the resolved parameters are written
        into it."""
        if stored := os.environ.get(STORED):
            return ReplayedRun.at(Path(stored))
        path_as_typed, path = params_path, find_params(params_path)
        run_params = params.read_file(path)
        book = cls(run_params, outputs_folder() / run_params.run, path.resolve().parent)
        book._check_context(str(path_as_typed))
        book._refuse_secrets(str(path_as_typed))
        if create:
            book._create(params.dump(book._with_own_traces()))
        return book

    @classmethod
    def at(cls, run_dir: Path) -> Book:
        """A stored run by its folder (relative model paths are not needed any more)."""
        resolved = RunFiles(run_dir).params
        if not resolved.exists():
            raise ServebookError(
                "no run is stored here", str(run_dir), "Give a folder under outputs/ that holds params.yaml"
            )
        return cls(params.read_file(resolved), run_dir, run_dir)

    def _check_context(self, where: str) -> None:
        """Reject prompts that no engine of the run accepts, before any work."""
        asked = {f"calibration[{i}]": (p.prompt_tokens, p.output_tokens) for i, p in enumerate(self.params.calibration)}
        for name, s in self.params.sweeps.items():
            asked[f"sweeps.{name}"] = s.longest()
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
        """Reject keys in the parameters: they would be stored with the run and published with the report."""
        from ..engines import secrets

        for name, engine in self.params.engines.items():
            if found := secrets.in_params(engine):
                raise ServebookError(f"engines.{name}.{found[0]}", where, found[1])

    def _with_own_traces(self) -> params.RunParams:
        """The parameters with the paths of the trace copies in the run's folder."""
        own = {}
        for name, workload in self.params.workloads.items():
            if workload.trace is not None:
                kept = RunFiles(self.dir).traces / f"{name}{Path(workload.trace).suffix}"
                with files.writing(kept) as scratch:
                    shutil.copyfile(self.base / workload.trace, scratch)
                workload = workload.model_copy(update={"trace": str(kept.relative_to(self.dir))})
            own[name] = workload
        return self.params.model_copy(update={"workloads": own}) if own else self.params

    def _create(self, resolved: str) -> None:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            stored = self.files.params
            if not stored.exists() or stored.read_text() != resolved:
                files.write_text(stored, resolved)
                self.point_status.sync_with_params()
        except OSError as error:
            raise ServebookError(
                f"cannot write the run's folder ({error.strerror})",
                str(self.dir),
                "Free space or permissions there, or set SERVEBOOK_OUTPUTS to another folder",
            ) from error

    # --- before anything --------------------------------------------------------------------------------------------

    def preflight(self) -> list[Check]:
        """Whether this machine can do the run; stored with the run."""
        checks = preflight.run(self.params, self.base, self.dir)
        files.write_json(self.files.preflight, [asdict(c) for c in checks])
        return checks

    # --- predictions --------------------------------------------------------------------------------------------

    def predict(self, engine: str | None = None) -> StagePrediction:
        """Predict and freeze: before anything is measured (no engine), or for one engine after its C = 1 points.

        Returns the frozen entry; measured points keep what was frozen before they were measured.
        """
        stage, of = "datasheet" if engine is None else f"calibrated:{engine}", None if engine is None else [engine]
        learned, facts = [], {}
        if engine is not None:
            learned = [p for p in self.stored_points() if p.engine == engine and p.sweep == points.CALIBRATION]
            facts = {engine: self.facts(engine)}
        given = predict.inputs(self.params, self.shape, self.gpu, facts, learned)
        if kept_entry := frozen_predictions.unchanged(self.dir, stage, given):
            if dropped := _dropped(learned):
                self.tell(f"{engine}: {dropped}", True)
            return kept_entry
        asked: dict[str, Any] = {
            "facts": facts, "engines": of, "capacity_per_s": frozen_predictions.frozen_capacity(self.dir, stage)
        }  # fmt: skip
        try:
            prediction = predict.predict_run(self.params, self.shape, self.gpu, calibration=learned, **asked)
        except ServebookError as error:
            if engine is None or not learned:
                raise
            # on a busy host the C = 1 points may be unusable: lose the calibration, not the run
            prediction = predict.predict_run(self.params, self.shape, self.gpu, **asked)
            note = f"Its C = 1 points could not be used, so the datasheet's constants are kept: {error}"
            prediction["constants"][engine]["notes"].insert(0, note)
            self.tell(f"{engine}: {note}", True)
        else:
            if engine is not None and (dropped := _dropped(learned)):
                prediction["constants"][engine]["notes"].insert(0, dropped)
                self.tell(f"{engine}: {dropped}", True)
        # a point whose parameters or server changed is predicted again before it is measured again
        kept = {
            (s.sweep, s.engine, s.point)
            for s in self.all_specs()
            if (of is None or s.engine in of) and self.point_status.kept(s)
        }
        return frozen_predictions.freeze(self.dir, stage, prediction, kept)

    # --- measuring ----------------------------------------------------------------------------------------------

    def measure(self, sweep: str, engine: str, *, progress: bool = True) -> None:
        """Measure what is missing of one sweep on one engine; the engine is started only if something is missing."""
        if self.frozen("datasheet") is None:  # run by hand before 01
            self.predict()
        measuring.measure(self, sweep, engine, progress=progress)


def _dropped(learned: Sequence[MeasuredPoint]) -> str | None:
    """Which C = 1 points calibration did not use, and why; None if it used all."""
    invalid = [p for p in learned if p.verdict == "invalid"]
    if not invalid:
        return None
    whole = "so the datasheet's constants are kept" if len(invalid) == len(learned) else "the others are"
    why = "; ".join(dict.fromkeys(str(reason) for p in invalid for reason in p.reasons))
    return f"{len(invalid)} of {len(learned)} C = 1 points are invalid and not learned from, {whole}: {why}"


class ReplayedRun(Book):
    """A run as its notebooks see it during a replay: nothing is measured or predicted again."""

    def preflight(self) -> list[Check]:
        """The checks of the machine that measured, [] if none were stored."""
        return [Check(**c) for c in files.read_json(self.files.preflight) or []]

    def predict(self, engine: str | None = None) -> StagePrediction:
        """The frozen prediction."""
        stage = "datasheet" if engine is None else f"calibrated:{engine}"
        if (entry := self.frozen(stage)) is None:
            raise ServebookError(
                f"no prediction is frozen for the stage {stage}", str(self.dir), "Run `servebook run` first"
            )
        return entry

    def measure(self, sweep: str, engine: str, *, progress: bool = True) -> None:
        """Nothing: the stored measurements stay."""
