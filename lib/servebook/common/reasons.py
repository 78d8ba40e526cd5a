"""Reasons for a verdict on a measured point: a code for programs and a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Verdict = Literal["valid", "suspect", "invalid"]


class ReasonCode(StrEnum):
    """What a reason is about."""

    REPEATED_PROMPTS = "repeated_prompts"
    NOTHING_MEASURED = "nothing_measured"
    MANY_FAILURES = "many_failures"
    PROMPT_LENGTH = "prompt_length"
    OUTPUT_LENGTH = "output_length"
    BELOW_FLOOR = "below_floor"
    SOME_FAILURES = "some_failures"
    WARMUP_FAILURES = "warmup_failures"
    HUNG_REQUESTS = "hung_requests"
    TOKEN_COUNT = "token_count"
    NO_USAGE = "no_usage"
    COUNTERS_RESET = "counters_reset"
    HIDDEN_REASONING = "hidden_reasoning"
    EXTRA_EVENTS = "extra_events"
    BUNCHED = "bunched"
    CACHE_HITS = "cache_hits"
    PREEMPTIONS = "preemptions"
    CLIENT_LIMITED = "client_limited"
    THROTTLED = "throttled"
    POWER_CAPPED = "power_capped"
    NO_FULL_ROUND = "no_full_round"
    FEW_ROUNDS = "few_rounds"
    ONE_REQUEST = "one_request"
    SATURATED = "saturated"
    LITTLES_LAW = "littles_law"
    DRIFT = "drift"
    WIDE_INTERVAL = "wide_interval"
    FIRST_EVENT_SIZE = "first_event_size"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a point is suspect or invalid."""

    code: ReasonCode
    text: str

    def __str__(self) -> str:
        return self.text


# How the sentences began that were stored without a code (0.1.0 and earlier)
_STORED_WITHOUT_CODE = (
    ("prompts repeated on purpose", ReasonCode.REPEATED_PROMPTS),
    ("nothing measured", ReasonCode.NOTHING_MEASURED),
    ("mean T", ReasonCode.BELOW_FLOOR),
    ("mean E", ReasonCode.BELOW_FLOOR),
    ("the server counted", ReasonCode.TOKEN_COUNT),
    ("client-limited", ReasonCode.CLIENT_LIMITED),
    ("GPU clocks slowed", ReasonCode.THROTTLED),
    ("GPU power capped", ReasonCode.POWER_CAPPED),
    ("few rounds", ReasonCode.FEW_ROUNDS),
    ("only one request", ReasonCode.ONE_REQUEST),
    ("only", ReasonCode.NO_FULL_ROUND),
    ("saturated", ReasonCode.SATURATED),
    ("Little's law", ReasonCode.LITTLES_LAW),
    ("not steady", ReasonCode.DRIFT),
    ("not converged", ReasonCode.WIDE_INTERVAL),
)


def stored_reason(text: str, code: str | None) -> Reason:
    """A reason read from a file; one without a code gets it from how the sentences of its version began."""
    if code is None:
        return Reason(next((c for start, c in _STORED_WITHOUT_CODE if text.startswith(start)), ReasonCode.OTHER), text)
    return Reason(ReasonCode(code) if code in set(ReasonCode) else ReasonCode.OTHER, text)
