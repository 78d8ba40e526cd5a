"""Mechanisms of step time and host that measurements of others and an H200 showed: each by hand-worked figures."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path

import pytest
from servebook.config.params import ModelParams, VllmEngine
from servebook.hardware import catalog as hardware
from servebook.model import reader as model
from servebook.predictor.api_server import GATHER_S, GATHERED, MERGED, SWITCH_S, ApiLoop, Outputs
from servebook.predictor.attention import FP8_KV_ELEMENTS_PER_S, HOPPER_KV_SHARE, kv_bytes_per_s
from servebook.predictor.parallel import Layout
from servebook.predictor.priors import vllm_priors
from servebook.predictor.scheduler import Request
from servebook.predictor.server_limits import server
from servebook.predictor.simulated_clients import TOKENIZE_S, Prompt, SimulatedClients, Traffic
from servebook.predictor.steptime import VllmTimes

CARDS = hardware.catalog()
H200 = CARDS["H200"]


def shape(quantization=None, kv="auto", config="llama-3.1-8b"):
    params = ModelParams(config=config, weights="dummy", quantization=quantization, kv_cache_dtype=kv)
    return model.read_shape(params, Path("."))


def times(s, gpu=H200, **more):
    constants = {n: p.value for n, p in vllm_priors(s, gpu).items()}
    return VllmTimes(s, gpu, constants, **more)


@pytest.mark.parametrize(
    ("version", "asynchronous"),
    [(None, True), ("0.26.0", True), ("0.14.0", True), ("0.13.1", False), ("0.8.5+", False), ("1.2", True)],
)
def test_vllm_schedules_ahead_from_0_14_on(version, asynchronous):
    s = server("v", VllmEngine(kind="vllm", max_model_len=4096), shape(), H200, {"version": version})
    assert s.config.async_scheduling is asynchronous
    assert s.times({n: p.value for n, p in vllm_priors(s.shape, H200).items()}).asynchronous is asynchronous


def test_what_the_host_takes_is_a_floor_of_steps_ahead_and_is_added_to_steps_one_after_the_other():
    s = shape()
    ahead, after = times(s), times(s, asynchronous=False)
    assert after.decode(64, 64_000)[0] == pytest.approx(ahead.decode(64, 64_000)[0])  # the GPU's time is the same
    exposed = 0.7 * ahead.prepare_s + ahead.engine_sequence_s
    assert after.per_token(128, 128) - ahead.per_token(128, 128) == pytest.approx(exposed, rel=0.01)
    small = times(shape(config="qwen2.5-0.5b"))  # so little work that the host's share of 512 requests decides
    assert small.decode(512, 0) == (small.prepare(512), 0.0)


def test_an_fp8_cache_is_read_at_a_rate_of_elements_on_hopper():
    plain, fp8 = times(shape()), times(shape(kv="fp8"))
    assert fp8.kv_token_s == pytest.approx(65_536 / FP8_KV_ELEMENTS_PER_S)
    assert 0.5 < fp8.kv_token_s / plain.kv_token_s < 1.0
    learned = kv_bytes_per_s(shape(kv="fp8"), H200, 0.8 * HOPPER_KV_SHARE)  # calibration moves this limit, too
    assert learned == pytest.approx(0.8 * FP8_KV_ELEMENTS_PER_S)
    slow = CARDS["A100-80GB-SXM"]
    assert times(shape(kv="fp8"), slow).kv_token_s == pytest.approx(times(shape(), slow).kv_token_s / 2)


def test_a_partly_filled_tile_of_an_eight_bit_gemm_takes_longer_than_a_full_one():
    fp8, bf16 = times(shape("fp8")).weights, times(shape()).weights
    assert [bf16.rows(n) for n in (17, 129, 257)] == [17, 129, 257]
    assert fp8.rows(1) == 1 and fp8.rows(16) == 16
    assert fp8.rows(17) == fp8.rows(24) > fp8.rows(64) > 64  # CUDA graphs pad 17 sequences to 24
    assert fp8.rows(72) > fp8.rows(128) > 128 and fp8.rows(136) > fp8.rows(256) > 256
    assert fp8.rows(257) > fp8.rows(300) > fp8.rows(512) == fp8.rows(480) == 512
    assert fp8.rows(1025) - fp8.rows(1024) > 1.7 * (fp8.rows(1280) - fp8.rows(1024))
    # aiconfigurator's tables (vLLM 0.24, H200): with 65 rows the layers take 1.36 times as long as with 16, with 128
    # 1.19 times, kernels' starts (0.8 ms) included
    start = 0.0008
    short, longer = (fp8.step_s(n, 0) + start for n in (16, 72))
    assert 1.15 < longer / short < 1.36 and fp8.step_s(128, 0) < fp8.step_s(72, 0)


def test_large_decode_batches_run_into_the_power_cap():
    s = shape()
    capped, free = times(s), times(s)
    free.decode_loss = 0.0
    ratio = {c: sum(capped.decode(c, 320 * c)) / sum(free.decode(c, 320 * c)) for c in (1, 512)}
    assert ratio[1] == 1.0 and 1 + 0.8 * capped.decode_loss < ratio[512] <= 1 + capped.decode_loss


def test_all_reduces_take_one_shot_two_or_the_ring_by_size():
    eight = Layout(8)
    small, middle = eight.all_reduce_s(H200, 256 << 10), eight.all_reduce_s(H200, 1 << 20)
    rate = 0.62 * 450e9
    assert small == pytest.approx(4.5e-6 + 7 * (256 << 10) / rate)
    assert middle == pytest.approx(7.5e-6 + 1.75 * (1 << 20) / rate)
    assert eight.all_reduce_s(H200, 64 << 20) == pytest.approx(10e-6 + 1.75 * (64 << 20) / (1.25 * rate))


class Core:
    """An API server's core: 0.1 ms an event, 1 ms a request."""

    event_s = 1e-4
    gathers_prompts = False

    def frontend(self, prompt_tokens):
        return 0.001

    frontend_busy = frontend

    def first_event(self, prompt_tokens):
        return 0.0

    later_busy = first_event


