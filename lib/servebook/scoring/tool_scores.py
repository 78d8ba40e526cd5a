"""Another tool's results against the prediction of the same load: per percentile, and the cause of the largest gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..common.predicted_point import CAUSES
from ..config.params import RunParams
from ..config.points import PointSpec
from ..config.request_plan import GROUP, UNIQUE
from ..config.traces import Segments, Trace
from ..config.workloads import Workload
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape
from ..predictor.forecaster import forecaster
from .tool_result import LATENCIES, STATISTICS, TTFT_LATE_S, ToolResult

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
RATES = {"request_rate_per_s": "requests/s", "output_tok_per_s": "output tokens/s"}
NOTEWORTHY = 0.1  # errors above this get a cause


@dataclass(frozen=True)
class ToolRow:
    """One figure: predicted with its 80 % interval, and measured. In seconds, or a rate."""

    metric: str
    statistic: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted / measured − 1."""
        return self.predicted / self.measured - 1

    @property
    def name(self) -> str:
        """The figure in words."""
        return f"{NAMES[self.metric]} {self.statistic}" if self.metric in NAMES else RATES[self.metric]


@dataclass(frozen=True)
class ToolScore:
    """One scored load. conditions: lines stated in the file, assumed: lines that the file does not state."""

    result: ToolResult
    point: Mapping[str, Any]
    rows: tuple[ToolRow, ...]
    conditions: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def gap(self) -> str:
        """The likely cause of the largest gap."""
        return _points_to(self.rows, self.point)


def score_result(
    params: RunParams, shape: ModelShape, gpu: Gpu, engine: str, result: ToolResult, workload: Workload | None = None
) -> ToolScore:
    """Predict the load of a result from the datasheet alone, and compare. workload: what the file does not contain
    about the requests (length distribution, shared prefixes)."""
    assumed = [*result.assumed]
    load = params.load.model_copy(update={"jitter_s": 0.0, "max_seconds": 1e6})
    f = forecaster(params.model_copy(update={"load": load}), engine, shape, gpu, facts={"usage_per_event": False})
    f.text = result.text
    if result.text:
        assumed.append("prompts sent as texts, which the server makes tokens of")
    spec = _spec(engine, result, _requests(result, workload, assumed))
    point = f.point(spec)
    late = _client_late(result, point, assumed)
    rows = tuple(_compared(result, point, late)) if point["fits"] else ()
    stated = (*result.stated, *([f"{result.failed} failed"] if result.failed else []))
    if not f.server.naive:
        assumed.append(
            f"{f.server.config.max_num_batched_tokens:,} tokens a step, {f.server.config.max_num_seqs:,} sequences, "
            f"{f.server.kv_tokens:,} tokens of KV cache ({f.server.kv_source})"
        )
    return ToolScore(result, point, rows, stated, tuple(assumed))


def _requests(result: ToolResult, workload: Workload | None, assumed: list[str]) -> Workload:
    """The requests, from the file and the workload."""
    if len(result.lengths) != result.requests:
        if workload is not None:
            assumed.append("lengths as the workload of the parameters says")
            return workload
        assumed.append("every request of the mean length")
        return Workload.of(*result.lengths[0])
    prompts, outputs = (np.array(column, np.int64) for column in zip(*result.lengths, strict=True))
    starts = np.array(result.starts_s) if result.starts_s else np.zeros(len(prompts))
    shared = [_shared(i, int(p), workload) for i, p in enumerate(prompts)]
    if workload is not None and any(shared):
        assumed.append("prompts share what the workload of the parameters says")
    before = np.full(len(prompts), -1, np.int64)
    return Workload.of_rows(Trace(starts, prompts, outputs, before, shared, bool(result.starts_s), ""))


def _shared(index: int, prompt: int, workload: Workload | None) -> Segments:
    if workload is None or workload.trace is not None:
        return ()
    prefix, unique = workload.shared_prefix, workload.unique_prompts
    own = index % unique if unique else index
    parts = [(own % prefix.groups * 4 + GROUP, min(prefix.tokens, prompt))] if prefix else []
    return (*parts, (own * 4 + UNIQUE, prompt - sum(n for _, n in parts))) if unique else tuple(parts)


def _spec(engine: str, result: ToolResult, workload: Workload) -> PointSpec:
    spec = PointSpec("score", engine, "score", result.kind, *workload.mean_tokens(), workload=workload)
    spec = replace(spec, requests=result.requests, concurrency=result.concurrency)
    if result.kind == "arrival_rate":
        gamma = result.burstiness != 1.0 and result.arrivals == "poisson"
        arrivals = "gamma" if gamma else result.arrivals
        spec = replace(spec, rate_per_s=result.rate_per_s, arrivals=arrivals, gamma_shape=result.burstiness)
    return spec


def _client_late(result: ToolResult, point: Mapping[str, Any], assumed: list[str]) -> float:
    """Seconds that the tool's client adds to the time to first token."""
    each = TTFT_LATE_S.get(result.tool, 0.0)
    if not each or not point["fits"]:
        return 0.0
    in_flight = point["metrics"]["request_rate_per_s"]["value"] * point["metrics"]["e2e_s"]["value"]
    late: float = each * in_flight
    assumed.append(f"{late * 1e3:.1f} ms of TTFT are the client's ({in_flight:.0f} in flight)")
    return late


def _compared(result: ToolResult, point: Mapping[str, Any], late: float) -> list[ToolRow]:
    rows = []
    for latency in LATENCIES:
        seen, extra = result.measured.get(latency) or {}, 0.0 if latency == "tpot_s" else late
        spans = {"mean": point["metrics"].get(latency), **point["percentiles"].get(latency, {})}
        for statistic in STATISTICS:
            span, value = spans.get(statistic), seen.get(statistic)
            if span and value:
                low, high = span["low"] + extra, span["high"] + extra
                rows.append(ToolRow(latency, statistic, span["value"] + extra, low, high, value))
    for rate in RATES:
        measured, span = getattr(result, rate), point["metrics"].get(rate)
        if measured and span:
            rows.append(ToolRow(rate, "", span["value"], span["low"], span["high"], measured))
    return rows


def _points_to(rows: tuple[ToolRow, ...], point: Mapping[str, Any]) -> str:
    """A sentence on the largest error of a mean, and the parts of that predicted time."""
    means = [r for r in rows if r.statistic in ("mean", "") or (r.statistic == "p50" and r.metric in NAMES)]
    if not means:
        return point.get("note") or "Nothing to compare."
    worst = max(means, key=lambda r: abs(np.log(r.predicted / r.measured)))
    if abs(worst.error) <= NOTEWORTHY:
        return f"The largest gap is {worst.name}, {worst.error:+.1%}: the server does what this hardware should do."
    slower = worst.measured > worst.predicted if worst.metric in NAMES else worst.measured < worst.predicted
    parts = point["breakdown"].get("tpot_s" if worst.metric in ("tpot_s", *RATES) else "ttft_s") or {}
    if worst.metric == "e2e_s" and len(rows) > 1:
        parts = point["breakdown"].get("tpot_s") or parts
    largest = sorted(parts.items(), key=lambda p: -p[1])[:2]
    made_of = " and ".join(f"{CAUSES[n][0]} ({v / sum(parts.values()):.0%})" for n, v in largest if v > 0)
    more = "slower" if slower else "faster"
    tail = f"; by the prediction it is mostly {made_of}" if made_of else ""
    return f"The largest gap is {worst.name}: measured {more} than predicted, {worst.error:+.1%}{tail}."
