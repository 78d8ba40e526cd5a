"""Lower bounds of TTFT and TPOT on given hardware, with which the audit checks measured points.

A bound must never be too high. It takes the layout into account: the GPUs of a replica share its weights and FLOPs.
There is no bound on a CPU, whose peak rates are estimates; if the server reports another quantization of weights or KV
cache than the parameters; or if a step can produce several tokens (speculative decoding).
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
    """The parallel layout in an engine's parameters."""
    return Layout(
        getattr(engine, "tensor_parallel_size", 1),
        getattr(engine, "pipeline_parallel_size", 1),
        getattr(engine, "data_parallel_size", 1),
        getattr(engine, "enable_expert_parallel", False),
    )


def floors(
    shape: ModelShape, gpu: Gpu, engine: Engine, facts: Mapping[str, Any], *, prompt_tokens: int
) -> dict[str, float]:
    """Lower bounds for a request at C = 1: `ttft_floor_s` from the prompt's FLOPs, `tpot_floor_s` from reading the
    weights and its KV cache once. A bound that is not known is left out. facts: as reported by the server."""
    if gpu.is_cpu:
        return {}
    layout, out = layout_of(engine), {}
    rank = layout.rank(shape)
    # the fastest dtype in use bounds the compute rate
    kinds = {shape.compute_dtype, *(m.multiplies for m in shape.matrices if m.multiplies)}
    flops_per_s, bytes_per_s = max(gpu.flops_per_s(kind) for kind in kinds), gpu.bytes_per_s
    if _weights_known(shape, facts):
        # chunks of a prompt run in all pipeline stages at once, but a decode token passes through one after the other
        stages = layout.pipeline
        out["ttft_floor_s"] = (
            roofline.ttft_bound_s(rank, flops_per_s, bytes_per_s, prompt_tokens=prompt_tokens) / stages
        )
        if not _several_tokens_a_step(engine):
            context = prompt_tokens if _kv_known(shape, facts) else 0
            out["tpot_floor_s"] = roofline.tpot_bound_s(rank, flops_per_s, bytes_per_s, batch=1, context_tokens=context)
    return out


def _weights_known(shape: ModelShape, facts: Mapping[str, Any]) -> bool:
    """Whether the server's quantization of the weights agrees with the parameters."""
    return facts.get("quantization") in (None, "None", "none") or shape.weight_bits < 16


def _kv_known(shape: ModelShape, facts: Mapping[str, Any]) -> bool:
    dtype = str(facts.get("kv_cache_dtype") or "auto")
    return not ("8" in dtype or "4" in dtype) or shape.kv_bytes_per_element < 2


def _several_tokens_a_step(engine: Engine) -> bool:
    given = [*(getattr(engine, "extra_args", None) or []), *(getattr(engine, "command", None) or [])]
    return any(_SPECULATIVE in argument for argument in given)
