"""Result formats of other load generators, each read into a ToolResult."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..common.errors import ServebookError
from .tool_numbers import MOST_TOKENS, column, count, mapping, number, numbers, spread, whole
from .tool_result import LATENCIES, STATISTICS, TOOLS, Measured, ToolResult

_SECONDS = {
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "millisecond": 1e-3,
    "milliseconds": 1e-3, "us": 1e-6, "µs": 1e-6, "microseconds": 1e-6, "ns": 1e-9, "nanoseconds": 1e-9,
}  # fmt: skip


# --- vllm bench serve, sglang bench_serving --------------------------------------------------------------------------


def vllm(d: Mapping[str, Any], where: str) -> ToolResult:
    tool = "sglang" if "mean_e2e_latency_ms" in d else "vllm"
    n = count(d, "completed", where)
    failed = int(number(d.get("failed")) or max(0.0, (number(d.get("num_prompts")) or n) - n))
    names = {"ttft_s": ("ttft",), "tpot_s": ("tpot",), "e2e_s": ("e2el", "e2e_latency")}
    measured: Measured = {}
    for latency, keys in names.items():
        told = {}
        for statistic in STATISTICS:
            prefixes = ("p50", "median") if statistic == "p50" else (statistic,)
            given = [number(d.get(f"{p}_{k}_ms")) for p in prefixes for k in keys]
            if value := next((v for v in given if v is not None), None):
                told[statistic] = value / 1e3
        measured[latency] = told
    rate = number(d.get("request_rate"))
    result = ToolResult(
        tool, n + failed, [], measured, concurrency=whole(d.get("max_concurrency")),
        rate_per_s=rate, burstiness=number(d.get("burstiness")) or 1.0, failed=failed,
        request_rate_per_s=number(d.get("request_throughput")), output_tok_per_s=number(d.get("output_throughput")),
    )  # fmt: skip
    if result.concurrency is not None and rate is not None:
        result.assumed.append("latencies counted from sending, without the wait for a free place")
    _lengths(result, d, where)
    _detailed(result, d)
    how = f"{rate:g} requests/s" if rate else "all at once"
    cap = f", at most {result.concurrency} in flight" if result.concurrency else ""
    result.told.append(f"{n} requests answered, {how}{cap}")
    return result


def _lengths(result: ToolResult, d: Mapping[str, Any], where: str) -> None:
    prompts, outputs = numbers(d.get("input_lens")), numbers(d.get("output_lens"))
    if prompts and outputs and len(prompts) == len(outputs):
        result.lengths = [(max(1, int(p or 0)), max(1, int(o or 0))) for p, o in zip(prompts, outputs, strict=True)]
        result.requests = len(prompts)
        result.told.append("lengths of every request")
        return
    if d.get("input_lens") or d.get("output_lens"):
        result.assumed.append("input_lens and output_lens cannot be read: every request of the mean length")
    n = result.requests - result.failed
    mean = [round(count(d, key, where, MOST_TOKENS) / n) for key in ("total_input_tokens", "total_output_tokens")]
    result.lengths = [(max(1, mean[0]), max(1, mean[1]))]
    result.told.append(f"mean lengths {mean[0]} in, {mean[1]} out")


def _detailed(result: ToolResult, d: Mapping[str, Any]) -> None:
    """Percentiles over all requests, if the file lists them."""
    ttfts, gaps = numbers(d.get("ttfts")), d.get("itls")
    itls = [numbers(of_one) for of_one in gaps] if isinstance(gaps, list) else []
    good: list[tuple[float, float, int]] = []  # TTFT, seconds from there to the last token, tokens
    if ttfts and len(ttfts) == len(itls) == len(result.lengths) > 1:
        for ttft, of_one, (_, tokens) in zip(ttfts, itls, result.lengths, strict=True):
            known = [gap for gap in of_one or () if gap is not None]
            if ttft and known and len(known) == len(of_one or ()):
                good.append((ttft, sum(known), tokens))
    if not good or ttfts is None:
        if ttfts and gaps:
            result.assumed.append("ttfts and itls are not of every request: its own summary counts")
        return
    result.measured = {
        "ttft_s": spread([ttft for ttft, _, _ in good]),
        "tpot_s": spread([decode / (tokens - 1) for _, decode, tokens in good if tokens > 1]),
        "e2e_s": spread([ttft + decode for ttft, decode, _ in good]),
    }
    told = numbers(d.get("start_times")) or []
    starts = [start for start in told if start is not None]
    if len(starts) == len(told) == len(ttfts) and result.concurrency is None:
        order = sorted(range(len(starts)), key=lambda i: starts[i])
        result.starts_s = [starts[i] - starts[order[0]] for i in order]
        result.lengths = [result.lengths[i] for i in order]
        result.told.append("when every request was sent")


# --- the others ------------------------------------------------------------------------------------------------------


def _summary(told: Mapping[str, Any] | None, scale: float) -> dict[str, float]:
    """Mean and percentiles of a metric, under the names that the tools use."""
    if not isinstance(told, Mapping):
        return {}
    nested = told.get("percentiles") if isinstance(told.get("percentiles"), Mapping) else {}
    out = {}
    for statistic, names in {
        "mean": ("mean", "avg"),
        "p50": ("p50", "median"),
        "p90": ("p90",),
        "p99": ("p99",),
    }.items():
        values = [number(told.get(k)) if told.get(k) is not None else number((nested or {}).get(k)) for k in names]
        if (value := next((v for v in values if v is not None), None)) is not None:
            out[statistic] = value * scale
    return out


def _find(data: Any, key: str) -> Any:
    """The first value of a key at any depth."""
    if isinstance(data, Mapping):
        if key in data:
            return data[key]
        data = list(data.values())
    if isinstance(data, list):
        for part in data[:50]:
            if (found := _find(part, key)) is not None:
                return found
    return None


def guidellm(d: Any, where: str) -> ToolResult:
    metrics = mapping(d).get("metrics")
    if not isinstance(metrics, Mapping):
        raise ServebookError("has no metrics", where, "Give guidellm's benchmarks.json")

    def of(name: str, scale: float) -> dict[str, float]:
        told = metrics.get(name)
        return _summary(told.get("successful", told) if isinstance(told, Mapping) else None, scale)

    strategy = _find({k: v for k, v in d.items() if k not in ("metrics", "requests")}, "strategy")
    strategy = strategy if isinstance(strategy, Mapping) else {}
    totals = metrics.get("request_totals") or d.get("request_totals") or _find(d, "request_totals") or {}
    n = count(mapping(totals), "successful", where)
    lengths = [round(of(k, 1.0).get("mean", 0)) for k in ("prompt_token_count", "output_token_count")]
    if not all(lengths):
        raise ServebookError(
            "guidellm's file has no token counts", where, "Give the benchmarks.json of a run with usage"
        )
    kind = str(strategy.get("type_") or strategy.get("type") or "")
    streams = number(strategy.get("streams") or strategy.get("max_concurrency"))
    rate = number(strategy.get("rate"))
    result = ToolResult(
        "guidellm", n, [(lengths[0], lengths[1])],
        {
            "ttft_s": of("time_to_first_token_ms", 1e-3), "tpot_s": of("inter_token_latency_ms", 1e-3),
            "e2e_s": of("request_latency", 1.0),
        },
        arrivals="constant" if kind == "constant" else "poisson",
        request_rate_per_s=of("requests_per_second", 1.0).get("mean"),
        output_tok_per_s=of("output_tokens_per_second", 1.0).get("mean"),
        told=[f"{n} requests answered, strategy {kind or 'not told'}, mean lengths {lengths[0]} in, {lengths[1]} out"],
    )  # fmt: skip
    if kind == "synchronous":
        result.concurrency = 1
    elif streams:
        result.concurrency = int(streams)
    elif rate:
        result.rate_per_s = rate
    elif kind != "throughput":
        raise ServebookError("guidellm's file has neither streams nor a rate", where, "Give a run of a known strategy")
    return result


def aiperf(d: Mapping[str, Any], records: Mapping[str, Any], where: str) -> ToolResult:
    def of(name: str) -> dict[str, float]:
        return _summary(mapping(records.get(name)), 1.0)

    def seconds(name: str) -> dict[str, float]:
        told = mapping(records.get(name))
        unit = str(told.get("unit")).lower()
        if told and unit not in _SECONDS:
            raise ServebookError(f"{name} has the unit {unit[:20]!r}", where, "Give it in ms, as aiperf does")
        return _summary(told, _SECONDS.get(unit, 1.0))

    n = round(of("request_count").get("mean", 0))
    lengths = [round(of(k).get("mean", 0)) for k in ("input_sequence_length", "output_sequence_length")]
    if not n or not all(lengths):
        raise ServebookError(
            "aiperf's file has no request_count or sequence lengths",
            where,
            "Give profile_export_aiperf.json of a whole run",
        )
    concurrency, rate = whole(_find(d, "concurrency")), number(_find(d, "request_rate"))
    if not concurrency and not rate:
        raise ServebookError("aiperf tells neither concurrency nor a rate", where, "Keep input_config in the file")
    return ToolResult(
        "aiperf", n, [(lengths[0], lengths[1])],
        {
            "ttft_s": seconds("time_to_first_token"), "tpot_s": seconds("inter_token_latency"),
            "e2e_s": seconds("request_latency"),
        },
        concurrency=concurrency, rate_per_s=rate or None,
        request_rate_per_s=of("request_throughput").get("mean"),
        output_tok_per_s=of("output_token_throughput").get("mean"),
        told=[f"{n} requests answered, mean lengths {lengths[0]} in, {lengths[1]} out"],
    )  # fmt: skip


def inference_perf(d: Mapping[str, Any], where: str) -> ToolResult:
    good, load = mapping(d.get("successes")), mapping(d.get("load_summary"))
    n = count(good, "count", where)
    latency, flow = mapping(good.get("latency")), mapping(good.get("throughput"))
    lengths = [round(_summary(good.get(k), 1.0).get("mean", 0)) for k in ("prompt_len", "output_len")]
    if not all(lengths):
        raise ServebookError(
            "inference-perf's file has no prompt_len and output_len", where, "Give a stage's lifecycle file"
        )
    rate = number(load.get("requested_rate")) or number(load.get("achieved_rate"))
    concurrency = number(load.get("concurrency"))
    result = ToolResult(
        "inference-perf", n, [(lengths[0], lengths[1])],
        {
            "ttft_s": _summary(latency.get("time_to_first_token"), 1.0),
            "tpot_s": _summary(latency.get("time_per_output_token"), 1.0),
            "e2e_s": _summary(latency.get("request_latency"), 1.0),
        },
        concurrency=int(concurrency) if concurrency else None,
        rate_per_s=None if concurrency else rate, arrivals="constant",
        failed=int(number(mapping(d.get("failures")).get("count")) or 0),
        request_rate_per_s=number(flow.get("requests_per_sec")),
        output_tok_per_s=number(flow.get("output_tokens_per_sec")),
        told=[f"{n} requests answered, mean lengths {lengths[0]} in, {lengths[1]} out"],
        assumed=["arrivals at equal gaps, inference-perf's default"],
    )  # fmt: skip
    if result.concurrency is None and result.rate_per_s is None:
        raise ServebookError("inference-perf's file has no rate", where, "Give a file with load_summary.requested_rate")
    return result


def rows(rows: list[Mapping[str, str]], where: str) -> ToolResult:
    """A CSV of requests."""
    if not rows:
        raise ServebookError("contains no results", where, f"Give a file of {TOOLS}")
    needed = ("prompt_tokens", "output_tokens")
    if missing := [k for k in needed if k not in rows[0]]:
        raise ServebookError(
            f"has no column {', '.join(missing)}", where, f"Needed: {', '.join(needed)}, and latencies"
        )

    prompts, outputs = (column(rows, name, where, least=1) for name in needed)
    starts = column(rows, "arrival_s", where, least=-math.inf)
    measured = {}
    for latency in LATENCIES:
        ms = latency.replace("_s", "_ms")
        scale = 1e-3 if ms in rows[0] and latency not in rows[0] else 1.0
        measured[latency] = spread([v * scale for v in column(rows, ms if scale < 1 else latency, where)])
    if len(prompts) != len(rows) or len(outputs) != len(rows):
        raise ServebookError(
            "some requests have no length", where, "Fill prompt_tokens and output_tokens on every line"
        )
    if len(starts) != len(rows):
        raise ServebookError(
            "has no arrival_s", where, "Add a column arrival_s: when each request was sent, in seconds"
        )
    order = sorted(range(len(rows)), key=lambda i: starts[i])
    return ToolResult(
        "requests", len(rows), [(int(prompts[i]), int(outputs[i])) for i in order], measured,
        starts_s=[starts[i] - starts[order[0]] for i in order], text=False,
        told=[f"{len(rows)} requests with their lengths and arrivals"],
    )  # fmt: skip
