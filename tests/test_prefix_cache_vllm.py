"""servebook's block pool against vLLM's own, through both schedulers: prompts that share prefixes, prompts that repeat,
prompts that end inside another's, and conversations that grow; in pools large and so small that blocks are evicted and
requests preempted. The same tokens for the same requests in every step mean the same hits."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from engine_core_loop import drive
from servebook.predictor.kv_blocks import PrefixTree
from servebook.predictor.scheduler import Request, Scheduler, SchedulerConfig
from vllm_scheduler import vllm_runner

pytestmark = pytest.mark.engine
WORKLOADS = 300


def workload(seed: int) -> SimpleNamespace:
    """Requests as (id, at, segments, output, conversation): segments as PromptSegments; a conversation's request
    adds its segments to all that was there before, and arrives when the one before it has ended."""
    rng = random.Random(1000 + seed)
    seats = rng.choice([1, 2, 4, 8, 16])
    budget = max(seats, rng.choice([32, 64, 128, 256, 512]))
    groups, uniques = rng.choice([1, 2, 5]), rng.choice([2, 4, 1000])
    prefix = rng.choice([0, 10, 40, 100, 160])
    requests, at, longest = [], 0, 1
    for i in range(rng.randint(5, 40)):
        at += rng.choice([0, 0, 1, 2, 5, 20])
        own = rng.choice([1, 5, 30, 90, 200])
        segments = [(("group", rng.randrange(groups)), prefix)] if prefix else []
        if rng.random() < 0.5:
            segments.append((("unique", rng.randrange(uniques)), rng.choice([own, 64, 128])))
        if rng.random() < 0.5:
            segments.append((("own", i), own))
        turns = rng.choice([1, 1, 1, 2, 4])
        output = rng.choice([1, 2, 3, rng.randint(1, 60)])
        follow = [(rng.randint(1, 60), rng.choice([1, 2, 40])) for _ in range(turns - 1)]
        segments = segments or [(("own", i), own)]
        requests.append((i, at, segments, output, follow))
        whole = sum(n for _, n in segments) + output + sum(p + o for p, o in follow)
        longest = max(longest, whole)
    need = -(-longest // 16)
    blocks = need + rng.choice([0, 2, need // 2, need, 4 * need, 4000])
    return SimpleNamespace(
        seats=seats, budget=budget, requests=requests, blocks=blocks, threshold=rng.choice([0, 0, 0, 24]),
        asynchronous=bool(seed % 2), caching=True,
    )  # fmt: skip


def converse(work, schedule, update, add, has_work, depth):
    """The engine core's loop; a conversation's next request is added when its last has ended."""
    talks = {r[0]: list(r[4]) for r in work.requests}

    def arrive(request):
        i, _, segments, output, follow = request
        add(i, segments, output, not follow)

    def ended(i):
        if talks[i]:
            prompt, output = talks[i].pop(0)
            add(i, prompt, output, not talks[i])

    return drive(work.requests, schedule, update, arrive, has_work, depth, ended)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    start = vllm_runner(tmp_path_factory.mktemp("model"))
    streams: dict = {}

    def tokens(segments):
        return [1000 * streams.setdefault(stream, len(streams) + 1) + j for stream, n in segments for j in range(n)]

    def run(work):
        vllm = start(work)
        said: dict[int, list[int]] = {}
        asked: dict[int, int] = {}

        def add(i, segments, output, last):
            if isinstance(segments, int):  # all before it, and a new prompt
                said[i] += [1_000_000 + i] * asked[i] + tokens([(("turn", i, len(said[i])), segments)])
            else:
                said[i] = tokens(segments)
            asked[i] = output
            vllm.add(i, said[i], output)

        trace = converse(work, vllm.schedule, vllm.update, add, vllm.has_work, 2 if work.asynchronous else 1)
        return trace, vllm.preemptions(), vllm.hits

    return run


def ours(work):
    config = SchedulerConfig(
        max_num_batched_tokens=work.budget, max_num_seqs=work.seats, kv_blocks=work.blocks,
        long_prefill_token_threshold=work.threshold, async_scheduling=work.asynchronous, prefix_caching=True,
    )  # fmt: skip
    scheduler, tree = Scheduler(config, trace=True), PrefixTree(16)
    before: dict[int, Request] = {}
    hits = []

    def add(i, segments, output, last):
        if isinstance(segments, int):
            r = Request(i, before[i].prompt_tokens + before[i].output_tokens + segments, output)
            r.slots = before[i].slots
        else:
            shared = [s for s in segments if s[0][0] != "own"]
            r = Request(i, sum(n for _, n in segments), output)
            r.slots = tree.slots(shared)
        r.conversation, r.last_turn = ("talk", i), last
        before[i] = r
        hits.append(r)
        scheduler.add(r)

    def schedule():
        step = scheduler.schedule()
        return step, step.tokens

    def update(step):
        return [r.id for r in scheduler.update(step)]

    trace = converse(work, schedule, update, add, lambda: scheduler.has_work, config.depth)
    assert scheduler.pool.free == work.blocks and not scheduler.decodes and not scheduler.running
    return trace, scheduler.preemptions, [r.cached_tokens for r in hits]


def test_same_hits_and_the_same_steps_as_vllm(theirs):
    preempting = partial = steps = 0
    for seed in range(WORKLOADS):
        work = workload(seed)
        trace, preemptions, hits = theirs(work)
        mine, my_preemptions, my_hits = ours(work)
        for at, (a, b) in enumerate(zip(trace, mine, strict=False)):
            assert a == b, f"workload {seed}, step {at}: vLLM {a}, servebook {b} ({work})"
        assert (len(trace), preemptions) == (len(mine), my_preemptions), f"workload {seed}"
        assert sorted(hits) == sorted(my_hits), f"workload {seed}"
        preempting += preemptions > 0
        partial += sum(hits) > 0 and 0 in hits
        steps += len(trace)
    assert preempting >= 30 and partial >= 100 and steps > 10_000, (preempting, partial, steps)
