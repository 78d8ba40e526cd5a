"""Predictions: the accuracy bars on the public tables, causes that sum, ink that stays, plans, capacity, refusals."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config import params, points
from servebook.config.params import ModelParams, RunParams, Slo
from servebook.hardware import catalog as hardware
from servebook.lab import explore
from servebook.model import reader as model
from servebook.predictor import capacity, predict, scenario, server_limits
from servebook.predictor import plan as planning
from servebook.predictor.priors import vllm_priors
from servebook.run_folder import frozen_predictions
from servebook.scoring import score, standing

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("bench_predictor", ROOT / "benchmarks" / "bench_predictor.py")
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_predictor"] = bench
_spec.loader.exec_module(bench)

SHAPE = model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), ROOT)
A40 = hardware.catalog()["A40"]


def run_params(**over) -> RunParams:
    base = {
        "run": "t", "title": "t", "model": {"config": "qwen2.5-7b", "weights": "dummy"},
        "hardware": {"gpu": "A40", "price_per_hour": 0.4},
        "engines": {"hf": {"kind": "naive"}, "vllm": {"kind": "vllm", "max_num_batched_tokens": 2048}},
        "calibration": [{"prompt_tokens": 512, "output_tokens": 128}],
        "sweeps": {
            "short": {"kind": "concurrency", "prompt_tokens": 512, "output_tokens": 128, "concurrency": [1, 8]},
            "rates": {
                "kind": "arrival_rate", "prompt_tokens": 512, "output_tokens": 128, "shares_of_capacity": [0.3, 0.6],
            },
        },
        "load": {"max_requests": 60},
    }  # fmt: skip
    return RunParams(**(base | over))


@pytest.fixture(scope="module")
def tables():
    return bench.Table("A40"), bench.Table("A100")


@pytest.fixture(scope="module")
def datasheet():
    return predict.predict_run(run_params(), SHAPE, A40)


# --- accuracy ----------------------------------------------------------------------------------------------------


def test_a40_table_from_its_c1_points_only(tables):
    errors = tables[0].errors()
    assert bench.mean_abs(errors, "ttft_s") <= 0.06
    assert bench.mean_abs(errors, "tpot_s") <= 0.04
    assert bench.mean_abs(errors, "decode_tok_per_s") <= 0.04
    assert max(abs(e) for (_, m), e in errors.items() if m == "tpot_s") <= 0.08


def test_a100_figures_with_the_same_priors(tables):
    assert bench.mean_abs(tables[1].errors()) <= 0.045
    a40, a100 = (t.priors() for t in tables)
    for name in a40:
        # host_s grows with the layers, sampling with vocabulary ÷ bandwidth; an A100's GEMMs do not stream all it could
        if name not in ("host_s", "host_per_sequence_s", "bandwidth_share"):
            assert a40[name] == a100[name]


def test_what_streams_and_samples_how_fast():
    """A100s' GEMMs stream 1.56 TB/s whatever their memory; sampling moves the vocabulary; eager kernels lie apart."""
    cards = {n: hardware.catalog()[n] for n in ("A40", "A100-40GB-SXM", "A100-80GB-PCIe", "L4", "H200")}
    priors = {n: vllm_priors(SHAPE, card) for n, card in cards.items()}
    rate = {n: p["bandwidth_share"].value * cards[n].bytes_per_s for n, p in priors.items()}
    assert rate["A100-80GB-PCIe"] == pytest.approx(1.56e12) and rate["A40"] == pytest.approx(0.86 * 696e9)
    assert rate["A100-40GB-SXM"] == pytest.approx(0.86 * 1555e9)
    sampling = {n: p["host_per_sequence_s"].value for n, p in priors.items()}
    assert sampling["L4"] > 2 * sampling["A40"] and sampling["H200"] < 2e-6
    assert sampling["L4"] == pytest.approx(0.5e-6 + 30 * SHAPE.vocab / rate["L4"])
    # the slower memory of an H100 is used better, an L40S's 8-bit GEMMs read more slowly than its 16-bit ones
    fp8 = model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy", quantization="fp8"), ROOT)
    found = {
        (n, s.quantization): vllm_priors(s, hardware.catalog()[n])["bandwidth_share"].value
        for s in (SHAPE, fp8)
        for n in ("H100-SXM", "H200", "H100-PCIe", "L40S", "B200")
    }
    sixteen, eight = SHAPE.quantization, fp8.quantization
    assert [found[n, sixteen] for n in ("H100-SXM", "H200", "H100-PCIe", "L40S")] == [0.915, 0.90, 0.90, 0.84]
    assert found["H100-SXM", eight] == 0.87 and found["H200", eight] == 0.84
    assert found["L40S", eight] == pytest.approx(0.731, abs=1e-3) and found["B200", eight] == pytest.approx(0.792)
    eager = vllm_priors(SHAPE, cards["A40"], {"cuda_graphs": False})["host_s"].value
    assert eager - priors["A40"]["host_s"].value == pytest.approx(SHAPE.layers * 13e-6)


