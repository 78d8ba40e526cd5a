"""A figure as SVG and as HTML: text stays text, colours are CSS variables, the same bytes every time.

Colours are drawn in the light palette and turned into variables here, so that a figure follows the reader's light or
dark setting; ids and class names are short and cannot clash on a page that holds many figures.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from ..common import files
from .style import COLOURS, LIGHT, lab_palette, text_of, theme
from .words import unbroken

SVG = "http://www.w3.org/2000/svg"
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
    """(viewBox, the drawing's elements), every id short and under `prefix`. A figure is drawn once and kept: it is
    finished when it comes here, and is wanted for the page and for its file."""
    kept: dict[str, tuple[str, str]] = vars(figure).setdefault("servebook_drawings", {})
    if prefix not in kept:
        kept[prefix] = _draw(figure, prefix)
    return kept[prefix]


def _draw(figure: Figure, prefix: str) -> tuple[str, str]:
    buffer = io.StringIO()
    with theme():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    root = ET.fromstring(buffer.getvalue())
    # by content too: two notebooks open in one Lab page may hold the same figure of different points
    prefix = short_prefix(prefix + buffer.getvalue())
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
    texts = (f"<g{look}>{t}</g>" for look, t in words.items())
    return root.get("viewBox", "0 0 100 100"), "".join([*drawn, *texts, _tips(figure)])


def _tips(figure: Figure) -> str:
    """Places that show words when the pointer rests on them: SVG titles, no script."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    places: dict[tuple[str, str], list[str]] = {}
    for ax, x, y, text in getattr(figure, "servebook_tips", ()):
        across, up = figure.transFigure.inverted().transform(ax.transData.transform((x, y)))
        if 0 <= across <= 1 and 0 <= up <= 1:
            at = (_short(f"{across * width:.2f}"), _short(f"{(1 - up) * height:.2f}"))
            places.setdefault(at, []).append(text)
    shown = "".join(
        f'<circle cx="{x}" cy="{y}" r="8"><title>{html.escape(unbroken("; ".join(texts)))}</title></circle>'
        for (x, y), texts in places.items()
    )
    return f'<g pointer-events="all">{shown}</g>' if shown else ""


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
    """A few letters that identify a figure in the ids of its SVG elements."""
    return f"s{_letters(text, 4)}-"


def standalone_svg(figure: Figure) -> str:
    """The wide figure as a file of its own that follows the reader's light or dark setting."""
    text = text_of(figure)
    return stand_alone(svg(figure, text.id, ""), text.title, text.alt)


def stand_alone(inline: str, title: str, alt: str, *, both: bool = True) -> str:
    """An inline <svg> of this module with its names and its palettes inside. both: it follows the reader's system;
    else it is light, for a site whose own theme does not."""
    light, dark = (";".join(f"--{n}:{c[i]}" for n, c in COLOURS.items()) for i in (0, 1))
    head, _, body = re.sub(r'\saria-labelledby="[^"]*"', "", inline).partition(">")
    head = head.replace("<svg ", f'<svg xmlns="{SVG}" aria-labelledby="title desc" ', 1)
    return (
        f'{head}><title id="title">{html.escape(title)}</title><desc id="desc">{html.escape(alt)}</desc>'
        f"<style>:root{{{light};--sans:Helvetica Neue,Arial,sans-serif}}"
        + (f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}" if both else "")
        + f"</style>{body}\n"
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

    # in JupyterLab (it names the notebook to its kernel) the figure follows Lab's theme; a report brings its own
    lab = f"<style>{lab_palette('.sb-figure')}</style>" if os.environ.get("JPY_SESSION_NAME") else ""
    bundle = {"text/html": lab + html_figure(figure), "text/plain": f"{text.title}. {text.takeaway}"}
    display(bundle, raw=True, metadata={"servebook": {"trusted": "figure", "id": text.id}})


def save(figure: Figure, folder: Path | str) -> Path:
    """Write the figure as `<folder>/<id>.svg` and return its path."""
    return files.write_text(Path(folder) / f"{text_of(figure).id}.svg", standalone_svg(figure))
