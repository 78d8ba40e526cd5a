"""The verdict on a measured point: valid, suspect (use with the reason in mind) or invalid (do not use).

Pure functions of the point's figures and of the prediction's physical floors; they read no files.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..common.measured_point import MeasuredPoint
from ..common.reasons import Reason, ReasonCode, Verdict
from ..common.stats import LEAST_ROUNDS
from ..config.points import PointSpec, RepeatedPoint

Judgement = tuple[Verdict, tuple[Reason, ...]]

LITTLE_TOLERANCE = 0.02
COUNT_TOLERANCE = 0.02  # relative difference of the server's token counter and the client's count
CACHE_TOLERANCE = 0.01  # share of prompt tokens from the prefix cache although no prompt repeats
FAILURE_TOLERANCE = 0.05  # above this share of failures the remaining requests are not representative
DRIFT_TOLERANCE = 0.05
LAG_SHARE, LAG_FLOOR_S = 0.2, 0.002  # of the event loop's p99 lag; LAG_SHARE is relative to TTFT p50
BUSY_TOLERANCE = 0.8  # of one core
THROTTLED_TOLERANCE = 0.05
BUNCHED_TOLERANCE = 0.05  # of the requests
TAIL_SHARE = 0.02  # time that answers stay open after their last token, relative to the latency
PRECISION = 0.10  # relative half-width of a mean's 95 % interval


def audit(
    point: MeasuredPoint, floors: Mapping[str, float] | None = None, *, cache_expected: bool = False
) -> Judgement:
    """Verdict and reasons of a point.

    floors: physical lower bounds of the means, `ttft_floor_s`, `tpot_floor_s` and `e2e_floor_s`, each optional.
    cache_expected: the point repeats prompts on purpose, so cache hits are no fault.
    """
    # cached prompts need no prefill; if hits are expected and not reported, all prompts may be cached
    hits = point.cache_hit_share
    cached = min(1.0, hits if hits is not None else float(cache_expected))
    bounds = {k: v if k == "tpot_floor_s" else v * (1 - cached) for k, v in (floors or {}).items()}
    invalid = _invalid(point, bounds)
    suspect = _suspect(point, cache_expected)
    return ("invalid" if invalid else "suspect" if suspect else "valid"), (*invalid, *suspect)


def judge(
    point: MeasuredPoint, spec: PointSpec, floors: Mapping[str, float] | None, *, cache_expected: bool = False
) -> Judgement:
    """As audit, for the measured point of `spec`. Points with prompts repeated on purpose get a reason of their own.

    They serve the prefix-cache sweep, but are no figure of the engine's speed, so their verdict is invalid.
    """
    repeated = isinstance(spec, RepeatedPoint)
    verdict, reasons = audit(point, floors, cache_expected=cache_expected or repeated)
    if not repeated or verdict == "invalid":
        return verdict, reasons
    hits = 100 * (point.cache_hit_share or 0.0)
    text = f"prompts repeated on purpose: {hits:.1f} % of their tokens came from the prefix cache"
    return "invalid", (Reason(ReasonCode.REPEATED_PROMPTS, text), *reasons)


def _invalid(p: MeasuredPoint, floors: Mapping[str, float]) -> list[Reason]:
    n, failures = p.requests or 0, p.failures or 0
    reasons: list[Reason] = []
    if not n:
        cause = next(iter(p.errors or {}), p.stop_reason or "no request finished")
        reasons.append(Reason(ReasonCode.NOTHING_MEASURED, f"nothing measured: {cause}"))
    elif failures > FAILURE_TOLERANCE * (n + failures):
        text = f"{failures} of {n + failures} requests failed ({_most_common(p)})"
        reasons.append(Reason(ReasonCode.MANY_FAILURES, text))
    if off := p.prompt_tokens_off:
        text = f"{off} of {n} prompts were not as long as asked, by the server's count"
        reasons.append(Reason(ReasonCode.PROMPT_LENGTH, text))
    if off := p.output_tokens_off:
        reasons.append(Reason(ReasonCode.OUTPUT_LENGTH, f"{off} of {n} answers were not as long as asked"))
    for label, value, floor in (
        ("TTFT", p.ttft_mean_s, "ttft_floor_s"), ("TPOT", p.tpot_mean_s, "tpot_floor_s"),
        ("E2E", p.e2e_mean_s, "e2e_floor_s"),
    ):  # fmt: skip
        bound = floors.get(floor)
        if value is not None and bound and value < bound:
            text = f"mean {label} {_ms(value)} is below its physical floor {_ms(bound)}"
            reasons.append(Reason(ReasonCode.BELOW_FLOOR, text))
    return reasons


def _suspect(p: MeasuredPoint, cache_expected: bool) -> list[Reason]:
    """Reasons for suspect, one per cause, roughly the gravest first: unanswered requests, counts that disagree, cache
    hits and preemptions, a limiting client or GPU, the uncertainty of the means, an unknown first event."""
    n, failures = p.requests or 0, p.failures or 0
    reasons: list[Reason] = []

    def add_if(condition: bool, code: ReasonCode, text: str) -> None:
        if condition:
            reasons.append(Reason(code, text))

    add_if(
        0 < failures <= FAILURE_TOLERANCE * (n + failures),
        ReasonCode.SOME_FAILURES,
        f"{failures} requests failed ({_most_common(p)})",
    )
    add_if(bool(p.warmup_failures), ReasonCode.WARMUP_FAILURES, f"{p.warmup_failures} requests failed in warm-up")
    add_if(bool(p.hung), ReasonCode.HUNG_REQUESTS, f"{p.hung} requests hung unanswered when the point ended")
    if not n:
        return reasons
    reasons += _doubtful_counts(p, n)
    hit = p.cache_hit_share
    add_if(
        not cache_expected and hit is not None and hit > CACHE_TOLERANCE,
        ReasonCode.CACHE_HITS,
        f"{_percent(hit)} of prompt tokens came from the prefix cache unintentionally",
    )
    add_if(
        bool(p.preemptions),
        ReasonCode.PREEMPTIONS,
        f"{p.preemptions or 0:.0f} preemptions: the KV cache overflowed",
    )
    reasons += _held_back(p)
    reasons += _uncertain(p, n)
    add_if(
        bool(p.first_event_unknown),
        ReasonCode.FIRST_EVENT_SIZE,
        f"{p.first_event_unknown} first events may carry several tokens (not reported): one is assumed",
    )
    return reasons


def _doubtful_counts(p: MeasuredPoint, n: int) -> list[Reason]:
    """Reasons to doubt the numbers of tokens or the times of single tokens. n: number of measured requests."""
    reasons: list[Reason] = []

    def add_if(condition: bool, code: ReasonCode, text: str) -> None:
        if condition:
            reasons.append(Reason(code, text))

    server, client = p.server_output_tokens, p.client_output_tokens
    if server is not None and client is not None:
        # tokens received during a scrape, and the step running at either end, may count on either side
        edge = (p.scrape_edge_tokens or 0) + 2 * (p.concurrency or p.in_flight_mean or 1)
        slack = max(COUNT_TOLERANCE * max(server, client), edge)
        text = f"the server counted {server:.0f} output tokens, the client {client:.0f}"
        add_if(abs(server - client) > slack, ReasonCode.TOKEN_COUNT, text)
    how = {"events": "their events", "asked": "the requested length"}.get(str(p.count_tokens), "a guess")
    text = f"the server reported no usage: the tokens of {p.counted_without_usage} answers are {how}"
    add_if(bool(p.counted_without_usage), ReasonCode.NO_USAGE, text)
    text = "the server's counters fell: it, or an engine of it, was started again"
    add_if(bool(p.server_counters_reset), ReasonCode.COUNTERS_RESET, text)
    hidden = p.hidden_reasoning_tokens
    text = f"{hidden} reasoning tokens were not streamed: they count in TTFT, and TPOT covers the others"
    add_if(bool(hidden), ReasonCode.HIDDEN_REASONING, text)
    add_if(
        bool(p.events_over_tokens),
        ReasonCode.EXTRA_EVENTS,
        f"{p.events_over_tokens} streams had more token events than tokens",
    )
    text = (
        f"{p.bunched} answers brought several tokens at once in their first read: something holds tokens back, so "
        "TTFT is late and TPOT short or missing"
    )
    add_if((p.bunched or 0) > BUNCHED_TOLERANCE * n, ReasonCode.BUNCHED, text)
    return reasons


def _held_back(p: MeasuredPoint) -> list[Reason]:
    """Reasons outside the server's software: a client that limited the load, or a GPU that was slowed down."""
    signs = []
    lag, ttft, itl = p.client_loop_lag_p99_s, p.ttft_p50_s, p.itl_p50_s
    if lag is not None and lag > LAG_FLOOR_S and (lag > LAG_SHARE * (ttft or lag) or lag > (itl or lag)):
        signs.append(f"its event loop lagged {_ms(lag)} (p99)")
    cpu, seconds = p.client_cpu_s, p.seconds
    if cpu and seconds and cpu > BUSY_TOLERANCE * seconds:
        signs.append(f"it used {_percent(cpu / seconds)} of a core")
    lateness = p.schedule_lag_p99_s
    if lateness is not None and lateness > max(LAG_FLOOR_S, LAG_SHARE * (ttft or 0)):
        signs.append(f"requests left {_ms(lateness)} (p99) after they were due")
    held, clients = p.in_flight_mean, p.concurrency
    if held is not None and clients is not None and held < 0.95 * clients and not p.finite_requests:
        signs.append(f"it held {held:.2f} requests in flight, not {clients}")
    reasons = [Reason(ReasonCode.CLIENT_LIMITED, f"client-limited: {', '.join(signs)}")] if signs else []
    slowed = p.gpu_throttled_share
    if slowed is not None and slowed > THROTTLED_TOLERANCE:
        text = f"GPU clocks slowed by heat or a hardware brake {_percent(slowed)} of the time"
        reasons.append(Reason(ReasonCode.THROTTLED, text))
    capped, limit, default = p.gpu_power_capped_share, p.gpu_power_limit_w, p.gpu_power_limit_default_w
    if capped is not None and capped > THROTTLED_TOLERANCE and limit and default and limit < 0.99 * default:
        cap = f"at {limit:.0f} W, below the card's own {default:.0f} W"
        reasons.append(Reason(ReasonCode.POWER_CAPPED, f"GPU power capped {cap}, {_percent(capped)} of the time"))
    return reasons


