"""Result formats of other load generators, each read into a ToolResult."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.errors import ServebookError
from . import tool_requests
from .tool_numbers import MOST_TOKENS, column, count, mapping, number, numbers, spread, whole
from .tool_result import LATENCIES, SECONDS, STATISTICS, TOOLS, Measured, ToolResult

# --- vllm bench serve, sglang bench_serving --------------------------------------------------------------------------


def vllm(d: Mapping[str, Any], where: str) -> ToolResult:
    tool = "sglang" if "mean_e2e_latency_ms" in d else "vllm"
    n = count(d, "completed", where)
    failed = int(number(d.get("failed")) or max(0.0, (number(d.get("num_prompts")) or n) - n))
    names = {"ttft_s": ("ttft",), "tpot_s": ("tpot",), "e2e_s": ("e2el", "e2e_latency")}
    measured: Measured = {}
    for latency, keys in names.items():
        statistics = {}
        for statistic in STATISTICS:
            prefixes = ("p50", "median") if statistic == "p50" else (statistic,)
            given = [number(d.get(f"{p}_{k}_ms")) for p in prefixes for k in keys]
            if value := next((v for v in given if v is not None), None):
                statistics[statistic] = value / 1e3
        measured[latency] = statistics
    latencies = [value for value in numbers(d.get("latencies")) or [] if value]
    if not measured["e2e_s"] and len(latencies) == n:  # also in files without --save-detailed
        measured["e2e_s"] = spread(latencies)
    rate = number(d.get("request_rate"))
    result = ToolResult(
        tool, n + failed, [], measured, concurrency=whole(d.get("max_concurrency")),
        rate_per_s=rate, burstiness=number(d.get("burstiness")) or 1.0, failed=failed,
        request_rate_per_s=number(d.get("request_throughput")), output_tok_per_s=number(d.get("output_throughput")),
    )  # fmt: skip
    ramp = [number(d.get(f"ramp_up_{end}_rps")) for end in ("start", "end")] if d.get("ramp_up_strategy") else []
    how = f"{rate:g} requests/s" if rate else "all at once"
    if all(ramp) and ramp:
        how = f"from {ramp[0]:g} to {ramp[1]:g} requests/s, {str(d['ramp_up_strategy'])[:20]}"
        result.rate_per_s = result.request_rate_per_s
    cap = f", at most {result.concurrency} in flight" if result.concurrency else ""
    result.stated.append(f"{n} requests answered, {how}{cap}")
    _lengths(result, d, where)
    if len(result.lengths) == result.requests > 1 and d.get("ttfts") and d.get("itls"):
        if listed := tool_requests.vllm(d, _every(d)):
            tool_requests.use(result, listed)
        else:
            result.assumed.append("ttfts and itls are not of every request: its own summary counts")
    if ramp:
        known_starts(result, where, "Save its requests too (--save-detailed, without --max-concurrency)")
    return result


def known_starts(result: ToolResult, where: str, fix: str) -> None:
    """Raises ServebookError for a load by a schedule or a changing rate, if its send times are unknown."""
    if result.kind != "trace":
        what = f"{result.tool} sent requests by a schedule, and does not tell when it sent which"
        raise ServebookError(what, where, fix)


def _every(d: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Lengths of every request as the file lists them, 0 where null."""
    prompts, outputs = numbers(d.get("input_lens")) or [], numbers(d.get("output_lens")) or []
    return [(int(p or 0), int(o or 0)) for p, o in zip(prompts, outputs, strict=True)]


def _lengths(result: ToolResult, d: Mapping[str, Any], where: str) -> None:
    prompts, outputs = numbers(d.get("input_lens")), numbers(d.get("output_lens"))
    if prompts and outputs and len(prompts) == len(outputs):
        result.lengths = [(max(1, prompt), max(1, output)) for prompt, output in _every(d)]
        result.requests = len(prompts)
        result.stated.append(tool_requests.LENGTHS)
        return
    if d.get("input_lens") or d.get("output_lens"):
        result.assumed.append("input_lens and output_lens cannot be read: every request of the mean length")
    n = result.requests - result.failed
    mean = [round(count(d, key, where, MOST_TOKENS) / n) for key in ("total_input_tokens", "total_output_tokens")]
    result.lengths = [(max(1, mean[0]), max(1, mean[1]))]
    result.stated.append(f"mean lengths {mean[0]} in, {mean[1]} out")


# --- the others ------------------------------------------------------------------------------------------------------