def test_top_p_sorts_the_vocabulary_until_vllm_0_16():
    """Measured on an H200 with PyTorch: 16, 64 and 128 sequences of 151,936 entries take 0.62, 1.32 and 2.88 ms more
    with top-p than by random sampling alone."""
    h200, vocab = hardware.catalog()["H200"], 151_936

    def step_s(sequences: int, **facts) -> float:
        p = vllm_priors(shape, h200, facts)
        return p["host_s"].value + sequences * p["host_per_sequence_s"].value

    shape = replace(SHAPE, vocab=vocab)
    random_s = 48 * vocab / (0.9 * h200.bytes_per_s) + 0.5e-6
    for sequences, measured in ((16, 0.62e-3), (64, 1.32e-3), (128, 2.88e-3)):
        plain = vllm_priors(shape, h200, {})["host_s"].value + sequences * random_s
        assert step_s(sequences, sampling="top-p", version="0.12.0") - plain == pytest.approx(measured, rel=0.25)
        assert step_s(sequences, sampling="top-p", version="0.16.0") == step_s(sequences)
    card = vllm_priors(shape, hardware.catalog()["L4"], {"sampling": "top-p", "version": "0.12.0"})
    assert card["host_per_sequence_s"].value < card["host_per_sequence_s"].high
    # a run that asks for top-p is predicted with it
    of = {
        top_p: predict.forecaster(
            run_params(load={"temperature": 0.6, "top_p": top_p}), "vllm", SHAPE, A40, facts={"version": "0.12.0"}
        ).calibration.constants["host_per_sequence_s"]
        for top_p in (0.95, 1.0)
    }
    assert of[0.95] > 3 * of[1.0]


def test_asynchronous_depth_and_mixed_attention_are_what_explains_the_a40(tables):
    whole, plain = tables[0].errors(), tables[0].priors()
    no_tile = tables[0].errors(plain | {"mixed_rows": replace(plain["mixed_rows"], value=16.0)})
    assert bench.mean_abs(no_tile, "tpot_s") > 2 * bench.mean_abs(whole, "tpot_s")
    synchronous = bench.Table("A40")
    synchronous.facts["engines"]["vllm"]["async_scheduling"] = False
    assert bench.mean_abs(synchronous.errors(), "ttft_s") > 2 * bench.mean_abs(whole, "ttft_s")


def test_naive_server_within_three_percent(tables):
    t = tables[0]
    rows = [r for r in t.rows if r.engine == "hf"]
    p = predict.predict_published(t.params, t.shape, t.gpu, rows, t.facts)
    for point, row in zip(p["points"], rows, strict=True):
        assert point["metrics"]["ttft_s"]["value"] == pytest.approx(row.ttft_mean_s, rel=0.03)
        if row.decode_tok_per_s:
            assert point["metrics"]["decode_tok_per_s"]["value"] == pytest.approx(row.decode_tok_per_s, rel=0.03)


