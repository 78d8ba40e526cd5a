"""The page without a browser: bytes, size, escaping, markdown, outputs, tables, the short post."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
import report_data
import yaml
from servebook.charts import words
from servebook.common.errors import ServebookError
from servebook.report import notes, outputs, scrub, tables
from servebook.report.markdown import Ids, Renderer, markdown, mathml
from servebook.report.render import render, written
from servebook.report.scrub import ROOT, Scrub
from servebook.report.social import social, write_social
from servebook.scoring import score


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("run")
    rows = report_data.points()
    report_data.run_folder(folder, rows)
    return folder, report_data.notebooks(folder / "notebooks", rows)


def test_same_bytes_quickly_and_small(run: tuple[Path, list[Path]], tmp_path: Path) -> None:
    folder, books = run
    page = render(folder, books).read_bytes()
    assert render(folder, books, tmp_path / "again.html").read_bytes() == page
    assert len(page) < 1_000_000
    assert not re.search(rb"<script|<link[^>]+stylesheet|@import|url\(['\"]?http", page)


def test_order_title_and_links(run: tuple[Path, list[Path]]) -> None:
    folder, books = run
    page = render(folder, books).read_text()
    assert "<title>Serving Qwen2.5-7B on an A40, predicted first</title>" in page
    assert page.count("<h1>") == 1
    book = (folder / "labbook.html").read_text()
    assert page.index("What the prediction got wrong") < page.index('<a href="labbook.html">labbook.html</a>')
    assert '<a href="labbook.html#01-prediction">' in page and 'id="01-prediction"' not in page
    assert book.index('id="01-prediction"') < book.index('id="03-concurrency"') < book.index('id="glossary"')
    assert '<a href="#03-concurrency">the sweep</a>' in book and '<a href="report.html">report</a>' in book
    assert written(folder / "report.html") == [folder / "report.html", folder / "labbook.html"]
    assert "Prediction “datasheet” frozen 2026-01-02T03:00:00Z" in page
    assert "First measured point of a sweep began 2026-01-02T03:04:05Z" in page


def test_a_figure_shown_twice_is_a_link_the_second_time(run: tuple[Path, list[Path]]) -> None:
    folder, books = run
    again = shutil.copy(books[1], folder / "notebooks" / "04_again.ipynb")  # draws the chapter's charts once more
    render(folder, [*books, again])
    page = (folder / "labbook.html").read_text()
    assert page.count('<figure class="sb-figure" id="throughput-c512') == 1
    assert 'Shown above: <a href="#throughput-c512">Concurrency against decode throughput' in page
    report = (folder / "report.html").read_text()
    assert report.count('<figure class="sb-figure" id="throughput-c512') == 1  # each file holds its figures


def test_chapters_of_one_notebook_are_told_apart(tmp_path: Path) -> None:
    names = ("03_x.hf", "03_x.vllm", "07_y")
    books = [report_data.notebook(tmp_path / f"{n}.ipynb", [f"# {'Sweep' if '03' in n else 'Other'}"]) for n in names]
    page = render(tmp_path, books).read_text()
    assert ">Sweep: hf</a>" in page and ">Sweep: vllm</a>" in page and ">Other</a>" in page


def test_the_report_shows_a_chapters_cells_that_are_tagged_for_it(tmp_path: Path) -> None:
    said = {"output_type": "display_data", "data": {"text/markdown": "Two H200."}, "metadata": {}}
    long = {"output_type": "display_data", "data": {"text/markdown": "Every set-up."}, "metadata": {}}
    post = report_data.notebook(tmp_path / "08_post.ipynb", ["# Post", "## What it cost"])
    book = report_data.notebook(tmp_path / "choose.ipynb", ["# Which card", ("lead()", [said]), ("rest()", [long])])
    plain = render(tmp_path, [post, book]).read_text()
    assert "Two H200." not in plain, "no cell is tagged"
    notebook = nbformat.read(book, as_version=4)
    notebook.cells[1].metadata["tags"] = ["report"]
    nbformat.write(notebook, book)
    page = render(tmp_path, [post, book]).read_text()
    assert page.index("What it cost") < page.index("Two H200.") and "Every set-up." not in page
    assert (
        '<a href="labbook.html#choose">Which card</a>' in page and '<a href="#choose-title">Which card</a>' in page
    ), "contents, too"
    lab = (tmp_path / "labbook.html").read_text()
    assert "Two H200." in lab and "Every set-up." in lab
    assert "Two H200." in render(tmp_path, [book]).read_text(), "a page without a post holds the chapter itself"


def test_later_sessions_show_what_differs() -> None:
    first = {"git": {"commit": "aaa"}, "python": "3.11"}
    made = tables.reproducibility_box({"sessions": [first, first | {"git": {"commit": "bbb"}}]})
    assert made.count("3.11") == 1 and "commit bbb" in made and "Session 2, where it differs" in made


def test_sessions_that_only_told_again_are_one_line() -> None:
    first = {"command": "servebook run params/x.yaml", "python": "3.11"}
    again = {"command": "servebook run params/x.yaml --only 08_post", "python": "3.12"}
    made = tables.reproducibility_box({"sessions": [first, again, again]})
    assert "Analysed again 2 times since" in made and "3.12" not in made and "Session 2" not in made


def test_rules_of_the_figures_stand_once_in_the_head(run: tuple[Path, list[Path]]) -> None:
    page = render(*run).read_text()
    head, _, body = page.partition("</head>")
    rules = re.findall(r"\.(k[a-z2-7]{6})\{", head)
    assert len(rules) == len(set(rules)) and "<style" not in body
    assert set(re.findall(r'class="(k[a-z2-7]{6})"', body)) == set(rules)


def test_reasons_of_the_audit_are_listed() -> None:
    made = tables.points_table(report_data.spoiled(report_data.points()), "c512")
    assert "Why the audit marked 2 points" in made and "prefix-cache hits on 41" in made and "<script" not in made


def test_two_engines_that_batch_are_compared_too() -> None:
    rows = pd.DataFrame(report_data.points(engines=("vllm", "sglang")))
    engines = {name: SimpleNamespace(continuous_batching=True) for name in ("vllm", "sglang")}
    assert "sglang against vllm" in tables.engine_gap(rows, SimpleNamespace(engines=engines))
    one = SimpleNamespace(engines={"vllm": SimpleNamespace(continuous_batching=True)})
    assert "no two engines" in tables.engine_gap(rows, one)


def test_no_noise_from_the_notebooks(run: tuple[Path, list[Path]]) -> None:
    page = render(*run).read_text()
    for noise in ("it/s", "only for the terminal", "HBox", "\x1b", "example.com", "onclick", "<!-- hidden"):
        assert noise not in page


def test_an_unreadable_notebook_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "01_prediction.ipynb"
    bad.write_text("{")
    with pytest.raises(ServebookError, match="cannot read the notebook"):
        render(tmp_path, [bad])


def test_a_failed_cell_is_shown_escaped(tmp_path: Path) -> None:
    error = {
        "output_type": "error",
        "ename": "ValueError",
        "evalue": report_data.NASTY,
        "traceback": [f"\x1b[31m{report_data.NASTY}"],
    }
    book = report_data.notebook(tmp_path / "01_prediction.ipynb", ["# P", ("f()", [error])])
    page = render(tmp_path, [book]).read_text()
    assert "This cell failed." in page and report_data.NASTY not in page


@pytest.mark.parametrize(
    ("source", "has", "lacks"),
    [
        ("$x^2$", "<msup>", "$x"),
        ("$$\n\\frac{a}{b}\n$$", "<mfrac>", "$$"),
        ("`$x$`", "<code>$x$</code>", "<math"),
        ("```\n$$y$$\n```", "$$y$$", "<math"),
        ("costs $5 to $6", "costs $5 to $6", "<math"),
        ("<script>x</script>", "&lt;script&gt;", "<script"),
        ("[a](javascript:alert(1))", "a", "javascript"),
        ("![alt words](https://example.com/x.png)", "alt words", "<img"),
        ("[b](https://example.com)", '<a href="https://example.com">b</a>', "target"),
        ("| | b |\n|---|---|\n| 1 | 2 |", "<td></td>", "<th></th>"),
        ("<!-- TODO -->text", "text", "TODO"),
    ],
)
def test_markdown(source: str, has: str, lacks: str) -> None:
    body = markdown(source)
    assert has in body and lacks not in body


def test_bad_tex_is_code_not_a_crash() -> None:
    for tex in (r"\frac", r"\begin{foo}", r"x_", r"\unknown x"):
        assert mathml(tex, display=False) == f"<code>{tex}</code>"


def test_tex_cannot_carry_markup() -> None:
    # latex2mathml's own output has a live <script> here
    made = mathml(r"\text{<script>alert(1)</script>} \href{javascript:x}{y}", display=False)
    assert "<script" not in made and "&lt;script&gt;" in made and "javascript" not in made
    assert "<mtr>" in mathml(r"\begin{aligned} a &= b \\ c &= d \end{aligned}", display=True)


def test_headings_and_footnotes_never_share_an_id() -> None:
    ids = Ids()
    body = "".join(markdown("# One\n\nx[^1]\n\n[^1]: note", Renderer(ids, "a-")) for _ in range(2))
    found = re.findall(r'id="([^"]+)"', body)
    assert len(found) == len(set(found)) == 6
    assert set(re.findall(r'href="#([^"]+)"', body)) <= set(found)


def test_only_our_own_html_passes_whole() -> None:
    page = Renderer(Ids())
    data = {"text/html": "<figure id='x'><svg onload='a()'></svg></figure><script>b()</script>", "text/plain": ""}
    body = outputs.cell_outputs([{"output_type": "display_data", "data": data, "metadata": {}}], page)
    assert "<svg" not in body and "<script" not in body and "b()" not in body


def test_pandas_tables_get_scopes_and_no_empty_header() -> None:
    frame = pd.DataFrame({"a": [1], "b": [report_data.NASTY]})
    body = outputs.sanitize(frame._repr_html_())
    assert "<th></th>" not in body and 'scope="col"' in body and "<style" not in body
    assert "<script" not in body and "border: " not in body


def test_progress_bars_and_colours_leave_the_last_state() -> None:
    text = (
        " 10%|# | 1/10 [00:00<00:09, 1.00it/s]\r\x1b[32mloading\rdone\x1b[0m\n100%|##| 10/10 [00:09<00:00, 1.0it/s]\n"
    )
    assert outputs.terminal_text(text) == "done"


def test_tables_escape_and_keep_our_markup() -> None:
    made = tables.table(tables.columns({"a": [report_data.NASTY], "b": [tables.verdict("hit")]}), report_data.NASTY)
    assert "<script" not in made and '<span class="sb-verdict sb-hit">hit</span>' in made
    data, metadata = made._repr_mimebundle_()
    assert metadata["servebook"]["trusted"] and data["text/html"] == made


def test_headline_figures_are_the_datas() -> None:
    rows = report_data.points()
    scores = score.score(rows, report_data.predictions(rows))
    made = tables.headline(rows, scores, hardware="A40", versions="vLLM 0.32")
    best = max(r["output_tok_per_s"] for r in rows if r["engine"] == "vllm")
    assert (
        f">{best:.0f} <" in made
        and made.count("<li>") == 3
        and made.count("95 % interval") + made.count("95\u00a0% interval") == 3
    )
    assert "A40 · vLLM 0.32" in made


def test_misses_name_the_regime_and_the_place() -> None:
    rows = report_data.points()
    prose = tables.misses_prose(score.score(rows, report_data.predictions(rows)))
    assert (
        "at C\u00a0=\u00a0128" in prose
        and "Predicted bottleneck: memory traffic." in prose
        and "14\u00a0% too high" in prose
    )
    exact = score.score(rows, report_data.predictions(rows)).assign(error_share=0.0, ratio=1.0, verdict="hit")
    assert "No prediction was off by more than 10" in tables.misses_prose(exact)


def test_a_miss_says_where_an_open_loop_got_another_rate_than_it_was_to_have() -> None:
    rows = [
        {"sweep": "rate", "engine": "vllm", "point": f"r{r:.3f}", "kind": "arrival_rate", "rate_per_s": r,
         "arrival_rate_per_s": r * more, "prompt_tokens": 512, "output_tokens": 128, "requests": 400,
         "ttft_mean_s": 0.1, "verdict": "valid"}
        for r, more in ((10.0, 1.01), (20.0, 1.13))
    ]  # fmt: skip
    said = [
        {k: r.get(k) for k in (*score.KEY, *score.CONDITIONS)} | {"metrics": {"ttft_s": {"value": 0.05}}} for r in rows
    ]
    prose = tables.misses_prose(score.score(rows, said)).replace("\u00a0", " ")
    assert "At 20 requests/s, 22.6/s actually arrived." in prose and "At 10 requests/s, " not in prose


def test_limits_follow_the_parameters() -> None:
    dummy = {"model": {"weights": "dummy"}, "sweeps": {"a": {"kind": "arrival_rate"}}}
    assert "Weights are random" in tables.limits_box(dummy) and "Closed loop" not in tables.limits_box(dummy)
    real = {"model": {"weights": "real"}, "sweeps": {"a": {"kind": "concurrency"}}}
    assert "Weights are random" not in tables.limits_box(real) and "Closed loop" in tables.limits_box(real)


def test_social_post_has_the_runs_figures(run: tuple[Path, list[Path]]) -> None:
    text = write_social(run[0]).read_text()
    best = max(r["output_tok_per_s"] for r in report_data.points() if r["engine"] == "vllm")
    assert f"vllm: at best {best:.0f} output tok/s" in text and "naive: at best" not in text
    assert "Random weights" in text and "predictions came within 10 %" in text
    assert "Nothing was measured" in social([], {"frozen": []}, {"title": "Empty"})


def test_a_run_without_anything_still_renders(tmp_path: Path) -> None:
    book = report_data.notebook(tmp_path / "00_preflight.ipynb", ["# Preflight"])
    page = render(tmp_path, [book]).read_text()
    assert "This run has no stored data files." in page
    nbformat.read(book, as_version=4)  # the executed copy stays as it was


def test_folders_of_this_machine_stay_out_of_the_page(tmp_path: Path) -> None:
    folder = report_data.run_folder(tmp_path / "mine", report_data.points((1, 4)))
    root, home = str(ROOT), str(Path.home())
    source = f'PARAMS = "{root}/params/x.yaml"\nprint("{folder}/requests", "{home}/models", "/home/ann/q")'
    printed = {"output_type": "stream", "name": "stdout", "text": f"{root}/.venv and /tmp/abc/def.log of {folder}\n"}
    book = report_data.notebook(tmp_path / "00_preflight.ipynb", ["# Preflight", (source, [printed])])
    page = render(folder, [book]).read_text()
    shown = re.sub(r"<[^>]+>", "", page)
    for leak in (root, str(tmp_path), "/home/ann", "/tmp/abc"):
        assert leak not in page, leak
    for kept in ("params/x.yaml", "outputs/mine/requests", "~/q", "…/def.log", ".venv and"):
        assert kept in shown, kept
    assert home not in page or home == "/"


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/tmp/a/b",
        "AB/tmp/xyz",
        "programs may run from /tmp",
        "/rooted/x",
        "/srv/checkout-other/x",
        "1/2",
    ],
)
def test_what_only_looks_like_a_folder_is_left_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "ROOT", Path("/srv/checkout"))  # wherever this checkout lies, perhaps a temporary folder
    assert Scrub("/srv/checkout/outputs/demo")("/srv/checkout/x") == "x"
    assert Scrub("/runs/demo")(text) == text


def test_edited_notes_appear_when_the_page_is_rendered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "ROOT", tmp_path)
    rows = report_data.points((1, 4))
    folder = report_data.run_folder(tmp_path / "noted", rows)
    old = {"output_type": "display_data", "metadata": {}, "data": {"text/markdown": "Old words."}}
    book = report_data.notebook(tmp_path / "08_post.ipynb", ["# Post", ("book.notes()", [old]), "After."])
    stored = nbformat.read(book, as_version=4)
    stored.cells[1].metadata["tags"] = ["author-notes"]
    nbformat.write(stored, book)
    assert "Old words." in render(folder, [book]).read_text()  # what the notebook holds, where there is no file
    name = yaml.safe_load((folder / "params.yaml").read_text())["run"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / f"{name}.md").write_text(
        "Mine: {{ c512/vllm/c0004/ttft_mean_s }}, said {{ c512/vllm/c0004/predicted ttft_s }} <script>x</script>"
    )
    page = render(folder, [book]).read_text()
    row = next(r for r in rows if (r["sweep"], r["engine"], r["point"]) == ("c512", "vllm", "c0004"))
    assert f"Mine: {words.seconds(row['ttft_mean_s'])}, said " in page
    assert "Old words." not in page and "<script" not in page
    assert page.index("Mine:") < page.index("After.")
    assert render(folder, [book]).read_text() == page
    (tmp_path / "notes" / f"{name}.md").write_text("{{ c512/vllm/c9999/ttft_mean_s }}")
    with pytest.raises(ServebookError, match="has no figure 'c512/vllm/c9999/ttft_mean_s'"):
        render(folder, [book])


def test_the_audits_doubts_are_said_once_with_their_kind() -> None:
    rows = report_data.points((1, 4))
    doubt = {"verdict": "suspect", "reasons": ["mean TTFT ±12 %"], "reason_codes": ["wide_interval"]}
    capped = {
        "verdict": "suspect",
        "reasons": ["capped at 300 W"],
        "reason_codes": ["power_capped"],
    }
    assert "the GPU's power was capped (1 point)" in html.unescape(tables.trust([rows[0] | capped, *rows[1:]]))
    made = tables.trust([rows[0] | doubt, rows[1] | doubt, *rows[2:]])
    assert f"doubts 2 of the {len(rows)} points" in made and "not known well enough (2 points)" in made
    again = {"verdict": "invalid", "reasons": ["repeated"], "repeats_prompts": True}
    assert tables.trust([r | again for r in rows]) == "", "the prefix-cache experiment is no fault"
    assert tables.trust([r | {"verdict": "valid", "reasons": []} for r in rows]) == ""


def test_the_mean_error_says_over_what() -> None:
    rows = report_data.points((1, 4))
    scores = score.score(rows, report_data.predictions(rows))
    final = score.final(scores)
    made = tables.headline(rows, scores, hardware="A40", versions="vLLM 0.32")
    assert f"of the {len(final)} predictions frozen beforehand ({final['metric'].nunique()} metrics at " in made
    assert "measured means are uncertain by ±" in made


def test_long_tables_are_folded_and_minus_zero_is_zero() -> None:
    frame = pd.DataFrame({"a": [str(i) for i in range(30)]})
    assert tables.table(frame, "Many").startswith('<details class="sb-long"><summary>Many')
    assert "<details" not in tables.table(frame, "Many", fold=False) + tables.table(frame.head(3), "Few")
    assert words.percent(-0.0003, signed=True) == "0 %" and words.percent(-0.012, signed=True) == "−1.2 %"


def test_reproducibility_names_flags_seed_and_the_gpus_state() -> None:
    gpu = {"gpu": "NVIDIA H200", "gpus": 2, "driver": "580.1", "sm_clock_mhz": 345, "ecc": True}
    session = {"command": "servebook run params/x.yaml", "git": {"commit": "abc", "changed": True}, "gpu": gpu}
    run = SimpleNamespace(load=SimpleNamespace(seed=7))
    facts = {"vllm": {"kind": "vllm", "version": "0.32", "flags": ["--dtype", "bfloat16"]}, "other": {"kind": "openai"}}
    made = tables.reproducibility_box({"sessions": [session]}, run, facts)
    for said in ("servebook run params/x.yaml", "abc, with local changes", "2 × NVIDIA H200, driver 580.1",
                 "345 MHz", "ECC on", "<dd>7 ", "vllm 0.32; flags: --dtype bfloat16",
                 "version not reported; flags: none"):  # fmt: skip
        assert said in made, said


def test_the_social_post_compares_at_one_load_and_says_why(run: tuple[Path, list[Path]]) -> None:
    engines = {"naive": {"kind": "naive"}, "vllm": {"kind": "vllm"}}
    text = social(report_data.points(), {"frozen": []}, {"title": "T", "engines": engines})
    line = next(x for x in text.splitlines() if x.startswith("At the same load, C = 16"))
    assert "naive" in line and "batching" in line and "×" in line


def test_a_doubt_stands_beside_the_figure_that_it_concerns() -> None:
    """The claim's first ratio is of a doubted point, the one at C = 1 of a valid one."""
    rows = report_data.points()
    frame = pd.DataFrame(rows)
    pairs = frame[frame["engine"] == "naive"].merge(frame[frame["engine"] == "vllm"], on=["sweep", "point"])
    top = pairs.loc[(pairs["output_tok_per_s_y"] / pairs["output_tok_per_s_x"]).idxmax()]
    for row in rows:
        if (row["sweep"], row["point"], row["engine"]) == (top["sweep"], top["point"], "vllm"):
            row["verdict"] = "suspect"
    made = tables.answer(rows, pd.DataFrame(), report_data.PARAMS)
    first, second = made[: made.index(" times at 1 concurrent request")], made.index("highest rate is")
    assert "sb-doubt" in first and "sb-doubt" not in made[len(first) : second]


