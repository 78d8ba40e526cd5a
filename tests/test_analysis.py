"""The analysis tables on points made by hand, each with its right answer worked out."""

import pandas as pd
import pytest
from servebook.common.measured_point import MeasuredPoint
from servebook.scoring import analysis


def point(engine, c, **figures):
    return {
        "sweep": "s",
        "engine": engine,
        "kind": "concurrency",
        "point": f"c{c:04d}",
        "concurrency": c,
        "rate_per_s": None,
        "prompt_tokens": 512,
        "output_tokens": 128,
        "verdict": "valid",
        "reasons": [],
        **figures,
    }


def test_littles_law_closes_within_two_percent_or_not():
    figures = {"request_rate_per_s": 2.0, "e2e_mean_s": 2.0, "in_flight_mean": 4.0}
    table = analysis.little(
        [
            point("vllm", 4, **figures, little_l=4.05, little_error=0.0125),
            point("vllm", 8, **figures, little_l=4.2, little_error=0.05),
        ]
    )
    assert table["closes"].tolist() == [True, False]
    assert table["latency_from_sending_s"].tolist() == [4.05 / 2, 2.1], "the W whose product with the rate is shown"
    assert table["judged"].tolist() == ["closes", "not judged"]


@pytest.mark.parametrize(
    ("figures", "judged"),
    [
        ({"little_error": 0.36, "reason_codes": ["few_rounds"]}, "not judged: too few rounds of the clients"),
        ({"little_error": 0.2, "reason_codes": ["littles_law"]}, "open"),
        ({"little_error": 0.2, "reason_codes": ["client_limited", "littles_law"], "little_edge": 0.1}, "open"),
        ({"little_error": 0.05, "little_edge": 0.06}, "within ±8 %, what the window's ends may cause"),
        ({"little_error": float("nan"), "little_l": None}, "–"),
    ],
)
def test_how_the_audit_takes_a_difference_is_named(figures, judged):
    law = {"request_rate_per_s": 2.0, "in_flight_mean": 4.0, "little_l": 4.2, "reason_codes": []}
    assert analysis.little([point("vllm", 8, **law | figures)])["judged"].tolist() == [judged]


def test_the_knee_is_the_first_concurrency_whose_p99_exceeds_twice_the_median():
    rows = [(1, 0.1, 0.15), (2, 0.1, 0.2), (4, 0.1, 0.21), (8, 0.1, 0.9)]
    points = [point("vllm", c, ttft_p50_s=a, ttft_p99_s=b) for c, a, b in rows]
    assert analysis.knees(points)["knee_concurrency"].tolist() == [4]
    assert pd.isna(analysis.knees(points[:2])["knee_concurrency"].iloc[0])


def test_goodput_of_nothing_good_is_no_number():
    table = analysis.goodput(
        [
            point("vllm", 1, request_rate_per_s=2.0, goodput_per_s=0.5),
            point("vllm", 2, request_rate_per_s=2.0, goodput_per_s=0.0),
        ]
    )
    assert table["raw_to_good"].iloc[0] == 4
    assert pd.isna(table["raw_to_good"].iloc[1])


def test_the_gap_between_engines_is_the_product_of_its_factors():
    # naive: one request at a time, 80 % of it decoding at 20 ms; vLLM: eight in the batch, a token each in 10 ms, 75 %
    naive = point("hf", 8, output_tok_per_s=40.0, tpot_mean_s=0.02, decode_tok_per_s=50.0, ttft_mean_s=10.0)
    vllm = point("vllm", 8, output_tok_per_s=600.0, tpot_mean_s=0.01, decode_tok_per_s=800.0, ttft_mean_s=0.1)
    row = analysis.engine_gap([naive, vllm], "hf", "vllm").iloc[0]
    assert row["output_ratio"] == pytest.approx(15)
    assert row["step_ratio"] == pytest.approx(2)
    assert row["batch_ratio"] == pytest.approx(8)
    assert row["rest_ratio"] == pytest.approx(0.75 / 0.8)
    assert row["output_ratio"] == pytest.approx(row["step_ratio"] * row["batch_ratio"] * row["rest_ratio"])
    assert row["ttft_ratio"] == pytest.approx(100)


