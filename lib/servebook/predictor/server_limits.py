"""A server's limits and KV pool for the predictor: as it reported, from its parameters, or vLLM's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config.params import BatchingEngine, Engine, NaiveEngine, VllmEngine
from ..hardware.catalog import GIB, Gpu
from ..model.reader import ModelShape
from . import awq_kernel, server_flags
from .kv_groups import Pool, pool
from .parallel import ALONE, Layout
from .priors import before
from .refusal import Refusal
from .scheduler import SchedulerConfig
from .steptime import NaiveTimes, VllmTimes

Times = VllmTimes | NaiveTimes
BIG_GPU_GIB, HUGE_GPU_GIB = 70, 160  # memory from which vLLM's default budgets are larger (except on the A100)
# memory outside PyTorch, by vLLM's profiling: 0.23 to 0.24 GiB on the H200 runs of 2026-11-29; NCCL's buffers
NON_TORCH_GIB, NCCL_GIB = 0.25, 0.3
NAIVE_NON_TORCH_GIB = 0.9  # CUDA context and workspaces of the naive server
FP8_ON_BLACKWELL = ("glm_moe_dsa",)  # models whose KV cache vLLM makes fp8 there unless set otherwise
ASYNCHRONOUS_FROM = (0, 14)
GATHERING = (0, 10), (0, 24)  # versions whose API server tokenizes prompts in batches (see api_server)


@dataclass(frozen=True)
class PredictedServer:
    """A server's limits. problem: why it cannot serve at all, None if it can. config: the scheduler's limits for one
    group of requests (see parallel). kv_tokens: KV pool of one replica, as in vLLM's log; kv_source: origin of that
    figure."""

    name: str
    kind: str
    shape: ModelShape
    gpu: Gpu
    config: SchedulerConfig
    max_model_len: int
    layout: Layout = ALONE
    kv_tokens: int = 0
    kv_source: str = ""
    problem: Refusal | None = None
    notes: tuple[str, ...] = ()
    captured_tokens: int = 512  # the largest step with CUDA graphs, 0: eager
    pool: Pool | None = None
    gathers_prompts: bool = False  # the API server tokenizes prompts in batches (see api_server)

    @property
    def naive(self) -> bool:
        return self.kind == "naive"

    def times(self, constants: Mapping[str, float]) -> Times:
        if self.naive:
            return NaiveTimes(self.shape, self.gpu, constants)
        asynchronous = self.config.async_scheduling or self.gpu.is_cpu
        return VllmTimes(
            self.shape, self.gpu, constants, self.layout, self.captured_tokens, asynchronous, self.gathers_prompts
        )

    def refuses(self, prompt_tokens: int, output_tokens: int) -> Refusal | None:
        """Why the server rejects such a request; None if it serves it."""
        total = prompt_tokens + output_tokens
        if self.problem:
            return self.problem
        if total > self.max_model_len:
            return Refusal("{:,} tokens exceed the context of {:,}", (total, self.max_model_len))
        if total > (held := self.held_tokens(total)):
            return Refusal("{:,} tokens exceed the KV pool of {:,}", (total, held))
        return None

    def held_tokens(self, each: int) -> int:
        """Tokens that a replica's KV pool holds if every request has `each` tokens. In hybrid models (full attention
        with windows or states) that is fewer for short requests than for the longest."""
        if self.pool is None or len(self.pool.groups) < 2 or not self.pool.blocks:
            return self.kv_tokens
        return int(self.kv_tokens * self.pool.held(each) / max(self.pool.tokens(self.max_model_len), 1))

    def config_for(self, each: int) -> SchedulerConfig:
        """The scheduler's limits for requests of `each` tokens."""
        held = self.held_tokens(each)
        if held == self.kv_tokens:
            return self.config
        blocks = max((held // self.config.block_size - 1) // self.layout.pipeline, 1)
        return replace(self.config, kv_blocks=blocks)


def server(
    name: str, engine: Engine, shape: ModelShape, gpu: Gpu, facts: Mapping[str, Any] | None = None
) -> PredictedServer:
    """The limits of an engine: as it reported (facts), else from its parameters, else vLLM's defaults.

    Raises ServebookError for a model that cannot be split over the number of GPUs.
    """
    if isinstance(engine, NaiveEngine):
        return _naive_server(name, shape, gpu)
    read = server_flags.with_flags(engine, shape, f"engines.{name}")
    given, shape = read.engine, _as_cached_on(gpu, read.shape)
    known = {**read.facts, **{k: v for k, v in (facts or {}).items() if v is not None}}
    gpu = replace(gpu, peer_access=bool(known.get("peer_access", gpu.peer_access)))
    if shape.quantization == "awq" and known.get("quantization") == awq_kernel.REQUESTED and not gpu.is_cpu:
        shape = replace(shape, quantization=awq_kernel.AWQ_GEMM)
    layout = Layout(
        given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size, given.enable_expert_parallel
    )
    layout.check(shape, f"engines.{name}")
    notes = [*shape.notes, *read.notes]
    if not isinstance(engine, VllmEngine):
        notes.append("predicted as if it were vLLM with these settings")
    context = int(known.get("max_model_len") or given.max_model_len or shape.max_context_tokens)
    budget, max_sequences = _step_limits(given, gpu, context, known)
    block = int(known.get("block_size") or (128 if gpu.is_cpu else 16))
    caching = bool(known.get("prefix_caching", given.prefix_caching))
    default_asynchronous = _asynchronous(known.get("version"), gpu)
    asynchronous = bool(known.get("async_scheduling", default_asynchronous) and layout.pipeline == 1)
    held, source = _kv_pool(given, shape, gpu, layout, budget, max_sequences, block, caching, asynchronous, known)
    if known.get("longest_that_fits"):
        context = max(1, min(context, held.tokens(context)))
    tokens = int(known["kv_cache_tokens"]) if "kv_cache_tokens" in known else held.tokens(context)
    source = "the engine's log" if "kv_cache_tokens" in known else source
    problem = None
    if budget < max_sequences and "max_num_batched_tokens" not in known:  # not checked if a running server reported it
        figures = budget, max_sequences
        problem = Refusal("max_num_batched_tokens {:,} is below max_num_seqs {:,}", figures, "vLLM refuses")
    elif tokens <= 0:
        problem = _too_big(shape, gpu, layout)
    elif context > tokens and "kv_cache_tokens" not in known:
        problem = Refusal("vLLM refuses max_model_len {:,} with a KV pool of {:,} tokens; lower it", (context, tokens))
    stages = layout.pipeline  # one group of requests per stage; the groups share max_num_seqs and the pool
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=max(max_sequences // stages, 1), block_size=block,
        kv_blocks=max((tokens // block - 1) // stages, 1), async_scheduling=asynchronous, prefix_caching=caching,
    )  # fmt: skip
    captured = _captured_tokens(given, gpu, budget, max_sequences, known)
    return PredictedServer(
        name, "vllm", shape, gpu, config, context, layout, tokens, source, problem, tuple(notes), captured, held,
        _gathers_prompts(known.get("version")),
    )  # fmt: skip


def _naive_server(name: str, shape: ModelShape, gpu: Gpu) -> PredictedServer:
    free = int(gpu.memory_bytes * 0.95 - shape.weight_bytes - NAIVE_NON_TORCH_GIB * GIB)
    each = max(3 * shape.kv_bytes_per_token, 1)  # old buffer, new buffer, copies of a growing cache
    tokens = max(0, free // each)
    problem = _too_big(shape, gpu, ALONE) if free <= 0 else None
    return PredictedServer(
        name, "naive", shape, gpu, SchedulerConfig(max_num_seqs=1), shape.max_context_tokens, ALONE, tokens,
        "memory left after the weights", problem,
    )  # fmt: skip


def _as_cached_on(gpu: Gpu, shape: ModelShape) -> ModelShape:
    """The model with its sparse latent vectors as vLLM 0.32 caches them on this card: plain fp8 instead of fp8_ds_mla
    on data centre Blackwell (there by default for some), fp8_ds_mla always on workstation Blackwell."""
    if gpu.generation not in ("blackwell", "blackwell_rtx") or not any(a.sparse_vectors for a in shape.attention):
        return shape
    if gpu.generation == "blackwell_rtx":
        return shape.with_fp8_kv()
    if shape.family in FP8_ON_BLACKWELL:
        shape = shape.with_fp8_kv()
    fp8 = shape.kv_bytes_per_element == 1
    kinds = tuple(replace(a, element_bytes=1) if fp8 and a.sparse_vectors else a for a in shape.attention)
    return replace(shape, attention=kinds)


def _asynchronous(version: Any, gpu: Gpu) -> bool:
    """Whether vLLM schedules a step while the one before runs, by default: from 0.14 on (vLLM's release notes)."""
    return not gpu.is_cpu and not before(version, ASYNCHRONOUS_FROM)


def _gathers_prompts(version: Any) -> bool:
    """Whether this version tokenizes prompts in batches; a version that is not known counts as new."""
    return before(version, GATHERING[1]) and not before(version, GATHERING[0])


def _step_limits(given: BatchingEngine, gpu: Gpu, context: int, known: Mapping[str, Any]) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs), with the defaults of vLLM 0.32's EngineArgs for those not given."""
    big = gpu.memory_gib >= BIG_GPU_GIB and "A100" not in gpu.name
    default = (16384 if gpu.memory_gib >= HUGE_GPU_GIB else 8192, 1024) if big else (2048, 128 if gpu.is_cpu else 256)
    budget = known.get("max_num_batched_tokens") or given.max_num_batched_tokens
    sequences = known.get("max_num_seqs") or given.max_num_seqs
    most = int(sequences or default[1])
    tokens = int(budget) if budget else min(default[0], most * context)
    return tokens, most if sequences else min(most, tokens)


def _captured_tokens(given: BatchingEngine, gpu: Gpu, budget: int, max_sequences: int, known: Mapping[str, Any]) -> int:
    """Tokens of the largest step with CUDA graphs; 0 in eager mode."""
    if known.get("cuda_graphs", not given.enforce_eager) is False:
        return 0
    # vLLM's rule for cudagraph_capture_sizes (config/vllm.py, 0.26 to 0.32)
    captured = min(2 * max_sequences, 1024 if gpu.generation == "blackwell" else 512, budget)
    return min(int(known.get("captured_tokens", captured)), budget)


def _too_big(shape: ModelShape, gpu: Gpu, layout: Layout) -> Refusal:
    each = " per GPU" if layout.gpus > layout.data else ""
    figures = layout.weight_bytes(shape) / GIB, gpu.memory_gib
    return Refusal(f"{{:.1f}} GiB of weights{each} leave no KV cache in {{:.1f}} GiB", figures)


def _kv_pool(
    given: BatchingEngine, shape: ModelShape, gpu: Gpu, layout: Layout, budget: int, max_sequences: int, block: int,
    caching: bool, asynchronous: bool, known: Mapping[str, Any],
) -> tuple[Pool, str]:  # fmt: skip
    """(the KV pool of one replica, the origin of its size). known: what flags say of it, in bytes or blocks."""
    kinds, hybrid = layout.stage(shape).attention, not gpu.is_cpu and known.get("hybrid_kv_cache", True)
    in_flight = budget * (2 if asynchronous else layout.pipeline)

    def of(available: float) -> Pool:
        return pool(kinds, available, block=block, in_flight=in_flight, hybrid=hybrid, prefix_caching=caching)

    if "kv_blocks" in known:
        return replace(of(0), blocks=int(known["kv_blocks"])), "num_gpu_blocks_override"
    if "kv_bytes" in known:
        return of(known["kv_bytes"]), "kv_cache_memory_bytes"
    if gpu.is_cpu:
        return of(given.cpu_kv_cache_gib * GIB), "cpu_kv_cache_gib"
    left = gpu.memory_bytes * given.gpu_memory_utilization - layout.weight_bytes(shape)
    left -= activation_bytes(shape, layout, budget, max_sequences)
    communicates = layout.gpus > (1 if shape.experts else layout.data)
    left -= (NON_TORCH_GIB + (NCCL_GIB if communicates else 0.0)) * GIB
    return of(max(left, 0.0)), "memory left after weights and estimated activations"


def activation_bytes(shape: ModelShape, layout: Layout, budget: int, max_sequences: int) -> float:
    """Peak bytes of activations in vLLM's profiling pass: logits for max_num_seqs tokens in the run's dtype and in
    fp32; for max_num_batched_tokens tokens the hidden states, the MLP's intermediate results, and copies routed to
    experts. H200 runs of 2026-11-29 measured 1.04, 1.05 and 1.19 GiB, against 1.05, 1.05 and 1.01 from this formula."""
    rank = layout.rank(shape)
    logits = min(max_sequences, budget) * shape.vocab * (shape.element_bytes + 4)
    inner = 2 * rank.intermediate
    if shape.experts and rank.experts:
        wide = max(2 * rank.experts.intermediate // (1 if layout.expert else layout.tensor * layout.data), shape.hidden)
        inner = max(inner, shape.experts.per_token * (wide + rank.experts.intermediate))
    return logits + budget * (inner + 4 * shape.hidden) * shape.element_bytes