def _summary(statistics: Mapping[str, Any] | None, scale: float) -> dict[str, float]:
    """Mean and percentiles of a metric, under the names that the tools use."""
    if not isinstance(statistics, Mapping):
        return {}
    nested = statistics.get("percentiles") if isinstance(statistics.get("percentiles"), Mapping) else {}
    out = {}
    for statistic, names in {
        "mean": ("mean", "avg"),
        "p50": ("p50", "median"),
        "p90": ("p90",),
        "p99": ("p99",),
    }.items():
        values = [
            number(statistics.get(k)) if statistics.get(k) is not None else number((nested or {}).get(k)) for k in names
        ]
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
        statistics = metrics.get(name)
        return _summary(statistics.get("successful", statistics) if isinstance(statistics, Mapping) else None, scale)

    strategy = mapping(_find({k: v for k, v in d.items() if k not in ("metrics", "requests")}, "strategy"))
    totals = mapping(metrics.get("request_totals") or d.get("request_totals") or _find(d, "request_totals"))
    n = count(totals, "successful", where)
    lengths = [round(of(k, 1.0).get("mean", 0)) for k in ("prompt_token_count", "output_token_count")]
    if not all(lengths):
        raise ServebookError(
            "guidellm's file has no token counts", where, "Give the benchmarks.json of a run with usage"
        )
    kind = str(strategy.get("type_") or strategy.get("type") or "")
    cap = whole(strategy.get("streams")) or whole(strategy.get("max_concurrency"))
    rate, ramp = number(strategy.get("rate")), number(strategy.get("rampup_duration")) or 0.0
    rates = {k: of(f"{k}_per_second", 1.0).get("mean") for k in ("requests", "output_tokens")}
    result = ToolResult(
        "guidellm", n, [(lengths[0], lengths[1])],
        {
            "ttft_s": of("time_to_first_token_ms", 1e-3), "tpot_s": of("inter_token_latency_ms", 1e-3),
            "e2e_s": of("request_latency", 1.0),
        },
        concurrency=1 if kind == "synchronous" else cap, rate_per_s=rate or None,
        arrivals="constant" if kind == "constant" else "poisson", failed=int(number(totals.get("errored")) or 0),
        request_rate_per_s=rates["requests"], output_tok_per_s=rates["output_tokens"],
    )  # fmt: skip
    left = int(number(totals.get("incomplete")) or 0)
    if rate and cap and cap >= n + left + result.failed:
        cap = result.concurrency = None  # a limit that so few requests cannot reach
    how = (f", {rate:g} requests/s" if rate else "") + (f", at most {cap} in flight" if cap else "")
    result.stated.append(f"{n} requests answered, strategy {kind or 'not given'}{how}, {_mean(lengths)}")
    if left:
        result.stated.append(f"{left} cut off at the end")
    if kind == "trace":
        result.rate_per_s = result.request_rate_per_s
    elif not (result.concurrency or rate or kind == "throughput"):
        raise ServebookError("guidellm's file has neither streams nor a rate", where, "Give a run of a known strategy")
    timed = mapping(d.get("scheduler_metrics"))
    window = [number(timed.get(f"measure_{end}_time")) for end in ("start", "end")]
    listed = tool_requests.guidellm(mapping(d.get("requests")).get("successful"), window[0], window[1])
    if len(listed) >= n:
        tool_requests.use(result, listed)
        if unmeasured := sum(not r.counts for r in listed):
            result.stated.append(f"{unmeasured} more before or after the measured time")
    else:
        result.assumed.append("TPOT weighted by tokens, as guidellm's summary does")
    if kind == "trace" or (rate and ramp):
        known_starts(result, where, "Let guidellm write every request (no sample_size)")
    elif ramp:
        result.assumed.append(f"all clients from the start, without guidellm's ramp-up of {ramp:g} s")
    return result


def _mean(lengths: list[int]) -> str:
    return f"mean lengths {lengths[0]} in, {lengths[1]} out"


