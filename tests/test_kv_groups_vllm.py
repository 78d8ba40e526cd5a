"""The KV pool held against vLLM's own classes: groups of layers, bytes a block, tokens and concurrency."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from servebook.model.reader import from_config
from servebook.model.shape import AttentionLayers
from servebook.predictor import kv_groups
from test_published_configs import files, shape

pytest.importorskip("vllm")
MODELS = [
    "Qwen--Qwen3-30B-A3B", "google--gemma-3-27b-it-full", "google--gemma-3-4b-it", "google--gemma-2-9b",
    "openai--gpt-oss-20b", "edge--mistral-no-window-key", "deepseek-ai--DeepSeek-V3", "InferSim--qwen3-next-80B-A3B",
    "Qwen--Qwen3.5-27B", "google--gemma-4-26B-A4B", "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct", "XiaomiMiMo--MiMo-V2-Flash", "deepseek-ai--DeepSeek-V3.2",
    "nvidia--Qwen3.6-35B-A3B-NVFP4", "nvidia--Kimi-K2.5-NVFP4", "nvidia--GLM-5.2-NVFP4",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "nvidia--Gemma-4-31B-IT-NVFP4", "nvidia--Nemotron-H-56B-Base-8K",
]  # fmt: skip


def specs(kinds: tuple[AttentionLayers, ...], block: int, page: int) -> dict[str, Any]:
    """A vLLM KVCacheSpec for every layer. page: of a layer's KV, which states are padded to."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    out: dict[str, Any] = {}
    for n, a in enumerate(kinds):
        stored = torch.float8_e4m3fn if a.element_bytes == 1 else torch.bfloat16
        common: dict[str, Any] = {"block_size": block, "dtype": stored}
        if a.kind == "state":
            spec: Any = vllm.MambaSpec(
                shapes=((a.state_bytes,),), dtypes=(torch.int8,), block_size=block, page_size_padded=page,
                mamba_cache_mode="align",
            )  # fmt: skip
        elif a.kind == "latent":
            packed = {"dtype": torch.uint8, "state_content_bytes": 656} if 1 < a.element_bytes < 2 else {}
            spec = vllm.MLAAttentionSpec(num_kv_heads=1, head_size=a.elements, **common | packed)
        elif a.kind == "indexer":
            spec = vllm.MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=132, dtype=torch.uint8)
        else:
            common |= {"num_kv_heads": a.kv_heads, "head_size": a.key_dim, "head_size_v": a.value_dim}
            if a.kind == "sliding":
                spec = vllm.SlidingWindowSpec(sliding_window=a.window, **common)
            elif a.kind == "chunked":
                spec = vllm.ChunkedLocalAttentionSpec(attention_chunk_size=a.window, **common)
            else:
                spec = vllm.FullAttentionSpec(**common)
        out |= {f"{n}.{i}": spec for i in range(a.layers)}
    return out


def _config(context: int, in_flight: int, layout: Any, hybrid: bool = True) -> Any:
    """What vLLM's grouping reads of its configuration."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None, mamba_cache_mode="align",
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(max_model_len=context, hf_config=SimpleNamespace(model_type="x")),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None, num_speculative_tokens=0, max_in_flight_tokens=in_flight,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_pools_are_those_of_vllms_classes(name: str) -> None:
    from vllm.v1.core import kv_cache_utils as vllm
    from vllm.v1.kv_cache_layout import KVCacheLayout

    kinds, context, in_flight, memory = shape(name).attention, 32_768, 2 * 2048, 20 * 10**9
    ours = kv_groups.pool(kinds, memory, in_flight=in_flight)
    block = min(g.block for g in ours.groups) if any(a.kind == "state" for a in kinds) else 16
    page = max(g.page for g in ours.groups)
    config = _config(context, in_flight, KVCacheLayout.LBHNC, hybrid=all(a.kind != "chunked" for a in kinds))
    groups = vllm.get_kv_cache_groups(config, specs(kinds, block, page))
    theirs = vllm.get_kv_cache_config_from_groups(config, groups, memory)
    tokens, concurrency = vllm.get_kv_cache_capacity(config, theirs)
    assert (ours.blocks, ours.tokens(context)) == (theirs.num_blocks, tokens)
    assert ours.concurrency(context) == pytest.approx(concurrency)


def test_a_sparse_latent_cache_in_fp8_has_deepseeks_format() -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layer: Any = SimpleNamespace(
        kv_cache_dtype="fp8_ds_mla", head_size=576, sliding_window=None, indexer=None,
        non_causal_multi_token_decode=False,
    )  # fmt: skip
    run: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=64), model_config=SimpleNamespace(dtype=_uint8()),
        attention_config=SimpleNamespace(use_non_causal=False),
    )  # fmt: skip
    page = MLAAttention.get_kv_cache_spec(layer, run).page_size_bytes
    for s in (shape("nvidia--DeepSeek-V3.2-NVFP4"), shape("deepseek-ai--DeepSeek-V3.2").with_fp8_kv()):
        assert {a.token_bytes for a in s.attention if a.kind == "latent"} == {page / 64}


def _v4_specs(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's own DeepSeek-V4 modules say of their caches, layer by layer, in the order in which they are made."""
    from vllm.models.deepseek_v4 import attention, compressor
    from vllm.v1.attention.backends.mla import sparse_swa

    cache: Any = SimpleNamespace(block_size=256, cache_dtype="fp8_ds_mla")
    run: Any = SimpleNamespace(cache_config=cache)
    heads, out = {"": 512, ".indexer": 128}, {}
    for i, rate in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        own: Any = SimpleNamespace(
            kv_cache_dtype="fp8_ds_mla", head_dim=512, compress_ratio=rate, cache_config=cache, block_size=64,
            dtype=_uint8(), window_size=128, packed_bytes_per_token=584, packed_page_alignment=576,
            bounded_replay=False,
        )  # fmt: skip
        out[f"{i}.swa"] = sparse_swa.DeepseekV4SWACache.get_kv_cache_spec(own, run)
        if rate:
            out[f"{i}"] = attention.DeepseekV4Attention.get_kv_cache_spec(own, run)
        if rate == 4:
            own.head_dim = 132
            out[f"{i}.index"] = attention.DeepseekV4IndexerCache.get_kv_cache_spec(own, run)
        for part, head in heads.items():
            if rate == 4 or (rate and not part):
                overlap = 1 + (rate == 4)
                own = SimpleNamespace(
                    block_size=4 if rate == 4 else 8, state_dim=2 * overlap * head, dtype=_float32(),
                    sliding_window=overlap * rate,
                )  # fmt: skip
                out[f"{i}{part}.states"] = compressor.CompressorStateCache.get_kv_cache_spec(own, run)
    return out


