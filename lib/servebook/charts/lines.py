"""What every sweep figure shares: measured solid, predicted dashed with its band, labels at line ends, ratio panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..scoring import score
from . import words
from .style import LIGHT, EngineStyle, FigureText, engine_order, engine_styles, place_last, tip


@dataclass(frozen=True)
class ChartMetric:
    """One y quantity: the predicted metric's name, the axis label, its unit, and the measured interval's columns."""

    name: str  # as in predictions and score.MEASURED
    label: str
    unit: str
    short: str = ""

    @property
    def in_words(self) -> str:
        return self.short or self.label


TTFT = ChartMetric("ttft_s", "TTFT, mean", "s", "TTFT")
TPOT = ChartMetric("tpot_s", "TPOT, mean", "s", "TPOT")
E2E = ChartMetric("e2e_s", "Latency, mean", "s", "request latency")
DECODE = ChartMetric("decode_tok_per_s", "Decode throughput (tok/s)", "tok/s", "decode throughput")
OUTPUT = ChartMetric("output_tok_per_s", "Output rate (tok/s)", "tok/s", "output rate")


@dataclass(frozen=True)
class Data:
    """A sweep's points and predictions, and the engines of the whole run (so that colours never change)."""

    points: pd.DataFrame
    measured: pd.DataFrame  # long, see score.measured_frame
    predicted: pd.DataFrame  # long, each engine's best stage
    engines: list[str]  # of this sweep
    styles: dict[str, EngineStyle]
    others: pd.DataFrame | None = None  # somebody else's predictions: engine, concurrency, metric, predicted

    def curve(self, engine: str, metric: str, x: str) -> pd.DataFrame:
        rows = self.measured[(self.measured["engine"] == engine) & (self.measured["metric"] == metric)]
        return rows[rows["verdict"] != "invalid"].dropna(subset=[x, "measured"]).sort_values(x)

    def forecast(self, engine: str, metric: str, x: str) -> pd.DataFrame:
        rows = self.predicted[(self.predicted["engine"] == engine) & (self.predicted["metric"] == metric)]
        return rows.dropna(subset=[x, "predicted"]).sort_values(x)

    def of_others(self, engine: str, metric: str, x: str) -> pd.DataFrame:
        """Predictions of other tools or authors, for the points of this sweep that they cover."""
        if self.others is None or x not in self.others:
            return pd.DataFrame()
        rows = self.others[(self.others["engine"] == engine) & (self.others["metric"] == metric)]
        return rows[rows[x] <= max(self.xs(x), default=0.0)].sort_values(x)

    def failed(self, engine: str, x: str) -> list[float]:
        rows = self.points[(self.points["engine"] == engine) & (self.points["verdict"] == "invalid")]
        return sorted(rows[x].dropna())

    def xs(self, x: str) -> list[float]:
        return sorted({*self.points[x].dropna(), *self.predicted[x].dropna()})


def gather(points: Any, predictions: Any, sweep: str | None, stage: str | None = None, others: Any = None) -> Data:
    """The sweep's rows of `points` and of each engine's best (or the given) prediction stage.

    others: somebody else's predictions of points, rows of sweep, engine, concurrency, metric, predicted."""
    frame = score.complete_frame(points)
    forecast = score.prediction_frame(predictions if predictions is not None else [])
    order = [*dict.fromkeys([*frame["engine"].dropna(), *forecast["engine"].dropna()])]
    order.sort(key=engine_order)
    styles = engine_styles(order)
    if sweep is not None:
        frame, forecast = frame[frame["sweep"] == sweep], forecast[forecast["sweep"] == sweep]
    best = {e: stage or score.best_stage(forecast, e) for e in order}
    forecast = forecast[forecast["stage"] == forecast["engine"].map(best)]
    here = {*frame["engine"].dropna(), *forecast["engine"].dropna()}
    measured = score.measured_frame(frame) if len(frame) else score.measured_frame([])
    others_here = pd.DataFrame(others) if others else None
    if others_here is not None:
        others_here = others_here[others_here["sweep"] == sweep]
    return Data(frame, measured, forecast, [e for e in order if e in here], styles, others_here)


def workload(data: Data) -> str:
    """The lengths of a sweep's requests, in the form used after a title."""
    rows = data.points if len(data.points) else data.predicted
    tokens = [sorted(rows[c].dropna().unique()) for c in ("prompt_tokens", "output_tokens")]
    if all(len(t) == 1 for t in tokens):
        return f" ({tokens[0][0]:,.0f} in, {tokens[1][0]:,.0f} out)"
    return f" ({tokens[1][0]:,.0f} out)" if len(tokens[1]) == 1 else ""


def empty(figure: Figure, ax: Axes, id: str, title: str) -> Figure:
    """A figure for a sweep without points, with a text that says so."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, "No point of this sweep was measured or predicted", ha="center", transform=ax.transAxes)
    text = "Nothing to draw: no point of this sweep was measured or predicted."
    figure.servebook = FigureText(id, title, text, text)  # type: ignore[attr-defined]
    return figure


class LineEnd(NamedTuple):
    """Where an engine's line ends, and the label to write there."""

    engine: str
    label: str
    x: float
    y: float


