"""The capacity of a server under a service level: largest concurrency and rate, goodput, cost, and what-ifs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..common import latency
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..config.params import RunParams, Slo, VllmEngine
from ..config.points import PointSpec
from ..config.workloads import Workload
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .forecaster import Forecaster, forecaster
from .refusal import Refusal
from .scenario import Scenario, whole_rounds
from .simulation_result import Result

GOODPUT_SHARE = 0.9  # minimum share of requests within the service level for a load to count as carried
MOST_CLIENTS = 1024
HIT_SHARE = 0.5  # share of prompts that are cached in the prefix-caching what-if
VARIED_REQUESTS = 400  # minimum to simulate if requests differ in length


@dataclass(frozen=True)
class LoadResult:
    """A load and its result. met_share: share of requests within the service level; goodput_per_s: those per second."""

    concurrency: int | None
    rate_per_s: float
    output_tok_per_s: float
    met_share: float
    goodput_per_s: float
    cost_per_million_output_tokens: float | None


def met_share(result: Result, slo: Slo) -> float:
    """Share of requests within all limits of the service level."""
    if not result.requests:
        return 0.0
    met = 0
    for r in result.requests:
        ttft, e2e = r.first_s - r.sent_s, r.end_s - r.sent_s
        tpot = latency.tpot_s(r.first_s, r.end_s, r.output_tokens) or 0.0
        limits = ((ttft, slo.ttft_s), (tpot, slo.tpot_s), (e2e, slo.e2e_s))
        met += all(limit is None or value <= limit for value, limit in limits)
    return met / len(result.requests)


def carry(f: Forecaster, spec: PointSpec, slo: Slo, price_per_hour: float, hit_share: float = 0.0) -> LoadResult:
    """The result of one load on a calibrated server. price_per_hour: of the server; hit_share: of prompts cached."""
    scenario = Scenario(f.server, spec, f.load, hit_share)
    c = spec.concurrency or 40
    least = 200 if spec.workload is None else VARIED_REQUESTS
    result = scenario.simulate(f.best, f.seed, whole_rounds(max(least, 3 * c), spec.concurrency))
    outcome, met = scenario.summarize(result), met_share(result, slo)  # only the largest group is simulated
    tokens = outcome.output_tok_per_s
    cost = price_per_hour / 3600 / tokens * 1e6 if price_per_hour and tokens > 0 else None
    rate = outcome.request_rate_per_s
    return LoadResult(spec.concurrency, rate, tokens, met, met * rate, cost)


@dataclass(frozen=True)
class LoadSearch:
    """Searches for the largest load that a calibrated server carries: 90 % of the requests meet the service level.

    price_per_hour: of the server; hit_share: of prompts cached; workload: for requests that differ; prompt_tokens and
    output_tokens are then its means."""

    f: Forecaster
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    price_per_hour: float = 0.0
    hit_share: float = 0.0
    workload: Workload | None = None

    def refusal(self) -> Refusal | None:
        """Why the server cannot serve the longest of these requests; None if it can."""
        return self.f.server.refuses(
            *(self.workload.longest_tokens() if self.workload else (self.prompt_tokens, self.output_tokens))
        )

    def largest_concurrency(self) -> LoadResult | None:
        """The largest C of a closed loop (by doubling, then bisection). None if C = 1 does not meet the level, or if
        the server cannot serve such a request."""
        if self.refusal():
            return None

        def at(c: int) -> LoadResult:
            return self._carried(f"c{c:04d}", "concurrency", concurrency=c)

        best, high = None, 1
        while high <= MOST_CLIENTS and (found := at(high)).met_share >= GOODPUT_SHARE:
            best, high = found, 2 * high
        if best is None:
            return None
        low = high // 2
        # exact for few clients, to 3 % for many
        return _between(best, low, high, at, halve=lambda a, b: (a + b) // 2, close=lambda a: max(1, a // 32))

    def largest_rate(self) -> LoadResult | None:
        """The largest Poisson rate, to 2 % of capacity. None as in largest_concurrency, and for conversations."""
        conversations = self.workload is not None and self.workload.turns > 1  # a turn waits for the answer before it
        if conversations or self.refusal():
            return None
        capacity = self.f.capacity(self.prompt_tokens, self.output_tokens, self._spec("", "concurrency"))
        if capacity is None:
            return None

        def at(rate: float) -> LoadResult:
            return self._carried(f"r{rate:.3f}", "arrival_rate", rate_per_s=rate)

        if (best := at(0.01 * capacity)).met_share < GOODPUT_SHARE:
            return None
        return _between(best, 0.0, capacity, at, halve=lambda a, b: (a + b) / 2, close=lambda _: 0.02 * capacity)

    def _carried(self, name: str, kind: str, **load: Any) -> LoadResult:
        return carry(self.f, self._spec(name, kind, **load), self.slo, self.price_per_hour, self.hit_share)

    def _spec(self, name: str, kind: str, **load: Any) -> PointSpec:
        lengths = self.prompt_tokens, self.output_tokens
        return PointSpec("capacity", self.f.server.name, name, kind, *lengths, workload=self.workload, **load)


def _between(best: LoadResult, low: Any, high: Any, at: Any, *, halve: Any, close: Any) -> LoadResult:
    """The largest load that is carried, by bisection between `low` (carried) and `high` (not carried).

    halve(low, high): the load between. close(low): largest distance at which the search ends."""
    while high - low > close(low):
        middle = halve(low, high)
        found = at(middle)
        if found.met_share >= GOODPUT_SHARE:
            best, low = found, middle
        else:
            high = middle
    return best


def capacity(
    params: RunParams,
    shape: ModelShape,
    gpu: Gpu,
    prompt_tokens: int,
    output_tokens: int,
    *,
    slo: Slo | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    calibration: Sequence[MeasuredPoint] | None = None,
    other_gpus: Sequence[tuple[Gpu, float]] = (),
    workload: Workload | None = None,
) -> list[dict[str, Any]]:
    """The capacity of every engine under the service level (default: the run's), and for vLLM under what-if changes.

    other_gpus: (gpu, price per hour). workload: for requests that differ; prompt_tokens and output_tokens are then its
    means. Rows: {engine, case, gpu, fits, note, by_concurrency, by_rate} with `LoadResult` as dicts. A what-if keeps
    the calibrated constants, which are fractions of datasheet figures. Another GPU uses its own priors.
    """
    level, price = slo or params.slo, params.hardware.price_per_hour
    rows = []
    for name, engine in params.engines.items():
        measured = [p for p in calibration or () if p.engine == name]
        known = dict((facts or {}).get(name) or {})
        base = forecaster(params, name, shape, gpu, facts=known, measured=measured, samples=2)
        cases: list[tuple[str, Forecaster, float, float]] = [("as it is", base, price, 0.0)]
        if isinstance(engine, VllmEngine):
            cases += [(case, f, price, 0.0) for case, f in _what_ifs(base, shape)]
            if workload is None:  # a workload defines what its prompts share
                cases.append((f"{HIT_SHARE:.0%} of prompts cached", base, price, HIT_SHARE))
        for other, cost in other_gpus:
            try:
                cases.append((other.name, forecaster(params, name, shape, other, samples=2), cost, 0.0))
            except ServebookError as error:  # for example, no bfloat16 on this GPU
                rows.append(_row(name, other.name, other, f"does not fit: {error.line()}", None, None))
        for case, f, cost, hits in cases:
            search = LoadSearch(f, prompt_tokens, output_tokens, level, cost, hits, workload)
            refusal, by_c, by_rate = search.refusal(), search.largest_concurrency(), search.largest_rate()
            row = _row(name, case, f.server.gpu, str(refusal) if refusal else None, by_c, by_rate)
            if refusal is None and by_c is None:
                row["note"] = "C = 1 already misses the service level"
            rows.append(row)
    return rows


def _row(
    engine: str, case: str, gpu: Gpu, note: str | None, by_concurrency: LoadResult | None, by_rate: LoadResult | None
) -> dict[str, Any]:
    return {
        "engine": engine, "case": case, "gpu": gpu.name, "fits": note is None, "note": note,
        "by_concurrency": asdict(by_concurrency) if by_concurrency else None,
        "by_rate": asdict(by_rate) if by_rate else None,
    }  # fmt: skip


def _what_ifs(base: Forecaster, shape: ModelShape) -> list[tuple[str, Forecaster]]:
    """[(case, calibrated server with that change)]: fp8 weights, fp8 KV cache, half and double token budget."""
    config, s = base.server.config, base.server
    out = []
    if shape.weight_bits > 8:
        fp8 = shape.with_fp8_weights()
        freed = s.layout.kv_tokens(shape, s.layout.weight_bytes(shape) - s.layout.weight_bytes(fp8))
        out.append(("fp8 weights", _with(base, shape=fp8, kv_tokens=s.kv_tokens + freed)))
    fp8 = shape.with_fp8_kv()
    if fp8.kv_bytes_per_token < shape.kv_bytes_per_token:
        more = shape.kv_bytes_per_token / fp8.kv_bytes_per_token
        out.append(("fp8 KV cache", _with(base, shape=fp8, kv_tokens=int(s.kv_tokens * more))))
    for factor in (0.5, 2):
        budget = int(config.max_num_batched_tokens * factor)
        if budget >= config.max_num_seqs:
            changed = replace(config, max_num_batched_tokens=budget)
            out.append((f"max_num_batched_tokens {budget}", _with(base, config=changed)))
    return out


def _with(base: Forecaster, **changes: Any) -> Forecaster:
    """The same calibrated server with other limits or weights."""
    server = replace(base.server, **changes)
    if "kv_tokens" in changes:
        blocks = max((server.kv_tokens // server.config.block_size - 1) // server.layout.pipeline, 1)
        server = replace(server, problem=None, config=replace(server.config, kv_blocks=blocks))
    return Forecaster(server, base.calibration, base.load, base.samples, base.seed, base.calibrated_prompts)


__all__ = ["LoadResult", "LoadSearch", "capacity", "carry", "met_share"]