def _uncertain(p: MeasuredPoint, n: int) -> list[Reason]:
    """Reasons about the uncertainty of the means. A grave one (too few rounds, saturation) hides those it causes."""
    clients, why = p.concurrency, p.stop_reason
    if p.finite_requests:  # a finite run has a ramp-up and a tail, and is not a sample of a longer load
        one = Reason(ReasonCode.ONE_REQUEST, f"only one request was measured ({why})")
        return [*_off_by_little(p), *([one] if n == 1 else [])]
    if clients and n < clients:
        text = f"only {n} requests of {clients} clients ended in the window: not one round ({why})"
        return [Reason(ReasonCode.NO_FULL_ROUND, text)]
    if clients and clients > 1 and n < LEAST_ROUNDS * clients:
        rounds = f"{n / clients:.1f}".removesuffix(".0")
        text = f"few rounds: {rounds} of the {clients} clients, so how one differs from the next is not known ({why})"
        return [Reason(ReasonCode.FEW_ROUNDS, text)]
    if n == 1:
        return [Reason(ReasonCode.ONE_REQUEST, f"only one request was measured ({why})")]
    if p.saturated:
        text = "saturated: the queue grew from start to end, so latencies depend on the time measured"
        return [Reason(ReasonCode.SATURATED, text)]
    reasons = _off_by_little(p)
    moving, wide = [], []
    for name, change, width in (
        ("TTFT", p.ttft_drift, _relative_half_width(p.ttft_mean_s, p.ttft_ci_low_s, p.ttft_ci_high_s)),
        ("TPOT", p.tpot_drift, _relative_half_width(p.tpot_mean_s, p.tpot_ci_low_s, p.tpot_ci_high_s)),
    ):
        if change is not None and abs(change) > DRIFT_TOLERANCE:
            moving.append(f"{name} by {_percent(change, sign=True)}")
        elif width is not None and width > PRECISION:
            wide.append(f"{name} ±{_percent(width)}")
    if moving:
        text = f"not steady: mean {', '.join(moving)} from the window's first half to its second"
        reasons.append(Reason(ReasonCode.DRIFT, text))
    if wide:
        reasons.append(Reason(ReasonCode.WIDE_INTERVAL, f"not converged: mean {', '.join(wide)} ({why})"))
    return reasons


def _off_by_little(p: MeasuredPoint) -> list[Reason]:
    little = p.little_error
    if little is None or abs(little) <= LITTLE_TOLERANCE + (p.little_edge or 0.0):
        return []
    why = "rate x latency is not the number in flight"
    if p.tail_mean_s and p.e2e_mean_s and p.tail_mean_s > TAIL_SHARE * p.e2e_mean_s:
        why = f"answers stay open for {_ms(p.tail_mean_s)} after their last token"
    text = f"Little's law is off by {_percent(little)}: {why}"
    return [Reason(ReasonCode.LITTLES_LAW, text)]


def _relative_half_width(mean: float | None, low: float | None, high: float | None) -> float | None:
    return (high - low) / 2 / mean if mean and low is not None and high is not None else None


def _most_common(p: MeasuredPoint) -> str:
    return next(iter(p.errors or {}), "no message")


def _ms(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:.3g} ms"


def _percent(share: float | None, *, sign: bool = False) -> str:
    return f"{100 * (share or 0.0):{'+' if sign else ''}.1f} %"
