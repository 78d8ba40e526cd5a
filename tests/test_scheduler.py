"""The scheduler's rules, hand-worked (tests/test_scheduler_vllm.py holds it against vLLM's own class)."""

from __future__ import annotations

from servebook.predictor.scheduler import WAITING, Request, Scheduler, SchedulerConfig


def scheduler(**config):
    return Scheduler(SchedulerConfig(**({"async_scheduling": False} | config)), trace=True)


def run(s, steps=10_000):
    """Step until nothing is left; returns each step's tokens by request."""
    trace = []
    while s.has_work and len(trace) < steps:
        step = s.schedule()
        trace.append(step.tokens)
        s.update(step)
    return trace


def test_two_long_prompts_share_the_budget_as_post_2_works_out():
    s = scheduler(max_num_batched_tokens=2048)
    s.add(Request(0, 8192, 10))
    s.add(Request(1, 8192, 10))
    trace = run(s)
    assert trace[:4] == [{0: 2048}] * 4
    assert trace[4] == {0: 1, 1: 2047}


def test_the_last_chunk_leaves_budget_to_the_next_prompt():
    s = scheduler(max_num_batched_tokens=2048)
    s.add(Request(0, 3000, 2))
    s.add(Request(1, 500, 2))
    assert run(s)[1] == {0: 952, 1: 500}


def test_128_output_tokens_are_127_steps_after_the_prefill():
    s = scheduler()
    s.add(Request(0, 100, 128))
    assert len(run(s)) == 128


def test_seats_bound_what_runs():
    s = scheduler(max_num_seqs=2)
    for i in range(4):
        s.add(Request(i, 10, 5))
    assert max(len(t) for t in run(s)) == 2


def test_admission_reserves_the_whole_prompt():
    # 10 blocks; the second prompt's first chunk would fit, the whole of it does not
    for reserve, both in ((True, False), (False, True)):
        s = scheduler(max_num_batched_tokens=128, kv_blocks=10, reserve_full_prompt=reserve)
        s.add(Request(0, 64, 8))
        s.add(Request(1, 112, 8))
        assert (1 in run(s, 1)[0]) == both


def test_the_newest_is_preempted_and_finishes_after_a_recompute():
    s = scheduler(kv_blocks=8, prefix_caching=False)
    old, new = Request(0, 48, 40), Request(1, 48, 40)
    s.add(old)
    s.add(new)
    trace = run(s)
    assert (old.preemptions, new.preemptions) == (0, 1)
    at = next(i for i, t in enumerate(trace) if 1 not in t)
    resumed = next(t[1] for t in trace[at:] if 1 in t)
    assert resumed == 48 + at  # prompt and every token sampled so far
    assert s.pool.free == 8


def test_a_preempted_request_finds_its_blocks_again_with_prefix_caching():
    s = scheduler(kv_blocks=8, prefix_caching=True)
    s.add(Request(0, 48, 40))
    s.add(Request(1, 48, 40))
    trace = run(s)
    at = next(i for i, t in enumerate(trace) if 1 not in t)
    assert next(t[1] for t in trace[at:] if 1 in t) < 48


def test_hits_are_whole_blocks_and_never_the_last_token():
    for hits, computed in ((0, 100), (50, 52), (100, 4)):
        s = scheduler()
        s.add(Request(0, 100, 1, hit_tokens=hits))
        assert run(s)[0] == {0: computed}
    s = scheduler(prefix_caching=False)
    s.add(Request(0, 100, 1, hit_tokens=100))
    assert run(s)[0] == {0: 100}


def test_asynchronous_scheduling_keeps_seat_and_blocks_until_the_last_step_ran():
    s = Scheduler(SchedulerConfig(max_num_seqs=1))
    s.add(Request(0, 10, 2))
    s.add(Request(1, 10, 2))
    first, second = s.schedule(), s.schedule()
    assert second.finishing[0].id == 0
    assert s.update(first) == []
    assert s.schedule().empty  # request 0 still holds the only seat
    s.update(second)
    assert s.schedule().chunks[0][0].id == 1


def test_long_prefill_threshold_counts_only_in_company():
    alone = scheduler(long_prefill_token_threshold=100)
    alone.add(Request(0, 1000, 1))
    assert run(alone)[0] == {0: 1000}
    s = scheduler(long_prefill_token_threshold=100)
    s.add(Request(0, 1000, 1))
    s.add(Request(1, 1000, 1))
    assert run(s)[0] == {0: 100, 1: 100}


def test_skip_equals_single_steps():
    states = []
    for skip in (True, False):
        s = scheduler(kv_blocks=1000)
        for i in range(3):
            s.add(Request(i, 50 + 7 * i, 100))
        s.update(s.schedule())
        assert s.steady_steps() == 98
        if skip:
            s.skip(40)
        else:
            for _ in range(40):
                s.update(s.schedule())
        states.append((s.pool.free, s.kv_tokens(), s.clock, s.steady_steps()))
    assert states[0] == states[1]


def test_a_request_waiting_for_blocks_is_left_waiting():
    s = scheduler(kv_blocks=8, prefix_caching=False)
    big = Request(1, 80, 2)
    s.add(Request(0, 60, 30))
    s.add(big)
    s.update(s.schedule())
    assert big.state == WAITING and s.steady_steps() > 0
