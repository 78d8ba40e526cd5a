"""The closed and the open loop against a server that knows the truth, and the rows that they leave."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_server import Behaviour, MockServer, serving
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config.arrivals import schedule
from servebook.config.params import Load, Slo
from servebook.load import PointSpec, measure_point, measure_point_sync, measure_ramp_sync, summary
from servebook.load.client import Client, Reply, now
from servebook.load.point import rule_of
from servebook.load.prompts import Bodies, Prompts
from servebook.load.summary import running_of, waiting_of
from servebook.load.window import PointProgress, Rule
from servebook.run_folder import results

TOKENS = 16


def closed(c: int) -> PointSpec:
    return PointSpec("s", "mock", f"c{c:04d}", "concurrency", 32, TOKENS, concurrency=c)


def measure(
    server: MockServer, spec: PointSpec, rule: Rule, run_dir: Path | None = None, **more: Any
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"load": Load(jitter_s=0.002), "slo": Slo(), "batching": True} | more
    return measure_point_sync(
        spec, url=server.url, model="mock", vocab=range(100, 1000), run_dir=run_dir, rule=rule, **arguments
    )


def test_a_closed_loop_holds_c_and_its_rows_are_the_contract(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.02, itl_s=0.005)) as server:
        p = measure(server, closed(4), Rule(4, 12, 12, 0, 20), tmp_path)
        truth = server.truth()
    assert truth["max_live"] == 4
    assert p.requests == 12 and p.failures == 0
    # how near the figures come to the server's truth is measured by benchmarks/bench_client.py; here, what must hold
    # however busy the machine is: a client sees no answer before the server has sent it
    assert 0 < p.in_flight_mean <= 4 + 1e-9
    assert p.ttft_p50_s >= min(truth["ttft_s"]) and p.e2e_mean_s >= 0.02 + (TOKENS - 1) * 0.005
    assert results.read_points(tmp_path) == [], "whoever asked for the point writes it, once it is complete"
    assert MeasuredPoint.from_json(json.loads(json.dumps(p.to_json()))) == p
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "c0004"))
    assert [r["phase"] for r in rows] == ["warmup"] * 4 + ["measured"] * 12 + ["drain"] * (len(rows) - 16)
    assert all(tuple(r) == results.ROW_KEYS for r in rows)
    for r in rows[:16]:
        assert r["ok"] and r["ttft_s"] == pytest.approx(r["first_s"] - r["sent_s"], abs=2e-6)
        assert r["tpot_s"] == pytest.approx((r["last_s"] - r["first_s"]) / (TOKENS - 1), abs=2e-6)
        assert r["prompt_tokens"] == 32 and r["output_tokens"] == TOKENS
        assert sum(r["gaps_ms"]) == pytest.approx(1e3 * (r["last_s"] - r["first_s"]), abs=0.2)


def test_clients_are_refilled_one_by_one_without_a_drain_after_the_warm_up() -> None:
    with serving(Behaviour(ttft_s=0.02, itl_s=0.002)) as server:
        measure(server, closed(3), Rule(3, 12, 12, 0, 20))
        truth = server.truth()
    arrived = truth["arrived_s"][1:]  # the first is the probe
    # request k + 3 is sent after the k-th end: three are in flight, never more
    ends = sorted(truth["ended_s"][1:])
    assert all(ends[k] - 0.001 < sent for k, sent in enumerate(arrived[3:])) and truth["max_live"] == 3


def test_pauses_follow_from_the_run_and_the_point_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point that is measured again has the same pauses: no attempt and no folder may change them."""
    from servebook.load import point

    seeds: list[str] = []
    loop = point.ClosedLoop
    monkeypatch.setattr(point, "ClosedLoop", lambda *a, **more: (seeds.append(more["seed"]), loop(*a, **more))[1])
    with serving(Behaviour(ttft_s=0.0, itl_s=0.0)) as server:
        for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
            measure(server, closed(2), Rule(2, 4, 4, 0, 20), folder)
            measure(server, closed(3), Rule(3, 4, 4, 0, 20), folder)
    assert len(set(seeds)) == 2 and seeds[::2] == seeds[:1] * 3


