"""Predicts points for one calibrated engine of a run, with an 80 % interval on every metric.

A point is simulated in several replications, some with the most probable constants, some with constants drawn from
their posterior. Each has its own random client pauses. The value is the geometric mean over all of them. With one
client, with a naive server, or with a workload it is the mean over the replications with the most probable constants.
The interval combines the spread over the drawn constants with the error of the model's form (intervals.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..common.measured_point import METRICS, MeasuredPoint
from ..common.predicted_point import PredictedPoint, PredictedValue
from ..config.params import BatchingEngine, Load, NaiveEngine, RunParams
from ..config.points import PointSpec
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from . import explain
from .calibration import Calibration, calibrate
from .intervals import discrepancy, interval
from .point_fields import load_fields, notes, unserved, workload_fields
from .priors import HOST_NOISE
from .refusal import Refusal
from .scenario import Outcome, Scenario, average, capacity_per_s, typical, whole_rounds
from .server_limits import PredictedServer, Times, server
from .simulation_result import Result

SEEDS = (1, 2, 3, 4, 5, 6)
SAMPLES = 18
OVERLOAD = 1.01  # ratio of rate to capacity above which a point is overloaded; a simulated capacity is off by about 1 %
ENOUGH_REQUESTS = 30_000  # per point, over its replications with the most probable constants (at least one)
DRAWN_REQUESTS = 100_000  # per point, over its replications with drawn constants (at least two)
LOGGED_REQUESTS = 20_000  # largest finite run whose steps are logged
VARIED_REQUESTS = 400  # minimum in a closed loop whose requests differ in length
OPEN_REQUESTS = 600  # minimum in an open loop, whose figures depend on how arrivals cluster


@dataclass
class Forecaster:
    """One calibrated engine: predicts points. running_gauge, text: see Scenario."""

    server: PredictedServer
    calibration: Calibration
    load: Load
    samples: int = SAMPLES
    seed: int = 1
    calibrated_prompts: frozenset[int] = frozenset()
    running_gauge: bool = False
    text: bool = False

    def __post_init__(self) -> None:
        self.best: Times = self.server.times(self.calibration.constants)
        self._drawn = [self.server.times(c) for c in self._draw_constants()]

    @property
    def drawn(self) -> list[Times]:
        """Step times with constants drawn from their posterior; the second half mirrors the first."""
        return self._drawn

    def _draw_constants(self) -> list[dict[str, float]]:
        """Constants drawn from their posterior, with the host's launch time varied as it varies from run to run.

        Draws come in antithetic pairs, so that the middle of a few draws is the most probable constants.
        """
        draws, rng = self.calibration.samples(self.samples, self.seed), random.Random(f"host-{self.seed}")
        half = [rng.gauss(0.0, HOST_NOISE) for _ in range(-(-len(draws) // 2))]
        for constants, noise in zip(draws, [*half, *(-h for h in half)], strict=False):
            if "layer_launch_s" in constants:
                constants["layer_launch_s"] *= math.exp(noise)
        return draws

    def point(self, spec: PointSpec, hit_share: float = 0.0, cached_prompts: int = 0) -> PredictedPoint:
        """The predicted point. If the server cannot serve it, or not at that rate, fits is False and it has no figures.

        hit_share, cached_prompts: how much of its prompts the prefix cache holds (see Scenario).
        """
        out = load_fields(spec)
        longest = spec.workload.longest_tokens() if spec.workload else (spec.prompt_tokens, spec.output_tokens)
        refusal = self.server.refuses(*longest)
        if refusal:
            return unserved(spec, refusal)
        if overload := self.overload(spec):
            return unserved(spec, overload, self.load.max_seconds)
        scenario = Scenario(self.server, spec, self.load, hit_share, self.running_gauge, cached_prompts, text=self.text)
        count, first, expected = self._requests(scenario)
        each = spec.requests or count or 1
        draws = self._drawn[: max(2, DRAWN_REQUESTS // each)]
        drawn = [scenario.outcome(t, 100 + i, count) for i, t in enumerate(draws)]
        # an open loop has no client pauses to draw: every replication has the same arrivals
        seeds = SEEDS[: max(1, ENOUGH_REQUESTS // each) if spec.closed else 1]
        likely = [scenario.outcome(self.best, seed, count) for seed in seeds]
        # which requests share a step differs between replications; with a workload, which lists its requests one by
        # one, only the replications with the most probable constants are averaged
        shared_steps = spec.clients != 1 and not self.server.naive and spec.workload is None
        central = typical([*likely, *drawn]) if shared_steps else average(likely)
        if spec.rate_per_s is not None and spec.requests is None:
            # the simulated window may hold more or fewer arrivals than the rate gives on average
            tokens = central.output_tok_per_s * spec.rate_per_s / central.request_rate_per_s
            central = replace(central, request_rate_per_s=spec.rate_per_s, output_tok_per_s=tokens)
        parts = explain.breakdown(scenario, self.best, central, first)
        metrics = {m: self._interval(m, getattr(central, m), [getattr(o, m) for o in drawn], spec) for m in METRICS}
        remarks = notes(scenario, self.load.max_seconds, central, first, expected, self._excess(spec))
        return {
            **out,
            "metrics": metrics,
            "percentiles": self._percentiles(central, drawn, spec),
            "ttft_p99_s": central.ttft_p99_s,
            **workload_fields(spec, central, first),
            "running_mean": central.running_mean,
            "wall_s": central.window_s,
            "breakdown": parts,
            "waterfall": [list(step) for step in explain.waterfall(self.best, parts["tpot_s"])],
            "fits": True,
            "note": "; ".join(remarks) or None,
        }

    def _requests(self, scenario: Scenario) -> tuple[int | None, Result, int]:
        """(requests to simulate, the first seed's result, requests that the client will measure).

        The first is None if the point itself gives the number.
        """
        spec, c = scenario.spec, scenario.spec.clients or 1
        if spec.requests is not None:
            first = scenario.simulate(self.best, SEEDS[0], log=spec.requests <= LOGGED_REQUESTS)
            return None, first, spec.requests
        count = whole_rounds(max(120, 3 * c), spec.clients)
        if spec.workload is not None and spec.closed:
            count = whole_rounds(max(count, VARIED_REQUESTS), c)  # enough short and long requests
        if not spec.closed:
            count = max(self.load.max_requests, OPEN_REQUESTS)
        first = scenario.simulate(self.best, SEEDS[0], None if spec.fixed_requests else count, log=True)
        expected = int(scenario.summarize(first, self.best).requests)
        if spec.fixed_requests:
            return None, first, expected
        if spec.closed and (scenario.cached_prompts or expected < count):
            # as many rounds as the client has time for: the first rounds differ from later ones, and with cached
            # prompts the number of requests determines how many of them hit
            count = max(expected // c, 1) * c
            first = scenario.simulate(self.best, SEEDS[0], count, log=True)
        return count, first, expected

    def _percentiles(
        self, central: Outcome, drawn: Sequence[Outcome], spec: PointSpec
    ) -> dict[str, dict[str, PredictedValue]]:
        """{latency: {percentile over requests: value with its interval}}"""
        return {
            latency: {
                p: self._interval(latency, value, [o.spread[latency][p] for o in drawn if latency in o.spread], spec)
                for p, value in found.items()
            }
            for latency, found in central.spread.items()
        }

    def _interval(self, metric: str, value: float, drawn: Sequence[float], spec: PointSpec) -> PredictedValue:
        alone = (spec.clients == 1 or self.server.naive) and spec.prompt_tokens in self.calibrated_prompts
        return interval(value, drawn, discrepancy(metric, calibrated_alone=alone, cpu=self.server.gpu.is_cpu))

    def overload(self, spec: PointSpec) -> Refusal | None:
        """Why an open loop has no steady state to predict; None if it has one, or if it is a finite run."""
        excess = self._excess(spec) if spec.requests is None else None
        return Refusal(f"{excess}; a finite run (requests: N) has figures", headline="overloaded") if excess else None

    def _excess(self, spec: PointSpec) -> str | None:
        """A text with arrival rate and capacity if the rate exceeds the capacity; else None."""
        if spec.rate_per_s is None:
            return None
        most = self.capacity(spec.prompt_tokens, spec.output_tokens, spec)
        if most is None or spec.rate_per_s <= OVERLOAD * most:
            return None
        return f"{spec.rate_per_s:g} requests/s exceed the capacity of {most:.3g}"

    def capacity(self, prompt_tokens: int, output_tokens: int, like: PointSpec | None = None) -> float | None:
        """Requests/s at saturation; None if the server cannot serve such a request.

        like: a point with the workload.
        """
        if self.server.refuses(prompt_tokens, output_tokens):
            return None
        return capacity_per_s(self.server, self.best, prompt_tokens, output_tokens, like=like)


def forecaster(
    params: RunParams,
    name: str,
    shape: ModelShape,
    gpu: Gpu,
    *,
    facts: Mapping[str, Any] | None = None,
    measured: Sequence[MeasuredPoint] = (),
    samples: int = SAMPLES,
) -> Forecaster:
    """The Forecaster of one engine of a run, calibrated on its measured points (without points: on the datasheet)."""
    engine = params.engines[name]
    known = dict(facts or {})
    if isinstance(engine, BatchingEngine) and engine.enforce_eager:
        known.setdefault("cuda_graphs", False)
    if params.load.temperature > 0 and (params.load.top_p or 1.0) < 1:
        known.setdefault("sampling", "top-p")
    s = server(name, engine, shape, gpu, known)
    kind = "naive" if isinstance(engine, NaiveEngine) else "vllm"

    def simulated(times: Times, point: MeasuredPoint) -> dict[str, float]:
        c = point.concurrency or 1
        spec = PointSpec("", name, "", "concurrency", point.prompt_tokens, point.output_tokens, c)
        o = average([Scenario(s, spec, params.load).outcome(times, seed, max(60, 3 * c)) for seed in SEEDS])
        return {"ttft": o.ttft_s, "tpot": o.tpot_s, "output": o.output_tok_per_s}

    own = [p for p in measured if p.engine == name]
    calibration = calibrate(
        kind, s.shape, s.gpu, own, facts=known, budget=s.config.max_num_batched_tokens, layout=s.layout,
        times=s.times, simulated=simulated,
    )  # fmt: skip
    prompts = frozenset(p.prompt_tokens for p in own) if calibration.stage == "calibrated" else frozenset()
    return Forecaster(s, calibration, params.load, samples, params.load.seed, prompts)
