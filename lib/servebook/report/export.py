"""The post as Markdown with its figures, in the file layout that a static site generator expects."""

from __future__ import annotations

import html
import re
import shutil
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from ..charts.svg import stand_alone
from ..common import files
from ..common.errors import ServebookError
from ..common.notebook_format import quick_import
from ..run_folder import results, stored_params
from . import notes
from .card import write_card
from .outputs import terminal_text
from .render import described, put_notes
from .scrub import Scrub

ENGINES = ("hugo", "jekyll", "astro", "none")
BLOCKS = {"p", "li", "h3", "h4", "h5", "caption", "pre", "summary"}


def known_generator(front_matter: str) -> None:
    """Raises ServebookError for a front matter that is not one of ENGINES."""
    if front_matter not in ENGINES:
        raise ServebookError(f"no front matter for {front_matter!r}", "--front-matter", f"Choose {', '.join(ENGINES)}")


def export_post(run_dir: Path | str, post: Path | str, out: Path | str, *, front_matter: str = "hugo") -> Path:
    """Write the executed post notebook as Markdown with its figures and the social card; returns the Markdown's path.

    front_matter: hugo, jekyll, astro or none. The post is `out`/index.md with `out`/images; for Jekyll it is
    `out`/_posts/DATE-RUN.md with `out`/assets/RUN. Code cells stay out. Raises ServebookError for another engine's name
    or an unreadable notebook.
    """
    with quick_import():
        import nbformat

    known_generator(front_matter)
    try:
        notebook = nbformat.read(post, as_version=4)
    except Exception as error:
        raise ServebookError(
            "cannot read the notebook", str(post), "Run the post again: servebook run --only"
        ) from error
    run_dir, out = Path(run_dir), Path(out)
    run = stored_params.read(run_dir)
    Scrub(run_dir).notebook(notebook)
    put_notes(notebook, notes.read(run_dir, run.get("run")))
    place = _Place.of(run, run_dir, out, front_matter)
    parts: list[str] = []
    for cell in notebook.cells:
        if {"remove-cell", "notebook-only"} & set(cell["metadata"].get("tags", [])):
            continue
        if cell.cell_type == "markdown":
            parts.append(_no_html(re.sub(r"\A\s*# .*\n?", "", cell.source).strip()))
        elif cell.cell_type == "code":
            own = notes.TAG in cell["metadata"].get("tags", [])
            parts += [_no_html("".join(o["data"].get("text/markdown", ""))) if own and "data" in o else
                      _output(o, place.images) for o in cell.outputs]  # fmt: skip
    card = run_dir / "card.png"
    with files.writing(place.images / "card.png") as scratch:
        shutil.copyfile(card if card.exists() else write_card(run_dir), scratch)
    body = place.linked("\n\n".join(p for p in parts if p) + "\n")
    return files.write_text(place.page, _front_matter(run, run_dir, front_matter, place) + body)


@dataclass(frozen=True)
class _Place:
    """Where an engine wants the post and its images, and how the post links them."""

    page: Path
    images: Path
    prefix: str  # of an image's name, in front matter
    liquid: bool = False  # Jekyll reads {{ … }} in a post

    @classmethod
    def of(cls, run: dict[str, Any], run_dir: Path, out: Path, engine: str) -> _Place:
        if engine != "jekyll":
            return cls(out / "index.md", out / "images", "images/")
        name = re.sub(r"[^a-z0-9]+", "-", str(run.get("run") or run_dir.name).lower()).strip("-")
        day = _date(run_dir)[:10]  # Jekyll takes no post whose file does not begin with its day
        return cls(out / "_posts" / f"{day}-{name}.md", out / "assets" / name, f"/assets/{name}/", liquid=True)

    def linked(self, body: str) -> str:
        """The post's text with images by their address on the site."""
        if not self.liquid:
            return body
        body = re.sub(r"\{[{%]", lambda braces: f"{{{{ '{braces[0]}' }}}}", body)
        return body.replace("](images/", f"]({{{{ site.baseurl }}}}{self.prefix}")


def _date(run_dir: Path) -> str:
    """When the first point was measured, so that a second export is the same file."""
    starts = [at for p in results.read_points(run_dir) if (at := p.started_at)]
    return str(min(starts, default="1970-01-01T00:00:00Z"))


def _front_matter(run: dict[str, Any], run_dir: Path, engine: str, place: _Place) -> str:
    title = run.get("title") or run_dir.name
    if engine == "none":
        return f"# {title}\n\n"
    date, card = _date(run_dir), f"{place.prefix}card.png"
    fields: dict[str, Any] = {"title": title, "description": run.get("description") or described(run, run_dir)}
    if engine == "jekyll":  # jekyll-seo-tag makes og:image of image
        fields = {"layout": "post"} | fields | {"date": date, "tags": ["llm", "serving"], "image": card}
    elif engine == "astro":
        fields |= {"pubDate": date, "tags": ["llm", "serving"], "heroImage": f"./{card}"}
    else:  # Hugo's own opengraph template takes images
        fields |= {"date": date, "draft": False, "tags": ["llm", "serving"], "images": [card]}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)}---\n\n"


