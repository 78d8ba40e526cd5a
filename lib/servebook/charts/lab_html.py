"""How an exploration and a live run look in JupyterLab: HTML that follows Lab's light and dark theme."""

from __future__ import annotations

import html
from collections.abc import Iterable

from matplotlib.figure import Figure

from . import style, svg
from .words import unbroken

STYLE = (
    "<style>"
    + style.lab_palette(".sb-lab")
    + ".sb-lab{--sans:var(--jp-ui-font-family,sans-serif);font:13px/1.45 var(--sans);color:var(--ink);"
    "max-width:1080px;margin:.4em 0}"
    ".sb-lab .tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(118px,1fr));gap:8px 20px;"
    "margin:.5em 0 .9em}"
    ".sb-lab .tiles b{display:block;font-size:19px;line-height:1.25;font-weight:600;white-space:nowrap}"
    ".sb-lab .soft,.sb-lab .tiles small{color:var(--muted);font-size:12px}"
    ".sb-lab .pair{display:flex;flex-wrap:wrap;gap:8px 28px}"
    ".sb-lab .pair>figure{flex:1 1 360px;min-width:0}"
    ".sb-lab figure{margin:.3em 0}.sb-lab figcaption{font-size:12px;color:var(--muted);margin:.2em 0 0}"
    ".sb-lab p{margin:.3em 0}.sb-lab .bad{color:var(--bad)}"
    ".sb-lab table{margin:.3em 0!important}.sb-lab th,.sb-lab td{text-align:right!important;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}.sb-lab th:first-child{text-align:left!important}"
    ".sb-lab caption{caption-side:top;text-align:left;color:var(--ink);font-weight:600;padding:.3em 0;"
    "white-space:normal}"
    ".sb-lab .wide{overflow-x:auto}"
    ".sb-lab .bar{height:6px;border-radius:3px;background:var(--grid);overflow:hidden;max-width:520px;margin:.5em 0}"
    ".sb-lab .bar i{display:block;height:100%;background:var(--e1)}"
    "</style>"
)


class Page(str):
    """HTML shown by a cell, with a line of plain text where HTML cannot be shown."""

    plain: str

    def __new__(cls, body: str, plain: str) -> Page:
        self = super().__new__(cls, body)
        self.plain = plain
        return self

    def bundle(self) -> dict[str, str]:
        return {"text/html": str(self), "text/plain": self.plain}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle()


def page(parts: Iterable[str], plain: str) -> Page:
    """One output of Lab, with the style that it needs."""
    return Page(f'{STYLE}<div class="sb-lab">{"".join(parts)}</div>', plain)


def text(value: object) -> str:
    return html.escape(unbroken(str(value)))


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """Figures in a row: (name, value, text below)."""
    cells = (
        f"<div>{text(what)}<b>{text(value)}</b><small>{text(under) or '&nbsp;'}</small></div>"
        for what, value, under in values
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def figure(drawn: Figure, note: str = "", takeaway: bool = True) -> str:
    """A figure of charts/ in its original width, with its texts below."""
    words = style.text_of(drawn)
    lead = words.takeaway if takeaway else ""
    label = f'aria-label="{html.escape(f"{words.title}. {words.alt}", quote=True)}"'
    caption = " ".join(text(s) for s in (lead, note) if s)
    width = f' style="max-width:{drawn.get_figwidth() * 100:.0f}px"'
    return f"<figure{width}>{svg.svg(drawn, words.id, label)}<figcaption>{caption}</figcaption></figure>"


def table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A small table of text; the first column names the rows."""
    top = "".join(f'<th scope="col">{text(h)}</th>' for h in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<th scope="row">{text(c)}</th>' if i == 0 else f"<td>{text(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    head = f"<caption>{text(caption)}</caption><thead><tr>{top}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


__all__ = ["Page", "figure", "page", "table", "text", "tiles"]
