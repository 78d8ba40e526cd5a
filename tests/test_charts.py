"""Figures: what they say in words, what they draw, and that they come out the same every time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import report_data
from servebook import charts
from servebook.charts import style, svg, words
from servebook.scoring import score

ROWS = report_data.points()
FROZEN = report_data.predictions(ROWS)
SWEEPS = {
    charts.throughput: "c512", charts.latencies: "c8192", charts.latency_throughput: "c512", charts.frontier: "c512",
    charts.prompt_length: "prompt", charts.arrival_rate: "rate",
}  # fmt: skip


@pytest.mark.parametrize("draw", SWEEPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "rows",
    [ROWS, report_data.points(report_data.CONCURRENCY_DEMO), report_data.points((4,)), report_data.spoiled(ROWS),
     report_data.points((1, 2), ("naive",)), []],
    ids=["full", "demo", "single", "spoiled", "one-engine", "nothing"],
)  # fmt: skip
def test_every_sweep_figure_on_every_kind_of_run(draw, rows) -> None:
    frozen = report_data.predictions([r for r in rows if r["verdict"] != "invalid"])
    figure = draw(rows, frozen, SWEEPS[draw])
    text = figure.servebook
    assert text.takeaway and text.alt and "nan" not in f"{text.takeaway} {text.alt} {text.note}"
    if any(r["verdict"] == "invalid" for r in rows):
        drawings = re.findall(r"<svg.*?</svg>", charts.html_figure(figure))
        assert len(drawings) == 2 and all("NaN" not in d and len(ET.fromstring(d)) > 5 for d in drawings)


def test_takeaway_and_alt_carry_the_data() -> None:
    points = [
        {"sweep": "s", "engine": "vllm", "point": f"c{c:04d}", "concurrency": c, "prompt_tokens": 8192,
         "output_tokens": 128, "decode_tok_per_s": v, "requests": 50}
        for c, v in ((1, 32.61), (2, 52.78), (4, 71.13), (8, 81.38), (16, 83.08), (32, 72.32))
    ]  # fmt: skip
    text = charts.throughput(points, None, "s").servebook
    assert (
        "vllm rises from 32.6 tok/s at C = 1 to 83.1 tok/s at C = 16, then falls to 72.3 tok/s at C = 32"
        in text.takeaway
    )
    assert text.title.endswith("(8,192 in, 128 out)")
    assert all(value in text.alt for value in ("32.6", "52.8", "71.1", "81.4", "83.1", "72.3"))
    assert "predicted" not in text.alt


def test_an_engine_keeps_its_colour_and_marker() -> None:
    for engines in (["naive", "vllm"], ["vllm"], ["other", "vllm", "naive"], ["hf", "vllm"]):
        found = style.engine_styles(engines)
        assert found["vllm"] == style.EngineStyle(style.LIGHT["e1"], "o")
        assert len({s.colour for s in found.values()}) == len(engines)


def test_suspect_points_are_hollow_and_failed_ones_marked() -> None:
    rows = report_data.spoiled(ROWS)
    axes = charts.throughput(rows, FROZEN, "c512").axes[0]
    marked = [line for line in axes.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in marked] == [[4]]
    hollow = [
        line for line in axes.lines if line.get_marker() == "o" and line.get_markerfacecolor() == style.LIGHT["paper"]
    ]
    assert [list(line.get_xdata()) for line in hollow] == [[2]]
    text = charts.throughput(rows, FROZEN, "c512").servebook
    assert "1 failed point marked ×" in text.note


def _hollow(figure) -> list[float]:
    lines = [line for ax in figure.axes for line in ax.lines if line.get_markerfacecolor() == style.LIGHT["paper"]]
    return [float(x) for line in lines if line.get_marker() not in ("None", "") for x in line.get_xdata()]


def test_hollow_means_doubted_in_the_figures_that_explain_too() -> None:
    steps = [
        {"engine": "vllm", "phase": "decode", "label": f"C = {c}", "flops": c * 1e10, "bytes": 1e10, "seconds": 0.01,
         "doubted": c == 2}
        for c in (1, 2)
    ]  # fmt: skip
    roof = charts.roofline(steps, peak_flops_per_s=1e14, bytes_per_s=1e12, gpu="X")
    assert _hollow(roof) == [2.0] and "Hollow" in roof.servebook.note
    model = [{"batch": b, "tok_per_s": 30.0 * b} for b in (1, 2, 4, 8, 16, 256)]
    measured = [
        {"concurrency": c, "tok_per_s": 20.0 * c, "verdict": v} for c, v in ((1, "valid"), (4, "suspect"), (8, "valid"))
    ]
    served = charts.saturation(model, measured=measured)
    assert _hollow(served) == [4.0] and served.axes[0].get_yscale() == "log"
    assert served.axes[0].get_xlim()[1] < 32  # as far as it was measured, so that both curves can be read
    assert "1.5× the 160 that are served" in served.servebook.takeaway
    scores = score.score(report_data.spoiled(ROWS), FROZEN)
    doubted = score.final(scores)
    assert len(_hollow(charts.predicted_vs_measured(scores))) == (doubted["data"] == "suspect").sum() > 0


@pytest.mark.parametrize("off", [1.1, 1.8, 4.0, 8.0, 30.0])
def test_ticks_of_the_ratio_panel_stand_apart(off: float) -> None:
    rows = [r | {"decode_tok_per_s": r["decode_tok_per_s"] / off} for r in ROWS if r["sweep"] == "c512"]
    figure = charts.throughput(rows, FROZEN, "c512")
    below = figure.axes[1]
    low, high = below.get_ylim()
    shown = [t for t in below.get_yticks() if low < t < high]
    heights = [below.transData.transform((1, t))[1] * 72 / figure.dpi for t in shown]
    assert len(shown) >= 3 and all(b - a > 9 for a, b in pairwise(heights))  # the font's size


def test_long_names_stand_in_the_key_and_leave_the_curves_their_width() -> None:
    named = [r | {"engine": "h200-qwen2.5-7b-fp8" if r["engine"] == "vllm" else "short"} for r in ROWS]
    figure = charts.latencies(named, None, "c512")
    assert "h200-qwen2.5-7b-fp8" in [t.get_text() for t in figure.legends[0].get_texts()]
    assert not any("fp8" in t.get_text() for ax in figure.axes for t in ax.texts)


def test_a_sweep_that_showed_nothing_is_an_empty_figure() -> None:
    row = {"sweep": "rate", "engine": "vllm", "point": "r9.000", "kind": "arrival_rate", "rate_per_s": 9.0,
           "prompt_tokens": 8, "output_tokens": 8, "requests": 0, "verdict": "invalid"}  # fmt: skip
    for told in ({}, {"ttft_s": {"value": float("nan")}}):
        said = [{"stage": "datasheet", "time_utc": "2026-01-01T00:00:00Z", "points": [row | {"metrics": told}]}]
        charts.html_figure(charts.arrival_rate([row], said, "rate"))


def test_concurrency_axis_has_plain_labels() -> None:
    figure = charts.throughput(ROWS, FROZEN, "c512")
    figure.draw_without_rendering()
    below = figure.axes[1]
    assert [t.get_text() for t in below.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64", "128"]


def test_svg_is_the_same_twice_and_dateless() -> None:
    first, second = (charts.html_figure(charts.frontier(ROWS, FROZEN, "c512")) for _ in range(2))
    assert first == second
    assert "matplotlib" not in first.lower()


def test_svg_colours_are_variables_and_ids_belong_to_one_figure() -> None:
    one = charts.html_figure(charts.throughput(ROWS, FROZEN, "c512"))
    other = charts.html_figure(charts.throughput(ROWS, FROZEN, "c8192"))
    assert not re.search(r"#[0-9a-f]{6}", re.sub(r'style="--s[^"]*"', "", one))
    ids = [set(re.findall(r'\bid="([^"]+)"', m)) for m in (one, other)]
    assert len(ids[0]) > 5 and not ids[0] & ids[1]


def test_one_class_has_one_look_across_figures_of_the_same_id() -> None:
    # the same chart stands in several chapters, drawn from less or more data; its <style> counts for the whole page
    rows = report_data.spoiled(ROWS)
    drawn = [charts.throughput(r, FROZEN, "c512") for r in (ROWS, rows, report_data.points((1, 2)))]
    looks: dict[str, set[str]] = {}
    for markup in map(charts.html_figure, drawn):
        for name, look in re.findall(r"\.(k\w+)\{([^}]*)\}", markup):
            looks.setdefault(name, set()).add(look)
        assert set(re.findall(r'class="(k\w+)"', markup)) <= set(looks)
    assert len(looks) > 10 and all(len(v) == 1 for v in looks.values())


def test_text_from_outside_is_escaped_in_figures() -> None:
    rows = [r | {"engine": report_data.NASTY} for r in report_data.points((1, 2), ("vllm",))]
    figure = charts.throughput(rows, None, "c512")
    for markup in (charts.html_figure(figure), charts.standalone_svg(figure)):
        assert "<script" not in markup and "&lt;script&gt;" in markup


def test_standalone_svg_holds_both_themes_and_its_words() -> None:
    figure = charts.throughput(ROWS, FROZEN, "c512")
    text = charts.standalone_svg(figure)
    root = ET.fromstring(text)
    assert root.find(f"{{{svg.SVG}}}desc").text == figure.servebook.alt
    assert "prefers-color-scheme:dark" in text and style.COLOURS["e1"][1] in text


def test_predicted_vs_measured_counts_the_scores() -> None:
    scores = score.score(ROWS, FROZEN)
    final = score.final(scores)
    takeaway = charts.predicted_vs_measured(scores).servebook.takeaway
    assert takeaway.startswith(f"Of {len(final)} predictions {(final['verdict'] == 'hit').sum()} are hits")


def test_waterfall_ends_at_the_measured_value() -> None:
    figure = charts.waterfall([("roofline", 0.02), ("host", 0.005), ("overlap", -0.001)], 0.03, what="TPOT")
    bars = figure.axes[0].patches
    assert bars[-1].get_width() == pytest.approx(30)  # ms
    assert bars[-2].get_width() == pytest.approx(6)  # not explained
    assert "6 ms (20 %) more than explained" in figure.servebook.takeaway


def test_roofline_says_which_side_the_steps_lie_on() -> None:
    steps = [
        {"engine": "vllm", "phase": "decode", "label": "C = 1", "flops": 1.4e10, "bytes": 14.14e9, "seconds": 0.028},
        {"engine": "vllm", "phase": "prefill", "label": "512", "flops": 6.74e12, "bytes": 14.14e9, "seconds": 0.088},
    ]
    text = charts.roofline(steps, peak_flops_per_s=149.7e12, bytes_per_s=696e9, gpu="A40").servebook
    assert "vllm's decode steps lie on the memory side and reach 73 % of the roof" in text.takeaway
    assert "vllm's prefill steps lie on the compute side and reach 51 % of the roof" in text.takeaway


def test_stored_series_become_rates() -> None:
    series = [
        {
            "t_s": t,
            "running": 2,
            "waiting": 0,
            "kv_cache_usage": 0.1,
            "prompt_tokens": 100 * t,
            "generation_tokens": 7 * t,
        }
        for t in range(5)
    ]
    alt = charts.server_series(series).servebook.alt
    assert "prompt: 100 to 100" in alt and "generation: 7 to 7" in alt


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0288, "28.8 ms"), (1.25, "1.25 s"), (170, "2 min 50 s"), (0.00085, "850 µs"), (float("nan"), "–"),
     (0.9996, "1,000 ms"), (7260, "2 h 1 min")],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (83.08, "83.1"), (13870.4, "13,870"), (0.000123, "0.000123"), (9.999, "10")]
)
def test_number(value: float, text: str) -> None:
    assert words.number(value) == text


def test_figures_of_one_id_and_different_points_share_no_ids():
    rows = report_data.points((1, 2, 4, 8))
    said = report_data.predictions(rows)
    pages = [charts.html_figure(charts.throughput(kept, said, "c512")) for kept in (rows, rows[:1])]
    ids = [set(re.findall(r'<(?:path|clipPath|g|use)\b[^>]* id="([^"]+)"', page)) for page in pages]
    assert ids[0] and ids[1] and not ids[0] & ids[1]


def test_chart_2_draws_percentiles_beside_percentiles_only() -> None:
    means = charts.latency_throughput(ROWS, FROZEN, "c512")
    assert "without percentiles" in means.servebook.note
    told = {
        **FROZEN, "frozen": [
            {**e, "points": [
                p | {"percentiles": {"e2e_s": {"p50": {"value": 1.0}, "p99": {"value": 2.0}}}} for p in e["points"]
            ]} for e in FROZEN["frozen"]
        ],
    }  # fmt: skip
    both = charts.latency_throughput(ROWS, told, "c512")
    assert len(both.axes[0].lines) == len(means.axes[0].lines) + 4  # p50 and p99, an engine each
    assert "without percentiles" not in both.servebook.note