def api_loop(times, arrivals=(1e6,), text=False):
    return ApiLoop(times, SimulatedClients(Traffic([Prompt(16, 4)], arrivals_s=arrivals, text=text)))


def lateness(tokens, every, steps, series=False):
    """How late each step's first tokens are sent."""
    loop = api_loop(Core())
    firsts = [Request(k, 16, 4) for k in range(steps)]
    if series:
        loop.put(Outputs(0.0, tokens, every=every, steps=steps - 1))
    for k in range(steps - 1 if series else 0, steps):
        loop.put(Outputs(every * k, tokens, [firsts[k]]))
    loop.run(100.0, idle=False)
    return [r.first_s - every * k for k, r in enumerate(firsts) if r.first_s >= 0]


def test_a_saturated_api_server_merges_small_steps_and_falls_behind_large_ones():
    # 100 tokens take 10 ms, 200 tokens 20 ms, and a step comes every 5 ms
    turn = 0.010 * (1 - MERGED) / (1 - MERGED * 0.010 / 0.005)  # with what merged tokens take
    assert max(lateness(100, 0.005, 50)) < 2 * turn + 0.001
    late = lateness(200, 0.005, 50)
    assert late[-1] == pytest.approx(49 * 0.015 + 0.020)  # each step adds what it takes longer than a step
    assert lateness(200, 0.005, 50, series=True)[-1] == pytest.approx(late[-1])
    assert lateness(200, 0.030, 50)[-1] == pytest.approx(0.020)


def test_the_loop_yields_between_chunks_of_a_step():
    loop = api_loop(Core(), arrivals=[0.001])
    loop.put(Outputs(0.0, 300))
    loop.run(1.0, idle=False)
    ((ready, _, _),) = loop.ready
    # turns of 128, 128 and 44 events, the first of which has begun when the request comes; then it is alone
    assert ready == pytest.approx(0.030 + 0.001)


class Gathering(Core):
    """As vLLM 0.10 to 0.23: prompts are tokenized in batches."""

    gathers_prompts = True


def tokenized(times, arrivals):
    """When each text reaches the engine."""
    loop = api_loop(times, arrivals=arrivals, text=True)
    loop.run(10.0, idle=False)
    return [ready for ready, _, _ in sorted(loop.ready)]


def test_prompts_that_come_while_a_batch_is_tokenized_are_the_next_batch():
    alone = tokenized(Core(), [0.0])[0]
    assert tokenized(Gathering(), [0.0])[0] == pytest.approx(alone + GATHER_S)  # a batch waits for more prompts
    one_by_one, together = tokenized(Core(), [0.0] * 40), tokenized(Gathering(), [0.0] * 40)
    seconds = 16 * TOKENIZE_S
    batches = 1 + sum(b - a > 2 * seconds for a, b in pairwise(together))
    assert batches < sum(b - a > SWITCH_S for a, b in pairwise(one_by_one))  # each waits for the interpreter lock
    assert together[-1] < one_by_one[-1]


