"""Priors of the step-time models' constants: mean, spread and bounds before any measurement, with reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .attention import HOPPER_KV_SHARE
from .parallel import ALONE, Layout


@dataclass(frozen=True)
class Prior:
    """The prior of a constant: mean, sd, hard bounds, and the reason for them."""

    value: float
    sd: float
    low: float
    high: float
    why: str
    unit: str = ""


# relative sd of the host's launch time from minute to minute (from the naive server's TPOT and vLLM's steps outside
# CUDA graphs, over the points of the H200 run of 2026-11-29)
HOST_NOISE = 0.18
# common factor on all host times, so that a slow single prompt also informs the other host constants
SLOWNESS = "factor on all host times (single-core speed); cloud machines with the same GPU differ by 0.7 to 2"
BOTH_TABLES = "chosen to agree with both published tables (A40, A100)"


def vllm_priors(
    shape: ModelShape, gpu: Gpu, facts: Mapping[str, object] | None = None, layout: Layout = ALONE
) -> dict[str, Prior]:
    """Priors of vLLM's constants. They depend on the GPU's generation, power cap and links, the attention backend, the
    model's quantization, layers and parallelism, vLLM's version, and how tokens are sampled (facts "sampling": "top-p",
    or not known)."""
    facts = facts or {}
    if gpu.is_cpu:
        return _cpu_vllm_priors(shape) | _link_priors(gpu, layout) | expert_priors(shape, layout)
    kernels = _kernel_priors(shape, gpu, str(facts.get("attention_backend") or gpu.attention_backend).upper())
    return {
        **kernels,
        **_host_priors(shape, gpu, facts, layout),
        "host_slowness": Prior(1.0, 0.15, 0.4, 4.0, SLOWNESS),
        **_power_priors(gpu),
        "host_per_sequence_s": _sampling(shape, gpu, kernels["bandwidth_share"].value, _sorts(facts)),
        **_frontend_priors(facts),
        **expert_priors(shape, layout),
        **_link_priors(gpu, layout),
    }


def _link_priors(gpu: Gpu, layout: Layout) -> dict[str, Prior]:
    """Prior of the communication between GPUs; {} where they do not communicate."""
    if layout.gpus <= layout.data:
        return {}
    why = "fraction of the link's rate that large all-reduces reach (see parallel)"
    return {"link_share": Prior(layout.link_share(gpu), 0.08 if gpu.nvlink_gb_per_s else 0.10, 0.01, 1.0, why)}


def _kernel_priors(shape: ModelShape, gpu: Gpu, backend: str) -> dict[str, Prior]:
    """Priors of the kernels on a GPU: memory bandwidth, GEMMs, attention. backend: vLLM's attention backend."""
    eight_bit = shape.activation_quantization_bytes > 0
    gemm = "large GEMMs under a power cap reach 55–85 % of dense peak"
    if eight_bit:
        gemm = "8-bit GEMMs with one scale per token; on aiconfigurator's H200, 2,048 tokens take 25 ms instead of 40"
    kv_reads = "fraction of the datasheet's bandwidth at which decode attention reads KV (aiconfigurator's tables)"
    kv = {"hopper": (HOPPER_KV_SHARE, 0.03), "blackwell": (0.87, 0.04)}.get(gpu.generation, (0.79, 0.05))
    matmul, exposed, attention = (0.70, 0.10), (0.30, 0.10), (0.45, 0.10)
    if gpu.generation in ("hopper", "blackwell"):
        # warp-specialized kernels, from an H200's first run and its repeat. Decodes: 16 instead of 1 sequences of 8,192
        # tokens read 7.1 GB more KV in 1.6 ms; 64 instead of 1 of 512 tokens add at most 4 µs each beyond the KV reads.
        # Prefills: single prompts of 2,048 to 16,384 tokens take 42 ms of GEMMs per 2,048 tokens, and attention reaches
        # 52 % of dense peak
        matmul, exposed, attention = (0.67, 0.08), (0.25, 0.08), (0.52, 0.05)
    if eight_bit:
        matmul, exposed = (0.60, 0.08), (0.30, 0.10)
    stream = _stream(gpu, eight_bit)
    if (capped := _sustained(gpu)) < matmul[0]:
        matmul, gemm = (capped, 0.15 * capped), "fraction of the peak that the board's power sustains (see _sustained)"
    return {
        "bandwidth_share": Prior(*stream, 0.5, 0.95, "streaming kernels reach 75–92 % of the datasheet's bandwidth"),
        "kv_share": Prior(*kv, 0.4, 0.97, kv_reads),
        "matmul_share": Prior(*matmul, 0.25, 0.95, gemm),
        "overlap_loss": Prior(*exposed, 0.0, 1.0, f"part of the shorter of reads and GEMMs not hidden; {BOTH_TABLES}"),
        "attention_share": Prior(*attention, 0.1, 0.8, "FlashAttention's causal prefill reaches 40–60 % of dense peak"),
        "mixed_rows": _mixed_rows(gpu, backend),
    }


