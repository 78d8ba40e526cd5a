"""A run's measured files: request rows (appended as requests end), one JSON file per point, points.csv, series.

Schemas: RequestRow and MeasuredPoint. Whole files are replaced atomically. Rows are appended one line at a time, and an
incomplete line is removed, so a file contains only complete rows. A packed run (see pack) has all rows in one
rows.parquet and all series in one series.parquet.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import files, latency
from ..common.errors import ServebookError
from ..common.measured_point import NUMBER_COLUMNS, POINT_COLUMNS, POINT_KEY, MeasuredPoint
from ..common.request_row import ROW_KEYS
from .layout import OLD, RunFiles

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

ROW_NUMBERS = frozenset(ROW_KEYS) - {"phase", "ok", "error", "gaps_ms"}
DERIVED = ("ttft_s", "tpot_s", "e2e_s")  # columns that are recomputed from a row's time stamps and tokens


class Rows(list[dict[str, Any]]):
    """Request rows in the order they ended; `notes` lists repairs made while reading them."""

    notes: list[str]


def rows_path(run_dir: Path, sweep: str, engine: str, point: str) -> Path:
    """The file of a point's request rows."""
    return RunFiles(run_dir).rows(sweep, engine, point)


def point_path(run_dir: Path, sweep: str, engine: str, point: str) -> Path:
    """The file of a complete point."""
    return RunFiles(run_dir).point(sweep, engine, point)


def series_path(run_dir: Path, sweep: str, engine: str, point: str) -> Path:
    """The file of a point's server and GPU series."""
    return RunFiles(run_dir).series(sweep, engine, point)


def _write_fault(error: OSError, path: Path) -> ServebookError:
    return ServebookError(
        f"cannot write: {error.strerror or error}", str(path), "Free space or fix the permissions, then run again"
    )


def earlier_attempts(path: Path) -> int:
    """How many earlier attempts at the point have left rows: 0 when it is measured for the first time."""
    return len(list(path.parent.glob(f"{path.name}{OLD}*"))) + (path.exists() and path.stat().st_size > 0)


class RowWriter:
    """Appends rows to a point's file, each in one write; an earlier, unfinished attempt is renamed first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                os.replace(path, path.with_name(f"{path.name}{OLD}{earlier_attempts(path)}"))
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _write_fault(error, path) from None
        self._size = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row (ROW_KEYS), completely or not at all. Raises ServebookError."""
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            done = os.write(self._fd, line)
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise _write_fault(error, self.path) from None
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_rows(path: Path) -> Rows:
    """The rows of one point. A truncated last line (the writer was killed) is cut off and noted.

    Raises ServebookError for a missing file or a line that is not a JSON object.
    """
    rows = Rows()
    rows.notes = []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ServebookError(f"cannot read: {error.strerror}", str(path)) from None
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        rows.notes.append(f"{path.name}: a torn last line of {len(data) - whole} bytes was cut off")
        log.warning("%s", rows.notes[-1])
        try:
            os.truncate(path, whole)
        except OSError:
            rows.notes[-1] += " (in memory only: the file cannot be written)"
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
        except ValueError:
            raise ServebookError("not a request row", f"{path}:{number}", "Remove the line, or measure again") from None
        rows.append(row)
    return rows


def write_point(run_dir: Path, point: MeasuredPoint) -> Path:
    """Store a complete point; the existence of its file means that it is complete."""
    path = point_path(run_dir, *point.key)
    files.write_json(path, files.finite(point.to_json()))
    return path


def set_aside(run_dir: Path, point: MeasuredPoint) -> Path | None:
    """Rename the file of an earlier measurement of the same load, so that it is kept; None if there is none."""
    path = point_path(run_dir, *point.key)
    if not path.exists():
        return None
    kept = path.with_name(f"{path.name}{OLD}{len(list(path.parent.glob(f'{path.name}{OLD}*'))) + 1}")
    try:
        return path.replace(kept)
    except OSError as error:
        raise _write_fault(error, path) from None


