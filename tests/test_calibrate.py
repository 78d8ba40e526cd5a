"""Calibration: what it recovers, what it admits not to know, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config.params import ModelParams
from servebook.hardware import catalog as hardware
from servebook.model import reader as model
from servebook.predictor.calibration import COMMON_SD, Misfit, _apart, calibrate
from servebook.predictor.priors import vllm_priors
from servebook.predictor.steptime import VllmTimes, on_this_host

A40 = hardware.catalog()["A40"]
SHAPE = model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))


def point(prompt, ttft, tpot, output=128, **more):
    asked = {"concurrency": 1, "prompt_tokens": prompt, "output_tokens": output} | more
    return MeasuredPoint(sweep="calibration", engine="vllm", point_id="", ttft_mean_s=ttft, tpot_mean_s=tpot, **asked)


POST_2 = [point(512, 0.088, 0.028), point(8192, 1.25, 0.0288)]


def made(constants, prompts, histograms=False):
    """C = 1 points as a server of these constants would give."""
    times, out = VllmTimes(SHAPE, A40, constants), []
    for prompt in prompts:
        front, first = times.frontend(prompt) + times.first_event(prompt), times.first_token(prompt, 2048)
        p = point(prompt, front + first, times.per_token(prompt, 128))
        if histograms:
            p = replace(p, server_prefill_mean_s=first, server_queue_mean_s=0.0)
        out.append(p)
    return out


def test_without_points_every_constant_is_its_prior():
    c = calibrate("vllm", SHAPE, A40)
    assert c.stage == "datasheet"
    assert c.constants == {n: p.value for n, p in vllm_priors(SHAPE, A40).items()}
    assert "prior" in c.notes[0]


def test_a_sweep_of_prompt_lengths_recovers_the_gemm_rate():
    truth = {n: p.value for n, p in vllm_priors(SHAPE, A40).items()} | {"matmul_share": 0.55, "attention_share": 0.6}
    c = calibrate("vllm", SHAPE, A40, made(truth, [128, 512, 1024, 2048, 4096, 8192, 16384]))
    assert c.constants["matmul_share"] == pytest.approx(0.55, rel=0.03)
    assert c.constants["attention_share"] == pytest.approx(0.6, rel=0.10)
    assert c.estimates["matmul_share"].sd_ratio < 0.4


def test_one_slow_request_of_a_few_is_not_what_a_prompt_takes():
    truth = {n: p.value for n, p in vllm_priors(SHAPE, A40).items()}
    alone = made(truth, [512, 8192], histograms=True)
    # one of six requests took 0.6 s more: the mean says 0.1 s more, the median nothing
    slow = [
        replace(
            p, ttft_mean_s=p.ttft_mean_s + 0.1, server_prefill_mean_s=p.server_prefill_mean_s + 0.1,
            ttft_p50_s=p.ttft_mean_s,
        )
        for p in alone
    ]  # fmt: skip
    found, moved = (calibrate("vllm", SHAPE, A40, p).constants["matmul_share"] for p in (alone, slow))
    assert moved == pytest.approx(found, rel=1e-6)


def test_server_histograms_separate_the_front_end():
    truth = {n: p.value for n, p in vllm_priors(SHAPE, A40).items()}
    truth |= {"frontend_request_s": 0.012, "frontend_token_s": 5e-6}
    points = made(truth, [512, 8192], histograms=True)
    c = calibrate("vllm", SHAPE, A40, points)
    here = on_this_host(c.constants)  # a slow front end may be a slow host
    assert here["frontend_token_s"] == pytest.approx(5e-6, rel=0.25)
    assert here["frontend_request_s"] == pytest.approx(0.012, rel=0.15)
    blind = calibrate("vllm", SHAPE, A40, made(truth, [512, 8192]))
    assert c.estimates["frontend_token_s"].sd < 0.6 * blind.estimates["frontend_token_s"].sd


def test_a_server_without_asynchronous_scheduling_is_calibrated_as_one():
    truth = {n: p.value for n, p in vllm_priors(SHAPE, A40).items()}

    def synchronous(constants):
        return VllmTimes(SHAPE, A40, constants, asynchronous=False)

    alone = point(512, synchronous(truth).first_token(512, 2048) + 0.006, synchronous(truth).per_token(512, 128))
    c = calibrate("vllm", SHAPE, A40, [alone], times=synchronous)
    assert c.constants["bandwidth_share"] == pytest.approx(truth["bandwidth_share"], rel=0.002)
    other = calibrate("vllm", SHAPE, A40, [alone])  # taken for vLLM's default, its waits are slow memory
    assert other.constants["bandwidth_share"] < 0.99 * truth["bandwidth_share"]


def test_an_output_rate_tells_less_than_a_token_time():
    """A run's output rate also holds its start and end and its client's pauses."""

    def simulated(times, p):
        step = times.decode(4, 4 * p.prompt_tokens)
        tpot = step[0] + step[1] * 4 * p.prompt_tokens
        return {"tpot": tpot, "output": 4 / tpot}

    prior = {n: p.value for n, p in vllm_priors(SHAPE, A40).items()}
    at_prior = simulated(VllmTimes(SHAPE, A40, prior), point(512, None, None))
    crowd = {"concurrency": 4, "ttft": None}
    found = [
        calibrate("vllm", SHAPE, A40, [point(512, tpot=tpot, output_tok_per_s=rate, **crowd)], simulated=simulated)
        for tpot, rate in ((at_prior["tpot"] / 1.06, None), (None, at_prior["output"] * 1.06))
    ]
    by_tpot, by_rate = (c.constants["bandwidth_share"] - prior["bandwidth_share"] for c in found)
    assert 0 < by_rate < 0.5 * by_tpot


def test_what_all_crowd_points_get_wrong_alike_counts_once():
    many = [Misfit("ttft", f"C={c} 512/128", 0.3, 0.12, crowd=True) for c in range(2, 12)]
    apart = _apart(many)
    assert sum(z * z for z in apart) == pytest.approx(10 * 0.3**2 / (0.12**2 + 10 * COMMON_SD["ttft"] ** 2))
    assert _apart([Misfit("tpot", "512/128", 0.02, 0.01)]) == [2.0]  # at C = 1 nothing is shared


def test_a_slow_lone_prompt_tells_of_the_whole_host():
    truth = {n: p.value for n, p in vllm_priors(SHAPE, A40).items()}
    slow = truth | {"host_slowness": 1.6}
    c = calibrate("vllm", SHAPE, A40, made(slow, [64, 128, 640, 1024], histograms=True))
    assert c.constants["host_slowness"] > 1.05


def test_says_that_two_tpots_cannot_tell_bandwidth_from_host_time():
    # taken by themselves these two TPOTs ask for more than the datasheet's bandwidth or for negative host time
    c = calibrate("vllm", SHAPE, A40, POST_2)
    assert any({a, b} == {"bandwidth_share", "host_s"} for a, b, _ in c.correlations)
    assert any("cannot tell bandwidth_share from host_s" in n for n in c.notes)
    bounds = vllm_priors(SHAPE, A40)
    for name, e in c.estimates.items():
        assert bounds[name].low <= e.low <= e.value <= e.high <= bounds[name].high


def test_one_point_is_enough_and_leaves_more_open():
    one, two = (calibrate("vllm", SHAPE, A40, POST_2[:n]) for n in (1, 2))
    assert one.stage == "calibrated"
    assert one.estimates["attention_share"].sd >= two.estimates["attention_share"].sd


def test_a_low_concurrency_point_decides_what_one_client_cannot():
    from servebook.config.params import Load, VllmEngine
    from servebook.config.points import PointSpec
    from servebook.predictor import scenario, server_limits

    server = server_limits.server("vllm", VllmEngine(kind="vllm", max_num_batched_tokens=2048), SHAPE, A40)

    def simulated(times, p):
        spec = PointSpec("", "vllm", "", "concurrency", p.prompt_tokens, p.output_tokens, p.concurrency)
        o = scenario.Scenario(server, spec, Load()).outcome(times, 1, 80)
        return {"ttft": o.ttft_s, "tpot": o.tpot_s}

    truth = calibrate("vllm", SHAPE, A40, POST_2).constants | {"mixed_rows": 120.0}
    crowd = point(8192, 1, 1, concurrency=16)
    figures = simulated(VllmTimes(SHAPE, A40, truth), crowd)
    crowd = replace(crowd, ttft_mean_s=figures["ttft"], tpot_mean_s=figures["tpot"])
    alone = calibrate("vllm", SHAPE, A40, POST_2, simulated=simulated)
    both = calibrate("vllm", SHAPE, A40, [*POST_2, crowd], simulated=simulated)
    assert both.estimates["mixed_rows"].sd < alone.estimates["mixed_rows"].sd
    assert both.constants["mixed_rows"] > alone.constants["mixed_rows"] + 2


def test_same_seed_same_samples_inside_the_bounds():
    c = calibrate("vllm", SHAPE, A40, POST_2)
    assert c.samples(8, 3) == c.samples(8, 3) != c.samples(8, 4)
    for draw in c.samples(64):
        for name, prior in vllm_priors(SHAPE, A40).items():
            assert prior.low <= draw[name] <= prior.high


def test_a_ttft_that_the_cache_shortened_teaches_nothing():
    cached = point(1000, 0.023, 0.0285, cache_hit_share=0.5)
    c = calibrate("vllm", SHAPE, A40, [cached])
    assert {what for what, _ in c.residuals} == {"tpot 1000/128"}


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([point(512, -0.1, 0.028)], "ttft_mean_s is -0.1 s"),
        ([point(512, 0.088, 0.0)], "tpot_mean_s is 0 s"),
        ([point(8192, 0.5, 0.0288)], "compute floor of 80"),  # 1.2e14 FLOPs at 149.7 TFLOP/s
        ([point(512, 0.088, 0.015)], "reading the weights"),
        ([point(512, 0.088, 0.028), point(512, 0.3, 0.028)], "contradict"),
        ([point(512, 0.9, 0.028), point(2048, 0.31, 0.028)], "contradict"),
        ([point(512, 0.9, 0.028), point(8192, 1.25, 0.3)], "no physically possible|contradict"),
    ],
)
def test_impossible_points_are_refused_in_one_line(points, says):
    with pytest.raises(ServebookError, match=says) as error:
        calibrate("vllm", SHAPE, A40, points)
    assert "\n" not in error.value.line()
