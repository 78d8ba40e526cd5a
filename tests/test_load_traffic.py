"""The client sends the workloads that the predictor simulates: the same lengths, shared parts, turns and arrivals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_server import Behaviour, MockServer, serving
from servebook.common.measured_point import MeasuredPoint
from servebook.config import request_plan
from servebook.config.params import Load, Slo
from servebook.config.points import PointSpec
from servebook.config.workloads import Workload
from servebook.load import measure_point_sync
from servebook.run_folder import results

FAST = Behaviour(ttft_s=0.01, itl_s=0.0005, token_ids=True)
LOAD = Load(jitter_s=0.0, seed=5, max_seconds=20, request_timeout_s=10, min_seconds=0.0)


def spec(workload: Workload, kind: str, **load: Any) -> PointSpec:
    tokens = workload.mean_tokens()
    return PointSpec("s", "mock", "p", kind, *tokens, workload=workload, workload_name="w", **load)


def measure(server: MockServer, s: PointSpec, run_dir: Path | None = None, load: Load = LOAD) -> MeasuredPoint:
    return measure_point_sync(
        s, url=server.url, model="mock", vocab=range(100, 1000), run_dir=run_dir, load=load, slo=Slo(), batching=True
    )


def sent(server: MockServer) -> list[tuple[int, ...]]:
    """Prompts without the probes'."""
    return [r.prompt for r in server.records if len(r.prompt) > 6]


def test_the_lengths_are_those_of_the_plan(tmp_path: Path) -> None:
    s = spec(
        Workload(prompt_tokens="20:90", output_tokens="normal:8,3,2,16"), "concurrency", concurrency=3, requests=15
    )
    with serving(FAST) as server:
        p = measure(server, s, tmp_path)
        prompts = sent(server)
    plan = request_plan.of_point(s, LOAD)
    assert plan is not None
    assert sorted(map(len, prompts)) == sorted(plan[i].prompt_tokens for i in range(15))
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "p"))
    assert {r["i"]: (r["prompt_tokens"], r["output_tokens"]) for r in rows} == {
        i: (plan[i].prompt_tokens, plan[i].output_tokens) for i in range(15)
    }
    # finite: measured from the first's start to the last's end, nothing left over
    assert (p.requests, p.failures, p.finite_requests, p.workload) == (15, 0, 15, "w")
    assert {r["phase"] for r in rows} == {"measured"} and "all 15 requests done" in p.stop_reason
    # the window opens as the first request is handed over, a moment before it is sent
    assert p.seconds >= max(r["end_s"] for r in rows) - min(r["sent_s"] for r in rows) - 1e-5
    in_flight_s = sum(r["end_s"] - r["sent_s"] for r in rows)
    assert p.in_flight_mean * p.seconds == pytest.approx(in_flight_s, rel=1e-3) and p.tpot_p90_s and p.e2e_p90_s
    assert not any("client-limited: it held" in r.text or "round" in r.text for r in p.reasons)


def test_a_burst_leaves_at_once() -> None:
    s = spec(Workload(prompt_tokens="20:90", output_tokens=8), "burst", requests=40)
    with serving(Behaviour(ttft_s=1.5, itl_s=0.0005)) as server:
        p = measure(server, s)
        assert server.truth()["max_live"] == 40
    assert p.requests == 40 and p.ttft_mean_s >= 1.49 and not p.saturated


def test_prompts_share_what_the_plan_says() -> None:
    w = Workload(prompt_tokens=60, output_tokens=4, shared_prefix={"tokens": 20, "groups": 2}, unique_prompts=4)
    with serving(FAST) as server:
        p = measure(server, spec(w, "concurrency", concurrency=1, requests=8))
        prompts = sent(server)
    assert prompts[:4] == prompts[4:] and len(set(prompts)) == 4
    assert prompts[0][:20] == prompts[2][:20] != prompts[1][:20] and prompts[0][20:] != prompts[2][20:]
    assert not any("unasked" in r.text for r in p.reasons)


