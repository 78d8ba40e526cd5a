"""Results of other load generators in one form: the load they generated and what they measured.

vllm bench serve and sglang bench_serving (JSON or JSON lines, plain or detailed), guidellm (benchmarks.json), aiperf
(profile_export_aiperf.json with profile_export.jsonl beside it), inference-perf
(stage_N_lifecycle_metrics.json with per_request_lifecycle_metrics.json beside it), and a CSV of requests with
arrival_s, prompt_tokens, output_tokens, ttft_s, tpot_s, e2e_s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..common import record_files
from ..common.errors import ServebookError
from . import tool_formats
from .tool_numbers import MOST_TOKENS, mapping
from .tool_result import LATENCIES, TOOLS, ToolResult

FIX = f"Give a file of {TOOLS}"
UNITS = "Check whether its times are in the unit that the tool writes"
_SUMMARIES = (
    ("aiperf's CSV", "Metric,avg"), ("guidellm's CSV", "Run Info"), ("guidellm's YAML", "benchmarks:"),
    ("guidellm's YAML", "metadata:"), ("guidellm's YAML", "config:"),
)  # fmt: skip
UNIT = 100.0  # a factor that no load explains, but seconds instead of milliseconds do


def read(path: Path) -> list[ToolResult]:
    """The loads in a file of results, in order. Raises ServebookError for an unreadable file, an unknown tool, or
    missing figures that a score needs."""
    if path.is_dir():
        raise ServebookError("is a folder", str(path), _inside(path))
    _, text = record_files.read_text(path, "the results", FIX)
    if text.lstrip()[:1] in "{[" and _is_aiperf_list(text):
        return [_checked(_of_list(text, path), str(path))]
    found = [_result(record, where, path) for where, record in _records(text, path)]
    if not found:
        raise ServebookError("contains no results", str(path), FIX)
    return [_checked(result, str(path)) for result in found]


def _inside(folder: Path) -> str:
    """What to give instead of a folder."""
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in (".json", ".jsonl") and p.is_file())
    except OSError:
        names = []
    known = [n for n in names if n.endswith("_aiperf.json") or n.startswith("stage_") or n == "benchmarks.json"]
    return f"Give one of its files, such as {(known or names)[0]}" if names else FIX


def _checked(result: ToolResult, where: str) -> ToolResult:
    if result.concurrency is not None and result.rate_per_s is not None and not result.from_due:
        result.assumed.append("latencies count from sending, the predicted ones with the wait for a free place")
    _check(result, where)
    return result


def _check(result: ToolResult, where: str) -> None:
    """Raises ServebookError for a result without a latency, or with impossible figures: a file with times in another
    unit than its tool's would be scored as a server that is a thousand times too fast."""
    spreads = {latency: spread for latency in LATENCIES if (spread := result.measured.get(latency))}
    if not spreads:
        fix = "Measure with streaming on, and save TTFT, TPOT or end-to-end latency"
        raise ServebookError(f"{result.tool} has no latency", where, fix)
    for latency, spread in spreads.items():
        if wrong := [s for s, value in spread.items() if not (math.isfinite(value) and value >= 0)]:
            raise ServebookError(f"{latency} {wrong[0]} is {spread[wrong[0]]:g}", where, "Correct the file")
    longest = max(max(pair) for pair in result.lengths)
    if longest > MOST_TOKENS:
        raise ServebookError(f"a request has {float(longest):.3g} tokens", where, "Correct the file")
    ttft, e2e = (spreads.get(latency, {}).get("mean") for latency in ("ttft_s", "e2e_s"))
    if ttft is not None and e2e is not None and ttft > 1.05 * e2e:
        what = f"a mean TTFT of {ttft:g} s is longer than the mean end to end of {e2e:g} s"
        raise ServebookError(what, where, UNITS)
    in_flight, most = result.in_flight, min(result.concurrency or result.requests, result.requests)
    if in_flight is None:
        return
    if in_flight > UNIT * most or (result.kind == "concurrency" and UNIT * in_flight < most):
        what = f"rate times latency is {in_flight:.2g} requests in flight, where there were {most} at most"
        raise ServebookError(what, where, UNITS)


