"""Percentiles, intervals and tests for steady state, over plain sequences of floats. Knows nothing of serving.

Only numpy is used, so that the load client starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray
LEAST_ROUNDS = 3  # of clients in step, below which nothing is said of how rounds differ
# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval; low and high are None where there are too few values."""

    mean: float
    low: float | None
    high: float | None

    @property
    def relative_half_width(self) -> float:
        """Half of the interval over the mean; infinite where there is no interval."""
        if self.low is None or self.high is None or not self.mean:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.mean)


def t95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.42 / degrees


def mean(values: Values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def percentile(values: Values, p: float) -> float | None:
    """The p-th percentile (0 to 100), linear between order statistics; None of nothing."""
    return float(np.percentile(np.asarray(values, float), p)) if len(values) else None


class Histogram:
    """Percentiles of any number of positive values in 2 MB: 4096 bins an octave from 2^-20 to 2^10, each with the count
    and the mean of its values, so that a percentile is off by less than 1/4096 of itself.
    """

    _LOW, _OCTAVES, _SHIFT = -20, 30, 52 - 12  # a double's exponent and the first 12 bits of its mantissa are its bin
    _BASE = (_LOW + 1023) << 12

    def __init__(self) -> None:
        self._counts, self._sums = np.zeros(self._OCTAVES << 12, np.int64), np.zeros(self._OCTAVES << 12)

    def add(self, values: np.ndarray) -> None:
        """Values beyond the octaves count in the first or last bin."""
        bins = (np.ascontiguousarray(values, float).view(np.int64) >> self._SHIFT) - self._BASE
        bins = bins.clip(0, len(self._counts) - 1)
        np.add.at(self._counts, bins, 1)
        np.add.at(self._sums, bins, values)

    def percentile(self, p: float) -> float | None:
        """As percentile(), linear between order statistics, each taken to be its bin's mean."""
        total = int(self._counts.sum())
        if not total:
            return None
        rank = p / 100 * (total - 1)
        neighbours = (math.floor(rank), math.ceil(rank))
        bins = np.searchsorted(np.cumsum(self._counts), neighbours, side="right")
        below, above = self._sums[bins] / self._counts[bins]
        return float(below + (rank - neighbours[0]) * (above - below))


def mean_interval(values: Values, per_round: int = 1) -> Interval | None:
    """95 % interval of the mean of values in time order, by batch means.

    Neighbours in time are correlated (requests share batches), so values are grouped into consecutive batches whose
    means nearly are not: 20 batches, fewer when a batch would hold less than 4 values; below 20 values each value is
    its own batch. Of the batch and the plain t interval the wider is taken.

    per_round: clients that keep step with each other, so that their latencies follow their place in the round: a batch
    is whole rounds then, at most 20 batches. Below LEAST_ROUNDS how rounds differ is not known: there is no interval.
    """
    x = np.asarray(values, float)
    if not len(x):
        return None
    m, rounds = float(x.mean()), len(x) // per_round
    if len(x) < 2 or (per_round > 1 and rounds < LEAST_ROUNDS):
        return Interval(m, None, None)
    half = t95(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    batches = min(20, len(x) // 4) if per_round == 1 else min(20, rounds)
    if batches >= (5 if per_round == 1 else LEAST_ROUNDS):
        means = np.array([b.mean() for b in np.array_split(x, batches)])
        half = max(half, t95(batches - 1) * float(means.std(ddof=1)) / math.sqrt(batches))
    return Interval(m, m - half, m + half)


def bootstrap_interval(
    values: Values, statistic: Callable[[np.ndarray], float], *, seed: int = 0, resamples: int = 1000
) -> tuple[float, float] | None:
    """95 % percentile-bootstrap interval of any statistic (seeded); None below 5 values."""
    x = np.asarray(values, float)
    if len(x) < 5:
        return None
    rng = np.random.default_rng(seed)
    draws = [statistic(x[rng.integers(0, len(x), len(x))]) for _ in range(resamples)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def percentile_interval(values: Values, p: float, *, seed: int = 0) -> tuple[float, float] | None:
    """Bootstrap interval of a percentile."""
    return bootstrap_interval(values, lambda x: float(np.percentile(x, p)), seed=seed)


def ratio_interval(ratio: float, *spans: tuple[float, float]) -> tuple[float, float]:
    """95 % interval of a ratio of independent means from theirs (low, high): half-widths add in quadrature on the log
    scale. NaN where one of them is not known or not above zero."""
    if not all(low > 0 and high > 0 for low, high in spans):
        return math.nan, math.nan
    factor = math.exp(math.sqrt(sum((math.log(high / low) / 2) ** 2 for low, high in spans)))
    return ratio / factor, ratio * factor


def drift(values: Values, per_round: int = 1) -> float | None:
    """Relative change of the mean from the first to the last half of values in time order, or 0.0 if it could be noise.

    Batch means (10 batches, of whole rounds where `per_round` clients keep step) are regressed on time; a slope whose
    |t| stays under 3 (more with fewer batches) is taken for noise. None below 20 values or 5 rounds.
    """
    x = np.asarray(values, float)
    batches = min(10, len(x) // per_round)
    if len(x) < 20 or batches < 5 or not x.mean():
        return None
    y = np.array([b.mean() for b in np.array_split(x, batches)])
    t = np.arange(batches) - (batches - 1) / 2
    slope = float(t @ y / (t @ t))
    residual = y - y.mean() - slope * t
    error = math.sqrt(float(residual @ residual) / (batches - 2) / float(t @ t))
    if abs(slope) <= 1.3 * t95(batches - 2) * error:
        return 0.0
    return slope * batches / 2 / float(x.mean())  # the halves' centres lie half of the batches apart