def test_waterfall_of_the_a100_at_64_users(tables):
    t = tables[1]
    rows = [r for r in t.rows if r.concurrency in (1, 64)]
    p = predict.predict_published(t.params, t.shape, t.gpu, rows, t.facts)["points"][-1]
    steps = dict(p["waterfall"])
    # the write-up: its roofline says 15.0 ms (16.38 GB of weights, embedding included), measured 24.9
    assert steps["roofline bound"] == pytest.approx(0.0150, rel=0.06)
    assert sum(steps.values()) == pytest.approx(p["metrics"]["tpot_s"]["value"])
    assert sum(steps.values()) == pytest.approx(0.0249, rel=0.05)
    assert 0.001 < steps["prefill of others"] < 0.005 and 0.001 < steps["host"] < 0.004


# --- what a prediction holds ---------------------------------------------------------------------------------------


def test_every_point_has_ordered_intervals_and_causes_that_sum(datasheet):
    names = {(p["sweep"], p["engine"], p["point"]) for p in datasheet["points"]}
    assert ("short", "vllm", "c0008") in names and ("calibration", "hf", "p00512-o0128") in names
    for p in datasheet["points"]:
        assert set(p["metrics"]) == {
            "ttft_s", "tpot_s", "e2e_s", "output_tok_per_s", "decode_tok_per_s", "request_rate_per_s",
        }  # fmt: skip
        for m in p["metrics"].values():
            assert 0 < m["low"] < m["value"] < m["high"]
        for metric in ("ttft_s", "tpot_s"):
            assert sum(p["breakdown"][metric].values()) == pytest.approx(p["metrics"][metric]["value"], rel=1e-6)
        assert p["wall_s"] > 0
    json.dumps(datasheet, allow_nan=False)


def test_same_inputs_same_prediction(datasheet):
    assert predict.predict_run(run_params(), SHAPE, A40) == datasheet


def test_calibration_narrows_the_intervals(datasheet):
    t = bench.Table("A40")
    points = list(t.alone.values())
    calibrated = predict.predict_run(run_params(), SHAPE, A40, calibration=points, engines=["vllm"])

    def width(prediction):
        p = next(p for p in prediction["points"] if (p["engine"], p["point"]) == ("vllm", "c0001"))
        m = p["metrics"]["tpot_s"]
        return (m["high"] - m["low"]) / m["value"]

    assert calibrated["constants"]["vllm"]["stage"] == "calibrated"
    assert width(calibrated) < 0.6 * width(datasheet)


def test_rates_are_shares_of_the_predicted_capacity(datasheet):
    capacity_per_s = datasheet["capacity_per_s"]["rates/vllm"]
    rates = [p["rate_per_s"] for p in datasheet["points"] if p["sweep"] == "rates" and p["engine"] == "vllm"]
    assert rates == [round(0.3 * capacity_per_s, 3), round(0.6 * capacity_per_s, 3)]
    naive = datasheet["capacity_per_s"]["rates/hf"]
    t = next(p for p in datasheet["points"] if p["engine"] == "hf" and p["point"] == "c0001")["metrics"]
    assert naive == pytest.approx(1 / t["e2e_s"]["value"], rel=0.02)


def test_an_open_loop_below_saturation_is_predicted_at_its_rate(datasheet):
    for p in (p for p in datasheet["points"] if p["sweep"] == "rates"):
        m = p["metrics"]
        assert m["request_rate_per_s"]["value"] == pytest.approx(p["rate_per_s"])
        if p["engine"] == "vllm":
            assert m["output_tok_per_s"]["value"] == pytest.approx(128 * p["rate_per_s"], rel=0.03)
            assert m["tpot_s"]["value"] > 0.028  # the A40's C = 1 figure


