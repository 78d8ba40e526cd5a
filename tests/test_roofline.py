"""Every figure the posts publish, from the posts' own inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.config.params import ModelParams
from servebook.hardware.catalog import GIB, catalog
from servebook.model.reader import ModelShape, read_shape
from servebook.predictor import roofline as r

A40, A100 = catalog()["A40"], catalog()["A100-80GB-SXM"]
BW, VLLM, HF = 505e9, 76.6e12, 68.8e12  # post 2's effective rates


def packaged(name: str) -> ModelShape:
    return read_shape(ModelParams(config=name, weights="dummy"), Path("."))


QWEN25, QWEN3 = packaged("qwen2.5-7b"), packaged("qwen3-8b")


def near(value: float, digits: float = 0.005):
    return pytest.approx(value, rel=digits)


# --- post 1 ---


def test_ridge_point():
    assert r.ridge_flop_per_byte(149.7e12, 696e9) == near(215)


def test_decode_bytes():
    assert r.decode_bytes(QWEN25, 32, 512) - QWEN25.decode_weight_bytes == 57_344 * 512 * 32
    # 0.93, 1.88 and 3.76 GB of KV at B = 32, 64, 128
    for batch, gb in ((32, 0.93), (64, 1.88), (128, 3.76)):
        assert batch * QWEN25.kv_read_bytes(512) == near(gb * 1e9, 0.011)


def test_kv_pool_and_sequences():
    assert r.kv_pool_tokens(28e9, 57_344) == 488_281
    assert r.kv_pool_bytes(48e9, 0.9, QWEN25.weight_bytes) == near(28e9, 0.01)
    # what vLLM reported: 44.42 GiB · 0.9 − 15.55 − 1.44 = 22.99 GiB = 430,528 tokens
    pool = r.kv_pool_bytes(A40.memory_bytes, 0.9, 15.55 * GIB, 1.44 * GIB)
    assert pool / GIB == near(22.99, 1e-3) and r.kv_pool_tokens(pool, 57_344) == near(430_528, 1e-3)
    assert r.max_sequences(430_528, 8192) == 52 and r.max_sequences(430_528, 8192 + 128) == 51


# --- post 2 ---


def test_effective_rates_from_c1():
    assert r.effective_bytes_per_s(QWEN25.decode_weight_bytes, 0.028) == near(505e9)
    assert r.effective_flops_per_s(QWEN25.prefill_flops(512), 0.088) == near(76.6e12)
    assert r.effective_flops_per_s(QWEN25.prefill_flops(512), 0.098) == near(68.8e12)
    assert r.effective_flops_per_s(QWEN25.prefill_flops(8192), 1.246) == near(96e12, 0.01)
    measured = r.Rates.measured(QWEN25, prompt_tokens=512, ttft_s=0.088, tpot_s=0.028)
    assert (measured.bytes_per_s, measured.flops_per_s) == (near(505e9), near(76.6e12))
    for bad in (0, -0.1, float("nan")):
        with pytest.raises(ServebookError, match="tpot_s"):
            r.effective_bytes_per_s(1e9, bad)


def test_prefill_bounds():
    bound = [r.ttft_bound_s(QWEN25, 149.7e12, 696e9, prompt_tokens=512, overlap=o) for o in (True, False)]
    assert bound == [near(0.045), near(0.0653)]
    # a prompt of one token is bound by the weights
    assert r.ttft_bound_s(QWEN25, 149.7e12, 696e9, prompt_tokens=1) == QWEN25.decode_weight_bytes / 696e9


def test_decode_bound_is_memory():
    assert r.tpot_bound_s(QWEN25, 149.7e12, BW, batch=1, context_tokens=8192) == near(0.0289)
    moved = r.decode_bytes(QWEN25, 52, 8192)
    assert r.tpot_bound_s(QWEN25, 149.7e12, BW, batch=52, context_tokens=8192) == moved / BW


DECODE_ONLY = {  # C: (GB a step, TPOT ms, tok/s)
    1: (14.61, 28.9, 34.6),
    2: (15.08, 29.9, 67),
    4: (16.02, 31.7, 126),
    8: (17.90, 35.4, 226),
    16: (21.66, 42.9, 373),
    32: (29.17, 57.8, 554),
    52: (38.6, 76, 681),
}


@pytest.mark.parametrize(("c", "row"), DECODE_ONLY.items())
def test_decode_only_table(c: int, row: tuple[float, float, float]):
    gb, tpot_ms, tok_per_s = row
    moved = r.decode_bytes(QWEN25, c, 8192)
    assert moved == near(gb * 1e9)
    assert moved / BW == near(tpot_ms / 1e3, 0.006)
    assert c / (moved / BW) == near(tok_per_s, 0.006)


MIXED = {1: (28.9, 35), 2: (41, 49), 4: (66, 61), 8: (114, 70), 16: (207, 77), 32: (382, 84)}


@pytest.mark.parametrize(("c", "row"), MIXED.items())
def test_mixed_table(c: int, row: tuple[float, float]):
    assert r.prefill_chunks(8192, 2048) == 4
    tpot = r.mixed_tpot_s(c, 128, 4, 0.39, r.decode_bytes(QWEN25, c, 8192) / BW)
    assert tpot == near(row[0] / 1e3, 0.01)
    assert c / tpot == near(row[1], 0.015)


def test_mixed_table_at_the_kv_cap_and_the_wall_clock_rate():
    assert r.mixed_tpot_s(52, 128, 4, 0.39, 0.076) == 0.39
    decode = r.decode_bytes(QWEN25, 2, 8192) / BW
    assert r.wall_clock_tok_per_s(2, 128, 4, 0.39, decode) == near(37, 0.015)
    assert r.wall_clock_tok_per_s(64, 128, 4, 1.57 / 4, decode) == near(81, 0.005)


FIFO = {1: 1.74, 2: 7.4, 4: 19, 8: 41, 16: 86, 32: 177, 52: 290}


@pytest.mark.parametrize(("c", "ttft"), FIFO.items())
def test_naive_fifo_column(c: int, ttft: float):
    tpot = r.naive_tpot_s(QWEN25, BW, 8192)
    assert tpot == near(0.0308) and 1 / tpot == near(32.5)
    request = r.request_s(1.74, tpot, 128)
    assert request == near(5.65)
    assert r.fifo_ttft_s(c, 1.74, request) == near(ttft, 0.02)


def test_author_style_gives_both_columns_of_the_last_table():
    def point(engine: str, c: int):
        rates = r.Rates(BW, VLLM if engine == "vllm" else HF)
        load = {"prompt_tokens": 8192, "output_tokens": 128, "concurrency": c, "kv_tokens": 430_528}
        return r.baseline(QWEN25, rates, engine=engine, **load)

    for c, (tpot_ms, tok_per_s) in MIXED.items():
        p = point("vllm", c)
        assert p["ttft_s"] == near(1.57) and p["tpot_s"] == near(tpot_ms / 1e3, 0.01)
        assert p["decode_tok_per_s"] == near(tok_per_s, 0.015)
        assert p["request_rate_per_s"] * p["e2e_s"] == near(c, 1e-9)  # Little's law
    for c, ttft in FIFO.items():
        p = point("naive", c)
        assert p["ttft_s"] == near(ttft, 0.02) and p["decode_tok_per_s"] == near(32.5)
        assert p["request_rate_per_s"] * p["e2e_s"] == near(c, 1e-9)
    over, full = point("vllm", 64), point("vllm", 52)
    assert over["tpot_s"] == full["tpot_s"] and over["decode_tok_per_s"] == near(52 / 0.393)
    assert over["ttft_s"] > full["ttft_s"] + 0.15 * over["e2e_s"]
    assert over["request_rate_per_s"] == near(full["request_rate_per_s"], 1e-9)


def test_author_style_refuses_what_has_no_answer():
    rates = r.Rates(BW, VLLM)
    with pytest.raises(ServebookError, match="does not fit"):
        r.baseline(QWEN25, rates, engine="vllm", prompt_tokens=9000, output_tokens=1, concurrency=1, kv_tokens=8000)
    with pytest.raises(ServebookError, match="no closed form"):
        r.baseline(QWEN25, rates, engine="sglang", prompt_tokens=1, output_tokens=1, concurrency=1)


def test_short_prompts_on_a_fast_device_keep_mixed_steps_above_decode_steps():
    fast = r.Rates(BW, 1e18)
    p = r.baseline(QWEN25, fast, engine="vllm", prompt_tokens=16, output_tokens=128, concurrency=8)
    assert p["tpot_s"] == near(r.decode_bytes(QWEN25, 8, 16) / BW, 1e-9)


# --- the A100 write-up ---

W, KV_1K, KV_LIVE = 16.38e9, 0.147e9, 147_456 * 1_500


@pytest.mark.parametrize(("batch", "first", "refined"), [(16, 1742, 1638), (64, 5060, 4273)])
def test_saturation_curve(batch: int, first: float, refined: float):
    assert r.saturation_tok_per_s(batch, W, KV_1K, 2039e9) == near(first, 1e-3)
    assert r.saturation_tok_per_s(batch, W, KV_LIVE, 2039e9) == near(refined, 1e-3)


def test_curve_shape():
    half = r.half_saturation_batch(W, KV_1K)
    assert round(half) == 111
    assert r.ceiling_tok_per_s(KV_1K, A100.bytes_per_s) == near(13_870, 1e-3)
    assert r.saturation_tok_per_s(half, W, KV_1K, 2039e9) == near(13_870 / 2, 1e-3)
    assert QWEN3.kv_read_bytes(r.live_context_tokens(1000, 1000)) == KV_LIVE


def test_modelled_tpot_floor_and_batch_one():
    assert 64 / r.saturation_tok_per_s(64, W, KV_LIVE, 2039e9) == near(0.0150)
    assert 128 / r.saturation_tok_per_s(128, W, KV_LIVE, 2039e9) == near(0.0219)
    assert r.saturation_tok_per_s(1, W, 0, 2039e9) == near(124.5)


def test_kv_pool_slip():
    assert r.kv_pool_tokens(54e9, 147_000) == 367_346
    assert 410_240 * QWEN3.kv_bytes_per_token / GIB == near(56.34, 1e-4)
    # with GiB and the activations it measured, the same arithmetic lands on the log's figure
    assert r.kv_pool_tokens(r.kv_pool_bytes(80 * GIB, 0.9, QWEN3.weight_bytes, 0.4e9), 147_456) == near(410_240)


# --- inconsistencies ---


def test_inconsistencies_use_what_the_code_computes():
    used = {i.quantity: i for i in r.post_inconsistencies()}
    assert len(used) == len(r.post_inconsistencies()) >= 12
    assert all(i.first != i.second and i.why and i.post for i in used.values())
    computed = {
        "weight bytes of a decode step, Qwen2.5-7B": QWEN25.decode_weight_bytes,
        "weight bytes of a decode step, Qwen3-8B": QWEN3.decode_weight_bytes,
        "prefill FLOPs of 8,192 tokens, Qwen2.5-7B": QWEN25.prefill_flops(8192),
        "time of a 2,048-token chunk at 76.6 TFLOP/s": round(QWEN25.prefill_flops(8192) / 4 / VLLM, 4),
        "naive prefill of 8,192 tokens at 68.8 TFLOP/s": round(QWEN25.prefill_flops(8192) / HF, 2),
        "KV bytes of a request with 1,000 tokens, Qwen3-8B": QWEN3.kv_read_bytes(1000),
        "KV pool of the A40": 430_528 * QWEN25.kv_bytes_per_token,
        "compute floor of a 1,000-token prefill": round(QWEN3.prefill_flops(1000) / 312e12, 4),
        "KV copied per step at 512 tokens": 2 * QWEN25.kv_read_bytes(512),
        "sequences of the 8192/128 sweep that fit 430,528 KV tokens": r.max_sequences(430_528, 8320),
    }
    assert {q: used[q].used for q in computed} == computed
    lm_head_each = QWEN25.prefill_flops(8192) + 8191 * QWEN25.lm_head_flops
    assert used["prefill FLOPs of 8,192 tokens, Qwen2.5-7B"].first == near(lm_head_each)
