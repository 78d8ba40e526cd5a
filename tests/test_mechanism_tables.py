"""Why the engines differ, what can be sold, and what slow steps carried: from points whose answer is known."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
import report_data
from servebook.config.params import ModelParams, Slo
from servebook.model.reader import read_shape
from servebook.report import mechanism_tables, service_level_tables, tables
from servebook.scoring import score, serving

SHAPE = read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))
POINTS = score.complete_frame(report_data.points())


def sweep(**columns: list[float]) -> pd.DataFrame:
    n = len(columns["concurrency"])
    fixed = {"sweep": "s", "engine": "vllm", "kind": "concurrency", "verdict": "valid", "prompt_tokens": 1000}
    return pd.DataFrame({**{k: [v] * n for k, v in fixed.items()}, **columns})


def test_a_slow_steps_tokens_are_the_extra_gap_at_the_rate_of_a_lone_prefill() -> None:
    points = sweep(concurrency=[1, 8], ttft_mean_s=[0.05, 0.2], itl_p50_s=[0.01, 0.01], itl_p99_s=[0.01, 0.11])
    found = serving.slow_steps(points)
    assert list(found["concurrency"]) == [8]
    assert math.isclose(found["prompt_tokens"].iloc[0], 0.1 * 1000 / 0.05)  # 2,000 tokens: vLLM's budget


def test_what_can_be_sold_is_the_last_concurrency_within_the_targets() -> None:
    points = sweep(
        concurrency=[1, 2, 4, 8], output_tok_per_s=[10.0, 20.0, 40.0, 60.0], ttft_p50_s=[0.1, 0.2, 0.4, 0.9],
        ttft_p99_s=[0.1, 0.4, 0.9, 2.0],
    )  # fmt: skip
    found = serving.sellable(points, Slo(ttft_s=0.5)).set_index("percentile")
    assert found["concurrency"].to_dict() == {"p99": 2, "p50": 4}
    assert found["raw_to_sellable"].to_dict() == {"p99": 3.0, "p50": 1.5}
    assert serving.sellable(points, Slo()).empty
    late = points.assign(ttft_p99_s=[0.1, 0.9, 0.4, 2.0])  # C = 4 passes by chance, after C = 2 failed
    assert serving.sellable(late, Slo(ttft_s=0.5)).set_index("percentile")["concurrency"]["p99"] == 1
    none = serving.sellable(points, Slo(ttft_s=0.01))
    assert none["raw_to_sellable"].isna().all()
    assert "none" in service_level_tables.sellable_table(points, Slo(ttft_s=0.01))


def test_the_knee_is_measured_by_median_and_mean_and_predicted_by_the_mean() -> None:
    points = sweep(
        concurrency=[1, 2, 4], ttft_p50_s=[0.1, 0.1, 0.1], ttft_mean_s=[0.1, 0.11, 0.2], ttft_p99_s=[0.1, 0.21, 0.5]
    )
    frozen = [
        {"sweep": "s", "engine": "vllm", "kind": "concurrency", "concurrency": c, "ttft_p99_s": p99,
         "metrics": {"ttft_s": {"value": 0.1}}} for c, p99 in ((1, 0.1), (2, 0.15), (4, 0.3))
    ]  # fmt: skip
    row = serving.knees(points, frozen).iloc[0]
    assert (row["by_p50"], row["by_mean"], row["predicted"], row["predicted_by"]) == (2, 4, 4, "mean")
    for p, median in zip(frozen, (0.1, 0.07, 0.2), strict=True):  # today's predictions hold the median too
        p["percentiles"] = {"ttft_s": {"p50": {"value": median}, "p99": {"value": p["ttft_p99_s"]}}}
    row = serving.knees(points, frozen).iloc[0]
    assert (row["predicted"], row["predicted_by"]) == (2, "p50")
    assert serving.knees(points, []).iloc[0]["predicted_by"] is None and "–" in service_level_tables.knee_table(
        points, []
    )


def test_every_mechanism_has_what_this_run_shows_and_a_source() -> None:
    facts = {"vllm": {"kv_cache_tokens": 430_528, "block_size": 16, "max_num_batched_tokens": 2048}}
    made = tables.why_engines_differ(POINTS, SHAPE, facts, engine="vllm", baseline="naive")
    names = ["Iteration-level scheduling", "Selective batching", "Paged KV cache", "Grouped-query attention"]
    assert all(name in made for name in [*names, "Chunked prefill", "Less host work a step"])
    assert "holds 51 requests of 8,320 tokens" in made  # post 2's number
    assert "nan" not in made
    links = set(re.findall(r'href="([^"]+)"', made))
    assert links == {url for name, (_, url) in mechanism_tables.REFERENCES.items() if name != "DistServe"}
    assert links < set(re.findall(r'href="([^"]+)"', tables.references()))


def test_without_a_naive_engine_there_is_no_gap_and_the_mechanisms_stay() -> None:
    alone = POINTS[POINTS["engine"] == "vllm"]
    made = tables.why_engines_differ(alone, SHAPE, {}, engine="vllm", baseline=None)
    assert "Selective batching" in made and "naive" not in made.replace("The naive server", "")
    assert "no gap" in tables.gap_in_words(alone, [], engine="vllm", baseline=None)


def test_the_gap_at_one_client_is_of_steps_and_of_prefill() -> None:
    host = {"sweep": "c512", "point": "c0001", "breakdown": {"tpot_s": {"weights_s": 0.02, "host_s": 0.06}}}
    made = tables.gap_in_words(POINTS, [host], engine="vllm", baseline="naive")
    assert (
        "At C\u00a0=\u00a01 (c512) nothing is batched" in made
        and "75\u00a0% of naive&#x27;s time per token goes to the host" in made
    )
    factors = [float(f) for f in re.findall(r">([\d.]+)×</td>", re.findall(r"<tr>.*?</tr>", made)[1])]
    assert factors[0] == pytest.approx(factors[1] * factors[2] * factors[3], rel=0.1)  # each is rounded


def test_a_factor_below_a_half_stands_by_itself() -> None:
    """ "1/4 of" needs what follows: a cell, and "the factor of …", do not have it."""
    slower = POINTS.copy()
    own = slower["engine"] == "vllm"
    slower.loc[own, "tpot_mean_s"] *= 20
    slower.loc[own, "output_tok_per_s"] /= 20
    made = tables.gap_in_words(slower, [], engine="vllm", baseline="naive")
    assert " of</td>" not in made and " of is " not in made and ">0." in made
