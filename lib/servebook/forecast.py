"""One server as the predictor sees it (limits, KV pool, step times), and one point forecast by simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import simulation
from .hardware import GIB, Gpu
from .model import ModelShape
from .params import BatchingEngine, Engine, NaiveEngine, VllmEngine
from .params import Load as LoadParams
from .points import PointSpec
from .scheduler import SchedulerConfig
from .simulation import Prompt, Result
from .steptime import HOST_NOISE, NaiveTimes, VllmTimes

Times = VllmTimes | NaiveTimes
NARROW_E2E, NARROW_TTFT = 0.02, 0.05  # where the load client finds an interval narrow enough to stop
BIG_GPU_GIB, HUGE_GPU_GIB = 70, 160  # vLLM's lines for larger default budgets (the A100 excepted)
NON_TORCH_GIB = 0.9  # CUDA context, NCCL and cuBLAS workspaces outside PyTorch


@dataclass(frozen=True)
class Server:
    """An engine's limits. problem: why it cannot serve at all, None where it can."""

    name: str
    kind: str
    shape: ModelShape
    gpu: Gpu
    config: SchedulerConfig
    max_model_len: int
    gpus: int = 1
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
            return NaiveTimes(self.shape, self.gpu, constants, self.gpus)
        return VllmTimes(self.shape, self.gpu, constants, self.gpus, self.captured_tokens)

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
    """The limits of an engine: what it said of itself where facts hold it, else parameters, else vLLM's defaults."""
    known = {k: v for k, v in (facts or {}).items() if v is not None}
    if isinstance(engine, NaiveEngine):
        free = int(gpu.memory_bytes * 0.95 - shape.weight_bytes - NON_TORCH_GIB * GIB)
        tokens = max(0, free // (3 * shape.kv_bytes_per_token))  # old buffer, new buffer, copies of a growing cache
        problem = _too_big(shape, gpu, 1) if free <= 0 else None
        return Server(
            name, "naive", shape, gpu, SchedulerConfig(max_num_seqs=1), shape.max_context_tokens, 1, tokens,
            "memory left beside the weights", problem,
        )  # fmt: skip
    given = engine
    gpus = given.tensor_parallel_size * given.pipeline_parallel_size
    notes = []
    if gpus > 1:
        notes.append(f"{gpus} GPUs are taken as one that is {gpus} times as fast: their communication is left out")
    if given.data_parallel_size > 1:
        notes.append("data parallel replicas are not modelled: figures are one replica's")
    if not isinstance(engine, VllmEngine):
        notes.append("predicted as if it were vLLM with these settings")
    big = gpu.memory_gib >= BIG_GPU_GIB and "A100" not in gpu.name
    default = (16384 if gpu.memory_gib >= HUGE_GPU_GIB else 8192, 1024) if big else (2048, 128 if gpu.is_cpu else 256)
    budget = known.get("max_num_batched_tokens") or given.max_num_batched_tokens or default[0]
    seats = known.get("max_num_seqs") or given.max_num_seqs or default[1]
    budget = max(int(budget), int(seats)) if "max_num_batched_tokens" not in known else int(budget)
    context = int(known.get("max_model_len") or given.max_model_len or shape.max_context_tokens)
    block = int(known.get("block_size") or (128 if gpu.is_cpu else 16))
    tokens, source = _kv_pool(given, shape, gpu, gpus, budget, int(seats), known)
    problem = None
    if tokens <= 0:
        problem = _too_big(shape, gpu, gpus)
    elif context > tokens and "kv_cache_tokens" not in known:
        problem = f"does not fit: vLLM refuses a context of {context:,} over a KV pool of {tokens:,}; set max_model_len"
    caching = known.get("prefix_caching", given.prefix_caching)
    asynchronous = known.get("async_scheduling", not gpu.is_cpu)
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=int(seats), kv_blocks=max(tokens // block - 1, 1), block_size=block,
        async_scheduling=bool(asynchronous), prefix_caching=bool(caching),
    )  # fmt: skip
    # vLLM's rule for cudagraph_capture_sizes (config/vllm.py, 0.26 to 0.32)
    captured = min(2 * int(seats), 1024 if gpu.generation == "blackwell" else 512, budget)
    if known.get("cuda_graphs", not given.enforce_eager) is False:
        captured = 0
    return Server(
        name, "vllm", shape, gpu, config, context, gpus, tokens, source, problem, tuple(notes), captured
    )  # fmt: skip


def _too_big(shape: ModelShape, gpu: Gpu, gpus: int) -> str:
    size, has = shape.weight_bytes / GIB, gpus * gpu.memory_gib
    return f"does not fit: {size:.1f} GiB of weights beside a KV cache in {has:.1f} GiB ({gpu.name})"


def _kv_pool(
    given: BatchingEngine, shape: ModelShape, gpu: Gpu, gpus: int, budget: int, seats: int, known: Mapping[str, Any]
) -> tuple[int, str]:
    """(tokens, where the figure comes from)"""
    if "kv_cache_tokens" in known:
        return int(known["kv_cache_tokens"]), "the engine's log"
    if gpu.is_cpu:
        return int(given.cpu_kv_cache_gib * GIB / shape.kv_bytes_per_token), "cpu_kv_cache_gib"
    # the dummy pass that vLLM measures: MLP and residual buffers of a full budget, logits of every seat in fp32
    activation = budget * (3 * shape.intermediate + 4 * shape.hidden) * shape.element_bytes / given.tensor_parallel_size
    activation += min(seats, budget) * shape.vocab * 4 * 3
    per_gpu = gpu.memory_bytes * given.gpu_memory_utilization - activation - NON_TORCH_GIB * GIB
    tokens = int((per_gpu * gpus - shape.weight_bytes) // shape.kv_bytes_per_token)
    return tokens, "memory left by weights and a guess of activations"


@dataclass(frozen=True)
class Outcome:
    """What a simulated point shows. Seconds, tokens/s and requests/s; window_s: until the client stops."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    request_rate_per_s: float
    output_tok_per_s: float
    decode_tok_per_s: float
    running_mean: float
    ttft_p99_s: float
    window_s: float
    requests: float  # that the client would measure
    measured: int  # that were simulated
    preemptions: int

    METRICS = ("ttft_s", "tpot_s", "e2e_s", "output_tok_per_s", "decode_tok_per_s", "request_rate_per_s")


@dataclass(frozen=True)
class Scenario:
    """A point's load on a server, ready to simulate with any constants."""

    server: Server
    spec: PointSpec
    load: LoadParams
    hit_share: float = 0.0  # share of prompts whose tokens are already in the prefix cache
    running_gauge: bool = False  # decode rate by vLLM's running gauge, as in the posts; else in flight − waiting gauge
    cached_prompts: int = 0  # instead of hit_share: the first so many prompts are there, and none after them

    def prompts(self, seed: int) -> Sequence[Prompt]:
        p, o = self.spec.prompt_tokens, self.spec.output_tokens
        if not self.server.config.prefix_caching or not (self.hit_share or self.cached_prompts):
            return [Prompt(p, o)]
        if self.cached_prompts:
            return [Prompt(p, o, p)] * self.cached_prompts + [Prompt(p, o)] * 4096
        rng = random.Random(f"hits-{seed}")
        return [Prompt(p, o, p if rng.random() < self.hit_share else 0) for _ in range(4096)]

    def clients(self, seed: int, requests: int | None = None) -> simulation.Load:
        """The load as the client sends it; `requests`: how many to measure, else as many as the point may at most."""
        spec, load = self.spec, self.load
        c = spec.concurrency or 1
        least = max(load.min_requests, 2 * c)
        if spec.rate_per_s is not None:
            count, warmup = requests or load.max_requests, load.warmup_requests
            enough = warmup + 2 * count + 200  # arrivals go on until the last measured request has ended
            times = simulation.arrivals(spec.arrivals, spec.rate_per_s, enough, seed, spec.gamma_shape)
            return simulation.Load(self.prompts(seed), arrivals_s=times, warmup=warmup, requests=count, seed=seed)
        if spec.fixed_requests is not None:
            warmup, count = max(c, min(3, load.warmup_requests)), spec.fixed_requests
        else:
            warmup, count = max(c, load.warmup_requests), max(load.max_requests, 2 * least)
        return simulation.Load(
            self.prompts(seed), concurrency=c, jitter_s=load.jitter_s, warmup=warmup, requests=requests or count,
            seed=seed,
        )  # fmt: skip

    def simulate(self, times: Times, seed: int = 1, requests: int | None = None, *, log: bool = False) -> Result:
        clients = self.clients(seed, requests)
        if isinstance(times, NaiveTimes):
            return simulation.simulate_naive(times, clients)
        return simulation.simulate(self.server.config, times, clients, log=log)

    def outcome(self, times: Times, seed: int = 1, requests: int | None = None) -> Outcome:
        return self.summarize(self.simulate(times, seed, requests), times)

    def summarize(self, result: Result, times: Times | None = None) -> Outcome:
        ttft, tpot = result.mean("ttft_s"), result.mean("tpot_s")
        rate = len(result.requests) / result.seconds if result.seconds > 0 else math.nan
        tokens = result.output_tokens / result.seconds if result.seconds > 0 else math.nan
        tpot = 0.0 if math.isnan(tpot) else tpot
        in_flight = rate * result.mean("e2e_s")
        running = result.running_mean if self.running_gauge else in_flight - result.waiting_mean
        running = 1.0 if self.server.naive else running
        firsts = sorted(r.first_s - r.sent_s for r in result.requests)
        return Outcome(
            ttft, tpot, result.mean("e2e_s"), rate, tokens, running / tpot if tpot else 0.0,
            running, firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))] if firsts else math.nan,
            *self._window(result, times), len(result.requests), result.preemptions,
        )  # fmt: skip

    def _window(self, result: Result, times: Times | None) -> tuple[float, float]:
        """(seconds until the client stops, requests measured until then): enough requests and seconds and narrow
        intervals of mean TTFT and latency, or the most of either. Intervals as wide as those of the simulated requests,
        and the host's noise where launches decide."""
        spec, load, n = self.spec, self.load, len(result.requests)
        if spec.fixed_requests is not None or not n or result.seconds <= 0:
            return min(result.wall_s, load.max_seconds), n
        c = spec.concurrency or 1
        first, token = (False, False)
        if times is not None:
            first, token = times.launch_bound(spec.prompt_tokens, self.server.config.max_num_batched_tokens)
        needed = 0.0
        for of, narrow, bound in (("ttft_s", NARROW_TTFT, first), ("e2e_s", NARROW_E2E, token)):
            values = [simulation.value(r, of) or 0.0 for r in result.requests]
            mean = sum(values) / n
            variance = sum((v - mean) ** 2 for v in values) / max(n - 1, 1) + (HOST_NOISE * bound * mean) ** 2
            needed = max(needed, variance * (1.96 / (narrow * mean)) ** 2)
        rate = n / result.seconds
        least = max(load.min_requests, 2 * c)
        enough = min(max(needed, least, load.min_seconds * rate), max(load.max_requests, 2 * least))
        drain = result.mean("e2e_s") if spec.rate_per_s is not None else 0.0
        count = min(whole_rounds(math.ceil(enough), c), max(rate * (load.max_seconds - drain - result.window[0]), 0.0))
        return min(result.window[0] + count / rate + drain, load.max_seconds), count