def test_a_batch_of_prompts_has_a_largest_size():
    loop = api_loop(Gathering(), text=True)
    ends = [loop._tokenized(0.0, 0.0, True) for _ in range(2 + 2 * GATHERED)]
    batches = [len(list(same)) for _, same in groupby(ends)]
    assert batches == [1, GATHERED, GATHERED, 1]


@pytest.mark.parametrize(("version", "gathers"), [("0.9.2", 0), ("0.10.1", 1), ("0.23.0", 1), ("0.24.0", 0), (None, 0)])
def test_versions_that_tokenize_in_batches(version, gathers):
    found = server("v", VllmEngine(kind="vllm", max_model_len=4096), shape(), H200, {"version": version})
    assert (
        found.gathers_prompts
        == gathers
        == found.times({n: p.value for n, p in vllm_priors(shape(), H200).items()}).gathers_prompts
    )


def test_experts_are_launched_one_by_one_only_beyond_the_graphs():
    params = ModelParams(config="qwen3-30b-a3b", weights="dummy")
    experts = times(model.read_shape(params, Path(".")))
    beyond, within = experts.launch(513), experts.launch(512)
    dense = 48 * experts.constants["layer_launch_s"]
    assert beyond == pytest.approx(dense + 48 * experts.constants["expert_launch_s"])
    assert within == pytest.approx(dense * experts.constants["piecewise_share"])
    # the graphs hold the experts' five kernels a layer: sixteen are launched without graphs, eleven layers' worth with
    assert within == pytest.approx(0.37 * dense * 11 / 16)


def test_new_connections_are_accepted_one_in_a_turn():
    # 100 tokens every 5 ms keep the loop busy; our own client's connections are open, another tool's are not
    ready = {}
    for text in (False, True):
        loop = api_loop(Core(), text=text)
        loop.due[:] = [(0.0, k, Request(k, 16, 4)) for k in range(10)]
        for k in range(200):
            loop.put(Outputs(0.005 * k, 100))
        loop.run(1.0, idle=False)
        ready[text] = sorted(at for at, _, _ in loop.ready)
    assert ready[False][9] - ready[False][0] < 0.002
    assert ready[True][9] - ready[True][0] > 9 * 0.010


def test_the_tokenizer_waits_for_the_interpreter_lock_while_the_loop_is_full():
    # the loop keeps the lock for 5 ms each of the two times that a prompt's tokenizing needs it, one prompt at a time
    ready = {}
    for steps in (0, 400):
        loop = api_loop(Core(), text=True)
        loop.connections = 10  # open before
        loop.due[:] = [(0.0, k, Request(k, 16, 4)) for k in range(10)]
        for k in range(steps):
            loop.put(Outputs(0.005 * k, 100))
        loop.run(2.0, idle=False)
        ready[steps] = sorted(at for at, _, _ in loop.ready)
    assert ready[400][9] - ready[400][0] == pytest.approx(9 * (2 * SWITCH_S + 16 * loop.tokenize_s))
    assert ready[0][9] - ready[0][0] < 9 * 2 * SWITCH_S  # nothing to send: the last prompts find the lock free


def test_few_tokens_do_not_overtake_the_backlog_of_many():
    """However a run ends, its tokens are sent in order."""
    loop, last = api_loop(Core()), Request(0, 16, 4)
    for step in range(4):
        loop.put(Outputs(0.001 * step, 400))
    loop.put(Outputs(0.005, 10, [last]))
    loop.run(1.0, idle=False)
    assert last.first_s == pytest.approx(0.160 + 0.001)


def test_a_board_with_few_watts_sustains_less_of_its_peak():
    names = "L4", "L40S", "RTX-4090", "H100-PCIe", "H100-SXM"
    shares = {n: vllm_priors(shape(), CARDS[n])["matmul_share"].value for n in names}
    assert shares["L4"] == pytest.approx(0.71 * 72 / 121) and shares["L40S"] == pytest.approx(
        0.71 * 350 / 362, rel=1e-3
    )
    assert shares["RTX-4090"] == 0.70 and shares["H100-PCIe"] < shares["H100-SXM"]
