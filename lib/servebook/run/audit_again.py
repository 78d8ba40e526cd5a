"""Applies the current audit rules to a stored run: intervals, decode rate and verdicts, from the run's own rows.

Other measured figures (means, rates, counts) stay unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.measured_point import MeasuredPoint
from ..run_folder import results
from ..run_folder.lock_and_signals import single_run
from ..scoring.audit import judge
from .book import Book

if TYPE_CHECKING:
    import pandas as pd


def audit_run(run_dir: Path) -> tuple[int, list[str]]:
    """Recompute intervals, drift and verdict of every point of the run: the number of points, and a line for each
    change.

    Raises ServebookError if no run is stored, or another process writes to it.
    """
    book = Book.at(Path(run_dir))
    with single_run(book.dir):
        return _reaudit(book)


# fields whose definitions have changed between versions
RECOMPUTED = (
    "converged", "ttft_ci_low_s", "ttft_ci_high_s", "tpot_ci_low_s", "tpot_ci_high_s", "e2e_ci_low_s", "e2e_ci_high_s",
    "ttft_p99_ci_low_s", "ttft_p99_ci_high_s", "ttft_drift", "tpot_drift",
)  # fmt: skip


def _reaudit(book: Book) -> tuple[int, list[str]]:
    from ..load.summary import fill_latencies

    judged, changed = 0, []
    specs = {(s.sweep, s.engine, s.point): s for s in book.all_specs()}
    for point in book.stored_points():
        if (spec := specs.get(point.key)) is None:  # not in the run's parameters
            continue
        rows = results.rows_frame(book.dir, **point.place)
        rows = rows[(rows["phase"] == "measured") & rows["ok"].astype(bool)].sort_values("end_s", kind="stable")
        ttft_s, tpot_s, e2e_s = (rows[f"{k}_s"].dropna().to_numpy(float) for k in ("ttft", "tpot", "e2e"))
        per_round = (spec.concurrency or 1) if spec.rate_per_s is None else 1
        figures = fill_latencies(point, ttft_s, tpot_s, e2e_s, per_round)
        changes: dict[str, Any] = {name: getattr(figures, name) for name in RECOMPUTED}
        if (
            point.running_mean is None
            and book.batching(spec.engine)
            and (rate := _decode_rate(book.dir, point, rows)) is not None
        ):
            changes["decode_tok_per_s"] = rate
        again = replace(point, **changes)
        judged += 1
        verdict, reasons = judge(again, spec, book.floors(spec))
        results.write_point(book.dir, replace(again, verdict=verdict, reasons=reasons))
        if verdict != point.verdict:
            why = "; ".join(r.text for r in reasons) or "nothing against it"
            changed.append(f"{' '.join(point.key)}: {point.verdict} → {verdict} ({why})")
    results.write_points_csv(book.dir)
    return judged, changed


def _decode_rate(run_dir: Path, point: MeasuredPoint, rows: pd.DataFrame) -> float | None:
    """The decode rate by load.summary's current rule, for points of earlier versions, which capped it by the gauge's
    mean. None if the server does not report running requests."""
    from ..load.flow import side_by_side
    from ..load.summary import running_of, waiting_of

    series = results.series_frame(run_dir, **point.place)
    wall, tpot_s = point.decode_wall_tok_per_s, point.tpot_mean_s
    if "running" not in series or series["running"].isna().all() or not tpot_s or not wall:
        return None
    waiting = waiting_of(point.server_queue_mean_s, point.request_rate_per_s or 0.0, point.server_waiting_mean)
    decoding = side_by_side(rows["first_s"].to_numpy(float), rows["last_s"].to_numpy(float))
    running = running_of(point.in_flight_mean or 0.0, decoding, float(series["running"].max()), waiting)
    return float(max(running / tpot_s, wall))
