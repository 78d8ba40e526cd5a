"""Every point of a run predicted with an 80 % interval, and frozen before it is measured.

Several courses of a point are simulated: some with the most probable constants, some with constants drawn from their
posterior, each with other pauses of its clients. Value: the geometric mean of all of them, as no course is likelier
than another; with one client, or a server that takes one request at a time, the mean of those with the most probable
constants. Interval: the drawn ones' spread, and on top what the model itself gets wrong (DISCREPANCY); log-normal in
each metric.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

from ..common.errors import ServebookError
from ..common.measured_point import METRICS, MeasuredPoint
from ..common.predicted_point import PredictedPoint, PredictedValue, Prediction
from ..config.params import ArrivalRateSweep, BatchingEngine, Load, NaiveEngine, RunParams
from ..config.points import PointSpec, RepeatedPoint
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from . import explain
from .calibration import Z80, Calibration, calibrate
from .priors import HOST_NOISE
from .scenario import Outcome, Scenario, average, capacity_per_s, typical, whole_rounds
from .server_limits import PredictedServer, Times, server
from .simulation import Result, over_time

__all__ = ["Forecaster", "predict_published", "predict_run"]

SEEDS = (1, 2, 3, 4, 5, 6)
SAMPLES = 18
OVERLOAD = 1.01  # of the capacity, which one simulation knows to about a percent
ENOUGH_REQUESTS = 30_000  # in thousands of them one course's chances cancel out
DRAWN_REQUESTS = 100_000  # of a finite run, over all its courses with drawn constants
LOGGED_REQUESTS = 20_000  # of a finite run, up to which the steps behind a time are kept
VARIED_REQUESTS = 400  # of a closed loop whose requests differ
OPEN_REQUESTS = 600  # of an open loop, whose figures depend on how its arrivals happen to bunch
# relative sd of what the form gets wrong: at C = 1 on a calibrated shape, and elsewhere; of TPOT and the rates the size
# of the residuals of the two public tables and of 73 H200 points (mean absolute 1.8 and 1.6 %)
DISCREPANCY = {"ttft_s": (0.02, 0.05), "tpot_s": (0.010, 0.010)}
RATE_DISCREPANCY = (0.012, 0.010)
CPU_DISCREPANCY = 5.0  # a shared CPU varies that much more
PUBLISHED_JITTER_S = 0.05  # assumed of the posts' client, which names none: C = 1 figures allow 0 to 0.05


# the same on loads and hosts of others, by metric: (from the datasheet, calibrated)
FORM_ERROR = {"ttft": (0.17, 0.13), "tpot": (0.04, 0.05), "output": (0.05, 0.07)}


def form_error(metric: str, stage: str) -> float:
    """Relative sd of what the form gets wrong on a load of somebody else's (ttft, tpot, output)."""
    return FORM_ERROR[metric][stage == "calibrated"]