def test_prompts_never_repeat_between_points_and_runs(tmp_path: Path) -> None:
    with serving() as server:
        for run in ("a", "b"):
            for spec in (closed(1), closed(2)):
                measure(server, spec, Rule(2, 4, 4, 0, 20), tmp_path / run)
        measure(server, closed(2), Rule(2, 4, 4, 0, 20), tmp_path / "a")  # measured again
        prompts = [r.prompt for r in server.records if len(r.prompt) == 32]
    assert len(prompts) >= 30 and len(set(prompts)) == len(prompts)


def test_a_prompt_set_repeats_on_purpose_and_shared_prefixes_are_shared() -> None:
    with serving() as server:
        for _ in range(2):
            measure(server, closed(1), Rule(0, 4, 4, 0, 20), prompt_set="warm", shared_prefix_tokens=8)
        prompts = [r.prompt for r in server.records if len(r.prompt) == 32]
    assert len(set(prompts)) <= 5 < len(prompts)
    assert len({p[:8] for p in prompts}) == 1


def test_a_naive_engines_decode_rate_is_one_over_tpot_and_queueing_is_in_ttft() -> None:
    with serving(Behaviour(ttft_s=0.01, itl_s=0.002, one_at_a_time=True)) as server:
        p = measure(server, closed(3), Rule(3, 9, 9, 0, 20), batching=False)
        truth = server.truth()
    assert p.decode_tok_per_s == pytest.approx(1 / p.tpot_mean_s)
    # the server's TTFT counts from the arrival, so it holds the queue; no client sees less
    assert p.ttft_mean_s >= np.mean(sorted(truth["ttft_s"])[:9])


@pytest.mark.parametrize("rate_per_s", [None, 20.0])
def test_a_server_that_says_nothing_and_takes_one_request_at_a_time_decodes_one(rate_per_s: float | None) -> None:
    spec = closed(3) if rate_per_s is None else dataclasses.replace(closed(1), concurrency=None, rate_per_s=rate_per_s)
    with serving(Behaviour(ttft_s=0.01, itl_s=0.002, one_at_a_time=True, metrics=False)) as server:
        p = measure(server, spec, Rule(3, 12, 12, 0, 20))
    assert p.decode_wall_tok_per_s <= p.decode_tok_per_s <= 2 / p.tpot_mean_s, "three in flight, one decodes"


def test_what_a_batching_engine_works_on_is_what_is_in_flight_less_what_the_server_says_waits() -> None:
    assert running_of(64.0, 40.0, 60.0, 5.0) == 59.0
    assert running_of(64.0, 40.0, None, 5.0) == 59.0
    assert running_of(0.98, 1.0, 0.0, 0.0) == 0.98  # hardly scraped
    assert running_of(7.8, 6.2, 5.0, 0.1) == pytest.approx(7.7)  # three looks, and a fifth of it prefills
    assert running_of(3000.0, 1.0, 1.0, 350.0) == 1.0  # most had not been accepted
    assert running_of(1.95, 1.0, 1.0, 0.33) == 1.0  # scraped at the wrong moments
    assert running_of(4.0, 3.8, None, None) == 3.8 and running_of(2.0, 1.0, None, None) == 1.0
    assert running_of(16.0, 2.0, 4.0, None) == 4.0
    assert waiting_of(0.05, 32.0, 9.0) == pytest.approx(1.6) and waiting_of(None, 32.0, 9.0) == 9.0


def test_the_decode_rate_is_capped_by_the_most_that_a_gauge_showed_not_by_its_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[float, ...]] = []
    monkeypatch.setattr(summary, "running_of", lambda *a: given.append(a) or running_of(*a))
    with serving(Behaviour(itl_s=0.01, gauge_every=2)) as server:  # as if looked at between the clients' rounds
        p = measure(server, closed(4), Rule(4, 24, 24, 0, 20), load=Load(scrape_interval_s=0.05))
    assert given[-1][2] == 4 > 1.5 * p.server_running_mean


