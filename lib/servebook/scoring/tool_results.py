"""Results of other load generators as one form: the load they put on a server, and what they measured.

vllm bench serve and sglang bench_serving (JSON or JSON lines, plain or detailed), guidellm (benchmarks.json), aiperf
(profile_export_aiperf.json), inference-perf (stage_N_lifecycle_metrics.json), and a CSV of requests with arrival_s,
prompt_tokens, output_tokens, ttft_s, tpot_s, e2e_s.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from . import tool_formats
from .tool_result import LATENCIES, TOOLS, ToolResult


def read(path: Path) -> list[ToolResult]:
    """The loads that a file of results holds, in order. Raises ServebookError for a file that cannot be read, is of no
    tool that is known, or lacks the figures that a score needs."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ServebookError(f"cannot read the results ({reason})", str(path), f"Give a file of {TOOLS}") from None
    found = [_result(record, where) for where, record in _records(text, path)]
    if not found:
        raise ServebookError("holds no results", str(path), f"Give a file of {TOOLS}")
    for result, where in zip(found, [str(path)] * len(found), strict=True):
        if not any(result.measured.get(latency) for latency in LATENCIES):
            fix = "Measure with streaming on, and save TTFT, TPOT or end-to-end latency"
            raise ServebookError(f"{result.tool} tells no latency", where, fix)
    return found


def _records(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        yield str(path), list(csv.DictReader(io.StringIO(text)))
        return
    try:
        data = json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), 1):  # one run a line
            if line.strip():
                try:
                    yield f"{path}, line {number}", json.loads(line)
                except ValueError as error:
                    fix = f"Give a file of {TOOLS}"
                    raise ServebookError(f"is no JSON ({error})", f"{path}, line {number}", fix) from None
        return
    if isinstance(data, dict) and isinstance(data.get("benchmarks"), list):
        yield from ((f"{path}, benchmark {i}", {"guidellm": b}) for i, b in enumerate(data["benchmarks"]))
    elif isinstance(data, list):
        yield from ((f"{path}, run {i}", record) for i, record in enumerate(data))
    else:
        yield str(path), data


def _result(data: Any, where: str) -> ToolResult:
    if isinstance(data, list):
        return tool_formats.rows(data, where)
    if isinstance(data, Mapping):
        if "guidellm" in data:
            return tool_formats.guidellm(data["guidellm"], where)
        if "load_summary" in data or "successes" in data:
            return tool_formats.inference_perf(data, where)
        inner = data.get("records", data)
        if isinstance(inner, Mapping) and ("time_to_first_token" in inner or "request_latency" in inner):
            return tool_formats.aiperf(data, inner, where)
        if "completed" in data and ("mean_ttft_ms" in data or "median_ttft_ms" in data or "request_throughput" in data):
            return tool_formats.vllm(data, where)
    raise ServebookError("these are results of no tool that is known", where, f"Give a file of {TOOLS}")
