"""The page in Debian's Chromium: no request, no complaint, no overflow, sound anchors, whole figures, axe."""

from __future__ import annotations

import base64
import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import chromium
import pytest
import report_data
from servebook.report.render import render

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PATH is None, reason="Chromium is not installed here"),
]
AXE = "axe-core@4.14.1"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    rows = report_data.spoiled(report_data.points())
    report_data.run_folder(folder, rows, title=f"A run with {report_data.NASTY}")
    return render(folder, report_data.notebooks(folder / "notebooks", rows))


@pytest.fixture(scope="module")
def book(page: Path) -> Path:
    """The lab book beside the report."""
    return page.with_name("labbook.html")


@pytest.fixture(scope="module", params=["report.html", "labbook.html"])
def either(request: pytest.FixtureRequest, page: Path) -> Path:
    return page.with_name(request.param)


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    with chromium.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("AXE_CORE")  # a copy of axe.min.js, where npm has no network
    if given:
        return Path(given).read_text()
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("axe-core needs npm, or AXE_CORE=path/to/axe.min.js")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), AXE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {done.stderr[-200:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 375])
def test_quiet_and_within_its_width(tab: chromium.Tab, either: Path, width: int, dark: bool) -> None:
    tab.open(either, width=width, dark=dark)
    assert tab.ask("document.scrollingElement.scrollWidth") <= width
    # opened, the folded parts stay inside too
    tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.ask("document.scrollingElement.scrollWidth") <= width
    assert tab.requests() == []
    assert tab.complaints() == []


def test_follows_the_readers_theme(tab: chromium.Tab, page: Path) -> None:
    def colours() -> list[str]:
        return tab.ask(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.sb-wide path')).fill]"
        )

    tab.open(page)
    light = colours()
    tab.open(page, dark=True)
    dark = colours()
    assert light[0] == light[1] and dark[0] == dark[1]  # a figure's paper is the page's
    assert light != dark