def test_tokens_are_counted_where_they_fall_not_where_requests_end(tmp_path: Path) -> None:
    # one request a client: warm-up ends at the first completion, the window holds the rest of the other streams
    with serving(Behaviour(ttft_s=0.05, itl_s=0.01)) as server:
        p = measure(server, closed(4), Rule(1, 8, 8, 0, 20), tmp_path, load=Load(jitter_s=0))
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "c0004"))
    # the window opens as the warm-up's request ends, and closes as the eighth after it does
    begin, end = (sorted(r["last_s"] for r in rows if r["phase"] == phase)[-1] for phase in ("warmup", "measured"))
    fell = [r["first_s"] + 1e-3 * sum(r["gaps_ms"][:k]) for r in rows for k in range(len(r["gaps_ms"]) + 1)]
    # after a stall of the machine many tokens come at once: those near the window's edges may fall on either side
    near = 0.03
    least = sum(begin + near < t <= end - near for t in fell)
    most = sum(begin - near < t <= end + near for t in fell)
    assert least - 4 <= p.output_tok_per_s * p.seconds <= most + 4


def test_server_metrics_become_figures_and_a_series(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.02, itl_s=0.005)) as server:
        p = measure(server, closed(2), Rule(2, 12, 12, 0, 20), tmp_path, load=Load(scrape_interval_s=0.05))
    assert 1 <= p.server_running_mean <= 2
    assert p.server_waiting_mean == 0 and p.cache_hit_share == 0 and p.preemptions == 0
    assert p.server_prefill_mean_s == pytest.approx(0.02)
    assert p.server_output_tokens == pytest.approx(p.client_output_tokens, abs=4 + p.scrape_edge_tokens)
    series = results.series_path(tmp_path, "s", "mock", "c0002").read_text().splitlines()
    assert series[0].startswith("t_s,running,waiting,kv_cache_usage,prompt_tokens")
    assert "waiting_capacity" in series[0] and len(series) > 5


class FakeNvml:
    """NVML of a card under load at its own power limit; slow-downs are put in."""

    NVML_CLOCK_SM = 1
    reasons = 0x4

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": 1, "nvmlDeviceGetPowerUsage": 690_000, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000, "nvmlDeviceGetClockInfo": 1600,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
        }  # fmt: skip
        if name in ("nvmlInit", "nvmlDeviceGetHandleByIndex"):
            return lambda *_: "handle"
        if name not in answers:
            raise AttributeError(name)  # a figure that this card does not report
        return lambda *_: answers[name]


@pytest.mark.parametrize(("reasons", "slowed"), [(0x4, 0), (0x4 | 0x40, 1), (0x80, 1), (0x1, 0)])
def test_gpu_figures_are_filled_where_there_is_nvml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reasons: int, slowed: int
) -> None:
    nvml = FakeNvml()
    nvml.reasons = reasons
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with serving(Behaviour(ttft_s=0.02, itl_s=0.005)) as server:
        p = measure(server, closed(2), Rule(2, 6, 6, 0, 20), tmp_path, load=Load(scrape_interval_s=0.05))
    assert (p.gpu_power_mean_w, p.gpu_clock_mean_mhz, p.gpu_power_limit_w) == (690, 1600, 700)
    assert (p.gpu_power_capped_share, p.gpu_throttled_share) == (bool(reasons & 0x4), slowed)
    assert any("heat" in r for r in map(str, p.reasons)) == bool(slowed) and not any(
        "capped" in r for r in map(str, p.reasons)
    )
    assert p.gpu_utilization_mean is None
    series = results.series_frame(tmp_path, "s", "mock", "c0002")
    assert set(series["gpu_power_w"]) == {690} and set(series["gpu_throttled"]) == {slowed}


def test_a_server_without_metrics_leaves_them_unknown() -> None:
    with serving(Behaviour(metrics=False)) as server:
        p = measure(server, closed(1), Rule(1, 3, 3, 0, 20))
    assert p.server_running_mean is None and p.cache_hit_share is None and p.requests == 3


