"""Percentiles, intervals and steady-state tests over plain sequences of floats. Knows nothing of serving.

Only numpy is imported, so that the load client starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray
RESAMPLES = 1000  # of a bootstrap
LEAST_ROUNDS = 3  # fewest rounds of synchronized clients from which the variation between rounds is estimated
# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval; low and high are None if there are too few values."""

    mean: float
    low: float | None
    high: float | None

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width relative to the mean; infinite if there is no interval."""
        if self.low is None or self.high is None or not self.mean:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.mean)


def t95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.42 / degrees


def mean(values: Values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def percentile(values: Values, p: float) -> float | None:
    """The p-th percentile (0 to 100), with linear interpolation; None for no values."""
    return float(np.percentile(np.asarray(values, float), p)) if len(values) else None


class Histogram:
    """Percentiles of any number of positive values in 2 MB: 4096 bins per octave from 2^-20 to 2^10. Each bin has the
    count and mean of its values, so the relative error of a percentile is below 1/4096."""

    _LOW, _OCTAVES, _SHIFT = -20, 30, 52 - 12  # the bin: the exponent and the first 12 bits of the double's mantissa
    _BASE = (_LOW + 1023) << 12

    def __init__(self) -> None:
        self._counts, self._sums = np.zeros(self._OCTAVES << 12, np.int64), np.zeros(self._OCTAVES << 12)

    def add(self, values: np.ndarray) -> None:
        """Add values; those outside the octaves count in the first or last bin."""
        bins = (np.ascontiguousarray(values, float).view(np.int64) >> self._SHIFT) - self._BASE
        bins = bins.clip(0, len(self._counts) - 1)
        np.add.at(self._counts, bins, 1)
        np.add.at(self._sums, bins, values)

    def percentile(self, p: float) -> float | None:
        """As percentile(), with linear interpolation; each value is approximated by the mean of its bin."""
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

    Consecutive values are correlated (requests share batches), so they are grouped into consecutive batches whose means
    are nearly independent: 20 batches, or fewer so that a batch has at least 4 values; below 20 values each value is
    its own batch. The result is the wider of the batch interval and the plain t interval, and does not go below zero
    where no value does.

    per_round: number of clients that run in step, so that a latency depends on its place in the round. A batch is then
    a whole number of rounds, at most 20 batches. Below LEAST_ROUNDS the variation between rounds is unknown: no
    interval.
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
    low = m - half
    return Interval(m, max(low, 0.0) if x.min() >= 0 else low, m + half)


def percentile_interval(values: Values, p: float) -> tuple[float, float] | None:
    """95 % percentile-bootstrap interval of a percentile (seeded); None below 5 values."""
    x = np.asarray(values, float)
    if len(x) < 5:
        return None
    rng = np.random.default_rng(0)
    draws = [float(np.percentile(x[rng.integers(0, len(x), len(x))], p)) for _ in range(RESAMPLES)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def ratio_interval(ratio: float, *spans: tuple[float, float]) -> tuple[float, float]:
    """95 % interval of a ratio of independent means, from their intervals (low, high): half-widths add in quadrature on
    the log scale. NaN if one of them is unknown or not positive."""
    if not all(low > 0 and high > 0 for low, high in spans):
        return math.nan, math.nan
    factor = math.exp(math.sqrt(sum((math.log(high / low) / 2) ** 2 for low, high in spans)))
    return ratio / factor, ratio * factor


def drift(values: Values, per_round: int = 1) -> float | None:
    """Relative change of the mean from the first to the second half of values in time order; 0.0 if it may be noise.

    The means of 10 batches (whole rounds if `per_round` clients run in step) are regressed on time. A slope with |t|
    below 3 (a higher limit with fewer batches) counts as noise. None below 20 values or 5 rounds.
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
    return slope * batches / 2 / float(x.mean())  # the centres of the halves are half of the batches apart
