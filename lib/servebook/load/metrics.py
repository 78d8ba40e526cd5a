"""Metrics that the server and the GPU report while a point runs: scraped at an interval, stored as a series.

Scraping keeps only the needed lines; parsing waits until the point is over, so that it does not delay time stamps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import aiohttp

from ..common import stats
from ..common.measured_point import MeasuredPoint
from ..hardware.catalog import visible_handles
from .connections import page

# our name -> the servers' names after their prefix ("vllm:", "sglang:"), vLLM's newest first, SGLang's last
_GAUGES = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
    "kv_cache_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage"),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total", "prompt_tokens"),
    "generation_tokens": ("generation_tokens_total", "generation_tokens"),
    "cache_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "cache_hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "cached_tokens_total"),
    "preemptions": ("num_preemptions_total", "num_retracted_requests_total"),
    "prefill_sum_s": ("request_prefill_time_seconds_sum",),
    "prefill_count": ("request_prefill_time_seconds_count",),
    "queue_sum_s": ("request_queue_time_seconds_sum", "queue_time_seconds_sum"),
    "queue_count": ("request_queue_time_seconds_count", "queue_time_seconds_count"),
    "ttft_sum_s": ("time_to_first_token_seconds_sum",),
    "ttft_count": ("time_to_first_token_seconds_count",),
}
_OURS = {theirs: ours for table in (_GAUGES, _COUNTERS) for ours, names in table.items() for theirs in names}
_SHARES = ("kv_cache_usage",)  # shares per engine: the server's value is their mean
_BY_REASON = "num_requests_waiting_by_reason"
_WANTED = re.compile(rb"^(?:\w+:)?(?:%s)[{ \t][^\n]*" % "|".join([*_OURS, _BY_REASON]).encode(), re.MULTILINE)
# labels end at the brace outside of quotes: OpenMetrics has an exemplar with braces of its own after the value
_LABELS = rb'\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\}'
_SAMPLE = re.compile(rb"^(?:\w+:)?(\w+)(?:[ \t]*(%s)[ \t]*|[ \t]+)([^\s]+)" % _LABELS, re.MULTILINE)
_REASON = re.compile(r'reason="([^"]*)"')
# Bits of NVML's clock event reasons. A card under full load may run at its power limit all the time. That is normal,
# unless somebody lowered the limit. Heat and hardware brakes are faults.
POWER_CAP = 0x4
SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # hardware slow-down, software thermal, hardware thermal, power brake
_GPU = (
    "gpu_power_w", "gpu_power_limit_w", "gpu_power_limit_default_w", "gpu_clock_mhz", "gpu_memory_bytes",
    "gpu_utilization", "gpu_power_capped", "gpu_throttled",
)  # fmt: skip
SERIES_COLUMNS = ("t_s", *_GAUGES, *_COUNTERS, *_GPU)


def series_of(lines: bytes) -> dict[tuple[str, str], float]:
    """Wanted values of one scrape by (name, labels); the last of one that is there twice. What is no finite number, is
    negative, or is a share of more than all is left out."""
    found: dict[tuple[str, str], float] = {}
    for match in _SAMPLE.finditer(lines):
        name, labels = (part.decode(errors="replace") if part else "" for part in match.groups()[:2])
        try:
            value = float(match[3])
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value >= 0 and not (_OURS.get(name) in _SHARES and value > 1):
            found[name, labels] = value
        else:
            found.pop((name, labels), None)
    return found


def parse(lines: bytes) -> dict[str, float]:
    """Wanted values of one scrape, of all the server's engines: shares as their mean, the rest summed; requests waiting
    by reason as `waiting_<reason>`. Where a server has both names of a figure, the newer one counts."""
    return _of_all(series_of(lines))


def _of_all(series: Mapping[tuple[str, str], float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for (name, labels), value in series.items():
        reason = _REASON.search(labels)
        key = f"waiting_{reason[1] if reason else None}" if name == _BY_REASON else name
        found.setdefault(key, []).append(value)
    out = {key: sum(values) for key, values in found.items() if key.startswith("waiting_")}
    for ours, names in (*_GAUGES.items(), *_COUNTERS.items()):
        if theirs := next((n for n in names if n in found), None):
            values = found[theirs]
            out[ours] = sum(values) / len(values) if ours in _SHARES else sum(values)
    return out


class GpuSampler:
    """Power and its limits, clock, memory, utilization and clock event reasons of the first GPU this process may use,
    through NVML; nothing without a GPU."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, visible_handles(pynvml)[0]
        except Exception:  # no library, no driver, no device: all mean "not available"
            self._nvml = None

    @property
    def available(self) -> bool:
        """Whether a GPU answers."""
        return self._nvml is not None

    def sample(self) -> dict[str, float]:
        """What the GPU reports now, under SERIES_COLUMNS' names, without unknown values."""
        n, h = self._nvml, self._handle
        ask: dict[str, Callable[[], float]] = {
            "gpu_power_w": lambda: n.nvmlDeviceGetPowerUsage(h) / 1e3,
            "gpu_power_limit_w": lambda: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3,
            "gpu_power_limit_default_w": lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1e3,
            "gpu_clock_mhz": lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
            "gpu_memory_bytes": lambda: n.nvmlDeviceGetMemoryInfo(h).used,
            "gpu_utilization": lambda: n.nvmlDeviceGetUtilizationRates(h).gpu / 100,
            "gpu_power_capped": lambda: int(bool(n.nvmlDeviceGetCurrentClocksThrottleReasons(h) & POWER_CAP)),
            "gpu_throttled": lambda: int(bool(n.nvmlDeviceGetCurrentClocksThrottleReasons(h) & SLOWED)),
        }
        values: dict[str, float] = {}
        for name, read in ask.items():
            with contextlib.suppress(Exception):  # a figure that this GPU does not report
                values[name] = read()
        return values


