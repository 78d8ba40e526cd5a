"""A server under a steady load in closed form: requests that run, seconds a token, how near it is to its limits.

A first look at thousands of set-ups; the simulation decides.

A prompt of P tokens is computed in m = ⌈P / k⌉ steps of M seconds that also decode (k: what a step's budget leaves it);
all other time goes to pure decode steps of D seconds. At λ prompts a second λ·m·M + s·D = 1, where s is the rate of
pure decode steps; a token takes 1 / (λ·m + s) seconds, and λ · O of these run at a time (Little's law).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .scheduler import Request, Step
from .server_limits import PredictedServer
from .simulated_clients import Prompt
from .steptime import VllmTimes

ROUNDS = 40  # of the fixed point
OVER = 4.0  # utilization that stands for anything beyond


@dataclass(frozen=True)
class Lengths:
    """Means over requests. context: tokens that a running request attends to, weighted by how long it runs."""

    prompt: float
    output: float
    context: float
    new: float  # prompt tokens that are computed: without those that the prefix cache is expected to hold

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Lengths:
        """Of a sample of requests."""
        n, out = len(prompts), sum(p.output_tokens for p in prompts)
        context = sum(p.output_tokens * (p.prompt_tokens + p.output_tokens / 2) for p in prompts) / max(out, 1)
        prompt = sum(p.prompt_tokens for p in prompts) / n
        return cls(prompt, out / n, context, sum(p.adds for p in prompts) / n)


@dataclass(frozen=True)
class Steady:
    """running: requests at a time; utilization: of what it could serve at most (over 1: it falls behind)."""

    rate_per_s: float
    running: float
    tpot_s: float
    ttft_s: float
    utilization: float
    most_running: float  # requests that may run at a time, by max_num_seqs and the KV pool


def most_running(server: PredictedServer, at: Lengths) -> float:
    """Requests that run at a time at most: the setting, or what the KV pool holds of them."""
    held = server.config.kv_blocks * server.config.block_size / max(at.prompt + at.output / 2, 1)
    return max(1.0, min(server.config.max_num_seqs, held))


def steady(server: PredictedServer, times: VllmTimes, at: Lengths, rate_per_s: float) -> Steady:
    """One group of requests that step together, at so many requests/s."""
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
    """As steady, of so many clients that each wait for their answer. It never falls behind: what finds max_num_seqs or
    the KV pool full waits."""
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
    """Seconds of a step that decodes and computes a chunk from the middle of a prompt."""
    before = max(0, round((prompt - chunk) / 2))
    step = Step(0, decodes=decodes, kv_tokens=round(kv_tokens), chunks=[(Request(0, chunk, 1), chunk, before, True)])
    return max(times.mixed(step)[0], times.launch(decodes + chunk) + times.prepare(decodes + 1))


def lone(times: VllmTimes, at: Lengths) -> float:
    """TPOT of a request that is alone: no load makes it less."""
    return times.per_token(round(at.prompt), max(2, round(at.output)))