def test_repeated_prompts_are_predicted_with_the_cache_they_find():
    sweep = {"kind": "prefix_cache", "prompt_tokens": 2000, "output_tokens": 64, "concurrency": [1, 4, 16]}
    engines = {"vllm": {"kind": "vllm"}, "bare": {"kind": "vllm", "prefix_caching": False}}
    p = predict.predict_run(run_params(engines=engines, calibration=[], sweeps={"cache": sweep}), SHAPE, A40)
    found = {(x["engine"], x["point"]): x for x in p["points"]}
    ttft = {k: x["metrics"]["ttft_s"]["value"] for k, x in found.items()}
    # the first of the set finds nothing; a faster one first what that has sent, then prompts that nobody has
    assert ttft["vllm", "same-c0001"] == ttft["vllm", "fresh-c0001"] == ttft["bare", "fresh-c0001"]
    assert 0.3 < ttft["vllm", "same-c0004"] / ttft["vllm", "fresh-c0004"] < 0.8
    assert "expected in the prefix cache" in found["vllm", "same-c0016"]["note"]
    assert not any(point.startswith("same") for engine, point in found if engine == "bare")


def test_a_pool_holds_no_more_repeated_prompts_than_fit_it():
    spec = points.RepeatedPoint("s", "vllm", "same-c0004", "prefix_cache", 2000, 48, 4, prompt_set="x")
    s = server_limits.server("vllm", run_params().engines["vllm"], SHAPE, A40, {"kv_cache_tokens": 20_480})
    assert predict._still_cached(s, spec, {"x": 7}) == 7 and predict._still_cached(s, spec, {"x": 70}) == 10
    assert predict._still_cached(s, spec, {}) == 0


def test_fp8_weights_and_activations_on_an_h200():
    h200 = hardware.catalog()["H200"]
    fp8 = model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy", quantization="fp8"), ROOT)
    both = [server_limits.server("vllm", run_params().engines["vllm"], s, h200) for s in (SHAPE, fp8)]
    plain, quantized = (
        s.times({n: p.value for n, p in vllm_priors(s.shape, h200).items()}) for s in both
    )  # fmt: skip
    # every input of 28 layers read as bf16 and written as fp8: 2 · 3,584 + 3,584 + 18,944 values of 3 bytes
    assert fp8.activation_quantization_bytes == 28 * 29_696 * 3 and SHAPE.activation_quantization_bytes == 0
    # twice the tensor rate at a smaller share of it, and what quantizing activations costs; attention stays in bf16
    rate = h200.flops_per_s("fp8") * 0.60
    moved = fp8.activation_quantization_bytes / (h200.bytes_per_s * 0.84)
    token_s = [times.weights.multiply_s(1) for times in (plain, quantized)]
    assert token_s[1] == pytest.approx(fp8.linear_flops_per_token / rate + moved)
    assert 0.55 < token_s[1] / token_s[0] < 0.7 and quantized.pair_s == plain.pair_s
    # 7.6 GB instead of 14.1 are read; two more kernels a layer are launched
    assert quantized.weights_s == pytest.approx(plain.weights_s * 7.616 / 14.141 * 0.90 / 0.84, rel=1e-3)
    assert quantized.host_s > plain.host_s and quantized.launch(513) > plain.launch(513)
    assert 0.65 < quantized.per_token(512, 128) / plain.per_token(512, 128) < 0.8


def test_kv_pool_is_near_what_the_engines_reported():
    q8 = model.read_shape(ModelParams(config="qwen3-8b", weights="dummy"), ROOT)
    for shape, gpu, reported, off in ((SHAPE, "A40", 430_528, 0.1), (q8, "A100-80GB-SXM", 410_240, 0.03)):
        engine = params.VllmEngine(kind="vllm", max_num_batched_tokens=2048)
        s = server_limits.server("vllm", engine, shape, hardware.catalog()[gpu])
        assert s.kv_tokens == pytest.approx(reported, rel=off)
        said = server_limits.server("vllm", engine, shape, hardware.catalog()[gpu], {"kv_cache_tokens": reported})
        assert said.kv_tokens == reported