def test_a_row_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: results.RowWriter, row: Any) -> None:
        raise ServebookError("cannot write: No space left on device", str(self.path))

    monkeypatch.setattr(results.RowWriter, "write", full)
    with serving() as server, pytest.raises(ServebookError, match="No space left"):
        measure(server, closed(2), Rule(2, 4, 4, 0, 20), tmp_path)
    assert results.read_points(tmp_path) == []


def test_it_works_inside_a_running_event_loop() -> None:
    async def cell(server: MockServer) -> tuple[dict[str, Any], dict[str, Any]]:
        shared = {"url": server.url, "model": "mock", "vocab": range(100, 1000), "load": Load(), "slo": Slo()}
        rule = Rule(1, 2, 2, 0, 20)
        a = measure_point_sync(closed(1), run_dir=None, batching=True, rule=rule, **shared)
        return a, await measure_point(closed(1), run_dir=None, batching=True, rule=rule, **shared)

    with serving() as server:
        assert [p.requests for p in asyncio.run(cell(server))] == [2, 2]


def test_the_rule_grows_with_c_and_calibration_counts_exactly() -> None:
    load = Load(min_requests=20, max_requests=400, warmup_requests=10)
    assert rule_of(closed(4), load) == Rule(10, 20, 400, 10, 120)
    big = rule_of(closed(300), load)
    assert (big.warmup, big.min_requests, big.max_requests) == (300, 600, 1200)
    rounds = load.model_copy(update={"max_rounds": 5})  # of a closed loop, whose latencies repeat with its rounds
    assert [rule_of(closed(c), rounds).max_requests for c in (1, 4, 300)] == [5, 20, 1200]
    assert [rule_of(closed(c), rounds).min_requests for c in (1, 4, 300)] == [5, 20, 600]
    assert [rule_of(closed(c), rounds).most for c in (4, 300)] == ["max_rounds (5)", "max_requests (1200)"]
    assert rule_of(arriving(3.0), rounds) == rule_of(arriving(3.0), load)
    fixed = PointSpec("calibration", "e", "p", "calibration", 32, 16, concurrency=1, fixed_requests=5)
    assert rule_of(fixed, load, 30) == Rule(3, 5, 5, 0.0, 30, exactly=5)
    with serving() as server:
        p = measure(server, fixed, rule_of(fixed, load))
    assert p.requests == 5 and p.stop_reason == "all 5 requests done"


# --- open loop ---------------------------------------------------------------------------------------------------


def arriving(rate: float, arrivals: str = "poisson") -> PointSpec:
    return PointSpec("s", "mock", f"r{rate:.3f}", "arrival_rate", 32, TOKENS, rate_per_s=rate, arrivals=arrivals)


def test_an_open_loop_counts_latency_from_the_scheduled_time_and_publishes_its_lag(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.01, itl_s=0.001)) as server:
        p = measure(server, arriving(100, "constant"), Rule(5, 60, 60, 0, 20), tmp_path)
    assert p.schedule_lag_p99_s is not None
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "r100.000"))
    assert all(r["ttft_s"] == pytest.approx(r["first_s"] - r["scheduled_s"], abs=2e-6) for r in rows if r["ok"])


def test_a_request_leaves_before_the_next_ones_body_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    make, stream = Bodies.__call__, Client.stream
    order: list[tuple[str, int]] = []

    def made(self: Bodies, index: int, *of: Any) -> bytes:
        order.append(("made", index))
        return make(self, index, *of)

    async def sent(self: Client, body: bytes, reply: Reply) -> None:
        order.append(("sent", reply.index))
        await stream(self, body, reply)

    monkeypatch.setattr(Bodies, "__call__", made)
    monkeypatch.setattr(Client, "stream", sent)
    with serving(Behaviour(ttft_s=0.005, itl_s=0)) as server:
        measure(server, arriving(30, "constant"), Rule(1, 15, 15, 0, 20))
    start = max(k for k, event in enumerate(order) if event == ("sent", 0))  # an earlier one is the probe
    later = [k for k in range(start, len(order)) if order[k][0] == "made"]  # bodies that were not due at the start
    assert later and all(("sent", order[k][1] - 1) in order[start:k] for k in later)