def test_a_waterfall_is_drawn_for_the_largest_measured_concurrency_that_was_predicted():
    points = [point("vllm", c, tpot_mean_s=0.01 * c) for c in (1, 2, 4)]
    predicted = [
        {"sweep": "s", "point": f"c{c:04d}", "waterfall": [["roofline says", 0.01], ["host", 0.002]]} for c in (1, 2)
    ]
    (drawn,) = analysis.waterfalls(points, predicted, "vllm")
    assert drawn["measured"] == 0.02 and drawn["parts"][0] == ("roofline bound", 0.01)


def spent(what, began_utc, seconds):
    return {"what": what, "began_utc": began_utc, "seconds": seconds}


def test_a_runs_time_is_measuring_starting_and_the_rest_over_interrupted_sessions():
    sessions = [
        {"started_utc": "2026-01-01T10:00:00Z", "seconds": 1000.0},  # killed: what it was at is in no note
        {"started_utc": "2026-01-01T11:00:00Z", "seconds": 800.0},
        {"started_utc": "2026-01-02T10:00:00Z", "seconds": 500.0},  # told again, a day later
        {"started_utc": "2026-01-02T11:00:00Z", "seconds": None},
    ]
    notes = [
        spent("starting", "2026-01-01T10:00:10.000+00:00", 100.0),
        spent("measuring", "2026-01-01T10:02:00.000+00:00", 600.0),
        spent("starting", "2026-01-01T11:00:10.000+00:00", 100.0),
        spent("measuring", "2026-01-01T11:02:00.000+00:00", 500.0),
        spent("lost", "2026-01-01T11:11:00.000+00:00", 50.0),
        spent("ending", "2026-01-01T11:13:00.000+00:00", 5.0),
        spent("measuring", "2026-01-03T09:00:00.000+00:00", 200.0),  # a notebook run by hand
    ]
    told = analysis.run_cost(sessions, notes, 1.8)
    assert told == {
        "wall_s": 2000.0, "measuring_s": 1300.0, "starting_s": 200.0, "overhead_s": 500.0, "lost_s": 50.0,
        "measuring_share": 0.65, "starting_share": 0.1, "overhead_share": 0.25, "cost": 1.0,
    }  # fmt: skip
    assert analysis.run_cost([], [], 1.0)["overhead_share"] == 0.0
    killed = [{"started_utc": "2026-01-01T10:00:00Z", "seconds": 0.5}]  # before its length was written again
    told = analysis.run_cost(killed, [spent("measuring", "2026-01-01T10:00:06.000+00:00", 4.0)], 0.0)
    assert (told["wall_s"], told["overhead_s"]) == (10.0, 6.0)


def test_a_run_without_an_account_of_its_time_is_told_from_its_points():
    points = [point("vllm", c, started_at=f"2026-01-01T10:0{c}:00+00:00", seconds=30.0) for c in (1, 2)]
    stored = [MeasuredPoint.from_json(p) for p in [*points, point("hf", 1)]]
    notes = analysis.spent_on(stored, {"vllm": {"startup_s": 40.0}, "hf": {"startup_s": 9.0}})
    told = analysis.run_cost([{"started_utc": "2026-01-01T10:00:00Z", "seconds": 200.0}], notes, 0.0)
    assert (told["measuring_s"], told["starting_s"], told["overhead_s"]) == (60.0, 40.0, 100.0)


def test_points_in_doubt_come_with_their_reasons():
    doubt = point("hf", 1) | {"verdict": "suspect", "reasons": ["a", "b"]}
    assert analysis.suspects([point("vllm", 1), doubt])["reasons"].tolist() == ["a; b"]


def test_parts_too_small_to_see_are_one_and_nothing_is_lost():
    predicted = [
        {"sweep": "s", "point": "c0001", "waterfall": [
            ["roofline says", 0.01], ["host", 0.002], ["launching", 5e-16], ["a", 3e-5], ["b", -1e-5],
        ]}
    ]  # fmt: skip
    (drawn,) = analysis.waterfalls([point("vllm", 1, tpot_mean_s=0.01)], predicted, "vllm")
    assert [label for label, _ in drawn["parts"]] == ["roofline bound", "host", "small parts"]
    assert sum(v for _, v in drawn["parts"]) == pytest.approx(0.01202)