@pytest.mark.parametrize(
    ("gpu", "over", "prompt", "says"),
    [
        ("L4", {"max_model_len": 8192}, 12_000, "context"),
        ("A10", {"max_model_len": 32_768, "gpu_memory_utilization": 0.75}, 512, "KV pool|weights"),
        ("A10", {"gpu_memory_utilization": 0.5}, 512, "weights"),
        ("A40", {}, 33_000, "context of 32,768"),
    ],
)
def test_what_does_not_fit_gets_no_number(gpu, over, prompt, says):
    engines = {"vllm": {"kind": "vllm"} | over}
    sweeps = {"s": {"kind": "prompt_length", "prompt_tokens": [prompt], "output_tokens": 16}}
    p = run_params(engines=engines, sweeps=sweeps, calibration=[])
    [point] = predict.predict_run(p, SHAPE, hardware.catalog()[gpu])["points"]
    assert point["fits"] is False and point["metrics"] == {}
    assert "does not fit" in point["note"]
    import re

    assert re.search(says, point["note"])


def test_no_engine_of_that_name():
    row = MeasuredPoint(sweep="s", engine="other", point_id="c1", concurrency=1, prompt_tokens=8, output_tokens=8)
    with pytest.raises(ServebookError, match="'other'"):
        predict.predict_published(run_params(), SHAPE, A40, [row])


# --- ink -------------------------------------------------------------------------------------------------------------


def measure(run_dir, sweep, engine, point):
    path = run_dir / "requests" / sweep / engine / f"{point}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"sweep": sweep, "engine": engine, "point": point, "prompt_tokens": 1, "output_tokens": 1})
    )


def changed(prediction, **more):
    return prediction | {"inputs": prediction["inputs"] | more}


def test_ink_dries_when_a_point_is_measured(tmp_path, datasheet):
    first = frozen_predictions.freeze(tmp_path, "datasheet", datasheet)
    assert (first["stage"], first["late"]) == ("datasheet", False)
    assert len(first["inputs_sha256"]) == 64 and first["time_utc"].endswith("Z")
    assert frozen_predictions.freeze(tmp_path, "datasheet", datasheet) == first  # the same again: nothing new
    second = frozen_predictions.freeze(
        tmp_path, "datasheet", changed(datasheet, x=1)
    )  # nothing measured: one may think again
    assert second["inputs_sha256"] != first["inputs_sha256"]

    measure(tmp_path, "calibration", "vllm", "p00512-o0128")
    assert frozen_predictions.freeze(tmp_path, "datasheet", changed(datasheet, x=2)) == second
    calibrated = frozen_predictions.freeze(tmp_path, "calibrated:vllm", datasheet)  # calibration does not overtake it
    assert calibrated["late"] is False
    measure(tmp_path, "short", "hf", "c0001")  # another engine's point neither
    again = frozen_predictions.freeze(tmp_path, "calibrated:vllm", changed(datasheet, x=3))
    assert again["inputs_sha256"] != calibrated["inputs_sha256"]
    measure(tmp_path, "short", "vllm", "c0001")
    assert frozen_predictions.freeze(tmp_path, "calibrated:vllm", changed(datasheet, x=4)) == again
    stored = json.loads((tmp_path / "predictions.json").read_text())["frozen"]
    assert [e["stage"] for e in stored] == ["datasheet", "datasheet", "calibrated:vllm", "calibrated:vllm"]
    assert stored[0] == first  # what was written stays


