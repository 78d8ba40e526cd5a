"""The files of a run's folder: every name and pattern is defined here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OLD, LEFT_OUT = ".old", ".left_out"  # suffixes of a file's name: an earlier attempt; a point of other parameters
FAILED = ".failed.json"  # suffix of an engine's name: why it did not start


@dataclass(frozen=True)
class RunFiles:
    """The paths of one run. A point's files are under its sweep and engine and have its name."""

    dir: Path

    # --- of the run ---------------------------------------------------------------------------------------------

    @property
    def params(self) -> Path:
        """The run's parameters, resolved."""
        return self.dir / "params.yaml"

    @property
    def hardware(self) -> Path:
        """The detected hardware."""
        return self.dir / "hardware.json"

    @property
    def traces(self) -> Path:
        """Copies of the traces that the run's workloads use."""
        return self.dir / "traces"

    @property
    def predictions(self) -> Path:
        """Every frozen prediction."""
        return self.dir / "predictions.json"

    @property
    def peers(self) -> Path:
        """Other predictors' predictions of the points."""
        return self.dir / "peers.csv"

    @property
    def provenance(self) -> Path:
        """Sessions: code, packages, machine, command."""
        return self.dir / "provenance.json"

    @property
    def time(self) -> Path:
        """What the time was spent on, one entry per line."""
        return self.dir / "time.jsonl"

    @property
    def preflight(self) -> Path:
        """Results of the machine checks before measuring."""
        return self.dir / "preflight.json"

    @property
    def points_csv(self) -> Path:
        """All points as a table."""
        return self.dir / "points.csv"

    @property
    def report(self) -> Path:
        """The page."""
        return self.dir / "report.html"

    @property
    def social(self) -> Path:
        """The short post."""
        return self.dir / "social.md"

    @property
    def card(self) -> Path:
        """The preview picture for links to the page."""
        return self.dir / "card.png"

    @property
    def figures(self) -> Path:
        """Figures as files."""
        return self.dir / "figures"

    @property
    def notebooks(self) -> Path:
        """Executed notebooks."""
        return self.dir / "notebooks"

    # --- of an engine -------------------------------------------------------------------------------------------

    def engine_record(self, name: str) -> Path:
        """Facts and process of an engine."""
        return self.dir / "engines" / f"{name}.json"

    def engine_log(self, name: str) -> Path:
        """An engine's log."""
        return self.dir / "engines" / f"{name}.log"

    def engine_failure(self, name: str) -> Path:
        """Why an engine did not start."""
        return self.dir / "engines" / f"{name}{FAILED}"

    def engine_failures(self) -> dict[str, Path]:
        """The engines that did not start in the last session."""
        found = sorted((self.dir / "engines").glob(f"*{FAILED}"))
        return {path.name.removesuffix(FAILED): path for path in found}

    # --- of a point ---------------------------------------------------------------------------------------------

    def point(self, sweep: str, engine: str, point: str) -> Path:
        """A complete point. The file's existence means that the point is complete."""
        return self.dir / "requests" / sweep / engine / f"{point}.json"

    def rows(self, sweep: str, engine: str, point: str) -> Path:
        """A point's request rows."""
        return self.dir / "requests" / sweep / engine / f"{point}.jsonl"

    def series(self, sweep: str, engine: str, point: str) -> Path:
        """A point's server and GPU series."""
        return self.dir / "metrics" / sweep / engine / f"{point}.csv"

    def points(self, engine: str = "*") -> list[Path]:
        """The files of all complete points, or of one engine's."""
        return [p for p in self.dir.glob(f"requests/*/{engine}/*.json") if not p.name.startswith(".")]

    def point_folders(self) -> list[Path]:
        """The folders with points, one per sweep and engine."""
        return list(self.dir.glob("requests/*/*"))

    def left_out(self) -> list[Path]:
        """Stored points that are not in the current parameters."""
        return list(self.dir.glob(f"requests/*/*/*.json{LEFT_OUT}"))

    @property
    def made_with(self) -> Path:
        """What points were made with, by fingerprint."""
        return self.dir / "requests" / "made_with.json"

    @property
    def prompts_salt(self) -> Path:
        """The salt that makes this folder's prompts unique."""
        return self.dir / "requests" / "prompts.salt"

    @property
    def packed_rows(self) -> Path:
        """All request rows of a packed run."""
        return self.dir / "rows.parquet"

    @property
    def packed_series(self) -> Path:
        """All series of a packed run."""
        return self.dir / "series.parquet"

    # --- what is missing ----------------------------------------------------------------------------------------

    def fault(self, sweep: str, engine: str, point: str) -> Path:
        """Why a point was not measured."""
        return self.dir / "stops" / f"{sweep}.{engine}.{point}.json"

    def limit(self, sweep: str, engine: str) -> Path:
        """The points that a sweep's time limit left out."""
        return self.dir / "stops" / f"{sweep}.{engine}.json"

    def stops(self) -> list[Path]:
        """All faults and limits."""
        return sorted((self.dir / "stops").glob("*.json"))


def point_of(path: Path) -> tuple[str, str, str]:
    """The (sweep, engine, point) of a point's file."""
    return path.parent.parent.name, path.parent.name, path.name.partition(".json")[0]


def run_folders(parent: Path) -> list[Path]:
    """The folders below `parent` that contain a run."""
    return [path.parent for path in sorted(parent.glob("*/params.yaml"))]
