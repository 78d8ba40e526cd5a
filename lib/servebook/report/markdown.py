"""Markdown to HTML with TeX as MathML. Raw HTML in markdown is text, code is left alone, links stay on safe schemes."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from typing import Any

import mistune
from latex2mathml.converter import convert_to_element
from mistune.plugins.footnotes import footnotes
from mistune.plugins.math import math
from mistune.plugins.table import table, table_in_list

SAFE_LINK = re.compile(r"(https?://|mailto:|#)", re.IGNORECASE)
MATH_ATTRIBUTES = {
    "xmlns", "display", "displaystyle", "scriptlevel", "mathvariant", "mathsize", "stretchy", "fence", "separator",
    "accent", "minsize", "maxsize", "lspace", "rspace", "width", "height", "depth", "columnalign", "rowspacing",
    "columnspacing", "columnlines", "rowlines", "linethickness", "linebreak", "notation", "form", "largeop",
    "movablelimits", "symmetric",
}  # fmt: skip
DATA_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")


def mathml(tex: str, *, display: bool) -> str:
    """TeX as MathML. TeX that cannot be converted is shown as code."""
    source = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", tex.strip())
    try:
        root = convert_to_element(source, display="block" if display else "inline")
    except Exception:  # the converter raises many kinds for bad TeX, IndexError among them
        return f"<code>{html.escape(tex.strip())}</code>"
    # The converter's own serializer writes \text{<b>} as markup and keeps \href: escape and allow-list here
    for node in root.iter():
        node.text = html.unescape(node.text) if node.text else node.text
        for name in [n for n in node.attrib if n not in MATH_ATTRIBUTES]:
            del node.attrib[name]
    if any("\\" in (node.text or "") for node in root.iter()):
        return f"<code>{html.escape(tex.strip())}</code>"
    return ET.tostring(root, encoding="unicode")


def formula(tex: str) -> str:
    """Displayed TeX in a box that scrolls if it is wider than the page."""
    return f'<div class="sb-math" tabindex="0" role="group" aria-label="Formula">{mathml(tex, display=True)}</div>'


def slug(text: str) -> str:
    """Letters and digits of a heading joined by hyphens."""
    plain = re.sub(r"<[^>]+>", "", html.unescape(text)).lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "section"


class Ids:
    """Hands out ids that are unique on the page, and remembers the figures that it already shows."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.figures: dict[str, str] = {}  # a figure's HTML as its cell made it: its id on the page

    def new(self, wanted: str) -> str:
        name, k = wanted, 2
        while name in self.taken:
            name, k = f"{wanted}-{k}", k + 1
        self.taken.add(name)
        return name


class Renderer(mistune.HTMLRenderer):
    """Renders one notebook's markdown: headings shifted and anchored, math as MathML, tables that scroll."""

    def __init__(
        self,
        ids: Ids,
        prefix: str = "",
        shift: int = 0,
        links: Mapping[str, str] | None = None,
        on_heading: Callable[[int, str, str], None] | None = None,
    ) -> None:
        super().__init__(escape=True)
        self.ids, self.prefix, self.shift = ids, prefix, shift
        # links: a notebook's file name to where its chapter stands, "#03-x" or "labbook.html#03-x"
        self.links, self.on_heading = dict(links or {}), on_heading
        self.images: dict[str, str] = {}  # an attachment's name to its data: URL; set for each cell

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        level = min(6, level + self.shift)
        anchor = self.ids.new(f"{self.prefix}{slug(text)}")
        if self.on_heading:
            self.on_heading(level, text, anchor)
        return f'<h{level} id="{anchor}">{text} {permalink(anchor, text)}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        target = self.links.get(url.partition("#")[0].rpartition("/")[2])
        if target:
            return f'<a href="{target}">{text}</a>'
        return f'<a href="{html.escape(url)}">{text}</a>' if SAFE_LINK.match(url) else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        url = self.images.get(url.removeprefix("attachment:"), url)
        alt = html.escape(html.unescape(re.sub(r"<[^>]+>", "", text)))
        # an image from elsewhere would be a request: its description stands for it
        return f'<img src="{url}" alt="{alt}">' if DATA_IMAGE.fullmatch(url) else f"<em>{alt}</em>"

    def block_html(self, html: str) -> str:
        text = _no_comments(html)
        return super().block_html(text) if text else ""

    def inline_html(self, html: str) -> str:
        return super().inline_html(_no_comments(html))

    def block_code(self, code: str, info: str | None = None) -> str:
        return f'<pre tabindex="0"><code>{html.escape(code)}</code></pre>\n'


def _no_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).strip("\n")


def permalink(anchor: str, name: str) -> str:
    label = html.escape(html.unescape(re.sub(r"<[^>]+>", "", name)), quote=True)
    return f'<a class="anchor" href="#{anchor}" aria-label="Link to {label}">#</a>'


def scroller(inner: str, label: str) -> str:
    """A box that scrolls sideways, with a hint if it does, and can be reached with the keyboard."""
    return (
        f'<div class="sb-scroll" tabindex="0" role="region" aria-label="{html.escape(label, quote=True)}">'
        f'<span class="sb-more" aria-hidden="true">Scrolls sideways →</span>{inner}</div>'
    )


def markdown(text: str, renderer: Renderer | None = None) -> str:
    """Markdown as HTML (tables, footnotes, math). Footnote ids take the renderer's prefix."""
    renderer = renderer or Renderer(Ids())
    parser = mistune.create_markdown(
        escape=True, renderer=renderer, plugins=["strikethrough", footnotes, math, table, table_in_list]
    )
    renderer.register("inline_math", lambda _, tex: mathml(tex, display=False))
    renderer.register("block_math", lambda _, tex: formula(tex) + "\n")
    renderer.register("table", lambda _, inner: scroller(f"<table>{inner}</table>", "Table") + "\n")
    renderer.register("table_cell", _cell)
    body = str(parser(text))
    if "fnref-" in body:
        mark = renderer.ids.new(f"{renderer.prefix}note")
        body = re.sub(r'(id="|href="#)(fn(?:ref)?-\d+")', rf"\g<1>{mark}-\g<2>", body)
        body = body.replace('class="footnote">&#8617;', 'class="footnote" aria-label="Back to the text">&#8617;')
    return body


def _cell(_: Any, text: str, align: str | None = None, head: bool = False) -> str:
    # an empty header cell names nothing: it is a plain cell
    tag = "th" if head and text.strip() else "td"
    scope = ' scope="col"' if tag == "th" else ""
    style = f' class="sb-{align}"' if align else ""
    return f"<{tag}{scope}{style}>{text}</{tag}>\n"
