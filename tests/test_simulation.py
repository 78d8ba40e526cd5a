"""The simulated clients and engine loop: hand-worked cases, and the closed form against single steps."""

from __future__ import annotations

import itertools
import random

import pytest
from servebook.config.arrivals import schedule
from servebook.predictor.api_server import CHUNK, PASSES
from servebook.predictor.scheduler import SchedulerConfig
from servebook.predictor.simulated_clients import Prompt, Traffic
from servebook.predictor.simulation import simulate, simulate_naive


def arrivals(kind, rate_per_s, count, seed, gamma_shape=1.0):
    return list(itertools.islice(schedule(kind, rate_per_s, seed, gamma_shape=gamma_shape), count))


class Times:
    """Fixed step times: 10 ms a decode step plus 1 µs a context token, 100 ms a step that prefills."""

    event_s = prepare_s = engine_sequence_s = 0.0
    gathers_prompts = False

    def first_event(self, prompt_tokens):
        return 0.0

    def later_busy(self, prompt_tokens):
        return 0.0

    def decode(self, decodes, kv_tokens):
        return 0.010, 1e-6

    def mixed(self, step):
        return 0.100 + 1e-6 * step.kv_tokens, 1.0

    def decode_draw(self, decodes, kv_tokens, seconds):
        return 0.7

    def slowdown(self, drawn):
        return 1.0

    def launch(self, tokens, idle):
        return 0.0

    def frontend(self, prompt_tokens):
        return 0.002

    def frontend_busy(self, prompt_tokens):
        return 0.0005


class Fixed:
    def frontend(self, prompt_tokens):
        return 0.0

    def prefill(self, prompt_tokens):
        return 1.0

    def decode_total(self, prompt_tokens, output_tokens):
        return 2.0


def test_one_client_is_the_sum_of_its_steps():
    # 5,000 prompt tokens in chunks of 2048: 3 steps; then 9 decode steps over contexts of 5,001 … 5,009 tokens
    r = simulate(SchedulerConfig(), Times(), Traffic([Prompt(5000, 10)], concurrency=1, requests=3))
    assert r.mean("ttft_s") == pytest.approx(0.002 + 0.3)
    assert r.mean("tpot_s") == pytest.approx(0.010 + 5005e-6)


def test_a_request_that_arrives_mid_step_waits_for_the_queued_batch_too():
    # B arrives while A's first decode runs: with one batch queued ahead it starts two steps later
    load = Traffic([Prompt(16, 50)], arrivals_s=[0.0, 0.105])
    waits = {}
    for asynchronous in (True, False):
        r = simulate(SchedulerConfig(async_scheduling=asynchronous), Times(), load)
        b = next(x for x in r.requests if x.id == 1)
        waits[asynchronous] = b.scheduled_s - b.ready_s
    assert waits[False] < 0.0101
    assert waits[True] == pytest.approx(waits[False] + 0.010, abs=1e-4)


def test_requests_that_come_together_reach_the_engine_together():
    # 2 ms each, of which 0.5 ms of the API server's core; the second and third come while it is busy with the first,
    # and take turns
    load = Traffic([Prompt(16, 5)], arrivals_s=[0.0, 0.0001, 0.0002])
    ready = [r.ready_s for r in sorted(simulate(SchedulerConfig(), Times(), load).requests, key=lambda r: r.id)]
    assert ready[0] == pytest.approx(0.002) and ready[2] == pytest.approx(0.003)
    assert ready[2] - ready[1] == pytest.approx(0.0005 / PASSES)


class Launching(Times):
    """The GPU takes 10 ms a decode step, 1 ms one that prefills; launching that takes the host 30 ms."""

    def decode(self, decodes, kv_tokens):
        return 0.010, 0.0

    def mixed(self, step):
        return 0.001, 1.0

    def launch(self, tokens, idle):
        return 0.030


