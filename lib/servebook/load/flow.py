"""Totals of a time window over requests of all phases: tokens, requests in flight, arrivals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..common import stats
from ..common.measured_point import MeasuredPoint
from .finished import Chunk, Column
from .window import Rule

SLICES = 12  # of the window, for the interval of the throughput


class WindowTotals:
    """Totals of a window [begin, end], accumulated chunk by chunk.

    times: further times between which output tokens will be queried.
    """

    def __init__(self, begin: float, end: float, times: Iterable[float], *, open_loop: bool) -> None:
        self.begin, self.end, self._open_loop = begin, end, open_loop
        self._slices = np.linspace(begin, end, SLICES + 1)
        self._quarters = np.linspace(begin, end, 5)
        self._edges = np.unique([*self._slices, begin, end, *times])
        self._tokens = np.zeros(len(self._edges) + 1)  # in (edge, next edge]
        self._in_flight_s = np.zeros(4)
        self._lags, self._firsts, self._lasts = Column(), Column(), Column()
        self.completed = self.firsts = self.prompt_tokens = self._due = self._ended = 0

    def add(self, chunk: Chunk) -> None:
        """Add a chunk."""
        r, begin, end = chunk.requests, self.begin, self.end
        at = np.searchsorted(self._edges, chunk.times)
        self._tokens += np.bincount(at, chunk.tokens_at(), len(self._tokens))
        first_in = (r["first"] > begin) & (r["first"] <= end)
        prompts = np.where(r["prompt_tokens"] > 0, r["prompt_tokens"], r["prompt_tokens_asked"])
        self.firsts += int(first_in.sum())
        self.prompt_tokens += int(prompts[first_in].sum())
        # closed loop: completions, since its window starts and ends with one; open loop: arrivals
        self.completed += int((chunk.good & (self._open_loop | (r["end"] <= end))).sum())
        left = np.where(np.isnan(r["end"]), end, r["end"])
        for k, (a, b) in enumerate(pairwise(self._quarters)):
            self._in_flight_s[k] += np.nansum((np.minimum(left, b) - np.maximum(r["sent"], a)).clip(0))
        decodes = (np.minimum(r["last"], end) > np.maximum(r["first"], begin)).nonzero()
        self._firsts.add(np.maximum(r["first"], begin)[decodes])
        self._lasts.add(np.minimum(r["last"], end)[decodes])
        self._lags.add(r["sent"] - r["scheduled"])
        self._due += int(((r["scheduled"] > begin) & (r["scheduled"] <= end)).sum())
        self._ended += int((r["ok"] & (r["end"] > begin) & (r["end"] <= end)).sum())

    def output(self, begin: float, end: float) -> float:
        """Output tokens after `begin` and up to `end`."""
        a, b = np.searchsorted(self._edges, (begin, end))
        return float(self._tokens[a + 1 : b + 1].sum())

    @property
    def slices(self) -> list[float]:
        """Output tokens per second in each of the window's slices."""
        return [self.output(a, b) / (b - a) for a, b in pairwise(self._slices)]

    @property
    def in_flight_mean(self) -> float:
        """Time average of requests sent and not ended."""
        return float(self._in_flight_s.sum() / (self.end - self.begin))

    @property
    def decoding_mean(self) -> float:
        """See side_by_side, from the requests' first to their last tokens."""
        return side_by_side(self._firsts.values, self._lasts.values)

    def fill_arrivals(self, point: MeasuredPoint, e2e_s: float, rule: Rule) -> MeasuredPoint:
        """The point of an open loop with its send lag, unless requests waited for others, and whether the server
        kept up, except in a finite run."""
        seconds, lags = self.end - self.begin, self._lags.values
        queue = (self._in_flight_s / (seconds / 4)).tolist()
        # a queue that grows in every quarter and keeps at least 5 % of the arrivals
        grows = all(b > a for a, b in pairwise(queue)) and self._ended < 0.95 * self._due
        return replace(
            point,
            arrival_rate_per_s=self._due / seconds,
            # arrivals in the window against presence in it: requests that cross its ends are noise, two deviations
            # allowed
            little_edge=2 * e2e_s / seconds / math.sqrt(max(1.0, sum(queue) / 4)),
            schedule_lag_p50_s=None if rule.capped else stats.percentile(lags, 50),
            schedule_lag_p99_s=None if rule.capped else stats.percentile(lags, 99),
            in_flight_first_quarter=queue[0],
            in_flight_last_quarter=queue[-1],
            saturated=bool(grows) and not rule.finite,
        )


def side_by_side(first: np.ndarray, last: np.ndarray) -> float:
    """The mean number of overlapping spans [first, last], over the time with at least one; 0 without any."""
    if not len(first):
        return 0.0
    order = np.argsort(first, kind="stable")
    first, last = first[order], last[order]
    latest = np.maximum.accumulate(last)
    covered = np.concatenate([first[:1], latest[:-1]])  # earlier spans are already counted
    return float((last - first).sum() / (last - np.maximum(first, covered)).clip(0).sum())