def test_ids_are_unique_and_fragments_resolve(tab: chromium.Tab, page: Path, either: Path) -> None:
    tab.open(either)
    ids = tab.ask("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    wanted = tab.ask("[...document.querySelectorAll('a[href^=\"#\"]')].map(e => e.getAttribute('href').slice(1))")
    assert len(wanted) > 10
    assert set(wanted) <= set(ids)
    elsewhere = tab.ask("[...document.querySelectorAll('a[href*=\".html\"]')].map(e => e.getAttribute('href'))")
    assert elsewhere
    for name, _, fragment in (href.partition("#") for href in elsewhere):
        text = page.with_name(name).read_text()  # the other file is there, and so is the place in it
        assert not fragment or f'id="{fragment}"' in text
    named = tab.ask(
        "[...document.querySelectorAll('[aria-labelledby],[aria-describedby]')].flatMap("
        "e => ((e.getAttribute('aria-labelledby')||'')+' '+(e.getAttribute('aria-describedby')||''))"
        ".trim().split(/\\s+/))"
    )
    assert set(named) <= set(ids)
    referred = tab.ask("[...document.querySelectorAll('use')].map(e => e.getAttribute('href').slice(1))")
    assert set(referred) <= set(ids)


def test_foreign_text_stays_text(tab: chromium.Tab, either: Path) -> None:
    tab.open(either)
    assert tab.ask("document.scripts.length") == 0
    text = tab.ask("document.body.textContent")
    assert text.count(report_data.NASTY) >= 3  # title, note, server's fault; facts, printed text
    assert (
        tab.ask(
            "[...document.querySelectorAll('*')].filter("
            "e => [...e.attributes].some(a => a.name.startsWith('on'))).length"
        )
        == 0
    )


def test_math_is_math(tab: chromium.Tab, book: Path) -> None:
    tab.open(book)
    assert tab.ask("document.querySelectorAll('math').length") >= 5
    visible = tab.ask("[...document.querySelectorAll('p, li, td, h2, h3')].map(e => e.innerText).join('\\n')")
    assert "\\frac" not in visible and "$$" not in visible
    assert "$5 and $6" in visible  # code is left alone
    assert tab.ask("document.querySelector('mfrac').getBoundingClientRect().height") > 20
    tab.open(book, width=375)  # a formula wider than a phone scrolls in its box
    boxes = tab.ask(
        "[...document.querySelectorAll('.sb-math')].map(e => [e.scrollWidth, e.clientWidth, "
        "e.firstElementChild.getBoundingClientRect().width])"
    )
    assert any(inner > shown for inner, shown, _ in boxes) and all(w <= inner + 1 for inner, _, w in boxes)


def test_the_answer_is_on_the_first_screen_and_contents_are_folded_on_a_phone(tab: chromium.Tab, page: Path) -> None:
    for width, height in ((1280, 900), (375, 1000)):  # of a phone a tenth more: where only a wide font is installed
        tab.open(page, width=width)
        bottom = "document.querySelector('.sb-claim').getBoundingClientRect().bottom"
        assert tab.ask(bottom) < height
    assert tab.ask("document.querySelector('.nav-narrow').getBoundingClientRect().height") < 60
    tab.open(page, width=1280)
    assert tab.ask("document.querySelector('.sb-cards').getBoundingClientRect().bottom") < 900


def test_values_show_when_the_pointer_rests(tab: chromium.Tab, page: Path) -> None:
    """SVG titles over the points, hit by the pointer, on the wide figures."""
    tab.open(page)
    first = "document.querySelector('.sb-wide circle title').parentNode"
    tab.ask(f"{first}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    hit = tab.ask(
        "(c => { const b = c.getBoundingClientRect();"
        " return document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2)?.querySelector('title') !== null })"
        "(document.querySelector('.sb-wide circle title').parentNode)"
    )
    assert hit
    titles = tab.ask("[...document.querySelectorAll('.sb-wide circle title')].map(e => e.textContent)")
    assert any("measured" in t and "predicted" in t for t in titles)
    assert tab.ask("document.querySelectorAll('.sb-narrow circle title').length") == 0


def test_figures_have_a_picture_and_words(tab: chromium.Tab, book: Path) -> None:
    for width, shown, other in ((1200, ".sb-wide", ".sb-narrow"), (375, ".sb-narrow", ".sb-wide")):
        tab.open(book, width=width)
        heights = tab.ask(f"[...document.querySelectorAll('{shown} svg')].map(e => e.getBoundingClientRect().height)")
        assert len(heights) >= 4 and min(heights) > 80
        assert tab.ask(f"[...document.querySelectorAll('{other} svg')].every(e => !e.getBoundingClientRect().height)")
    words = tab.ask(
        "[...document.querySelectorAll('figure svg[role=img]')].map(e => e.getAttribute('aria-labelledby')"
        ".split(' ').map(i => document.getElementById(i).textContent).join(' '))"
    )
    assert min(map(len, words)) > 150
    assert all(any(c.isdigit() for c in w) for w in words)


def test_the_download_is_the_csv(tab: chromium.Tab, page: Path) -> None:
    tab.open(page)
    link = tab.ask("(e => [e.download, e.href])(document.querySelector('a[download$=\"points.csv\"]'))")
    assert link[0].endswith("points.csv")
    head, _, coded = link[1].partition(",")
    assert head.startswith("data:text/csv")
    text = unquote(coded)
    assert text == (page.parent / "points.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(report_data.points()) and rows[0]["sweep"]


def test_prints_whole_figures(tab: chromium.Tab, book: Path) -> None:
    tab.open(book)
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert tab.ask("getComputedStyle(document.querySelector('.sb-figure')).breakInside") == "avoid"
        assert tab.ask("document.querySelector('.sb-wide svg').getBoundingClientRect().height") > 80
        assert tab.ask("[...document.querySelectorAll('nav')].every(e => getComputedStyle(e).display === 'none')")
        pdf = base64.b64decode(tab.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 3


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(tab: chromium.Tab, either: Path, axe: str, dark: bool) -> None:
    tab.open(either, dark=dark)
    tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    tab.ask(axe + "; 1")
    found = tab.ask(
        "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map("
        "v => v.impact + ' ' + v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html.slice(0, 160)).join(' | ')))"
    )
    assert [f for f in found if f.startswith(("serious", "critical"))] == []


@pytest.mark.parametrize("width", [375, 1280])
def test_a_table_says_that_it_scrolls_where_it_does(tab: chromium.Tab, page: Path, width: int) -> None:
    """At 1280 px no table of the report is wider than its column, on a phone some are."""
    tab.open(page, width=width)
    # two frames, or half a second where none is drawn: the scroll timelines begin with one
    tab.ask(
        "Promise.race([new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r()))),"
        " new Promise(r => setTimeout(r, 500))])"
    )
    boxes = tab.ask(
        "[...document.querySelectorAll('.sb-scroll')].filter(b => b.checkVisibility()).map(b =>"
        " [b.scrollWidth > b.clientWidth + 1, b.querySelector('.sb-more').checkVisibility()])"
    )
    if not tab.ask("CSS.supports('animation-timeline: scroll(self inline)')"):
        pytest.skip("this Chromium has no scroll timelines; such browsers show the shaded edge alone")
    assert boxes and all(scrolls == says for scrolls, says in boxes)
    assert any(scrolls for scrolls, _ in boxes) == (width == 375)
