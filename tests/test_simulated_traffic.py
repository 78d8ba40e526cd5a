"""Loads of every kind in simulated time: finite runs, bursts, rates with a cap, traces, conversations, and what the
prefix cache finds of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from servebook.config import params, request_plan
from servebook.config.points import PointSpec
from servebook.config.workloads import Workload
from servebook.hardware import catalog
from servebook.model.reader import read_shape
from servebook.predictor.any_load import predict_load
from servebook.predictor.predict import predict_run
from servebook.predictor.scheduler import SchedulerConfig
from servebook.predictor.simulated_clients import Prompt, Traffic
from servebook.predictor.simulation import simulate
from test_simulation import Times

CONFIG = SchedulerConfig(max_num_seqs=8, kv_blocks=2000, async_scheduling=False)


def run(load, config=CONFIG):
    return simulate(config, Times(), load)


def test_a_burst_is_sent_at_once_and_measured_to_its_last_end():
    r = run(Traffic([Prompt(100, 10)], arrivals_s=[0.0] * 20, requests=20, finite=True))
    assert len(r.measured) == 20 and r.complete and r.window == (0.0, max(q.end_s for q in r.requests))
    assert {q.due_s for q in r.requests} == {0.0} and r.output_tokens == 200
    assert max(r.gauge.running) == 8  # no more seats


def test_a_finite_closed_loop_has_its_ramp_and_its_tail():
    r = run(Traffic([Prompt(100, 10)], concurrency=4, requests=10, finite=True))
    assert sorted(q.id for q in r.requests) == list(range(10)) and r.window[0] == 0.0
    assert [q.id for q in r.requests if q.sent_s == 0.0] == [0, 1, 2, 3]


def test_a_cap_holds_requests_back_and_their_wait_counts():
    arrivals = [0.0, 0.001, 0.002, 0.003, 50.0]
    r = run(Traffic([Prompt(100, 10)], concurrency=2, arrivals_s=arrivals, requests=5, finite=True))
    by = {q.id: q for q in r.requests}
    firsts = sorted(by[i].end_s for i in (0, 1))
    assert by[2].sent_s == pytest.approx(firsts[0]) and by[3].sent_s >= firsts[0]
    assert by[2].due_s == 0.002 and r.measured.values("ttft_s").max() > by[2].sent_s - 0.002
    assert by[4].sent_s == 50.0


def test_turns_of_a_conversation_follow_each_other_and_hit():
    plan = request_plan.RequestPlan(Workload(prompt_tokens=160, output_tokens=33, turns=3), 1)
    r = run(Traffic(plan, concurrency=2, requests=12, finite=True))
    by = {q.id: q for q in r.requests}
    assert len(by) == 12
    for i in range(12):
        if i % 3:
            assert by[i].sent_s >= by[i - 1].end_s
            # all full blocks of what came before but its last token, whose KV was never computed
            before = by[i - 1].prompt_tokens + by[i - 1].output_tokens
            assert by[i].cached_tokens == (before - 1) // 16 * 16
        else:
            assert by[i].cached_tokens == 0
    assert 0.5 < r.hit_share < 0.8


def test_a_trace_waits_for_the_turn_before(tmp_path):
    rows = [(0.0, 100, 400, "a"), (0.001, 600, 5, "a"), (0.002, 50, 5, "b")]
    lines = [
        json.dumps(dict(zip(("arrival_s", "prompt_tokens", "output_tokens", "session"), r, strict=True))) for r in rows
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    plan = request_plan.RequestPlan(Workload(trace="t.jsonl").at(tmp_path), 1)
    r = run(Traffic(plan, arrivals_s=plan.workload.rows().arrival_s, requests=3, finite=True))
    by = {q.id: q for q in r.requests}
    assert by[1].due_s == by[0].end_s and by[2].due_s == 0.002 and by[1].cached_tokens == 496


def test_few_prompts_are_found_whole_after_their_first_round():
    given = {"prompt_tokens": 447, "output_tokens": 8, "shared_prefix": {"tokens": 100, "groups": 9}}
    plan = request_plan.RequestPlan(Workload(**given, unique_prompts=45), 1)
    r = run(Traffic(plan, concurrency=1, requests=90, finite=True))
    hits = [q.cached_tokens for q in r.requests]
    assert hits[:9] == [0] * 9 and hits[9:45] == [96] * 36 and hits[45:] == [432] * 45
    off = run(Traffic(plan, concurrency=1, requests=90, finite=True), SchedulerConfig(prefix_caching=False))
    assert off.hit_share == 0


RUN = """
run: w
title: w
model: {config: qwen2.5-7b, weights: dummy}
hardware: {gpu: H200}
engines: {vllm: {kind: vllm}}
workloads:
  chat: {prompt_tokens: "800:1000", output_tokens: "100:300"}
  assistants: {prompt_tokens: 447, output_tokens: 248, shared_prefix: {tokens: 100, groups: 9}, unique_prompts: 45}
