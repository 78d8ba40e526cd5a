"""A streamed completion, read as bytes: which reads carried token events, and how many tokens they were.

The hot path is `feed`: it counts the line starts of each read and parses no JSON. JSON is parsed for the events up to
the first token and, when the stream has ended, for its last few; `tokens` decides what is a token. An event is one
`data:` line, complete at its line feed. Events split over reads (in their JSON or in the word `data:`), several events
in one read, CRLF, lone CR, a byte order mark, comments and keep-alive lines are handled. An event whose JSON spans
several `data:` lines is recognized before the first token; from then on such lines are joined.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from .tokens import AT_LEAST_ONE, Event, Usage, choice_of, echoes, has_reasoning, last_events, tokens_in, trailing
from .words import error_message, finish_reason, no_choice, no_stream, one_line, parse, told_error

__all__ = ["AT_LEAST_ONE", "TokenStream", "error_message", "one_line", "tokens_in"]

LONGEST_LINE = 1 << 23  # bytes: a server that never ends a line is not waited for
_RECENT = 16  # reads: enough for the last token, the finish, usage, [DONE], and a few pings
_LAST_LINES = 60
_WORDS = 4096  # bytes kept of an answer that is no stream
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_LONE_CR = re.compile(rb"\r[^\n]")
_OPEN_LINE = re.compile(rb"^data: *(\{[^\r\n]*)\r?\n(?!\r?\n)", re.MULTILINE)  # no blank line follows


class TokenStream:
    """Collects one response. After `finish`: `times`/`counts` are the reads that completed token events and the
    number of events each; `tokens`, `prompt_tokens`, `cached_tokens` come from the server's usage (None if absent);
    `first_tokens` is the token count of the first event (None: not told), `hidden_tokens` how many of them were
    reasoning that was not streamed; `error` is the server's message if it sent one, `error_status` the HTTP status in
    it, `fault` why the answer cannot be read; `ended` says that the server marked the end, `stopped` that it ended the
    answer before its length, `over` that later bytes are ignored; `heard` is when the last read before that came.
    keep: the answer itself is wanted afterwards. on_over is called at [DONE]. asked: the request's body.
    """

    __slots__ = (
        "_cr", "_lead", "_odd", "_opening", "_plain", "_recent", "_rewritten", "_spread", "_started", "_tail", "asked",
        "cached_tokens", "counts", "ended", "error", "error_status", "fault", "first_tokens", "heard", "hidden_tokens",
        "on_over", "over", "prompt_tokens", "stopped", "times", "tokens",
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
        self.heard = 0.0
        self._started = self._cr = self._spread = False
        self._rewritten = False  # whether every read is rewritten: lines that end by CR alone, events of several lines
        self._plain = False  # whether whole events are counted as they come: after the first token, nothing rewritten
        self._opening: Event | None = None  # the first event with a token
        self._lead: list[float] = []  # events before the first sure token that may have been tokens
        self._tail = self._odd = b""
        self._recent: deque[bytes] = deque(maxlen=None if keep else _RECENT)

    def feed(self, data: bytes, now: float) -> None:
        """Take what one read returned, stamped at its arrival."""
        if self._plain and not self._tail and data.startswith(b"data:") and data.endswith(b"}\n\n"):  # nearly all reads
            self.heard = now
            self._recent.append(data)
            self.times.append(now)
            self.counts.append(1 + data.count(b"\ndata:"))
            return
        if self.over:
            return
        self.heard = now
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
        # an event ends with its brace; one that follows [DONE] in its read is found at the end
        if data[-3:-2] != b"}" and b"[DONE]" in data and (done := _DONE.search(data)):
            data = data[: done.end()] + b"\n"  # what follows is not part of the answer
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
        """Token events so far."""
        return sum(self.counts)

    def _end(self) -> None:
        self.over, self._plain, self._tail = True, False, b""
        if self.on_over is not None:
            self.on_over()

    def _too_long(self) -> None:
        self.fault = f"a line of more than {LONGEST_LINE >> 20} MiB in its answer"
        self._end()

    def _plain_lines(self, data: bytes) -> bytes:
        """Without the byte order mark that may lead a stream, with line feeds where it ends lines by CR alone, and with
        one line an event where it spreads them over several."""
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
        """The events that are complete, each with its data on one line; the rest is kept."""
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
        """Events of this read from the first token on; 0 while there is none."""
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
        """Settle what the stream's end tells: usage, errors, and which events carried no token."""
        if self._tail and not self.over:  # a last line without its line feed
            self.feed(b"\n\n", self.heard)
        recent = b"".join(self._recent)
        lines = recent.rsplit(b"\n", _LAST_LINES)[-_LAST_LINES:]
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if b"[DONE]" in data and (after := len(data) - 1 - data.index(b"[DONE]")):
            del data[-after:]  # what follows is not part of the answer
            self._drop_last(after)
        events = last_events(data, parse)
        reasons = [finish_reason(e) for e in events]
        # usage without a choice is what some servers end with
        self.ended |= b"[DONE]" in data or any(reasons) or bool(events and _only_usage(events[-1]))
        self.stopped = "stop" in reasons
        if b"error" in recent:
            self.error, self.error_status = told_error(lines, events)
        usage = Usage(events)
        self.tokens, self.prompt_tokens, self.cached_tokens = usage.tokens, usage.prompt_tokens, usage.cached_tokens
        self.fault = self.fault or usage.fault
        if self._started:
            self.tokens = self.tokens or None  # text is no answer of 0 tokens: its usage does not count
            self._settle(*trailing(events, self._opening))
        elif not self.error and not self.times:
            self.error = no_choice(events)
            self.fault = self.fault or no_stream(self._odd + self._tail)
        self._claim_lead()
        if self.events == (self.tokens or 0) + 1 > 1 and echoes(self._opening or {}, self.asked):
            self._drop_first()
        self._settle_first(usage.reasoning_tokens or 0)
        self._opening, self.asked = None, b""
        if self._recent.maxlen is not None:  # only a kept stream is asked what it said
            self._recent.clear()

    def _settle(self, passed: int, undecided: int) -> None:
        """Drop the last events that carried no token; of those undecided as many count as make the total come out."""
        missing = (self.tokens or 0) - (self.events - passed)
        self._drop_last(passed - (missing if 0 < missing <= undecided else 0))

    def _settle_first(self, reasoning: int) -> None:
        """How many tokens the first event stands for."""
        tokens, events = self.tokens or 0, self.events
        if events > 1 and self.tokens is not None and (self.first_tokens or 0) >= tokens:
            self.first_tokens = None  # a total that every event repeats
        if 0 < reasoning < tokens and events <= tokens - reasoning and not has_reasoning(self._opening or {}):
            self.hidden_tokens = reasoning
        if self.first_tokens is None and events == tokens - self.hidden_tokens:
            self.first_tokens = 1
        if self.hidden_tokens and (self.first_tokens or 0) <= self.hidden_tokens:
            self.first_tokens = (self.first_tokens or 1) + self.hidden_tokens

    def take_count(self, tokens: int) -> None:
        """The number of tokens, of a stream that does not tell it."""
        self.tokens = tokens
        self._settle_first(0)

    def answer(self) -> tuple[list[int], str]:
        """What a kept stream said: its token ids (empty where the server gives none) and its text."""
        ids: list[int] = []
        text: list[str] = []
        for line in b"".join(self._recent).split(b"\n"):
            event = parse(line[5:].strip()) if line.startswith(b"data:") else None
            for choice in (event or {}).get("choices") or ():
                if isinstance(choice, dict):
                    ids += choice.get("token_ids") or ()
                    delta = choice.get("delta")
                    said = choice.get("text") or (delta.get("content") if isinstance(delta, dict) else "")
                    text.append(said if isinstance(said, str) else "")
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
        """Leading events of empty text were tokens if usage counts exactly them beside the rest."""
        missing = (self.tokens or 0) - self.events
        if self._lead and missing > 0 and (missing <= len(self._lead) or not self.counts):
            lead = self._lead[-missing:]
            self.times[:0], self.counts[:0] = lead, [1] * len(lead)
            self.first_tokens = 1


def _only_usage(event: Event | None) -> bool:
    return bool(event and event.get("usage")) and choice_of(event or {}) is None