def _mixed_rows(gpu: Gpu, backend: str) -> Prior:
    """Attention time of a decode token in a step that also has prompt tokens, in rows of a prompt."""
    tiled = (
        "FLASH_ATTN" in backend
        and "3" not in backend
        and gpu.generation not in ("hopper", "blackwell", "blackwell_rtx")
    )
    if tiled:
        tile = "FlashAttention-2 uses a 64-row tile per decode token, less efficiently than for a prompt"
        return Prior(90, 10, 16, 128, f"{tile}; {BOTH_TABLES}")
    packed = "FlashAttention-3, FlashInfer and Triton pack the query heads of a group also in mixed steps"
    return Prior(1.2, 0.4, 1, 8, packed)


def _power_priors(gpu: Gpu) -> dict[str, Prior]:
    """Priors of the slowdown at the board's power cap."""
    prefill, decode = ((0.075, 0.02), (0.08, 0.03)) if gpu.generation == "hopper" else ((0.0, 0.01), (0.0, 0.02))
    prefill_why = "continuous prefill runs at 1,520 MHz, a single one at 1,800: 7 to 8 % slower on the H200"
    prefill_why += " at C = 16 to 128"
    decode_why = (
        "large decode batches reach the power cap: with 128 or more sequences of an 8B model, an H200 at 690 of 700 W"
        " runs at 1,600 MHz and steps are 8 to 11 % longer; with 200 sequences of a 7B model, 6 %"
    )
    return {
        "capped_loss": Prior(*prefill, 0.0, 0.3, prefill_why),
        "decode_capped_loss": Prior(*decode, 0.0, 0.4, decode_why),
    }


# Rate at which an A100's GEMMs of few rows read weights, at most: 0.765 of 2,039 GB/s, beside 7 µs per kernel, in the
# tables of aiconfigurator 0.12 (vLLM 0.14, 1 to 16 rows, 107 matrices of over 25M weights). An A100-40 (1,555 GB/s) and
# smaller Ampere cards are bound by their memory: the fraction of the datasheet's bandwidth is chosen with an A100-40's
# TPOT at C = 1 in view
AMPERE_BYTES_PER_S, AMPERE_STREAM = 1.56e12, 0.86

# Shares of the datasheet's bandwidth at which GEMMs of 1 to 16 rows read weights, {bytes/s: (16 bits, 8 bits)}. H200:
# own runs. H100 (SXM): in the tables of aiconfigurator 0.12 (vLLM 0.24, 158 matrices of over 25M weights) a GB takes
# 95 µs longer than on an H200, in 16 and in 8 bits, where equal shares of both datasheets would be 100 and 107: the
# same SMs come nearer to the limit of a slower memory. No table has an H100 PCIe: as the H200
HOPPER_STREAM = {3.35e12: (0.915, 0.87), 4.8e12: (0.90, 0.84)}
# 8-bit GEMMs relative to 16-bit ones, from the slopes of time over bytes in the same tables: B200, L40S, RTX PRO 6000
EIGHT_BIT_STREAM = {"blackwell": 0.88, "ada": 0.87, "blackwell_rtx": 0.965}


