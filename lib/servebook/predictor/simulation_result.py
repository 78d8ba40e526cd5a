"""The result of a simulation: measured requests, the window's figures, steps, and time series of a finite run."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .scheduler import Request
from .simulated_clients import MeasuredRequests


class LogEntry(NamedTuple):
    """`steps` consecutive equal steps: decodes per step, mean kv_tokens, chunks as (request id, new tokens, tokens
    computed before, whether it samples), end of the last step, seconds lost to the power cap."""

    steps: int
    decodes: int
    kv_tokens: float
    chunks: tuple[tuple[int, int, int, bool], ...]
    end_s: float
    capped_s: float = 0.0


class Gauge:
    """Numbers of running and waiting requests as step functions of time."""

    def __init__(self, running: int = 0) -> None:
        self.since, self.running, self.waiting = array("d", [0.0]), array("l", [running]), array("l", [0])

    def note(self, at: float, running: int, waiting: int) -> None:
        """Set the numbers from time `at` on."""
        if running != self.running[-1] or waiting != self.waiting[-1]:
            self.since.append(at)
            self.running.append(running)
            self.waiting.append(waiting)

    def means(self, start: float, end: float) -> tuple[float, float]:
        """(mean running, mean waiting) over [start, end]."""
        if end <= start:
            return 0.0, 0.0
        edges = np.clip(np.append(np.array(self.since), end), start, end)
        spans = np.diff(edges)
        shares = (float((spans * np.array(v)).sum()) / (end - start) for v in (self.running, self.waiting))
        return next(shares), next(shares)


@dataclass
class Result:
    """Measured requests in order of completion, and the window's figures. running_mean and waiting_mean correspond to
    vLLM's gauges, which are updated when a step has been processed."""

    measured: MeasuredRequests
    window: tuple[float, float]
    wall_s: float
    running_mean: float
    waiting_mean: float
    output_tokens: float  # number received in the window
    preemptions: int = 0
    complete: bool = True  # whether all requested requests were measured
    log: list[LogEntry] = field(default_factory=list)
    gauge: Gauge = field(default_factory=Gauge)

    @property
    def requests(self) -> list[Request]:
        """The measured requests (only the first 20,000)."""
        return self.measured.kept

    @property
    def seconds(self) -> float:
        return self.window[1] - self.window[0]

    def mean(self, of: str) -> float:
        """Mean over requests of ttft_s, tpot_s, e2e_s, queue_s (ready → first scheduled) or frontend_s."""
        values = self.measured.values(of)
        return float(values.mean()) if len(values) else math.nan

    @property
    def hit_share(self) -> float:
        """Share of the measured requests' prompt tokens that were in the prefix cache."""
        asked = float(self.measured.column("prompt_tokens").sum())
        return float(self.measured.column("cached_tokens").sum()) / asked if asked else 0.0


SLICES = 100  # time slices of a finite run


def over_time(result: Result) -> dict[str, list[float]]:
    """Time series of a finite run, in equal slices: t_s (middle of a slice), running and waiting requests, arrivals and
    completions per second, output tokens per second."""
    start, end = result.window
    if not end > start or not len(result.measured):
        return {}
    edges = np.linspace(start, end, SLICES + 1)
    width = (end - start) / SLICES
    m = result.measured
    running, waiting = zip(*(result.gauge.means(a, b) for a, b in pairwise(edges)), strict=True)
    first, last, tokens = m.column("first_s"), m.column("end_s"), m.column("output_tokens")
    # a request's tokens are assumed to be evenly spaced from its first to its last
    done = [np.clip((edge - first) / np.maximum(last - first, 1e-9), 0, 1) @ tokens for edge in edges]
    return {
        "t_s": [round(float(t), 4) for t in (edges[:-1] + edges[1:]) / 2 - start],
        "running": [round(v, 3) for v in running],
        "waiting": [round(v, 3) for v in waiting],
        "arrivals_per_s": [float(v) for v in np.histogram(m.column("due_s"), edges)[0] / width],
        "completions_per_s": [float(v) for v in np.histogram(last, edges)[0] / width],
        "output_tok_per_s": [round(float(v), 3) for v in np.diff(done) / width],
    }
