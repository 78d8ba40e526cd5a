"""How a page is put together: one template, one style, chapters, files inside it; the same bytes every time."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..common import files
from . import outputs
from .markdown import Ids, Renderer, markdown, permalink, slug

TEMPLATE = Path(__file__).parent / "template"
# Whatever slips into the page: no script runs and nothing is fetched
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
KICKER = "Predicted, frozen, measured, explained"
DEFAULTS: dict[str, Any] = {"url": None, "kicker": KICKER, "lead": "", "lab": [], "lab_book": "", "report": ""}
FIXED_IDS = ("top", "content", "contents", "lab-book", "glossary", "data", "order")  # of the template
GLOSSARY = Path(__file__).with_name("glossary.md")


@dataclass
class Chapter:
    """One notebook of the page."""

    title: str
    anchor: str
    body: str
    sections: list[tuple[int, str, str]] = field(default_factory=list)  # level, HTML of the heading, anchor


def write_page(out: Path, post: Sequence[Chapter], chapters: Sequence[Chapter], context: Mapping[str, Any]) -> Path:
    """One page through the template. context: title, description, run, stamp, downloads; of DEFAULTS what is other.
    lab: (title, href) of the chapters in lab_book, a page of its own; report: the page that this is the lab book of."""
    rules: set[str] = set()
    for part in [*post, *chapters]:
        part.body = _hoist(part.body, rules)
    style = _style() + "\n" + "".join(sorted(rules))
    fixed = {"post": post, "chapters": chapters, "policy": POLICY, "permalink": permalink, "plain": plain}
    fixed["glossary"] = glossary()
    page = _environment().get_template("page.html.j2").render(**{**DEFAULTS, **context, **fixed, "style": style})
    return files.write_text(out, re.sub(r"[ \t]+\n", "\n", page))


class Body:
    """A page's body that is put together here and not in a notebook: sections, tables, figures."""

    def __init__(self) -> None:
        self.renderer = Renderer(Ids())
        for fixed in FIXED_IDS:
            self.renderer.ids.new(fixed)
        self.parts: list[str] = []
        self.sections: list[tuple[int, str, str]] = []

    def section(self, title: str) -> None:
        anchor = self.renderer.ids.new(slug(title))
        shown = html.escape(title)
        self.sections.append((2, shown, anchor))
        self.parts.append(f'<h2 id="{anchor}">{shown} {permalink(anchor, title)}</h2>')

    def add(self, markup: str) -> None:
        self.parts.append(outputs.unique_ids(markup, self.renderer))

    def chapter(self, title: str) -> Chapter:
        return Chapter(title, self.renderer.ids.new("post"), "\n".join(self.parts), self.sections)


def glossary() -> str:
    """The glossary as the page's last chapter, without its title and the words about itself."""
    text = GLOSSARY.read_text(encoding="utf-8")
    return markdown(text[text.index("\n## ") :], Renderer(Ids(), "glossary-", 1))


def _hoist(body: str, rules: set[str]) -> str:
    """Take the style sheets out of figures: many figures share their rules, the page needs each once."""

    def keep(match: re.Match[str]) -> str:
        rules.update(re.findall(r"\.k[a-z2-7]{6}\{[^}]*\}", match[2]))
        return match[1]

    return re.sub(r"(<svg role=\"img\"[^>]*>)<style>([^<]*)</style>", keep, body)


def _environment() -> Any:
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATE)
    return jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )


def _style() -> str:
    from ..charts.style import COLOURS

    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    css = (TEMPLATE / "style.css").read_text(encoding="utf-8")
    css = css.replace("/*light*/", light).replace("/*dark*/", dark)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)).strip()


def plain(text: str) -> str:
    """A heading's HTML as text."""
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def download(name: str, raw: bytes, kind: str, what: str, file: str) -> dict[str, str]:
    """A file inside the page, as the template takes it."""
    coded = quote(raw, safe="/:;,.?=@+$!*()[]|")  # tables of numbers: a quarter shorter than base64
    size = f"{max(1, round(len(raw) / 1000))} kB"
    return {"name": name, "href": f"data:{kind};charset=utf-8,{coded}", "what": what, "size": size, "file": file}
