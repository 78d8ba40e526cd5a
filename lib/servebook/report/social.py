"""social.md: the run as a short post, every figure from the run's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..charts import words
from ..common import files
from ..run_folder import frozen_predictions, results, stored_params
from ..run_folder.layout import RunFiles
from ..scoring import analysis, score
from .markup import METRIC_NAMES, place, unit_of, where


def write_social(run_dir: Path | str) -> Path:
    """Write `social.md` and `card.png`, its picture, into the run's folder, and return social.md's path."""
    from .card import write_card

    run_dir = Path(run_dir)
    text = social(results.read_points(run_dir), frozen_predictions.read(run_dir), stored_params.read(run_dir))
    path = files.write_text(RunFiles(run_dir).social, text)
    write_card(run_dir)
    return path


def social(points: Any, predictions: Any, run: dict[str, Any]) -> str:
    """The post's text: what was predicted and measured, the gap, the largest miss, the limits."""
    frame = score.complete_frame(points)
    frame = frame[(frame["verdict"] != "invalid") & (frame["sweep"] != "calibration")]
    frame = frame[frame["output_tok_per_s"].notna()]
    scores = score.held_out_of_run(points, predictions, run)
    lines = [f"# {run.get('title') or run.get('run') or 'An LLM serving run'}", ""]
    if frame.empty:
        return "\n".join([*lines, "Nothing was measured in this run.", ""])
    lines += ["I wrote the predictions down before the first request was sent. Then I measured.", ""]
    lines += _rates(frame, run)
    final = score.final(scores) if len(scores) else scores
    if len(final):
        hits, total = int((final["verdict"] == "hit").sum()), len(final)
        off = words.percent(final["error_share"].abs().mean())
        lines += ["", f"{hits} of {total} predictions came within {words.percent(score.HIT)}; the mean error is {off}."]
        worst = score.largest_misses(scores, 1).iloc[0]
        unit, name = unit_of(worst["metric"]), METRIC_NAMES.get(worst["metric"], worst["metric"])
        lines.append(
            f"The largest miss: {name} of {worst['engine']}, {worst['sweep']} at {place(worst)}, predicted "
            f"{words.quantity(worst['predicted'], unit)}, measured {words.quantity(worst['measured'], unit)} "
            f"(regime: {worst['regime']})."
        )
    if (run.get("model") or {}).get("weights") == "dummy":
        lines += ["", "Random weights and random prompts: the times are real, the text is not."]
    lines += ["", "The page holds every point, every interval and the data: report.html", ""]
    return "\n".join(lines)


def _rates(frame: Any, run: dict[str, Any]) -> list[str]:
    """The best output rate, and the engines side by side at the load with the largest gap that both measured."""
    best = frame.loc[frame["output_tok_per_s"].idxmax()]
    span = ""
    if best["output_tok_per_s_ci_low"] > 0:
        low, high = (words.number(best[f"output_tok_per_s_ci_{end}"]) for end in ("low", "high"))
        span = f" (95 % interval {low} to {high})"
    lines = [
        f"{best['engine']}: at best {words.number(best['output_tok_per_s'])} output tok/s{span} at {where(best)}; TTFT "
        f"{words.seconds(best['ttft_mean_s'])}, TPOT {words.seconds(best['tpot_mean_s'])}."
    ]
    batching = {name: engine.get("kind") != "naive" for name, engine in (run.get("engines") or {}).items()}
    gaps = [
        (serial, other, analysis.engine_gap(frame, serial, other))
        for serial in batching for other in batching if batching[other] and not batching[serial]
    ]  # fmt: skip
    for serial, other, gap in gaps:
        if gap.empty:
            continue
        row = gap.loc[gap["output_ratio"].idxmax()]
        own = frame[(frame["sweep"] == row["sweep"]) & (frame["concurrency"] == row["concurrency"])].set_index("engine")
        rates = own["output_tok_per_s"]
        lines += [
            "",
            f"At the same load, {where(own.loc[other])}: {other} {words.number(rates[other])} output tok/s, {serial} "
            f"{words.number(rates[serial])}, {words.factor(row['output_ratio'])}. {_mechanism(row, other, serial)}",
        ]
    return lines


def _mechanism(row: Any, other: str, serial: str) -> str:
    step, batch = row["step_ratio"], row["batch_ratio"]
    if batch >= step:
        return (
            f"Most of it is batching: a step of {other} reads the weights once for {words.factor(batch)} as many "
            f"requests; {serial} serves one at a time."
        )
    return f"Most of it is the step itself: it takes {serial} {words.factor(step)} as long, host work included."
