"""From the replies of one point to its figures. Definitions, all over the measured window [window_start, window_end]:

- TTFT: sent (open loop: scheduled) to the first event that carries a token. E2E: the same to the last token's event.
- TPOT: (last - first) / (tokens - tokens of the first event), tokens from the server's usage.
- ITL: gaps between consecutive arrivals of one request's token events, pooled; `itl_is_event_gap` when the stream had
  fewer events than tokens, or more than 5 % of the events shared a read.
- output_tok_per_s: tokens whose arrival lies in the window, of every request, over its length; so no request's tokens
  from before or after count, and none of a request cut off at the end are lost. total_tok_per_s adds prompt tokens at
  their first token. decode_wall_tok_per_s leaves out each request's first token.
- decode_tok_per_s: running / mean TPOT for a batching engine (see running_of), no less than decode_wall_tok_per_s;
  1 / mean TPOT for one that does not batch. It asks what decoding does while it decodes; decode_wall_tok_per_s is
  what came out.
- in_flight_mean: time average of requests sent and not ended. little_l = request rate * mean time from
  sending to the last token.
- goodput_per_s: requests that met every given SLO, per second; failures never do.

One module, so that all definitions of figures are in one place.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..common import stats
from ..common.measured_point import MeasuredPoint, Turn
from ..config.params import Slo
from . import metrics
from .finished import Chunk, Column
from .flow import WindowTotals
from .window import PointProgress, converged

BUNCH = 4  # tokens that no server sends in its first read, if it streams
UNSEEN = 1.5  # a factor above which the difference cannot come from few samples


def summarize(
    point: MeasuredPoint, tracker: PointProgress, slo: Slo, *, batching: bool, scraper: metrics.Scraper | None
) -> MeasuredPoint:
    """The point with its measured figures, and the facts that the audit needs. point: its load, not measured yet."""
    begin, end = tracker.window_start, tracker.window_end
    if begin is None or end is None or end <= begin:
        begin = end = math.nan  # no window was opened: no request is measured
    account = metrics.Account(scraper.samples if scraper else [], begin, end)
    times, shape, turns = _Latencies(tracker.per_round), _Shape(), _Turns()
    outcomes, flow = _Outcomes(tracker, slo), WindowTotals(begin, end, account.times(), open_loop=tracker.open_loop)
    for chunk in tracker.finished.chunks():
        for part in (times, shape, turns, outcomes, flow):
            part.add(chunk)
    for figures in (outcomes, times, shape, turns):
        point = figures.fill(point)
    point = replace(point, hung=outcomes.hung(times.slowest))
    if math.isnan(begin):
        return point
    point = _fill_rates(account.fill(point, flow.output), tracker, outcomes, times, flow, account, batching)
    if point.cache_hit_share is None:  # the server has no metrics of it; its usage may have it
        point = replace(point, cache_hit_share=point.usage_cached_share)
    return flow.fill_arrivals(point, point.e2e_mean_s or 0.0, tracker.rule) if tracker.open_loop else point


def _fill_rates(
    point: MeasuredPoint,
    tracker: PointProgress,
    outcomes: _Outcomes,
    times: _Latencies,
    flow: WindowTotals,
    account: metrics.Account,
    batching: bool,
) -> MeasuredPoint:
    """The point with its rates, Little's law and goodput. point: with its latencies and the server's account."""
    seconds, ttft, tpot = flow.end - flow.begin, point.ttft_mean_s, point.tpot_mean_s
    attempted = (point.requests or 0) + (point.failures or 0)
    rate, in_flight = flow.completed / seconds, flow.in_flight_mean
    output = flow.output(flow.begin, flow.end)
    wall = (output - flow.firsts) / seconds
    running = 1.0
    if batching:
        waiting = waiting_of(point.server_queue_mean_s, rate, point.server_waiting_mean)
        running = running_of(in_flight, flow.decoding_mean, account.running_peak, waiting)
    decode = running / tpot if tpot else None
    # requests that wait at the client are not in flight
    little = rate * times.in_flight_s if point.e2e_mean_s is not None else None
    rate_interval = stats.mean_interval(flow.slices)
    return replace(
        point,
        seconds=seconds,
        request_rate_per_s=rate,
        output_tok_per_s=output / seconds,
        output_tok_per_s_ci_low=rate_interval.low if rate_interval else None,
        output_tok_per_s_ci_high=rate_interval.high if rate_interval else None,
        decode_tok_per_s=max(decode, wall) if decode and batching else decode,
        running_mean=running if batching else None,
        decode_wall_tok_per_s=wall,
        total_tok_per_s=(output + flow.prompt_tokens) / seconds,
        in_flight_mean=in_flight,
        little_l=little,
        little_error=little / in_flight - 1 if little is not None and in_flight else None,
        little_edge=times.edge(tracker.concurrency or 0),
        waiting_first_token=rate * ttft if ttft is not None else None,
        goodput_per_s=outcomes.met / seconds,
        goodput_share=outcomes.met / attempted if attempted else None,
    )


def waiting_of(queue_mean_s: float | None, rate_per_s: float, gauge_mean: float | None) -> float | None:
    """Mean number of requests that wait in the server: by Little's law if it reports queue times. A gauge scraped every
    second would sample clients that move in rounds of about a second always at the same phase."""
    return queue_mean_s * rate_per_s if queue_mean_s is not None else gauge_mean


def running_of(in_flight: float, decoding: float, running_peak: float | None, waiting: float | None) -> float:
    """Mean number of requests that a batching engine processes at the same time: in flight minus waiting.

    Prefilling requests count, as in vLLM's num_requests_running. in_flight: by the client. decoding: see WindowTotals.
    running_peak: the largest value of the server's gauge; waiting: see waiting_of; None if not reported.

    A server may have more waiting requests than it reports (connections that it has not accepted), or report none. The
    number seen running, by its gauge or by streams that the client sees decode at the same time, is too low only by
    sampling and prefills. If in flight minus waiting is far larger, the number seen counts. So a server that processes
    one request at a time has one running request, however many wait.
    """
    seen = max(decoding, running_peak or 0.0)
    if waiting is None:
        return min(in_flight, seen)
    running = in_flight - waiting
    return seen if running_peak is not None and running > UNSEEN * seen else running


class _Outcomes:
    """How requests of the window ended, and how many met the slo."""

    def __init__(self, tracker: PointProgress, slo: Slo) -> None:
        self.tracker, self.slo = tracker, slo
        self.good = self.failed = self.unfinished = self.warmup_failures = self.met = 0
        self._silent_s: list[float] = []  # for each request that was cut off, how long it had been silent

    def add(self, chunk: Chunk) -> None:
        r, measured = chunk.requests, chunk.phase("measured")
        cut = np.isnan(r["end"])
        self.good += int(chunk.good.sum())
        self.failed += int((measured & ~r["ok"]).sum())
        self.unfinished += int((measured & cut).sum())
        self.warmup_failures += int((chunk.phase("warmup") & ~r["ok"]).sum())
        meets = chunk.good.copy()
        for values, limit in (
            (chunk.ttft_s, self.slo.ttft_s), (chunk.tpot_s, self.slo.tpot_s), (chunk.e2e_s, self.slo.e2e_s)
        ):  # fmt: skip
            if limit is not None:
                meets &= ~(values > limit)
        self.met += int(meets.sum())
        last_event = np.where(np.isnan(r["last"]), r["sent"], r["last"])[cut & ~chunk.phase("carried")]
        self._silent_s += (self.tracker.stopped_at - last_event).tolist()

    def hung(self, slowest_s: float) -> int:
        """Requests cut off at the end that had been silent far longer than the finished ones took."""
        return sum(s > max(3 * slowest_s, 1.0) for s in self._silent_s)

    def fill(self, point: MeasuredPoint) -> MeasuredPoint:
        return replace(
            point,
            requests=self.good,
            failures=self.failed,
            unfinished=self.unfinished,
            warmup_failures=self.warmup_failures,
            cut_at_end=len(self._silent_s),
            errors=dict(self.tracker.finished.errors.most_common(5)),
            stop_reason=self.tracker.stop_reason,
            seconds=0.0,
        )


class _Latencies:
    """The three latencies of the window's answered requests, in the order they ended, and the gaps between events."""

    def __init__(self, per_round: int) -> None:
        self._per_round = per_round
        self._ttft, self._tpot, self._e2e, self._held, self._tail = (Column() for _ in range(5))
        self._gaps = stats.Histogram()

    def add(self, chunk: Chunk) -> None:
        good = chunk.good
        for column, values in ((self._ttft, chunk.ttft_s), (self._tpot, chunk.tpot_s), (self._e2e, chunk.e2e_s)):
            column.add(values[good])
        self._held.add((chunk.requests["last"] - chunk.requests["sent"])[good])
        self._tail.add((chunk.requests["end"] - chunk.requests["last"])[good])
        self._gaps.add(chunk.gaps_s(good))

    @property
    def in_flight_s(self) -> float:
        """Mean time from sending to the last token."""
        return float(self._held.values.mean())

    @property
    def slowest(self) -> float:
        return float(self._e2e.values.max(initial=0.0))

    def edge(self, clients: int) -> float | None:
        """The share by which the window's ends may change rate × latency of a closed loop: requests that cross an end
        count with their whole latency, or not at all. Latencies may differ by one deviation there. If a few are long, a
        client is more likely to be in one of these: the age of a request at a random time has the variance E[x^3] /
        3E[x] - (E[x^2] / 2E[x])^2, and two deviations over both ends are allowed."""
        e2e = self._e2e.values
        if not len(e2e) or not e2e.mean():
            return None
        x = e2e / e2e.mean()
        age = max(0.0, float((x**3).mean()) / 3 - (float((x**2).mean()) / 2) ** 2)
        return max(clients * float(x.std()), 2 * math.sqrt(2 * clients * age)) / len(x)

    def fill(self, point: MeasuredPoint) -> MeasuredPoint:
        """The point with its latencies and gaps."""
        point = fill_latencies(point, self._ttft.values, self._tpot.values, self._e2e.values, self._per_round)
        return replace(
            point,
            itl_p50_s=self._gaps.percentile(50),
            itl_p99_s=self._gaps.percentile(99),
            tail_mean_s=stats.mean(self._tail.values),
        )