def _records(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        if tool := next((tool for tool, begin in _SUMMARIES if text.startswith(begin)), None):
            raise ServebookError(f"{tool} cannot be read", str(path), "Give the JSON file of the same run")
        yield str(path), [row for _, row in record_files.table(text, str(path))]
        return
    whole = _whole(text)
    if whole is None:
        for number, line in enumerate(record_files.lines(text), 1):  # one run per line
            if line.strip():
                yield f"{path}, line {number}", record_files.json_value(line, f"{path}, line {number}", FIX)
        return
    if isinstance(whole, dict) and isinstance(whole.get("benchmarks"), list):
        yield from ((f"{path}, benchmark {i}", {"guidellm": b}) for i, b in enumerate(whole["benchmarks"]))
    elif isinstance(whole, list):
        yield from ((f"{path}, run {i}", record) for i, record in enumerate(whole))
    else:
        yield str(path), whole


def _whole(text: str) -> Any:
    """The file's single JSON value; None if it has one run per line."""
    try:
        return record_files.json_value(text, "", "")
    except ServebookError:
        return None


# --- aiperf's list of requests ---------------------------------------------------------------------------------------


def _is_aiperf_list(text: str) -> bool:
    try:
        first = record_files.json_value(next(record_files.lines(text.lstrip())), "", "")
    except ServebookError:
        return False
    return isinstance(first, dict) and {"metadata", "metrics"} <= set(first)


def _of_list(text: str, path: Path) -> ToolResult:
    """The result that a list belongs to: only its summary tells how the requests were sent."""
    stem = path.name.split(".")[0]
    names = [name for name in (f"{stem}_aiperf.json", f"{stem}.json") if (path.parent / name).is_file()]
    if not names:
        fix = f"Put {stem}_aiperf.json of the same run beside it"
        raise ServebookError("lists aiperf's requests, but not how they were sent", str(path), fix)
    summary = path.parent / names[0]
    data = mapping(record_files.json_value(record_files.read_text(summary, "the results", FIX)[1], str(summary), FIX))
    return tool_formats.aiperf(data, mapping(data.get("records", data)), str(summary), _parsed(text, path))


def _beside(summary: Path) -> list[Any]:
    """The requests in the list beside aiperf's summary, [] without one."""
    stem = summary.name.split(".")[0]
    for name in (f"{stem.removesuffix('_aiperf')}.jsonl", f"{stem}.jsonl"):
        if (path := summary.parent / name).is_file() and path != summary:
            text = record_files.read_text(path, "the requests", FIX)[1]
            return _parsed(text, path) if _is_aiperf_list(text) else []
    return []


def _parsed(text: str, path: Path) -> list[Any]:
    numbered = enumerate(record_files.lines(text), 1)
    return [record_files.json_value(line, f"{path}, line {i}", FIX) for i, line in numbered if line.strip()]


# --- which tool ------------------------------------------------------------------------------------------------------


def _result(data: Any, where: str, path: Path) -> ToolResult:
    if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
        return tool_formats.rows(data, where)
    if isinstance(data, Mapping):
        if "guidellm" in data:
            return tool_formats.guidellm(data["guidellm"], where)
        if "load_summary" in data or "successes" in data:
            every = path.parent / "per_request_lifecycle_metrics.json"
            text = record_files.read_text(every, "the requests", FIX)[1] if every.is_file() else "null"
            return tool_formats.inference_perf(data, where, record_files.json_value(text, str(every), FIX))
        inner = data.get("records", data)
        if isinstance(inner, Mapping) and ("time_to_first_token" in inner or "request_latency" in inner):
            return tool_formats.aiperf(data, inner, where, _beside(path))
        if "completed" in data and ("mean_ttft_ms" in data or "median_ttft_ms" in data or "request_throughput" in data):
            return tool_formats.vllm(data, where)
    raise ServebookError("not the results of a known tool", where, FIX)