def _uint8() -> Any:
    import torch

    return torch.uint8


def _float32() -> Any:
    import torch

    return torch.float32


@pytest.mark.parametrize("name", ["deepseek-ai--DeepSeek-V4-Flash", "sgl-project--DeepSeek-V4-Pro-FP8"])
def test_compressed_caches_are_those_of_vllms_modules(name: str) -> None:
    from vllm.v1.core import kv_cache_utils as vllm
    from vllm.v1.kv_cache_layout import KVCacheLayout

    context, in_flight, memory = 65_536, 2 * 8192, 60 * 10**9
    ours = kv_groups.pool(shape(name).attention, memory, in_flight=in_flight)
    config = _config(context, in_flight, KVCacheLayout.BLHNC)
    groups = vllm.get_kv_cache_groups(config, _v4_specs(files()[name]["config.json"]))
    theirs = vllm.get_kv_cache_config_from_groups(config, groups, memory)
    tokens, concurrency = vllm.get_kv_cache_capacity(config, theirs)
    assert (ours.blocks, ours.tokens(context)) == (theirs.num_blocks, tokens)
    assert ours.concurrency(context) == pytest.approx(concurrency)


def _mamba2(heads: int, head: int, groups: int, state: int) -> dict[str, Any]:
    return {
        "intermediate_size": heads * head, "n_groups": groups, "num_heads": heads, "head_dim": head,
        "state_size": state, "conv_kernel": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "calculator", "arguments"),
    [
        ({"model_type": "mamba", "hidden_size": 2560, "state_size": 16}, "mamba1_state_shape",
         {"intermediate_size": 5120, "state_size": 16, "conv_kernel": 4}),
        ({"model_type": "jamba", "hidden_size": 4096, "mamba_expand": 2}, "mamba1_state_shape",
         {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4}),
        ({"model_type": "mamba2", "n_groups": 8}, "mamba2_state_shape", _mamba2(128, 64, 8, 128)),
        ({"model_type": "bamba"}, "mamba2_state_shape", _mamba2(128, 64, 1, 256)),
        ({"model_type": "falcon_h1", "hidden_size": 3072, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
          "mamba_d_head": 128, "mamba_d_state": 256}, "mamba2_state_shape", _mamba2(24, 128, 1, 256)),
        ({"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 2, "conv_L_cache": 3,
          "layer_types": ["conv", "full_attention"]}, "short_conv_state_shape",
         {"intermediate_size": 2048, "conv_kernel": 3}),
    ],
)  # fmt: skip
def test_states_are_as_large_as_vllm_keeps_them(
    config: dict[str, Any], calculator: str, arguments: dict[str, int]
) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shapes = getattr(MambaStateShapeCalculator, calculator)(tp_world_size=1, **arguments)
    kept = {a.state_bytes for a in from_config(config, name="x").attention if a.kind == "state"}
    assert kept == {2 * sum(math.prod(s) for s in shapes)}