def _stream(gpu: Gpu, eight_bit: bool) -> tuple[float, float]:
    """Prior (mean, sd) of the fraction of the datasheet's bandwidth at which GEMMs of few rows read weights."""
    sd = 0.04 if eight_bit else 0.03 if gpu.generation in ("hopper", "blackwell") else 0.035
    if gpu.generation == "hopper":
        shares = [of[eight_bit] for of in HOPPER_STREAM.values()]
        slow = gpu.bytes_per_s < min(HOPPER_STREAM)
        return (shares[-1] if slow else float(np.interp(gpu.bytes_per_s, list(HOPPER_STREAM), shares))), sd
    share = 0.90 if gpu.generation == "blackwell" else 0.84
    if gpu.generation == "ampere":
        share = min(AMPERE_STREAM, AMPERE_BYTES_PER_S / gpu.bytes_per_s)
    return (share * EIGHT_BIT_STREAM.get(gpu.generation, 1.0) if eight_bit else share), sd


# 16-bit TFLOP/s per watt of the board's cap that large GEMMs sustain: medians over GEMMs of 2,048 rows, 4,096 or wider,
# in the tables of aiconfigurator 0.12 (vLLM 0.14 to 0.24): L40S 250 of 362 at 350 W, H100 821 of 989 at 700 W, A100
# 278 of 312 at 400 W
SUSTAINED_TFLOPS_PER_W = {"ada": 0.71, "hopper": 1.17, "ampere": 0.69}


# Bytes that sampling reads and writes per sequence and vocabulary entry: 12 for greedy sampling (logits to fp32,
# argmax), about 48 for random sampling (temperature, softmax, noise, division, argmax: vllm/v1/sample). Load generators
# differ: `vllm bench serve` used to set temperature 0 and now leaves it to the model's generation_config. The prior is
# the mean of the two
SAMPLING_BYTES = 12, 48
SEQUENCE_S = 0.5e-6  # of a sequence, independent of the vocabulary

# top-p before vLLM 0.16 sorts the whole vocabulary of every sequence with PyTorch (apply_top_k_top_p: sort, softmax,
# cumulative sum, scatter; later versions have kernels of their own, vllm-project/vllm#33538 and #40376). On an H200
# (PyTorch 2.11, 32,768 to 151,936 entries, 1 to 256 sequences) it takes longer than random sampling alone by 0.1 ms and
# 2 ns an entry a step, which is the scan of one row, and by 92 ps an entry and sequence: 0.62, 1.32, 2.88 and 4.18 ms
# for 16, 64, 128 and 256 sequences of 151,936. At an H200's rate that is 400 bytes an entry. Not learned from a table:
# Qwen3-32B on H100s with vLLM 0.12 and top-p takes 2.8, 2.8 and 2.6 ms longer at tensor parallel 2, 4 and 8 for 128
# clients instead of 16 than without this term; the term gives 2.3
SORT_BYTES = 400
SORT_STEP_S, SORT_ENTRY_S = 1e-4, 2e-9


def _sorts(facts: Mapping[str, object]) -> bool:
    return facts.get("sampling") == "top-p" and before(facts.get("version"), (0, 16))


def _sampling(shape: ModelShape, gpu: Gpu, bandwidth_share: float, sorts: bool = False) -> Prior:
    """Seconds per sequence and step for sampling, which every rank does over the whole vocabulary. Measured beyond the
    KV reads: at most 4 µs on an H200 (the prior is 1.6), about 35 on an L4 with 152,000 entries (the prior is 19).
    sorts: top-p by sorting."""
    moved = (SAMPLING_BYTES[1], SAMPLING_BYTES[1] + 2 * SORT_BYTES) if sorts else SAMPLING_BYTES
    low, high = (SEQUENCE_S + b * shape.vocab / (gpu.bytes_per_s * bandwidth_share) for b in moved)
    mean, sd = (low + high) / 2, (high - low) / (6 if sorts else 2)
    return Prior(mean, sd, 0.0, max(1e-4, 2 * mean), "sampling the next token of a running request", "s")


def _sustained(gpu: Gpu) -> float:
    """Fraction of the 16-bit peak that the board's power sustains; 1 if the power cap is not known."""
    per_w = SUSTAINED_TFLOPS_PER_W.get(gpu.generation)
    if gpu.board_power_w is None or per_w is None:
        return 1.0
    return min(1.0, per_w * gpu.board_power_w / (gpu.bf16_tflops or gpu.fp16_tflops))