def test_a_server_that_cannot_keep_up_is_saturated_and_its_slow_requests_are_not_left_out() -> None:
    # one at a time, 40 ms each, against 50 arrivals a second: the wait grows by 15 ms with every arrival
    with serving(Behaviour(ttft_s=0.01, itl_s=0.002, one_at_a_time=True)) as server:
        p = measure(server, arriving(50, "constant"), Rule(3, 20, 20, 0, 6))
    assert p.saturated and p.verdict != "valid"
    # 20 requests were served in the window while 40 arrived: every one that arrived is accounted for
    assert p.requests + p.failures > 30 and p.e2e_p99_s > 1


def test_a_window_whose_last_requests_are_long_awaited_does_not_charge_the_wait_to_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "thread_time", time.monotonic)  # a client that is always busy
    with serving(Behaviour(ttft_s=0.01, itl_s=0.004, one_at_a_time=True)) as server:
        p = measure(server, arriving(60), Rule(3, 12, 12, 0, 20), load=Load(scrape_interval_s=0.2))
        truth = server.truth()
    # 60 arrivals a second against 14 served: the window is followed by a wait of more than its length
    assert truth["ended_s"][-1] - truth["arrived_s"][0] > 2 * p.seconds
    assert p.client_cpu_s == pytest.approx(p.seconds, rel=0.5)
    assert any("of a core" in r for r in map(str, p.reasons)) and p.verdict == "suspect"


def test_a_client_whose_event_loop_stands_still_makes_the_point_suspect() -> None:
    with serving(Behaviour(ttft_s=0.02, itl_s=0.005)) as server:
        p = measure(server, closed(4), Rule(4, 40, 40, 0, 60), on_progress=lambda _: time.sleep(0.3))
    assert p.client_loop_lag_p99_s > 0.1 and p.verdict == "suspect"
    assert any(r.startswith("client-limited: its event loop lagged") for r in map(str, p.reasons))


def test_a_client_that_wakes_late_does_not_charge_it_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from servebook.load import client

    read = client.read_tapped

    async def late(*of: Any) -> None:
        await read(*of)
        await asyncio.sleep(0.2)  # the stream has ended, its reader does not know yet

    monkeypatch.setattr(client, "read_tapped", late)
    with serving(Behaviour(ttft_s=0.01, itl_s=0.001)) as server:  # 25 ms a request, 200 ms of the client
        p = measure(server, closed(4), Rule(4, 16, 16, 0, 60))
    assert p.in_flight_mean < 3.2 and p.client_gap_mean_s > 0.15
    assert any("requests in flight, not 4" in r for r in map(str, p.reasons))


def test_replayed_arrivals_are_due_when_they_were_and_never_sent_before(tmp_path: Path) -> None:
    times = [0.0, 0.05, 0.3, 0.31]
    with serving() as server:
        p = measure(server, arriving(1), Rule(0, 4, 4, 0, 20), tmp_path, replay_s=times)
    assert p.requests == 4
    rows = sorted(results.read_rows(results.rows_path(tmp_path, "s", "mock", p.point_id)), key=lambda r: r["i"])
    assert np.diff([r["scheduled_s"] for r in rows]) == pytest.approx(np.diff(times), abs=1e-5)
    assert all(r["sent_s"] >= r["scheduled_s"] - 1e-5 for r in rows)


@pytest.mark.parametrize(
    ("arrivals", "shape", "variation"), [("constant", 1, 0), ("poisson", 1, 1), ("gamma", 4, 0.5), ("gamma", 0.25, 2)]
)
def test_schedules_have_their_rate_and_coefficient_of_variation(arrivals: str, shape: float, variation: float) -> None:
    due = list(itertools.islice(schedule(arrivals, 5.0, 1, gamma_shape=shape), 20000))
    gaps = np.diff(due)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.01 + 0.05 * variation)
    assert due == list(itertools.islice(schedule(arrivals, 5.0, 1, gamma_shape=shape), 20000))
    if arrivals != "constant":
        assert due != list(itertools.islice(schedule(arrivals, 5.0, 2, gamma_shape=shape), 20000))


# --- ramps and conversations --------------------------------------------------------------------------------------