def draw(ax: Axes, below: Axes | None, data: Data, metric: ChartMetric, x: str) -> list[LineEnd]:
    """Draw one metric of every engine and the ratio panel; returns the lines' ends, to be labelled."""
    ends = []
    for engine in data.engines:
        look = data.styles[engine]
        seen, forecast = data.curve(engine, metric.name, x), data.forecast(engine, metric.name, x)
        if len(forecast):
            ax.plot(
                forecast[x], forecast["predicted"], color=look.colour, linestyle=(0, (4, 2)), linewidth=1.4, zorder=2
            )
            band = forecast.dropna(subset=["low", "high"])
            if len(band):
                ax.fill_between(
                    band[x], band["low"], band["high"], color=look.colour, alpha=0.13, linewidth=0, zorder=1
                )
        theirs = data.of_others(engine, metric.name, x)
        if len(theirs):
            ax.plot(theirs[x], theirs["predicted"], color=look.colour, linestyle=(0, (1, 2)), linewidth=1.4, zorder=2)
        if len(seen):
            xs, ys = _broken(seen[x], seen["measured"], data.failed(engine, x))
            ax.plot(xs, ys, color=look.colour, zorder=3)
            marks(ax, seen, x, "measured", look)
            _tips(ax, seen, forecast, engine, metric, x)
            interval(ax, seen[x], seen["measured"], seen["measured_low"], seen["measured_high"], look.colour)
            # the end of its last line
            far, column = (
                (forecast, "predicted") if len(forecast) and forecast[x].max() > seen[x].max() else (seen, "measured")
            )
            ends.append(LineEnd(engine, engine, float(far[x].iloc[-1]), float(far[column].iloc[-1])))
        elif len(forecast):
            at = float(forecast[x].iloc[-1]), float(forecast["predicted"].iloc[-1])
            ends.append(LineEnd(engine, f"{engine} (predicted)", *at))
        for value in data.failed(engine, x):
            ax.plot(
                value, 0, "x", color=look.colour, transform=ax.get_xaxis_transform(), markersize=8, markeredgewidth=2,
                zorder=6, clip_on=False,
            )  # fmt: skip
        if below is not None and len(seen) and len(forecast):
            _ratio(below, seen, forecast, x, look)
    return ends


AT = {"concurrency": "C = {}", "prompt_tokens": "{} prompt tokens", "rate_per_s": "{} requests/s"}


def _tips(ax: Axes, seen: pd.DataFrame, predicted: pd.DataFrame, engine: str, metric: ChartMetric, x: str) -> None:
    """What the reader sees of a point when the pointer rests on it."""
    forecast = dict(zip(predicted[x], predicted["predicted"], strict=True))
    for _, row in seen.iterrows():
        at = AT.get(x, "{}").format(words.label(row[x]))
        text = f"{engine}, {at}: {metric.in_words} {words.quantity(row['measured'], metric.unit)} measured"
        if row[x] in forecast:
            text += f", {words.quantity(forecast[row[x]], metric.unit)} predicted"
        text += ", doubted by the audit" if row["verdict"] == "suspect" else ""
        tip(ax, row[x], row["measured"], text)


def _broken(x: Any, y: Any, failed: Sequence[float]) -> tuple[list[float], list[float]]:
    # no line across a point that failed: nothing is known there
    pairs = sorted([*zip(x, y, strict=True), *((f, np.nan) for f in failed)])
    return [p[0] for p in pairs], [p[1] for p in pairs]


def marks(ax: Axes, rows: pd.DataFrame, x: str, y: str, look: EngineStyle) -> None:
    """Filled markers, hollow where the audit calls the point suspect."""
    for suspect, group in rows.groupby(rows["verdict"] == "suspect"):
        fill = LIGHT["paper"] if suspect else look.colour
        ax.plot(group[x], group[y], look.marker, color=look.colour, markerfacecolor=fill, zorder=4)


def interval(ax: Axes, x: Any, y: Any, low: Any, high: Any, colour: str) -> None:
    known = np.isfinite(low) & np.isfinite(high)
    if known.any():
        x, y, low, high = (np.asarray(v, dtype=float)[known] for v in (x, y, low, high))
        # a mean can lie outside a bootstrap interval by rounding
        ax.vlines(x, np.minimum(low, y), np.maximum(high, y), color=colour, linewidth=1.3, zorder=3)


def _ratio(below: Axes, seen: pd.DataFrame, predicted: pd.DataFrame, x: str, look: EngineStyle) -> None:
    rows = seen.merge(predicted[[x, "predicted"]], on=x)
    rows = rows[rows["predicted"] > 0]
    if rows.empty:
        return
    rows = rows.assign(**{f"r_{c}": rows["predicted"] / rows[c] for c in ("measured", "measured_low", "measured_high")})
    below.plot(rows[x], rows["r_measured"], color=look.colour, linewidth=1.2, zorder=3)
    marks(below, rows, x, "r_measured", look)
    interval(below, rows[x], rows["r_measured"], rows["r_measured_low"], rows["r_measured_high"], look.colour)


