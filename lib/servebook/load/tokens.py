"""Which events of a streamed answer carry tokens, how many, and which is the last. The rule, in one place.

Evidence of tokens in an event. No server sends all of it, and each kind is wrong on some server. The first event with a
token is judged by 2, 1, 3 in this order (tokens_in), later events by 3, 1, 2 (_later):

1. Token ids or log-probabilities: as many tokens as are listed. An empty list with no text is no token.
2. Running usage (`completion_tokens` in the events themselves): the first event carries what it counts, a later one
   carries a token where it grew. It is running only if it grows: gateways repeat the total, or 0, in every event.
3. Text, reasoning or a tool call: at least one token. How many is not known, unless there are as many events as tokens.
4. Empty text is ambiguous: on some servers it is a token whose bytes do not form a complete character yet, on others an
   opening or closing event without a token. Usage decides when the stream has ended: such events count as tokens only
   if the total then equals `completion_tokens`.
5. A first text that repeats the end of the prompt is no token where the events are then as many as the tokens
   (transformers serve's chat).
6. An event without a choice (usage, keep-alive, cost) is never a token, nor is a first event that has a role but
   neither text nor token ids.

The last token is the last event that is a token by this, whatever follows it: a finish without text, usage beside
an empty choice, a second finish. The number of tokens is the largest `completion_tokens` of the last events: it grows,
and some servers end with zeros.

Reasoning that is counted and not streamed (`reasoning_tokens`) was generated before the first event: it belongs
to that event, so that the time between the others is divided by the tokens that came in it.
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
    """Tokens that an opening event carries: a count, AT_LEAST_ONE (text without a count), 0, or None.

    None is an event that only `usage` can decide on.
    """
    choice = choice_of(event)
    if choice is None:
        return 0
    text, listed = has_text(choice), listed_tokens(choice)
    if not text and not listed and "role" in _dict(choice.get("delta")):
        return 0
    so_far = running_tokens(event)  # counts tokens of silent events before this one too
    if so_far is not None and (so_far or not text):
        return so_far
    if listed is not None and (listed or not text):
        return listed
    return AT_LEAST_ONE if text else None


def last_events(lines: Sequence[bytes], parse: Callable[[bytes], Event | None]) -> list[Event | None]:
    """The last events of a stream, parsed, starting one before the last event that certainly carries a token: earlier
    ones add no information, and parsing dominates the cost of ending a stream."""
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
    """Of a stream's last events: how many at the end are surely no tokens or undecided, and how many of these are
    undecided. events: parsed, None where that was not possible; opening: the stream's first event with a token."""
    told = {running_tokens(e) for e in (opening, *events) if e and choice_of(e)}
    grows = len(told - {None}) > 1
    passed = undecided = 0
    for position in range(len(events) - 1, -1, -1):
        carried = _later(events[position], events[position - 1] if position and grows else None)
        if carried:
            break
        passed, undecided = passed + 1, undecided + (carried is None)
    return passed, undecided


def _later(event: Event | None, before: Event | None) -> bool | None:
    """Whether an event that is not the first carries a token; None: only the total can decide."""
    choice = choice_of(event or {})
    if event is None or choice is None:
        return False
    if has_text(choice):
        return True
    if (listed := listed_tokens(choice)) is not None:
        return listed > 0
    now, then = running_tokens(event), running_tokens(before or {})
    if now is not None and then:  # 0 before a later token is no running count
        return now > then
    return None


def choice_of(event: Event) -> Event | None:
    """The event's first choice, None where it has none."""
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def has_text(choice: Event) -> bool:
    """Whether a choice carries text, reasoning or a call."""
    delta = _dict(choice.get("delta"))
    return bool(choice.get("text")) or any(delta.get(key) for key in _TEXTS)


def has_reasoning(event: Event) -> bool:
    """Whether an event carries reasoning, so that it is streamed."""
    delta = _dict((choice_of(event) or {}).get("delta"))
    return any(delta.get(key) for key in _REASONING)


def echoes(event: Event, asked: bytes) -> bool:
    """Whether a first event's text is the end of what was asked; asked: the request's body."""
    choice = choice_of(event) or {}
    said = choice.get("text") or _dict(choice.get("delta")).get("content")
    end = said.strip()[-8:] if isinstance(said, str) else ""
    return len(end) > 1 and json.dumps(end)[1:-1].encode() in asked


def listed_tokens(choice: Event) -> int | None:
    """Number of token ids or log-probabilities that a choice lists, None where it lists none of them."""
    logprobs = _dict(choice.get("logprobs"))
    for listed in (choice.get("token_ids"), logprobs.get("tokens"), logprobs.get("content")):
        if isinstance(listed, list):
            return len(listed)
    return None


def running_tokens(event: Event) -> int | None:
    """`completion_tokens` of an event's own usage, None where it has none."""
    return count(_dict(event.get("usage")).get("completion_tokens"))


def count(value: Any) -> int | None:
    """A number of tokens as JSON gives it (JSON has one kind of number: 16.0 is 16), None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    return int(value) if 0 <= value <= MOST_TOKENS else None


class Usage:
    """What the usage of a stream's last events says: tokens, prompt_tokens, cached_tokens, reasoning_tokens (None: not
    told), and `fault`, where there is usage that cannot be read."""

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