@dataclass
class Sample:
    """One scrape: the server's raw lines and, once parsed, their values; and the GPU's values."""

    t: float  # now() at the middle of the scrape
    took: float = 0.0
    lines: bytes = b""
    gpu: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    series: dict[tuple[str, str], float] = field(default_factory=dict)  # the values by engine


class Scraper:
    """Scrapes `url`/metrics at an interval; `close` parses. A server without metrics adds nothing to the series."""

    def __init__(self, session: aiohttp.ClientSession, url: str, interval_s: float, clock: Callable[[], float]) -> None:
        self._session, self._interval, self._clock = session, interval_s, clock
        self._url = re.sub(r"/v1/?$", "", url.rstrip("/")) + "/metrics"
        self._serves_metrics = True
        self._gpu = GpuSampler()
        self.samples: list[Sample] = []

    async def scrape(self) -> Sample:
        """Take one sample now and store it."""
        start = self._clock()
        sample = Sample(start)
        gpu = asyncio.get_running_loop().run_in_executor(None, self._gpu.sample) if self._gpu.available else None
        if self._serves_metrics:
            try:
                async with self._session.get(self._url, timeout=aiohttp.ClientTimeout(total=5)) as response:
                    body = await page(response) if response.status == 200 else b""
                sample.lines = b"\n".join(_WANTED.findall(body))
                sample.took = self._clock() - start
                sample.t = start + sample.took / 2
                # a page without a needed line will not get one later; a failed scrape may succeed next time
                if response.status < 500 and response.status != 429:
                    self._serves_metrics = bool(sample.lines)
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
        if gpu is not None:
            sample.gpu = await gpu
        self.samples.append(sample)
        return sample

    async def run(self) -> None:
        """Scrape at the interval until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            await self.scrape()

    def close(self) -> None:
        """Parse the samples and sort them by time."""
        self.samples.sort(key=lambda s: s.t)
        for sample in self.samples:
            sample.series = series_of(sample.lines)
            sample.values = _of_all(sample.series)

    def rows(self, start: float) -> Iterable[dict[str, Any]]:
        """The series' rows, times relative to `start`."""
        for s in self.samples:
            yield {"t_s": round(s.t - start, 4), **s.values, **s.gpu}

    def columns(self) -> list[str]:
        """SERIES_COLUMNS, then further scraped values."""
        return list(dict.fromkeys([*SERIES_COLUMNS, *(k for s in self.samples for k in s.values)]))


