"""The one style of every figure: theme, colours, sizes, axes.

A figure is drawn twice, wide for the page and narrow for a phone, by the same function; `Canvas` arranges the panels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .words import label, number

# name: (light, dark). Engine colours keep 4.5:1 against the paper in both themes.
COLOURS = {
    "ink": ("#1c2024", "#e8e6e1"),
    "muted": ("#5b636b", "#a3abb3"),
    "grid": ("#e3e1dc", "#343a41"),
    "paper": ("#fffefc", "#1b1f24"),
    "band": ("#efece6", "#272d34"),
    "bad": ("#b3261e", "#ff8a80"),
    "e0": ("#b3500b", "#f2a25c"),
    "e1": ("#0a5fa8", "#6bb3f7"),
    "e2": ("#2b7a4b", "#79cf9b"),
    "e3": ("#7447a8", "#c2a3f0"),
    "e4": ("#a12f66", "#f088b3"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
# JupyterLab's own paper and ink, so that a figure lies in the page in both of its themes
LAB_COLOURS = {
    "paper": "--jp-layout-color0", "ink": "--jp-content-font-color1", "muted": "--jp-content-font-color2",
    "grid": "--jp-border-color2", "band": "--jp-layout-color2",
}  # fmt: skip
MARKERS = ("s", "o", "D", "^", "v")
WIDE_IN, NARROW_IN = 7.5, 3.6


def lab_palette(selector: str) -> str:
    """CSS that maps `selector`'s colours to JupyterLab's theme; the light palette outside Lab."""
    light = "".join(
        f"--{n}:var({LAB_COLOURS[n]},{c});" if n in LAB_COLOURS else f"--{n}:{c};" for n, c in LIGHT.items()
    )
    dark = "".join(f"--{n}:{dark};" for n, (_, dark) in COLOURS.items() if n not in LAB_COLOURS)
    return f'{selector}{{{light}}}[data-jp-theme-light="false"] {selector}{{{dark}}}'


@dataclass(frozen=True)
class EngineStyle:
    colour: str
    marker: str


@dataclass
class FigureText:
    """The texts of a figure. note: n and the meaning of the interval; narrow: the same figure for a phone."""

    id: str
    title: str
    takeaway: str
    alt: str
    note: str = ""
    narrow: Figure | None = field(default=None, repr=False)


@dataclass
class Canvas:
    """Gives a drawing function its axes, arranged for the width it is drawn at."""

    narrow: bool

    def panels(
        self, count: int = 1, *, ratio: bool = False, height: float = 3.1, stack: bool = False
    ) -> tuple[Figure, list[tuple[Axes, Axes | None]]]:
        """`count` panels side by side (stacked when narrow, or when `stack`), each with a ratio panel below it."""
        across = 1 if self.narrow or stack else count
        down = count // across if across == 1 else 1
        each = height + (0.85 if ratio else 0)
        figure = Figure(figsize=(NARROW_IN if self.narrow else WIDE_IN, each * down), layout="constrained")
        engine = figure.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        engine.set(w_pad=0.05, h_pad=0.05, hspace=0.03, wspace=0.06)
        rows = [height, 0.85] * down if ratio else [height] * down
        grid = figure.add_gridspec(len(rows), across, height_ratios=rows)
        pairs: list[tuple[Axes, Axes | None]] = []
        for i in range(count):
            row, column = (i, 0) if across == 1 else (0, i)
            if not ratio:
                pairs.append((figure.add_subplot(grid[row, column]), None))
                continue
            top = figure.add_subplot(grid[2 * row, column])
            pairs.append((top, figure.add_subplot(grid[2 * row + 1, column], sharex=top)))
            top.tick_params(labelbottom=False)
        return figure, pairs


@contextmanager
def theme() -> Iterator[None]:
    """This project's ink on plain ticks, for drawing and for saving."""
    rc: dict[Any, Any] = {
        "font.family": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.labelsize": 9.5,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.7,
        "grid.linestyle": "-",
        "lines.solid_capstyle": "round",
        "axes.edgecolor": LIGHT["muted"],
        "axes.linewidth": 0.8,
        "axes.facecolor": "none",
        "axes.labelcolor": LIGHT["ink"],
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"],
        "xtick.labelcolor": LIGHT["ink"],
        "ytick.labelcolor": LIGHT["ink"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "lines.linewidth": 2,
        "lines.markersize": 6,
        "figure.facecolor": LIGHT["paper"],
        "savefig.facecolor": LIGHT["paper"],
        "axes.prop_cycle": cycler(color=[LIGHT[f"e{i}"] for i in range(5)]),
        "svg.fonttype": "none",
        "svg.hashsalt": "servebook",
        "path.simplify": True,
    }
    with mpl.rc_context(rc):
        yield


def chart(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorator: `draw(canvas, …)` becomes a function that returns the wide figure, with the narrow one in its
    text."""

    @functools.wraps(draw)
    def build(*args: Any, **kwargs: Any) -> Figure:
        with theme():
            wide = _settled(draw(Canvas(narrow=False), *args, **kwargs))
            text_of(wide).narrow = _settled(draw(Canvas(narrow=True), *args, **kwargs))
        return wide

    return build


def at_width(build: Callable[..., Figure], *args: Any, narrow: bool, **kwargs: Any) -> Figure:
    """A chart at one width alone: half the time, for a screen that redraws while it is turned."""
    with theme():
        return _settled(build.__wrapped__(Canvas(narrow=narrow), *args, **kwargs))  # type: ignore[attr-defined]


def _settled(figure: Figure) -> Figure:
    # laying out takes most of a figure's time and moves the axes a little further each time: it is done once
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")
    for place in getattr(figure, "servebook_placed_last", ()):
        place()
    return figure


def place_last(figure: Figure, place: Callable[[], None]) -> None:
    """Call `place` when the axes have their final positions: now, or after a pending layout."""
    if figure.get_layout_engine() is None:
        place()
        return
    if not hasattr(figure, "servebook_placed_last"):
        figure.servebook_placed_last = []  # type: ignore[attr-defined]
    figure.servebook_placed_last.append(place)  # type: ignore[attr-defined]


def tip(ax: Any, x: float, y: float, text: str) -> None:
    """Words that show when the pointer rests on a place of a wide figure (a phone has no pointer)."""
    figure = ax.figure
    if figure.get_figwidth() < WIDE_IN:
        return
    if not hasattr(figure, "servebook_tips"):
        figure.servebook_tips = []
    figure.servebook_tips.append((ax, x, y, text))


def text_of(figure: Figure) -> FigureText:
    return cast(FigureText, figure.servebook)  # type: ignore[attr-defined]


FIXED_SLOTS = {"naive": 0, "hf": 0, "vllm": 1}


def engine_order(engine: str) -> tuple[int, str]:
    """Sort key: the naive server, then vLLM, then others by name."""
    return FIXED_SLOTS.get(engine, 2), engine


def engine_styles(engines: Sequence[str]) -> dict[str, EngineStyle]:
    """Colour and marker by engine name: naive and vllm always the same, others by their order in the run."""
    fixed = {e: slot for e, slot in FIXED_SLOTS.items() if e in engines}
    taken = set(fixed.values())
    free = [i for i in range(5) if i not in taken and i not in (0, 1)] + [i for i in (0, 1) if i not in taken]
    styles = {}
    for engine in engines:
        slot = fixed[engine] if engine in fixed else free.pop(0) if free else 4
        styles[engine] = EngineStyle(LIGHT[f"e{slot}"], MARKERS[slot])
    return styles


def plain_log(axis: Any, values: Sequence[float], room: int = 9) -> None:
    """A log axis that carries the values themselves as labels: 1, 2, 4, 8 and not powers of ten.

    room: how many labels of up to three characters fit; longer ones get less.
    """
    ticks = sorted(set(values))
    axis.axes.set(**{f"{axis.axis_name}scale": "log"}) if len(ticks) > 1 else None
    kept, span = ticks[-1:], math.log(ticks[-1] / ticks[0]) or 1.0 if ticks else 1.0
    for tick in ticks[-2::-1]:  # the largest value keeps its label, and each that does not touch the one kept before
        if math.log(kept[0] / tick) / span >= max(4, len(label(kept[0])) + 1) / 4 / room:
            kept.insert(0, tick)
    ticks = kept
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: label(v)))


# the values that a log axis may carry, from few to many: the first with three inside the limits is taken
LOG_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), tuple(1 + i / 5 for i in range(45)),
             tuple(1 + i / 20 for i in range(180)))  # fmt: skip
FEWEST_TICKS, MOST_TICKS = 3, 7


def log_ticks(low: float, high: float) -> list[float]:
    """At least three plain values between the limits of a log axis, wherever the limits lie."""
    ticks: list[float] = []
    for steps in LOG_STEPS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [t for e in powers for s in steps if low <= (t := s * 10.0**e) <= high]
        if len(ticks) >= FEWEST_TICKS:
            break
    every = -(-len(ticks) // MOST_TICKS)
    return ticks[::every] if every else ticks


def y_axis(ax: Axes, name: str, unit: str, *, log: bool) -> None:
    """Label and tick a y axis with plain numbers; seconds below 1 are given in ms. log: if it shows anything."""
    low, high = ax.get_ylim()
    scale, shown = (1e3, "ms") if unit == "s" and high < 1 else (1.0, unit)
    log = log and ax.dataLim.y1 > 0
    if log:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        if low > 0:
            ax.yaxis.set_major_locator(FixedLocator(log_ticks(low, high)))
            ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: number(v * scale)))
    inside = ", ".join(part for part in (shown if f"({shown})" not in name else "", "log" if log else "") if part)
    ax.set_ylabel(f"{name} ({inside})" if inside else name)
