"""The posts' formulas, one function each, without scheduling. Times in s, sizes in bytes, rates per second.

Tests compare with every figure that a post publishes (tests/test_roofline.py).

Post 1: "Benchmarking Hugging Face Transformers vs vLLM" (A40, formulas and chart 1a). Post 2: its continuation
(calibration from C = 1, chart 1b). Write-up: the day-4 write-up of a concurrency sweep on an A100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..common.errors import ServebookError
from ..common.measured_point import Metric
from ..model.reader import ModelShape

INCONSISTENCIES = Path(__file__).with_name("post_inconsistencies.yaml")


# --- one step on the roofline ---------------------------------------------------------------------------------------


def ridge_flop_per_byte(flops_per_s: float, bytes_per_s: float) -> float:
    """Operational intensity below which a step is memory-bound: FLOP/s ÷ bytes/s (post 1, value 3)."""
    return flops_per_s / bytes_per_s


def sharp_s(flops: float, bytes_moved: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Seconds if compute and memory overlap perfectly, a lower bound: max(F/R, M/BW) (post 2's 45 ms)."""
    return max(flops / flops_per_s, bytes_moved / bytes_per_s)


def additive_s(flops: float, bytes_moved: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Seconds if compute and memory do not overlap: F/R + M/BW (post 2's 65 ms)."""
    return flops / flops_per_s + bytes_moved / bytes_per_s


def decode_bytes(shape: ModelShape, batch: int, context_tokens: float, kv_passes: int = 1) -> float:
    """Bytes moved by one decode step: weights + batch · T · KV bytes/token (post 1, value 4).

    kv_passes: number of times that a step moves the KV cache; 3 on the naive server, which reads the cache, writes a
    longer copy and reads that (post 2).
    """
    return shape.decode_weight_bytes + kv_passes * batch * shape.kv_read_bytes(context_tokens)


NAIVE_KV_PASSES = 3


def tpot_bound_s(
    shape: ModelShape, flops_per_s: float, bytes_per_s: float, *, batch: int, context_tokens: int
) -> float:
    """Lower bound of a decode step's time in seconds: compute and memory overlap."""
    flops, moved = shape.decode_flops(batch, context_tokens), decode_bytes(shape, batch, context_tokens)
    return sharp_s(flops, moved, flops_per_s, bytes_per_s)


def ttft_bound_s(
    shape: ModelShape, flops_per_s: float, bytes_per_s: float, *, prompt_tokens: int, overlap: bool = True
) -> float:
    """Lower bound of a single prompt's prefill time in seconds: its FLOPs and one read of the weights (post 2)."""
    roof = sharp_s if overlap else additive_s
    return roof(shape.prefill_flops(prompt_tokens), shape.decode_weight_bytes, flops_per_s, bytes_per_s)


# --- memory ---------------------------------------------------------------------------------------------------------


def kv_pool_bytes(memory_bytes: float, utilization: float, weight_bytes: float, activation_bytes: float = 0.0) -> float:
    """Bytes of the KV pool: memory · utilization − weights − activations (post 1, value 6; as vLLM computes it).

    memory_bytes is the size that CUDA reports: a card "of 80 GB" has 80 GiB, 7 % more bytes (the write-up's mistake),
    and one "of 48 GB" has 44.42 GiB (post 1).
    """
    return memory_bytes * utilization - weight_bytes - activation_bytes


def kv_pool_tokens(pool_bytes: float, kv_bytes_per_token: float) -> int:
    """Whole tokens that fit the pool (post 1: 28e9 ÷ 57,344 = 488,281)."""
    return int(pool_bytes // kv_bytes_per_token)


def max_sequences(pool_tokens: int, tokens_per_sequence: int) -> int:
    """Sequences of S = prompt + output tokens that fit the pool at once: pool ÷ S (post 1, value 6)."""
    return pool_tokens // tokens_per_sequence


# --- effective rates from a C = 1 point -----------------------------------------------------------------------------


def effective_bytes_per_s(bytes_moved: float, tpot_s: float) -> float:
    """Bytes of a decode step ÷ TPOT at C = 1 (post 2: 14.14e9 ÷ 28 ms = 505e9)."""
    return bytes_moved / _positive(tpot_s, "tpot_s")


def effective_flops_per_s(flops: float, ttft_s: float) -> float:
    """Prefill FLOPs ÷ TTFT at C = 1 (post 2: 6.74e12 ÷ 88 ms = 76.6e12)."""
    return flops / _positive(ttft_s, "ttft_s")


def _positive(value: float, key: str) -> float:
    if not value > 0:
        raise ServebookError(f"{key} is {value}, not a positive time", "calibration point")
    return value


@dataclass(frozen=True)
class Rates:
    """A device's effective or datasheet rates, as inputs of the closed forms."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measured(
        cls, shape: ModelShape, *, prompt_tokens: int, ttft_s: float, tpot_s: float, kv_passes: int = 1
    ) -> Rates:
        """Effective rates from one C = 1 point. Counts the KV read, which post 2 omits (0.2 % at 512 tokens)."""
        moved = decode_bytes(shape, 1, prompt_tokens, kv_passes)
        flops = shape.prefill_flops(prompt_tokens)
        return cls(effective_bytes_per_s(moved, tpot_s), effective_flops_per_s(flops, ttft_s))


# --- the naive server -----------------------------------------------------------------------------------------------


def naive_tpot_s(shape: ModelShape, bytes_per_s: float, context_tokens: float) -> float:
    """TPOT of the naive server at any concurrency: (weights + 3·KV) ÷ BW at batch 1 (post 2)."""
    return decode_bytes(shape, 1, context_tokens, NAIVE_KV_PASSES) / bytes_per_s


def request_s(ttft_s: float, tpot_s: float, output_tokens: int) -> float:
    """Time of a request without queueing: TTFT + (output − 1) · TPOT (post 2)."""
    return ttft_s + (output_tokens - 1) * tpot_s


def fifo_ttft_s(concurrency: int, ttft_s: float, request_time_s: float) -> float:
    """Steady-state TTFT of a closed loop with one request served at a time: (C − 1) · T_req + prefill (post 2)."""
    return (concurrency - 1) * request_time_s + ttft_s


# --- vLLM, as post 2 reasons ----------------------------------------------------------------------------------------


def prefill_chunks(prompt_tokens: int, max_num_batched_tokens: int) -> int:
    """Steps to prefill a single prompt: ⌈L ÷ budget⌉."""
    return math.ceil(prompt_tokens / max_num_batched_tokens)


def mixed_tpot_s(concurrency: int, output_tokens: int, chunks: int, mixed_step_s: float, decode_step_s: float) -> float:
    """TPOT if each of the other C − 1 requests prefills once during a request's life (post 2).

    Each of these prefills adds `chunks` mixed steps. A request gets one token in every mixed step, and the rest of its
    output − 1 tokens in decode-only steps. If no decode-only steps are left, TPOT is the mixed step's time.
    """
    decodes = output_tokens - 1
    mixed = min(chunks * (concurrency - 1), decodes)
    return (mixed * mixed_step_s + (decodes - mixed) * decode_step_s) / decodes if decodes else 0.0


def wall_clock_tok_per_s(
    concurrency: int, output_tokens: int, chunks: int, mixed_step_s: float, decode_step_s: float
) -> float:
    """Decode tokens ÷ elapsed time with prefills: C·(output − 1) over the steps of C requests (post 2)."""
    decodes = output_tokens - 1
    alone = max(decodes - chunks * (concurrency - 1), 0)
    return concurrency * decodes / (chunks * concurrency * mixed_step_s + alone * decode_step_s)


def baseline(
    shape: ModelShape,
    rates: Rates,
    *,
    engine: str,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    max_num_batched_tokens: int = 2048,
    kv_tokens: int | None = None,
) -> dict[Metric, float]:
    """Post 2's closed-form prediction of one closed-loop point: the baseline that better predictions must beat.

    engine: "vllm" or "naive". kv_tokens: size of the KV pool (None: no limit). Returns ttft_s, tpot_s,
    decode_tok_per_s (running ÷ TPOT; the naive 1 ÷ TPOT), e2e_s, request_rate_per_s and output_tok_per_s.
    Two additions to the post: a mixed step is never faster than a decode-only step, and with a full KV pool the
    C − running waiting requests are served at running ÷ T_req (the post only mentions a queue).
    """
    prefill_s = shape.prefill_flops(prompt_tokens) / rates.flops_per_s
    if engine == "naive":
        tpot_s = naive_tpot_s(shape, rates.bytes_per_s, prompt_tokens)
        alone_s = request_s(prefill_s, tpot_s, output_tokens)
        ttft_s, running, rate = fifo_ttft_s(concurrency, prefill_s, alone_s), 1, 1 / alone_s
    elif engine == "vllm":
        running = min(concurrency, max_sequences(kv_tokens, prompt_tokens) if kv_tokens else concurrency)
        if not running:
            raise ServebookError(
                f"a prompt of {prompt_tokens} tokens does not fit a KV pool of {kv_tokens}", shape.name
            )
        decode_step_s = decode_bytes(shape, running, prompt_tokens) / rates.bytes_per_s
        chunks = prefill_chunks(prompt_tokens, max_num_batched_tokens)
        tpot_s = mixed_tpot_s(running, output_tokens, chunks, max(prefill_s / chunks, decode_step_s), decode_step_s)
        alone_s = request_s(prefill_s, tpot_s, output_tokens)
        rate = running / alone_s
        ttft_s = prefill_s + (concurrency - running) / rate
    else:
        raise ServebookError(f"no closed form for the engine kind {engine!r}", fix="Use naive or vllm")
    return {
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "decode_tok_per_s": running / tpot_s if tpot_s else 0.0,
        "e2e_s": request_s(ttft_s, tpot_s, output_tokens),
        "request_rate_per_s": rate,
        "output_tok_per_s": rate * output_tokens,
    }


# --- the write-up's saturation curve --------------------------------------------------------------------------------


def saturation_tok_per_s(batch: float, weight_bytes: float, kv_bytes_per_sequence: float, bytes_per_s: float) -> float:
    """Aggregate decode tokens/s if memory-bound: f(B) = BW·B ÷ (W + KV·B) (write-up).

    The write-up counts all 16.38e9 weight bytes, embedding included. KV per sequence is context · KV bytes/token, with
    1,000 tokens of context at first, and 1,500 (the average while 1,000 grow to 2,000) in its refined variant.
    """
    return bytes_per_s * batch / (weight_bytes + kv_bytes_per_sequence * batch)


def half_saturation_batch(weight_bytes: float, kv_bytes_per_sequence: float) -> float:
    """The batch at half of the ceiling: W ÷ KV (write-up: 111)."""
    return weight_bytes / kv_bytes_per_sequence


def ceiling_tok_per_s(kv_bytes_per_sequence: float, bytes_per_s: float) -> float:
    """The limit of the saturation curve for large batches: BW ÷ KV (write-up: 13,870)."""
    return bytes_per_s / kv_bytes_per_sequence


def live_context_tokens(prompt_tokens: int, output_tokens: int) -> float:
    """Context averaged over a request's decode: L + output/2 (write-up's 1.5k)."""
    return prompt_tokens + output_tokens / 2


# --- inconsistencies within the posts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inconsistency:
    """A quantity with the two values that a post gives or implies, and the one used here."""

    quantity: str
    post: str
    unit: str
    first: float
    first_is: str
    second: float
    second_is: str
    used: float
    why: str


def post_inconsistencies() -> list[Inconsistency]:
    """All inconsistencies found within the three posts, with both values."""
    return [Inconsistency(**entry) for entry in yaml.safe_load(INCONSISTENCIES.read_text(encoding="utf-8"))]
