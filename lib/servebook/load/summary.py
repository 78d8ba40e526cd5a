"""From the replies of one point to its figures. Definitions, all over the measured window [window_start, window_end]:

- TTFT: sent (open loop: scheduled) to the first event that carries a token. E2E: the same to the last token's event.
- TPOT: (last - first) / (tokens - tokens of the first event), tokens from the server's usage.
- ITL: gaps between consecutive arrivals of one request's token events, pooled; `itl_is_event_gap` when the stream had
  fewer events than tokens, or more than 5 % of the events shared a read.
- output_tok_per_s: tokens whose arrival lies in the window, of every request, over its length; so no request's tokens
  from before or after count, and none of a request cut off at the end are lost. total_tok_per_s adds prompt tokens at
  their first token. decode_wall_tok_per_s leaves out each request's first token.
- decode_tok_per_s: running / mean TPOT for a batching engine, where running = mean requests in flight less those the
  server reports waiting (prefilling ones count, as in vLLM's num_requests_running); 1 / mean TPOT for one that does
  not batch. It asks what decoding does while it decodes; decode_wall_tok_per_s is what came out.
- in_flight_mean: time average of requests sent and not ended. little_l = request rate * mean E2E.
- goodput_per_s: requests that met every given SLO, per second; failures never do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .. import stats
from ..params import Slo
from . import metrics
from .client import Reply
from .loops import Tracker, converged

SLICES = 12  # of the window, for the throughput's interval


def row(reply: Reply, start: float) -> dict[str, Any]:
    """The request's row for the run folder; times relative to `start`, rounded to 1 µs."""
    stream = reply.stream

    def at(t: float | None) -> float | None:
        return None if t is None else round(t - start, 6)

    def span(t: float | None) -> float | None:
        return None if t is None else round(t, 6)

    return {
        "i": reply.index,
        "phase": reply.phase,
        "ok": reply.ok,
        "error": reply.error,
        "scheduled_s": at(reply.scheduled),
        "sent_s": at(reply.sent),
        "first_s": at(reply.first),
        "last_s": at(reply.last),
        "end_s": at(reply.end),
        "prompt_tokens": stream.prompt_tokens,
        "output_tokens": stream.tokens,
        "prompt_tokens_asked": reply.prompt_tokens_asked,
        "output_tokens_asked": reply.output_tokens_asked,
        "events": stream.events,
        "first_event_tokens": stream.first_tokens or 1,
        "ttft_s": span(reply.ttft_s),
        "tpot_s": span(reply.tpot_s),
        "e2e_s": span(reply.e2e_s),
        "gaps_ms": [round(gap * 1e3, 2) for gap in reply.gaps_s()],
        "turn": reply.turn,
    }


