"""servebook's scheduler against vLLM's own `Scheduler` class, driven with a fake executor: the same tokens for the same
requests in every step, through budgets, seats, tiny block pools that preempt, prefix caching, sync and async."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import deque
from types import SimpleNamespace

import pytest
from servebook.predictor.scheduler import Request, Scheduler, SchedulerConfig

pytestmark = pytest.mark.engine
WORKLOADS = 400


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


def drive(work, schedule, update, add, has_work, depth):
    """The engine core's loop (`step` and `step_with_batch_queue`), counted in iterations instead of seconds."""
    arrivals, queue, trace = deque(work.requests), deque(), []
    for iteration in range(200_000):
        while arrivals and arrivals[0][1] <= iteration:
            add(arrivals.popleft())
        if has_work():
            step, tokens = schedule()
            if tokens:
                trace.append(tokens)
            queue.append(step)
            if len(queue) < depth:
                continue
        if queue:
            update(queue.popleft())
        elif not arrivals:
            return trace
    raise AssertionError("never finished")


@pytest.fixture(scope="module")
def vllm_parts(tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for name in ("torchvision", "torchaudio", "torchcodec"):
        try:
            importlib.import_module(name)
        except Exception:  # a build that does not match this torch: text models do without
            sys.modules[name] = None
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    folder = tmp_path_factory.mktemp("model")
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 8192, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")

    def run(work):
        scheduler_config = SchedulerConfig(
            max_num_seqs=work.seats, max_num_batched_tokens=work.budget, max_model_len=8192,
            long_prefill_token_threshold=work.threshold, async_scheduling=work.asynchronous,
            enable_chunked_prefill=True, is_encoder_decoder=False,
        )  # fmt: skip
        cache = CacheConfig(block_size=16, gpu_memory_utilization=0.9, enable_prefix_caching=work.caching)
        cache.num_gpu_blocks = work.blocks + 1  # one is the null block
        config = VllmConfig(model_config=model, scheduler_config=scheduler_config, cache_config=cache)
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
        kv = KVCacheConfig(
            num_blocks=work.blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        cls = AsyncScheduler if work.asynchronous else Scheduler
        scheduler = cls(
            vllm_config=config, kv_cache_config=kv, block_size=16,
            structured_output_manager=StructuredOutputManager(config), log_stats=True,
        )  # fmt: skip
        hits: dict[int, int] = {}
        live: dict[str, Request] = {}

        def add(r):
            i, _, prompt, output = r
            tokens = [1 + (i * 31 + j * 7) % 400 + 100_000 * i for j in range(prompt)]
            if work.prefixes:
                shared = min(prompt, 48)
                tokens[:shared] = [500_000 + (i % work.prefixes) * 1000 + j for j in range(shared)]
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            sampling.update_from_generation_config({}, eos_token_id=None)
            live[str(i)] = Request(str(i), tokens, sampling, None, block_hasher=hasher if work.caching else None)
            scheduler.add_request(live[str(i)])

        def schedule():
            output = scheduler.schedule()
            for new in output.scheduled_new_reqs:
                hits.setdefault(int(new.req_id), new.num_computed_tokens)
            samples = {
                i: scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_tokens
                for i in output.num_scheduled_tokens
            }
            return (output, samples), {int(i): n for i, n in output.num_scheduled_tokens.items()}

        def update(item):
            output, samples = item
            ids = list(output.num_scheduled_tokens)
            scheduler.update_from_output(
                output,
                ModelRunnerOutput(
                    req_ids=ids, req_id_to_index={i: k for k, i in enumerate(ids)},
                    sampled_token_ids=[[7] if samples[i] else [] for i in ids], logprobs=None,
                    prompt_logprobs_dict={}, pooler_output=[],
                ),
            )  # fmt: skip

        has_work = scheduler.has_unfinished_requests
        trace = drive(work, schedule, update, add, has_work, 2 if work.asynchronous else 1)
        return trace, hits, sum(r.num_preemptions for r in live.values())

    return run


def ours(work, hits):
    config = SchedulerConfig(
        max_num_batched_tokens=work.budget, max_num_seqs=work.seats, kv_blocks=work.blocks,
        long_prefill_token_threshold=work.threshold, async_scheduling=work.asynchronous, prefix_caching=work.caching,
    )  # fmt: skip
    scheduler = Scheduler(config, trace=True)

    def schedule():
        step = scheduler.schedule()
        return step, step.tokens

    trace = drive(
        work, schedule, scheduler.update,
        lambda r: scheduler.add(Request(r[0], r[2], r[3], hits.get(r[0], 0))),
        lambda: scheduler.has_work, config.depth,
    )  # fmt: skip
    assert scheduler.pool.free == work.blocks and not scheduler.decodes and not scheduler.running
    return trace, scheduler.preemptions


def test_same_tokens_per_request_per_step_as_vllm(vllm_parts):
    preempting = cached = steps = 0
    for seed in range(WORKLOADS):
        work = workload(seed)
        theirs, hits, preemptions = vllm_parts(work)
        mine, my_preemptions = ours(work, hits)
        for at, (a, b) in enumerate(zip(theirs, mine, strict=False)):
            assert a == b, f"workload {seed}, step {at}: vLLM {a}, servebook {b} ({work})"
        assert len(theirs) == len(mine), f"workload {seed}: {len(theirs)} steps, ours {len(mine)}"
        assert preemptions == my_preemptions, f"workload {seed}"
        preempting += preemptions > 0
        cached += any(hits.values())
        steps += len(theirs)
    assert preempting >= 40 and cached >= 10 and steps > 10_000, (preempting, cached, steps)
