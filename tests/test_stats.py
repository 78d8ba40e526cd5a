"""Intervals and the drift test against processes whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from servebook.common import stats


def test_percentiles_and_means_of_nothing_are_none() -> None:
    assert stats.percentile([], 50) is None and stats.mean([]) is None and stats.mean_interval([]) is None


def test_percentile_is_linear_between_order_statistics() -> None:
    assert stats.percentile([1, 2, 3, 4], 50) == 2.5
    assert stats.percentile([10.0], 99) == 10


def test_a_histograms_percentiles_are_within_a_bin_and_exact_where_values_repeat() -> None:
    rng = np.random.default_rng(1)
    for values in (rng.lognormal(-4, 1.5, 30_000), rng.uniform(0.0098, 0.0102, 1000), np.array([3.0]), np.ones(9) / 3):
        histogram = stats.Histogram()
        for part in np.array_split(values, 7):
            histogram.add(part)
        for p in (0, 1, 50, 90, 99, 99.9, 100):
            assert histogram.percentile(p) == pytest.approx(np.percentile(values, p), rel=1 / 4096)
    assert histogram.percentile(50) == pytest.approx(1 / 3, rel=1e-12)
    assert stats.Histogram().percentile(50) is None
    extreme = stats.Histogram()
    extreme.add(np.array([0.0, 1e-9, 1e9]))
    assert extreme.percentile(100) == 1e9 and extreme.percentile(0) < 1e-8


def test_t95_matches_the_tables() -> None:
    assert stats.t95(1) == 12.706 and stats.t95(30) == 2.042
    assert stats.t95(60) == pytest.approx(2.000, abs=0.003) and stats.t95(10_000) == pytest.approx(1.960, abs=1e-3)


def test_a_small_sample_gets_the_t_interval() -> None:
    interval = stats.mean_interval([1.0, 2.0, 3.0])
    assert interval and interval.mean == 2
    assert interval.high == pytest.approx(2 + 4.303 * 1 / math.sqrt(3))
    one = stats.mean_interval([1.0])
    assert one and one.low is None and one.relative_half_width == math.inf


def _coverage(values: np.ndarray, truth: float) -> float:
    intervals = [stats.mean_interval(v) for v in values]
    return float(
        np.mean([i.low <= truth <= i.high for i in intervals if i and i.low is not None and i.high is not None])
    )


def test_the_interval_covers_independent_values_as_often_as_it_says() -> None:
    values = np.random.default_rng(0).exponential(1.0, (400, 200))
    assert 0.91 < _coverage(values, 1.0) < 0.99


def test_the_interval_stays_honest_for_correlated_values() -> None:
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(300, 400))
    values = np.zeros_like(noise)
    for k in range(1, 400):  # correlation 0.8 between neighbours: the plain interval would cover about half
        values[:, k] = 0.8 * values[:, k - 1] + noise[:, k]
    plain = 1.966 * values.std(axis=1, ddof=1) / math.sqrt(400)
    assert np.mean(abs(values.mean(axis=1)) <= plain) < 0.6
    assert _coverage(values, 0.0) > 0.85


def test_percentile_intervals_are_seeded_and_cover() -> None:
    values = np.random.default_rng(2).normal(10, 1, 500)
    interval = stats.percentile_interval(values, 90)
    assert interval == stats.percentile_interval(values, 90)
    assert interval and interval[0] < 10 + 1.2816 < interval[1] and interval[1] - interval[0] < 0.5
    assert stats.percentile_interval([1.0, 2.0], 99) is None


def test_drift_sees_a_trend_and_ignores_noise() -> None:
    rng = np.random.default_rng(3)
    flat = [stats.drift(rng.normal(1, 0.2, 100)) for _ in range(200)]
    assert np.mean([d != 0 for d in flat]) < 0.05
    rising = stats.drift(np.linspace(1, 1.4, 100) + rng.normal(0, 0.02, 100))
    assert rising == pytest.approx(0.2 / 1.2, rel=0.15)  # the halves' means are 1.1 and 1.3
    assert stats.drift([1.0] * 10) is None


def test_clients_in_step_make_their_round_one_value() -> None:
    rng = np.random.default_rng(5)
    place = np.linspace(1.0, 3.0, 16)  # latency by place in the round: nothing that repeats is uncertainty
    rounds = 1 + 0.1 * rng.standard_normal((400, 12))
    hits = 0
    for r in rounds:
        values = (place * r[:, None]).ravel()
        interval = stats.mean_interval(values, 16)
        assert interval.low is not None and interval.mean == pytest.approx(values.mean())
        hits += interval.low <= 2.0 <= interval.high
    assert hits / len(rounds) > 0.93
    few = stats.mean_interval((place * rounds[0][:2, None]).ravel(), 16)
    assert few.low is None and few.high is None and few.relative_half_width == np.inf
    # two rounds alike, cut into batches within the round, would have claimed to know
    assert stats.mean_interval(np.tile(place, 2)).low is not None


def test_drift_is_not_seen_in_a_round_that_repeats() -> None:
    place = np.linspace(1.0, 3.0, 64)
    assert stats.drift(np.tile(place, 8), 64) == pytest.approx(0.0, abs=1e-12)
    assert stats.drift(np.tile(place, 4), 64) is None
    assert stats.drift(place, 1) == pytest.approx(0.5, rel=0.02)
    growing = np.concatenate([place * g for g in np.linspace(1.0, 1.4, 8)])
    assert stats.drift(growing, 64) == pytest.approx(0.2 / 1.2 * 8 / 7, rel=0.02)


def test_interval_of_a_ratio_adds_half_widths_on_the_log_scale() -> None:
    low, high = stats.ratio_interval(2.0, (90.0, 110.0))
    assert high / low == pytest.approx(110 / 90) and math.sqrt(low * high) == pytest.approx(2.0)
    both = stats.ratio_interval(2.0, (90.0, 110.0), (90.0, 110.0))
    assert math.log(both[1] / 2.0) == pytest.approx(math.sqrt(2) * math.log(high / 2.0))
    assert all(map(math.isnan, stats.ratio_interval(2.0, (90.0, 110.0), (math.nan, 110.0))))
