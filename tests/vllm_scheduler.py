"""vLLM's own `Scheduler`, driven with a fake executor: what tests compare servebook's with."""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace

import pytest


def vllm_runner(folder):
    """A function from a workload's settings (seats, budget, blocks, threshold, asynchronous, caching) to a scheduler:
    add(id, tokens, output), schedule() -> (step, tokens by id), update(step) -> ids that ended, has_work,
    preemptions(), and hits (computed tokens of each admission that was none after a preemption). folder: for a config.
    """
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

    shape = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 8192, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")

    def start(work):
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
        hits: list[int] = []
        everyone: list[Request] = []

        def add(i, tokens, output):
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            sampling.update_from_generation_config({}, eos_token_id=None)
            everyone.append(
                Request(str(i), list(tokens), sampling, None, block_hasher=hasher if work.caching else None)
            )
            scheduler.add_request(everyone[-1])

        def schedule():
            output = scheduler.schedule()
            hits.extend(new.num_computed_tokens for new in output.scheduled_new_reqs)
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
                    sampled_token_ids=[[1_000_000 + int(i)] if samples[i] else [] for i in ids], logprobs=None,
                    prompt_logprobs_dict={}, pooler_output=[],
                ),
            )  # fmt: skip
            return [int(i) for i in ids if i not in scheduler.requests]

        return SimpleNamespace(
            add=add, schedule=schedule, update=update, has_work=scheduler.has_unfinished_requests, hits=hits,
            preemptions=lambda: sum(r.num_preemptions for r in everyone),
        )  # fmt: skip

    return start
