"""A cell's outputs as HTML. What our own helpers made is marked and taken as it is; everything else is sanitized."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

import nh3

from .markdown import DATA_IMAGE, Renderer, formula, markdown, scroller

TAGS = {
    "a", "abbr", "b", "blockquote", "br", "caption", "code", "dd", "del", "details", "div", "dl", "dt", "em",
    "figcaption", "figure", "h3", "h4", "h5", "h6", "hr", "i", "img", "ins", "kbd", "li", "mark", "ol", "p", "pre", "s",
    "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul",
    "var",
}  # fmt: skip
ATTRIBUTES = {
    "*": {"class", "title", "style"},
    "a": {"href"},
    "img": {"src", "alt"},
    "td": {"colspan", "rowspan"},
    "th": {"colspan", "rowspan", "scope"},
}
STYLES = {"text-align", "font-weight"}
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS = re.compile(r"\d+%\|.*\|.*(it/s|s/it|\?it|\[)")
LONG_OUTPUT = 24  # lines of printed text that stay unfolded


def cell_outputs(outputs: Iterable[Mapping[str, Any]], renderer: Renderer) -> str:
    """All outputs of a cell; neighbouring printed text is joined before progress bars are taken out of it."""
    parts: list[str] = []
    printed = ""
    for output in outputs:
        if output["output_type"] == "stream":
            printed += _joined(output["text"]) if output["name"] == "stdout" else ""
            continue
        parts += [_printed(printed), _output(output, renderer)]
        printed = ""
    parts.append(_printed(printed))
    return "".join(p for p in parts if p)


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "".join(text)


def terminal_text(text: str) -> str:
    """Printed text in its final state: without colours, overwritten lines and progress bars."""
    lines = [line.rpartition("\r")[2] for line in ANSI.sub("", text).replace("\r\n", "\n").split("\n")]
    return "\n".join(line for line in lines if not PROGRESS.search(line)).strip("\n")


def _printed(text: str) -> str:
    text = terminal_text(text)
    if not text.strip():
        return ""
    block = f'<pre class="sb-printed" tabindex="0">{html.escape(text)}</pre>'
    count = text.count("\n") + 1
    if count <= LONG_OUTPUT:
        return block
    return f'<details class="sb-code"><summary>Printed output, {count} lines</summary>{block}</details>'


def _output(output: Mapping[str, Any], renderer: Renderer) -> str:
    if output["output_type"] == "error":
        trace = terminal_text("\n".join(output.get("traceback", [])))
        head = html.escape(f"{output.get('ename', 'Error')}: {output.get('evalue', '')}")
        return (
            f'<div class="sb-error" role="note"><p><b>This cell failed.</b> <code>{head}</code></p>'
            f'<details class="sb-code"><summary>Traceback</summary><pre tabindex="0">{html.escape(trace)}</pre>'
            "</details></div>"
        )
    data = output.get("data", {})
    if "application/vnd.jupyter.widget-view+json" in data:
        return ""
    words = _joined(data.get("text/plain", ""))
    alt = _alt(output, words)
    if "text/html" in data:
        markup = _joined(data["text/html"])
        trusted = (output.get("metadata") or {}).get("servebook", {}).get("trusted")
        return _once(markup, renderer) if trusted else sanitize(markup)
    if "text/markdown" in data:
        return markdown(_joined(data["text/markdown"]), renderer)
    if "image/svg+xml" in data:
        # as an image, an SVG of unknown origin runs no script and loads nothing
        coded = base64.b64encode(_joined(data["image/svg+xml"]).encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{coded}" alt="{alt}">'
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            coded = re.sub(r"[^A-Za-z0-9+/=]", "", _joined(data[kind]))
            return f'<img src="data:{kind};base64,{coded}" alt="{alt}">'
    if "text/latex" in data:
        return formula(_joined(data["text/latex"]).strip().strip("$"))
    return _printed(words)


def _alt(output: Mapping[str, Any], words: str) -> str:
    given = (output.get("metadata") or {}).get("alt") or ""
    return html.escape(given or ("" if words.startswith("<Figure") else words), quote=True)


def sanitize(markup: str) -> str:
    """HTML of unknown origin reduced to an allow-list of tags, attributes and links; other tags go, their text stays.

    Scripts and styles go with their content.
    """
    clean = nh3.clean(
        markup,
        tags=TAGS,
        attributes=ATTRIBUTES,
        attribute_filter=_value,
        url_schemes={"http", "https", "mailto", "data"},
        filter_style_properties=STYLES,
        link_rel=None,
    )
    clean = re.sub(r"<img(?![^>]*\bsrc=)[^>]*>", "", clean)
    clean = re.sub(r"<img(?![^>]*\balt=)", '<img alt=""', clean)
    clean = re.sub(r"<th\b[^>]*>\s*</th>", "<td></td>", clean)
    clean = re.sub(r"<th>", '<th scope="col">', clean)
    return re.sub(r"<table.*?</table>", lambda m: scroller(m[0], "Table"), clean, flags=re.DOTALL)


def _value(tag: str, name: str, value: str) -> str | None:
    """An attribute's value; None to remove it: images are embedded, and links must not lead to data: URLs."""
    if tag == "img" and name == "src":
        return value if DATA_IMAGE.fullmatch(value) else None
    return None if name == "href" and value.strip().lower().startswith("data:") else value


def _once(markup: str, renderer: Renderer) -> str:
    """Our own HTML; a figure that the page already shows, drawn from the same data, becomes a link to it."""
    figure = re.match(r'<figure [^>]*id="([^"]+)".*?<figcaption><b[^>]*>(.*?)</b>', markup, re.DOTALL)
    if figure is None:
        return unique_ids(markup, renderer)
    shown = renderer.ids.figures.get(markup)
    if shown:
        return f'<p class="sb-same">Shown above: <a href="#{shown}">{figure[2]}</a></p>'
    made = unique_ids(markup, renderer)
    renderer.ids.figures[markup] = re.search(r'id="([^"]+)"', made)[1]  # type: ignore[index]
    return made


def unique_ids(markup: str, renderer: Renderer) -> str:
    """Give ids that the page already has a new name, here and where this markup refers to them."""
    new = {old: renderer.ids.new(old) for old in dict.fromkeys(re.findall(r'\sid="([^"]+)"', markup))}
    if all(old == name for old, name in new.items()):
        return markup
    markup = re.sub(r'(\sid="|href="#|url\(#)([^")]+)', lambda m: m[1] + new.get(m[2], m[2]), markup)
    return re.sub(
        r'(aria-(?:labelledby|describedby)=")([^"]*)',
        lambda m: m[1] + " ".join(new.get(word, word) for word in m[2].split()),
        markup,
    )