def fill_latencies(
    point: MeasuredPoint, ttft_s: np.ndarray, tpot_s: np.ndarray, e2e_s: np.ndarray, per_round: int
) -> MeasuredPoint:
    """The point with means, percentiles, 95 % intervals and drift of its requests, given in the order they ended.

    per_round: requests of one round of closed-loop clients (see stats.mean_interval), 1 in an open loop.
    """
    p99 = stats.percentile_interval(ttft_s, 99)
    ttft, tpot, e2e = (stats.mean_interval(values, per_round) for values in (ttft_s, tpot_s, e2e_s))
    return replace(
        point,
        converged=converged(e2e_s, ttft_s, per_round),
        ttft_mean_s=stats.mean(ttft_s),
        ttft_p50_s=stats.percentile(ttft_s, 50),
        ttft_p90_s=stats.percentile(ttft_s, 90),
        ttft_p99_s=stats.percentile(ttft_s, 99),
        ttft_ci_low_s=ttft.low if ttft else None,
        ttft_ci_high_s=ttft.high if ttft else None,
        tpot_mean_s=stats.mean(tpot_s),
        tpot_p50_s=stats.percentile(tpot_s, 50),
        tpot_p90_s=stats.percentile(tpot_s, 90),
        tpot_p99_s=stats.percentile(tpot_s, 99),
        tpot_ci_low_s=tpot.low if tpot else None,
        tpot_ci_high_s=tpot.high if tpot else None,
        e2e_mean_s=stats.mean(e2e_s),
        e2e_p50_s=stats.percentile(e2e_s, 50),
        e2e_p90_s=stats.percentile(e2e_s, 90),
        e2e_p99_s=stats.percentile(e2e_s, 99),
        e2e_ci_low_s=e2e.low if e2e else None,
        e2e_ci_high_s=e2e.high if e2e else None,
        ttft_p99_ci_low_s=p99[0] if p99 else None,
        ttft_p99_ci_high_s=p99[1] if p99 else None,
        ttft_min_s=_least(ttft_s),
        tpot_min_s=_least(tpot_s),
        ttft_drift=stats.drift(ttft_s, per_round),
        tpot_drift=stats.drift(tpot_s, per_round),
    )