def whole_rounds(least: int, concurrency: int | None) -> int:
    """At least so many requests, in whole rounds of all clients: clients in lockstep end together, and a window that
    ends inside a round counts its time but not its requests."""
    c = concurrency or 1
    return -(-least // c) * c


def average(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of several seeds' outcomes."""
    n = len(outcomes)
    names = [f for f in Outcome.__dataclass_fields__ if f not in ("measured", "preemptions")]
    mean = {f: sum(getattr(o, f) for o in outcomes) / n for f in names}
    counts = {f: round(sum(getattr(o, f) for o in outcomes) / n) for f in ("measured", "preemptions")}
    return replace(outcomes[0], **mean, **counts)


def capacity_per_s(
    server: Server, times: Times, prompt_tokens: int, output_tokens: int, *, seed: int = 1, most: int = 256
) -> float:
    """The request rate at saturation: a closed loop with as many clients as have a seat and KV (`most` at most)."""
    load = LoadParams(jitter_s=0.0, warmup_requests=0)
    seats = 1 if server.naive else server.config.max_num_seqs
    held = max(1, server.kv_tokens // (prompt_tokens + output_tokens))
    c = 1 if server.naive else max(1, min(seats, held, most))
    spec = PointSpec("", server.name, "", "concurrency", prompt_tokens, output_tokens, concurrency=c)
    return Scenario(server, spec, load).outcome(times, seed, requests=max(100, 3 * c)).request_rate_per_s