def ramp(server: MockServer, specs: list[PointSpec], rules: list[Rule], run_dir: Path | None) -> list[dict[str, Any]]:
    return measure_ramp_sync(
        specs, rules=rules, url=server.url, model="mock", vocab=range(100, 1000), run_dir=run_dir,
        load=Load(jitter_s=0.002), slo=Slo(), batching=True,
    )  # fmt: skip


def test_a_ramp_adds_clients_without_a_pause_and_measures_every_stage(tmp_path: Path) -> None:
    specs = [closed(c) for c in (1, 3, 6)]
    with serving(Behaviour(ttft_s=0.02, itl_s=0.004)) as server:
        points = ramp(server, specs, [Rule(c, 4 * c, 4 * c, 0, 20) for c in (1, 3, 6)], tmp_path)
        truth = server.truth()
        prompts = [r.prompt for r in server.records]
    assert [p.point_id for p in points] == ["c0001", "c0003", "c0006"] and truth["max_live"] == 6
    for p, c in zip(points, (1, 3, 6), strict=True):
        assert (p.requests, p.failures) == (4 * c, 0)
        assert 0 < p.in_flight_mean <= c + 1e-9
    assert len(set(prompts)) == len(prompts)
    # no drain in between: a client's requests follow one another over all stages
    rows = [results.read_rows(results.rows_path(tmp_path, "s", "mock", s.point)) for s in specs]
    assert rows[1][0]["phase"] == rows[2][0]["phase"] == "warmup"
    assert sorted(r["i"] for stage in rows for r in stage) == list(range(sum(map(len, rows))))  # each request once


def test_an_open_loops_rate_may_grow_too() -> None:
    with serving(Behaviour(ttft_s=0.005, itl_s=0.001)) as server:
        specs = [arriving(rate, "constant") for rate in (50, 150)]
        slow, fast = ramp(server, specs, [Rule(3, 25, 25, 0, 20), Rule(10, 75, 75, 0, 20)], None)
    assert slow.requests >= 25 and fast.requests >= 75 and slow.failures == fast.failures == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_conversations_prompt_is_its_history_and_new_tokens(told: bool, tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.002, itl_s=0.0005, token_ids=told)) as server:
        p = measure(server, closed(2), Rule(0, 12, 12, 0, 20), tmp_path, turns=3)
        prompts = [r.prompt for r in server.records if r.whole and len(r.prompt) >= 32]
    by_length = {n: [p for p in prompts if len(p) == n] for n in (32, 32 + TOKENS + 32, 2 * (32 + TOKENS) + 32)}
    assert sum(map(len, by_length.values())) == len(prompts)
    first, second, third = by_length.values()
    for later, earlier in ((second, first), (third, second)):
        for prompt in later:
            assert any(prompt[: len(e)] == e for e in earlier)
            answer = prompt[-32 - TOKENS : -32]
            assert (set(answer) == {7}) == told  # the server's own ids, or stand-ins for them
    assert p.prompt_tokens_off == 0 and p.verdict != "invalid"
    assert [t["prompt_tokens_mean"] for t in p.turns] == [32, 80, 128]
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "c0002"))
    assert {r["turn"]: r["prompt_tokens_asked"] for r in rows} == {0: 32, 1: 80, 2: 128}


def test_a_chats_history_is_sent_as_messages() -> None:
    with serving(Behaviour(ttft_s=0.002, itl_s=0.0005)) as server:
        bodies: list[dict[str, Any]] = []
        server.on_request = bodies.append
        measure(server, closed(1), Rule(0, 4, 4, 0, 20), turns=2, endpoint="/v1/chat/completions")
    talks = [b["messages"] for b in bodies[1:5]]
    assert [[m["role"] for m in t] for t in talks[:2]] == [["user"], ["user", "assistant", "user"]]
    assert talks[1][0] == talks[0][0] and talks[1][1]["content"] == " tok" * TOKENS
    assert len(talks[2]) == 1 and talks[2] != talks[0]


# --- prompts -----------------------------------------------------------------------------------------------------


