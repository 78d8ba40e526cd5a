"""A streamed completion, read as bytes: which reads carried token events, and how many tokens they were.

The hot path is `feed`: one count of line starts a read, no JSON. JSON is parsed for the events up to the first token
and, when the stream has ended, for its last few. An event is one `data:` line; a line is complete at its line feed, so
events split over reads (in their JSON or in the word `data:`) and several events in one read come out right, as do
CRLF, comments and keep-alive lines.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

AT_LEAST_ONE = -1


def tokens_in(event: dict[str, Any]) -> int | None:
    """Tokens that the first events of a stream carry: a count, AT_LEAST_ONE (text without a count), 0, or None.

    None is an event that only `usage` can decide on: empty text without a count is a token whose bytes are no
    complete character yet on one server, and a greeting on another.
    """
    choices = event.get("choices")
    if not choices:
        return 0
    choice = choices[0]
    delta = choice.get("delta") or {}
    logprobs = choice.get("logprobs") or {}
    text = choice.get("text") or any(delta.get(k) for k in ("content", "reasoning_content", "reasoning", "tool_calls"))
    so_far = (event.get("usage") or {}).get("completion_tokens")  # where usage comes with every event
    if so_far is not None and (so_far or not text):
        return so_far
    for counted in (choice.get("token_ids"), logprobs.get("tokens"), logprobs.get("content")):
        if counted is not None:
            return len(counted)
    if text:
        return AT_LEAST_ONE
    return 0 if delta.get("role") else None


class TokenStream:
    """Collects one response. After `finish`: `times`/`counts` are the reads that completed token events and the
    number of events each; `tokens`, `prompt_tokens`, `cached_tokens` come from the server's usage (None if absent);
    `first_tokens` is the token count of the first event (None: not told); `error` is the server's message if it sent
    one; `ended` says that the server marked the end; `heard` is when the last read of any kind came. keep: the answer
    itself is wanted afterwards.
    """

    __slots__ = (
        "_lead", "_recent", "_started", "_tail", "cached_tokens", "counts", "ended", "error", "first_tokens",
        "heard", "prompt_tokens", "times", "tokens",
    )  # fmt: skip

    def __init__(self, *, keep: bool = False) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.first_tokens: int | None = None
        self.error: str | None = None
        self.ended = False
        self.heard = 0.0
        self._started = False
        self._lead: list[float] = []  # events before the first sure token that may have been tokens
        self._tail = b""
        # enough for the last token, finish, usage and [DONE] events; all of it where the answer is wanted
        self._recent: deque[bytes] = deque(maxlen=None if keep else 8)

    def feed(self, data: bytes, now: float) -> None:
        """Take what one read returned, stamped at its arrival."""
        self.heard = now
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if data[-1:] != b"\n":
            whole = data.rfind(b"\n") + 1
            self._tail, data = data[whole:], data[:whole]
        events = data.count(b"\ndata:") + data.startswith(b"data:")
        if not events:
            return
        self._recent.append(data)
        if not self._started:
            events = self._open(data, events, now)
        if events:
            self.times.append(now)
            self.counts.append(events)

    @property
    def events(self) -> int:
        """Token events so far."""
        return sum(self.counts)

    def _open(self, data: bytes, events: int, now: float) -> int:
        """Events of this read from the first token on; 0 while there is none."""
        at = 0 if data.startswith(b"data:") else data.find(b"\ndata:") + 1
        for position in range(events):
            end = data.find(b"\n", at)
            line = data[at + 5 : end].strip()
            at = data.find(b"\ndata:", end) + 1
            event = _parse(line)
            carried = tokens_in(event) if event else 0
            if carried is None:
                self._lead.append(now)
            elif carried:
                self._started = True
                self.first_tokens = carried if carried > 0 else None
                return events - position
        return 0

    def finish(self) -> None:
        """Settle what the stream's end tells: usage, errors, and which events carried no token."""
        if self._tail:  # a last line without its line feed
            self.feed(b"\n", self.heard)
        # the last dozen events: a line each, a blank one, perhaps a comment with its own
        lines = _data_lines(b"\n".join(b"".join(self._recent).rsplit(b"\n", 60)[-60:]))
        usage: dict[str, Any] | None = None
        tail, unsure = 0, False
        event = _parse(lines[-1]) if lines else None
        for position in range(len(lines) - 1, max(-1, len(lines) - 12), -1):
            before = _parse(lines[position - 1]) if position else None
            self.ended |= lines[position] == b"[DONE]"
            if event is not None:
                usage = usage or event.get("usage")
                if event.get("error") or event.get("object") == "error":
                    self.error = error_message(event)
                if choices := event.get("choices"):
                    finished = bool(choices[0].get("finish_reason"))
                    self.ended |= finished
                    if not _repeats(event, before):
                        unsure = finished and tokens_in({**event, "usage": None}) in (0, None)
                        break
            tail, event = tail + 1, before
        if usage:
            self.tokens = usage.get("completion_tokens")
            self.prompt_tokens = usage.get("prompt_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if self._started:
            # an empty last event is a token unless that makes them too many
            surplus = unsure and (self.tokens is None or self.events - tail > self.tokens)
            self._drop_last(tail + surplus)
        self._claim_lead()
        if self.first_tokens is None and self.events == self.tokens:
            self.first_tokens = 1
        if self._recent.maxlen is not None:  # only a kept stream is asked what it said
            self._recent.clear()

    def answer(self) -> tuple[list[int], str]:
        """What a kept stream said: its token ids (empty where the server gives none) and its text."""
        ids: list[int] = []
        text: list[str] = []
        for line in _data_lines(b"".join(self._recent)):
            for choice in (_parse(line) or {}).get("choices") or ():
                ids += choice.get("token_ids") or ()
                text.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        return ids, "".join(text)

    def _drop_last(self, events: int) -> None:
        while events and self.counts:
            if self.counts[-1] > events:
                self.counts[-1] -= events
                return
            events -= self.counts.pop()
            self.times.pop()

    def _claim_lead(self) -> None:
        """Leading events of empty text were tokens if usage counts exactly them beside the rest."""
        missing = (self.tokens or 0) - self.events
        if self._lead and missing > 0 and (missing <= len(self._lead) or not self.counts):
            lead = self._lead[-missing:]
            self.times[:0], self.counts[:0] = lead, [1] * len(lead)
            self.first_tokens = 1


def _repeats(event: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Whether an event's running usage equals that of the event before it, so that it carried no token."""
    counts = [((e or {}).get("usage") or {}).get("completion_tokens") for e in (event, before)]
    return counts[0] is not None and counts[0] == counts[1]


def _data_lines(data: bytes) -> list[bytes]:
    return [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def error_message(body: dict[str, Any] | bytes | str) -> str:
    """The readable part of an error answer, whatever its shape, on one line of at most 300 characters."""
    found: Any = body
    if isinstance(found, bytes):
        found = found.decode(errors="replace")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            return " ".join(found.split())[:300]
    for _ in range(3):
        if isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or json.dumps(found)
    return " ".join(str(found).split())[:300]