# Seconds per layer in which its eleven kernels start and end without reading at full rate: 3 to 5 µs each, less at
# higher clocks. Hopper: decode steps at C = 1 beyond reading the weights, of four 7B and 8B models with 28, 28, 32 and
# 36 layers on H200s: 1.37, 1.42 (8 bits), 1.28 and 1.47 ms. Ada and Ampere: chosen with C = 1 on an L4 (0.5B, 24
# layers), an A100 (7B, 28) and an A100-40 (8B, 32), and low loads on an RTX 4090 and an L40S in view; each of them
# gives 30 to 55 µs
LAYER_S = {"hopper": 35e-6, "blackwell": 30e-6, "ada": 40e-6, "ampere": 50e-6}
# RTX Blackwell and what is not known, older cards among them: chosen with a replayed trace on an RTX PRO 6000 in view
OTHER_LAYER_S = 75e-6
BEYOND_LAYERS_S = 0.0003
# without CUDA graphs the gaps between a layer's eleven kernels are about 1.2 µs longer
EAGER_GAPS_S = 13e-6


def _host_priors(shape: ModelShape, gpu: Gpu, facts: Mapping[str, object], layout: Layout) -> dict[str, Prior]:
    """Priors of the host times in the engine's process: scheduling, and launching kernels."""
    # 11 kernels per layer; quantizing activations adds one, of O's input; the others are fused with a norm or
    # activation. Decode steps of Llama-3.1-8B in fp8 on an H200 (2026-12-01) took 0.1 to 0.4 ms less than predicted
    # with two, of which one kernel is 0.1
    eight_bit = shape.activation_quantization_bytes > 0
    # tensor parallel: two all-reduces
    kernels = (11 + eight_bit + 2 * (layout.tensor > 1) + more_kernels(shape)) / 11
    eager_mode = facts.get("cuda_graphs", True) is False
    layer_s = kernels * (LAYER_S.get(gpu.generation, OTHER_LAYER_S) + eager_mode * EAGER_GAPS_S)
    host = BEYOND_LAYERS_S + shape.layers * layer_s
    sort = SORT_STEP_S + SORT_ENTRY_S * shape.vocab if _sorts(facts) else 0.0
    # in a compiled step, quantization is fused with the norm or activation before it; an all-reduce is one more launch
    dense, more = 11 + eight_bit + (layout.tensor > 1), more_kernels(shape)
    launches = (dense + more) / 11
    alone = 0.00056 if eager_mode else 0.00068
    eager = "launching a layer's kernels one by one, bound by the host; 0.5 to 1 ms without CUDA graphs on an H200's"
    eager += " host, 0.56 in eager mode on an A100's (4-bit Qwen3-32B, 4 clients: TPOT 38.5 ms, GPU time 15 ms)"
    # captured graphs hold the experts' kernels: Qwen3-30B-A3B in 16 and 8 bits on an H200 starts 512-token prompts as
    # early as its GPU time allows, earlier than 48 layers with experts could be launched
    piecewise = "one graph per layer for all except the attention; from 128-token prompts on an H200"
    share = 0.37 * (dense + more_kernels(shape, captured=False)) / (dense + more)
    # the H200 run's own host gave 1.9 ms; the whole steps of small models on others' hosts take 1.8 to 2.4. Checked on
    # H100s with synchronous scheduling, where 8 clients' TPOT was too long by the same 0.8 to 1.9 ms at 2, 4 and 8 GPUs
    prepare = "scheduling, inputs, replaying a graph; from gaps between long launches and first tokens, small models"
    old = before(facts.get("version"), (0, 14))
    running = "scheduling, inputs and outputs per running request in the engine's process"
    engine_sequence = (22e-6, 8e-6) if old else (18e-6, 6e-6)
    return {
        "host_s": Prior(host + sort, 0.3 * host, 0.0, 5 * host, "sampling; starts and ends of a layer's kernels", "s"),
        "layer_launch_s": Prior(alone * launches, 0.00018, 5e-5, 0.005, eager, "s"),
        "piecewise_share": Prior(share, 0.12, 0.1, 1.0, piecewise),
        "prepare_s": Prior(0.0015, 0.0007, 2e-4, 0.02, prepare, "s"),
        "engine_sequence_s": Prior(*engine_sequence, 0.0, 3e-4, running, "s"),
    }


