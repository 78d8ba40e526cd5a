"""card.png, 1200 × 630: the picture that a link to the page shows."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ..charts import lines, words
from ..charts.style import LIGHT, plain_log, theme, y_axis
from ..common import files
from ..run_folder import frozen_predictions, results, stored_params
from ..run_folder.layout import RunFiles
from ..scoring import score


def write_card(run_dir: Path | str) -> Path:
    """Write `card.png` into the run's folder from its points and predictions, and return its path."""
    run_dir = Path(run_dir)
    figure = card(results.read_points(run_dir), frozen_predictions.read(run_dir), stored_params.read(run_dir))
    path = RunFiles(run_dir).card
    with files.writing(path) as scratch, theme():
        figure.savefig(scratch, format="png", dpi=100, metadata={"Software": None})
    return path


def card(points: Any, predictions: Any, run: dict[str, Any]) -> Any:
    """The run's title, its best figures and its main curve, predicted and measured, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    frame = score.complete_frame(points)
    frame = frame[(frame["verdict"] != "invalid") & (frame["sweep"] != "calibration")]
    with theme():
        figure = Figure(figsize=(12, 6.3))
        title = textwrap.fill(str(run.get("title") or run.get("run") or "LLM serving"), 21)
        figure.text(0.05, 0.9, title, fontsize=29, fontweight="bold", va="top", linespacing=1.15)
        scores = score.held_out_of_run(points, predictions, run)
        final = score.final(scores) if len(scores) else scores
        rates = frame.dropna(subset=["output_tok_per_s"])
        left = []
        if len(rates):
            best = rates.loc[rates["output_tok_per_s"].idxmax()]
            left.append((f"{words.number(best['output_tok_per_s'])} tok/s", f"{best['engine']}'s peak"))
        if len(final):
            left.append(
                (words.percent(final["error_share"].abs().mean()), f"mean error of {len(final)} frozen predictions")
            )
        for k, (big, small) in enumerate(left):
            figure.text(0.05, 0.36 - 0.17 * k, big, fontsize=30, fontweight="bold", color=LIGHT["e1"])
            figure.text(0.05, 0.315 - 0.17 * k, small, fontsize=15, color=LIGHT["muted"])
        figure.text(0.05, 0.045, "predicted (dashed), then measured (solid)", fontsize=13, color=LIGHT["muted"])
        sweeps = rates[rates["concurrency"].notna()].groupby("sweep")["concurrency"].nunique()
        if len(sweeps):
            _curve(figure, points, predictions, str(sweeps.idxmax()))
    return figure


def _curve(figure: Any, points: Any, predictions: Any, sweep: str) -> None:
    from matplotlib import rc_context

    with rc_context({"font.size": 15, "axes.labelsize": 15, "xtick.labelsize": 14, "ytick.labelsize": 14}):
        ax = figure.add_axes((0.56, 0.16, 0.36, 0.72))
        data = lines.gather(points, predictions, sweep)
        ends = lines.draw(ax, None, data, lines.DECODE, "concurrency")
        ax.set_ylim(bottom=0)
        y_axis(ax, "Decode tok/s", "", log=False)
        plain_log(ax.xaxis, data.xs("concurrency"), room=9)
        ax.set_xlabel("Concurrency")
        lines.label_ends(ax, ends, data, gap_pt=18)
