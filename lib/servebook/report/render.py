"""Executed notebooks and a run's results as two HTML files, report and lab book: no script, no request, same bytes.

One module, since both files are written from the same chapters in one pass.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..charts.words import listing
from ..common.errors import ServebookError
from ..common.notebook_format import quick_import
from ..config.points import CALIBRATION
from ..run_folder import frozen_predictions, results, stored_params
from ..run_folder.layout import RunFiles
from . import notes, outputs
from .markdown import Ids, Renderer, markdown, permalink, slug
from .page import FIXED_IDS, TEMPLATE, Chapter, download, write_page
from .scrub import Scrub

HIDDEN = {"remove-cell", "notebook-only"}  # tags of cells that stay out of the page
IN_REPORT = "report"  # tag of a chapter's cells that the report shows, too
LARGEST_DOWNLOAD = 600_000  # bytes
LAB_BOOK = "labbook.html"


def render(
    run_dir: Path | str, notebooks: Sequence[Path | str], out: Path | str | None = None, *, url: str | None = None
) -> Path:
    """Write the report of a run and return its path (`out`, else report.html in the run's folder).

    notebooks: executed copies in order. The post (08…) becomes the report; the others become chapters of labbook.html
    in the same folder, which the report links to. A chapter's cells tagged `report` are added to the report after the
    post. Without a post, one page has the chapters. The author's notes are read again, and paths of this machine are
    removed (report/notes.py, report/scrub.py). url: the page's future address, for the social card's tags. Raises
    ServebookError for an unreadable notebook."""
    run_dir = Path(run_dir)
    paths = [Path(n) for n in notebooks]
    out = Path(out) if out else RunFiles(run_dir).report
    posts = [p for p in paths if _is_post(p)]
    others = [p for p in paths if not _is_post(p)]
    book = out.with_name(LAB_BOOK)
    ids, lab_ids = page_ids(), page_ids()
    anchors = {p.name: lab_ids.new(slug(p.stem)) for p in others}
    report_name, lab_name = (out.name, book.name) if posts else ("", "")
    here = {name: f"#{anchor}" for name, anchor in anchors.items()}
    there = {name: f"{lab_name}{target}" for name, target in here.items()}
    scrub, remarks = Scrub(run_dir), notes.read(run_dir, stored_params.read(run_dir).get("run"))
    post = [
        chapter(p, ids, {**there, p.name: "#post"}, ids.new("post"), post=True, scrub=scrub, remarks=remarks)
        for p in posts
    ]
    post += [part for p in others if (part := excerpt(p, ids, there, scrub)) is not None] if posts else []
    links = here | {p.name: f"{report_name}#post" for p in posts}
    chapters = [chapter(p, lab_ids, links, anchors[p.name], post=False, scrub=scrub) for p in others]
    _tell_apart(others, chapters)
    context = _context(run_dir) | {"url": url}
    if not context["title"]:
        context["title"] = post[0].title if post else run_dir.name
    if not posts:
        return write_page(out, [], chapters, context)
    if chapters:
        back: dict[str, Any] = {
            "report": report_name,
            "title": f"Lab book: {context['title']}",
            "downloads": [],
            "url": None,
            "lead": "",
        }
        write_page(book, [], chapters, context | back | {"kicker": "The executed notebooks"})
    lab = [(c.title, f"{lab_name}#{c.anchor}") for c in chapters]
    return write_page(out, post, [], context | {"lab": lab, "lab_book": lab_name})


def page_ids() -> Ids:
    """Ids for a page, without those of its template."""
    ids = Ids()
    for fixed in FIXED_IDS:
        ids.new(fixed)
    return ids


def written(report: Path) -> list[Path]:
    """The files of a report that exist: itself, and its lab book."""
    return [p for p in (report, report.with_name(LAB_BOOK)) if p.exists()]


def _tell_apart(paths: Sequence[Path], chapters: Sequence[Chapter]) -> None:
    """A notebook that ran once an engine (03_x.vllm.ipynb) gives chapters of one title: add the engine's name."""
    titles = [c.title for c in chapters]
    for path, part in zip(paths, chapters, strict=True):
        suffix = path.stem.partition(".")[2]
        if suffix and titles.count(part.title) > 1:
            part.title = f"{part.title}: {suffix}"


def _is_post(path: Path) -> bool:
    return bool(re.match(r"0?8[_-]", path.name)) or path.stem == "post"


# ---- notebooks --------------------------------------------------------------------------------------------------


def chapter(
    path: Path,
    ids: Ids,
    links: Mapping[str, str],
    anchor: str,
    *,
    post: bool,
    scrub: Scrub,
    remarks: str | None = None,
) -> Chapter:
    """One executed notebook as HTML, by nbconvert with this project's template. links: {notebook: its address};
    remarks: the author's notes."""
    notebook = _read(path)
    scrub.notebook(notebook)
    put_notes(notebook, remarks)
    title = _take_title(notebook)
    body, sections = _exported(notebook, ids, links, "" if post else f"{anchor}-", post=post)
    return Chapter(title or path.stem.replace("_", " "), anchor, body, sections)


def excerpt(path: Path, ids: Ids, links: Mapping[str, str], scrub: Scrub) -> Chapter | None:
    """The part of a chapter shown in the report: title, cells tagged `report`, and a link to the rest; None if no
    cell is tagged."""
    notebook = _read(path)
    scrub.notebook(notebook)
    title = _take_title(notebook) or path.stem.replace("_", " ")
    notebook.cells = [c for c in notebook.cells if IN_REPORT in c["metadata"].get("tags", [])]
    if not notebook.cells:
        return None
    anchor = ids.new(slug(path.stem))
    body, _ = _exported(notebook, ids, links, f"{anchor}-", post=True)
    rest = f'<p>The whole chapter is in the lab book: <a href="{links[path.name]}">{html.escape(title)}</a>.</p>'
    head = f'<h2 id="{anchor}-title">{html.escape(title)} {permalink(f"{anchor}-title", title)}</h2>'
    return Chapter(title, anchor, head + body + rest, [(2, html.escape(title), f"{anchor}-title")])


def _read(path: Path) -> Any:
    with quick_import():
        import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise ServebookError(
            "cannot read the notebook", str(path), "Run its stage again: servebook run --only"
        ) from error


def _exported(
    notebook: Any, ids: Ids, links: Mapping[str, str], prefix: str, *, post: bool
) -> tuple[str, list[tuple[int, str, str]]]:
    """(a notebook's cells as HTML, its sections: level, heading, anchor). prefix: of its anchors."""
    from nbconvert.exporters.templateexporter import TemplateExporter

    sections: list[tuple[int, str, str]] = []

    def heading(level: int, text: str, at: str) -> None:
        sections.append((level, text, at))

    renderer = Renderer(ids, prefix, 0 if post else 1, links, on_heading=heading)

    def as_markdown(cell: Mapping[str, Any]) -> str:
        renderer.images = _attachments(cell)
        return markdown(cell["source"], renderer)

    exporter = TemplateExporter(
        template_file=str(TEMPLATE / "chapter.html.j2"),
        extra_template_basedirs=[str(TEMPLATE)],
        filters={
            "servebook_markdown": as_markdown,
            "servebook_outputs": lambda cell: outputs.cell_outputs(cell.get("outputs", []), renderer),
            "servebook_code": highlight,
            "servebook_hidden": lambda cell: bool(HIDDEN & set(cell["metadata"].get("tags", []))),
        },
    )
    notebook.metadata["servebook_code_last"] = post  # in the post, results come before code
    notebook.cells = _joined_code(notebook.cells)
    body, _ = exporter.from_notebook_node(notebook)
    return body, sections


def _joined_code(cells: list[Any]) -> list[Any]:
    """Neighbouring code cells without output between them become one, to be folded once."""
    joined: list[Any] = []
    for cell in cells:
        last = joined[-1] if joined else None
        hidden = HIDDEN & {*cell["metadata"].get("tags", []), *(last["metadata"].get("tags", []) if last else [])}
        if last and not hidden and last.cell_type == cell.cell_type == "code" and not last.outputs:
            last.source = f"{last.source.rstrip()}\n\n{cell.source}"
            last.outputs = cell.outputs
        else:
            joined.append(cell)
    return joined


def put_notes(notebook: Any, remarks: str | None) -> None:
    """The notes as they are now in the place of those that the notebook was executed with."""
    from nbformat.v4 import new_output

    for cell in notebook.cells:
        if remarks is not None and cell.cell_type == "code" and notes.TAG in cell["metadata"].get("tags", []):
            cell.outputs = [new_output("display_data", {"text/markdown": remarks})]


def _take_title(notebook: Any) -> str:
    """The first H1, taken out of its cell: the page sets it."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            match = re.search(r"^# +(.+?)\s*#*$", cell.source, re.MULTILINE)
            if match:
                cell.source = (cell.source[: match.start()] + cell.source[match.end() :]).strip("\n")
                return match[1]
    return ""


def _attachments(cell: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, bundle in (cell.get("attachments") or {}).items():
        for kind, coded in bundle.items():
            found[name] = f"data:{kind};base64,{coded}"
    return found


def highlight(source: str) -> str:
    """Python source with token classes, escaped; without those that the style sheet gives no colour."""
    from pygments import highlight as paint
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    coloured = set(re.findall(r"\.(c-\w+)", (TEMPLATE / "style.css").read_text(encoding="utf-8")))
    painted = paint(source, PythonLexer(), HtmlFormatter(nowrap=True, classprefix="c-"))
    return re.sub(r'<span class="([\w-]+)">(.*?)</span>', lambda m: m[0] if m[1] in coloured else m[2], painted)


# ---- the page's frame -------------------------------------------------------------------------------------------


def _context(run_dir: Path) -> dict[str, Any]:
    run = stored_params.read(run_dir)
    return {
        "title": run.get("title"),
        "description": run.get("description") or described(run, run_dir),
        "lead": run.get("description") or described(run, run_dir),
        "run": run.get("run") or run_dir.name,
        "stamp": _stamp(run_dir),
        "downloads": downloads(run_dir),
    }


def described(run: Mapping[str, Any], run_dir: Path) -> str:
    """What a run compares, in one sentence, where its parameters give none: of the engines that measured something."""
    model, hardware = run.get("model") or {}, run.get("hardware") or {}
    name = model.get("hub") or model.get("config") or model.get("path")
    card = hardware.get("gpu") or (hardware.get("figures") or {}).get("name")
    if not name or not run.get("engines"):
        return "LLM serving: predicted, then measured."
    with_ = f" with {q} weights" if (q := model.get("quantization")) else ""
    on = f" on {card}" if card and card not in ("auto", "detect") else ""
    measured = [e for e in run["engines"] if RunFiles(run_dir).points(e)]
    served = [_engine(e, run["engines"][e]) for e in measured or run["engines"]]
    return f"{name}{with_}{on}, served by {listing(served)}."


def _engine(name: str, how: Any) -> str:
    kind = (how or {}).get("kind", name)
    return {"vllm": "vLLM", "naive": f"a naive Hugging Face Transformers server ({name})"}.get(kind, name)


def _stamp(run_dir: Path) -> list[str]:
    """When each prediction was frozen and when the first measurement of a sweep began."""
    lines = []
    for entry in frozen_predictions.read(run_dir)["frozen"]:
        digest = str(entry.get("inputs_sha256") or "")[:12]
        lines.append(
            f"Prediction “{entry['stage']}” frozen {entry.get('time_utc')}" + (f" (inputs {digest}…)" if digest else "")
        )
    points = [p for p in results.read_points(run_dir) if p.sweep != CALIBRATION]
    if starts := [p.started_at for p in points if p.started_at]:
        lines.append(f"First measured point of a sweep began {min(starts)}")
    return lines


def downloads(run_dir: Path) -> list[dict[str, str]]:
    """The run's data as files inside the page."""
    kinds = {"points.csv": "text/csv", "predictions.csv": "text/csv", "params.yaml": "application/yaml"}
    what = {
        "points.csv": "every measured point",
        "predictions.csv": "every frozen prediction with its interval",
        "params.yaml": "the run's parameters",
    }
    found = []
    scrub = Scrub(run_dir)
    for name, kind in kinds.items():
        raw = _predictions_csv(run_dir) if name == "predictions.csv" else _bytes(run_dir / name)
        if name == "params.yaml":
            raw = scrub(raw.decode()).encode()
        if raw and len(raw) <= LARGEST_DOWNLOAD:
            found.append(download(name, raw, kind, what[name], f"{run_dir.name}-{name}"))
    return found


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _predictions_csv(run_dir: Path) -> bytes:
    from ..scoring.score import prediction_frame

    stored = frozen_predictions.read(run_dir)
    if not stored["frozen"]:
        return b""
    frame = prediction_frame(stored)
    return str(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")).encode()
