"""Decides which events of a streamed answer carry tokens, how many, and which is the last.

Rules. No server sends all kinds of evidence, and each kind is wrong on some server. The first event with a token is
found by rules 2, 1, 3 in this order (tokens_in), later events by 3, 1, 2 (_later):

1. Token ids or log-probabilities: the number of tokens is their number. An empty list without text is not a token.
2. Running usage (`completion_tokens` in each event): the first event has the number of tokens it counts; a later event
   has a token if the count grew. Usage that does not grow is ignored: gateways repeat the total, or 0, in every event.
3. Text, reasoning or a tool call: at least one token. The number is unknown, unless there are as many events as tokens.
4. Empty text is ambiguous: on some servers it is a token whose bytes do not form a complete character yet, on others an
   opening or closing event without a token. Usage decides at the end of the stream: such events count as tokens only if
   the total then equals `completion_tokens`.
5. A first text that repeats the end of the prompt is not a token if without it there are as many events as tokens
   (chat of transformers serve).
6. An event without a choice (usage, keep-alive, cost) is never a token. Neither is a first event that has a role but
   neither text nor token ids.

The last token is the last event that is a token by these rules. It may be followed by a finish without text, usage with
an empty choice, or a second finish. The number of tokens is the largest `completion_tokens` of the last events, since
it grows and some servers end with zeros.

Reasoning that is counted but not streamed (`reasoning_tokens`) was generated before the first event. It counts as part
of that event, so that TPOT divides the time after the first event by the tokens received in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

AT_LEAST_ONE = -1
MOST_TOKENS = 2**31 - 1
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "refusal")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CACHED = ("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens")

Event = dict[str, Any]


def tokens_in(event: Event) -> int | None:
    """Tokens in an opening event: a count, AT_LEAST_ONE (text without a count), 0, or None (only usage can decide)."""
    choice = choice_of(event)
    if choice is None:
        return 0
    text, listed = has_text(choice), listed_tokens(choice)
    if not text and not listed and "role" in _dict(choice.get("delta")):
        return 0
    so_far = running_tokens(event)  # also counts tokens of earlier events without text
    if so_far is not None and (so_far or not text):
        return so_far
    if listed is not None and (listed or not text):
        return listed
    return AT_LEAST_ONE if text else None


def last_events(lines: Sequence[bytes], parse: Callable[[bytes], Event | None]) -> list[Event | None]:
    """The last events of a stream, parsed, from one before the last event that certainly carries a token. Earlier ones
    add no information, and parsing dominates the cost of ending a stream."""
    events: list[Event | None] = []
    wanted = len(lines)
    for line in reversed(lines):
        if not wanted:
            break
        event = parse(line)
        events.append(event)
        choice = choice_of(event or {})
        surely = choice is not None and (has_text(choice) or bool(listed_tokens(choice)))
        wanted = min(wanted - 1, 1) if surely else wanted - 1
    return events[::-1]


def trailing(events: Sequence[Event | None], opening: Event | None = None) -> tuple[int, int]:
    """(number of trailing events without a certain token, number of these that are undecided). events: a stream's last
    events, None for those that cannot be parsed; opening: its first event with a token."""
    running = {running_tokens(e) for e in (opening, *events) if e and choice_of(e)}
    grows = len(running - {None}) > 1
    passed = undecided = 0
    for position in range(len(events) - 1, -1, -1):
        carried = _later(events[position], events[position - 1] if position and grows else None)
        if carried:
            break
        passed, undecided = passed + 1, undecided + (carried is None)
    return passed, undecided


def _later(event: Event | None, before: Event | None) -> bool | None:
    """Whether a later event carries a token; None: only the total from usage can decide."""
    choice = choice_of(event or {})
    if event is None or choice is None:
        return False
    if has_text(choice):
        return True
    if (listed := listed_tokens(choice)) is not None:
        return listed > 0
    now, then = running_tokens(event), running_tokens(before or {})
    if now is not None and then:  # a count of 0 after the first token is not a running count
        return now > then
    return None


def choice_of(event: Event) -> Event | None:
    """The event's first choice; None if it has none."""
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def has_text(choice: Event) -> bool:
    """Whether a choice has text, reasoning or a tool call."""
    delta = _dict(choice.get("delta"))
    return bool(choice.get("text")) or any(delta.get(key) for key in _TEXTS)


def has_reasoning(event: Event) -> bool:
    """Whether an event has reasoning text."""
    delta = _dict((choice_of(event) or {}).get("delta"))
    return any(delta.get(key) for key in _REASONING)


def echoes(event: Event, asked: bytes) -> bool:
    """Whether a first event's text repeats the end of the prompt. asked: the request's body."""
    choice = choice_of(event) or {}
    text = choice.get("text") or _dict(choice.get("delta")).get("content")
    end = text.strip()[-8:] if isinstance(text, str) else ""
    return len(end) > 1 and json.dumps(end)[1:-1].encode() in asked


def listed_tokens(choice: Event) -> int | None:
    """Number of token ids or log-probabilities in a choice; None if it has no such list."""
    logprobs = _dict(choice.get("logprobs"))
    for listed in (choice.get("token_ids"), logprobs.get("tokens"), logprobs.get("content")):
        if isinstance(listed, list):
            return len(listed)
    return None


def running_tokens(event: Event) -> int | None:
    """`completion_tokens` in an event's own usage; None if absent."""
    return count(_dict(event.get("usage")).get("completion_tokens"))


def count(value: Any) -> int | None:
    """A JSON value as a number of tokens (16.0 is 16); None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    return int(value) if 0 <= value <= MOST_TOKENS else None


class Usage:
    """The usage in a stream's last events: tokens, prompt_tokens, cached_tokens, reasoning_tokens (None: absent).
    fault: an error text if usage cannot be read."""

    def __init__(self, events: Sequence[Event | None]) -> None:
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.fault: str | None = None
        for event in reversed(events):
            usage = (event or {}).get("usage")
            if usage is None:  # Moonshot has it in the choice
                usage = (choice_of(event or {}) or {}).get("usage")
            if usage is None:
                continue
            given = _dict(usage)
            tokens = count(given.get("completion_tokens"))
            if tokens is None and (given.get("completion_tokens") is not None or not isinstance(usage, dict)):
                self.fault = self.fault or f"usage cannot be read: {str(usage)[:100]}"
            elif tokens is not None and (self.tokens is None or tokens > self.tokens):
                self.tokens = tokens
                self._read(given)
        if self.tokens is not None:
            self.fault = None

    def _read(self, usage: Event) -> None:
        self.prompt_tokens = count(usage.get("prompt_tokens"))
        details = _dict(usage.get("prompt_tokens_details")) | usage
        self.cached_tokens = next((n for key in _CACHED if (n := count(details.get(key))) is not None), None)
        of_output = _dict(usage.get("completion_tokens_details")) | usage
        self.reasoning_tokens = count(of_output.get("reasoning_tokens"))


def _dict(value: Any) -> Event:
    return value if isinstance(value, dict) else {}