sweeps:
  steps: {kind: concurrency, workload: chat, concurrency: [8]}
  rates: {kind: arrival_rate, workload: assistants, rates_per_s: [8], requests: 100}
  over: {kind: arrival_rate, workload: chat, rates_per_s: [500]}
  short: {kind: arrival_rate, workload: chat, rates_per_s: [500], requests: 300}
  bursts: {kind: burst, workload: chat, requests: [50]}
"""


def test_predictions_are_distributions_with_intervals():
    p = params.read_text(RUN)
    shape, gpu = read_shape(p.model, None), catalog.resolve(p.hardware)
    found = {x["sweep"]: x for x in predict_run(p, shape, gpu, n_samples=4)["points"]}
    for name in ("steps", "rates", "short", "bursts"):
        x = found[name]
        for latency in ("ttft_s", "tpot_s", "e2e_s"):
            values = [x["percentiles"][latency][q] for q in ("p50", "p90", "p99")]
            assert all(v["low"] < v["value"] < v["high"] for v in values), (name, latency)
            assert values[0]["value"] < values[1]["value"] < values[2]["value"] or name == "rates"
    assert found["rates"]["hit_share"] > 0.5 and "hit_share" not in found["steps"]
    # overload is a result where it has an end, and has no figures where it has none
    assert not found["over"]["fits"] and "a finite run (requests: N) has figures" in found["over"]["note"]
    assert found["short"]["fits"] and "overloaded" in found["short"]["note"]
    series = found["bursts"]["series"]
    slices = (series["t_s"][-1] - series["t_s"][0]) / (len(series["t_s"]) - 1)  # t_s is rounded to 0.1 ms
    assert sum(series["completions_per_s"]) * slices == pytest.approx(50, rel=1e-3)
    assert max(series["running"]) <= 50 and series["running"][-1] < max(series["running"])


def test_any_load_without_a_run():
    shape, gpu = read_shape(params.ModelParams(config="qwen2.5-7b", weights="dummy"), None), catalog.catalog()["H200"]
    engine = params.VllmEngine(kind="vllm")
    workload = Workload(prompt_tokens="900:1100", output_tokens=50)
    closed = predict_load(shape, gpu, engine, workload, concurrency=8, requests=40, samples=0)
    burst = predict_load(shape, gpu, engine, workload, kind="burst", requests=40, samples=0)
    assert burst["metrics"]["ttft_s"]["value"] > closed["metrics"]["ttft_s"]["value"]
    assert closed["metrics"]["tpot_s"]["value"] > 0.003


def test_groups_of_a_data_parallel_server_share_a_finite_run_out():
    shape, gpu = read_shape(params.ModelParams(config="qwen2.5-7b", weights="dummy"), None), catalog.catalog()["H200"]
    workload = Workload(prompt_tokens="900:1100", output_tokens=50)
    one, two = (
        predict_load(
            shape,
            gpu,
            params.VllmEngine(kind="vllm", data_parallel_size=n),
            workload,
            kind="burst",
            requests=64,
            samples=0,
        )["metrics"]
        for n in (1, 2)
    )
    assert two["ttft_s"]["value"] < 0.7 * one["ttft_s"]["value"]
    assert two["request_rate_per_s"]["value"] > 1.3 * one["request_rate_per_s"]["value"]


def test_a_spec_tells_a_closed_loop_from_the_others():
    assert PointSpec("s", "e", "p", "concurrency", 1, 1, concurrency=3).clients == 3
    capped = PointSpec("s", "e", "p", "arrival_rate", 1, 1, concurrency=3, rate_per_s=2.0)
    assert capped.clients is None and not capped.closed
    assert np.array_equal(
        request_plan.due_times(PointSpec("s", "e", "p", "burst", 1, 1), params.Load(), 3), np.zeros(3)
    )