def read_point_file(path: Path) -> MeasuredPoint | None:
    """The point in a file; None if there is no file or it holds another JSON value."""
    stored = files.read_json(path)
    if not isinstance(stored, dict) or "point" not in stored:
        return None
    try:
        return MeasuredPoint.from_json(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise ServebookError(f"not a measured point ({error})", str(path), "Remove it; it is measured again") from None


def read_point(run_dir: Path, sweep: str, engine: str, point: str) -> MeasuredPoint | None:
    """A complete point, None if it does not exist yet."""
    return read_point_file(point_path(run_dir, sweep, engine, point))


def read_points(run_dir: Path) -> list[MeasuredPoint]:
    """All complete points of a run, ordered by sweep, engine and load."""
    found = [p for path in RunFiles(run_dir).points() if (p := read_point_file(path)) is not None]
    return sorted(found, key=lambda p: (p.sweep, p.engine, _natural(p.point_id)))


def write_points_csv(run_dir: Path) -> Path:
    """Rebuild points.csv from the points' files."""
    points = [p.to_json() for p in read_points(run_dir)]
    further = sorted({k for p in points for k in p} - set(POINT_COLUMNS))
    path = RunFiles(run_dir).points_csv
    texts = [{k: "; ".join(p[k]) for k in ("reasons", "reason_codes")} for p in points]
    write_csv(path, [*POINT_COLUMNS, *further], (p | t for p, t in zip(points, texts, strict=True)))
    return path


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table atomically; None becomes an empty field, a float has seven digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    files.write_text(path, text.getvalue())


def points_frame(run_dir: Path) -> pd.DataFrame:
    """All complete points as a DataFrame: POINT_COLUMNS, then the further columns of any point."""
    import pandas as pd

    points = [p.to_json() for p in read_points(run_dir)]
    columns = list(dict.fromkeys([*POINT_COLUMNS, *(k for p in points for k in p)]))
    return _numbers(pd.DataFrame(points, columns=columns))


def rows_frame(run_dir: Path, sweep: str, engine: str, point: str) -> pd.DataFrame:
    """One point's request rows as a DataFrame."""
    import pandas as pd

    path = rows_path(run_dir, sweep, engine, point)
    if not path.exists() and RunFiles(run_dir).packed_rows.exists():
        return _numbers(_with_latencies(_packed(RunFiles(run_dir).packed_rows, sweep, engine, point)))
    rows = read_rows(path)
    return _numbers(pd.DataFrame(rows, columns=list(dict.fromkeys([*ROW_KEYS, *(k for r in rows for k in r)]))))


def _numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """NaN instead of None in columns of quantities: a column of None would turn others into objects."""
    import pandas as pd

    numbers = NUMBER_COLUMNS | ROW_NUMBERS
    return frame.assign(**{c: pd.to_numeric(frame[c]) for c in frame.columns if c in numbers})


def series_frame(run_dir: Path, sweep: str, engine: str, point: str) -> pd.DataFrame:
    """A point's server and GPU series (columns: load.metrics.SERIES_COLUMNS); empty if nothing was scraped."""
    import pandas as pd

    path = series_path(run_dir, sweep, engine, point)
    if not path.exists() and RunFiles(run_dir).packed_series.exists():
        return _packed(RunFiles(run_dir).packed_series, sweep, engine, point)
    return pd.read_csv(path) if path.exists() else pd.DataFrame()


def _with_latencies(rows: pd.DataFrame) -> pd.DataFrame:
    """Packed rows with the latencies that follow from their time stamps (common.latency)."""
    if rows.empty:
        return rows
    begin = rows["sent_s"]
    begin = rows["scheduled_s"].fillna(begin) if "scheduled_s" in rows else begin
    tpots = latency.tpots_s(
        *(rows[c].to_numpy(float) for c in ("first_s", "last_s", "output_tokens", "first_event_tokens"))
    )
    return rows.assign(ttft_s=rows["first_s"] - begin, tpot_s=tpots, e2e_s=rows["last_s"] - begin)


def _packed(path: Path, *place: str) -> pd.DataFrame:
    """One point's part of a packed table, with integer columns as pandas reads them from text."""
    import pandas as pd

    try:
        found = pd.read_parquet(path, filters=[(k, "==", v) for k, v in zip(POINT_KEY, place, strict=True)])
    except (OSError, ValueError) as error:
        raise ServebookError(
            f"cannot be read ({error})", str(path), "Restore it: all rows of the run are in it"
        ) from None
    found = found.drop(columns=list(POINT_KEY))
    return found.astype({c: "float64" for c in found if pd.api.types.is_numeric_dtype(found[c]) and c != "ok"})


def _natural(name: str) -> list[Any]:
    return [float(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]
