"""Arrival times of an open loop: seeded schedules with a given mean rate, or replayed times."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np


def seed_of(*labels: object) -> list[int]:
    """A 128-bit seed from any labels, stable between processes (unlike hash())."""
    digest = hashlib.sha256("\x1f".join(map(str, labels)).encode()).digest()
    return list(map(int, np.frombuffer(digest[:16], np.uint32)))


def schedule(
    arrivals: str, rate_per_s: float, *labels: object, gamma_shape: float = 1.0, times_s: Sequence[float] = ()
) -> Iterator[float]:
    """Arrival times in seconds from 0, ascending and endless (a replay ends with its times).

    poisson: exponential gaps, coefficient of variation 1. constant: equal gaps. gamma: gamma-distributed gaps,
    coefficient of variation 1/sqrt(shape); a shape below 1 is burstier than Poisson. replay: `times_s` as given.
    """
    if arrivals == "replay":
        yield from sorted(times_s)
        return
    if arrivals == "constant":
        yield from (i / rate_per_s for i in itertools.count())
    rng = np.random.default_rng(seed_of(*labels, "arrivals"))
    shape = {"poisson": 1.0, "gamma": gamma_shape}.get(arrivals)
    if shape is None:
        raise ValueError(f"arrivals {arrivals!r}: poisson, constant, gamma or replay")
    due = 0.0
    while True:
        for gap in rng.gamma(shape, 1 / (shape * rate_per_s), 256):
            due += float(gap)
            yield due