def test_a_body_is_json_with_exactly_the_prompts_ids() -> None:
    vocab = (5, 77, 31000, 151000)
    prompts = Prompts(vocab, 50, "a", 1)
    body = json.loads(Bodies(prompts, {"model": 'm"'})(7))
    assert body == {"prompt": prompts.ids(7), "model": 'm"', "max_tokens": 1}
    assert len(body["prompt"]) == 50 and set(body["prompt"]) == set(vocab)


def test_prompts_depend_on_every_label_and_the_index_and_on_nothing_else() -> None:
    vocab = range(10, 5000)
    a = Prompts(vocab, 20, 1, "s", "c0001")
    assert a.ids(3) == Prompts(vocab, 20, 1, "s", "c0001").ids(3)
    others = [Prompts(vocab, 20, 1, "s", "c0002").ids(3), Prompts(vocab, 20, 2, "s", "c0001").ids(3), a.ids(4)]
    assert all(a.ids(3) != other for other in others)
    assert min(min(a.ids(i)) for i in range(200)) >= 10


def test_lengths_from_a_range_are_what_each_request_asks_for(tmp_path: Path) -> None:
    with serving() as server:
        p = measure(
            server, closed(2), Rule(2, 20, 20, 0, 20), tmp_path, prompt_lengths=(10, 40), output_lengths=(2, 12)
        )  # fmt: skip
        sent = {len(r.prompt) for r in server.records[1:]}
    assert p.prompt_tokens_off == 0 and p.output_tokens_off == 0
    assert min(sent) >= 10 and max(sent) <= 40 and len(sent) > 5
    rows = results.read_rows(results.rows_path(tmp_path, "s", "mock", "c0002"))
    asked = {r["output_tokens_asked"] for r in rows}
    assert min(asked) >= 2 and max(asked) <= 12 and len(asked) > 3


def test_text_prompts_and_chat_messages() -> None:
    prompts = Prompts(range(100, 5000), 20, 1, text=True)
    body = json.loads(Bodies(prompts, {"model": "m"}, chat=True)(0))
    words = body["messages"][0]["content"].split()
    assert len(words) == 20 and all(w.isalpha() for w in words) and body["max_tokens"] == 1
    assert len({prompts.inside(i) for i in range(50)}) == 50


def test_a_chat_endpoint_is_measured_alike() -> None:
    with serving() as server:
        p = measure(server, closed(2), Rule(2, 6, 6, 0, 20), endpoint="/v1/chat/completions")
    assert (p.requests, p.tokens_per_event, p.prompt_tokens_off) == (6, 1, 0)


def test_many_long_prompts_of_a_large_vocabulary_come_from_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Size:  # of the vocabulary, and nothing else of it
        def __len__(self) -> int:
            return 150_000

    bodies = Bodies(Prompts(range(1000, 151000), 20000, 1), {"model": "m"})
    # once the table stands, no body encodes JSON or looks at the vocabulary (a hundred times slower)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("a body is encoded as JSON"))
    monkeypatch.setattr(bodies.prompts, "vocab", Size())
    assert sum(len(bodies(i)) for i in range(5)) > 5 * 20000 * 4


@pytest.mark.parametrize(
    ("open_loop", "elapsed_s", "opens"), [(True, 2000.0, True), (True, 500.0, False), (False, 2000.0, False)]
)
def test_a_slow_servers_warm_up_does_not_use_up_an_open_loops_time(
    open_loop: bool, elapsed_s: float, opens: bool
) -> None:
    start = now() - elapsed_s
    t = PointProgress(Rule(4, 1, 9, 0.0, 3000.0), start, None if open_loop else 4, lambda _: None, open_loop)
    reply = Reply(0, 8, 2, scheduled=start, sent=start, end=start + 0.4)
    reply.stream.times, reply.stream.counts, reply.stream.tokens = [start + 0.3, start + 0.4], [1, 1], 2
    t.done(reply)
    assert reply.phase == "warmup" and (t.window_start is not None) is opens
    t.out_of_time("max_seconds")
    warm = ", after a warm-up of only 1 of 4 requests" if opens else " in warm-up"
    assert t.stop_reason == "max_seconds reached" + warm
