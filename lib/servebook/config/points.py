"""The points of a run, in order, and the names of their files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from .param_types import CALIBRATION
from .workloads import Workload

__all__ = ["CALIBRATION", "PointSpec", "RepeatedPoint", "loads_in_words"]

# Shared by load client and predictor: relative half-widths of the 95 % intervals of mean E2E and TTFT at which a point
# may end, and the largest client pause as a share of the mean latency (so that in-flight requests are within 2 % of C)
NARROW_E2E, NARROW_TTFT, OCCUPANCY_LOSS = 0.02, 0.05, 0.04


@dataclass(frozen=True, slots=True)
class PointSpec:
    """One point: sweep, engine and load. The load is a closed loop unless there is a rate or the kind is burst or
    trace. prompt_tokens, output_tokens: of every request, or the workload's means."""

    sweep: str
    engine: str
    point: str
    kind: str  # kind of the sweep (sweeps.py), or "calibration"
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    gamma_shape: float = 1.0
    fixed_requests: int | None = None  # measure exactly this many requests, without warm-up rules
    workload: Workload | None = None  # the requests, if they differ or share prefixes
    workload_name: str = ""
    requests: int | None = None  # a finite run of this many requests, measured from the first to the last
    speed: float = 1.0  # trace: speed-up of the arrivals

    @property
    def closed(self) -> bool:
        """Whether each client sends its next request when its last one has ended."""
        return self.rate_per_s is None and self.kind not in ("burst", "trace")

    @property
    def clients(self) -> int | None:
        """Clients of a closed loop; None for other loads, where `concurrency` limits the requests in flight."""
        return (self.concurrency or 1) if self.closed else None


@dataclass(frozen=True, slots=True)
class RepeatedPoint(PointSpec):
    """A point that repeats, on purpose, prompts that other points of its set have sent; the name `point` marks it."""

    prompt_set: str = ""


SAME = "same-"  # prefix of a RepeatedPoint's name


def loads_in_words(specs: Iterable[PointSpec]) -> str:
    """The loads of points: C = 16, 32; 0.5 requests/s; 512, 1,024 prompt tokens."""
    groups = itertools.groupby((_load(s) for s in specs), key=lambda load: (load[0], load[2]))
    return "; ".join(f"{head}{', '.join(value for _, value, _ in group)}{tail}" for (head, tail), group in groups)


def _load(spec: PointSpec) -> tuple[str, str, str]:
    """A load's words before its figure, the figure, and the words after it."""
    if spec.rate_per_s is not None:
        return "", f"{spec.rate_per_s:g}", " requests/s"
    if spec.kind in ("prompt_length", CALIBRATION):
        return "", f"{spec.prompt_tokens:,}", " prompt tokens"
    if spec.closed:
        return "C = ", f"{spec.clients:,}", " with prompts sent before" if isinstance(spec, RepeatedPoint) else ""
    return "", spec.point, ""
