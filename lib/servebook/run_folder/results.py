"""A run's measured files: request rows appended as they end, one JSON object a point, points.csv, series.

Schemas: ROW_KEYS and POINT_KEYS. Whole files are replaced atomically; rows are appended one line at a time, and a
line that could not be written whole is taken back, so that a file only ever holds complete rows. A run that is kept
(see pack) holds all rows in one rows.parquet and all series in one series.parquet.
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

from ..common import files
from ..common.errors import ServebookError

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

# Times in a row are seconds since the point's start on a monotonic clock; null where it did not come to that.
ROW_KEYS = (
    "i", "phase", "ok", "error", "scheduled_s", "sent_s", "first_s", "last_s", "end_s", "prompt_tokens",
    "output_tokens", "prompt_tokens_asked", "output_tokens_asked", "events", "first_event_tokens", "ttft_s", "tpot_s",
    "e2e_s", "gaps_ms", "turn",
)  # fmt: skip
POINT_KEYS = (
    "sweep", "engine", "kind", "point", "concurrency", "rate_per_s", "prompt_tokens", "output_tokens", "requests",
    "failures", "seconds", "stop_reason", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_ci_low_s",
    "ttft_ci_high_s", "tpot_mean_s", "tpot_p50_s", "tpot_p99_s", "tpot_ci_low_s", "tpot_ci_high_s", "itl_p50_s",
    "itl_p99_s", "itl_is_event_gap", "e2e_mean_s", "e2e_p50_s", "e2e_p99_s", "request_rate_per_s", "output_tok_per_s",
    "output_tok_per_s_ci_low", "output_tok_per_s_ci_high", "decode_tok_per_s", "decode_wall_tok_per_s",
    "total_tok_per_s", "in_flight_mean", "little_l", "little_error", "waiting_first_token", "server_running_mean",
    "server_waiting_mean", "cache_hit_share", "preemptions", "server_prefill_mean_s", "server_queue_mean_s",
    "goodput_per_s", "gpu_power_mean_w", "gpu_clock_mean_mhz", "gpu_power_capped_share", "gpu_throttled_share",
    "client_gap_mean_s", "client_cpu_s", "client_loop_lag_p99_s", "started_at", "verdict", "reasons",
)  # fmt: skip

TEXT_KEYS = frozenset(
    (
        "sweep", "engine", "kind", "point", "stop_reason", "itl_is_event_gap", "started_at", "verdict", "reasons",
        "phase", "ok", "error", "gaps_ms",
    )
)  # fmt: skip
PLACE = ("sweep", "engine", "point")  # what names a point in a run
ROWS_FILE, SERIES_FILE = "rows.parquet", "series.parquet"
DERIVED = ("ttft_s", "tpot_s", "e2e_s")  # of a row: follow from its time stamps and tokens


class Rows(list[dict[str, Any]]):
    """Request rows in the order they ended; `notes` says what had to be repaired to read them."""

    notes: list[str]


def _folder(run_dir: Path, sweep: str, engine: str) -> Path:
    return Path(run_dir) / "requests" / sweep / engine


def rows_path(run_dir: Path, sweep: str, engine: str, point: str) -> Path:
    """Where a point's request rows are."""
    return _folder(run_dir, sweep, engine) / f"{point}.jsonl"


def point_path(run_dir: Path, sweep: str, engine: str, point: str) -> Path:
    """Where a point is, once it is complete."""
    return _folder(run_dir, sweep, engine) / f"{point}.json"


def series_path(run_dir: Path, sweep: str, engine: str, point: str) -> Path:
    """Where a point's server and GPU series is."""
    return Path(run_dir) / "metrics" / sweep / engine / f"{point}.csv"


def _write_fault(error: OSError, path: Path) -> ServebookError:
    return ServebookError(
        f"cannot write: {error.strerror or error}", str(path), "Free some space or fix the rights, then resume the run"
    )


def earlier_attempts(path: Path) -> int:
    """How often the rows of a point were begun before: 0 when it is measured for the first time."""
    return len(list(path.parent.glob(f"{path.name}.old*"))) + (path.exists() and path.stat().st_size > 0)


class RowWriter:
    """Appends rows to a point's file, each in one write; what an earlier, unfinished attempt left is set aside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                os.replace(path, path.with_name(f"{path.name}.old{earlier_attempts(path)}"))
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _write_fault(error, path) from None
        self._size = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row (ROW_KEYS), whole or not at all. Raises ServebookError."""
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
    """The rows of one point. A torn last line (the writer was killed) is cut off the file and noted.

    Raises ServebookError for a missing file or a line that is no JSON object.
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


def write_point(run_dir: Path, point: Mapping[str, Any]) -> Path:
    """Store a complete point; its file's presence is what says that it is complete."""
    path = point_path(run_dir, point["sweep"], point["engine"], point["point"])
    files.write_json(path, files.finite(point))
    return path


