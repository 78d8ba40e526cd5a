"""Each reason fires on the fault it names and not on a good point."""

from __future__ import annotations

from typing import Any

import pytest
from servebook.common.measured_point import MeasuredPoint
from servebook.scoring.audit import audit as audit_point

GOOD: dict[str, Any] = {
    "concurrency": 8, "requests": 100, "failures": 0, "errors": {}, "stop_reason": "interval narrow enough",
    "seconds": 20.0, "ttft_mean_s": 0.1, "ttft_p50_s": 0.1, "ttft_ci_low_s": 0.099, "ttft_ci_high_s": 0.101,
    "tpot_mean_s": 0.01, "tpot_ci_low_s": 0.0099, "tpot_ci_high_s": 0.0101, "itl_p50_s": 0.01, "e2e_mean_s": 1.4,
    "little_error": 0.004, "in_flight_mean": 7.9, "cache_hit_share": 0.0, "preemptions": 0, "prompt_tokens_off": 0,
    "output_tokens_off": 0, "server_output_tokens": 10000, "client_output_tokens": 9995, "client_cpu_s": 1.0,
    "client_loop_lag_p99_s": 0.0005, "ttft_drift": 0.0, "tpot_drift": None, "gpu_throttled_share": 0.0, "hung": 0,
    "warmup_failures": 0, "events_over_tokens": 0, "first_event_unknown": 0,
}  # fmt: skip


def audit(figures: dict[str, Any], *floors: dict[str, float], **how: bool) -> tuple[str, list[str]]:
    """The verdict and the reasons' texts of a point with these figures."""
    named = {"sweep": "s", "engine": "e", "point_id": "c0008", "prompt_tokens": 512, "output_tokens": 128}
    verdict, reasons = audit_point(MeasuredPoint(**named, **figures), *floors, **how)
    assert len({r.code for r in reasons}) == len(reasons)
    return verdict, [r.text for r in reasons]


def test_a_good_point_is_valid_also_with_unknown_figures() -> None:
    floors = {"ttft_floor_s": 0.05, "tpot_floor_s": 0.005}
    assert audit(GOOD, floors) == ("valid", [])
    known = ("requests", "failures", "ttft_mean_s", "tpot_mean_s")
    assert audit({k: GOOD[k] for k in known}) == ("valid", [])


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({"requests": 0, "errors": {"HTTP 500: x": 9}}, "invalid", "nothing measured: HTTP 500: x"),
        ({"requests": 90, "failures": 10, "errors": {"boom": 10}}, "invalid", "10 of 100 requests failed (boom)"),
        ({"failures": 2, "errors": {"boom": 2}}, "suspect", "2 requests failed (boom)"),
        ({"warmup_failures": 1}, "suspect", "failed in warm-up"),
        ({"hung": 1}, "suspect", "hung unanswered"),
        ({"prompt_tokens_off": 1}, "invalid", "not as long as asked"),
        ({"output_tokens_off": 3}, "invalid", "3 of 100 answers"),
        ({"little_error": -0.03}, "suspect", "Little's law is off by -3.0 %"),
        ({"server_output_tokens": 12000}, "suspect", "the server counted 12000"),
        ({"cache_hit_share": 0.5}, "suspect", "50.0 % of prompt tokens came from the prefix cache"),
        ({"preemptions": 4}, "suspect", "4 preemptions"),
        ({"events_over_tokens": 1}, "suspect", "more token events than tokens"),
        ({"first_event_unknown": 5}, "suspect", "one is assumed"),
        ({"client_loop_lag_p99_s": 0.03}, "suspect", "event loop lagged 30 ms"),
        ({"client_cpu_s": 19.0}, "suspect", "95.0 % of a core"),
        ({"schedule_lag_p99_s": 0.05}, "suspect", "after they were due"),
        ({"in_flight_mean": 7.0}, "suspect", "client-limited: it held 7.00 requests in flight, not 8"),
        ({"saturated": True}, "suspect", "the queue grew"),
        ({"ttft_drift": 0.2}, "suspect", "not steady: mean TTFT by +20.0 %"),
        ({"requests": 20}, "suspect", "few rounds: 2.5 of the 8 clients, so how one differs from the next is not"),
        (
            {"ttft_ci_low_s": 0.08, "ttft_ci_high_s": 0.12},
            "suspect",
            "not converged: mean TTFT ±20.0 %",
        ),
        ({"gpu_throttled_share": 0.4}, "suspect", "slowed by heat or a hardware brake 40.0 % of the time"),
        (
            {"gpu_power_capped_share": 0.9, "gpu_power_limit_w": 500.0, "gpu_power_limit_default_w": 700.0},
            "suspect",
            "power capped at 500 W, below the card's own 700 W, 90.0 % of the time",
        ),
        ({"requests": 5, "little_error": 0.3, "ttft_ci_low_s": 0.05}, "suspect", "only 5 requests of 8 clients"),
        ({"saturated": True, "little_error": -0.3, "ttft_drift": 0.5, "in_flight_mean": 20.0}, "suspect", "saturated"),
        ({"ttft_drift": 0.2, "ttft_ci_low_s": 0.05}, "suspect", "not steady"),
        ({"client_loop_lag_p99_s": 0.03, "client_cpu_s": 19.0}, "suspect", "client-limited: its event loop"),
        (
            {"ttft_ci_low_s": 0.08, "ttft_ci_high_s": 0.12, "tpot_ci_low_s": 0.008, "tpot_ci_high_s": 0.012},
            "suspect",
            "mean TTFT ±20.0 %, TPOT ±20.0 %",
        ),
    ],
)
def test_a_fault_is_named(change: dict[str, Any], verdict: str, reason: str) -> None:
    found, reasons = audit({**GOOD, **change})
    assert found == verdict
    assert len(reasons) == 1 and reason in reasons[0]


def test_a_figure_below_its_floor_is_invalid() -> None:
    verdict, reasons = audit({**GOOD, "ttft_mean_s": 0.023}, {"ttft_floor_s": 0.053})
    assert verdict == "invalid" and reasons == ["mean TTFT 23 ms is below its physical floor 53 ms"]


def test_cache_hits_asked_for_are_no_fault() -> None:
    assert audit({**GOOD, "cache_hit_share": 0.9}, cache_expected=True) == ("valid", [])


def test_a_card_at_its_own_power_limit_is_no_fault() -> None:
    at_limit = {"gpu_power_capped_share": 1.0, "gpu_power_limit_w": 700.0, "gpu_power_limit_default_w": 700.0}
    assert audit({**GOOD, **at_limit}) == ("valid", [])
    assert audit({**GOOD, "gpu_power_capped_share": 1.0}) == ("valid", [])  # no limit told


def test_token_counts_may_differ_by_what_came_while_the_server_was_scraped() -> None:
    assert audit({**GOOD, "server_output_tokens": 11000})[0] == "suspect"
    assert audit({**GOOD, "server_output_tokens": 11000, "scrape_edge_tokens": 1000})[0] == "valid"
