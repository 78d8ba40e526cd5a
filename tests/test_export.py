"""The post for a blog engine, the card, and runs side by side."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote

import pytest
import report_data
import yaml
from PIL import Image
from servebook.cli import command as cli
from servebook.common.errors import ServebookError
from servebook.report.card import write_card
from servebook.report.compare import compare, ratio_frame
from servebook.report.export import export_post, to_markdown
from servebook.report.scrub import ROOT
from servebook.report.social import write_social
from servebook.run import replay

ROWS = report_data.points((1, 4))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = report_data.run_folder(tmp_path_factory.mktemp("run"), ROWS)
    return folder, report_data.notebooks(folder / "notebooks", ROWS)[-1]


@pytest.mark.parametrize(("engine", "key"), [("hugo", "date"), ("jekyll", "layout"), ("astro", "pubDate")])
def test_front_matter_is_yaml_of_the_engine(run: tuple[Path, Path], tmp_path: Path, engine: str, key: str) -> None:
    text = export_post(*run, tmp_path, front_matter=engine).read_text()
    fields = yaml.safe_load(text.split("---")[1])
    assert fields["title"].startswith("Serving Qwen2.5-7B") and key in fields


def test_images_exist_and_figures_are_the_pages(run: tuple[Path, Path], tmp_path: Path) -> None:
    index = export_post(*run, tmp_path, front_matter="none")
    text = index.read_text()
    images = re.findall(r"!\[[^\]]{80,}\]\((images/[^)]+)\)", text)
    assert "images/throughput-c512.svg" in images and len(images) == 3
    for image in images:
        ET.fromstring((tmp_path / image).read_text())
    again = export_post(*run, tmp_path / "again", front_matter="none")
    assert again.read_bytes() == index.read_bytes()
    assert "| Metric | Engine |" in text and "## What the prediction got wrong" in text
    assert "<script" not in text


def test_unknown_engine_is_one_line(run: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ServebookError, match="Choose hugo, jekyll, astro, none"):
        export_post(*run, tmp_path, front_matter="wordpress")


def test_markdown_keeps_outside_text_as_text() -> None:
    made = to_markdown("<table><tr><th>a</th></tr><tr><td>x|y &lt;script&gt; *z*</td></tr></table>")
    assert made.splitlines()[-1] == r"| x\|y &lt;script> \*z\* |"


def test_card_has_the_size_of_a_card(run: tuple[Path, Path]) -> None:
    path = write_card(run[0])
    first = path.read_bytes()
    assert Image.open(path).size == (1200, 630)
    assert write_card(run[0]).read_bytes() == first


def test_runs_side_by_side(run: tuple[Path, Path], tmp_path: Path) -> None:
    rates = ("output_tok_per_s", "output_tok_per_s_ci_low", "output_tok_per_s_ci_high")
    faster = [r | {k: r[k] * 2 for k in rates} for r in ROWS if r["sweep"] == "c512" and r["engine"] == "vllm"]
    other = report_data.run_folder(tmp_path / "other", faster)
    page = compare([run[0], other], tmp_path / "compare.html").read_text()
    assert page.count("2×") >= len(faster) and "<script" not in page
    assert "Engine vllm" in page and 'id="throughput-vllm-concurrency-512-128"' in page
    with pytest.raises(ServebookError, match="a single run cannot be compared"):
        compare([other], tmp_path / "x.html")
    with pytest.raises(ServebookError, match="no measured point"):
        compare([other, tmp_path], tmp_path / "x.html")


def test_runs_that_share_no_point_are_told_what_each_has(run: tuple[Path, Path], tmp_path: Path) -> None:
    renamed = [r | {"engine": "sglang"} for r in ROWS if r["sweep"] == "c512" and r["engine"] == "vllm"]
    other = report_data.run_folder(tmp_path / "other", renamed)
    with pytest.raises(ServebookError) as fault:
        compare([run[0], other], tmp_path / "x.html")
    told = str(fault.value)
    assert "other has sglang: concurrency-512-128 (c0001, c0004)" in told and "name their engines alike" in told
    assert "vllm: " in told and not (tmp_path / "x.html").exists()


def test_a_run_without_executed_notebooks_is_told_again_for_its_post(
    run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = report_data.run_folder(tmp_path / "bare", ROWS)
    ran: list[str] = []

    def execute(source: Path, target: Path, parameters: dict[str, str]) -> None:
        ran.append(target.name)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(run[1], target)

    monkeypatch.setattr(replay, "execute", execute)
    assert cli.main(["post", str(folder)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{folder / 'post/index.md'}\n" and ran[-1] == "08_post.ipynb"
    assert told.err.splitlines()[0] == f"[1/{len(ran)}] 00_preflight" and len(told.err.splitlines()) == len(ran)
    assert cli.main(["post", str(folder)]) == 0 and not capsys.readouterr().err


def test_ratio_interval_adds_in_quadrature() -> None:
    import pandas as pd

    same = {"engine": "vllm", "workload": "w", "point": "c0001", "concurrency": 1, "rate_per_s": None,
            "repeats_prompts": False, "prompt_tokens": 1, "output_tokens": 1,
            "ttft_mean_s": 1.0, "tpot_mean_s": 1.0}  # fmt: skip
    rate = ("output_tok_per_s", "output_tok_per_s_ci_low", "output_tok_per_s_ci_high")
    frame = pd.DataFrame([
        same | {"run": "a"} | dict(zip(rate, (100, 100 / 1.1, 110), strict=True)),
        same | {"run": "b"} | dict(zip(rate, (200, 200 / 1.1, 220), strict=True)),
    ])  # fmt: skip
    row = ratio_frame(frame, "a").iloc[0]
    assert row["ratio"] == 2
    assert row["ratio_high"] == pytest.approx(2 * 1.1 ** (2**0.5)) and row["ratio_low"] == pytest.approx(
        2 / 1.1 ** (2**0.5)
    )


def test_published_points_become_a_page(tmp_path: Path) -> None:
    csv = ROOT / "outputs" / "published" / "a40-qwen2.5-7b.csv"
    page = tmp_path / "a40.html"
    asked = ["predict", str(ROOT / "params" / "a40-qwen2.5-7b.yaml"), "--calibration", str(csv), "--html", str(page)]
    assert cli.main(asked) == 0
    text = page.read_text()
    assert 'id="throughput-long_prompts"' in text and 'id="latencies-long_prompts"' in text
    assert "predictions of points it had not seen" in text and "frozen" not in text
    assert "80 % interval" in text and "<script" not in text
    assert csv.read_text() in unquote(html.unescape(text))


def test_the_commands_write_where_they_are_told(run: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    assert cli.main(["compare", str(run[0])]) == 1
    assert "a single run cannot be compared" in capsys.readouterr().err
    assert cli.main(["post", str(tmp_path)]) == 1
    assert "no run is stored here" in capsys.readouterr().err
    assert cli.main(["predict", "params/a40-qwen2.5-7b.yaml", "--html", str(tmp_path / "x.html")]) == 1
    assert "--calibration" in capsys.readouterr().err


def test_the_card_stands_beside_the_social_post(run: tuple[Path, Path]) -> None:
    (run[0] / "card.png").unlink(missing_ok=True)
    write_social(run[0])
    assert (run[0] / "card.png").exists()


def test_kept_runs_compared_say_who_won_what_differs_and_what_is_not_comparable(tmp_path: Path) -> None:
    reference = Path(__file__).parents[1] / "outputs/reference"
    page = compare([*sorted(reference.iterdir())], tmp_path / "c.html").read_text()  # with the README beside the runs
    claim = re.search(r'<p class="sb-claim">(.*?)</p>', page, re.DOTALL)[1]
    assert "h200-qwen2.5-7b-fp8 gives 1.27 to 1.4" in claim and "weights (fp8 against bfloat16)" in claim
    assert "cost USD 0.099 against 0.13" in claim
    assert "h200-qwen3-8b with h200-qwen2.5-7b: no load was measured in both" in page
    assert "model (qwen3-8b against qwen2.5-7b)" in page and "Engine hf: measured in h200-qwen2.5-7b alone." in page
    assert "h200-qwen2.5-7b-fp8: tok/s/user" in page and "h200-qwen2.5-7b-fp8: tok/s/GPU" in page
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert all(target in ids for target in re.findall(r'href="#([^"]+)"', page))
    assert ">Engine hf" not in page.partition('id="the-runs"')[2] and "Cheapest, per 1M output tokens" in page


def test_a_post_keeps_folded_tables_and_its_figures_are_light(run: tuple[Path, Path], tmp_path: Path) -> None:
    folded = "<details><summary>Every point</summary><table><tr><th>C</th></tr><tr><td>8</td></tr></table></details>"
    assert to_markdown(folded) == "Every point\n\n| C |\n| --- |\n| 8 |"
    export_post(*run, tmp_path)
    assert all("prefers-color-scheme" not in f.read_text() for f in (tmp_path / "images").glob("*.svg"))


def test_jekyll_finds_the_post_by_its_day_and_its_images_on_the_site(run: tuple[Path, Path], tmp_path: Path) -> None:
    post = export_post(*run, tmp_path, front_matter="jekyll")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", post.name) and post.parent.name == "_posts"
    text = post.read_text()
    linked = re.findall(r"\]\(\{\{ site\.baseurl \}\}/(assets/[^)]+)\)", text)
    card = yaml.safe_load(text.split("---")[1])["image"].lstrip("/")
    assert len(linked) == 3 and all((tmp_path / name).exists() for name in [*linked, card])
    assert not re.search(r"\{%|\{\{(?! site)", text)  # nothing else is Liquid's


@pytest.mark.parametrize(("engine", "key"), [("hugo", "images"), ("astro", "heroImage")])
def test_the_social_card_goes_with_the_post(run: tuple[Path, Path], tmp_path: Path, engine: str, key: str) -> None:
    index = export_post(*run, tmp_path, front_matter=engine)
    named = yaml.safe_load(index.read_text().split("---")[1])[key]
    assert (tmp_path / (named[0] if isinstance(named, list) else named)).stat().st_size > 10_000


def test_cards_and_links_survive_in_markdown() -> None:
    cards = '<ul class="sb-cards"><li><div class="sb-big">8 <span>tok/s</span></div><div class="sb-what">a rate</div>'
    cards += '<div class="sb-range"></div></li></ul>'
    assert to_markdown(cards) == "- 8 tok/s: a rate"
    links = '<p class="sb-links"><a href="#data">Data</a></p><p>See <a href="https://example.com/x">this</a>.</p>'
    assert to_markdown(links) == "See [this](https://example.com/x)."


@pytest.fixture(scope="module")
def mkdocs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which MkDocs can be run. No dependency: installed for this test, where PyPI answers."""
    if importlib.util.find_spec("mkdocs"):
        return dict(os.environ)
    site = tmp_path_factory.mktemp("mkdocs")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-input",
        "--retries",
        "0",
        "--target",
        str(site),
        "mkdocs",
    ]
    try:
        subprocess.run(pip, check=True, capture_output=True, timeout=180)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("MkDocs cannot be installed here")
    return {**os.environ, "PYTHONPATH": str(site)}


def test_mkdocs_builds_the_post(run: tuple[Path, Path], tmp_path: Path, mkdocs: dict[str, str]) -> None:
    export_post(*run, tmp_path / "docs", front_matter="none")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\ntheme: {name: mkdocs}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, env=mkdocs)
    assert built.returncode == 0, built.stderr.decode()
    page = (tmp_path / "site/index.html").read_text()
    images = re.findall(r'<img[^>]* src="(images/[^"]+)"', page)
    assert len(images) == 3 and all((tmp_path / "site" / image).exists() for image in images)
    assert "<th>Metric</th>" in page and "| --- |" not in page