def _output(output: Any, images: Path) -> str:
    if output["output_type"] == "stream":
        text = terminal_text(output["text"]) if output["name"] == "stdout" else ""
        return f"```text\n{text}\n```" if text else ""
    data = output.get("data", {})
    trusted = (output.get("metadata") or {}).get("servebook", {}).get("trusted")
    if trusted == "figure":
        return _figure("".join(data["text/html"]), images)
    if "text/html" in data:
        return to_markdown("".join(data["text/html"]))
    return "".join(data.get("text/markdown", ""))


def _figure(markup: str, images: Path) -> str:
    def inside(pattern: str) -> str:
        found = re.search(pattern, markup, re.DOTALL)
        return html.unescape(re.sub(r"<[^>]+>", "", found[1])).strip() if found else ""

    name = inside(r'<figure[^>]* id="([^"]+)"')
    drawing = re.search(r"<svg.*?</svg>", markup, re.DOTALL)
    if not name or not drawing:
        return ""
    title, alt = inside(r"<figcaption><b[^>]*>(.*?)</b>"), inside(r'<p id="[^"]+-alt">(.*?)</p>')
    files.write_text(images / f"{name}.svg", stand_alone(drawing[0], title, alt, both=False))
    caption = f"**{_escape(title)}** {_escape(inside(r'<span class=.sb-note.>(.*?)</span>'))}".strip()
    takeaway = _escape(inside(r'<p class="sb-takeaway">(.*?)</p>'))
    words = re.sub(r"[\[\]]", "", " ".join(alt.split()))
    return f"> {takeaway}\n\n![{words}](images/{name}.svg)\n\n{caption}"


def _no_html(source: str) -> str:
    """Markdown whose raw HTML is text, as on the page; code and <https://…> links are left alone."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL), flags=re.DOTALL)
    parts[::2] = [re.sub(r"<(?=[A-Za-z/!?])(?!https?://)", "&lt;", p) for p in parts[::2]]
    return "".join(parts)


def _escape(text: str) -> str:
    """Text so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text).replace("<", "&lt;")


class _Reader(HTMLParser):
    """Turns the small HTML of this project's tables and boxes into Markdown lines."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.lists: list[str] = []
        self.term = ""
        self.skipped: list[str] = []  # tags within which nothing is text
        self.link = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        look, href = (dict(attrs).get(name) or "" for name in ("class", "href"))
        if tag in ("style", "script", "svg") or look in ("sb-links", "sb-more"):  # links within the page
            self.skipped.append(tag)
        elif self.skipped:
            return
        elif tag == "a" and href.startswith("http"):
            self.text, self.link = f"{self.text}[", href
        elif tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th", *BLOCKS, "dt", "dd"):
            self.text = ""
        elif tag in ("ol", "ul"):
            self.lists.append("1." if tag == "ol" else "-")
        elif tag in ("b", "strong"):
            self.text += "**"
        elif tag == "code":
            self.text += "`"
        elif tag in ("span", "div") and self.text and not self.text.endswith(" "):
            self.text += {"sb-what": ": ", "sb-range": "; "}.get(look, " ")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.text += _escape(" ".join(data.split(" ")))

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            if tag == self.skipped[-1]:
                self.skipped.pop()
            return
        if tag == "a":
            self.text, self.link = f"{self.text}]({self.link})" if self.link else self.text, ""
            return
        text = " ".join(self.text.split())
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append(text)
        elif tag == "table" and self.rows:
            head, *body = self.rows
            rows = [head, ["---"] * len(head), *body]
            self.blocks.append("\n".join(f"| {' | '.join(r)} |" for r in rows))
        elif tag in ("b", "strong"):
            self.text += "**"
            return
        elif tag == "code":
            self.text += "`"
            return
        elif tag == "dt":
            self.term = text
        elif tag == "dd":
            self._item(f"- **{self.term}:** {text}")
        elif tag == "li":
            self._item(f"{self.lists[-1] if self.lists else '-'} {text.removesuffix(';')}")
        elif tag in ("ol", "ul") and self.lists:
            self.lists.pop()
        elif tag in ("h3", "h4", "h5"):
            self.blocks.append(f"**{text}**")
        elif tag in BLOCKS and text:
            self.blocks.append(text)
        else:
            return
        self.text = ""

    def _item(self, line: str) -> None:
        if self.blocks and re.match(r"(- |1\. )", self.blocks[-1]) and self.blocks[-1][:2] == line[:2]:
            self.blocks[-1] += f"\n{line}"
        else:
            self.blocks.append(line)


def to_markdown(markup: str) -> str:
    """This project's HTML (tables, boxes, lists, cards) as Markdown; text from outside stays text."""
    reader = _Reader()
    reader.feed(markup)
    return "\n\n".join(reader.blocks)
