"""Simulates the target load on one set-up, split over its replicas, and compares it with the service level."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import ServebookError
from ..config import request_plan
from ..config.params import Load, RunParams
from ..config.points import PointSpec
from ..config.sweeps import LoadKind
from ..config.workloads import Workload
from .forecaster import Forecaster
from .intervals import form_error
from .scenario import Scenario, whole_rounds
from .server_limits import PredictedServer, Times
from .simulated_clients import Prompt
from .steady_state import Lengths

Limits = Mapping[str, tuple[float, float]]  # latency: (seconds, percentile), as Slo.limits
WHOLE_TRACE = 600  # a trace is simulated to its end if one group's share has at most this many requests
SAMPLE = 256  # maximum number of requests from which mean lengths are computed
# the step-time model's error to apply to each latency; TPOT dominates the end-to-end latency
FORM = {"ttft_s": "ttft", "tpot_s": "tpot", "e2e_s": "tpot"}
CERTAIN = 0.99  # probabilities above it count as equal
LEAST = 1e-9  # seconds; stands for a latency of zero
ARRIVAL_DRAWS = 4  # number of draws of the arrival times, the same for every set-up


@dataclass(frozen=True)
class Target:
    """The load over all replicas: its requests (a workload, or all of one length), and either a rate, a number of
    users, or a trace at a given speed."""

    prompt_tokens: int
    output_tokens: int
    workload: Workload | None = None
    workload_name: str = ""
    rate_per_s: float | None = None
    users: int | None = None
    trace_speed: float | None = None
    arrivals: str = "poisson"
    gamma_shape: float = 1.0
    seed: int = 1

    @classmethod
    def of(cls, params: RunParams, where: str) -> Target:
        """The target load in a run's `slo`. Raises ServebookError if there is none."""
        asked = params.slo.target
        if asked is None:
            raise ServebookError(
                "no target load", f"{where}, slo", "Set slo: {target: {rate_per_s: 10}}, or {users: 64}"
            )
        name = asked.workload or ""
        workload = params.workloads.get(name)
        if workload is None:
            sweep_name, sweep = next(iter(params.sweeps.items()))
            prompt, output = sweep.lengths()[0]
            example = sweep.example(sweep_name, "") if isinstance(sweep, LoadKind) else None
            if example is not None:
                workload, name = example.workload, example.workload_name
        else:
            prompt, output = workload.mean_tokens()
        return cls(
            prompt, output, workload, name, asked.rate_per_s, asked.users, asked.trace_speed, asked.arrivals,
            asked.gamma_shape, params.load.seed,
        )  # fmt: skip

    @property
    def repeats(self) -> bool:
        """Whether prompts share prefixes."""
        return self.workload is not None and self.workload.repeats

    def longest(self) -> tuple[int, int]:
        """(prompt, output) tokens of the request that needs the longest context."""
        return self.workload.longest_tokens() if self.workload else (self.prompt_tokens, self.output_tokens)

    def lengths(self, load: Load) -> Lengths:
        """Mean lengths for the closed form."""
        if self.workload is None:
            return Lengths.of([Prompt(self.prompt_tokens, self.output_tokens)])
        plan = request_plan.RequestPlan(self.workload, load.seed, self.workload_name)
        return Lengths.of([plan[i] for i in range(min(SAMPLE, len(plan)))])

    def mean_rate_per_s(self) -> float | None:
        """Mean arrival rate in requests/s; None for a closed loop."""
        if self.trace_speed is None or self.workload is None:
            return self.rate_per_s
        rows = self.workload.rows()
        seconds = float(rows.arrival_s[-1] - rows.arrival_s[0]) or 1.0
        return len(rows) / seconds * self.trace_speed

    def times(self, factor: float) -> Target:
        """The load multiplied by `factor`."""
        scaled = dict(self.__dict__)
        if self.users is not None:
            scaled["users"] = max(1, round(self.users * factor))
        elif self.rate_per_s is not None:
            scaled["rate_per_s"] = self.rate_per_s * factor
        else:
            scaled["trace_speed"] = (self.trace_speed or 1.0) * factor
        return Target(**scaled)

    def text(self) -> str:
        """The load in words, for the answer."""
        what = f"workload {self.workload_name}" if self.workload_name else "requests"
        sizes = f"{self.prompt_tokens:,} tokens in and {self.output_tokens:,} out" + (
            " on average" * bool(self.workload)
        )
        if self.users is not None:
            return f"{self.users:,} users, {what} of {sizes}"
        if self.rate_per_s is not None:
            shape = f" of shape {self.gamma_shape:g}" if self.arrivals == "gamma" else ""
            how = "" if self.arrivals == "poisson" else f" ({self.arrivals} gaps{shape})"
            return f"{self.rate_per_s:g} requests/s{how}, {what} of {sizes}"
        return f"the trace of {what} at {self.trace_speed:g} times its speed, {sizes}"

    def ends(self, groups: int) -> bool:
        """Whether this is a trace that is simulated to its end. Such a load has no steady state."""
        return (
            self.trace_speed is not None
            and self.workload is not None
            and len(self.workload.rows()) <= WHOLE_TRACE * groups
        )

    def scenario(self, server: PredictedServer, replicas: int, load: Load, requests: int, draw: int = 0) -> Scenario:
        """One group's share of the load, assuming that a router gives all replicas and their groups equal shares. draw:
        index of the draw of arrival times."""
        groups, point = replicas * server.layout.groups, f"target-{draw}"
        common: dict[str, Any] = {"workload": self.workload, "workload_name": self.workload_name}
        tokens = self.prompt_tokens, self.output_tokens
        if self.users is not None:
            clients = max(1, math.ceil(self.users / groups))
            spec = PointSpec("target", "vllm", point, "concurrency", *tokens, concurrency=clients, **common)
            return Scenario(server, spec, load, overlap=max(1, server.layout.pipeline // clients))
        if self.rate_per_s is not None:
            rate = self.rate_per_s / groups
            common |= {"arrivals": self.arrivals, "gamma_shape": self.gamma_shape}
            spec = PointSpec("target", "vllm", point, "arrival_rate", *tokens, rate_per_s=rate, **common)
            return Scenario(server, spec, load, overlap=1)
        assert self.workload is not None
        count = min(len(self.workload.rows()), max(requests, WHOLE_TRACE) * groups)
        common["workload"] = self.workload.first(count)
        spec = PointSpec(
            "target", "vllm", point, "trace", *tokens, requests=count, speed=self.trace_speed or 1.0, **common
        )
        return Scenario(server, spec, load, overlap=1, every=groups)


@dataclass(frozen=True)
class Trial:
    """One simulation of a set-up at a load. values: {latency with a limit: seconds at its percentile}.
    output_tok_per_s and request_rate_per_s are totals over all replicas; for arrivals, output_tok_per_s is the target
    rate times the mean output length."""

    replicas: int
    values: dict[str, float]
    ratios: dict[str, float]  # value / limit
    tpot_mean_s: float
    output_tok_per_s: float
    request_rate_per_s: float
    running: float  # in one group
    waiting: float
    preemptions: int
    hit_share: float

    @property
    def worst(self) -> float:
        """The largest ratio of a value to its limit; at most 1 if the level is met."""
        return max(self.ratios.values())


def attempt(
    server: PredictedServer, times: Times, target: Target, replicas: int, limits: Limits, *, load: Load, running: float,
    requests: int, draw: int = 0,
) -> Trial | None:  # fmt: skip
    """The result of simulating one group; None if a request does not fit into its share of the KV pool. running:
    number of running requests by the closed form, the least number of warm-up requests."""
    load = load.model_copy(update={"warmup_requests": max(load.warmup_requests, math.ceil(running))})
    scenario = target.scenario(server, replicas, load, requests, draw)
    clients = scenario.spec.clients
    count = whole_rounds(max(requests, 2 * (clients or 1)), clients)
    try:
        result = scenario.simulate(times, load.seed + draw, count)
    except ValueError:
        return None
    found = {m: result.measured.values(m) for m in ("ttft_s", "tpot_s", "e2e_s")}
    # answers of one token have no TPOT; a window without completions meets no level
    unknown = 0.0 if len(result.measured) else math.inf
    values = {
        m: float(np.percentile(found[m], percentile)) if len(found[m]) else unknown
        for m, (_, percentile) in limits.items()
    }
    groups = replicas * server.layout.groups
    seconds = result.seconds if result.seconds > 0 else math.inf
    tpot = float(found["tpot_s"].mean()) if len(found["tpot_s"]) else 0.0
    output = groups * result.output_tokens / seconds
    if (rate := target.mean_rate_per_s()) is not None:  # the simulated window may be too short for a mean
        output = rate * target.output_tokens
    return Trial(
        replicas, values, {m: values[m] / limits[m][0] for m in limits}, tpot,
        output, groups * len(result.measured) / seconds, result.running_mean,
        result.waiting_mean, result.preemptions, result.hit_share,
    )  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A set-up at the target load, over draws of the constants. values: {latency: {value, low, high}} with 80 %
    intervals; probability: that of meeting all limits; by_limit: {latency: probability of meeting its limit}; form:
    {latency: relative error of the step-time model, see chance}."""

    replicas: int
    values: dict[str, dict[str, float]]
    probability: float
    by_limit: dict[str, float]
    trials: tuple[Trial, ...]
    form: dict[str, float]

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(t, name) for t in self.trials)

    @property
    def tightest(self) -> str:
        """The latency most likely to miss its limit; if none is likely to, the one nearest to its limit."""
        return min(self.by_limit, key=lambda m: (min(self.by_limit[m], CERTAIN), -self.ratio(m)))

    def ratio(self, latency: str) -> float:
        """Ratio of a latency to its limit, as a geometric mean over the draws."""
        return statistics.geometric_mean(max(t.ratios[latency], LEAST) for t in self.trials)

    def reach(self, latency: str, probability: float) -> float:
        """The limit in seconds that the latency meets with this probability."""
        return reach([t.values[latency] for t in self.trials], self.form[latency], probability)


def judge(
    f: Forecaster, target: Target, replicas: int, limits: Limits, *, running: float, requests: int
) -> Judged | None:
    """The probability that the set-up meets the level; None if a request does not fit. Each draw of the constants is
    simulated with a draw of the arrivals. The step-time model's error (see chance) is taken as
    independent for each latency."""
    trials: list[Trial] = []
    for i, times in enumerate(f.drawn):
        arrivals = i % -(-len(f.drawn) // 2) % ARRIVAL_DRAWS  # antithetic draws get the same arrivals
        found = attempt(
            f.server, times, target, replicas, limits, load=f.load, running=running, requests=requests, draw=arrivals
        )
        if found is None:
            return None
        trials.append(found)
    form = {m: form_error(FORM[m], f.calibration.stage) for m in limits}
    chances = {m: [chance([t.values[m]], limit, form[m]) for t in trials] for m, (limit, _) in limits.items()}
    together = [math.prod(chances[m][i] for m in limits) for i in range(len(trials))]
    by_limit = {m: statistics.fmean(chances[m]) for m in limits}
    values = {m: _span([t.values[m] for t in trials], form[m]) for m in limits}
    return Judged(replicas, values, statistics.fmean(together), by_limit, tuple(trials), form)


def chance(drawn: Sequence[float], limit: float, form: float) -> float:
    """The probability of meeting a limit.

    drawn: the latency in seconds for each draw of the constants. form: relative error of the step-time model
    (intervals.form_error). That error differs from host to host, so its variance is not known and it follows
    Student's t, whose heavy tails agree with public points (benchmarks/bench_choose.py --probabilities)."""
    near = [math.log(limit) - math.log(max(v, LEAST)) for v in drawn if v < math.inf]
    return sum(_student(x / form) for x in near) / len(drawn)


def reach(drawn: Sequence[float], form: float, probability: float) -> float:
    """The limit in seconds that is met with this probability (the inverse of chance)."""
    if not all(map(math.isfinite, drawn)):
        return math.inf
    low, high = LEAST, 1e9
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if chance(drawn, middle, form) < probability else (low, middle)
    return high


def _span(drawn: Sequence[float], form: float) -> dict[str, float]:
    """Geometric mean over the draws, and the 80 % interval."""
    middle = statistics.geometric_mean(max(v, LEAST) for v in drawn)
    return {"value": middle, "low": reach(drawn, form, 0.1), "high": reach(drawn, form, 0.9)}


def _student(x: float) -> float:
    """The distribution function of Student's t with 3 degrees of freedom."""
    x /= math.sqrt(3)
    return 0.5 + (x / (1 + x * x) + math.atan(x)) / math.pi
