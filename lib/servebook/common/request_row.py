"""A request of a point, as its row in the run folder. Times: seconds since the point's start, monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Phase = Literal["warmup", "measured", "drain", "carried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request. None: the request did not get that far, or the server does not report it. Rounded to 1 µs."""

    i: int
    phase: str  # one of Phase
    ok: bool
    error: str | None
    scheduled_s: float | None
    sent_s: float | None
    first_s: float | None
    last_s: float | None
    end_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    prompt_tokens_asked: int
    output_tokens_asked: int
    events: int
    first_event_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    gaps_ms: list[float]
    turn: int

    def to_json(self) -> dict[str, Any]:
        """The row as stored."""
        return {name: getattr(self, name) for name in ROW_KEYS}


ROW_KEYS = tuple(f.name for f in fields(RequestRow))
