from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from servebook.config.params import HardwareParams, ModelParams, read_file
from servebook.hardware.catalog import resolve
from servebook.model.reader import packaged, read_shape
from servebook.predictor import roofline as r

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "outputs" / "published"
RUNS = ["a40-qwen2.5-7b", "a100-qwen3-8b"]
NEEDED = "sweep engine point concurrency prompt_tokens output_tokens"
METRICS = ("ttft_mean_s", "tpot_mean_s", "decode_tok_per_s", "output_tok_per_s")


def rows(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open(newline="") as f:
        return list(csv.DictReader(f))


def number(row: dict[str, str], key: str) -> float | None:
    return float(row[key]) if row[key] else None


@pytest.mark.parametrize("run", RUNS)
def test_rows_are_tidy_named_as_in_params_and_physical(run: str):
    data = rows(f"{run}.csv")
    assert {*NEEDED.split(), *METRICS} <= set(data[0])
    keys = [(d["sweep"], d["engine"], d["point"]) for d in data]
    assert len(set(keys)) == len(keys)
    params = read_file(ROOT / "params" / f"{run}.yaml")
    assert resolve(params.hardware).name == json.loads((PUBLISHED / f"{run}.facts.json").read_text())["gpu"]
    shape = read_shape(ModelParams(config=run.split("-", 1)[1], weights="dummy"), ROOT)
    assert run.split("-", 1)[1] in packaged()
    gpu = resolve(params.hardware)
    for d in data:
        c, prompt, output = int(d["concurrency"]), int(d["prompt_tokens"]), int(d["output_tokens"])
        assert d["engine"] in params.engines and d["source"]
        if d["sweep"] == "calibration":
            assert c == 1 and d["point"] == f"p{prompt:05d}-o{output:04d}"
        else:
            sweep = params.sweeps[d["sweep"]]
            assert (sweep.prompt_tokens, sweep.output_tokens) == (prompt, output) and c in sweep.concurrency
            assert d["point"] == f"c{c:04d}"
        tpot, ttft = number(d, "tpot_mean_s"), number(d, "ttft_mean_s")
        floor = r.tpot_bound_s(shape, gpu.flops_per_s(), gpu.bytes_per_s, batch=1, context_tokens=prompt)
        assert tpot is None or tpot > floor
        assert ttft is None or ttft > r.ttft_bound_s(shape, gpu.flops_per_s(), gpu.bytes_per_s, prompt_tokens=prompt)
        assert any(number(d, k) is not None for k in METRICS)


def test_the_fifo_formula_from_its_own_c1_point_gives_the_naive_table():
    naive = {
        int(d["concurrency"]): d
        for d in rows("a40-qwen2.5-7b.csv")
        if (d["sweep"], d["engine"]) == ("long_prompts", "hf")
    }
    one = naive[1]
    request = r.request_s(float(one["ttft_mean_s"]), float(one["tpot_mean_s"]), 128)
    for c, d in naive.items():
        assert r.fifo_ttft_s(c, float(one["ttft_mean_s"]), request) == pytest.approx(float(d["ttft_mean_s"]), rel=0.02)


def test_decode_rate_is_running_over_tpot():
    for d in rows("a40-qwen2.5-7b.csv"):
        rate, tpot = number(d, "decode_tok_per_s"), number(d, "tpot_mean_s")
        if rate and tpot and d["engine"] == "vllm":
            assert 0.9 <= rate * tpot / int(d["concurrency"]) <= 1.0


def test_predictions_in_ink_follow_from_the_formulas():
    shape = read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), ROOT)
    for d in rows("a40-qwen2.5-7b.predicted.csv"):
        c = int(d["concurrency"])
        if d["table"] == "decode_only":
            assert float(d["bytes_per_step"]) == pytest.approx(r.decode_bytes(shape, c, 8192), rel=0.005)
        running = 1 if d["engine"] == "hf" else c
        assert running / float(d["tpot_s"]) == pytest.approx(float(d["decode_tok_per_s"]), rel=0.03)


def test_hit_shares_lie_in_their_published_range():
    for d in rows("a100-qwen3-8b.csv"):
        low, mid, high = (float(d[k]) for k in ("cache_hit_share_low", "cache_hit_share", "cache_hit_share_high"))
        assert 0 <= low <= mid <= high <= 0.66


def test_facts_agree_with_the_arithmetic():
    for run, config in (("a40-qwen2.5-7b", "qwen2.5-7b"), ("a100-qwen3-8b", "qwen3-8b")):
        facts = json.loads((PUBLISHED / f"{run}.facts.json").read_text())
        vllm = facts["engines"]["vllm"]
        shape = read_shape(ModelParams(config=config, weights="dummy"), ROOT)
        assert vllm["kv_cache_tokens"] % 16 == 0
        assert vllm["kv_cache_tokens"] * shape.kv_bytes_per_token / 2**30 == pytest.approx(
            vllm["kv_cache_gib"], abs=0.005
        )
        assert resolve(HardwareParams(gpu=facts["gpu"])).memory_gib > vllm["kv_cache_gib"]
