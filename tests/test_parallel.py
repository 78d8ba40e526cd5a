"""Several GPUs: what each holds, what they tell each other, groups of requests, and what cannot be split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import linear_weights
import pytest
from servebook.cli import command as cli
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.config.params import HardwareParams, ModelParams, RunParams, Slo
from servebook.hardware import catalog as hardware
from servebook.hardware.catalog import GIB
from servebook.model import reader as model
from servebook.predictor import capacity, closed_forms, plan, predict, server_limits
from servebook.predictor.parallel import Layout
from servebook.predictor.priors import vllm_priors
from servebook.predictor.steptime import VllmTimes

ROOT = Path(__file__).parents[1]
QWEN = model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), ROOT)  # 28 query heads, 4 KV heads
LLAMA = model.read_shape(ModelParams(config="qwen3-8b", weights="dummy"), ROOT)  # 32 and 8
CARDS = hardware.catalog()
H200, L40S = CARDS["H200"], CARDS["L40S"]


def run_params(concurrency=(1, 32), gpu="H200", **sizes) -> RunParams:
    engine = {"kind": "vllm", "max_num_batched_tokens": 2048} | sizes
    sweep = {"kind": "concurrency", "prompt_tokens": 512, "output_tokens": 128, "concurrency": list(concurrency)}
    return RunParams(
        run="t", title="t", model={"config": "qwen2.5-7b", "weights": "dummy"}, hardware={"gpu": gpu},
        engines={"vllm": engine}, sweeps={"s": sweep}, load={"max_requests": 60},
    )  # fmt: skip


def predicted(gpu="H200", concurrency=(1, 32), shape=QWEN, **sizes):
    p = predict.predict_run(run_params(concurrency, gpu, **sizes), shape, CARDS[gpu], n_samples=2)
    figures = [{m: v["value"] for m, v in x["metrics"].items()} for x in p["points"]]
    return dict(zip(concurrency, figures, strict=True)), p["servers"]["vllm"]


# --- links --------------------------------------------------------------------------------------------------------


def test_an_all_reduce_is_latency_and_what_a_ring_sends():
    # 512 tokens of 3,584 bf16 values on 4 ranks, in two shots: 2 · 3/4 · 3,670,016 bytes over 0.62 · 450 GB/s, and
    # 7.5 µs
    assert Layout(4).all_reduce_s(H200, 512 * 3584 * 2) == pytest.approx(7.5e-6 + 5_505_024 / 279e9)
    # 16 tokens in one shot: 3 · 114,688 bytes
    assert Layout(4).all_reduce_s(H200, 16 * 3584 * 2) == pytest.approx(4.5e-6 + 344_064 / 279e9)
    # no NVLink: 2 · 3 hops of 1.5 µs on 9 µs, 0.2 of 32 GB/s
    assert Layout(4).all_reduce_s(L40S, 512 * 3584 * 2) == pytest.approx(18e-6 + 5_505_024 / 6.4e9)
    assert Layout(1, 4, 2).all_reduce_s(H200, 1e9) == 0.0


# aiconfigurator 0.12, systems/data/h200_sxm/comm/vllm/0.24.0: vLLM's custom all-reduce in a graph, bf16, seconds
MEASURED = {
    2: {256: 4.4e-6, 1 << 20: 8.4e-6, 4 << 20: 20.5e-6, 32 << 20: 144.8e-6},
    4: {256: 4.4e-6, 1 << 20: 12.1e-6, 4 << 20: 29.8e-6, 32 << 20: 179.6e-6},
    8: {256: 4.7e-6, 1 << 20: 14.1e-6, 4 << 20: 28.4e-6, 32 << 20: 165.9e-6},
}


@pytest.mark.parametrize(("ranks", "size"), [(n, s) for n, sizes in MEASURED.items() for s in sizes])
def test_all_reduces_are_near_what_was_measured_on_h200s(ranks, size):
    assert Layout(ranks).all_reduce_s(H200, size) == pytest.approx(MEASURED[ranks][size], rel=0.25)


# nccl-tests on two RTX 2080 Ti over PCIe 3 without peer access (AutoDL), seconds
THROUGH_HOST = {8192: 13.1e-6, 16384: 17.1e-6, 32768: 24.6e-6, 65536: 40.1e-6, 131072: 56.9e-6, 1 << 20: 279.5e-6}


@pytest.mark.parametrize("size", THROUGH_HOST)
def test_all_reduces_through_the_host_are_near_what_was_measured_on_two_2080_ti(size):
    card = replace(L40S, pcie_gb_per_s=15.75, peer_access=False)
    assert Layout(2).all_reduce_s(card, size) == pytest.approx(THROUGH_HOST[size], rel=0.25)


def test_a_server_that_logged_no_peer_access_talks_through_the_host():
    engine = run_params(tensor_parallel_size=2).engines["vllm"]
    card = CARDS["A100-80GB-PCIe"]
    found = [server_limits.server("vllm", engine, QWEN, card, facts) for facts in ({}, {"peer_access": False})]
    assert [s.gpu.through_host for s in found] == [False, True]
    # 10 sequences in the low-latency protocol: 2.3 GB/s instead of 0.31 of 32
    near, far = (s.layout.all_reduce_s(s.gpu, 10 * 7168) for s in found)
    assert far - near == pytest.approx(71_680 / 2.3e9 - 71_680 / (0.31 * 32e9))
    assert CARDS["RTX-4090"].through_host and not CARDS["A100-80GB-SXM"].through_host


def test_a_step_talks_twice_a_layer_once_for_the_embedding_and_for_the_logits():
    two, gather = Layout(2), QWEN.vocab * 2 / 2 / 279e9
    talk = two.exchange_s(QWEN, H200, 100, 3)
    assert talk == pytest.approx(57 * two.all_reduce_s(H200, 100 * 7168) + 4.5e-6 + 3 * gather)
    # four stages: three hops of hidden states and residual
    assert Layout(1, 4).exchange_s(QWEN, H200, 100, 3) == pytest.approx(30e-6 + 100 * 3 * 2 * 7168 / 279e9)
    assert Layout(data=8).exchange_s(QWEN, H200, 100, 100) == 0.0


# --- what each GPU holds -------------------------------------------------------------------------------------------


def test_ranks_hold_their_part_of_weights_kv_and_work():
    two = Layout(2).rank(QWEN)
    assert linear_weights.parameters(two) * 2 == linear_weights.parameters(QWEN)
    assert two.kv_bytes_per_token * 2 == QWEN.kv_bytes_per_token
    assert two.attention_flops_per_context_token * 2 == QWEN.attention_flops_per_context_token
    # 152,064 / 2 rows of the embedding and of the LM head; norms are whole on every rank
    assert Layout(2).weight_bytes(QWEN) == pytest.approx(QWEN.weight_bytes / 2, rel=1e-3)
    # 32 query heads over 16 ranks: 8 KV heads are held twice
    sixteen = Layout(16).rank(LLAMA)
    assert (sixteen.heads, sixteen.kv_heads) == (2, 1)
    assert sixteen.kv_bytes_per_token == LLAMA.kv_bytes_per_token / 8
    replicated = LLAMA.layers * LLAMA.hidden * LLAMA.head_dim * 2 * 8
    assert linear_weights.parameters(sixteen) * 16 == linear_weights.parameters(LLAMA) + replicated


def test_stages_hold_their_layers_and_one_of_the_two_tables():
    four = Layout(1, 4)
    layers = (linear_weights.stored_bytes(QWEN) + linear_weights.of_norms_and_biases(QWEN) * 2) / 4
    assert four.weight_bytes(QWEN) == pytest.approx(layers + QWEN.embedding_bytes, rel=1e-3)
    assert Layout(1, 3).stage(QWEN).layers == 10  # 28 layers: 9, 9, 10


def test_kv_pools_of_several_gpus():
    one, tp, pp, dp = (predicted(concurrency=(1,), **s)[1]["kv_cache_tokens"] for s in (
        {}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 4}, {"data_parallel_size": 4},
    ))  # fmt: skip
    assert dp == one  # each replica its own
    assert tp > 4 * one and pp > 4 * one  # and the weights are held once
    # logits of every seat in 16 and in 32 bits, gate and up of a full budget; blocks of 16 tokens
    activation = 2048 * (2 * 18944 / 4 + 4 * 3584) * 2 + 1024 * QWEN.vocab * 6
    left = int(139.81 * GIB) * 0.9 - activation - (0.25 + 0.3) * GIB - Layout(4).weight_bytes(QWEN)
    assert tp == pytest.approx(16 * (left // (16 * 28 * 1 * 128 * 2 * 2)), abs=QWEN.max_context_tokens / 16)
    table = closed_forms.pool_table(QWEN, H200, run_params(tensor_parallel_size=4)).iloc[0]
    assert table["pool_tokens"] == pytest.approx(tp, rel=0.05)


def test_a_model_that_fits_only_on_several():
    big = {"gpu": "L4", "concurrency": (1,), "max_model_len": 2048}
    one, _ = predicted(**big, shape=model.read_shape(ModelParams(config="qwen3-8b", weights="dummy"), ROOT))
    assert one[1]  # 16 GB on 22 GiB
    wide = LLAMA.with_layers(72)
    alone, _ = predicted(**big, shape=wide)
    split, _ = predicted(**big, shape=wide, tensor_parallel_size=2)
    assert alone[1] == {} and split[1]["tpot_s"] > 0


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor_parallel_size": 3}, "cannot be split over 3 GPUs"),
        ({"tensor_parallel_size": 8}, "Possible are 1, 2, 4"),  # 28 query heads
        ({"pipeline_parallel_size": 29}, "28 layers, fewer than 29 pipeline stages"),
    ],
)
def test_what_cannot_be_split_is_one_line(sizes, says):
    key = next(iter(sizes))
    for ask in (predicted, lambda **s: plan.plan(run_params(**s), QWEN, H200)):
        with pytest.raises(ServebookError) as caught:
            ask(**sizes)
        assert says in caught.value.line() and f"engines.vllm.{key}" in caught.value.line()


def test_check_says_so_too(tmp_path, capsys):
    file = tmp_path / "p.yaml"
    file.write_text(params.dump(run_params(tensor_parallel_size=3)))
    assert cli.main(["check", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "engines.vllm.tensor_parallel_size" in said and "Possible are 1, 2, 4" in said
    file.write_text(params.dump(run_params(tensor_parallel_size=4)))
    assert cli.main(["check", str(file)]) == 0


# --- how fast --------------------------------------------------------------------------------------------------------


def test_a_tensor_parallel_step_is_a_ranks_work_and_its_all_reduces():
    constants = {n: p.value for n, p in vllm_priors(QWEN, H200).items()}
    one, two = VllmTimes(QWEN, H200, constants), VllmTimes(QWEN, H200, constants, Layout(2))
    work = one.decode(32, 0)[0] - one.host_s - 32 * one.sequence_s
    expected = work / 2 + Layout(2).exchange_s(QWEN, H200, 32, 32)
    assert two.decode(32, 0)[0] - two.host_s - 32 * two.sequence_s == pytest.approx(expected, rel=2e-3)
    assert two.decode(32, 0)[1] == pytest.approx(one.decode(32, 0)[1] / 2)
    parts = two.parts(32, 32_000, [(2000, 0, True)])
    assert parts["links"] == pytest.approx(two.links(2032, 33))


def test_more_gpus_are_faster_but_not_as_many_times():
    one, _ = predicted()
    two, _ = predicted(tensor_parallel_size=2)
    four, _ = predicted(tensor_parallel_size=4)
    for c in (1, 32):
        assert 1.2 < one[c]["tpot_s"] / two[c]["tpot_s"] < 1.7
        assert 1.1 < two[c]["tpot_s"] / four[c]["tpot_s"] < 1.7
    # over PCIe a prompt of 8,192 tokens gains next to nothing: 57 all-reduces of 29 MB a 2,048-token chunk
    pcie = [predicted("L40S", tensor_parallel_size=n)[0][32]["ttft_s"] for n in (1, 4)]
    assert pcie[1] > 0.8 * pcie[0]


def test_replicas_share_the_clients():
    one, _ = predicted(concurrency=(3, 6))
    two, _ = predicted(concurrency=(6, 7, 12), data_parallel_size=2)
    assert two[6]["tpot_s"] == pytest.approx(one[3]["tpot_s"], rel=0.01)
    assert two[6]["output_tok_per_s"] == pytest.approx(2 * one[3]["output_tok_per_s"], rel=0.03)
    assert two[12]["output_tok_per_s"] == pytest.approx(2 * one[6]["output_tok_per_s"], rel=0.03)
    assert two[6]["output_tok_per_s"] < two[7]["output_tok_per_s"] < two[12]["output_tok_per_s"]
    more, _ = predicted(concurrency=(3,), data_parallel_size=8)  # five replicas are idle
    lone, _ = predicted(concurrency=(1,))
    assert more[3]["output_tok_per_s"] == pytest.approx(3 * lone[1]["output_tok_per_s"], rel=0.01)


def test_stages_work_for_several_requests_and_hurry_none():
    one, _ = predicted(concurrency=(1, 128))
    four, _ = predicted(concurrency=(1, 128), pipeline_parallel_size=4)
    assert four[1]["tpot_s"] > one[1]["tpot_s"]  # a token passes all layers, and three hops
    assert four[128]["output_tok_per_s"] > 1.3 * one[128]["output_tok_per_s"]
    # the chunks of a lone long prompt follow each other through the stages
    times = [VllmTimes(QWEN, CARDS["A40"], {n: p.value for n, p in vllm_priors(QWEN, CARDS["A40"]).items()}, layout)
             for layout in (Layout(), Layout(1, 4))]  # fmt: skip
    assert times[1].first_token(8192, 2048) < 0.55 * times[0].first_token(8192, 2048)
    assert times[1].first_token(2048, 2048) > times[0].first_token(2048, 2048)


def test_capacity_counts_all_groups():
    f = {}
    for name, sizes in (("one", {}), ("dp", {"data_parallel_size": 2}), ("tp", {"tensor_parallel_size": 2})):
        p = run_params(**sizes)
        f[name] = predict.forecaster(p, "vllm", QWEN, H200, samples=2)
    rate = {n: x.capacity(512, 128) for n, x in f.items()}
    assert rate["dp"] == pytest.approx(2 * rate["one"], rel=0.02) and rate["one"] < rate["tp"] < rate["dp"]
    slo = Slo(ttft_s=0.5, tpot_s=0.02)
    found = {n: capacity.LoadSearch(x, 512, 128, slo).largest_concurrency() for n, x in f.items()}
    assert found["dp"].concurrency > 1.8 * found["one"].concurrency
    open_loop = {n: capacity.LoadSearch(x, 512, 128, slo).largest_rate().rate_per_s for n, x in f.items()}
    assert open_loop["dp"] > 1.8 * open_loop["one"]


def test_given_figures_may_say_how_fast_the_links_are():
    figures = {"name": "X", "tensor_tflops": 100.0, "memory_bandwidth_gb_per_s": 1000.0, "memory_gib": 80.0}
    assert hardware.resolve(HardwareParams(figures=figures)).link_bytes_per_s == 32e9
    assert hardware.resolve(HardwareParams(figures=figures | {"link_gb_per_s": 200.0})).link_bytes_per_s == 200e9
    linked = {n for n, g in CARDS.items() if g.nvlink_gb_per_s}
    assert linked >= {"A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM", "H200", "B200", "GB200", "H20", "MI300X"}
    assert not linked & {"A40", "L40S", "H100-PCIe", "H100-NVL", "RTX-PRO-6000", "RTX-A6000", "A30"}


def test_the_point_keeps_its_causes_over_several_gpus():
    p = predict.predict_run(run_params((16,), tensor_parallel_size=2, data_parallel_size=2), QWEN, H200, n_samples=2)
    point = p["points"][0]
    for metric in ("ttft_s", "tpot_s"):
        assert sum(point["breakdown"][metric].values()) == pytest.approx(point["metrics"][metric]["value"])
        assert point["breakdown"][metric]["links_s"] > 0
    assert server_limits.server("vllm", run_params(tensor_parallel_size=2).engines["vllm"], QWEN, H200).layout.gpus == 2


def test_quantized_inputs_of_row_parallel_matrices_are_split():
    """Q/K/V and gate/up read all of the hidden state on every rank, O and down the part that the rank computed."""
    shape = model.read_shape(ModelParams(config="llama-3.1-8b", weights="dummy", quantization="fp8"), ROOT)
    whole, split = 32 * 2 * 4096, 32 * (4096 + 14336)
    for ranks in (1, 2, 8):
        inputs = sum(m.quantized_inputs for m in shape.rank(ranks).matrices)
        assert inputs == whole + split // ranks
    half = shape.with_layers(16)
    assert sum(m.quantized_inputs for m in half.matrices) == (whole + split) // 2