def _least(values: np.ndarray) -> float | None:
    return float(values.min()) if len(values) else None


class _Shape:
    """Whether the answers match the requests, and how they were split into events and reads."""

    def __init__(self) -> None:
        self.streamed = self.events = self.reads = self.cached = self.cachable = self.hidden = self.counted = 0
        self.bunched = 0
        self.over = self.unknown = self.prompts_off = self.outputs_off = self.prompts = self.prompt_tokens = 0

    def add(self, chunk: Chunk) -> None:
        r, events = chunk.requests[chunk.good], chunk.events_of[chunk.good]
        self.hidden += int(r["hidden_tokens"].sum())
        self.streamed += int((r["tokens"] - r["hidden_tokens"]).sum())  # an answered request's tokens are known
        self.counted += int((r["counted"] > 0).sum())
        first = chunk.events[(np.cumsum(chunk.requests["reads"]) - chunk.requests["reads"])[chunk.good]]
        whole = (r["reads"] == 1) & (r["tokens"] - r["hidden_tokens"] >= BUNCH)
        self.bunched += int(((first >= BUNCH) | whole).sum())
        self.events += int(events.sum())
        self.reads += int(r["reads"].sum())
        known = (r["cached_tokens"] >= 0) & (r["prompt_tokens"] > 0)
        self.cached += int(r["cached_tokens"][known].sum())
        self.cachable += int(r["prompt_tokens"][known].sum())
        self.over += int((events > r["tokens"]).sum())
        self.unknown += int((r["first_tokens"] < 0).sum())
        reported, asked = r["prompt_tokens"], r["prompt_tokens_asked"]
        self.prompts += int((reported >= 0).sum())
        self.prompt_tokens += int(reported.clip(0).sum())
        self.prompts_off += int(((reported >= 0) & (asked != 0) & (reported != asked)).sum())
        # without usage the length of an answer is unknown
        self.outputs_off += int(((r["tokens"] != r["output_tokens_asked"]) & (r["counted"] == 0)).sum())

    def fill(self, point: MeasuredPoint) -> MeasuredPoint:
        return replace(
            point,
            itl_is_event_gap=bool(self.events < self.streamed or self.reads < 0.95 * self.events),
            tokens_per_event=self.streamed / self.events if self.events else None,
            events_over_tokens=self.over,
            first_event_unknown=self.unknown,
            prompt_tokens_off=self.prompts_off,
            output_tokens_off=self.outputs_off,
            prompt_tokens_mean=self.prompt_tokens / self.prompts if self.prompts else None,
            usage_cached_tokens=self.cached,
            usage_cached_share=self.cached / self.cachable if self.cachable else None,
            hidden_reasoning_tokens=self.hidden,
            counted_without_usage=self.counted,
            bunched=self.bunched,
        )


