"""The one style of every figure: theme, colours, sizes, and how a figure becomes SVG.

A figure is drawn twice, wide for the page and narrow for a phone, by the same function; `Canvas` arranges the panels.
Colours are drawn in the light palette and turned into CSS variables in the SVG, so a figure follows the reader's
light or dark setting; text stays text. Output is deterministic: no date, hashed ids from a fixed salt.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .words import label, number, unbroken

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
MARKERS = ("s", "o", "D", "^", "v")
WIDE_IN, NARROW_IN = 7.5, 3.6
SVG = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class EngineStyle:
    colour: str
    marker: str


@dataclass
class FigureText:
    """What a figure says in words. `note`: n and what the interval is; `narrow`: the same figure for a phone."""

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
        each = height + (0.95 if ratio else 0)
        figure = Figure(figsize=(NARROW_IN if self.narrow else WIDE_IN, each * down), layout="constrained")
        engine = figure.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        engine.set(w_pad=0.05, h_pad=0.05, hspace=0.03, wspace=0.06)
        rows = [height, 0.95] * down if ratio else [height] * down
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
    """seaborn's ticks theme in this project's ink, for drawing and for saving."""
    import seaborn as sns

    rc = sns.axes_style("ticks") | {
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
    """Turns `draw(canvas, …)` into a function that returns the wide figure with the narrow one beside its text."""

    @functools.wraps(draw)
    def build(*args: Any, **kwargs: Any) -> Figure:
        with theme():
            wide = _settled(draw(Canvas(narrow=False), *args, **kwargs))
            text_of(wide).narrow = _settled(draw(Canvas(narrow=True), *args, **kwargs))
        return wide

    return build


def _settled(figure: Figure) -> Figure:
    # every drawing would move the axes a little further: laid out once, the picture is the same each time
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def text_of(figure: Figure) -> FigureText:
    return figure.servebook  # type: ignore[attr-defined]


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
    room = max(3, room * 4 // max(4, *(len(label(t)) + 1 for t in ticks), 4))
    axis.axes.set(**{f"{axis.axis_name}scale": "log"}) if len(ticks) > 1 else None
    while len(ticks) > room:
        ticks = ticks[::-2][::-1]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: label(v)))


def y_axis(ax: Axes, name: str, unit: str, *, log: bool) -> None:
    """Label and tick a y axis with plain numbers; seconds below 1 are told in ms."""
    low, high = ax.get_ylim()
    scale, shown = (1e3, "ms") if unit == "s" and high < 1 else (1.0, unit)
    if log:
        ax.set_yscale("log")
        reach = high / low if low > 0 else 1000.0
        subs = (1.0,) if reach > 300 else (1.0, 2.0, 5.0) if reach > 12 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
        ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: number(v * scale)))
    ax.set_ylabel(f"{name} ({shown})" if shown and f"({shown})" not in name else name)


# ---- SVG ------------------------------------------------------------------------------------------------------

_ROUND = re.compile(r"-?\d+\.\d{2,}")
_BY_LIGHT = {light: name for name, light in LIGHT.items()}
# a short name each, set once on the <svg>: the page's variable, with the light colour behind it
_VARIABLES = {name: f"--s{i:x}" for i, name in enumerate(COLOURS)}
_DROPPED = ("font-family", "stroke-linejoin", "stroke-linecap")


def _short(text: str, places: int = 1) -> str:
    def cut(match: re.Match[str]) -> str:
        value = f"{float(match[0]):.{places}f}".rstrip("0").rstrip(".")
        return "0" if value in ("-0", "") else value

    return _ROUND.sub(cut, text)


def _restyle(style: str) -> str:
    kept = []
    for declaration in style.split(";"):
        name, _, value = declaration.partition(":")
        name, value = name.strip(), value.strip()
        if not name or name in _DROPPED or (name, value) == ("fill", "none"):
            continue  # the <svg> sets these for all of its parts
        if name == "font":  # "bold 10px 'DejaVu Sans', …"
            size = re.search(r"[\d.]+px", value)
            if "bold" in value:
                kept.append("font-weight:bold")
            name, value = "font-size", size[0] if size else "10px"
        if value.lower() in _BY_LIGHT:
            value = f"var({_VARIABLES[_BY_LIGHT[value.lower()]]})"
        kept.append(f"{name}:{_short(value, 2)}")
    return ";".join(kept)


def _drawing(figure: Figure, prefix: str) -> tuple[str, str]:
    """(viewBox, the drawing's elements), every id short and under `prefix`."""
    buffer = io.StringIO()
    with theme():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    root = ET.fromstring(buffer.getvalue())
    prefix = short_prefix(prefix)
    used: dict[str, str] = {}
    for node in root.iter():
        for key, value in node.attrib.items():
            found = re.findall(r"url\(#([^)]+)\)", value) + ([value[1:]] if key.endswith("href") else [])
            for old in found:
                used.setdefault(old, f"{prefix}{len(used)}")
    parts = [p for child in root for p in _element(child, used)]
    # words last: they lie on nothing, and grid lines then stand together and merge
    words: dict[str, str] = {}
    for part in parts:
        if part.startswith("<text"):
            styled = re.search(r' style="[^"]*"', part)
            look = styled[0] if styled else ""
            words[look] = words.get(look, "") + part.replace(look, "", 1)
    drawn = _merge([p for p in parts if not p.startswith("<text")])
    return root.get("viewBox", "0 0 100 100"), "".join([*drawn, *(f"<g{look}>{t}</g>" for look, t in words.items())])


def _element(node: ET.Element, used: Mapping[str, str]) -> list[str]:
    tag = node.tag.rpartition("}")[2]
    if tag in ("metadata", "style"):
        return []
    attributes = {}
    for key, value in node.attrib.items():
        name = key.rpartition("}")[2]
        if name == "id":
            value = used.get(value, "")
        elif name == "href":
            value = f"#{used[value[1:]]}"
        elif name == "style":
            value = _restyle(value)
        elif name == "transform":
            value = "" if re.fullmatch(r"rotate\(-?0 [^)]*\)", value) else _short(value)
        elif name == "d":
            value = re.sub(r" ?([A-Za-z]) ?", r"\1", _short(" ".join(value.split())))
        else:
            value = re.sub(r"url\(#([^)]+)\)", lambda m: f"url(#{used[m[1]]})", _short(value))
        if value:
            attributes[name] = value
    if tag == "path" and "style" not in attributes and "id" not in attributes:
        return []  # neither filled nor stroked
    if f"stroke:var({_VARIABLES['grid']})" in attributes.get("style", ""):
        attributes.pop("clip-path", None)  # grid lines end at the axes anyway
    inside = [p for child in node for p in _element(child, used)]
    if tag == "g" and (not attributes or not inside):
        return inside
    if tag == "defs" and not inside:
        return []
    if (
        tag == "g"
        and len(looks := {m[1] for p in inside if (m := _USE.fullmatch(p))}) == 1
        and all(map(_USE.fullmatch, inside))
    ):
        attributes["style"] = looks.pop()  # markers of one look
        inside = [_USE.sub(lambda m: m[0].replace(f' style="{m[1]}"', ""), p) for p in inside]
    text = html.escape(node.text) if node.text and node.text.strip() else ""
    opened = "".join(f' {k}="{html.escape(v)}"' for k, v in attributes.items())
    body = text + "".join(_merge(inside))
    return [f"<{tag}{opened}>{body}</{tag}>" if body else f"<{tag}{opened}/>"]


_USE = re.compile(r'<use [^>]* style="([^"]*)"/>')


def _merge(parts: list[str]) -> list[str]:
    """Neighbouring stroked paths that look the same become one path (grid lines, box plots)."""
    merged: list[str] = []
    pattern = re.compile(r'<path d="([^"]*)"((?: clip-path="[^"]*")? style="(?!fill)[^"]*")/>')
    for part in parts:
        before, now = pattern.fullmatch(merged[-1]) if merged else None, pattern.fullmatch(part)
        if before and now and before[2] == now[2]:
            merged[-1] = f'<path d="{before[1]}{now[1]}"{now[2]}/>'
        else:
            merged.append(part)
    return merged


def svg(figure: Figure, prefix: str, naming: str) -> str:
    """The figure as one inline <svg>. `naming`: attributes that give its accessible name."""
    box, body = _drawing(figure, prefix)
    colours = "".join(
        f"{short}:var(--{name},{LIGHT[name]});" for name, short in _VARIABLES.items() if f"var({short})" in body
    )
    rules: dict[str, str] = {}

    def classed(match: re.Match[str]) -> str:
        name = "k" + _letters(match[1], 6)
        rules[name] = match[1]
        return f'class="{name}"'

    # a <style> in an inline <svg> counts for the whole page: a class is named by its content, so none can clash
    body = re.sub(r'(?<= )style="([^"]*)"', classed, body)
    sheet = "".join(f".{name}{{{style}}}" for name, style in rules.items())
    return (
        f'<svg role="img" {naming} viewBox="{box}" fill="none" stroke-linejoin="round" '
        f'style="{colours}width:100%;height:auto;font-family:var(--sans,sans-serif)"><style>{sheet}</style>{body}</svg>'
    )


def _letters(text: str, count: int) -> str:
    return base64.b32encode(hashlib.blake2b(text.encode(), digest_size=8).digest()).decode().lower()[:count]


def short_prefix(text: str) -> str:
    """A few letters that stand for a figure's id in the ids of its drawing."""
    return f"s{_letters(text, 4)}-"


def standalone_svg(figure: Figure) -> str:
    """The wide figure as a file of its own that follows the reader's light or dark setting."""
    text = text_of(figure)
    return stand_alone(svg(figure, text.id, ""), text.title, text.alt)


def stand_alone(inline: str, title: str, alt: str) -> str:
    """An inline <svg> of this module with its names and both palettes inside."""
    light, dark = (";".join(f"--{n}:{c[i]}" for n, c in COLOURS.items()) for i in (0, 1))
    head, _, body = re.sub(r'\saria-labelledby="[^"]*"', "", inline).partition(">")
    head = head.replace("<svg ", f'<svg xmlns="{SVG}" aria-labelledby="title desc" ', 1)
    return (
        f'{head}><title id="title">{html.escape(title)}</title><desc id="desc">{html.escape(alt)}</desc>'
        f"<style>:root{{{light};--sans:Helvetica Neue,Arial,sans-serif}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>{body}\n"
    )


def html_figure(figure: Figure) -> str:
    """The figure as HTML: takeaway, wide and narrow SVG, caption with n and interval, and its text alternative."""
    text = text_of(figure)
    id = html.escape(text.id)
    naming = f'aria-labelledby="{id}-title {id}-alt"'
    drawings = f'<div class="sb-wide">{svg(figure, text.id, naming)}</div>'
    if text.narrow is not None:
        drawings += f'<div class="sb-narrow" style="display:none">{svg(text.narrow, f"{text.id}-n", naming)}</div>'
    note = f' <span class="sb-note">{html.escape(unbroken(text.note))}</span>' if text.note else ""
    takeaway = f'<p class="sb-takeaway">{html.escape(unbroken(text.takeaway))}</p>'
    return (
        f'<figure class="sb-figure" id="{id}">{takeaway}{drawings}'
        f'<figcaption><b id="{id}-title">{html.escape(text.title)}.</b>{note}'
        f'<details class="sb-alt"><summary>The figure in words</summary><p id="{id}-alt">{html.escape(text.alt)}</p>'
        f"</details></figcaption></figure>"
    )


def show(figure: Figure, folder: Path | str | None = None) -> None:
    """Display a figure as a cell's output; with `folder`, also write it there as `<id>.svg`."""
    text = text_of(figure)
    if folder is not None:
        save(figure, folder)
    from IPython.display import display

    bundle = {"text/html": html_figure(figure), "text/plain": f"{text.title}. {text.takeaway}"}
    display(bundle, raw=True, metadata={"servebook": {"trusted": "figure", "id": text.id}})


def save(figure: Figure, folder: Path | str, suffix: str = ".svg") -> Path:
    """Write the figure as `<folder>/<id>.svg` (or `.png`, 2× pixels) and return its path."""
    text = text_of(figure)
    path = Path(folder) / f"{text.id}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if suffix == ".svg":
        part.write_text(standalone_svg(figure), encoding="utf-8")
    else:
        with theme():
            figure.savefig(part, format=suffix.lstrip("."), dpi=192)
    part.replace(path)
    return path
