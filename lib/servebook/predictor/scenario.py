"""Simulates one point's load on one server, split over the server's groups, and summarizes the result.

One module, since it is one class with the record that it returns.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..config import request_plan
from ..config.params import Load
from ..config.points import NARROW_E2E, NARROW_TTFT, PointSpec
from . import simulation
from .priors import HOST_NOISE
from .server_limits import PredictedServer, Times
from .simulated_clients import Prompt, Traffic
from .simulation_result import Result
from .steptime import NaiveTimes

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
LatencyPercentiles = dict[str, dict[str, float]]  # latency → percentile → seconds


@dataclass(frozen=True)
class Outcome:
    """The figures of a simulated point, in seconds, tokens/s and requests/s. window_s: time until the client stops."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    request_rate_per_s: float
    output_tok_per_s: float
    decode_tok_per_s: float
    running_mean: float
    ttft_p99_s: float
    window_s: float
    requests: float  # number that the client would measure
    measured: int  # number that was simulated
    preemptions: int

    hit_share: float = 0.0  # share of the measured requests' prompt tokens that were in the prefix cache
    spread: LatencyPercentiles = field(default_factory=dict)


def spread_of(values: Mapping[str, np.ndarray]) -> LatencyPercentiles:
    """The percentiles of each latency. values: {latency: seconds of every request}."""
    return {
        latency: dict(zip(PERCENTILES, map(float, np.percentile(v, list(PERCENTILES.values()))), strict=True))
        for latency, v in values.items()
        if len(v)
    }


