"""A model's memory needs: its sizes, its KV pool on a GPU, and the smallest number of each GPU that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import ServebookError
from ..config.engines import VllmEngine
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape
from .server_limits import PredictedServer, server

SIZES = (1, 2, 4, 8, 16)  # tensor-parallel sizes to try


def figures(shape: ModelShape) -> dict[str, Any]:
    """A model's counts and sizes, independent of the GPU."""
    return {
        "model": shape.name,
        "architecture": shape.family,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "layers": shape.layers,
        "attention": [
            {"kind": a.kind, "layers": a.layers, "kv_heads": a.kv_heads, "window": a.window} for a in shape.attention
        ],
        "experts": shape.experts and {"count": shape.experts.count, "per_token": shape.experts.per_token},
        "dtype": shape.dtype,
        "quantization": shape.quantization,
        "weight_bytes": shape.weight_bytes,
        "tower_bytes_beside": shape.tower_bytes_beside,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "state_bytes_per_sequence": shape.state_bytes_per_sequence,
        "max_context_tokens": shape.max_context_tokens,
        "notes": list(shape.notes),
    }


def on_card(shape: ModelShape, gpu: Gpu, gpus: int = 1, context: int | None = None, **settings: Any) -> PredictedServer:
    """A server with tensor parallelism over `gpus` GPUs, with vLLM's defaults except for `settings`."""
    engine = VllmEngine(kind="vllm", tensor_parallel_size=gpus, max_model_len=context, **settings)
    return server("vllm", engine, shape, gpu)


def fewest(shape: ModelShape, gpu: Gpu, context: int | None = None, **settings: Any) -> int | None:
    """The smallest number of GPUs that holds the weights and one request of full context; None if above 16."""
    for n in SIZES:
        try:
            found = on_card(shape, gpu, n, context, **settings)
        except ServebookError:
            continue  # the model cannot be split over n GPUs
        if found.problem is None and found.kv_tokens >= found.max_model_len:
            return n
    return None


def report(
    shape: ModelShape,
    cards: Mapping[str, Gpu],
    *,
    gpu: Gpu | None = None,
    gpus: int | None = None,
    context: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The content of `servebook model`. gpus: number of `gpu`; None: one. Sizes of the KV pool are 0 if the weights
    leave no room for it, and None without `gpu`. fewest_gpus: {card: smallest number that holds the model, or None}."""
    out = figures(shape)
    out |= {"gpu": None, "gpus": None, "kv_cache_tokens": None, "max_concurrency": None, "problem": None}
    out["context_tokens"] = context or shape.max_context_tokens
    if gpu is not None:
        found = on_card(shape, gpu, gpus or 1, context, **settings)
        held = found.kv_tokens
        out |= {
            "gpu": gpu.name,
            "gpus": gpus or 1,
            "kv_cache_tokens": held,
            "max_concurrency": round(held / found.max_model_len, 2),
            "problem": str(found.problem) if found.problem else None,
        }
    out["fewest_gpus"] = {name: fewest(shape, card, context, **settings) for name, card in cards.items()}
    return out