def test_a_point_added_later_gets_ink_and_the_measured_keep_theirs(tmp_path, datasheet):
    old = [p for p in datasheet["points"] if p["point"] != "c0008"]
    first = frozen_predictions.freeze(tmp_path, "calibrated:vllm", datasheet | {"points": old})
    measure(tmp_path, "short", "vllm", "c0001")

    def moved(p):
        return p | {"wall_s": p["wall_s"] + 1}

    later = changed(datasheet, x=1) | {"points": [moved(p) for p in datasheet["points"]]}
    later["points"] = [p for p in later["points"] if p["sweep"] == "short"]
    stands = frozen_predictions.freeze(tmp_path, "calibrated:vllm", later)
    stored = json.loads((tmp_path / "predictions.json").read_text())["frozen"]
    assert stored[0] == first and stored[1]["additional"] and not stored[1]["late"]
    added = {standing.key(p) for p in stored[1]["points"]}
    assert ("short", "vllm", "c0008") in added and ("short", "vllm", "c0001") not in added
    by_key = {standing.key(p): p for p in stands["points"]}
    assert by_key["short", "vllm", "c0001"] in first["points"]  # measured: as it was written before
    assert by_key["short", "vllm", "c0008"] in stored[1]["points"]
    assert set(by_key) == {standing.key(p) for p in datasheet["points"]}
    scored = score.prediction_frame(stored)
    one = scored[(scored["point"] == "c0008") & (scored["engine"] == "vllm") & (scored["metric"] == "tpot_s")]
    assert len(one) == 1
    # nothing new to say: nothing is written, though the server's facts moved
    assert frozen_predictions.freeze(tmp_path, "calibrated:vllm", later | {"inputs": {"y": 2}}) == stands
    # parameters changed: the point is measured again, and what it will be scored against is frozen before
    again = frozen_predictions.freeze(tmp_path, "calibrated:vllm", later | {"inputs": {"y": 3}}, measured=set())
    renewed = next(p for p in again["points"] if standing.key(p) == ("short", "vllm", "c0001"))
    assert renewed == moved(by_key["short", "vllm", "c0001"])


def test_rates_stay_shares_of_the_capacity_that_was_frozen(tmp_path, datasheet):
    frozen_predictions.freeze(tmp_path, "datasheet", datasheet)
    assert frozen_predictions.frozen_capacity(tmp_path, "datasheet") == {}  # nothing measured: still open
    measure(tmp_path, "calibration", "vllm", "p00512-o0128")
    known = frozen_predictions.frozen_capacity(tmp_path, "datasheet")
    assert known == datasheet["capacity_per_s"]
    told = {"rates/vllm": 2.0}
    half = predict.predict_run(run_params(), SHAPE, A40, capacity_per_s=told, engines=["vllm"], n_samples=2)
    assert [p["rate_per_s"] for p in half["points"] if p["sweep"] == "rates"] == [0.6, 1.2]


def test_a_prediction_after_the_fact_says_so(tmp_path, datasheet):
    measure(tmp_path, "short", "vllm", "c0001")
    assert frozen_predictions.freeze(tmp_path, "datasheet", datasheet)["late"] is True


# --- plan and capacity -----------------------------------------------------------------------------------------------


def test_plan_sums_and_keeps_to_a_budget():
    plan = planning.plan(run_params(), SHAPE, A40)
    assert plan["total_s"] == pytest.approx(sum(r["wall_s"] for r in plan["rows"]))
    assert plan["total_cost"] == pytest.approx(plan["total_s"] / 3600 * 0.4)
    assert {r["point"] for r in plan["rows"] if r["sweep"] == "start"} == {"start"}
    half = planning.plan(run_params(), SHAPE, A40, budget_minutes=plan["total_s"] / 60 * 0.8)
    dropped = [r for r in half["rows"] if r["dropped"]]
    assert dropped and half["kept_s"] <= half["budget_s"]
    assert all(r["point"] not in ("c0001", "start") for r in dropped)
    cheap = planning.plan(run_params(), SHAPE, A40, budget_cost=plan["total_cost"] * 0.8)
    assert cheap["budget_s"] == pytest.approx(plan["total_s"] * 0.8)
    assert "drop for the budget" in planning.plan_text(half)


