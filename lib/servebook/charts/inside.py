"""Figures of a single point: TTFT and TPOT over requests, and the server's own metrics over time."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from . import words
from .style import LIGHT, Canvas, FigureText, chart, engine_order, engine_styles, y_axis

SERIES = {
    "running": ("Requests", "running"),
    "waiting": ("Requests", "waiting"),
    "kv_usage": ("KV used, %", "KV cache"),
    "prompt_tok_per_s": ("Prompt tok/s", "prompt"),
    "generation_tok_per_s": ("Output tok/s", "generation"),
}


@chart
def distributions(
    canvas: Canvas,
    requests: pd.DataFrame | Iterable[Mapping[str, Any]],
    sweep: str,
) -> Figure:
    """TTFT and TPOT of the measured requests, one box (quartiles, whiskers p5 to p95) a point and engine.

    requests: rows with engine, sweep, concurrency, ok, phase, ttft_s, tpot_s.
    """
    import seaborn as sns  # 1.5 s to import, and only this figure needs it

    frame = pd.DataFrame(requests) if not isinstance(requests, pd.DataFrame) else requests
    if len(frame):
        frame = frame[(frame["sweep"] == sweep) & frame["ok"].astype(bool) & (frame["phase"] == "measured")]
    title = "How TTFT and TPOT spread over requests"
    figure, pairs = canvas.panels(2, height=3.0)
    if frame.empty:
        for ax, _ in pairs:
            ax.set_axis_off()
        text = "Nothing to draw: no measured request in this sweep."
        figure.servebook = FigureText(f"distributions-{sweep}", title, text, text)  # type: ignore[attr-defined]
        return figure
    engines = sorted(frame["engine"].unique(), key=engine_order)
    styles = engine_styles(engines)
    order = sorted(frame["concurrency"].dropna().unique())
    found, alt = [], []
    for (ax, _), (column, label) in zip(pairs, (("ttft_s", "TTFT"), ("tpot_s", "TPOT")), strict=True):
        rows = frame.dropna(subset=[column])
        rows = rows[rows[column] > 0]
        if len(rows):
            look = {"order": order, "hue_order": engines, "palette": [styles[e].colour for e in engines]}
            with warnings.catch_warnings():  # seaborn 0.13 passes an argument that matplotlib 3.11 deprecates
                warnings.simplefilter("ignore", mpl.MatplotlibDeprecationWarning)
                sns.boxplot(
                    rows, x="concurrency", y=column, hue="engine", ax=ax, legend=False, whis=(5, 95), showfliers=False,
                    width=0.7, linewidth=0.9, fill=False, gap=0.15, **look,
                )  # fmt: skip
            y_axis(ax, label, "s", log=True)
        ax.set_xlabel("Concurrency, requests in flight")
        ax.set_xticks(range(len(order)), [words.number(v) for v in order])
        ax.grid(axis="x", visible=False)
        own_found, own_alt = _spread_words(rows, engines, column, label)
        found += own_found
        alt += own_alt
    handles = [_swatch(styles[e].colour, e) for e in engines]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(engines), borderpad=0)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        f"distributions-{sweep}", title, words.sentence(found), f"Box plots. {' '.join(alt)}",
        f"n = {len(frame):,} requests; box: quartiles, whiskers: p5 to p95.",
    )  # fmt: skip
    return figure


def _spread_words(rows: pd.DataFrame, engines: Sequence[str], column: str, label: str) -> tuple[list[str], list[str]]:
    """(clauses of the takeaway, sentences of the text alternative) on one latency."""
    found, alt = [], []
    for engine in engines:
        own = rows[rows["engine"] == engine]
        if own.empty:
            continue
        spread = own.groupby("concurrency")[column].quantile([0.5, 0.95]).unstack()
        widest = (spread[0.95] / spread[0.5]).idxmax()
        p50, p95 = spread.loc[widest, 0.5], spread.loc[widest, 0.95]
        found.append(
            f"{engine}'s {label} spreads most at C = {words.number(widest)}: p95 {words.seconds(p95)} "
            f"against a median of {words.seconds(p50)}"
        )
        alt.append(f"{engine} {label}, median and p95: " + "; ".join(
            f"C = {words.number(v)}: {words.seconds(r[0.5])}, {words.seconds(r[0.95])}"
            for v, r in spread.iterrows()) + ".")  # fmt: skip
    return found, alt


def _swatch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor="none", edgecolor=colour, linewidth=1.5, label=label)


def _rates(frame: pd.DataFrame) -> pd.DataFrame:
    """A stored series with counters turned into rates between scrapes; other columns under this module's names."""
    frame = frame.rename(columns={"t_s": "time_s", "kv_cache_usage": "kv_usage"})
    if "time_s" not in frame:
        return frame
    frame = frame.sort_values("time_s")
    passed = frame["time_s"].diff()
    for counter, rate in (("prompt_tokens", "prompt_tok_per_s"), ("generation_tokens", "generation_tok_per_s")):
        if counter in frame and rate not in frame:
            grown = frame[counter].diff()
            frame[rate] = (grown / passed).where((passed > 0) & (grown >= 0))  # a restart sets a counter back
    return frame