class Account:
    """The server's and the GPU's figures of a window, from the samples nearest its ends."""

    def __init__(self, samples: Sequence[Sample], begin: float, end: float) -> None:
        known = [s for s in samples if s.values]
        before = min(known, key=lambda s: abs(s.t - begin), default=None)
        after = min(known, key=lambda s: abs(s.t - end), default=None)
        self._inside = [s for s in samples if begin <= s.t <= end]
        self._ends = (None, None) if before is after else (before, after)
        self._resets = {key for a, b in pairwise(known) for key in _COUNTERS if _fell(a, b, key)}
        # the largest reported number of running requests, None if never reported
        self.running_peak = max((s.values["running"] for s in known if "running" in s.values), default=None)
        self._first: Sample | None = None
        self._last: Sample | None = None
        if len(known) > 1:
            self._first, self._last = known[0], known[-1]

    def _edges(self) -> list[tuple[float, float]]:
        """A scrape may count at any moment of its duration: tokens received during it may be on either side."""
        return [(s.t - s.took / 2, s.t + s.took / 2) for s in self._ends if s]

    def times(self) -> list[float]:
        """The times between which the client's tokens must be counted for the comparison."""
        return [*(t for edge in self._edges() for t in edge), *(s.t for s in self._ends if s)]

    def fill(self, point: MeasuredPoint, output: Callable[[float, float], float]) -> MeasuredPoint:
        """The point with the server's and the GPU's figures. output: the client's tokens between any two of times()."""
        (before, after), first, last = self._ends, self._first, self._last

        def grown(a: Sample | None, b: Sample | None, name: str) -> float | None:
            return None if name in self._resets else delta(a, b, name)

        def mean(name: str) -> float | None:
            return None if f"{name}_count" in self._resets else histogram_mean(before, after, name)

        queries, hits = grown(first, last, "cache_queries"), grown(first, last, "cache_hits")
        if queries is None and hits is not None:  # SGLang looks up every prompt token and does not report that count
            queries = grown(first, last, "prompt_tokens")

        def gpu(name: str) -> float | None:
            return stats.mean([s.gpu[name] for s in self._inside if name in s.gpu])

        return replace(
            point,
            server_running_mean=gauge_mean(self._inside, "running"),
            server_waiting_mean=gauge_mean(self._inside, "waiting"),
            kv_cache_usage_mean=gauge_mean(self._inside, "kv_cache_usage"),
            cache_hit_share=hits / queries if hits is not None and queries else None,
            preemptions=grown(first, last, "preemptions"),
            server_counters_reset=bool(self._resets),
            server_prefill_mean_s=mean("prefill"),
            server_queue_mean_s=mean("queue"),
            server_ttft_mean_s=mean("ttft"),
            # both sides counted between the same two scrapes
            server_output_tokens=grown(before, after, "generation_tokens"),
            client_output_tokens=output(before.t, after.t) if before and after else None,
            scrape_edge_tokens=sum(output(*edge) for edge in self._edges()),
            gpu_power_mean_w=gpu("gpu_power_w"),
            gpu_power_limit_w=gpu("gpu_power_limit_w"),
            gpu_power_limit_default_w=gpu("gpu_power_limit_default_w"),
            gpu_clock_mean_mhz=gpu("gpu_clock_mhz"),
            gpu_utilization_mean=gpu("gpu_utilization"),
            gpu_power_capped_share=gpu("gpu_power_capped"),
            gpu_throttled_share=gpu("gpu_throttled"),
        )


def _fell(before: Sample, after: Sample, name: str) -> bool:
    """Whether a counter decreased: the server was restarted in between, or one of its engines, which the sum over all
    of them may hide."""
    if name in before.values and name in after.values and after.values[name] < before.values[name]:
        return True
    then = before.series
    return any(_OURS.get(key[0]) == name and value < then.get(key, 0.0) for key, value in after.series.items())


def delta(before: Sample | None, after: Sample | None, name: str) -> float | None:
    """Growth of a counter between two samples; None if either lacks it or the server restarted in between."""
    if before is None or after is None or name not in before.values or name not in after.values:
        return None
    grown = after.values[name] - before.values[name]
    return grown if grown >= 0 else None


def histogram_mean(before: Sample | None, after: Sample | None, name: str) -> float | None:
    """Mean of a histogram's observations between two samples."""
    total, count = delta(before, after, f"{name}_sum_s"), delta(before, after, f"{name}_count")
    return total / count if total is not None and count else None


def gauge_mean(samples: Iterable[Sample], name: str) -> float | None:
    """Mean of a gauge over samples, None if no sample has it."""
    values = [s.values[name] for s in samples if name in s.values]
    return sum(values) / len(values) if values else None