class _Turns:
    """Conversations turn by turn: prompt growth and its effect on the first token."""

    def __init__(self) -> None:
        self._sums: dict[
            int, np.ndarray
        ] = {}  # turn: requests, sum of TTFT, requests with a reported prompt length, sum of these lengths

    def add(self, chunk: Chunk) -> None:
        r, ttft = chunk.requests[chunk.good], chunk.ttft_s[chunk.good]
        for turn in np.unique(r["turn"]).tolist():
            own = r["turn"] == turn
            prompts = r["prompt_tokens"][own]
            reported = prompts[prompts >= 0]
            sums = np.array([own.sum(), ttft[own].sum(), len(reported), reported.sum()], float)
            self._sums[turn] = self._sums.get(turn, 0.0) + sums

    def fill(self, point: MeasuredPoint) -> MeasuredPoint:
        """The point with its turns; unchanged if no request was part of a conversation."""
        if not any(self._sums):
            return point
        table: list[Turn] = [
            {
                "turn": turn,
                "requests": int(n),
                "prompt_tokens_mean": float(prompt / reported) if reported else None,
                "ttft_mean_s": float(ttft / n),
            }
            for turn, (n, ttft, reported, prompt) in sorted(self._sums.items())
        ]
        return replace(point, turns=tuple(table))