@chart
def server_series(
    canvas: Canvas,
    series: pd.DataFrame | Iterable[Mapping[str, Any]],
    *,
    engine: str = "vllm",
    point: str = "",
) -> Figure:
    """The server's own counters over time: running and waiting requests, KV use, prompt and generation rates.

    series: rows of time_s and any of running, waiting, kv_usage (share), prompt_tok_per_s, generation_tok_per_s; or
    a stored series (results.series_frame: t_s, kv_cache_usage and token counters), whose rates are taken here.
    """
    frame = _rates(pd.DataFrame(series) if not isinstance(series, pd.DataFrame) else series)
    frame = frame.dropna(subset=["time_s"]).sort_values("time_s") if len(frame) else frame
    known = [c for c in SERIES if c in frame and frame[c].notna().any()]
    panels = [*dict.fromkeys(SERIES[c][0] for c in known)]
    id = f"series-{engine}{'-' + point if point else ''}"
    where = f" ({engine}{', ' + point if point else ''})"
    title = f"The server's own counters over time{where}"
    figure, pairs = canvas.panels(max(1, len(panels)), height=1.05, stack=True)
    if not known:
        pairs[0][0].set_axis_off()
        text = "The server reported no metrics for this point."
        figure.servebook = FigureText(id, title, text, text)  # type: ignore[attr-defined]
        return figure
    look = engine_styles([engine])[engine]
    alt = []
    for (ax, _), panel in zip(pairs, panels, strict=True):
        columns = [c for c in known if SERIES[c][0] == panel]
        for column, colour in zip(columns, (look.colour, LIGHT["muted"]), strict=False):
            values = frame[column] * (100 if column == "kv_usage" else 1)
            ax.plot(frame["time_s"], values, color=colour, linewidth=1.3, label=SERIES[column][1], rasterized=False)
            low, mid, high = values.min(), values.median(), values.max()
            alt.append(f"{SERIES[column][1]}: {words.number(low)} to {words.number(high)}, median {words.number(mid)}")
        if len(columns) > 1:
            ax.legend(loc="upper right", ncols=2, borderpad=0.1, labelcolor="linecolor", handlelength=1)
            ax.set_ylim(top=ax.get_ylim()[1] * 1.45)
        ax.set_ylim(bottom=0)
        y_axis(ax, panel, "", log=False)
        ax.set_xlim(frame["time_s"].min(), frame["time_s"].max())  # one time axis: rates begin a scrape later
        ax.tick_params(labelbottom=panel == panels[-1], bottom=True, length=3)
    pairs[-1][0].set_xlabel("Time since the point began (s)")
    found = _series_findings(frame, known)
    takeaway = words.sentence(found)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        id, title, takeaway[:1].upper() + takeaway[1:], f"Time series. {'; '.join(alt)}.",
        f"{len(frame):,} scrapes of the server's /metrics.",
    )  # fmt: skip
    return figure


def _series_findings(frame: pd.DataFrame, known: Sequence[str]) -> list[str]:
    """What the server's counters show, as clauses."""
    found = []
    if {"prompt_tok_per_s", "generation_tok_per_s"} <= set(known):
        flood = frame["prompt_tok_per_s"] > frame["prompt_tok_per_s"].quantile(0.75)
        rest = frame["prompt_tok_per_s"] <= frame["prompt_tok_per_s"].quantile(0.25)
        inside, outside = (frame.loc[m, "generation_tok_per_s"].mean() for m in (flood, rest))
        if np.isfinite(inside) and np.isfinite(outside) and outside > 0:
            found.append(
                f"output {'drops' if inside < outside else 'goes'} from {words.number(outside)} to "
                f"{words.number(inside)} tok/s when prompt intake is highest (lower against upper quarter of the "
                "prompt rate)"
            )
    if "waiting" in known:
        found.append(f"the server counted at most {words.number(frame['waiting'].max())} requests as waiting")
    if "kv_usage" in known:
        found.append(f"KV cache use peaked at {words.percent(frame['kv_usage'].max())}")
    return found