def aiperf(d: Mapping[str, Any], records: Mapping[str, Any], where: str, requests: Sequence[Any] = ()) -> ToolResult:
    """requests: the records of profile_export.jsonl, if there is one."""

    def of(name: str) -> dict[str, float]:
        return _summary(mapping(records.get(name)), 1.0)

    def seconds(name: str) -> dict[str, float]:
        record = mapping(records.get(name))
        unit = str(record.get("unit")).lower()
        if record and unit not in SECONDS:
            raise ServebookError(f"{name} has the unit {unit[:20]!r}", where, "Give it in ms, as aiperf does")
        return _summary(record, SECONDS.get(unit, 1.0))

    n = round(of("request_count").get("mean", 0))
    lengths = [round(of(k).get("mean", 0)) for k in ("input_sequence_length", "output_sequence_length")]
    if not n or not all(lengths):
        raise ServebookError(
            "aiperf's file has no request_count or sequence lengths",
            where,
            "Give profile_export_aiperf.json of a whole run",
        )
    load = _phase(d, where)
    kind, concurrency, rate = str(load.get("type")), whole(load.get("concurrency")), number(load.get("rate"))
    changing = [k for k in ("rate_series", "rate_ramp") if load.get(k)]
    if not (concurrency or rate or changing or kind == "fixed_schedule"):
        raise ServebookError("no concurrency and no rate in the aiperf file", where, "Keep input_config in the file")
    result = ToolResult(
        "aiperf", n, [(lengths[0], lengths[1])],
        {
            "ttft_s": seconds("time_to_first_token"), "tpot_s": seconds("inter_token_latency"),
            "e2e_s": seconds("request_latency"),
        },
        concurrency=concurrency, rate_per_s=rate or None, failed=round(of("error_request_count").get("mean", 0)),
        arrivals="constant" if kind in ("constant", "user_centric") else "poisson",
        burstiness=number(load.get("smoothness")) or 1.0,
        request_rate_per_s=of("request_throughput").get("mean"),
        output_tok_per_s=of("output_token_throughput").get("mean"),
    )  # fmt: skip
    how = kind.replace("_", " ") + (f", {rate:g} requests/s" if rate else "")
    cap = f", at most {concurrency} in flight" if concurrency else ""
    result.stated.append(f"{n} requests answered, {how}{cap}, {_mean(lengths)}")
    if changing or kind == "fixed_schedule":
        result.rate_per_s = result.request_rate_per_s
    listed = tool_requests.aiperf(requests)
    if len(listed) == n:
        tool_requests.use(result, listed)
    elif requests:
        result.assumed.append(f"its list is of {len(listed)} requests with lengths, not of {n}: the summary counts")
    if any(mapping(mapping(r).get("metadata")).get("turn_index") for r in requests):
        result.assumed.append("turns of conversations as requests of their own")
    if changing or kind == "fixed_schedule":
        known_starts(result, where, "Put profile_export.jsonl beside the file")
    if concurrency and load.get("concurrency_ramp"):
        result.assumed.append("all clients from the start, without aiperf's ramp-up")
    return result


def _phase(d: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """aiperf's measured phase: type, concurrency, rate, smoothness. In older files they stand in loadgen.

    Raises ServebookError for several measured phases."""
    phases = _find(d, "phases")
    if isinstance(phases, list):
        measured = [p for p in map(mapping, phases) if p.get("kind", p.get("name")) != "warmup"]
        if len(measured) == 1:
            return measured[0]
        raise ServebookError(f"aiperf measured {len(measured)} phases as one", where, "Give a run with one")
    load = {"concurrency": _find(d, "concurrency"), "rate": _find(d, "request_rate")}
    kind = _find(d, "arrival_pattern") or _find(d, "request_rate_mode") or "poisson"
    return load | {"type": kind if load["rate"] else "concurrency", "smoothness": _find(d, "arrival_smoothness")}


def inference_perf(d: Mapping[str, Any], where: str, requests: Any = None) -> ToolResult:
    """requests: per_request_lifecycle_metrics.json, if there is one."""
    good, load = mapping(d.get("successes")), mapping(d.get("load_summary"))
    n = count(good, "count", where)
    latency, flow = mapping(good.get("latency")), mapping(good.get("throughput"))
    # the server's counts in newer files, the client's in older ones
    counts = [[mapping(good.get(f"{k}_{of}")) for of in ("tokens", "len")] for k in ("prompt", "output")]
    lengths = [round(next((m for m in (_summary(c, 1.0).get("mean") for c in both) if m), 0)) for both in counts]
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
        stated=[f"{n} requests answered, {_mean(lengths)}"],
    )  # fmt: skip
    if result.concurrency is None and result.rate_per_s is None:
        raise ServebookError("inference-perf's file has no rate", where, "Give a file with load_summary.requested_rate")
    if listed := tool_requests.inference_perf(requests, load):
        tool_requests.use(result, listed)
    elif result.concurrency is None:
        result.assumed.append("arrivals at equal gaps, inference-perf's default (its per_request report tells)")
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
        stated=[f"{len(rows)} requests with their lengths and arrivals"],
    )  # fmt: skip
