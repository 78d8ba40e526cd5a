"""One load as another load generator reports it: how it loaded the server, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass, field

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")
TOOLS = "vllm bench serve, sglang bench_serving, guidellm, aiperf, inference-perf, or a CSV of requests"
# seconds per request in flight by which each client's mean TTFT is too late: reported minus true, at 64
# concurrent requests (benchmarks/README.md, two shared cores)
TTFT_LATE_S = {"vllm": 62e-6, "sglang": 62e-6, "guidellm": 145e-6, "aiperf": 172e-6, "inference-perf": 103e-6}
SECONDS = {
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "millisecond": 1e-3,
    "milliseconds": 1e-3, "us": 1e-6, "µs": 1e-6, "microseconds": 1e-6, "ns": 1e-9, "nanoseconds": 1e-9,
}  # fmt: skip

Measured = dict[str, dict[str, float]]  # latency → statistic → seconds


@dataclass
class ToolResult:
    """One measured load. lengths: (prompt, output) tokens of every request in order, or one pair of means. starts_s:
    send times. stated: conditions stated in the file, assumed: conditions not stated."""

    tool: str
    requests: int
    lengths: list[tuple[int, int]]
    measured: Measured
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    starts_s: list[float] = field(default_factory=list)
    request_rate_per_s: float | None = None
    output_tok_per_s: float | None = None
    failed: int = 0
    from_due: bool = False  # latencies count from when a request was due, not from when it was sent
    text: bool = True  # prompts were sent as texts
    stated: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The sweep kind of this load."""
        if len(self.starts_s) == self.requests:
            return "trace"
        if self.concurrency is not None and self.rate_per_s is None:
            return "concurrency"
        return "burst" if self.rate_per_s is None else "arrival_rate"

    @property
    def in_flight(self) -> float | None:
        """Mean requests in flight, by Little's law from the result's means; None if they are missing."""
        means = {latency: spread.get("mean") for latency, spread in self.measured.items()}
        e2e, ttft, tpot = (means.get(latency) for latency in ("e2e_s", "ttft_s", "tpot_s"))
        if e2e is None and ttft is not None and tpot is not None:
            outputs = [output for _, output in self.lengths]
            e2e = ttft + tpot * (sum(outputs) / len(outputs) - 1)
        return None if e2e is None or not self.request_rate_per_s else self.request_rate_per_s * e2e
