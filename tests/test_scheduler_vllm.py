"""servebook's scheduler against vLLM's own `Scheduler` class, driven with a fake executor: the same tokens for the same
requests in every step, through budgets, seats, tiny block pools that preempt, prefix caching, sync and async."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from engine_core_loop import drive
from servebook.predictor.scheduler import Request, Scheduler, SchedulerConfig
from vllm_scheduler import vllm_runner

pytestmark = pytest.mark.engine
WORKLOADS = 400
SHARED = 48  # tokens of a shared prefix


def workload(seed: int) -> SimpleNamespace:
    """A random mix: every fourth has long prompts, every second a pool small enough to preempt."""
    rng = random.Random(seed)
    seats = rng.choice([1, 2, 4, 8, 16, 32])
    budget = max(seats, rng.choice([16, 32, 64, 100, 128, 256, 512, 1024]))
    longest = rng.choice([20, 60, 200, 900] if seed % 4 else [900, 1500])
    n = rng.randint(3, 24)
    prefixes = rng.choice([0, 0, 0, 2])  # shared prefixes, for cross-request hits
    requests, at = [], 0
    for i in range(n):
        at += rng.choice([0, 0, 1, 2, 5, 30])
        prompt = rng.randint(1, longest)
        requests.append((i, at, prompt, rng.choice([1, 2, 3, rng.randint(1, 80)])))
    need = -(-max(p + o for _, _, p, o in requests) // 16)
    blocks = need + rng.randint(0, max(2, need // 2)) if seed % 2 == 0 else 4000
    return SimpleNamespace(
        seats=seats, budget=budget, requests=requests, blocks=blocks, prefixes=prefixes if blocks == 4000 else 0,
        threshold=rng.choice([0, 0, 0, 24, 100]), asynchronous=bool(seed // 2 % 2), caching=rng.random() < 0.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    start = vllm_runner(tmp_path_factory.mktemp("model"))

    def run(work):
        vllm = start(work)

        def add(r):
            i, _, prompt, output = r
            tokens = [1 + (i * 31 + j * 7) % 400 + 100_000 * i for j in range(prompt)]
            if work.prefixes:
                shared = min(prompt, SHARED)
                tokens[:shared] = [500_000 + (i % work.prefixes) * 1000 + j for j in range(shared)]
            vllm.add(i, tokens, output)

        trace = drive(
            work.requests,
            vllm.schedule,
            lambda step: vllm.update(step) and None,
            add,
            vllm.has_work,
            2 if work.asynchronous else 1,
        )
        return trace, vllm.hits, vllm.preemptions()

    return run


def ours(work):
    config = SchedulerConfig(
        max_num_batched_tokens=work.budget, max_num_seqs=work.seats, kv_blocks=work.blocks,
        long_prefill_token_threshold=work.threshold, async_scheduling=work.asynchronous, prefix_caching=work.caching,
    )  # fmt: skip
    scheduler = Scheduler(config, trace=True)

    def add(r):
        request = Request(r[0], r[2], r[3])
        if work.prefixes:
            request.shared = ((r[0] % work.prefixes, min(r[2], SHARED)),)
        scheduler.add(request)

    def schedule():
        step = scheduler.schedule()
        return step, step.tokens

    trace = drive(
        work.requests,
        schedule,
        lambda step: scheduler.update(step) and None,
        add,
        lambda: scheduler.has_work,
        config.depth,
    )
    assert scheduler.pool.free == work.blocks and not scheduler.decodes and not scheduler.running
    return trace, scheduler.preemptions


def test_same_tokens_per_request_per_step_as_vllm(theirs):
    preempting = cached = steps = 0
    for seed in range(WORKLOADS):
        work = workload(seed)
        expected, hits, preemptions = theirs(work)
        mine, my_preemptions = ours(work)
        for at, (a, b) in enumerate(zip(expected, mine, strict=False)):
            assert a == b, f"workload {seed}, step {at}: vLLM {a}, servebook {b} ({work})"
        assert len(expected) == len(mine), f"workload {seed}: {len(expected)} steps, ours {len(mine)}"
        assert preemptions == my_preemptions, f"workload {seed}"
        preempting += preemptions > 0
        cached += any(hits)
        steps += len(expected)
    assert preempting >= 40 and cached >= 10 and steps > 10_000, (preempting, cached, steps)
