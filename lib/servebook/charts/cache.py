"""The prefix-cache figure: fresh prompts, prompts sent before, caching off."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from .. import analysis, score
from . import lines, sweeps, words
from .lines import OUTPUT, TTFT
from .style import Canvas, chart, text_of


@chart
def prefix_cache(canvas: Canvas, points: Any, sweep: str) -> Figure:
    """Concurrency against TTFT and output tokens/s, a curve an engine and kind of prompts."""
    frame = score.points_frame(points)
    frame = frame[(frame["sweep"] == sweep) & (frame["requests"] > 0)].copy()
    same = frame["point"].str.startswith("same-")
    # the audit keeps these points out of every other figure; here they are the subject, drawn hollow
    frame.loc[same & (frame["verdict"] == "invalid"), "verdict"] = "suspect"
    caching = frame["engine"].isin(frame["engine"][same])
    frame["engine"] += same.map({True: ", same", False: ", fresh"}).where(caching, "")
    data = lines.gather(frame, None, sweep)
    title = "Concurrency against TTFT and output rate, fresh prompts and repeated ones"
    figure = sweeps._curves(
        canvas, data, [TTFT, OUTPUT], *sweeps.CONCURRENCY, f"prefix-cache-{sweep}", title, log=False
    )
    table = analysis.prefix_cache(points, sweep).dropna(subset=["ttft_ratio"])
    if len(table):
        text_of(figure).takeaway = _flattery(table.loc[table["output_ratio"].idxmax()])
    return figure


def _flattery(row: Any) -> str:
    hit, ttft = row["cache_hit_share_same"], words.number(row["ttft_ratio"])
    text = f"Where repeated prompts flatter {row['engine']} most, at C = {row['concurrency']:.0f}, they show "
    text += f"{words.number(row['output_ratio'])} times the output rate and {ttft} times the TTFT of fresh ones"
    return text + (f"; {words.percent(hit)} of their tokens came from the cache." if hit == hit else ".")
