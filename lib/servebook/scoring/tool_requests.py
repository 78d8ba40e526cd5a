"""The requests that a tool's file lists: lengths, when each was sent, and latencies over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .tool_numbers import mapping, number, numbers, spread, whole
from .tool_result import SECONDS, ToolResult

LENGTHS = "lengths of every request"


@dataclass(frozen=True, slots=True)
class Listed:
    """One request. start_s: when it was sent, on any clock. Latencies are None where unknown; tpot_s without the first
    token, None for one token. counts: whether the tool's statistics count it (answered, not a warm-up). wait_s: from
    when it was due to when it was sent, for want of a free place; None where unknown."""

    prompt: int
    output: int
    start_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    tpot_s: float | None
    counts: bool = True
    wait_s: float | None = None


def use(result: ToolResult, listed: Sequence[Listed]) -> None:
    """Take lengths, send times and statistics of a result from its requests. A limit on the requests in flight that was
    never reached is none. Under one that was, send times are the server's doing: a request arrives when it is due, and
    its latencies count from there, as the prediction's do."""
    result.requests = len(listed)
    if LENGTHS not in result.stated:
        result.stated.append(LENGTHS)
    if result.concurrency is not None and result.rate_per_s is not None:
        peak = _peak(listed)
        if peak is not None and peak < result.concurrency:
            result.stated.append(f"{peak} in flight at most, below the limit of {result.concurrency}")
            result.concurrency = None
        elif peak is not None and all(r.wait_s is not None for r in listed):
            listed = _due(listed, result.concurrency)
            result.from_due = True
            result.stated.append("latencies with the wait for a free place")
    counted = [r for r in listed if r.counts]
    found = {
        "ttft_s": spread([r.ttft_s for r in counted if r.ttft_s is not None]),
        "tpot_s": spread([r.tpot_s for r in counted if r.tpot_s is not None]),
        "e2e_s": spread([r.e2e_s for r in counted if r.e2e_s is not None]),
    }
    result.measured |= {latency: spread for latency, spread in found.items() if spread}
    starts = [r.start_s for r in listed if r.start_s is not None]
    known = len(starts) == len(listed)
    order = sorted(range(len(listed)), key=lambda i: starts[i]) if known else range(len(listed))
    result.lengths = [(max(1, listed[i].prompt), max(1, listed[i].output)) for i in order]
    if known and (result.concurrency is None or result.from_due):
        result.starts_s = [starts[i] - starts[order[0]] for i in order]
        result.stated.append("when every request was due" if result.from_due else "when every request was sent")


def _due(listed: Sequence[Listed], limit: int) -> list[Listed]:
    """The requests from when each was due, if as many as the limit were in flight or waiting then. Where there was a
    free place, only the client was late."""
    due = np.sort([(r.start_s or 0.0) - (r.wait_s or 0.0) for r in listed])
    ends = np.sort([(r.start_s or 0.0) + (r.e2e_s or 0.0) for r in listed])
    moved = []
    for r in listed:
        at = (r.start_s or 0.0) - (r.wait_s or 0.0)
        full = np.searchsorted(due, at, "right") - np.searchsorted(ends, at, "right") > limit
        wait = (r.wait_s or 0.0) if full else 0.0
        ttft, e2e = None if r.ttft_s is None else r.ttft_s + wait, (r.e2e_s or 0.0) + wait
        moved.append(replace(r, start_s=(r.start_s or 0.0) - wait, ttft_s=ttft, e2e_s=e2e))
    return moved


def _peak(listed: Sequence[Listed]) -> int | None:
    """The most requests in flight at once; None where an end is unknown."""
    events: list[tuple[float, int]] = []
    for r in listed:
        if r.start_s is None or r.e2e_s is None:
            return None
        events += [(r.start_s, 1), (r.start_s + r.e2e_s, -1)]
    now = most = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


# --- of each tool ----------------------------------------------------------------------------------------------------


def vllm(d: Mapping[str, Any], lengths: Sequence[tuple[int, int]]) -> list[Listed]:
    """The requests of a detailed file of vllm bench serve or sglang bench_serving; [] if it does not list all."""
    ttfts, gaps = numbers(d.get("ttfts")), d.get("itls")
    itls = [numbers(of_one) for of_one in gaps] if isinstance(gaps, list) else []
    if not ttfts or not len(ttfts) == len(itls) == len(lengths):
        return []
    given = numbers(d.get("start_times"))
    none = [None] * len(ttfts)
    starts = given if given and len(given) == len(ttfts) else none
    queued = numbers(d.get("queue_times"))
    waits = queued if queued and len(queued) == len(ttfts) else none
    listed = []
    for ttft, of_one, start, wait, (prompt, output) in zip(ttfts, itls, starts, waits, lengths, strict=True):
        known = [gap for gap in of_one or () if gap is not None]
        # a request that failed has no output, one that gave a single token no gaps
        good = bool(ttft and output and of_one is not None and len(known) == len(of_one) and (known or output == 1))
        decode = sum(known)
        first, tpot = ttft if good else None, decode / (output - 1) if good and output > 1 else None
        listed.append(Listed(prompt, output, start, first, first and first + decode, tpot, good, wait))
    return listed if any(r.counts for r in listed) else []


