"""The posts' formulas (roofline.py) applied to a run's model, hardware and points, as tables for the notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import PredictedPoint
from ..config.params import BatchingEngine, Engine, RunParams
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from . import roofline
from .parallel import Layout

if TYPE_CHECKING:
    import pandas as pd

STAGE = "closed-form"  # scored as a separate stage, to show what a prediction without a scheduler achieves


def workloads(params: RunParams) -> list[tuple[int, int]]:
    """The distinct (prompt tokens, output tokens) of the run's sweeps, in the order given."""
    found: dict[tuple[int, int], None] = {}
    for s in params.sweeps.values():
        found |= dict.fromkeys(s.lengths())
    return list(found)


def shape_table(shape: ModelShape) -> pd.DataFrame:
    """The numbers in config.json that determine speed, and the bytes and FLOPs computed from them."""
    import pandas as pd

    rows: list[tuple[str, Any, str, str]] = [
        ("layers × hidden", f"{shape.layers} × {shape.hidden:,}", "", "config.json"),
        (
            "query heads / KV heads × head_dim",
            f"{shape.heads} / {shape.kv_heads} × {shape.head_dim}",
            "",
            "config.json",
        ),
        ("vocabulary", f"{shape.vocab:,}", "tied" if shape.tied_embeddings else "untied", "config.json"),
        ("parameters", f"{shape.parameters:,}", "", "all matrices, biases and norms"),
        ("weights in memory", f"{shape.weight_bytes / 1e9:.3f}", "GB", "all parameters in their dtype"),
        (
            "weights read per decode step",
            f"{shape.decode_weight_bytes / 1e9:.3f}",
            "GB",
            "all except the embedding table",
        ),
        ("KV cache", f"{shape.kv_bytes_per_token:,}", "bytes/token", "2 · layers · KV heads · head_dim · bytes"),
        ("linear FLOPs", f"{shape.linear_flops_per_token:,}", "FLOP/token", "2·m·n of every layer matrix"),
        ("LM head FLOPs", f"{shape.lm_head_flops:,}", "FLOP", "2 · hidden · vocabulary, per sampled token"),
        (
            "attention FLOPs",
            f"{shape.attention_flops_per_context_token:,}",
            "FLOP per token of context",
            "4 · layers · heads · head_dim",
        ),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value", "unit", "how"])


def step_table(shape: ModelShape, gpu: Gpu, params: RunParams) -> pd.DataFrame:
    """Per workload: prefill FLOPs, bytes of a decode step, and the lower bounds of TTFT and TPOT at datasheet rates."""
    import pandas as pd

    flops_per_s, bytes_per_s = gpu.flops_per_s(params.model.dtype), gpu.bytes_per_s
    rows = []
    for prompt, output in workloads(params):
        ttft = [
            roofline.ttft_bound_s(shape, flops_per_s, bytes_per_s, prompt_tokens=prompt, overlap=o)
            for o in (True, False)
        ]
        rows.append(
            {
                "prompt_tokens": prompt,
                "output_tokens": output,
                "prefill_flops": shape.prefill_flops(prompt),
                "decode_bytes": roofline.decode_bytes(shape, 1, prompt),
                "decode_flops": shape.decode_flops(1, prompt),
                "ttft_bound_s": ttft[0],
                "ttft_additive_s": ttft[1],
                "tpot_bound_s": roofline.tpot_bound_s(shape, flops_per_s, bytes_per_s, batch=1, context_tokens=prompt),
            }
        )
    return pd.DataFrame(rows)


def pool_table(shape: ModelShape, gpu: Gpu, params: RunParams) -> pd.DataFrame:
    """KV pool of each batching engine (of one replica if there are several): GiB per GPU, tokens, and the number of
    sequences of each workload that fit at once."""
    import pandas as pd

    rows = []
    for name, engine in params.engines.items():
        if not isinstance(engine, BatchingEngine):
            continue
        layout = Layout(engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size)
        layout.check(shape, f"engines.{name}")
        weights = layout.weight_bytes(shape)
        if gpu.is_cpu:
            pool = engine.cpu_kv_cache_gib * 2**30
        else:
            pool = roofline.kv_pool_bytes(gpu.memory_bytes, engine.gpu_memory_utilization, weights)
        tokens = roofline.kv_pool_tokens(max(pool, 0), layout.stage(shape).kv_bytes_per_token)
        rows += [
            {
                "engine": name,
                "pool_gib": pool / 2**30,
                "pool_tokens": tokens,
                "prompt_tokens": p,
                "output_tokens": o,
                "max_sequences": roofline.max_sequences(tokens, p + o),
            }
            for p, o in workloads(params)
        ]
    return pd.DataFrame(rows)


def inconsistency_table() -> pd.DataFrame:
    """Inconsistencies within a post: both values, the one used here, and why."""
    import pandas as pd

    return pd.DataFrame([vars(i) for i in roofline.post_inconsistencies()])


def effective_rates(
    shape: ModelShape, gpu: Gpu, points: Iterable[MeasuredPoint], kinds: Mapping[str, str]
) -> pd.DataFrame:
    """Effective GB/s and TFLOP/s of every C = 1 point, with their share of the datasheet (post 2's calibration).

    kinds: {engine name: kind}. The naive server moves its KV cache three times per step.
    """
    import pandas as pd

    rows = []
    for p in points:
        if p.concurrency != 1 or not p.ttft_mean_s or not p.tpot_mean_s:
            continue
        passes = roofline.NAIVE_KV_PASSES if kinds.get(p.engine) == "naive" else 1
        rates = roofline.Rates.measured(
            shape, prompt_tokens=p.prompt_tokens, ttft_s=p.ttft_mean_s, tpot_s=p.tpot_mean_s, kv_passes=passes
        )
        rows.append(
            {
                "sweep": p.sweep,
                "engine": p.engine,
                "prompt_tokens": p.prompt_tokens,
                "ttft_s": p.ttft_mean_s,
                "tpot_s": p.tpot_mean_s,
                "gb_per_s": rates.bytes_per_s / 1e9,
                "bandwidth_share": rates.bytes_per_s / gpu.bytes_per_s,
                "tflop_per_s": rates.flops_per_s / 1e12,
                "compute_share": rates.flops_per_s / gpu.flops_per_s(),
            }
        )
    return pd.DataFrame(rows)


def baseline_points(
    params: RunParams,
    shape: ModelShape,
    rates: Mapping[str, roofline.Rates],
    facts: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[PredictedPoint]:
    """Post 2's closed form for every concurrency point, as predicted points: the baseline to compare scores with.

    rates: {engine: rates}, from the datasheet before anything is measured, else from the engine's first C = 1 point.
    """
    predicted: list[PredictedPoint] = []
    for sweep, s in params.sweeps.items():
        if s.kind != "concurrency":
            continue
        for engine, given in rates.items():
            kind, known = params.engines[engine].kind, (facts or {}).get(engine, {})
            budget = token_budget(params.engines[engine], known)
            for c in s.concurrency:
                metrics = roofline.baseline(
                    shape,
                    given,
                    engine="naive" if kind == "naive" else "vllm",
                    prompt_tokens=s.tokens[0],
                    output_tokens=s.tokens[1],
                    concurrency=c,
                    max_num_batched_tokens=budget,
                    kv_tokens=known.get("kv_cache_tokens"),
                )
                predicted.append(
                    {
                        "sweep": sweep,
                        "engine": engine,
                        "point": f"c{c:04d}",
                        "concurrency": c,
                        "rate_per_s": None,
                        "prompt_tokens": s.tokens[0],
                        "output_tokens": s.tokens[1],
                        "metrics": {k: {"value": v, "low": None, "high": None} for k, v in metrics.items()},
                    }
                )
    return predicted


def token_budget(engine: Engine, facts: Mapping[str, Any]) -> int:
    """Maximum tokens per step: as the server reported, else as in its parameters, else post 1's 2,048."""
    return facts.get("max_num_batched_tokens") or getattr(engine, "max_num_batched_tokens", None) or 2048


def saturation_variants(shape: ModelShape, gpu: Gpu, prompt_tokens: int, output_tokens: int) -> pd.DataFrame:
    """The write-up's saturation curve with the weights that a decode step reads, for two context lengths (the prompt,
    the live context): KV bytes per sequence, batch at half saturation, ceiling."""
    import pandas as pd

    contexts = {
        "prompt only": prompt_tokens,
        "live context": roofline.live_context_tokens(prompt_tokens, output_tokens),
    }
    return pd.DataFrame(
        [
            {
                "variant": f"{name} ({context:,.0f} tokens)",
                "kv_gb_per_sequence": (kv := float(shape.kv_read_bytes(context))) / 1e9,
                "half_batch": roofline.half_saturation_batch(shape.decode_weight_bytes, kv),
                "ceiling_tok_per_s": roofline.ceiling_tok_per_s(kv, gpu.bytes_per_s),
            }
            for name, context in contexts.items()
        ]
    )


def saturation_curve(shape: ModelShape, gpu: Gpu, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The live-context curve for batches up to twice the one at half saturation, in the form of charts.saturation."""
    kv = float(shape.kv_read_bytes(roofline.live_context_tokens(prompt_tokens, output_tokens)))
    weights = shape.decode_weight_bytes
    half = roofline.half_saturation_batch(weights, kv)
    largest = max(16, 2 ** math.ceil(math.log2(2 * half)))
    batches = [2 ** (k / 4) for k in range(int(4 * math.log2(largest)) + 1)]
    curve = [(b, roofline.saturation_tok_per_s(b, weights, kv, gpu.bytes_per_s)) for b in batches]
    return {
        "curve": [{"batch": b, "tok_per_s": f} for b, f in curve],
        "half_batch": half,
        "ceiling_tok_per_s": roofline.ceiling_tok_per_s(kv, gpu.bytes_per_s),
    }


def measured_steps(
    shape: ModelShape, points: Iterable[MeasuredPoint], kinds: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Measured steps for the roofline plot: each engine's prefill at C = 1 (TTFT) and its decode step at every C.

    A decode step's batch is decode tok/s × TPOT. Its context is the prompt and half of the output.
    """
    steps = []
    for p in points:
        if p.kind not in ("concurrency", "calibration") or not p.tpot_mean_s:
            continue
        engine, prompt, c = p.engine, p.prompt_tokens, p.concurrency
        if c == 1 and p.kind == "calibration" and p.ttft_mean_s:
            steps.append(
                {
                    "engine": engine,
                    "phase": "prefill",
                    "label": f"{prompt:,}",
                    "flops": shape.prefill_flops(prompt),
                    "bytes": shape.decode_weight_bytes,
                    "seconds": p.ttft_mean_s,
                    "doubted": p.verdict == "suspect",
                }
            )
        if p.kind == "concurrency" and p.decode_tok_per_s:
            naive = kinds.get(engine) == "naive"
            if naive and c != 1:
                continue  # the naive server's step is the same at every C
            batch = max(1, round(p.decode_tok_per_s * p.tpot_mean_s))
            context = int(roofline.live_context_tokens(prompt, p.output_tokens))
            steps.append(
                {
                    "engine": engine,
                    "phase": "decode",
                    "label": f"C = {c}",
                    "flops": shape.decode_flops(batch, context),
                    "bytes": roofline.decode_bytes(shape, batch, context, roofline.NAIVE_KV_PASSES if naive else 1),
                    "seconds": p.tpot_mean_s,
                    "doubted": p.verdict == "suspect",
                }
            )
    return steps
