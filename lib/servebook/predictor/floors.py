"""Times that no server on this hardware can beat: what a measured point is judged by.

A floor may be too low, never too high. So each follows the layout (the GPUs of a replica share its weights and its
FLOPs), and there is none where what is served is not known: on a CPU, whose rates are estimates, where the server says
of its weights or its KV cache something else than the parameters, and where one step brings several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.engines import Engine
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape
from . import roofline
from .parallel import Layout

_SPECULATIVE = "speculative"  # vLLM's and SGLang's flags: --speculative-config, --speculative-algorithm


def layout_of(engine: Engine) -> Layout:
    """How an engine's parameters spread the model."""
    return Layout(
        getattr(engine, "tensor_parallel_size", 1),
        getattr(engine, "pipeline_parallel_size", 1),
        getattr(engine, "data_parallel_size", 1),
        getattr(engine, "enable_expert_parallel", False),
    )


def floors(
    shape: ModelShape, gpu: Gpu, engine: Engine, facts: Mapping[str, Any], *, prompt_tokens: int
) -> dict[str, float]:
    """Lower bounds of a lone request: `ttft_floor_s`, the whole prompt's FLOPs, and `tpot_floor_s`, one read of the
    weights and of its KV; each left out where it is not known. facts: what the server says of itself."""
    if gpu.is_cpu:
        return {}
    layout, out = layout_of(engine), {}
    rank = layout.rank(shape)
    kinds = {shape.compute_dtype, *(m.multiplies for m in shape.matrices if m.multiplies)}  # the fastest of them
    flops_per_s, bytes_per_s = max(gpu.flops_per_s(kind) for kind in kinds), gpu.bytes_per_s
    if _weights_known(shape, facts):
        # a prompt's chunks are in all stages of a pipeline at once, a token in one after the other
        stages = layout.pipeline
        out["ttft_floor_s"] = (
            roofline.ttft_bound_s(rank, flops_per_s, bytes_per_s, prompt_tokens=prompt_tokens) / stages
        )
        if not _several_tokens_a_step(engine):
            context = prompt_tokens if _kv_known(shape, facts) else 0
            out["tpot_floor_s"] = roofline.tpot_bound_s(rank, flops_per_s, bytes_per_s, batch=1, context_tokens=context)
    return out


def _weights_known(shape: ModelShape, facts: Mapping[str, Any]) -> bool:
    """Whether the server has quantized only what the parameters say is quantized."""
    return facts.get("quantization") in (None, "None", "none") or shape.weight_bits < 16


def _kv_known(shape: ModelShape, facts: Mapping[str, Any]) -> bool:
    told = str(facts.get("kv_cache_dtype") or "auto")
    return not ("8" in told or "4" in told) or shape.kv_bytes_per_element < 2


def _several_tokens_a_step(engine: Engine) -> bool:
    given = [*(getattr(engine, "extra_args", None) or []), *(getattr(engine, "command", None) or [])]
    return any(_SPECULATIVE in argument for argument in given)
