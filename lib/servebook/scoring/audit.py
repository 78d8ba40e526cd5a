"""The verdict on a measured point: valid, suspect (use with the reason in mind) or invalid (do not use).

Pure functions of the point's own figures and of physical floors that the prediction gives; they know no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..common.stats import LEAST_ROUNDS
from ..config.points import PointSpec, RepeatedPoint

Verdict = Literal["valid", "suspect", "invalid"]

LITTLE_TOLERANCE = 0.02
COUNT_TOLERANCE = 0.02  # the server's token counter against the client's count
CACHE_TOLERANCE = 0.01  # share of prompt tokens served from the prefix cache unasked for
FAILURE_TOLERANCE = 0.05  # above this share of failures the survivors stand for nothing
DRIFT_TOLERANCE = 0.05
LAG_SHARE, LAG_FLOOR_S = 0.2, 0.002  # p99 of the event loop's lag, of TTFT p50; never more than a token's time
BUSY_TOLERANCE = 0.8  # of one core
THROTTLED_TOLERANCE = 0.05
REPEATED = "prompts repeated on purpose"  # how the reasons of such a point begin
PRECISION = 0.10  # relative half-width of a mean's 95 % interval


def audit(
    point: Mapping[str, Any], floors: Mapping[str, float] | None = None, *, cache_expected: bool = False
) -> tuple[Verdict, list[str]]:
    """Verdict and reasons of a point (keys as results.POINT_KEYS and load.summary's).

    floors: physical lower bounds, `ttft_floor_s`, `tpot_floor_s` and `e2e_floor_s`, each optional.
    cache_expected: the point repeats prompts on purpose, so cache hits are no fault.
    """
    invalid = _invalid(point, floors or {})
    suspect = _suspect(point, cache_expected)
    return ("invalid" if invalid else "suspect" if suspect else "valid"), invalid + suspect


def judge(
    point: Mapping[str, Any], spec: PointSpec, floors: Mapping[str, float] | None, *, cache_expected: bool = False
) -> tuple[Verdict, list[str]]:
    """As audit, for what was measured of `spec`; a point of the prefix-cache experiment says what it is.

    Such a point is that experiment's subject, but no figure of its engine for any other table: invalid.
    """
    repeated = isinstance(spec, RepeatedPoint)
    verdict, reasons = audit(point, floors, cache_expected=cache_expected or repeated)
    if not repeated or verdict == "invalid":
        return verdict, reasons
    hits = 100 * (point.get("cache_hit_share") or 0.0)
    return "invalid", [f"{REPEATED}: {hits:.1f} % of their tokens came from the prefix cache", *reasons]


def _invalid(p: Mapping[str, Any], floors: Mapping[str, float]) -> list[str]:
    n, failures = p.get("requests") or 0, p.get("failures") or 0
    reasons = []
    if not n:
        cause = next(iter(p.get("errors") or {}), p.get("stop_reason") or "no request finished")
        reasons.append(f"nothing measured: {cause}")
    elif failures > FAILURE_TOLERANCE * (n + failures):
        reasons.append(f"{failures} of {n + failures} requests failed ({_most_common(p)})")
    if off := p.get("prompt_tokens_off"):
        reasons.append(f"{off} of {n} prompts were not as long as asked, by the server's count")
    if off := p.get("output_tokens_off"):
        reasons.append(f"{off} of {n} answers were not as long as asked")
    for name, floor in (("ttft", "ttft_floor_s"), ("tpot", "tpot_floor_s"), ("e2e", "e2e_floor_s")):
        value, bound = p.get(f"{name}_mean_s"), floors.get(floor)
        if value is not None and bound is not None and value < bound:
            label = name.upper()
            reasons.append(f"mean {label} {_ms(value)} is below its physical floor {_ms(bound)}")
    return reasons


def _suspect(p: Mapping[str, Any], cache_expected: bool) -> list[str]:
    """One reason a cause, the gravest first: whether requests were answered, whether the counts agree, whether the
    load was what was asked for, whether client or hardware held it back, and last how sure the means are."""
    n, failures = p.get("requests") or 0, p.get("failures") or 0
    reasons: list[str] = []

    def when(condition: bool, reason: str) -> None:
        if condition:
            reasons.append(reason)

    when(0 < failures <= FAILURE_TOLERANCE * (n + failures), f"{failures} requests failed ({_most_common(p)})")
    when(bool(p.get("warmup_failures")), f"{p.get('warmup_failures')} requests failed in warm-up")
    when(bool(p.get("hung")), f"{p.get('hung')} requests hung unanswered when the point ended")
    if not n:
        return reasons
    server, client = p.get("server_output_tokens"), p.get("client_output_tokens")
    if server is not None and client is not None:
        # what came while a scrape lasted, and the step under way at either end, may be on either side
        edge = (p.get("scrape_edge_tokens") or 0) + 2 * (p.get("concurrency") or p.get("in_flight_mean") or 1)
        slack = max(COUNT_TOLERANCE * max(server, client), edge)
        when(abs(server - client) > slack, f"the server counted {server:.0f} output tokens, the client {client:.0f}")
    counted = p.get("counted_without_usage")
    how = {"events": "their events", "asked": "the length asked for"}.get(str(p.get("count_tokens")), "a guess")
    when(bool(counted), f"the server told no usage: the tokens of {counted} answers are {how}")
    when(bool(p.get("server_counters_reset")), "the server's counters fell: it, or an engine of it, was started again")
    hidden = p.get("hidden_reasoning_tokens")
    when(bool(hidden), f"{hidden} reasoning tokens were not streamed: they are inside TTFT, and TPOT is of the others")
    when(bool(p.get("events_over_tokens")), f"{p.get('events_over_tokens')} streams had more token events than tokens")
    hit = p.get("cache_hit_share")
    when(
        not cache_expected and hit is not None and hit > CACHE_TOLERANCE,
        f"{_percent(hit)} of prompt tokens came from the prefix cache unasked for",
    )
    when(bool(p.get("preemptions")), f"{p.get('preemptions') or 0:.0f} preemptions: the KV cache overflowed")
    reasons += _held_back(p)
    reasons += _uncertain(p, n)
    when(
        bool(p.get("first_event_unknown")),
        f"{p.get('first_event_unknown')} first events may carry several tokens, which is not told: one assumed",
    )
    return reasons


def _held_back(p: Mapping[str, Any]) -> list[str]:
    """What kept the server from being what was measured: the client, or a GPU that was slowed down."""
    signs = []
    lag, ttft, itl = (p.get(k) for k in ("client_loop_lag_p99_s", "ttft_p50_s", "itl_p50_s"))
    if lag is not None and lag > LAG_FLOOR_S and (lag > LAG_SHARE * (ttft or lag) or lag > (itl or lag)):
        signs.append(f"its event loop lagged {_ms(lag)} (p99)")
    cpu, seconds = p.get("client_cpu_s"), p.get("seconds")
    if cpu and seconds and cpu > BUSY_TOLERANCE * seconds:
        signs.append(f"it used {_percent(cpu / seconds)} of a core")
    lateness = p.get("schedule_lag_p99_s")
    if lateness is not None and lateness > max(LAG_FLOOR_S, LAG_SHARE * (ttft or 0)):
        signs.append(f"requests left {_ms(lateness)} (p99) after they were due")
    held, clients = p.get("in_flight_mean"), p.get("concurrency")
    if held is not None and clients is not None and held < 0.95 * clients:
        signs.append(f"it held {held:.2f} requests in flight, not {clients}")
    reasons = [f"client-limited: {', '.join(signs)}"] if signs else []
    slowed = p.get("gpu_throttled_share")
    if slowed is not None and slowed > THROTTLED_TOLERANCE:
        reasons.append(f"GPU clocks slowed by heat or a hardware brake {_percent(slowed)} of the time")
    capped, limit, default = (
        p.get(k) for k in ("gpu_power_capped_share", "gpu_power_limit_w", "gpu_power_limit_default_w")
    )
    if capped is not None and capped > THROTTLED_TOLERANCE and limit and default and limit < 0.99 * default:
        cap = f"at {limit:.0f} W, below the card's own {default:.0f} W"
        reasons.append(f"GPU power capped {cap}, {_percent(capped)} of the time")
    return reasons


def _uncertain(p: Mapping[str, Any], n: int) -> list[str]:
    """How far the means can be trusted. What follows from a graver cause is not said again."""
    clients, why = p.get("concurrency"), p.get("stop_reason")
    if clients and n < clients:
        return [f"only {n} requests of {clients} clients ended in the window: not one round ({why})"]
    if clients and clients > 1 and n < LEAST_ROUNDS * clients:
        rounds = f"{n / clients:.1f}".removesuffix(".0")
        return [f"few rounds: {rounds} of the {clients} clients, so how one differs from the next is not known ({why})"]
    if n == 1:
        return [f"only one request was measured ({why})"]
    if p.get("saturated"):
        return ["saturated: the queue grew from start to end, so latencies depend on the time measured"]
    reasons, little = [], p.get("little_error")
    if little is not None and abs(little) > LITTLE_TOLERANCE + (p.get("little_edge") or 0.0):
        reasons.append(f"Little's law is off by {_percent(little)}: rate x latency is not the number in flight")
    moving, wide = {}, {}
    for name in ("ttft", "tpot"):
        change, width = p.get(f"{name}_drift"), _relative_half_width(p, name)
        if change is not None and abs(change) > DRIFT_TOLERANCE:
            moving[name] = f"{name.upper()} by {_percent(change, sign=True)}"
        elif width is not None and width > PRECISION:
            wide[name] = f"{name.upper()} ±{_percent(width)}"
    if moving:
        reasons.append(f"not steady: mean {', '.join(moving.values())} from the window's first half to its second")
    if wide:
        reasons.append(f"not converged: mean {', '.join(wide.values())} ({why})")
    return reasons


def _relative_half_width(p: Mapping[str, Any], name: str) -> float | None:
    mean, low, high = (p.get(f"{name}_{k}_s") for k in ("mean", "ci_low", "ci_high"))
    return (high - low) / 2 / mean if mean and low is not None and high is not None else None


def _most_common(p: Mapping[str, Any]) -> str:
    return next(iter(p.get("errors") or {}), "no message")


def _ms(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:.3g} ms"


def _percent(share: float | None, *, sign: bool = False) -> str:
    return f"{100 * (share or 0.0):{'+' if sign else ''}.1f} %"