def guidellm(requests: Any, begin: float | None, end: float | None) -> list[Listed]:
    """The answered requests of a guidellm benchmark; [] if any lacks its lengths. Those wholly outside the measured
    time from begin to end, warm-up and cool-down, are in no statistic (guidellm: get_within_range)."""
    listed = []
    for r in requests if isinstance(requests, list) else []:
        r = mapping(r)
        timings = mapping(mapping(r.get("info")).get("timings"))
        prompt, output = number(r.get("prompt_tokens")), number(r.get("output_tokens"))
        start, e2e = number(timings.get("request_start")), number(r.get("request_latency"))
        ttft, gap = number(r.get("time_to_first_token_ms")), number(r.get("inter_token_latency_ms"))
        if not prompt or not output:
            return []
        outside = start is not None and e2e is not None and begin is not None and end is not None
        counts = not outside or (start + e2e > begin and start < end)  # type: ignore[operator]
        tpot = gap / 1e3 if gap is not None and output > 1 else None
        due, first = number(timings.get("targeted_start")), None if ttft is None else ttft / 1e3
        wait = None if due is None or start is None else max(0.0, start - due)
        listed.append(Listed(int(prompt), int(output), start, first, e2e, tpot, counts, wait))
    return listed


def aiperf(records: Sequence[Any]) -> list[Listed]:
    """The answered requests of aiperf's profile_export.jsonl without warm-up; [] if any lacks its lengths."""
    listed = []
    for record in map(mapping, records):
        about, metrics = mapping(record.get("metadata")), mapping(record.get("metrics"))
        if about.get("benchmark_phase") == "warmup" or about.get("was_cancelled") or record.get("error"):
            continue
        prompt, output = (_value(metrics, f"{k}_sequence_length", "tokens") for k in ("input", "output"))
        if not prompt or not output:
            return []
        start = number(about.get("request_start_ns"))
        ttft, e2e = _value(metrics, "time_to_first_token"), _value(metrics, "request_latency")
        tpot = _value(metrics, "inter_token_latency") if output > 1 else None
        listed.append(Listed(int(prompt), int(output), None if start is None else start * 1e-9, ttft, e2e, tpot))
    return listed


def inference_perf(requests: Any, stage: Mapping[str, Any]) -> list[Listed]:
    """A stage's requests out of inference-perf's per_request_lifecycle_metrics.json, which lists all stages: as many as
    its load_summary counts, sent within its send_duration; [] if none or several fit, or lengths are missing."""
    rows = [r for r in map(mapping, requests if isinstance(requests, list) else []) if number(r.get("start_time"))]
    rows.sort(key=lambda r: float(r["start_time"]))
    starts = np.array([float(r["start_time"]) for r in rows])
    n, lasted = whole(stage.get("count")) or 0, number(stage.get("send_duration"))
    if not n or len(rows) < n or (lasted is None and len(rows) > n):
        return []
    spans = starts[n - 1 :] - starts[: len(starts) - n + 1]
    first = np.flatnonzero(np.abs(spans - lasted) < 1e-6) if lasted is not None else np.zeros(1, np.int64)
    if len(first) != 1:
        return []
    listed = [_inference_perf(r) for r in rows[int(first[0]) : int(first[0]) + n]]
    return listed if all(r.prompt and (r.output or not r.counts) for r in listed) else []


def _inference_perf(r: Mapping[str, Any]) -> Listed:
    info, start, end = mapping(r.get("info")), float(r["start_time"]), number(r.get("end_time"))
    asked, answer = mapping(mapping(info.get("request_metrics")).get("text")), mapping(info.get("response_metrics"))
    prompt = number(asked.get("input_tokens")) or number(info.get("input_tokens")) or 0
    usage = number(mapping(answer.get("server_usage")).get("completion_tokens"))
    output = usage or number(answer.get("output_tokens")) or 0
    times = [t for t in numbers(answer.get("output_token_times")) or [] if t is not None]
    good, streamed = not r.get("error"), len(times) > 1
    tpot = (times[-1] - times[0]) / (output - 1) if good and streamed and output > 1 else None
    ttft, e2e = times[0] - start if good and streamed else None, None if end is None else end - start
    return Listed(int(prompt), int(output), start, ttft, e2e, tpot, good)


def _value(metrics: Mapping[str, Any], name: str, unit: str = "") -> float | None:
    entry = mapping(metrics.get(name))
    value, scale = number(entry.get("value")), SECONDS.get(str(entry.get("unit")).lower())
    if unit:
        return value if entry.get("unit") == unit else None
    return None if value is None or scale is None else value * scale
