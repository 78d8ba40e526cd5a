"""A compact copy of a run: everything frozen and measured, in a tenth of the space.

All request rows go into one rows.parquet: time stamps to a few microseconds, from which latencies are recomputed; gaps
between single tokens are dropped, their percentiles stay in the points. All server and GPU series go into one
series.parquet. results.py reads both. Logs, the model folder and executed notebooks are left out; `servebook report`
executes the notebooks again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from . import results
from .layout import RunFiles
from .lock_and_signals import not_running

if TYPE_CHECKING:
    import pandas as pd

FOLDERS = ("engines", "stops", "requests")  # their .json files: facts, missing points and why, points
LEFT_OUT = ["gaps_ms", *results.DERIVED]


def pack(run_dir: Path, into: Path) -> Path:
    """Write the compact copy of a stored run into a new or empty folder.

    Raises ServebookError, also while the run is being written.
    """
    run_dir, into = Path(run_dir), Path(into)
    if not RunFiles(run_dir).params.exists():
        raise ServebookError("no run is stored here", str(run_dir), "Give a folder under outputs/")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ServebookError("already exists and is not empty", str(into), "Remove it, or give another folder")
    if into.resolve().is_relative_to(run_dir.resolve()):
        raise ServebookError("is inside the run's folder", str(into), "Give a folder elsewhere")
    points = results.read_points(run_dir)
    if not points:
        raise ServebookError("nothing is measured yet", str(run_dir), "Run `servebook run` first")
    with not_running(run_dir):
        return _pack(run_dir, into, points)


def _pack(run_dir: Path, into: Path, points: list[MeasuredPoint]) -> Path:
    run = RunFiles(run_dir)
    for path in (
        run.params, run.hardware, run.provenance, run.predictions, run.peers, run.preflight, run.time, run.report,
        run.social,
    ):  # fmt: skip
        if path.exists():
            _copy(path, into / path.name)
    for path in sorted(run.traces.glob("*")):
        with files.writing(RunFiles(into).traces / path.name) as scratch:
            shutil.copyfile(path, scratch)
    for folder in FOLDERS:
        for path in sorted((run_dir / folder).rglob("*.json")):
            if not path.name.startswith("."):
                _copy(path, into / path.relative_to(run_dir))
    rows, series = [], []
    for p in points:
        rows.append(results.rows_frame(run_dir, **p.place).assign(**p.place))
        series.append(results.series_frame(run_dir, **p.place).assign(**p.place))
    results.write_points_csv(into)
    _write(rows, RunFiles(into).packed_rows)
    _write(series, RunFiles(into).packed_series)
    return into


def _copy(path: Path, target: Path) -> None:
    """A copy of a file; JSON is written without indentation."""
    if path.suffix == ".json":
        files.write_text(target, json.dumps(files.read_json(path), ensure_ascii=False, separators=(",", ":")) + "\n")
        return
    with files.writing(target) as scratch:
        shutil.copyfile(path, scratch)


def _write(frames: list[pd.DataFrame], path: Path) -> None:
    import pandas as pd

    frames = [f for f in frames if len(f)]
    if not frames:
        return
    table = pd.concat(frames, ignore_index=True).drop(columns=LEFT_OUT, errors="ignore")
    table = table.astype({c: kind for c in table if (kind := _narrow(table[c]))})
    times = [
        c for c in table if table[c].dtype.kind == "f"
    ]  # values rarely repeat; splitting the bytes compresses better
    others = [c for c in table if c not in times]
    with files.writing(path) as scratch:
        table.to_parquet(
            scratch, compression="zstd", compression_level=19, index=False, use_dictionary=others,
            use_byte_stream_split=times,
        )  # fmt: skip


def _narrow(column: pd.Series[Any]) -> str | None:
    """float32 for measured times and gauges (4 µs for a 60 s point), small integers for whole numbers."""
    import numpy as np
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return None
    known = column.dropna().to_numpy(dtype=float)
    whole = np.isfinite(known).all() and (known == np.floor(known)).all() and (np.abs(known) < 2**31).all()
    if whole:
        return "Int32"
    return "float32" if np.abs(known).max(initial=0.0) < 1e6 else None
