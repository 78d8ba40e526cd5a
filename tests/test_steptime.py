"""Step times: hand-worked figures, parts that sum, bounds and backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from servebook.config.params import ModelParams, VllmEngine
from servebook.hardware import catalog as hardware
from servebook.model import reader as model
from servebook.predictor import server_limits
from servebook.predictor.awq_kernel import awq_kernel
from servebook.predictor.priors import naive_priors, vllm_priors
from servebook.predictor.scheduler import Request, Step
from servebook.predictor.steptime import NaiveTimes, VllmTimes

CATALOG = hardware.catalog()
A40 = CATALOG["A40"]


@pytest.fixture(scope="module")
def qwen():
    return model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))


def constants(**over):
    base = {
        "bandwidth_share": 1.0, "matmul_share": 1.0, "overlap_loss": 0.0, "attention_share": 1.0, "mixed_rows": 1.0,
        "host_s": 0.0, "host_per_sequence_s": 0.0, "frontend_request_s": 0.0, "frontend_token_s": 0.0,
        "layer_launch_s": 0.0, "piecewise_share": 0.5, "prepare_s": 0.0, "kv_recopy": 3.0,
    }  # fmt: skip
    return base | over


def step(decodes, kv, *chunks):
    return Step(0, decodes, kv, [(Request(i, 1, 1), n, before, last) for i, (n, before, last) in enumerate(chunks)])


def test_at_datasheet_rates_decode_is_weights_and_kv_over_bandwidth(qwen):
    # posts: 14.14 GB of weights, 57,344 bytes of KV a token, 696 GB/s
    a, b = VllmTimes(qwen, A40, constants()).decode(8, 0)
    assert a == pytest.approx(14.14e9 / 696e9, rel=2e-3)
    assert b == pytest.approx(57_344 / 696e9)


def test_at_datasheet_rates_a_prefill_step_is_its_flops(qwen):
    # post 2: 6.74e12 FLOPs for 512 prompt tokens, 149.7 TFLOP/s: 45 ms
    seconds = VllmTimes(qwen, A40, constants()).mixed(step(0, 0, (512, 0, True)))[0]
    assert seconds == pytest.approx(6.74e12 / 149.7e12, rel=2e-3)
    # nothing hidden: weights are added, ~65 ms in post 2
    loss = VllmTimes(qwen, A40, constants(overlap_loss=1.0)).mixed(step(0, 0, (512, 0, True)))[0]
    assert loss == pytest.approx(0.065, rel=0.02)


def test_chunks_of_a_prompt_cost_its_attention_once(qwen):
    times = VllmTimes(qwen, A40, constants())
    whole = times.prefill_attention(0, 8192)
    parts = sum(times.prefill_attention(2048 * i, 2048) for i in range(4))
    assert parts == pytest.approx(whole)


def test_mixed_steps_pay_rows_only_with_flash_attention_2(qwen):
    for backend, gpu, rows in (("FLASH_ATTN_2", A40, 90), ("FLASH_ATTN_3", CATALOG["H200"], 1.2)):
        priors = vllm_priors(qwen, gpu, {"attention_backend": backend})
        assert priors["mixed_rows"].value == rows
    times = VllmTimes(qwen, A40, constants(mixed_rows=90, attention_share=0.5))
    kv = 31 * 8200
    extra = times.mixed(step(31, kv, (2017, 0, False)))[0] - times.mixed(step(31, 0, (2017, 0, False)))[0]
    assert extra == pytest.approx(90 * qwen.attention_flops_per_context_token * kv / (0.5 * 149.7e12))
    _, pure_b = times.decode(31, kv)
    assert extra > 3 * pure_b * kv  # what the same KV costs in a pure decode step


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_priors_lie_inside_their_bounds_on_every_card(qwen, name):
    for priors in (vllm_priors(qwen, CATALOG[name]), naive_priors(qwen, CATALOG[name])):
        for prior in priors.values():
            assert prior.low <= prior.value <= prior.high and prior.sd > 0 and prior.why


@pytest.mark.parametrize("chunks", [[], [(2000, 0, False)], [(100, 50, True), (1900, 0, False)]])
def test_parts_sum_to_the_step(qwen, chunks):
    priors = {n: p.value for n, p in vllm_priors(qwen, A40).items()}
    times = VllmTimes(qwen, A40, priors)
    s = step(20, 20 * 4000, *chunks)
    a, b = times.decode(20, s.kv_tokens)
    seconds = times.mixed(s)[0] if chunks else a + b * s.kv_tokens
    assert sum(times.parts(20, s.kv_tokens, chunks).values()) == pytest.approx(seconds)
    naive = NaiveTimes(qwen, A40, {n: p.value for n, p in naive_priors(qwen, A40).items()})
    assert sum(naive.parts(512, 128).values()) == pytest.approx(naive.per_token(512, 128))


def test_a_power_cap_of_decodes_is_a_part_of_its_own(qwen):
    h200 = VllmTimes(qwen, CATALOG["H200"], {n: p.value for n, p in vllm_priors(qwen, CATALOG["H200"]).items()})
    parts, (a, b) = h200.parts(256, 256_000, []), h200.decode(256, 256_000)
    assert parts["power_cap"] > 0 and parts["launch"] == 0
    assert sum(parts.values()) == pytest.approx(a + b * 256_000)


def test_naive_is_launch_bound_on_a_fast_card_only(qwen):
    for name, bound in (("H200", "host"), ("L4", "weights")):
        naive = NaiveTimes(qwen, CATALOG[name], {n: p.value for n, p in naive_priors(qwen, CATALOG[name]).items()})
        parts = naive.parts(512, 128)
        assert max(parts, key=parts.__getitem__) == bound


def test_on_a_cpu_attention_grows_the_naive_servers_tpot_and_launches_hide_nothing():
    # the demo's model on two cores: 3.4 ms a token at 128 tokens of context and 5.0 at 1,024. A profile of the decode
    # step says why: PyTorch's attention kernel (0.2 → 1.0 ms a layer), not the copies of torch.cat (0.02 ms)
    tiny = model.read_shape(ModelParams(config="tiny-qwen2", weights="dummy"), Path("."))
    cpu = hardware.Gpu(
        name="CPU", fp16_tflops=0.17, bf16_tflops=0.33, memory_bandwidth_gb_per_s=23, memory_gib=8, generation="cpu"
    )
    naive = NaiveTimes(tiny, cpu, {n: p.value for n, p in naive_priors(tiny, cpu).items()})
    short, long = naive.parts(128, 1), naive.parts(1024, 1)
    assert naive.per_token(1024, 1) > 1.2 * naive.per_token(128, 1)
    assert long["kv_reads"] - short["kv_reads"] > 3 * (long["kv_recopy"] - short["kv_recopy"])
    assert [short["host"], long["host"]] == pytest.approx([naive.host_s + naive.launch_s] * 2)
    assert naive.launch_bound(128) == (False, False)
    vllm = VllmTimes(tiny, cpu, {n: p.value for n, p in vllm_priors(tiny, cpu).items()}, captured_tokens=0)
    assert vllm.decode(1, 0)[1] == pytest.approx(6 * vllm.pair_s) and vllm.pair_s * 6 > vllm.kv_token_s
    # a GPU reads the KV once, whatever is multiplied
    gpu = VllmTimes(tiny, A40, {n: p.value for n, p in vllm_priors(tiny, A40).items()})
    assert gpu.decode_token_s == gpu.kv_token_s


def test_sliding_window_bounds_what_decodes_read():
    import dataclasses

    shape = model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))
    (every,) = shape.attention
    windowed = dataclasses.replace(
        shape, attention=(dataclasses.replace(every, kind="sliding", window=1000, limit=1000),)
    )
    times, plain = VllmTimes(windowed, A40, constants()), VllmTimes(shape, A40, constants())
    a, b = times.decode(4, 4 * 8000)
    assert a + b * 32000 == pytest.approx(sum(f * k for f, k in zip(plain.decode(4, 0), (1, 4000), strict=True)))


def test_a_step_that_prefills_ends_no_sooner_than_it_is_launched(qwen):
    # an H200 prefills 128 tokens in the time of 512 (14 ms), and 513 in 22: the host launches, not the GPU computes
    h200 = CATALOG["H200"]
    slow = constants(layer_launch_s=0.0008, prepare_s=0.0025)
    times = VllmTimes(qwen, h200, slow, captured_tokens=512)
    assert times.launch(512) == pytest.approx(0.5 * 28 * 0.0008)
    assert times.launch(513) == pytest.approx(28 * 0.0008)
    # nothing ran before: launching takes longer. Prepared, launched, and the first decode step prepared before the
    # token is fetched
    assert times.launch(512, idle=True) > 1.1 * times.launch(512)
    first = pytest.approx(times.launch(512, idle=True) + 0.005)
    assert times.first_token(128, 2048) == times.first_token(512, 2048) == first
    assert times.launch_bound(512, 2048) == (True, False)  # a pure decode step is one graph
    assert times.decode(8, 0)[0] < 0.004
    # 16 chunks of a long prompt keep the GPU busy: all but a little of the first one's launch is hidden
    long = times.first_token(32_768, 2048) - VllmTimes(qwen, h200, constants()).first_token(32_768, 2048)
    assert 0.0025 <= long < 0.0025 + 0.2 * times.launch_s
    assert times.launch_bound(32_768, 2048)[0] is False


def test_power_follows_what_a_step_does(qwen):
    # an H200 drew 485 of 700 W decoding one sequence, 700 to 740 W prefilling a lone prompt
    h200 = CATALOG["H200"]
    times = VllmTimes(qwen, h200, {n: p.value for n, p in vllm_priors(qwen, h200).items()})
    a, b = times.decode(1, 600)
    assert times.decode_draw(1, 600, a + b * 600) == pytest.approx(485 / 700, rel=0.05)
    seconds, draw = times.mixed(step(0, 0, (2048, 2048, False)))
    assert draw == pytest.approx(720 / 700, rel=0.05) and seconds > 0.03
    assert times.slowdown(0.7) == 1.0 and times.slowdown(2.0) == pytest.approx(1 + times.capped_loss)
    assert VllmTimes(qwen, A40, {n: p.value for n, p in vllm_priors(qwen, A40).items()}).slowdown(2.0) == 1.0


def test_a_late_first_event_is_part_of_ttft_and_not_of_tpot(qwen):
    slow, fast = (VllmTimes(qwen, A40, constants(frontend_token_s=t)) for t in (1e-6, 0.0))
    late = slow.first_event(16_384)
    assert slow.frontend(16_384) + late == pytest.approx(16_384e-6) and 0 < late < 16_384e-6
    assert fast.per_token(16_384, 16) - slow.per_token(16_384, 16) == pytest.approx(late / 15)


def test_a_small_model_decodes_no_faster_than_a_step_is_prepared(qwen):
    tiny = qwen.with_layers(2)
    times = VllmTimes(tiny, CATALOG["H200"], constants(prepare_s=0.0025))
    assert times.decode(1, 1000) == (0.0025, 0.0) and times.launch_bound(512, 2048)[1]
    assert sum(times.parts(1, 1000, []).values()) == pytest.approx(0.0025)
    a, b = times.decode(256, 4_000_000)  # enough work to hide it
    assert b > 0 and a + b * 4_000_000 > 0.0025


def test_without_graphs_decode_is_launch_bound_too(qwen):
    eager = VllmTimes(qwen, CATALOG["H200"], constants(layer_launch_s=0.0008), captured_tokens=0)
    assert eager.decode(1, 1000) == (28 * 0.0008, 0.0)
    assert sum(eager.parts(1, 1000, []).values()) == pytest.approx(28 * 0.0008)
    assert eager.launch_bound(512, 2048) == (True, True)
    slow = VllmTimes(qwen, CATALOG["L4"], constants(layer_launch_s=0.0008), captured_tokens=0)
    assert slow.decode(1, 0)[0] > 2 * 28 * 0.0008  # 14 GB over 300 GB/s: the GPU is slower than any launch


def test_weights_that_are_unpacked_cost_gemms_what_they_save_in_reads():
    a100 = CATALOG["A100-80GB-SXM"]
    load = lambda q: model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy", quantization=q), Path("."))  # noqa: E731
    plain, int4, fp8 = (VllmTimes(load(q), a100, constants(overlap_loss=0.3)).weights for q in (None, "int4", "fp8"))
    assert int4.step_s(1, 1) < 0.4 * plain.step_s(1, 1)  # one token: a quarter of the bytes
    assert int4.step_s(2048, 1) > plain.step_s(2048, 1)  # a large batch: slower
    assert fp8.dense_token_s > plain.dense_token_s  # Ampere has no fp8 units
    h100 = VllmTimes(load("fp8"), CATALOG["H100-SXM"], constants()).weights
    assert h100.dense_token_s < VllmTimes(load(None), CATALOG["H100-SXM"], constants()).weights.dense_token_s


# vLLM's own AWQ kernel on an H200, the four matrices of a Qwen3-32B layer without the sum over the parts of the inputs:
# {rows: seconds}
AWQ_KERNEL = {1: 0.353e-3, 16: 0.405e-3, 32: 0.500e-3, 64: 0.735e-3, 128: 1.396e-3, 255: 2.591e-3}
PUBLIC = Path(__file__).parents[1] / "outputs" / "published" / "public" / "models"


def awq_server(**facts):
    shape = model.read_shape(ModelParams(path=str(PUBLIC / "qwen3-32b-awq"), weights="dummy", dtype="float16"), PUBLIC)
    return server_limits.server("vllm", VllmEngine(kind="vllm"), shape, hardware.catalog()["H200"], facts)


@pytest.mark.parametrize("rows", AWQ_KERNEL)
def test_the_awq_kernel_takes_what_it_took_on_an_h200(rows):
    server = awq_server(quantization="awq")
    kernel = awq_kernel(server.shape, server.gpu)
    assert kernel.step_s(rows) / 64 == pytest.approx(AWQ_KERNEL[rows], rel=0.15)
    assert kernel.unpack_s / 64 == pytest.approx(1.88e-3, rel=0.05)


def test_only_a_server_that_reports_the_awq_kernel_unpacks_again_every_16_tokens():
    marlin, plain = awq_server(quantization="awq_marlin"), awq_server(quantization="awq")
    constants = {n: p.value for n, p in vllm_priors(plain.shape, plain.gpu).items()}

    def seconds(server, tokens):
        return server.times(constants).weights.step_s(tokens, 1)

    assert awq_kernel(marlin.shape, marlin.gpu) is None
    assert seconds(plain, 64) > 1.5 * seconds(plain, 16) and seconds(marlin, 64) < 0.5 * seconds(plain, 16)
    # a prefill unpacks all weights once, then multiplies at the 16-bit rate that Marlin does not reach
    unpack = 64 * 1.88e-3
    assert seconds(plain, 2048) > unpack and seconds(plain, 8192) - unpack < seconds(marlin, 8192)