@dataclass(frozen=True)
class Scenario:
    """A point's load on a server, ready to simulate with any constants."""

    server: PredictedServer
    spec: PointSpec
    load: Load
    hit_share: float = 0.0  # share of prompts whose tokens are already in the prefix cache
    running_gauge: bool = False  # decode rate from vLLM's running gauge, as in the posts; else in flight − waiting
    cached_prompts: int = 0  # instead of hit_share: number of prompts that are cached, from the first on
    overlap: int = 0  # > 0: this is one group with its share of the load, with this many chunks in the pipeline at once
    text: bool = False  # prompts are sent as text (as other tools do), not as token ids
    every: int = 1  # one group in a finite run gets every `every`-th request,
    offset: int = 0  # from this index on

    @cached_property
    def groups(self) -> list[tuple[Scenario, int]]:
        """[(scenario of a group with its share of the load, number of such groups)], largest share first. Requests are
        routed evenly, as vLLM balances equal requests. In a finite run each group gets every n-th request."""
        layout, spec, load = self.server.layout, self.spec, self.load
        n = layout.groups
        if n == 1 or self.overlap:
            return [(self, 1)]
        names = ("min_requests", "max_requests", "warmup_requests")
        share = load.model_copy(update={k: -(-getattr(load, k) // n) for k in names})
        if not spec.closed:
            if spec.requests is not None:
                each = [(replace(self, overlap=1, every=n, offset=i), 1) for i in range(min(n, spec.requests))]
                return each
            cap = None if spec.concurrency is None else -(-spec.concurrency // n)
            rate = replace(spec, rate_per_s=(spec.rate_per_s or 0.0) / n, concurrency=cap)
            return [(replace(self, spec=rate, load=share, overlap=1), n)]
        c = spec.concurrency or 1
        overlap = max(1, layout.pipeline // c)  # fewer clients than stages leave stages empty
        sizes = [(c // n + 1, c % n), (c // n, n - c % n)]
        return [
            (replace(self, spec=self._clients_share(size, c), load=share, overlap=overlap), k)
            for size, k in sizes if size and k
        ]  # fmt: skip

    def _clients_share(self, size: int, clients: int) -> PointSpec:
        asked = self.spec.requests
        return replace(self.spec, concurrency=size, requests=asked and max(1, round(asked * size / clients)))

    @cached_property
    def _plan(self) -> request_plan.RequestPlan | None:
        return request_plan.of_point(self.spec, self.load)

    def prompts(self, seed: int) -> Sequence[Prompt]:
        """The requests in order. Without a workload, hit_share or cached_prompts give the content of the cache."""
        if self._plan is not None:
            return self._plan if self.every == 1 else request_plan.Part(self._plan, self.every, self.offset)
        p, o = self.spec.prompt_tokens, self.spec.output_tokens
        if not self.server.config.prefix_caching or not (self.hit_share or self.cached_prompts):
            return [Prompt(p, o)]
        if self.cached_prompts:
            return [Prompt(p, o, p)] * self.cached_prompts + [Prompt(p, o)] * 4096
        rng = random.Random(f"hits-{seed}")
        return [Prompt(p, o, p if rng.random() < self.hit_share else 0) for _ in range(4096)]

    def clients(self, seed: int, requests: int | None = None) -> Traffic:
        """The load as the client sends it. requests: number to measure; None: the point's maximum."""
        spec, load = self.spec, self.load
        _, most = load.least_and_most(spec.clients)
        if spec.requests is not None:
            return self._finite(seed)
        if not spec.closed:
            count, warmup = requests or most, load.warmup_requests
            enough = warmup + 2 * count + 200  # arrivals continue until the last measured request ends
            times = request_plan.due_times(spec, load, enough)
            return Traffic(
                self.prompts(seed),
                spec.concurrency,
                arrivals_s=times,
                warmup=warmup,
                requests=count,
                seed=seed,
                text=self.text,
            )
        c = spec.concurrency or 1
        if spec.fixed_requests is not None:
            warmup, count = max(c, min(3, load.warmup_requests)), spec.fixed_requests
        else:
            warmup, count = max(c, load.warmup_requests), most
        return Traffic(
            self.prompts(seed), concurrency=c, jitter_s=load.jitter_s, warmup=warmup, requests=requests or count,
            seed=seed, text=self.text,
        )  # fmt: skip

    def _finite(self, seed: int) -> Traffic:
        spec, count = self.spec, self.spec.requests or 1
        if spec.closed:
            clients = min(spec.concurrency or 1, count)
            return Traffic(
                self.prompts(seed),
                clients,
                jitter_s=self.load.jitter_s,
                requests=count,
                seed=seed,
                finite=True,
                text=self.text,
            )
        times = request_plan.due_times(spec, self.load, count)[self.offset :: self.every]
        cap = None if spec.concurrency is None else -(-spec.concurrency // self.every)
        return Traffic(
            self.prompts(seed), cap, arrivals_s=times, requests=len(times), seed=seed, finite=True, text=self.text
        )

    def simulate(self, times: Times, seed: int = 1, requests: int | None = None, *, log: bool = False) -> Result:
        """The result of simulating the largest group. requests: number to measure, for the whole load."""
        group = self.groups[0][0]
        if group is not self:
            return group.simulate(times, seed, requests and max(round(requests / self._equal(group)), 1), log=log)
        load = self.clients(seed, requests)
        if isinstance(times, NaiveTimes):
            return simulation.simulate_naive(times, load)
        if self.overlap and self.overlap != times.overlap:
            times = copy.copy(times)
            times.overlap = self.overlap
        config = self.server.config_for(self.spec.prompt_tokens + self.spec.output_tokens)
        return simulation.simulate(config, times, load, log=log)

    def _equal(self, group: Scenario) -> float:
        """Number of groups of this size that the whole load would fill."""
        whole = self.spec.clients
        return whole / (group.spec.concurrency or 1) if whole else self.server.layout.groups

    def outcome(self, times: Times, seed: int = 1, requests: int | None = None) -> Outcome:
        """The figures over all groups, each simulated. requests: number to measure, for the whole load."""
        parts = []
        for group, count in self.groups:
            asked = requests and max(round(requests / self._equal(group)), 1)
            parts.append((group._one(group.simulate(times, seed, asked), times), float(count)))
        return _together(parts)

    def summarize(self, result: Result, times: Times | None = None) -> Outcome:
        """The figures of the whole load from a result of the largest group, as if all groups were like it."""
        group = self.groups[0][0]
        return _together([(group._one(result, times), self._equal(group))])

    def _one(self, result: Result, times: Times | None) -> Outcome:
        ttft, tpot = result.mean("ttft_s"), result.mean("tpot_s")
        rate = len(result.measured) / result.seconds if result.seconds > 0 else math.nan
        tokens = result.output_tokens / result.seconds if result.seconds > 0 else math.nan
        tpot = 0.0 if math.isnan(tpot) else tpot
        in_flight = rate * result.mean("e2e_s")
        running = result.running_mean if self.running_gauge else in_flight - result.waiting_mean
        running = 1.0 if self.server.naive else running
        spread = spread_of({latency: result.measured.values(latency) for latency in LATENCIES})
        return Outcome(
            ttft, tpot, result.mean("e2e_s"), rate, tokens, running / tpot if tpot else 0.0,
            running, spread["ttft_s"]["p99"] if spread else math.nan,
            *self._window(result, times), len(result.measured), result.preemptions, result.hit_share, spread,
        )  # fmt: skip

    def _window(self, result: Result, times: Times | None) -> tuple[float, float]:
        """(seconds until the client stops, requests that it measures until then).

        The client stops when it has the minimum of requests and seconds and narrow confidence intervals of mean TTFT
        and latency, or at the maximum of requests or seconds. The intervals follow from the variance of the simulated
        requests, plus the host's noise if launches bound the time."""
        spec, load, n = self.spec, self.load, len(result.measured)
        if spec.requests is not None:
            return result.wall_s, n
        if spec.fixed_requests is not None or not n or result.seconds <= 0:
            return min(result.wall_s, load.max_seconds), n
        c = spec.clients or 1
        first, token = (False, False)
        if times is not None:
            first, token = times.launch_bound(spec.prompt_tokens, self.server.config.max_num_batched_tokens)
        needed = 0.0
        for of, narrow, bound in (("ttft_s", NARROW_TTFT, first), ("e2e_s", NARROW_E2E, token)):
            values = result.measured.values(of)
            mean = float(values.mean())
            variance = float(values.var()) * n / max(n - 1, 1) + (HOST_NOISE * bound * mean) ** 2
            needed = max(needed, variance * (1.96 / (narrow * mean)) ** 2)
        rate = n / result.seconds
        least, most = load.least_and_most(spec.clients)
        enough = min(max(needed, least, load.min_seconds * rate), most)
        drain = 0.0 if spec.closed else result.mean("e2e_s")
        count = min(whole_rounds(math.ceil(enough), c), max(rate * (load.max_seconds - drain - result.window[0]), 0.0))
        return min(result.window[0] + count / rate + drain, load.max_seconds), count


def _together(parts: Sequence[tuple[Outcome, float]]) -> Outcome:
    """The figures of all groups together. parts: [(outcome of a group, number of such groups)]."""
    first = parts[0][0]
    if len(parts) == 1 and parts[0][1] == 1:
        return first
    summed = {
        f: sum(getattr(o, f) * k for o, k in parts)
        for f in ("request_rate_per_s", "output_tok_per_s", "decode_tok_per_s", "running_mean", "requests")
    }
    rate = summed["request_rate_per_s"]

    weights = [o.request_rate_per_s * k / rate for o, k in parts]

    def weighted(values: Iterable[float]) -> float:
        return float(sum(w * v for w, v in zip(weights, values, strict=True)))

    means = ("ttft_s", "tpot_s", "e2e_s", "ttft_p99_s", "hit_share")
    mean = {f: weighted(getattr(o, f) for o, _ in parts) for f in means}
    spread = {
        latency: {p: weighted(o.spread.get(latency, {}).get(p, 0.0) for o, _ in parts) for p in PERCENTILES}
        for latency in first.spread
    }
    counts = {f: round(sum(getattr(o, f) * k for o, k in parts)) for f in ("measured", "preemptions")}
    return replace(first, **summed, **mean, **counts, spread=spread)  # type: ignore[arg-type]


def whole_rounds(least: int, concurrency: int | None) -> int:
    """`least`, rounded up to whole rounds of all clients. Synchronized clients end together, and a window that ends
    inside a round would count its time but not its requests."""
    c = concurrency or 1
    return -(-least // c) * c


def average(outcomes: Sequence[Outcome]) -> Outcome:
    """The arithmetic mean of outcomes."""
    return _merged(outcomes, lambda values: sum(values) / len(values))


def typical(outcomes: Sequence[Outcome]) -> Outcome:
    """The geometric mean of outcomes; the arithmetic mean for a figure that is not always positive."""
    return _merged(outcomes, lambda v: statistics.geometric_mean(v) if min(v) > 0 else sum(v) / len(v))


def _merged(outcomes: Sequence[Outcome], middle: Callable[[list[float]], float]) -> Outcome:
    names = [f for f in Outcome.__dataclass_fields__ if f != "spread"]
    found = {f: middle([float(getattr(o, f)) for o in outcomes]) for f in names}
    spread = {
        latency: {p: middle([o.spread[latency][p] for o in outcomes if latency in o.spread]) for p in percentiles}
        for latency, percentiles in outcomes[0].spread.items()
    }
    rounded = {f: round(found[f]) for f in ("measured", "preemptions")}
    return replace(outcomes[0], **found | rounded, spread=spread)  # type: ignore[arg-type]


def capacity_per_s(
    server: PredictedServer,
    times: Times,
    prompt_tokens: int,
    output_tokens: int,
    *,
    seed: int = 1,
    most: int = 256,
    like: PointSpec | None = None,
) -> float:
    """Requests/s at saturation, from a closed loop with as many clients as max_num_seqs and the KV pool allow (at most
    `most` per group). like: a point whose workload to use."""
    load = Load(jitter_s=0.0, warmup_requests=0)
    config, groups = server.config_for(prompt_tokens + output_tokens), server.layout.groups
    held = max(1, config.kv_blocks * config.block_size // (prompt_tokens + output_tokens))
    c = 1 if server.naive else max(1, min(config.max_num_seqs, held, most)) * groups
    spec = PointSpec("", server.name, "", "concurrency", prompt_tokens, output_tokens, concurrency=c)
    if like is not None:
        spec = replace(spec, workload=like.workload, workload_name=like.workload_name)
    return Scenario(server, spec, load).outcome(times, seed, requests=max(100, 3 * c)).request_rate_per_s