def finish_ratio(below: Axes | None, x_label: str, ax: Axes) -> None:
    """Scale and label the ratio panel, or the only panel's x axis."""
    if below is None:
        ax.set_xlabel(x_label)
        return
    below.axhspan(1 - score.HIT, 1 + score.HIT, color=LIGHT["band"], zorder=0)
    below.axhline(1, color=LIGHT["muted"], linewidth=0.9, zorder=1)
    values = [v for line in below.lines for v in np.asarray(line.get_ydata(), dtype=float) if np.isfinite(v) and v > 0]
    reach = max([1.28, *(max(v, 1 / v) * 1.12 for v in values)])
    below.set_yscale("log")
    below.set_ylim(1 / reach, reach)
    wide = [0.01, 0.1, 1, 10, 100] if reach > 6 else [0.2, 0.5, 1, 2, 5]
    choices = wide if reach > 2.4 else [0.5, 0.7, 1, 1.4, 2] if reach > 1.5 else [0.8, 1, 1.25]
    below.yaxis.set_major_locator(FixedLocator([c for c in choices if 1 / reach < c < reach]))
    below.yaxis.set_minor_locator(NullLocator())
    below.yaxis.set_major_formatter(FuncFormatter(lambda v, _: words.number(v)))
    below.set_ylabel("pred. ÷\nmeas.")
    below.set_xlabel(x_label)


def label_ends(ax: Axes, ends: Sequence[LineEnd], data: Data, gap_pt: float = 11.5) -> None:
    """Write names to the right of the lines' ends, moved apart if they would overlap. Call after setting the
    scales."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    # where a line goes on as a prediction, its name stands above it
    last = max((float(np.nanmax(np.asarray(line.get_xdata(), dtype=float))) for line in ax.lines), default=0.0)
    names = [
        ax.annotate(
            end.label, (end.x, end.y), (9, 0 if end.x == last else 8), textcoords="offset points", va="center",
            ha="left", color=data.styles[end.engine].colour, fontweight="bold", annotation_clip=False,
        )
        for end in ends
    ]  # fmt: skip

    def push_apart() -> None:
        to_points = 72 / figure.dpi
        places = [ax.transData.transform((end.x, end.y)) * to_points for end in ends]
        heights = [float(place[1]) + name.xyann[1] for place, name in zip(places, names, strict=True)]
        for _ in range(50):
            for i in range(len(ends)):
                for j in range(i + 1, len(ends)):
                    near = abs(places[i][0] - places[j][0]) < 60
                    if near and (short := gap_pt - abs(heights[i] - heights[j])) > 1e-6:
                        up, down = (i, j) if places[i][1] >= places[j][1] else (j, i)
                        heights[up] += short / 2
                        heights[down] -= short / 2
        for name, place, height in zip(names, places, heights, strict=True):
            name.xyann = (9, height - float(place[1]))

    place_last(figure, push_apart)


LONGEST_END = 10  # characters of a name that still fit right of a curve's end


def long_names(data: Data) -> bool:
    """Whether the curves' names are too long for labels at the lines' ends."""
    return max((len(name) for name in data.engines), default=0) > LONGEST_END


def key(ax: Axes, data: Data, narrow: bool, extra: Sequence[Any] = (), band: bool = True) -> None:
    """One short legend above the first panel: the meaning of solid, dashed, band, hollow and × in this figure, and
    the curves' names if they are too long for labels."""
    ink = LIGHT["muted"]
    entries: list[Any] = []
    if len(data.measured):
        entries.append(Line2D([], [], color=ink, marker="o", markersize=5, label="measured"))
    if len(data.predicted):
        entries.append(Line2D([], [], color=ink, linestyle=(0, (4, 2)), linewidth=1.4, label="predicted"))
        if band and data.predicted["low"].notna().any():
            entries.append(Patch(color=ink, alpha=0.2, linewidth=0, label="80 % interval"))
    if data.others is not None and len(data.others):
        entries.append(Line2D([], [], color=ink, linestyle=(0, (1, 2)), linewidth=1.4, label="the author's prediction"))
    if (data.points["verdict"] == "suspect").any():
        hollow: dict[str, Any] = {
            "marker": "o",
            "markerfacecolor": LIGHT["paper"],
            "linestyle": "none",
            "markersize": 5,
        }
        entries.append(Line2D([], [], color=ink, label="doubted", **hollow))
    if (data.points["verdict"] == "invalid").any():
        entries.append(Line2D([], [], color=ink, marker="x", markeredgewidth=2, linestyle="none", label="failed"))
    entries += extra
    if long := long_names(data):
        entries += [
            Line2D([], [], color=look.colour, marker=look.marker, markersize=5, label=name)
            for name, look in data.styles.items() if name in data.engines
        ]  # fmt: skip
    if entries:
        figure = ax.figure
        columns = (1 if long else 2) if narrow else 3 if long else len(entries)
        figure.legend(
            handles=entries, loc="outside upper left", ncols=columns, handlelength=1.9, columnspacing=1.4, borderpad=0
        )