def test_the_claim_is_of_the_concurrency_sweeps_and_costs_are_of_the_same_lengths() -> None:
    rows = report_data.points()
    for row in rows:
        if row["sweep"] == "prompt" and row["engine"] == "vllm":
            row["output_tok_per_s"] *= 1000  # a control that would win by far
    made = tables.answer([r for r in rows if r["sweep"] != "prompt"], pd.DataFrame(), report_data.PARAMS)
    ratio = re.search(r"vLLM gives ([\d.]+) times", made)[1]
    assert f"vLLM gives {ratio} times" in tables.answer(rows, pd.DataFrame(), report_data.PARAMS)


def test_points_are_named_by_their_load() -> None:
    stops = [{"sweep": "s", "engine": "hf", "loads": "C = 16, 32", "why": "stopped after 4 min"}]
    assert "C\u00a0=\u00a016, 32 not measured: stopped" in tables.missing({}, stops)
    assert "C\u00a0=\u00a016, 32" in tables.stopped(stops, "s")


def test_the_highest_rate_is_of_a_point_that_agrees_with_little() -> None:
    """A backlog that is worked off gives more than was asked, for a while."""
    rows = report_data.points()
    vllm = [r for r in rows if r["engine"] == "vllm"]
    best = max(vllm, key=lambda r: r["output_tok_per_s"])
    made = tables.answer(rows, pd.DataFrame(), report_data.PARAMS)
    assert f"highest rate is {words.number(best['output_tok_per_s'])} output" in made
    best |= {"verdict": "suspect", "reasons": ["Little's law is off by 20 %"], "reason_codes": ["littles_law"]}
    second = max((r for r in vllm if r is not best), key=lambda r: r["output_tok_per_s"])
    made = tables.answer(rows, pd.DataFrame(), report_data.PARAMS)
    assert f"highest rate is {words.number(second['output_tok_per_s'])} output" in made
