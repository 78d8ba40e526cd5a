"""One server as the predictor sees it: limits and KV pool, from what it said, its parameters, or the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.params import BatchingEngine, Engine, NaiveEngine, VllmEngine
from ..hardware.catalog import GIB, Gpu
from ..model.reader import ModelShape
from .parallel import ALONE, Layout
from .scheduler import SchedulerConfig
from .steptime import NaiveTimes, VllmTimes

Times = VllmTimes | NaiveTimes
BIG_GPU_GIB, HUGE_GPU_GIB = 70, 160  # vLLM's lines for larger default budgets (the A100 excepted)
NON_TORCH_GIB = 0.9  # CUDA context, NCCL and cuBLAS workspaces outside PyTorch


@dataclass(frozen=True)
class Server:
    """An engine's limits. problem: why it cannot serve at all, None where it can. config: of one group of requests that
    steps by itself (see parallel); kv_tokens: of one replica, as its log tells."""

    name: str
    kind: str
    shape: ModelShape
    gpu: Gpu
    config: SchedulerConfig
    max_model_len: int
    layout: Layout = ALONE
    kv_tokens: int = 0
    kv_source: str = ""
    problem: str | None = None
    notes: tuple[str, ...] = ()
    captured_tokens: int = 512  # the largest step with CUDA graphs, 0: eager

    @property
    def naive(self) -> bool:
        return self.kind == "naive"

    def times(self, constants: Mapping[str, float]) -> Times:
        if self.naive:
            return NaiveTimes(self.shape, self.gpu, constants)
        return VllmTimes(self.shape, self.gpu, constants, self.layout, self.captured_tokens)

    def refuses(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Why such a request is not served, None where it is."""
        total = prompt_tokens + output_tokens
        if self.problem:
            return self.problem
        if total > self.max_model_len:
            return f"does not fit: {total:,} tokens exceed the context of {self.max_model_len:,}"
        if total > self.kv_tokens:
            return f"does not fit: {total:,} tokens exceed the KV pool of {self.kv_tokens:,}"
        return None


def server(name: str, engine: Engine, shape: ModelShape, gpu: Gpu, facts: Mapping[str, Any] | None = None) -> Server:
    """The limits of an engine: what it said of itself where facts hold it, else parameters, else vLLM's defaults.

    Raises ServebookError for a model that cannot be split over so many GPUs.
    """
    known = {k: v for k, v in (facts or {}).items() if v is not None}
    if isinstance(engine, NaiveEngine):
        free = int(gpu.memory_bytes * 0.95 - shape.weight_bytes - NON_TORCH_GIB * GIB)
        tokens = max(0, free // (3 * shape.kv_bytes_per_token))  # old buffer, new buffer, copies of a growing cache
        problem = _too_big(shape, gpu, ALONE) if free <= 0 else None
        return Server(
            name, "naive", shape, gpu, SchedulerConfig(max_num_seqs=1), shape.max_context_tokens, ALONE, tokens,
            "memory left beside the weights", problem,
        )  # fmt: skip
    given = engine
    layout = Layout(given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size)
    layout.check(shape, f"engines.{name}")
    notes = []
    if not isinstance(engine, VllmEngine):
        notes.append("predicted as if it were vLLM with these settings")
    big = gpu.memory_gib >= BIG_GPU_GIB and "A100" not in gpu.name
    default = (16384 if gpu.memory_gib >= HUGE_GPU_GIB else 8192, 1024) if big else (2048, 128 if gpu.is_cpu else 256)
    budget = known.get("max_num_batched_tokens") or given.max_num_batched_tokens or default[0]
    seats = known.get("max_num_seqs") or given.max_num_seqs or default[1]
    budget = max(int(budget), int(seats)) if "max_num_batched_tokens" not in known else int(budget)
    context = int(known.get("max_model_len") or given.max_model_len or shape.max_context_tokens)
    block = int(known.get("block_size") or (128 if gpu.is_cpu else 16))
    tokens, source = _kv_pool(given, shape, gpu, layout, budget, int(seats), known)
    problem = None
    if tokens <= 0:
        problem = _too_big(shape, gpu, layout)
    elif context > tokens and "kv_cache_tokens" not in known:
        problem = f"does not fit: vLLM refuses a context of {context:,} over a KV pool of {tokens:,}; set max_model_len"
    caching = known.get("prefix_caching", given.prefix_caching)
    stages = layout.pipeline  # their groups share the seats and the pool; each waits for its own batch to come through
    asynchronous = known.get("async_scheduling", not gpu.is_cpu) and stages == 1
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=max(int(seats) // stages, 1), block_size=block,
        kv_blocks=max((tokens // block - 1) // stages, 1), async_scheduling=bool(asynchronous),
        prefix_caching=bool(caching),
    )  # fmt: skip
    # vLLM's rule for cudagraph_capture_sizes (config/vllm.py, 0.26 to 0.32)
    captured = min(2 * int(seats), 1024 if gpu.generation == "blackwell" else 512, budget)
    if known.get("cuda_graphs", not given.enforce_eager) is False:
        captured = 0
    return Server(
        name, "vllm", shape, gpu, config, context, layout, tokens, source, problem, tuple(notes), captured
    )  # fmt: skip


def _too_big(shape: ModelShape, gpu: Gpu, layout: Layout) -> str:
    size = layout.weight_bytes(shape) / GIB
    each = " a GPU" if layout.gpus > layout.data else ""
    return f"does not fit: {size:.1f} GiB of weights{each} beside a KV cache in {gpu.memory_gib:.1f} GiB ({gpu.name})"


def _kv_pool(
    given: BatchingEngine,
    shape: ModelShape,
    gpu: Gpu,
    layout: Layout,
    budget: int,
    seats: int,
    known: Mapping[str, Any],
) -> tuple[int, str]:
    """(tokens of one replica, where the figure comes from)"""
    if "kv_cache_tokens" in known:
        return int(known["kv_cache_tokens"]), "the engine's log"
    if gpu.is_cpu:
        return layout.kv_tokens(shape, given.cpu_kv_cache_gib * GIB), "cpu_kv_cache_gib"
    # the dummy pass that vLLM measures: MLP and residual buffers of a full budget, logits of every seat in fp32
    rank = layout.rank(shape)
    activation = budget * (3 * rank.intermediate + 4 * shape.hidden) * shape.element_bytes
    activation += min(seats, budget) * shape.vocab * 4 * 3
    left = gpu.memory_bytes * given.gpu_memory_utilization - activation - NON_TORCH_GIB * GIB
    tokens = layout.kv_tokens(shape, left - layout.weight_bytes(shape))
    return tokens, "memory left by weights and a guess of activations"