def test_a_launch_is_hidden_only_by_the_step_before():
    # nothing runs before a lone prompt: all of its launch shows
    r = simulate(SchedulerConfig(), Launching(), Traffic([Prompt(16, 11)], concurrency=1, requests=5, warmup=2))
    assert r.mean("ttft_s") == pytest.approx(0.002 + 0.030)
    # another's decode step (10 ms) runs while the prompt's step is launched: the two take 30 ms, not 10 + 30
    load = Traffic([Prompt(16, 400)], arrivals_s=[0.0, 1.0], requests=2)
    a, b = simulate(SchedulerConfig(), Launching(), load).requests
    alone = simulate(SchedulerConfig(), Launching(), Traffic([Prompt(16, 400)], arrivals_s=[0.0])).requests[0]
    assert a.end_s - alone.end_s == pytest.approx(0.030 - 2 * 0.010, abs=1e-4) and b.first_s >= 1.032


def test_preparing_a_step_shows_only_where_the_gpu_waits_for_it():
    # 4 ms to prepare a step: hidden behind 10 ms decode steps, but not before a first one, and not after a long launch
    times = Launching()
    times.prepare_s = 0.004
    r = simulate(SchedulerConfig(), times, Traffic([Prompt(16, 11)], concurrency=1, requests=5, warmup=2))
    # the first decode step is prepared (4 ms) before the first token, which the launch (30 ms) held back, is fetched
    assert r.mean("ttft_s") == pytest.approx(0.002 + 0.004 + 0.030 + 0.004)
    assert r.mean("tpot_s") == pytest.approx(0.010, abs=1e-9)
    serial = SchedulerConfig(async_scheduling=False)
    r = simulate(serial, times, Traffic([Prompt(16, 11)], concurrency=1, requests=5, warmup=2))
    assert r.mean("tpot_s") == pytest.approx(0.014)


def test_a_saturated_api_server_delays_new_requests():
    # 64 sequences' tokens every 10 ms: at 0.1 ms an event the loop idles, at 0.2 ms (12.8 ms a step, some of which it
    # merges) it never does, and a request makes two passes for each of them
    waits = []
    for event_s in (0.0, 1e-4, 2e-4):
        times = Launching()
        times.event_s = event_s
        load = Traffic([Prompt(16, 400)], arrivals_s=[0.0] * 64 + [2.0031, 2.5047], requests=66)
        r = simulate(SchedulerConfig(), times, load)
        late = [q for q in r.requests if q.id >= 64]
        waits.append(sum(q.ready_s - q.sent_s for q in late) / 2)
    assert waits[0] == pytest.approx(0.002)
    assert 0.002 < waits[1] < 0.002 + 0.0064 + 1e-9
    assert 0.002 + 6.5 * 0.0128 < waits[2] < 0.002 + 7.5 * 0.0142


class Full(Launching):
    """2 ms a step; 0.05 ms of the API server's core a token."""

    event_s = 5e-5

    def decode(self, decodes, kv_tokens):
        return 0.002, 0.0


@pytest.mark.parametrize("sequences", [64, 200])
def test_what_requests_take_of_the_core_tokens_lack(sequences):
    """However they share it, the API server has one core: requests of 3 ms lengthen a run by what they take."""

    class Busy(Full):
        def frontend(self, prompt_tokens):
            return 0.003

        def frontend_busy(self, prompt_tokens):
            return 0.003 if prompt_tokens == 17 else 0.0

    ends = []
    for extra in (16, 17):
        prompts = [Prompt(16, 300)] * sequences + [Prompt(extra, 2)] * 40
        load = Traffic(prompts, arrivals_s=[0.0] * sequences + [0.1 + 0.004 * k for k in range(40)], finite=True,
                       requests=sequences + 40)  # fmt: skip
        r = simulate(SchedulerConfig(max_num_seqs=512), Busy(), load)
        ends.append(max(q.end_s for q in r.requests if q.output_tokens == 300))
        if sequences > CHUNK:  # nothing is merged: no token takes less than an event
            assert ends[-1] > 300 * sequences * 5e-5
    assert ends[1] - ends[0] == pytest.approx(0.120 if sequences > CHUNK else 0.0, abs=0.02)


def test_long_skips_hand_the_same_tokens_to_a_server_that_falls_behind():
    load = Traffic([Prompt(16, 2000)], arrivals_s=[0.0] * 200 + [1.0, 2.5, 2.9], finite=True, requests=203)
    fast, slow = (simulate(SchedulerConfig(max_num_seqs=512), Full(), load, skip=skip) for skip in (True, False))
    for a, b in zip(fast.requests, slow.requests, strict=True):
        assert (a.first_s, a.end_s) == pytest.approx((b.first_s, b.end_s), rel=0.01)


