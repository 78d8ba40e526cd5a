"""Closed form of a server under a steady load: running requests, TPOT, TTFT and utilization.

It ranks thousands of set-ups quickly; the best are then simulated.

A prompt of P tokens takes m = ⌈P / k⌉ mixed steps of M seconds, where k is the part of the token budget that is left
for prefill. All other time is spent in decode-only steps of D seconds. With λ prompts per second and s decode-only
steps per second, λ·m·M + s·D = 1. TPOT is 1 / (λ·m + s), and λ · O · TPOT requests run at a time (Little's law, O:
output tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .scheduler import Request, Step
from .server_limits import PredictedServer
from .simulated_clients import Prompt
from .steptime import VllmTimes

ROUNDS = 40  # maximum iterations of the fixed point
OVER = 4.0  # largest utilization that is reported


@dataclass(frozen=True)
class Lengths:
    """Mean lengths over requests, in tokens. context: tokens that a running request attends to, averaged over time."""

    prompt: float
    output: float
    context: float
    new: float  # prompt tokens that are computed, without expected prefix-cache hits

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Lengths:
        """The means over a sample of requests."""
        n, out = len(prompts), sum(p.output_tokens for p in prompts)
        context = sum(p.output_tokens * (p.prompt_tokens + p.output_tokens / 2) for p in prompts) / max(out, 1)
        prompt = sum(p.prompt_tokens for p in prompts) / n
        return cls(prompt, out / n, context, sum(p.adds for p in prompts) / n)


@dataclass(frozen=True)
class Steady:
    """The steady state. running: mean requests at a time; utilization: load over capacity (above 1: overloaded)."""

    rate_per_s: float
    running: float
    tpot_s: float
    ttft_s: float
    utilization: float
    most_running: float  # maximum requests at a time, by max_num_seqs and the KV pool


def most_running(server: PredictedServer, at: Lengths) -> float:
    """Maximum requests that run at a time: the smaller of max_num_seqs and the number that the KV pool holds."""
    held = server.config.kv_blocks * server.config.block_size / max(at.prompt + at.output / 2, 1)
    return max(1.0, min(server.config.max_num_seqs, held))


def steady(server: PredictedServer, times: VllmTimes, at: Lengths, rate_per_s: float) -> Steady:
    """The steady state of one group of requests at `rate_per_s` requests/s."""
    most, budget = most_running(server, at), server.config.max_num_batched_tokens
    running, tpot, busy = 1.0, 0.0, 0.0
    for _ in range(ROUNDS):
        n = max(1, round(min(running, most)))
        chunk = max(1, min(round(at.new), budget - n))
        steps = at.new / chunk
        mixed = _mixed(times, n, n * at.context, chunk, at.new)
        a, b = times.decode(n, n * at.context)
        decode = a + b * n * at.context
        busy = rate_per_s * steps * mixed
        pure = max(0.0, 1 - busy) / decode
        tpot = 1 / max(rate_per_s * steps + pure, 1e-9)
        before, running = running, 0.5 * running + 0.5 * rate_per_s * at.output * tpot
        if abs(running - before) < 0.01 * before:
            break
        if running > 4 * most:
            break
    first = times.first_token(max(1, round(at.new)), budget) + times.frontend(round(at.prompt))
    utilization = max(busy, running / most)
    waits = first / max(1 - min(utilization, 0.98), 0.02) if utilization > 0.5 else first
    return Steady(rate_per_s, min(running, most), tpot, max(first, waits * 0.5), min(utilization, OVER), most)


def closed(server: PredictedServer, times: VllmTimes, at: Lengths, clients: float) -> Steady:
    """The steady state of one group with `clients` closed-loop clients. It is never overloaded: requests beyond
    max_num_seqs or the KV pool wait."""
    most, budget = most_running(server, at), server.config.max_num_batched_tokens
    first = times.first_token(max(1, round(at.new)), budget) + times.frontend(round(at.prompt))
    running, rate, tpot = min(clients, most), 0.0, 0.0
    for _ in range(ROUNDS):
        n = max(1, round(running))
        chunk = max(1, min(round(at.new), budget - n))
        steps = at.new / chunk
        mixed = _mixed(times, n, n * at.context, chunk, at.new)
        a, b = times.decode(n, n * at.context)
        decode = a + b * n * at.context
        rate = 1 / max(decode * at.output / n + steps * (mixed - decode), 1e-9)
        tpot = n / (rate * at.output)
        before, running = running, min(most, max(1.0, clients - rate * first))
        if abs(running - before) < 0.02 * before:
            break
        running = (running + before) / 2
    waiting = max(0.0, clients - running - rate * first)
    return Steady(rate, running, tpot, first + waiting / rate, running / most, most)


def _mixed(times: VllmTimes, decodes: int, kv_tokens: float, chunk: int, prompt: float) -> float:
    """Seconds of a step that decodes and prefills a chunk from the middle of a prompt."""
    before = max(0, round((prompt - chunk) / 2))
    step = Step(0, decodes=decodes, kv_tokens=round(kv_tokens), chunks=[(Request(0, chunk, 1), chunk, before, True)])
    return max(times.mixed(step)[0], times.launch(decodes + chunk) + times.prepare(decodes + 1))


def lone(times: VllmTimes, at: Lengths) -> float:
    """TPOT at C = 1, a lower bound for any load."""
    return times.per_token(round(at.prompt), max(2, round(at.output)))
