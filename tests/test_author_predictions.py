"""The authors' own predictions: read from both forms, drawn as a third line, told beside what came out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from servebook import charts
from servebook.charts import words
from servebook.report import authors, boxes
from servebook.run_folder import author_predictions, provenance, published

FOLDER = Path(__file__).parents[1] / "outputs" / "published"


def curves(name: str) -> dict[tuple[str, int, str], float]:
    rows = author_predictions.read(FOLDER / f"{name}.csv")
    found = author_predictions.curves(rows, published.read(FOLDER / f"{name}.csv")[0])
    return {(r["engine"], r["concurrency"], r["metric"]): r["predicted"] for r in found}


def test_of_post_2_the_later_table_counts() -> None:
    found = curves("a40-qwen2.5-7b")
    assert found["vllm", 32, "tpot_s"] == 0.382  # with mixed steps; decode only it was 57.8 ms
    assert found["hf", 32, "ttft_s"] == 177 and found["vllm", 52, "decode_tok_per_s"] == 130


def test_of_the_write_up_the_refined_value_counts_where_there_is_one() -> None:
    found = curves("a100-qwen3-8b")
    assert found == {
        ("vllm", 1, "output_tok_per_s"): 93.4, ("vllm", 16, "output_tok_per_s"): 1638,
        ("vllm", 64, "output_tok_per_s"): 4273, ("vllm", 64, "tpot_s"): 0.015, ("vllm", 128, "tpot_s"): 0.0219,
    }  # fmt: skip


def test_a_file_without_them_has_none(tmp_path: Path) -> None:
    assert author_predictions.read(tmp_path / "mine.csv") == []


def test_the_third_line_is_drawn_and_scored() -> None:
    source = FOLDER / "a40-qwen2.5-7b.csv"
    measured = published.read(source)[0]
    theirs = author_predictions.curves(author_predictions.read(source), measured)
    plain = charts.throughput(measured, None, "long_prompts")
    figure = charts.throughput(measured, None, "long_prompts", others=theirs)
    assert len(figure.axes[0].lines) == len(plain.axes[0].lines) + 2  # one an engine
    assert "the author's own prediction: 6.8 % (hf) and 11 % (vllm)" in figure.servebook.takeaway
    assert max(max(line.get_xdata()) for line in figure.axes[0].lines) == 32  # nothing was measured at 52
    made = authors.curves_table(theirs, measured)
    assert "36 of 42 were measured" in made and "not measured" in made


def test_flattered_points_are_told_with_the_clean_prediction_beside() -> None:
    measured = published.read(FOLDER / "a100-qwen3-8b.csv")[0]
    told = [
        {"sweep": "short_prompts", "concurrency": i, "metrics": {"output_tok_per_s": {"value": 1130.0}}}
        for i, _ in enumerate(measured)
    ]
    clean = [p | {"metrics": {"output_tok_per_s": {"value": 1084.0}}} for p in told]
    made = authors.flattered(told, clean, measured)
    assert "1,080" in made and "1,130" in made and "−4.1" in made
    fresh = [replace(p, cache_hit_share=0.0) for p in measured]
    assert authors.flattered(told, clean, fresh) == ""


@pytest.mark.parametrize(
    ("value", "shown"), [(7.11e-53, "0"), (0.0, "0"), (-1e-12, "0"), (2e-9, "0.000000002"), (0.0288, "0.0288")]
)
def test_what_is_nothing_but_rounding_is_0(value: float, shown: str) -> None:
    assert words.number(value) == shown
    assert "e-" not in words.seconds(value)


def test_a_cost_under_a_cent_is_no_zero() -> None:
    assert "under 0.01 USD" in boxes.cost_box(60, 0.1, "USD").replace("\u00a0", " ")
    assert "0.10 USD" in boxes.cost_box(3600, 0.1, "USD").replace("\u00a0", " ")


def test_a_lock_counts_only_where_its_pins_are_in_force(tmp_path: Path) -> None:
    folder = tmp_path / "requirements"
    folder.mkdir()
    from importlib.metadata import version

    (folder / "mine.lock").write_text(f"# Written by hand\npandas=={version('pandas')}\n")
    (folder / "other.lock").write_text(f"pandas=={version('pandas')}\nno-such-package-here==1.0\n")
    (folder / "old.lock").write_text("pandas==0.0.1\n")
    assert set(provenance.locks(tmp_path)) == {"mine.lock"}