def test_a_plan_says_where_time_ends_before_anything_is_measured():
    # 16 clients in step: a request takes about 33 s, warm-up is the first round, the second ends after 66 s
    sweep = {"kind": "concurrency", "prompt_tokens": 512, "output_tokens": 1000, "concurrency": [1, 16]}
    notes = {}
    for limit in (50, 100):
        run = run_params(
            engines={"vllm": {"kind": "vllm"}}, calibration=[], sweeps={"s": sweep},
            load={"max_seconds": limit, "min_requests": 1, "warmup_requests": 1},
        )  # fmt: skip
        rows = planning.plan(run, SHAPE, A40)["rows"]
        notes[limit] = next(r["note"] for r in rows if r["point"] == "c0016") or ""
    assert "max_seconds (50 s) is too short for one measured round of all 16 clients" in notes[50]
    assert "round" not in notes[100]


def test_plan_stops_a_sweep_at_its_minutes():
    sweep = {
        "kind": "concurrency", "prompt_tokens": 8192, "output_tokens": 128, "concurrency": [1, 2, 4, 8],
        "minutes_per_engine": {"hf": 3.0},
    }  # fmt: skip
    plan = planning.plan(run_params(sweeps={"long": sweep}), SHAPE, A40)
    rows = [r for r in plan["rows"] if r["sweep"] == "long" and r["engine"] == "hf"]
    assert rows[0]["wall_s"] > 0 and rows[-1]["wall_s"] == 0 and "minutes_per_engine" in rows[-1]["note"]


def test_capacity_meets_the_service_level_it_was_asked_for():
    p = run_params(engines={"vllm": {"kind": "vllm", "max_num_batched_tokens": 2048}})
    f = predict.forecaster(p, "vllm", SHAPE, A40, samples=2)
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    most = capacity.LoadSearch(f, 512, 128, slo, 0.4).largest_concurrency()
    assert most.met_share >= 0.9 and 2 <= most.concurrency < 128
    assert most.cost_per_million_output_tokens == pytest.approx(0.4 / 3600 / most.output_tok_per_s * 1e6)
    strict = capacity.LoadSearch(f, 512, 128, Slo(ttft_s=0.2, tpot_s=0.05), 0.4).largest_concurrency()
    assert strict.concurrency < most.concurrency
    assert capacity.LoadSearch(f, 512, 128, Slo(tpot_s=0.01)).largest_concurrency() is None
    rate = capacity.LoadSearch(f, 512, 128, slo).largest_rate()
    assert 0 < rate.rate_per_s < f.capacity(512, 128)


def test_what_ifs_move_the_right_way():
    p = run_params(engines={"vllm": {"kind": "vllm", "max_num_batched_tokens": 2048}})
    cards = [(hardware.catalog()["H100-SXM"], 2.5), (hardware.catalog()["T4"], 0.3)]
    rows = capacity.capacity(p, SHAPE, A40, 512, 128, slo=Slo(ttft_s=1.0, tpot_s=0.05), other_gpus=cards)
    rate = {r["case"]: r["by_rate"] and r["by_rate"]["goodput_per_s"] for r in rows}
    # an A40 has no fp8 arithmetic: weights are unpacked in the GEMM, which saves reads and costs rate
    assert rate["fp8 weights"] == pytest.approx(rate["as it is"], rel=0.15)
    assert rate["50% of prompts cached"] > rate["as it is"]
    assert rate["H100-SXM"] > 3 * rate["as it is"]
    t4 = next(r for r in rows if r["case"] == "T4")
    assert t4["fits"] is False and "does not fit" in t4["note"]


def test_where_clients_meet_the_value_is_no_single_course_of_theirs():
    p = run_params(load={"max_requests": 60, "jitter_s": 0.1})
    spec = points.PointSpec("s", "vllm", "c0008", "concurrency", 1024, 128, concurrency=8)
    f = predict.forecaster(p, "vllm", SHAPE, A40)
    courses = [scenario.Scenario(f.server, spec, p.load).outcome(f.best, seed).ttft_s for seed in range(8)]
    assert stdev(courses) > 0.03 * mean(courses)
    values = []
    for seed in range(6):
        f.seed = seed
        f.__post_init__()  # other draws of the constants
        values.append(f.point(spec)["metrics"]["ttft_s"]["value"])
    assert stdev(values) < 0.7 * stdev(courses)