def _frontend_priors(facts: Mapping[str, object]) -> dict[str, Prior]:
    """Priors of the API server's times."""
    event = "detokenizing, JSON and a write per token in the API server's event loop; on an H200's host 74 µs with"
    event += " usage in every event (as servebook requests it), 52 to 55 µs without, at 200 and 256 running requests"
    event_s = (75e-6, 20e-6) if facts.get("usage_per_event", True) else (53e-6, 10e-6)
    return {
        "frontend_request_s": Prior(0.004, 0.003, 0.0, 0.1, "HTTP, JSON and the engine's queues", "s"),
        "frontend_token_s": Prior(1.5e-6, 1.5e-6, 0.0, 3e-5, "parsing, validating and hashing prompt tokens", "s"),
        "frontend_event_s": Prior(*event_s, 0.0, 1e-3, event, "s"),
    }


def more_kernels(shape: ModelShape, *, captured: bool = True) -> float:
    """Kernels per layer in addition to a dense decoder's eleven, averaged over the layers. captured: also those that
    CUDA graphs hold in a step with prefill.

    Experts: a router, sorting, padding, two grouped GEMMs and their sum instead of an MLP's three kernels. Latent
    attention: its projections and absorbed products. States: a convolution and a scan."""
    latent = sum(a.layers for a in shape.attention if a.kind == "latent")
    states = sum(a.layers for a in shape.attention if a.kind == "state")
    routed = shape.experts.layers if shape.experts and captured else 0
    return (5 * routed + 5 * latent + 3 * states) / max(shape.layers, 1)


# Rate of GEMMs in a server relative to the kernel alone, as for dense GEMMs on an H200: 0.67 of the peak instead of
# 0.79. Learned from Qwen3-30B-A3B there (2026-12-01): steps of 4,200 to 8,200 tokens took 76 to 127 ms of the GPU
# where 68 to 110 were predicted without this factor, 73 to 117 with it (before the slowdown at the power cap)
IN_A_SERVER = 0.85


def expert_priors(shape: ModelShape, layout: Layout = ALONE) -> dict[str, Prior]:
    """Priors of the experts' grouped kernels; {} for a dense model. From aiconfigurator 0.12's tables of vLLM 0.24's
    fused_moe on H200 and H100 (bf16, Triton), which they match within 10 % at 1 to 16,384 tokens, for 128 experts of
    width 768 and 8 of width 14,336."""
    if shape.experts is None:
        return {}
    wide = shape.experts.intermediate
    rows = "rate of a grouped GEMM relative to a dense one, lower for narrow experts: I / (I + 250), I: width"
    if any(m.part == "experts" and m.multiplies in ("fp8", "int8", "fp4") for m in shape.matrices):
        rows, narrow = f"{rows}; 0.6 of that in 8 bits with scales per block", 0.6
    else:
        narrow = 1.0
    matmul = narrow * IN_A_SERVER * wide / (wide + 250)
    sync = "replicas first agree on a step's size, via the CPU; chosen to agree with a trace of two RTX PRO 6000"
    uniform = "1: the router picks all experts equally often; a skewed one uses fewer"
    return {
        "expert_bandwidth": Prior(0.96, 0.06, 0.5, 1.1, "relative to dense matrices' bandwidth, all experts read"),
        "expert_matmul": Prior(matmul, 0.15 * matmul, 0.1, 1.2, rows),
        "expert_overlap": Prior(0.5, 0.15, 0.0, 1.0, "part of the shorter of experts' reads and GEMMs not hidden"),
        # learned from Qwen3-30B-A3B on H200 hosts: five runs at 64 and 128 clients fit 0.4 to 0.85 ms, mean
        # 0.68. One server's launches of 410 steps took 64 to 101 ms (p10 to p90, for seconds at a time), mean 85 (0.78)
        "expert_launch_s": Prior(0.0007, 0.0003, 0.0, 0.005, "routing and grouped kernels launched one by one", "s"),
        "expert_spread": Prior(1.0, 0.08, 0.2, 1.0, uniform),
        **({"replica_sync_s": Prior(0.0015, 0.0007, 0.0, 0.02, sync, "s")} if layout.data > 1 else {}),
    }