class Tokens:
    """Every token's arrival in a point, so that tokens can be counted between any two times."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        times: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        self.first = np.array([r.first for r in replies if r.first is not None])
        self.prompt = np.array(
            [r.stream.prompt_tokens or r.prompt_tokens_asked for r in replies if r.first is not None]
        )
        for r in replies:
            if r.first is None:
                continue
            counts = np.asarray(r.stream.counts, float)
            tokens = r.stream.tokens or counts.sum()
            opening = r.stream.first_tokens or 1
            events = counts.sum()
            each = (tokens - opening) / (events - 1) if events > 1 else 0.0
            w = counts * each
            w[0] = opening + (counts[0] - 1) * each
            times.append(np.asarray(r.stream.times))
            weights.append(w)
        self.times = np.concatenate(times) if times else np.empty(0)
        self.weights = np.concatenate(weights) if weights else np.empty(0)

    def output(self, begin: float, end: float) -> float:
        return float(self.weights[(self.times > begin) & (self.times <= end)].sum())

    def prompts(self, begin: float, end: float) -> float:
        return float(self.prompt[(self.first > begin) & (self.first <= end)].sum())

    def firsts(self, begin: float, end: float) -> int:
        return int(((self.first > begin) & (self.first <= end)).sum())


def in_flight_mean(replies: Sequence[Reply], begin: float, end: float) -> float:
    """Time average over [begin, end] of requests sent and not ended."""
    spans = [(r.sent, r.end if r.end is not None else end) for r in replies if r.sent is not None]
    return float(sum(max(0.0, min(e, end) - max(s, begin)) for s, e in spans) / (end - begin))


def _spread(prefix: str, values: Sequence[float], percentiles: Sequence[int]) -> dict[str, float | None]:
    interval = stats.mean_interval(values)
    out = {f"{prefix}_mean_s": stats.mean(values)}
    out |= {f"{prefix}_p{p}_s": stats.percentile(values, p) for p in percentiles}
    out |= {f"{prefix}_ci_low_s": interval.low if interval else None}
    out |= {f"{prefix}_ci_high_s": interval.high if interval else None}
    return out


def summarize(tracker: Tracker, slo: Slo, *, batching: bool, scraper: metrics.Scraper | None) -> dict[str, Any]:
    """The measured part of a point: figures, and the facts that the audit weighs."""
    good = [r for r in tracker.measured if r.ok]
    ended = tracker.ended
    everything = [*ended, *tracker.carried]
    begin, end = tracker.window_start, tracker.window_end
    failed = [r for r in tracker.measured if not r.ok]
    unfinished = [r for r in failed if r.end is None]
    out: dict[str, Any] = {
        "requests": len(good),
        "failures": len(failed),
        "unfinished": len(unfinished),
        "warmup_failures": sum(r.phase == "warmup" and not r.ok for r in ended),
        "errors": dict(Counter(r.error for r in ended if r.error and r.phase != "drain").most_common(5)),
        "stop_reason": tracker.stop_reason,
        "converged": converged(tracker.measured),
        "seconds": end - begin if begin is not None and end is not None else 0.0,
    }
    out |= _latencies(good) | _shape(good) | _hung(tracker, good)
    if any(r.turn for r in good):
        out["turns"] = _turns(good)
    if begin is None or end is None or end <= begin:
        return out
    tokens = Tokens(everything)
    seconds = end - begin
    edges = np.linspace(begin, end, SLICES + 1)
    slices = [tokens.output(a, b) / (b - a) for a, b in pairwise(edges)]
    rate_interval = stats.mean_interval(slices)
    # completions of a closed loop's window, which starts and ends with one; arrivals of an open loop's
    rate = sum(tracker.open_loop or (r.end or 0.0) <= end for r in good) / seconds
    in_flight = in_flight_mean(everything, begin, end)
    output = tokens.output(begin, end)
    e2e, ttft, tpot = out["e2e_mean_s"], out["ttft_mean_s"], out["tpot_mean_s"]
    server = _server(scraper, tokens, begin, end)
    running = in_flight - (server["server_waiting_mean"] or 0.0) if batching else 1.0
    little = rate * e2e if e2e is not None else None
    met = sum(_meets(r, slo) for r in good)
    out |= {
        "request_rate_per_s": rate,
        "output_tok_per_s": output / seconds,
        "output_tok_per_s_ci_low": rate_interval.low if rate_interval else None,
        "output_tok_per_s_ci_high": rate_interval.high if rate_interval else None,
        "decode_tok_per_s": running / tpot if tpot else None,
        "decode_wall_tok_per_s": (output - tokens.firsts(begin, end)) / seconds,
        "total_tok_per_s": (output + tokens.prompts(begin, end)) / seconds,
        "in_flight_mean": in_flight,
        "little_l": little,
        "little_error": little / in_flight - 1 if little is not None and in_flight else None,
        # latencies of requests that straddle the window's ends may differ by a deviation
        "little_edge": (tracker.concurrency or 0) * float(np.std([r.e2e_s or 0.0 for r in good])) / len(good) / e2e
        if e2e
        else None,
        "waiting_first_token": rate * ttft if ttft is not None else None,
        "goodput_per_s": met / seconds,
        "goodput_share": met / (len(good) + len(failed)) if good or failed else None,
        **server,
    }
    if tracker.open_loop:
        out |= _open(everything, begin, end, e2e or 0.0)
    return out


def _latencies(good: Sequence[Reply]) -> dict[str, Any]:
    ttft, tpot, e2e = (
        [v for r in good if (v := getattr(r, name)) is not None] for name in ("ttft_s", "tpot_s", "e2e_s")
    )
    gaps = np.concatenate([r.gaps_s() for r in good]) if good else np.empty(0)
    out: dict[str, Any] = {**_spread("ttft", ttft, (50, 90, 99)), **_spread("tpot", tpot, (50, 99))}
    out |= _spread("e2e", e2e, (50, 99))
    p99 = stats.percentile_interval(ttft, 99)
    out |= {"ttft_p99_ci_low_s": p99[0] if p99 else None, "ttft_p99_ci_high_s": p99[1] if p99 else None}
    out |= {"itl_p50_s": stats.percentile(gaps, 50), "itl_p99_s": stats.percentile(gaps, 99)}
    out |= {"ttft_min_s": min(ttft, default=None), "tpot_min_s": min(tpot, default=None)}
    out |= {"ttft_drift": stats.drift(ttft), "tpot_drift": stats.drift(tpot)}
    return out


def _turns(good: Sequence[Reply]) -> list[dict[str, Any]]:
    """Conversations turn by turn: how the prompt grew and what that did to the first token."""
    table = []
    for turn in sorted({r.turn for r in good}):
        own = [r for r in good if r.turn == turn]
        ttft = stats.mean([v for r in own if (v := r.ttft_s) is not None])
        prompt = stats.mean([r.stream.prompt_tokens for r in own if r.stream.prompt_tokens is not None])
        table.append({"turn": turn, "requests": len(own), "prompt_tokens_mean": prompt, "ttft_mean_s": ttft})
    return table


def _shape(good: Sequence[Reply]) -> dict[str, Any]:
    """Whether what came back is what was asked for, and how it was cut into events and reads."""
    tokens = sum(r.stream.tokens or 0 for r in good)
    events = sum(r.stream.events for r in good)
    reads = sum(len(r.stream.times) for r in good)
    told = [r.stream.prompt_tokens for r in good]
    return {
        "itl_is_event_gap": bool(events < tokens or reads < 0.95 * events),
        "tokens_per_event": tokens / events if events else None,
        "events_over_tokens": sum(r.stream.events > (r.stream.tokens or 0) for r in good),
        "first_event_unknown": sum(r.stream.first_tokens is None for r in good),
        "prompt_tokens_off": sum(
            t is not None and r.prompt_tokens_asked not in (0, t) for t, r in zip(told, good, strict=True)
        ),
        "output_tokens_off": sum(r.stream.tokens != r.output_tokens_asked for r in good),
        "usage_cached_tokens": sum(r.stream.cached_tokens or 0 for r in good),
    }


def _hung(tracker: Tracker, good: Sequence[Reply]) -> dict[str, Any]:
    """Requests cut off at the end that had been silent for far longer than the finished ones took."""
    slowest = max((r.e2e_s or 0.0 for r in good), default=0.0)
    cut = [(r, r.last or r.sent) for r in tracker.ended if r.end is None]
    hung = [r for r, heard in cut if heard is not None and tracker.stopped_at - heard > max(3 * slowest, 1.0)]
    return {"cut_at_end": len(cut), "hung": len(hung)}


def _meets(reply: Reply, slo: Slo) -> bool:
    pairs = ((reply.ttft_s, slo.ttft_s), (reply.tpot_s, slo.tpot_s), (reply.e2e_s, slo.e2e_s))
    return all(limit is None or value is None or value <= limit for value, limit in pairs)


def _server(scraper: metrics.Scraper | None, tokens: Tokens, begin: float, end: float) -> dict[str, Any]:
    """The server's and the GPU's own account of the window, from the samples nearest its ends."""
    samples = scraper.samples if scraper else []
    told = [s for s in samples if s.values]
    inside = [s for s in samples if begin <= s.t <= end]
    before = min(told, key=lambda s: abs(s.t - begin), default=None)
    after = min(told, key=lambda s: abs(s.t - end), default=None)
    if before is after:
        before = after = None
    first, last = (told[0], told[-1]) if len(told) > 1 else (None, None)
    queries = metrics.delta(first, last, "cache_queries")
    hits = metrics.delta(first, last, "cache_hits")
    between = (before.t, after.t) if before and after else (begin, begin)

    def gpu(name: str) -> float | None:
        return stats.mean([s.gpu[name] for s in inside if name in s.gpu])

    return {
        "server_running_mean": metrics.gauge_mean(inside, "running"),
        "server_waiting_mean": metrics.gauge_mean(inside, "waiting"),
        "kv_cache_usage_mean": metrics.gauge_mean(inside, "kv_cache_usage"),
        "cache_hit_share": hits / queries if hits is not None and queries else None,
        "preemptions": metrics.delta(first, last, "preemptions"),
        "server_prefill_mean_s": metrics.histogram_mean(before, after, "prefill"),
        "server_queue_mean_s": metrics.histogram_mean(before, after, "queue"),
        "server_ttft_mean_s": metrics.histogram_mean(before, after, "ttft"),
        # both sides counted between the same two scrapes
        "server_output_tokens": metrics.delta(before, after, "generation_tokens"),
        "client_output_tokens": tokens.output(*between) if before and after else None,
        # a scrape counts at some moment while it lasts: tokens that came meanwhile may be on either side
        "scrape_edge_tokens": sum(tokens.output(s.t - s.took / 2, s.t + s.took / 2) for s in (before, after) if s),
        "gpu_power_mean_w": gpu("gpu_power_w"),
        "gpu_power_limit_w": gpu("gpu_power_limit_w"),
        "gpu_power_limit_default_w": gpu("gpu_power_limit_default_w"),
        "gpu_clock_mean_mhz": gpu("gpu_clock_mhz"),
        "gpu_utilization_mean": gpu("gpu_utilization"),
        "gpu_power_capped_share": gpu("gpu_power_capped"),
        "gpu_throttled_share": gpu("gpu_throttled"),
    }


def _open(everything: Sequence[Reply], begin: float, end: float, e2e: float) -> dict[str, Any]:
    """Open loop: how late requests were sent, and whether the server kept up."""
    lags = [r.sent - r.scheduled for r in everything if r.sent is not None and r.scheduled is not None]
    due = [r for r in everything if r.scheduled is not None and begin < r.scheduled <= end]
    completed = sum(r.ok and begin < (r.end or 0.0) <= end for r in everything)
    quarters = np.linspace(begin, end, 5)
    queue = [in_flight_mean(everything, a, b) for a, b in pairwise(quarters)]
    # a queue that grows in every quarter and takes no fewer than 5 % of the arrivals with it
    grows = all(b > a for a, b in pairwise(queue)) and completed < 0.95 * len(due)
    return {
        "arrival_rate_per_s": len(due) / (end - begin),
        # arrivals of the window against presence in it: what straddles its ends is noise, two deviations of it allowed
        "little_edge": 2 * e2e / (end - begin) / math.sqrt(max(1.0, sum(queue) / 4)),
        "schedule_lag_p50_s": stats.percentile(lags, 50),
        "schedule_lag_p99_s": stats.percentile(lags, 99),
        "in_flight_first_quarter": queue[0],
        "in_flight_last_quarter": queue[-1],
        "saturated": bool(grows),
    }