@dataclass
class Forecaster:
    """One engine, calibrated: predicts points. hit_share: prompts served from the prefix cache, by (sweep, point)."""

    server: PredictedServer
    calibration: Calibration
    load: Load
    samples: int = SAMPLES
    seed: int = 1
    calibrated_prompts: frozenset[int] = frozenset()
    running_gauge: bool = False  # see Scenario
    text: bool = False  # see Scenario

    def __post_init__(self) -> None:
        self.best: Times = self.server.times(self.calibration.constants)
        self._drawn = [self.server.times(c) for c in self._another_day()]

    @property
    def drawn(self) -> list[Times]:
        """Step times with constants drawn from their posterior; the second half mirrors the first."""
        return self._drawn

    def _another_day(self) -> list[dict[str, float]]:
        """Constants drawn from their posterior, on a host that launches as fast as it happens to that minute; in
        antithetic pairs, so that few draws have the most probable constants for their middle."""
        draws, rng = self.calibration.samples(self.samples, self.seed), random.Random(f"host-{self.seed}")
        half = [rng.gauss(0.0, HOST_NOISE) for _ in range(-(-len(draws) // 2))]
        for constants, noise in zip(draws, [*half, *(-h for h in half)], strict=False):
            if "layer_launch_s" in constants:
                constants["layer_launch_s"] *= math.exp(noise)
        return draws

    def point(self, spec: PointSpec, hit_share: float = 0.0, cached_prompts: int = 0) -> PredictedPoint:
        """The predicted point; fits False and no figures where the server cannot serve it, or
        not at that rate.
        hit_share, cached_prompts: what of its prompts the prefix cache holds (see Scenario)."""
        out = _asked(spec)
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
        # without pauses of clients to draw, one course of the arrivals is like the other
        seeds = SEEDS[: max(1, ENOUGH_REQUESTS // each) if spec.closed else 1]
        likely = [scenario.outcome(self.best, seed, count) for seed in seeds]
        # requests that meet in a step, now so, now otherwise; where a workload tells them one by one, the most probable
        # constants tell how they meet
        met = spec.clients != 1 and not self.server.naive and spec.workload is None
        central = typical([*likely, *drawn]) if met else average(likely)
        if spec.rate_per_s is not None and spec.requests is None:
            # a simulated window happens to hold more or fewer arrivals than the rate asks for
            tokens = central.output_tok_per_s * spec.rate_per_s / central.request_rate_per_s
            central = replace(central, request_rate_per_s=spec.rate_per_s, output_tok_per_s=tokens)
        parts = explain.breakdown(scenario, self.best, central, first)
        return {
            **out,
            "metrics": {m: self._interval(m, getattr(central, m), drawn, spec) for m in METRICS},
            "percentiles": self._percentiles(central, drawn, spec),
            "ttft_p99_s": central.ttft_p99_s,
            **_content(spec, central, first),
            "running_mean": central.running_mean,
            "wall_s": central.window_s,
            "breakdown": parts,
            "waterfall": [list(step) for step in explain.waterfall(self.best, parts["tpot_s"])],
            "fits": True,
            "note": "; ".join(self._notes(scenario, central, first, expected)) or None,
        }

    def _requests(self, scenario: Scenario) -> tuple[int | None, Result, int]:
        """(requests to simulate, None: as many as the point says; the first seed's result; requests that the client
        will measure)"""
        spec, c = scenario.spec, scenario.spec.clients or 1
        if spec.requests is not None:
            first = scenario.simulate(self.best, SEEDS[0], log=spec.requests <= LOGGED_REQUESTS)
            return None, first, spec.requests
        count = whole_rounds(max(120, 3 * c), spec.clients)
        if spec.workload is not None and spec.closed:
            count = whole_rounds(max(count, VARIED_REQUESTS), c)  # enough to meet short and long ones
        if not spec.closed:
            count = max(self.load.max_requests, OPEN_REQUESTS)
        first = scenario.simulate(self.best, SEEDS[0], None if spec.fixed_requests else count, log=True)
        expected = int(scenario.summarize(first, self.best).requests)
        if spec.fixed_requests:
            return None, first, expected
        if spec.closed and (scenario.cached_prompts or expected < count):
            # as many rounds as the client has time for: the first differ from those that follow, and which requests
            # find their prompts in the cache depends on how many there are
            count = max(expected // c, 1) * c
            first = scenario.simulate(self.best, SEEDS[0], count, log=True)
        return count, first, expected

    def _notes(self, scenario: Scenario, central: Outcome, first: Result, expected: int) -> list[str]:
        """What a reader of the point should know."""
        notes, spec, limit = [*self.server.notes], scenario.spec, self.load.max_seconds
        c = spec.clients
        if spec.requests is not None:
            sent = f"all {spec.requests} requests from the first to the last, with the ramp and the tail"
            notes.append(f"a finite run: {sent}")
            if excess := self._excess(spec):
                notes.append(f"more than it serves while requests arrive ({excess}): figures depend on their number")
        elif c and not spec.fixed_requests and expected < c:
            # clients move in waves: the next round ends as a whole, or not at all
            needed = first.window[0] + c / central.request_rate_per_s
            takes = f"max_seconds ({limit:g} s), only in {needed:.0f} s"
            notes.append(f"no measured round of all {c} clients ends in {takes}")
        elif central.window_s >= limit * (1 - 1e-9):  # a mean of equal numbers may miss them by a bit
            notes.append(f"cut off at max_seconds ({limit:g} s)")
        if central.preemptions:
            notes.append("the KV pool overflows: requests are preempted and recomputed")
        elif c and c > central.running_mean * 1.5 and not self.server.naive:
            notes.append(f"only {central.running_mean:.0f} of {c} requests run at a time")
        if scenario.cached_prompts:
            found = sum(r.id < scenario.cached_prompts for r in first.requests) / max(len(first.requests), 1)
            notes.append(f"{found:.0%} of its prompts are expected in the prefix cache")
        return notes

    def _percentiles(
        self, central: Outcome, drawn: Sequence[Outcome], spec: PointSpec
    ) -> dict[str, dict[str, PredictedValue]]:
        """Each latency's percentiles over requests, with their intervals."""
        return {
            latency: {
                p: self._span(latency, value, [o.spread[latency][p] for o in drawn if latency in o.spread], spec)
                for p, value in found.items()
            }
            for latency, found in central.spread.items()
        }

    def _interval(self, metric: str, value: float, drawn: Sequence[Outcome], spec: PointSpec) -> PredictedValue:
        return self._span(metric, value, [getattr(o, metric) for o in drawn], spec)

    def _span(self, metric: str, value: float, drawn: Sequence[float], spec: PointSpec) -> PredictedValue:
        values = [v for v in drawn if v > 0 and math.isfinite(v)]
        if not values or not value > 0:
            return {"value": value, "low": value, "high": value}
        logs = [math.log(v) for v in values]
        mean = sum(logs) / len(logs)
        spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / max(len(logs) - 1, 1))
        half = Z80 * math.hypot(spread, self._discrepancy(metric, spec))
        return {"value": value, "low": value * math.exp(-half), "high": value * math.exp(half)}

    def _discrepancy(self, metric: str, spec: PointSpec) -> float:
        alone = (spec.clients == 1 or self.server.naive) and spec.prompt_tokens in self.calibrated_prompts
        at = 0 if alone else 1
        share = DISCREPANCY.get("tpot_s" if metric == "decode_tok_per_s" else metric, RATE_DISCREPANCY)[at]
        return share * (CPU_DISCREPANCY if self.server.gpu.is_cpu else 1.0)

    def overload(self, spec: PointSpec) -> str | None:
        """Why an endless open loop has no steady state to predict; None where it has one, or has an end."""
        excess = self._excess(spec) if spec.requests is None else None
        return f"overloaded: {excess}; a finite run (requests: N) has figures" if excess else None

    def _excess(self, spec: PointSpec) -> str | None:
        """By how much more arrives than is served, None where no more does."""
        if spec.rate_per_s is None:
            return None
        most = self.capacity(spec.prompt_tokens, spec.output_tokens, spec)
        if most is None or spec.rate_per_s <= OVERLOAD * most:
            return None
        return f"{spec.rate_per_s:g} requests/s are more than the {most:.3g} it serves"

    def capacity(self, prompt_tokens: int, output_tokens: int, like: PointSpec | None = None) -> float | None:
        """Requests/s at saturation; None where the server cannot serve such a request. like: a point with such a
        workload."""
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
    """One engine of a run, calibrated on its measured points (none: from the datasheet)."""
    engine = params.engines[name]
    known = dict(facts or {})
    if isinstance(engine, BatchingEngine) and engine.enforce_eager:
        known.setdefault("cuda_graphs", False)
    s = server(name, engine, shape, gpu, known)
    kind = "naive" if isinstance(engine, NaiveEngine) else "vllm"

    def simulated(times: Times, point: MeasuredPoint) -> dict[str, float]:
        c = point.concurrency or 1
        spec = PointSpec("", name, "", "concurrency", point.prompt_tokens, point.output_tokens, c)
        o = average([Scenario(s, spec, params.load).outcome(times, seed, max(60, 3 * c)) for seed in SEEDS])
        return {"ttft": o.ttft_s, "tpot": o.tpot_s}

    own = [p for p in measured if p.engine == name]
    calibration = calibrate(
        kind, s.shape, gpu, own, facts=known, budget=s.config.max_num_batched_tokens, layout=s.layout,
        captured_tokens=s.captured_tokens, simulated=simulated,
    )  # fmt: skip
    prompts = frozenset(p.prompt_tokens for p in own) if calibration.stage == "calibrated" else frozenset()
    return Forecaster(s, calibration, params.load, samples, params.load.seed, prompts)


def predict_run(
    params: RunParams,
    shape: ModelShape,
    gpu: Gpu,
    *,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    calibration: Sequence[MeasuredPoint] | None = None,
    engines: Sequence[str] | None = None,
    capacity_per_s: Mapping[str, float] | None = None,
    n_samples: int = SAMPLES,
    on_point: Callable[[int, int], None] | None = None,
) -> Prediction:
    """Predict every point of the run, for all engines or those named.

    facts: {engine: what it said of itself}. calibration: measured C = 1 points, which each engine learns from.
    capacity_per_s: capacities that are final already, by "sweep/engine". on_point hears how many of an engine's points
    are predicted, and of how many. Returns
    {"points": [...], "constants": {engine: ...}, "capacity_per_s": {"sweep/engine": requests/s that shares are of},
    "servers": {engine: limits}, "inputs": what all of it follows from}.
    """
    out: Prediction = {"points": [], "constants": {}, "capacity_per_s": {}, "servers": {}}
    for name in engines or params.engines:
        measured = [p for p in calibration or () if p.engine == name]
        f = forecaster(params, name, shape, gpu, facts=(facts or {}).get(name), measured=measured, samples=n_samples)
        out["constants"][name] = f.calibration.as_dict()
        out["servers"][name] = _limits(f.server)
        specs = params.calibration_points(name)
        for sweep, s in params.sweeps.items():
            capacity = None
            if isinstance(s, ArrivalRateSweep) and (s.engines is None or name in s.engines):
                capacity = (capacity_per_s or {}).get(f"{sweep}/{name}") or f.capacity(
                    *s.tokens, s.example(sweep, name)
                )
                if capacity is not None:
                    capacity = round(capacity, 4)
                    out["capacity_per_s"][f"{sweep}/{name}"] = capacity
            specs += params.sweep_points(sweep, name, capacity)
        sent: dict[str, int] = {}  # of each set of prompts, so far
        for done, spec in enumerate(specs):
            if on_point is not None:
                on_point(done, len(specs))
            out["points"].append(point := f.point(spec, cached_prompts=_still_cached(f.server, spec, sent)))
            if isinstance(spec, RepeatedPoint) and point["fits"]:
                ended = point["wall_s"] * point["metrics"]["request_rate_per_s"]["value"]
                sent[spec.prompt_set] = max(sent.get(spec.prompt_set, 0), int(ended) + (spec.concurrency or 1))
    out["inputs"] = _inputs(params, shape, gpu, facts, calibration)
    return out


def predict_published(
    params: RunParams,
    shape: ModelShape,
    gpu: Gpu,
    measured: Sequence[MeasuredPoint],
    facts: Mapping[str, Any] | None = None,
    *,
    n_samples: int = SAMPLES,
) -> Prediction:
    """Predict points that somebody measured, learning from those at C = 1 only. facts: {"engines": {name: …}} or
    {name: …}. A point's cache_hit_share is taken as the share of its prompts that the prefix cache held. Points come
    back in the order given."""
    by_engine = (facts or {}).get("engines", facts or {})
    client = (facts or {}).get("load") or {}
    jitter = 0.0 if client.get("client") == "vllm bench serve" else client.get("jitter_s", PUBLISHED_JITTER_S)
    theirs = {"jitter_s": float(jitter), "max_seconds": 1e6}  # nobody says when they stopped
    params = params.model_copy(update={"load": params.load.model_copy(update=theirs)})
    out: Prediction = {"points": [], "constants": {}, "capacity_per_s": {}, "servers": {}}
    predicted: dict[int, PredictedPoint] = {}
    for name in dict.fromkeys(p.engine for p in measured):
        if name not in params.engines:
            raise ServebookError(
                f"the measured engine {name!r} is not in the parameters",
                "engines",
                f"There are {', '.join(params.engines)}",
            )
        own = [p for p in measured if p.engine == name]
        unique = {(p.prompt_tokens, p.output_tokens): p for p in own if p.concurrency == 1}
        f = forecaster(
            params, name, shape, gpu, facts=by_engine.get(name), measured=list(unique.values()), samples=n_samples
        )
        f.running_gauge = True
        out["constants"][name] = f.calibration.as_dict()
        out["servers"][name] = _limits(f.server)
        for p in own:
            kind = p.kind or "concurrency"
            spec = PointSpec(p.sweep, name, p.point_id, kind, p.prompt_tokens, p.output_tokens, p.concurrency)
            predicted[id(p)] = f.point(spec, p.cache_hit_share or 0.0)
    out["points"] = [predicted[id(p)] for p in measured]
    out["inputs"] = _inputs(params, shape, gpu, facts, measured)
    return out


def _still_cached(s: PredictedServer, spec: PointSpec, sent: Mapping[str, int]) -> int:
    """How many of a repeated point's prompts, in the order sent, earlier points of its set have left in the cache."""
    if not isinstance(spec, RepeatedPoint) or s.kv_tokens <= 0:
        return 0
    return min(sent.get(spec.prompt_set, 0), s.kv_tokens // (spec.prompt_tokens + spec.output_tokens))


def _asked(spec: PointSpec) -> PredictedPoint:
    """A predicted point of which nothing but the load is known."""
    out: PredictedPoint = {
        "sweep": spec.sweep, "engine": spec.engine, "point": spec.point, "kind": spec.kind,
        "concurrency": spec.clients, "rate_per_s": spec.rate_per_s, "prompt_tokens": spec.prompt_tokens,
        "output_tokens": spec.output_tokens, "metrics": {},
    }  # fmt: skip
    if isinstance(spec, RepeatedPoint):
        out["repeats_prompts"] = True
    if spec.workload is not None or spec.requests is not None:
        out["workload"], out["requests"] = spec.workload_name or None, spec.requests
    return out


def unserved(spec: PointSpec, why: str | None, wall_s: float = 0.0) -> PredictedPoint:
    """A point without figures, and why."""
    return {**_asked(spec), "wall_s": wall_s, "breakdown": {}, "fits": False, "note": why}


class _Content(TypedDict, total=False):
    hit_share: float
    series: Any


def _content(spec: PointSpec, central: Outcome, first: Result) -> _Content:
    """What of a point only workloads and finite runs have: hits in the prefix cache, and the course over time."""
    out: _Content = {}
    if spec.workload is not None and spec.workload.repeats:
        out["hit_share"] = central.hit_share
    if spec.requests is not None:
        out["series"] = over_time(first)
    return out


def _limits(s: PredictedServer) -> dict[str, Any]:
    return {
        "kind": s.kind, "max_num_batched_tokens": s.config.max_num_batched_tokens,
        "max_num_seqs": s.config.max_num_seqs, "max_model_len": s.max_model_len, "kv_cache_tokens": s.kv_tokens,
        "kv_cache_source": s.kv_source, "async_scheduling": s.config.async_scheduling, "problem": s.problem,
    }  # fmt: skip


def _inputs(
    params: RunParams, shape: ModelShape, gpu: Gpu, facts: Any, calibration: Sequence[MeasuredPoint] | None
) -> dict[str, Any]:
    keep = (
        "sweep", "engine", "point", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s",
        "server_prefill_mean_s", "server_queue_mean_s", "cache_hit_share", "started_at",
    )  # fmt: skip
    return {
        "params": params.model_dump(mode="json"),
        **({"workloads": {n: w.identity() for n, w in params.workloads.items()}} if params.workloads else {}),
        "shape": asdict(shape),
        "gpu": asdict(gpu),
        "facts": {k: dict(v) if isinstance(v, Mapping) else v for k, v in (facts or {}).items()},
        "calibration": [{k: stored[k] for k in keep} for stored in (p.to_json() for p in calibration or ())],
    }
