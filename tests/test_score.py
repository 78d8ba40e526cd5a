"""Scores: signs, verdicts, intervals, what is left out, and where the largest misses lie."""

from __future__ import annotations

import pytest
import report_data
from servebook.scoring import score

POINT = {
    "sweep": "s",
    "engine": "vllm",
    "point": "c0004",
    "concurrency": 4,
    "prompt_tokens": 8192,
    "output_tokens": 128,
}


def predicted(stage: str = "calibrated:vllm", sweep: str = "s", **metrics: tuple[float, float, float]) -> dict:
    values = {m: dict(zip(("value", "low", "high"), v, strict=True)) for m, v in metrics.items()}
    point = POINT | {"sweep": sweep, "metrics": values, "breakdown": {}}
    return {"stage": stage, "additional": True, "points": [point]}


def test_signs_of_the_published_a40_point() -> None:
    # post 2, C = 4: TPOT predicted 66 ms, measured 51.5 ms; decode predicted 61, measured 71.13 tok/s
    points = [POINT | {"tpot_mean_s": 0.0515, "decode_tok_per_s": 71.13, "verdict": "valid"}]
    frozen = {"frozen": [predicted(tpot_s=(0.066, 0.05, 0.08), decode_tok_per_s=(61, 55, 67))]}
    rows = score.score(points, frozen).set_index("metric")
    assert rows.loc["tpot_s", "error_share"] == pytest.approx(0.2816, abs=1e-4)  # predicted too high
    assert rows.loc["tpot_s", "verdict"] == "miss" and rows.loc["tpot_s", "inside"] is True
    assert rows.loc["decode_tok_per_s", "error_share"] == pytest.approx(-0.1424, abs=1e-4)
    assert rows.loc["decode_tok_per_s", "verdict"] == "near" and rows.loc["decode_tok_per_s", "inside"] is False
    assert rows.loc["decode_tok_per_s", "ratio"] == pytest.approx(71.13 / 61)


@pytest.mark.parametrize(
    ("error", "name"), [(0.10, "hit"), (-0.10, "hit"), (0.11, "near"), (-0.25, "near"), (0.26, "miss")]
)
def test_verdicts_at_their_edges(error: float, name: str) -> None:
    assert score.verdict(error) == name


def test_invalid_and_already_seen_points_are_left_out() -> None:
    good = POINT | {"tpot_mean_s": 0.05, "verdict": "valid"}
    frozen = {"frozen": [predicted(tpot_s=(0.05, 0.04, 0.06)),
                         predicted(sweep="calibration", tpot_s=(0.05, 0.04, 0.06)),
                         predicted("datasheet", "calibration", tpot_s=(0.03, 0.02, 0.04))]}  # fmt: skip
    rows = score.score([good, good | {"sweep": "calibration"}], frozen)
    assert [(r.stage, r.sweep) for r in rows.itertuples()] == [("calibrated:vllm", "s"), ("datasheet", "calibration")]
    assert score.score([good | {"verdict": "invalid"}], frozen).empty


def test_points_that_repeat_prompts_on_purpose_are_not_scored() -> None:
    good = POINT | {"tpot_mean_s": 0.05, "verdict": "valid"}
    frozen = {"frozen": [predicted(tpot_s=(0.06, 0.04, 0.07))]}
    assert len(score.score([good | {"repeats_prompts": None}], frozen)) == 1
    assert score.score([good | {"repeats_prompts": True}], frozen).empty


def test_decode_interval_is_the_tpot_interval_turned_over() -> None:
    point = POINT | {"tpot_mean_s": 0.05, "tpot_ci_low_s": 0.04, "tpot_ci_high_s": 0.0625, "decode_tok_per_s": 80.0}
    row = score.measured_frame([point]).set_index("metric").loc["decode_tok_per_s"]
    assert row["measured_low"] == pytest.approx(64) and row["measured_high"] == pytest.approx(100)


def test_summary_counts_what_the_rows_say() -> None:
    rows = report_data.points()
    scores = score.score(rows, report_data.predictions(rows))
    summary = score.summary(scores, by=("engine", "stage"))
    assert summary["points"].sum() == len(scores)
    assert (summary[["hit", "near", "miss"]].sum(axis=1) == summary["points"]).all()
    table = summary.set_index(["engine", "stage"])
    assert table.loc[("vllm", "calibrated:vllm"), "mean_abs_error"] < table.loc[("vllm", "datasheet"), "mean_abs_error"]


def test_best_stage_is_the_engines_own_calibration() -> None:
    rows = report_data.points((1, 2))
    scores = score.score(rows, report_data.predictions(rows))
    assert set(score.final(scores)["stage"]) == {"calibrated:naive", "calibrated:vllm"}


def test_largest_misses_weigh_too_high_and_too_low_alike() -> None:
    points = [POINT | {"sweep": s, "tpot_mean_s": m} for s, m in (("a", 1.0), ("b", 1.0), ("c", 1.0))]
    frozen = {"frozen": [predicted(sweep="a", tpot_s=(0.4, 0.3, 0.5)), predicted(sweep="b", tpot_s=(2.0, 1.5, 2.5)),
                         predicted(sweep="c", tpot_s=(1.05, 1.0, 1.1))]}  # fmt: skip
    worst = score.largest_misses(score.score(points, frozen))
    assert list(worst["sweep"]) == ["a", "b", "c"]  # 2.5 times too low, 2 times too high, 5 %


@pytest.mark.parametrize(
    ("breakdown", "name"),
    [
        ({"ttft_s": {"weights_s": 0.02, "kv_reads_s": 0.01, "compute_s": 0.025}}, "memory"),
        ({"ttft_s": {"experts_s": 0.2, "compute_s": 0.1}}, "memory"),
        ({"ttft_s": {"queue_s": 5.0, "own_prefill_s": 1.0}, "tpot_s": {"host_s": 1.0}}, "queue"),
        ({"ttft_s": {"decodes_of_others_s": 0.2, "own_prefill_s": 0.1}}, "mixed step"),
        ({"ttft_s": {"links_s": 0.2, "own_prefill_s": 0.1, "power_cap_s": 0.05}}, "links"),
        ({"ttft_s": {"links_s": 0.1, "own_prefill_s": 0.08, "power_cap_s": 0.05}}, "compute"),
        ({"ttft_s": {"from a later version_s": 17.0}}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_regime_of_a_breakdown(breakdown: dict, name: str) -> None:
    assert score.regime(breakdown, "ttft_s") == name


def test_regime_of_a_whole_request_counts_every_token() -> None:
    parts = {"ttft_s": {"own_prefill_s": 1.0}, "tpot_s": {"weights_s": 0.02, "host_s": 0.001}}
    assert score.regime(parts, "e2e_s", 128) == "memory"  # 127 tokens of 20 ms outweigh 1 s of prefill
    assert score.regime(parts, "e2e_s", 8) == "compute"
    assert score.regime(parts, "decode_tok_per_s", 8) == "memory"


def test_nothing_measured_gives_an_empty_table_with_its_columns() -> None:
    empty = score.score([], {"frozen": []})
    assert empty.empty and {"error_share", "verdict", "inside"} <= set(empty.columns)
    assert score.summary(empty).empty and score.largest_misses(empty).empty