def read_point(run_dir: Path, sweep: str, engine: str, point: str) -> dict[str, Any] | None:
    """A complete point, or None when it is not there yet."""
    return files.read_json(point_path(run_dir, sweep, engine, point))


def read_points(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete point of a run, by sweep, engine, then load in natural order."""
    stored = (files.read_json(p) for p in Path(run_dir).glob("requests/*/*/*.json") if not p.name.startswith("."))
    found = [p for p in stored if isinstance(p, dict) and "point" in p]
    return sorted(found, key=lambda p: (p["sweep"], p["engine"], _natural(p["point"])))


def write_points_csv(run_dir: Path) -> Path:
    """Rebuild points.csv from the points' own files."""
    points = read_points(run_dir)
    extra = sorted({k for p in points for k in p} - set(POINT_KEYS))
    path = Path(run_dir) / "points.csv"
    write_csv(path, [*POINT_KEYS, *extra], ({**p, "reasons": "; ".join(p.get("reasons") or [])} for p in points))
    return path


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table atomically; None becomes an empty field, a float has seven digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    files.write_text(path, text.getvalue())


def points_frame(run_dir: Path) -> pd.DataFrame:
    """Every complete point as a DataFrame, columns as POINT_KEYS and then whatever else the points carry."""
    import pandas as pd

    points = read_points(run_dir)
    return _numbers(pd.DataFrame(points, columns=list(dict.fromkeys([*POINT_KEYS, *(k for p in points for k in p)]))))


def rows_frame(run_dir: Path, sweep: str, engine: str, point: str) -> pd.DataFrame:
    """One point's request rows as a DataFrame."""
    import pandas as pd

    path = rows_path(run_dir, sweep, engine, point)
    if not path.exists() and (Path(run_dir) / ROWS_FILE).exists():
        return _numbers(_with_latencies(_packed(Path(run_dir) / ROWS_FILE, sweep, engine, point)))
    rows = read_rows(path)
    return _numbers(pd.DataFrame(rows, columns=list(dict.fromkeys([*ROW_KEYS, *(k for r in rows for k in r)]))))


def _numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """A quantity that nothing reported is NaN, not None: a column of None would make objects of the others it meets."""
    import pandas as pd

    quantities = {*POINT_KEYS, *ROW_KEYS} - TEXT_KEYS
    return frame.assign(**{c: pd.to_numeric(frame[c]) for c in frame.columns if c in quantities})


def series_frame(run_dir: Path, sweep: str, engine: str, point: str) -> pd.DataFrame:
    """A point's server and GPU series (columns: load.metrics.SERIES_COLUMNS); empty where nothing was scraped."""
    import pandas as pd

    path = series_path(run_dir, sweep, engine, point)
    if not path.exists() and (Path(run_dir) / SERIES_FILE).exists():
        return _packed(Path(run_dir) / SERIES_FILE, sweep, engine, point)
    return pd.read_csv(path) if path.exists() else pd.DataFrame()


def _with_latencies(rows: pd.DataFrame) -> pd.DataFrame:
    """Packed rows with what follows from their time stamps: the definitions are load.summary's."""
    if rows.empty:
        return rows
    begin, nan = rows["sent_s"], float("nan")
    begin = rows["scheduled_s"].fillna(begin) if "scheduled_s" in rows else begin
    later = rows["output_tokens"] - rows["first_event_tokens"]
    tpot_s = (rows["last_s"] - rows["first_s"]) / later.where(later > 0, nan)
    return rows.assign(ttft_s=rows["first_s"] - begin, tpot_s=tpot_s, e2e_s=rows["last_s"] - begin)


def _packed(path: Path, *place: str) -> pd.DataFrame:
    """One point's part of a packed table, its whole numbers as pandas reads them from text."""
    import pandas as pd

    try:
        found = pd.read_parquet(path, filters=[(k, "==", v) for k, v in zip(PLACE, place, strict=True)])
    except (OSError, ValueError) as error:
        raise ServebookError(
            f"cannot be read ({error})", str(path), "Restore it: all rows of the run are in it"
        ) from None
    found = found.drop(columns=list(PLACE))
    return found.astype({c: "float64" for c in found if pd.api.types.is_numeric_dtype(found[c]) and c != "ok"})


def _natural(name: str) -> list[Any]:
    return [float(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]