class Hot(Times):
    """Prefills draw 1.1 of the power cap, decodes 0.7; above 1.0 on average a prefill takes twice as long."""

    def mixed(self, step):
        return 0.100, 1.1

    def slowdown(self, drawn):
        return 2.0 if drawn > 1.0 else 1.0


def test_only_prefills_that_never_rest_are_slowed_by_the_power_cap():
    # 0.3 s of prefill, then 2 s of decode: the average over half a second never passes 1.0
    rested = simulate(SchedulerConfig(), Hot(), Traffic([Prompt(6000, 200)], concurrency=1, requests=5))
    assert rested.mean("ttft_s") == pytest.approx(0.302)
    # 3 s of prefill: 0.25 + 0.85 · (1 − exp(−t / 0.5 s)) passes it after 1.07 s: 11 steps, then 19 slow ones
    long = simulate(SchedulerConfig(), Hot(), Traffic([Prompt(2048 * 30, 2)], arrivals_s=[0.0]))
    assert long.requests[0].first_s == pytest.approx(0.002 + 0.1 * (11 + 2 * 19))


def test_an_open_loop_below_saturation_puts_out_what_is_offered():
    # decode at 10 ms a step whatever the batch, prefill 0.1 s: 4 requests/s of 20 tokens is far from saturated
    outs, rates = [], []
    for seed in range(4):
        times = arrivals("poisson", 4.0, 2000, seed)
        load = Traffic([Prompt(16, 20)], arrivals_s=times, warmup=3, requests=300, seed=seed)
        r = simulate(SchedulerConfig(), Times(), load)
        assert r.complete and len(r.requests) >= 300
        assert all(r.window[0] <= q.sent_s <= r.window[1] for q in r.requests)  # measured by arrival
        outs.append(r.output_tokens / r.seconds)
        rates.append(len(r.requests) / r.seconds)
        # tokens come out as requests go in, whatever the window
        assert outs[-1] == pytest.approx(20 * rates[-1], rel=0.02)
    assert sum(outs) / 4 == pytest.approx(80, rel=0.05)


def test_an_overloaded_open_loop_puts_out_less():
    times = arrivals("poisson", 40.0, 4000, 1)
    load = Traffic([Prompt(16, 20)], arrivals_s=times, warmup=3, requests=200)
    r = simulate(SchedulerConfig(max_num_seqs=4), Times(), load)
    assert r.output_tokens / r.seconds < 0.5 * 40 * 20


def test_running_gauge_starts_when_a_first_step_ends():
    r = simulate(SchedulerConfig(), Times(), Traffic([Prompt(16, 11)], concurrency=1, requests=50, warmup=2))
    decode = 10 * 0.010
    assert r.running_mean == pytest.approx(decode / (decode + 0.102), rel=0.01)


def test_a_closed_loop_counts_the_tokens_of_answers_that_the_window_cuts():
    # four clients that start together, each answer twice as long as the one before: the first round ends in the middle
    # of the long answers, whose tokens of the window belong to it
    prompts = [Prompt(16, n) for n in (100, 200, 400, 800)]
    r = simulate(SchedulerConfig(), Times(), Traffic(prompts, concurrency=4, requests=2, warmup=1))
    by = {q.id: q for q in r.requests}
    assert sorted(by) == [1, 4]  # the second client's answer, and the first client's next one
    assert sum(q.output_tokens for q in r.requests) == 300
    assert 400 < r.output_tokens < 4 * r.seconds / 0.010  # at most four tokens in each step of 10 ms


