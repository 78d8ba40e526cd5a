"""A stored run: shape, hardware, predictions, points, scores. Measures nothing."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import model
from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import FrozenPredictions, PredictedPoint, StagePrediction
from ..config import params, points
from ..config.points import PointSpec
from ..hardware import catalog as hardware
from ..predictor import closed_forms, roofline
from ..scoring import peers, standing
from . import frozen_predictions, results
from .layout import RunFiles
from .point_status import PointStatus
from .sessions import Sessions

if TYPE_CHECKING:
    import pandas as pd


class StoredRun:
    """One run: `params` (validated), `dir` (its folder), `base` (the folder of relative paths in params)."""

    def __init__(self, run_params: params.RunParams, run_dir: Path, base: Path) -> None:
        self.params, self.dir, self.base = run_params, run_dir, base
        self.files = RunFiles(run_dir)
        self.sessions = Sessions(run_params.run, run_dir)
        self.point_status = PointStatus(self)

    # --- what is known before measuring -------------------------------------------------------------------------

    @cached_property
    def shape(self) -> model.ModelShape:
        """The model's shape. Raises ServebookError if its config is not available."""
        return model.read_shape(self.params.model, self.base)

    @cached_property
    def gpu(self) -> hardware.Gpu:
        """The hardware, detected once per run, so that a second session does not change the prediction."""
        stored = self.files.hardware
        record, asked = files.read_object(stored, "asked", "gpu"), self.params.hardware.model_dump(mode="json")
        if record and record["asked"] == asked:
            try:
                return hardware.Gpu(**record["gpu"])
            except TypeError as error:
                raise ServebookError(f"holds no hardware ({error})", str(stored), "Remove the file") from None
        gpu = hardware.resolve(self.params.hardware)
        if self.dir.exists():
            files.write_json(stored, {"asked": asked, "gpu": asdict(gpu)})
        return gpu

    def facts(self, engine: str) -> dict[str, Any]:
        """The facts that a server reported at its last start, {} without a start."""
        return files.read_object(self.files.engine_record(engine))

    def all_facts(self) -> dict[str, dict[str, Any]]:
        """`facts` of every engine by its name."""
        return {name: self.facts(name) for name in self.params.engines}

    def frozen(self, stage: str) -> StagePrediction | None:
        """A stage's frozen prediction of every point (see frozen_predictions), None if nothing was frozen."""
        return standing.of_stage(self.predictions()["frozen"], stage)

    def frozen_points(self, engine: str) -> list[PredictedPoint]:
        """The best frozen prediction of an engine's points: calibrated, otherwise from the datasheet."""
        entry = self.frozen(f"calibrated:{engine}") or self.frozen("datasheet")
        return [p for p in (entry["points"] if entry else ()) if p["engine"] == engine]

    def specs(self, engine: str, sweep: str) -> list[PointSpec]:
        """The points of a sweep for an engine; shares of capacity become the frozen rates."""
        if sweep == points.CALIBRATION:
            return self.params.calibration_points(engine)
        if known := self.params.sweep_points(sweep, engine):
            return known
        frozen = self._all_predictions()["frozen"]
        entry = standing.of_stage(frozen, f"calibrated:{engine}") or standing.of_stage(frozen, "datasheet")
        capacity = (entry.get("capacity_per_s") or {}).get(f"{sweep}/{engine}") if entry else None
        return self.params.sweep_points(sweep, engine, capacity)

    def all_specs(self) -> list[PointSpec]:
        """All points of the run that are known so far."""
        sweeps = (points.CALIBRATION, *self.params.sweeps)
        return [spec for engine in self.params.engines for sweep in sweeps for spec in self.specs(engine, sweep)]

    def takes_part(self, engine: str, sweep: str) -> bool:
        """Whether the sweep is run on the engine."""
        named = self.params.sweeps[sweep].engines
        return named is None or engine in named

    def sweep_names(self, kind: str) -> list[str]:
        """Sweeps that are reported as a kind (sweeps.SweepKind.report_as), in the parameters' order."""
        return [name for name, s in self.params.sweeps.items() if s.report_as == kind]

    def left_out(self) -> str | None:
        """Stored points that are not in the parameters, as a sentence; None if there are none."""
        return self.point_status.left_out()

    def stopped(self) -> list[dict[str, Any]]:
        """Missing points, each with its reason (see PointStatus.stopped)."""
        return self.point_status.stopped()

    def unfinished(self) -> list[str]:
        """Points that are missing without a recorded reason, except those of engines that failed to start."""
        return self.point_status.unfinished(skip=self.failed_engines())

    # --- what came out ------------------------------------------------------------------------------------------

    def stored_points(self) -> list[MeasuredPoint]:
        """All complete points."""
        return results.read_points(self.dir)

    def points(self, engines: list[str] | None = None) -> pd.DataFrame:
        """All measured points, one per row (columns: MeasuredPoint), of all engines or the given ones."""
        frame = results.points_frame(self.dir)
        return frame if engines is None else frame[frame["engine"].isin(engines)].reset_index(drop=True)

    def requests(self, sweep: str) -> pd.DataFrame:
        """All request rows of a sweep, with their point."""
        import pandas as pd

        frames = []
        for p in self.stored_points():
            if p.sweep == sweep:
                rows = results.rows_frame(self.dir, **p.place)
                frames.append(rows.assign(**p.place, concurrency=p.concurrency, rate_per_s=p.rate_per_s))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def largest_series(self, sweep: str, engine: str) -> pd.DataFrame:
        """The server's counters over time at the largest concurrency of a sweep; empty if it reported none."""
        import pandas as pd

        own = [p for p in self.stored_points() if p.sweep == sweep and p.engine == engine]
        if not own:
            return pd.DataFrame()
        return results.series_frame(self.dir, sweep, engine, max(own, key=lambda p: p.concurrency or 0).point_id)

    def server_series(self, sweep: str) -> pd.DataFrame:
        """The server's and the GPU's counters over time of all points of a sweep, with their engine and point."""
        import pandas as pd

        frames = []
        for p in self.stored_points():
            if p.sweep == sweep and len(own := results.series_frame(self.dir, sweep, p.engine, p.point_id)):
                frames.append(own.assign(engine=p.engine, point=p.point_id))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def finite_sweeps(self) -> list[str]:
        """Sweeps whose points send so many requests and no more, in the parameters' order: bursts, traces and those
        with a number of requests."""
        return list(dict.fromkeys(spec.sweep for spec in self.all_specs() if spec.requests is not None))

    def _all_predictions(self) -> FrozenPredictions:
        """The content of predictions.json."""
        return frozen_predictions.read(self.dir)

    def predictions(self) -> FrozenPredictions:
        """The content of predictions.json, reduced to the points of these parameters."""
        stored, has = self._all_predictions(), {(s.sweep, s.engine, s.point) for s in self.all_specs()}
        frozen: list[StagePrediction] = [
            {**e, "points": [p for p in e["points"] if standing.key(p) in has]} for e in stored["frozen"]
        ]
        return {**stored, "frozen": frozen}

    def baseline_points(self) -> list[PredictedPoint]:
        """The posts' closed forms for this run: at the datasheet's rates, or at the rates of each engine's first C = 1
        point."""
        rates = {}
        for engine, kind in self.engine_kinds().items():
            alone = [p for p in self.stored_points() if p.engine == engine and p.sweep == points.CALIBRATION]
            rates[engine] = roofline.Rates(self.gpu.bytes_per_s, self.gpu.flops_per_s(self.shape.compute_dtype))
            if alone and (p := alone[0]).ttft_mean_s and p.tpot_mean_s:
                passes = roofline.NAIVE_KV_PASSES if kind == "naive" else 1
                rates[engine] = roofline.Rates.measured(
                    self.shape,
                    prompt_tokens=p.prompt_tokens,
                    ttft_s=p.ttft_mean_s,
                    tpot_s=p.tpot_mean_s,
                    kv_passes=passes,
                )
        return closed_forms.baseline_points(self.params, self.shape, rates, self.all_facts())

    def author_points(self) -> list[PredictedPoint]:
        """baseline_points under the name used until 0.1."""
        warnings.warn("author_points is now baseline_points", DeprecationWarning, stacklevel=2)
        return self.baseline_points()

    @property
    def taught(self) -> set[tuple[int, int]]:
        """calibration_workloads under the name used until 0.1."""
        warnings.warn("taught is now calibration_workloads", DeprecationWarning, stacklevel=2)
        return self.calibration_workloads

    def scores(self) -> pd.DataFrame:
        """Predictions of every stage and the posts' closed forms, scored on the points not used for calibration."""
        from ..scoring import score

        stages = [*self.predictions()["frozen"], {"stage": closed_forms.STAGE, "points": self.baseline_points()}]
        return score.held_out(score.score(self.points(), stages), self.calibration_workloads)

    def beside_peers(self) -> pd.DataFrame:
        """Errors of other predictors and of this one on the same points (see peers); empty without a peers.csv."""
        return peers.beside(
            self.points(), self.predictions()["frozen"], peers.read(self.files.peers), self.calibration_workloads
        )

    @property
    def calibration_workloads(self) -> set[tuple[int, int]]:
        """(prompt tokens, output tokens) of the C = 1 points used for calibration."""
        return {(p.prompt_tokens, p.output_tokens) for p in self.params.calibration}

    def engine_kinds(self) -> dict[str, str]:
        """Engine name → kind: naive, vllm or openai."""
        return {name: engine.kind for name, engine in self.params.engines.items()}

    @property
    def main_engine(self) -> str:
        """The engine of the headline: the first with continuous batching, otherwise the first."""
        return next(
            (n for n, e in self.params.engines.items() if e.continuous_batching), next(iter(self.params.engines))
        )

    def shown_facts(self, engines: list[str]) -> dict[str, dict[str, Any]]:
        """Facts without names of this machine's processes and folders."""
        hidden = {"pid", "url", "process", "flags", "log"}
        return {n: {k: v for k, v in self.facts(n).items() if k not in hidden} for n in engines}

    @property
    def figures(self) -> Path:
        """The folder of figure files."""
        return self.files.figures

    def failed_engines(self) -> dict[str, str]:
        """Engines that did not start in the last session, with the reason."""
        return {name: files.read_object(f, "why")["why"] for name, f in self.files.engine_failures().items()}

    def require_points(self) -> None:
        """Raises ServebookError where nothing was measured and nothing failed: there is nothing to explain yet."""
        if not (self.stored_points() or self.failed_engines() or self.stopped()):
            fix = "Run notebooks 01 to 06 first, or `servebook run` with these parameters"
            raise ServebookError("nothing is measured yet", str(self.dir), fix)

    def cost(self) -> dict[str, float]:
        """What the run took so far, by category of time, and its cost (see analysis.run_cost)."""
        from ..scoring import analysis

        spent = self.sessions.spent() or analysis.spent_on(self.stored_points(), self.all_facts())
        return analysis.run_cost(self.provenance()["sessions"], spent, self.params.hardware.price_per_hour)

    def notes(self) -> Any:
        """The author's text: notes/<run>.md, if it exists."""
        from IPython.display import Markdown

        path = files.ROOT / "notes" / f"{self.params.run}.md"
        return Markdown(path.read_text(encoding="utf-8")) if path.exists() else None

    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json."""
        return self.sessions.provenance()

    def seconds_left(self) -> float | None:
        """Predicted wall time of the points still to be measured; None without a prediction."""
        left = [
            p["wall_s"]
            for engine in self.params.engines
            for p in self.frozen_points(engine)
            if p.get("wall_s") and not results.point_path(self.dir, p["sweep"], engine, p["point"]).exists()
        ]
        return sum(left) if left else None