def test_a_cap_holds_requests_back_at_the_client(tmp_path: Path) -> None:
    w = Workload(prompt_tokens="20:90", output_tokens=8)
    s = spec(w, "arrival_rate", rate_per_s=200.0, arrivals="constant", concurrency=2, requests=12)
    with serving(Behaviour(ttft_s=0.05, itl_s=0.0005)) as server:
        p = measure(server, s, tmp_path)
        assert server.truth()["max_live"] == 2
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "p"))
    assert (p.concurrency, p.in_flight_cap, p.requests) == (None, 2, 12)
    assert p.ttft_p99_s > 0.2  # the wait for a free place is part of it
    # but not in flight
    assert p.in_flight_mean * p.seconds == pytest.approx(sum(r["end_s"] - r["sent_s"] for r in rows), rel=1e-3)
    assert p.in_flight_mean <= 2.01
    assert not any("after they were due" in r.text for r in p.reasons)


def test_a_trace_is_replayed_with_its_conversations(tmp_path: Path) -> None:
    rows = [(0.0, 30, 8, "a", None), (0.02, 40, 4, None, "sys"), (0.05, 80, 4, "a", None), (0.3, 50, 4, None, "sys")]
    keys = ("arrival_s", "prompt_tokens", "output_tokens", "session", "prefix")
    lines = [dict(zip(keys, r, strict=True)) | ({"prefix_tokens": 16} if r[4] else {}) for r in rows]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    w = Workload(trace="t.jsonl").at(tmp_path)
    s = spec(w, "trace", requests=4, speed=0.5)
    with serving(Behaviour(ttft_s=0.15, itl_s=0.0005, token_ids=True)) as server:
        p = measure(server, s, tmp_path)
        prompts = sent(server)
    found = {r["i"]: r for r in results.read_rows(results.rows_path(tmp_path, "s", "mock", "p"))}
    assert p.requests == 4 and p.failures == 0 and p.speed == 0.5
    begun = found[0]["scheduled_s"]
    assert found[1]["scheduled_s"] - begun == pytest.approx(0.04, abs=1e-3)
    assert found[3]["scheduled_s"] - begun == pytest.approx(0.6, abs=1e-3)
    assert (
        found[2]["scheduled_s"] >= found[0]["end_s"] and found[2]["turn"] == 1
    )  # due at 0.1 s, but its answer was not there
    by_length = {len(x): x for x in prompts}
    assert by_length[80][:30] == by_length[30] and by_length[40][:16] == by_length[50][:16]


def test_what_is_in_flight_when_time_is_up_is_waited_for() -> None:
    s = PointSpec("s", "mock", "r", "arrival_rate", 32, 200, rate_per_s=30.0)
    with serving(Behaviour(ttft_s=0.05, itl_s=0.004)) as server:  # requests of 0.85 s
        p = measure(
            server, s, load=LOAD.model_copy(update={"max_seconds": 3.0, "warmup_requests": 5, "min_requests": 300})
        )
        last = max(server.truth()["arrived_s"])
    assert p.failures == 0 and p.unfinished == 0 and "time limit reached" in p.stop_reason
    assert p.verdict != "invalid" and p.little_error is not None
    assert p.seconds < 3.0 and last > 0  # the window ended with the arrivals


def test_a_closed_loop_with_stalls_keeps_littles_law() -> None:
    from servebook.load.summary import _Latencies

    x = np.where(np.arange(160) % 20 == 7, 0.62, 0.12)
    times = _Latencies(4)
    times._e2e.add(x)
    edge = times.edge(4)
    assert edge is not None and 0.03 < edge + 0.02 < 0.08
    even = _Latencies(4)
    even._e2e.add(np.full(160, 0.12))
    assert even.edge(4) == pytest.approx(2 * np.sqrt(8 * (1 / 3 - 1 / 4)) / 160)
