"""Parses a streamed completion from its bytes: the time of each read with token events, and the number of tokens.

The hot path is `feed`: it counts the line starts of each read and parses no JSON. JSON is parsed only for the events up
to the first token and, after the end of the stream, for its last few events. tokens.py decides which events carry
tokens. An event is one `data:` line, complete at its line feed. Handled are: events split over reads (in their JSON or
in the word `data:`), several events in one read, CRLF, lone CR, a byte order mark, comments and keep-alive lines. An
event whose JSON spans several `data:` lines is recognized before the first token; from then on such lines are joined.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from .tokens import AT_LEAST_ONE, Event, Usage, choice_of, echoes, has_reasoning, last_events, tokens_in, trailing
from .words import error_message, finish_reason, no_choice, non_stream_answer, one_line, parse, server_error

__all__ = ["AT_LEAST_ONE", "TokenStream", "error_message", "one_line", "tokens_in"]

LONGEST_LINE = 1 << 23  # bytes; a longer line ends the stream with an error
_RECENT = 16  # number of reads kept: enough for the last token, the finish, usage, [DONE], and a few pings
_LAST_LINES = 60
_WORDS = 4096  # bytes kept of an answer that is not a stream
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_LONE_CR = re.compile(rb"\r[^\n]")
_OPEN_LINE = re.compile(rb"^data: *(\{[^\r\n]*)\r?\n(?!\r?\n)", re.MULTILINE)  # no blank line follows


class TokenStream:
    """Parses one response. keep: keep the whole answer for `answer`. on_over is called at [DONE]. asked: the request's
    body.

    After `finish`: `times` and `counts` are the times of reads with token events and their numbers of events. `tokens`,
    `prompt_tokens` and `cached_tokens` are from the server's usage (None if absent). `first_tokens` is the number of
    tokens in the first event (None: unknown); `hidden_tokens` is how many of these are reasoning that was not streamed.
    `error` is the server's error message, `error_status` the HTTP status in it, `fault` why the answer cannot be read.
    `ended`: whether the server marked the end; `stopped`: whether the answer is shorter than requested; `over`: whether
    later bytes are ignored. `last_read_s` is the time of the last read before that.
    """

    __slots__ = (
        "_cr", "_lead", "_odd", "_opening", "_plain", "_recent", "_rewritten", "_spread", "_started", "_tail", "asked",
        "cached_tokens", "counts", "ended", "error", "error_status", "fault", "first_tokens", "hidden_tokens",
        "last_read_s", "on_over", "over", "prompt_tokens", "stopped", "times", "tokens",
    )  # fmt: skip

    def __init__(self, *, keep: bool = False) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.first_tokens: int | None = None
        self.hidden_tokens = 0
        self.error: str | None = None
        self.fault: str | None = None
        self.error_status: int | None = None
        self.ended = self.stopped = self.over = False
        self.on_over: Callable[[], None] | None = None
        self.asked = b""
        self.last_read_s = 0.0
        self._started = self._cr = self._spread = False
        self._rewritten = False  # whether reads are normalized: lines that end with CR alone, events of several lines
        self._plain = False  # whether complete events are counted directly: after the first token, if not normalized
        self._opening: Event | None = None  # the first event with a token
        self._lead: list[float] = []  # times of events before the first certain token that may carry tokens
        self._tail = self._odd = b""
        self._recent: deque[bytes] = deque(maxlen=None if keep else _RECENT)

    def feed(self, data: bytes, now: float) -> None:
        """Process the bytes of one read, which arrived at `now` (seconds)."""
        if self._plain and not self._tail and data.startswith(b"data:") and data.endswith(b"}\n\n"):  # nearly all reads
            self.last_read_s = now
            self._recent.append(data)
            self.times.append(now)
            self.counts.append(1 + data.count(b"\ndata:"))
            return
        if self.over:
            return
        self.last_read_s = now
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if self._rewritten or not self._started:
            data = self._plain_lines(data)
        if data[-1:] != b"\n" and not self._spread:
            whole = data.rfind(b"\n") + 1
            self._tail, data = data[whole:], data[:whole]
            if len(self._tail) > LONGEST_LINE:
                self._too_long()
        events = data.count(b"\ndata:") + data.startswith(b"data:")
        if not events:
            if not self._started:
                self._odd = (self._odd + data)[:_WORDS]
            return
        # an event ends with a brace; if events follow [DONE] in the same read, `finish` removes them
        if data[-3:-2] != b"}" and b"[DONE]" in data and (done := _DONE.search(data)):
            data = data[: done.end()] + b"\n"  # later bytes are not part of the answer
            events = data.count(b"\ndata:") + data.startswith(b"data:")
            self._end()
        self._recent.append(data)
        if not self._started:
            events = self._open(data, events, now)
            self._plain = self._started and not self._rewritten and not self.over
        if events:
            self.times.append(now)
            self.counts.append(events)

    @property
    def events(self) -> int:
        """Number of token events so far."""
        return sum(self.counts)

    def _end(self) -> None:
        self.over, self._plain, self._tail = True, False, b""
        if self.on_over is not None:
            self.on_over()

    def _too_long(self) -> None:
        self.fault = f"a line of more than {LONGEST_LINE >> 20} MiB in its answer"
        self._end()

    def _plain_lines(self, data: bytes) -> bytes:
        """The bytes without a leading byte order mark, with line feeds instead of lone CRs, and with one line per
        event."""
        if data.startswith(b"\xef\xbb\xbf") and not self._recent:
            data = data[3:]
        if not self._cr and b"\n" not in data and _LONE_CR.search(data):
            self._cr = True
        if self._cr:
            data = data.replace(b"\r", b"\n")
        if not self._spread and not self._started:
            self._spread = any(parse(line) is None for line in _OPEN_LINE.findall(data))
        self._rewritten = self._cr or self._spread
        return self._joined(data) if self._spread else data

    def _joined(self, data: bytes) -> bytes:
        """The complete events, each with its data on one line. Incomplete bytes are kept for the next read."""
        data = data.replace(b"\r\n", b"\n")
        whole = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        self._tail, out = data[whole:], []
        if len(self._tail) > LONGEST_LINE:
            self._too_long()
        for event in data[:whole].split(b"\n\n"):
            lines = event.split(b"\n")
            out += [line for line in lines if line and not line.startswith(b"data:")]
            if parts := [line[5:] for line in lines if line.startswith(b"data:")]:
                out.append(b"data:" + b"".join(parts))
        return b"\n".join([*out, b""])

    def _open(self, data: bytes, events: int, now: float) -> int:
        """Number of events in this read from the first token on; 0 before the first token."""
        at = 0 if data.startswith(b"data:") else data.find(b"\ndata:") + 1
        for position in range(events):
            end = data.find(b"\n", at)
            line = data[at + 5 : end].strip()
            at = data.find(b"\ndata:", end) + 1
            event = parse(line)
            carried = tokens_in(event) if event else 0
            if carried is None:
                self._lead.append(now)
            elif carried:
                self._started = True
                self._opening = event
                self.first_tokens = carried if carried > 0 else None
                return events - position
        return 0

    def finish(self) -> None:
        """Evaluate the end of the stream: usage, errors, and trailing events without a token."""
        if self._tail and not self.over:  # a last line without a line feed
            self.feed(b"\n\n", self.last_read_s)
        recent = b"".join(self._recent)
        lines = recent.rsplit(b"\n", _LAST_LINES)[-_LAST_LINES:]
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if b"[DONE]" in data and (after := len(data) - 1 - data.index(b"[DONE]")):
            del data[-after:]  # later events are not part of the answer
            self._drop_last(after)
        events = last_events(data, parse)
        reasons = [finish_reason(e) for e in events]
        # some servers end with usage without a choice
        self.ended |= b"[DONE]" in data or any(reasons) or bool(events and _only_usage(events[-1]))
        self.stopped = "stop" in reasons
        if b"error" in recent:
            self.error, self.error_status = server_error(lines, events)
        usage = Usage(events)
        self.tokens, self.prompt_tokens, self.cached_tokens = usage.tokens, usage.prompt_tokens, usage.cached_tokens
        self.fault = self.fault or usage.fault
        if self._started:
            self.tokens = self.tokens or None  # usage of 0 tokens contradicts the text: ignored
            self._settle(*trailing(events, self._opening))
        elif not self.error and not self.times:
            self.error = no_choice(events)
            self.fault = self.fault or non_stream_answer(self._odd + self._tail)
        self._claim_lead()
        if self.events == (self.tokens or 0) + 1 > 1 and echoes(self._opening or {}, self.asked):
            self._drop_first()
        self._settle_first(usage.reasoning_tokens or 0)
        self._opening, self.asked = None, b""
        if self._recent.maxlen is not None:  # `answer` is only called for a kept stream
            self._recent.clear()

    def _settle(self, passed: int, undecided: int) -> None:
        """Drop the last `passed` events, which carry no certain token. If the total from usage then exceeds the number
        of events by at most `undecided`, that many of them are kept as tokens."""
        missing = (self.tokens or 0) - (self.events - passed)
        self._drop_last(passed - (missing if 0 < missing <= undecided else 0))

    def _settle_first(self, reasoning: int) -> None:
        """Set the number of tokens in the first event. reasoning: reasoning tokens in the server's usage."""
        tokens, events = self.tokens or 0, self.events
        if events > 1 and self.tokens is not None and (self.first_tokens or 0) >= tokens:
            self.first_tokens = None  # every event repeated the total
        if 0 < reasoning < tokens and events <= tokens - reasoning and not has_reasoning(self._opening or {}):
            self.hidden_tokens = reasoning
        if self.first_tokens is None and events == tokens - self.hidden_tokens:
            self.first_tokens = 1
        if self.hidden_tokens and (self.first_tokens or 0) <= self.hidden_tokens:
            self.first_tokens = (self.first_tokens or 1) + self.hidden_tokens

    def take_count(self, tokens: int) -> None:
        """Set the number of tokens if the server did not report it."""
        self.tokens = tokens
        self._settle_first(0)

    def answer(self) -> tuple[list[int], str]:
        """(token ids, text) of a kept stream; the ids are empty if the server sends none."""
        ids: list[int] = []
        text: list[str] = []
        for line in b"".join(self._recent).split(b"\n"):
            event = parse(line[5:].strip()) if line.startswith(b"data:") else None
            for choice in (event or {}).get("choices") or ():
                if isinstance(choice, dict):
                    ids += choice.get("token_ids") or ()
                    delta = choice.get("delta")
                    part = choice.get("text") or (delta.get("content") if isinstance(delta, dict) else "")
                    text.append(part if isinstance(part, str) else "")
        return ids, "".join(text)

    def _drop_last(self, events: int) -> None:
        while events and self.counts:
            if self.counts[-1] > events:
                self.counts[-1] -= events
                return
            events -= self.counts.pop()
            self.times.pop()

    def _drop_first(self) -> None:
        self.counts[0] -= 1
        if not self.counts[0]:
            del self.counts[0], self.times[0]
        self.first_tokens = None

    def _claim_lead(self) -> None:
        """Count leading events with empty text as tokens if the total from usage needs them."""
        missing = (self.tokens or 0) - self.events
        if self._lead and missing > 0 and (missing <= len(self._lead) or not self.counts):
            lead = self._lead[-missing:]
            self.times[:0], self.counts[:0] = lead, [1] * len(lead)
            self.first_tokens = 1


def _only_usage(event: Event | None) -> bool:
    return bool(event and event.get("usage")) and choice_of(event or {}) is None