def before(version: object, what: tuple[int, int]) -> bool:
    """Whether a version's text is of one before `what` (major, minor); a version that is not known counts as new."""
    numbers = re.findall(r"\d+", str(version or ""))[:2]
    return len(numbers) == 2 and (int(numbers[0]), int(numbers[1])) < what


def _cpu_vllm_priors(shape: ModelShape) -> dict[str, Prior]:
    host, shared = 0.002 + 0.0004 * shape.layers, "server and client share the cores"
    return {
        "bandwidth_share": Prior(0.6, 0.2, 0.1, 1.0, f"relative to a measured copy; {shared}"),
        "matmul_share": Prior(0.3, 0.12, 0.01, 0.9, f"relative to cores × clock × vector width; {shared}"),
        "overlap_loss": Prior(0.8, 0.2, 0.0, 1.0, "a CPU core waits for its loads"),
        "attention_share": Prior(0.12, 0.06, 0.002, 0.6, "CPU attention kernels"),
        "mixed_rows": Prior(1.5, 0.5, 1, 16, "no query tiles"),
        "decode_rows": Prior(6, 4, 0, 64, "attention time per decode token, in prompt tokens (idle vector units)"),
        "host_s": Prior(host, 0.5 * host, 0.0, 0.2, "eager PyTorch: Python and small operators per layer", "s"),
        "host_per_sequence_s": Prior(1e-4, 8e-5, 0.0, 5e-3, f"scheduling, detokenizing, streaming; {shared}", "s"),
        "frontend_request_s": Prior(0.010, 0.006, 0.0, 0.2, "HTTP, JSON and the engine's queues", "s"),
        "frontend_token_s": Prior(2e-6, 1.5e-6, 0.0, 1e-4, "parsing, validating and hashing prompt tokens", "s"),
    }


def naive_priors(shape: ModelShape, gpu: Gpu) -> dict[str, Prior]:
    """Priors of Transformers' eager loop. On a GPU, launches overlap with the work, so that a decode step takes
    max(GPU, layers × launches); on a CPU they add up."""
    cpu, copy, cores = gpu.is_cpu, "relative to a measured copy", "relative to cores × clock × vector width"
    launch = 0.0010 if cpu else 0.00085
    row = "time of a decode token in PyTorch's CPU attention kernel, in prompt tokens; it makes TPOT grow with context"
    return {
        **({"decode_rows": Prior(14, 8, 0, 100, row)} if cpu else {}),
        "bandwidth_share": Prior(0.6, 0.2, 0.1, 1.0, copy) if cpu else Prior(0.80, 0.05, 0.5, 0.95, "as for vLLM"),
        "matmul_share": Prior(0.25, 0.12, 0.01, 0.9, cores) if cpu else Prior(0.66, 0.10, 0.2, 0.95, "unfused GEMMs"),
        "overlap_loss": Prior(0.8 if cpu else 0.3, 0.2 if cpu else 0.1, 0.0, 1.0, "as for vLLM"),
        "attention_share": Prior(0.08, 0.05, 0.002, 0.6, "on a CPU") if cpu else Prior(0.4, 0.12, 0.05, 0.8, "SDPA"),
        "layer_launch_s": Prior(launch, 0.3 * launch, 5e-5, 0.01, "about 20 kernels and their Python per layer", "s"),
        "host_s": Prior(0.0015, 0.001, 0.0, 0.05, "sampling, streaming, the event loop", "s"),
        "kv_recopy": Prior(3.0, 0.3, 1.0, 5.0, "the growing cache is read, written and read again (post 2)"),
        "frontend_request_s": Prior(0.004, 0.003, 0.0, 0.1, "HTTP and JSON", "s"),
        "frontend_token_s": Prior(1e-6, 1e-6, 0.0, 3e-5, "parsing prompt tokens", "s"),
    }