@pytest.mark.parametrize("seed", range(30))
def test_skipping_pure_decode_changes_nothing(seed):
    rng = random.Random(seed)
    prompts = [Prompt(rng.randint(1, 3000), rng.randint(1, 300), rng.choice([0, 64])) for _ in range(rng.randint(1, 5))]
    config = SchedulerConfig(
        max_num_batched_tokens=rng.choice([64, 512, 2048]), max_num_seqs=rng.choice([4, 64]),
        kv_blocks=rng.choice([220, 400, 5000]), async_scheduling=rng.random() < 0.5, prefix_caching=rng.random() < 0.5,
    )  # fmt: skip
    if rng.random() < 0.5:
        load = Traffic(prompts, concurrency=rng.randint(1, 12), jitter_s=0.2, requests=40, warmup=5, seed=seed)
    else:
        load = Traffic(prompts, arrivals_s=arrivals("poisson", 1.0, 40, seed), warmup=4)
    times = Times()
    times.event_s = rng.choice([0.0, 1e-4, 5e-4])
    times.prepare_s = rng.choice([0.0, 0.004])  # no longer than a step: VllmTimes sees to that
    fast, slow = simulate(config, times, load), simulate(config, times, load, skip=False)
    assert [r.id for r in fast.requests] == [r.id for r in slow.requests]
    for a, b in zip(fast.requests, slow.requests, strict=True):
        assert (a.first_s, a.end_s) == pytest.approx((b.first_s, b.end_s), abs=1e-7)
    assert fast.running_mean == pytest.approx(slow.running_mean, abs=1e-6)
    assert fast.preemptions == slow.preemptions
    assert fast.output_tokens == pytest.approx(slow.output_tokens)
    again = simulate(config, times, load)
    assert [(r.first_s, r.end_s) for r in again.requests] == [(r.first_s, r.end_s) for r in fast.requests]


def test_kv_pool_bounds_what_runs():
    # 40 blocks hold two requests of 320 tokens; the rest wait though eight are in flight
    config = SchedulerConfig(kv_blocks=40)
    r = simulate(config, Times(), Traffic([Prompt(300, 20)], concurrency=8, requests=60, warmup=8))
    assert 1.0 < r.running_mean <= 2.0
    with pytest.raises(ValueError):
        simulate(SchedulerConfig(kv_blocks=10), Times(), Traffic([Prompt(300, 20)], concurrency=1))


def test_naive_closed_loop_is_the_fifo_rotation():
    # post 2: every request waits for the C - 1 others: (C - 1)·T + prefill
    r = simulate_naive(Fixed(), Traffic([Prompt(100, 10)], concurrency=8, requests=40, warmup=8))
    assert r.mean("ttft_s") == pytest.approx(7 * 3.0 + 1.0)
    assert len(r.requests) / r.seconds == pytest.approx(1 / 3.0)


def test_naive_open_loop_is_an_m_d_1_queue():
    # Pollaczek-Khinchine: mean wait = ρ·T / (2·(1 − ρ)) = 0.6·3 / 0.8
    load = Traffic([Prompt(100, 10)], arrivals_s=arrivals("poisson", 0.2, 60_000, 3), warmup=1000, requests=50_000)
    assert simulate_naive(Fixed(), load).mean("queue_s") == pytest.approx(2.25, rel=0.05)


@pytest.mark.parametrize("kind", ["poisson", "constant", "gamma"])
def test_arrivals_keep_their_rate(kind):
    times = arrivals(kind, 4.0, 20_000, 1, gamma_shape=4.0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    cv2 = sum((g - mean) ** 2 for g in gaps) / len(gaps) / mean**2
    assert mean == pytest.approx(0.25, rel=0.02)
    assert cv2 == pytest.approx({"poisson": 1.0, "constant": 0.0, "gamma": 0.25}[kind], abs=0.05)


def test_the_time_limit_cuts_a_point_off():
    r = simulate(SchedulerConfig(), Times(), Traffic([Prompt(16, 11)], concurrency=1, requests=1000, max_seconds=5.0))
    assert not r.complete and 20 < len(r.requests) < 30 and r.wall_s <= 5.0


def test_only_an_engine_that_waited_launches_as_idle():
    """Without asynchronous scheduling no step is queued when the next is launched: the engine ran all the same."""
    seen = []

    class Noted(Times):
        def launch(self, tokens, idle):
            seen.append(idle)
            return 0.0

    for asynchronous in (True, False):
        seen.clear()
        load = Traffic([Prompt(64, 4)], arrivals_s=[0.0, 0.01, 9.0], requests=3, finite=True)
        simulate(SchedulerConfig(async_scheduling=asynchronous), Noted(), load)
        assert seen == [True, False, True]
