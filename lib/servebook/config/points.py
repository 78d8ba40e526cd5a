"""The points of a run: what is predicted and measured, in order, and the name each one's files carry."""

from __future__ import annotations

from dataclasses import dataclass

from .param_types import CALIBRATION
from .workloads import Workload

__all__ = ["CALIBRATION", "PointSpec", "RepeatedPoint"]

# What load client and predictor alike go by: the relative half-widths of the 95 % intervals of mean E2E and TTFT at
# which a point may end, and the share of the mean latency that a pause stays below (so in flight is within 2 % of C)
NARROW_E2E, NARROW_TTFT, OCCUPANCY_LOSS = 0.02, 0.05, 0.04


@dataclass(frozen=True, slots=True)
class PointSpec:
    """One point: a sweep, an engine, and the load it is measured under: a closed loop unless there is a rate, or its
    kind is burst or trace. prompt_tokens, output_tokens: of every request, or with a workload their means."""

    sweep: str
    engine: str
    point: str
    kind: str  # of the sweep (sweeps.py), or "calibration"
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    gamma_shape: float = 1.0
    fixed_requests: int | None = None  # measure exactly so many, without warm-up rules
    workload: Workload | None = None  # what requests look like, where they differ or share something
    workload_name: str = ""
    requests: int | None = None  # a finite run: so many are sent, measured from the first to the last
    speed: float = 1.0  # of a trace: its arrivals come so many times as fast

    @property
    def closed(self) -> bool:
        """Whether a client sends its next request when its last one has ended."""
        return self.rate_per_s is None and self.kind not in ("burst", "trace")

    @property
    def clients(self) -> int | None:
        """Of a closed loop, how many there are; None of other loads, where `concurrency` caps what is in flight."""
        return (self.concurrency or 1) if self.closed else None


@dataclass(frozen=True, slots=True)
class RepeatedPoint(PointSpec):
    """A point that sends, on purpose, the prompts that others of its set have sent before; `point` says so first."""

    prompt_set: str = ""


SAME = "same-"  # how the name of a RepeatedPoint begins
