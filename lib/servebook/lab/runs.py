"""Runs to compare with a prediction: the user's own, the reference runs, and published points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from ..common.files import ROOT
from ..common.measured_point import MeasuredPoint
from ..config import params, points
from ..hardware.catalog import Gpu, resolve
from ..model.reader import ModelShape, read_shape
from ..run.book import Book, outputs_folder
from ..run_folder import published, results
from ..run_folder.layout import RunFiles, run_folders


@dataclass(frozen=True)
class Run:
    """A stored run: parameters, hardware, limits that its engines reported, and measured points."""

    name: str
    params: params.RunParams
    base: Path  # where relative paths in params start from
    shape: ModelShape
    gpu: Gpu
    facts: Mapping[str, Mapping[str, Any]]
    points: list[MeasuredPoint] = field(repr=False)
    published: bool = False
    version: int = 0  # another one when points came

    def alone(self, engine: str) -> list[MeasuredPoint]:
        """The points at C = 1 that a prediction of the engine may learn from, one a pair of lengths."""
        own = [p for p in self.points if p.engine == engine]
        if not self.published:
            return [p for p in own if p.sweep == points.CALIBRATION]
        return list({(p.prompt_tokens, p.output_tokens): p for p in own if p.concurrency == 1}.values())

    def sweeps(self, engine: str) -> list[str]:
        """Sweeps over concurrency, prompt length or rate that hold a point of the engine."""
        own = {p.sweep for p in self.points if p.engine == engine} - {points.CALIBRATION}
        order = list(self.params.sweeps)
        return sorted(own, key=lambda name: (order.index(name) if name in order else len(order), name))

    def sweep(self, engine: str, name: str) -> list[MeasuredPoint]:
        """A sweep's measured points on an engine; repeated prompts are left out, for they measure the prefix cache."""
        return [
            p for p in self.points
            if (p.engine, p.sweep) == (engine, name) and not p.repeats_prompts
        ]  # fmt: skip


def names() -> dict[str, Path]:
    """All runs that can be compared with a prediction, by the name that `read_run` accepts: folders and published
    CSVs."""
    found: dict[str, Path] = {}
    for folder in run_folders(outputs_folder()):
        found[folder.name] = folder
    for folder in run_folders(ROOT / "outputs" / "reference"):
        found.setdefault(f"{folder.name} (reference)", folder)
    for csv in sorted((ROOT / "outputs" / "published").glob("*.csv")):
        if csv.with_name(f"{csv.stem}.facts.json").exists():
            found[f"{csv.stem} (published)"] = csv
    return {name: path for name, path in found.items() if path.suffix == ".csv" or RunFiles(path).points()}


def read_run(name: str) -> Run:
    """A run by its name (see names; without the bracket it is found too), its folder, or a CSV of measured points.

    Raises ServebookError for a name that no run has and for a folder that holds none.
    """
    known = names()
    bare = {p.stem if p.suffix == ".csv" else p.name: p for p in reversed(known.values())}
    path = known.get(name) or bare.get(name)
    path = path or Path(name).expanduser()
    if not path.exists():
        raise ServebookError(f"no run {name!r}", "run", f"There are: {', '.join(known) or 'none yet'}")
    label = next((n for n, p in known.items() if p == path), path.stem)
    return _published(path, label) if path.suffix == ".csv" else _stored(path, label, _stamp(path))


def _stamp(folder: Path) -> int:
    """Changes when a point is added, so that a run that is still measuring is read again."""
    return max((d.stat().st_mtime_ns for d in RunFiles(folder).point_folders()), default=0)


@lru_cache(maxsize=16)
def _stored(folder: Path, label: str, stamp: int) -> Run:
    book = Book.at(folder)
    facts = {name: book.facts(name) for name in book.params.engines}
    return Run(label, book.params, folder, book.shape, book.gpu, facts, results.read_points(folder), version=stamp)


@lru_cache(maxsize=16)
def _published(csv: Path, label: str) -> Run:
    measured, facts = published.read(csv)
    file = ROOT / "params" / f"{csv.stem}.yaml"
    run_params = params.read_file(file)
    shape = read_shape(run_params.model, file.parent)
    engines = facts.get("engines", facts)
    return Run(label, run_params, file.parent, shape, resolve(run_params.hardware), engines, measured, published=True)


__all__ = ["Run", "names", "read_run"]