def test_a_limit_of_rounds_limits_what_is_expected_of_a_closed_loop():
    spec = points.PointSpec("s", "vllm", "c0004", "concurrency", 512, 128, concurrency=4)
    seconds = []
    for load in ({"min_seconds": 0}, {"min_seconds": 0, "max_rounds": 5}):
        f = predict.forecaster(run_params(load=load), "vllm", SHAPE, A40, samples=4)
        seconds.append(f.point(spec)["wall_s"])
    e2e = f.point(spec)["metrics"]["e2e_s"]["value"]
    assert seconds[1] < 8.5 * e2e < seconds[0]  # of them three rounds of warm-up: ten completions


def test_an_open_loop_beyond_what_the_server_serves_has_a_note_and_no_figures():
    sweep = {"kind": "arrival_rate", "prompt_tokens": 512, "output_tokens": 128, "rates_per_s": [1, 1000]}
    p = run_params(sweeps={"rates": sweep}, calibration=[], load={"max_seconds": 20})
    calm, over = (q for q in predict.predict_run(p, SHAPE, A40, engines=["vllm"])["points"] if q["sweep"] == "rates")
    assert calm["fits"] and calm["metrics"]["output_tok_per_s"]["value"] == pytest.approx(128, rel=0.05)
    assert not over["fits"] and over["metrics"] == {} and over["note"].startswith("overloaded: 1000 requests/s exceed")
    rows = planning.plan(p, SHAPE, A40)["rows"]
    assert [r["wall_s"] > 20 for r in rows if r["engine"] == "vllm" and r["point"].startswith("r1000")] == [True]


def test_a_point_that_ends_by_its_time_says_so():
    spec = points.PointSpec("s", "vllm", "c0008", "concurrency", 8192, 128, concurrency=8)
    for limit_s in (60.0, 61.0, 62.0, 63.0):
        f = predict.forecaster(run_params(load={"max_seconds": limit_s}), "vllm", SHAPE, A40, samples=4)
        assert f.point(spec)["note"] == f"cut off at max_seconds ({limit_s:g} s)"


def test_parts_sum_to_a_value_that_the_logged_course_does_not_show():
    """Two output tokens in one event: a TPOT of 0 in some courses, not in others."""
    load = {"model": "qwen2.5-7b", "gpu": "B200", "quantization": "fp8", "prompt_tokens": 4000, "output_tokens": 2}
    point = explore.predict(**load, concurrency=2).point
    for metric, parts in point["breakdown"].items():
        assert sum(parts.values()) == pytest.approx(point["metrics"][metric]["value"], rel=1e-6, abs=1e-9)


def test_limits_that_are_not_given_follow_those_that_are_as_in_vllm() -> None:
    def limits(**given: int) -> tuple[int, int, object]:
        s = server_limits.server("vllm", params.VllmEngine(kind="vllm", max_model_len=4096, **given), SHAPE, A40)
        return s.config.max_num_batched_tokens, s.config.max_num_seqs, s.problem

    assert limits() == (2048, 256, None)
    assert limits(max_num_batched_tokens=128) == (128, 128, None)
    assert limits(max_num_seqs=512) == (2048, 512, None)
    refused = limits(max_num_seqs=512, max_num_batched_tokens=256)[2]
    assert str(refused) == "vLLM refuses: max_num_batched_tokens 256 is below max_num_seqs 512"
    other = server_limits.server(  # not vLLM, and it runs
        "sglang", params.OpenAIEngine(kind="openai", url="http://127.0.0.1:1"), SHAPE, A40,
        {"max_num_batched_tokens": 2048, "max_num_seqs": 4096},
    )  # fmt: skip
    assert (other.config.max_num_batched_tokens, other.config.max_num_seqs, other.problem) == (2048, 4096, None)
