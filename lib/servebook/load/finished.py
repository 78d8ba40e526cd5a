"""What is stored of a finished request: its row for the run folder, and the data for the point's figures.

Memory stays constant for any number of requests: beyond a megabyte per kind, data goes to unnamed temporary files,
which are read once, in chunks, when the point is over.
"""

from __future__ import annotations

import struct
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import numpy as np

from ..common import latency
from ..common.errors import ServebookError
from ..common.request_row import Phase, RequestRow
from .client import Reply

IN_MEMORY = 1 << 20  # bytes of each kind
CHUNK = 256  # requests
OTHER_ERRORS = "another error"
PHASES: tuple[Phase, ...] = ("warmup", "measured", "drain", "carried")
_TIMES = ("scheduled", "sent", "first", "last", "end")  # now() seconds, NaN if it did not happen
_COUNTS = (
    "prompt_tokens", "tokens", "prompt_tokens_asked", "output_tokens_asked", "first_tokens", "cached_tokens", "turn",
    "reads", "hidden_tokens",
)  # fmt: skip  # -1: not reported
COUNTED = ("usage", "events", "asked")
REQUEST = np.dtype(
    [*((n, "f8") for n in _TIMES), *((n, "i4") for n in _COUNTS), ("phase", "i1"), ("counted", "i1"), ("ok", "?")]
)
_PACK = struct.Struct(f"={len(_TIMES)}d{len(_COUNTS)}ibb?").pack
_NAN = float("nan")


def row(reply: Reply, start: float) -> RequestRow:
    """The request's row for the run folder; times relative to `start`, rounded to 1 µs."""
    stream = reply.stream

    def at(t: float | None) -> float | None:
        return None if t is None else round(t - start, 6)

    def span(t: float | None) -> float | None:
        return None if t is None else round(t, 6)

    return RequestRow(
        i=reply.index,
        phase=reply.phase,
        ok=reply.ok,
        error=reply.error,
        scheduled_s=at(reply.scheduled),
        sent_s=at(reply.sent),
        first_s=at(reply.first),
        last_s=at(reply.last),
        end_s=at(reply.end),
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.tokens,
        prompt_tokens_asked=reply.prompt_tokens_asked,
        output_tokens_asked=reply.output_tokens_asked,
        events=stream.events,
        first_event_tokens=stream.first_tokens or 1,
        ttft_s=span(reply.ttft_s),
        tpot_s=span(reply.tpot_s),
        e2e_s=span(reply.e2e_s),
        gaps_ms=[round(gap * 1e3, 2) for gap in reply.gaps_s()],
        turn=reply.turn,
    )


@dataclass(frozen=True)
class Chunk:
    """Finished requests in the order they ended.

    requests: dtype REQUEST. times, events: of all reads with token events, request by request: the time of the read,
    and its number of events.
    """

    requests: np.ndarray
    times: np.ndarray
    events: np.ndarray

    @cached_property
    def owner(self) -> np.ndarray:
        """For each read, the index of its request."""
        return np.repeat(np.arange(len(self.requests)), self.requests["reads"])

    @cached_property
    def events_of(self) -> np.ndarray:
        """For each request, its number of token events."""
        return np.bincount(self.owner, self.events, len(self.requests))

    def phase(self, name: str) -> np.ndarray:
        """Mask of the requests of a phase (PHASES)."""
        return np.asarray(self.requests["phase"] == PHASES.index(name))

    @cached_property
    def good(self) -> np.ndarray:
        """Mask of the requests that count: in the window and answered."""
        return np.asarray(self.phase("measured") & self.requests["ok"])

    @cached_property
    def begun(self) -> np.ndarray:
        """The start of latencies: the scheduled time in an open loop, the send time in a closed one."""
        r = self.requests
        return np.where(np.isnan(r["scheduled"]), r["sent"], r["scheduled"])

    @property
    def ttft_s(self) -> np.ndarray:
        """As Reply.ttft_s; NaN for None."""
        return np.asarray(self.requests["first"] - self.begun)

    @property
    def e2e_s(self) -> np.ndarray:
        """As Reply.e2e_s; NaN for None."""
        return np.asarray(self.requests["last"] - self.begun)

    @property
    def tpot_s(self) -> np.ndarray:
        """As Reply.tpot_s; NaN for None."""
        r = self.requests
        tpots = latency.tpots_s(r["first"], r["last"], r["tokens"], np.maximum(r["first_tokens"], 1))
        return np.where((r["tokens"] > 0) & (r["reads"] > 1), tpots, _NAN)

    def gaps_s(self, which: np.ndarray) -> np.ndarray:
        """Times between consecutive reads of a request, for the requests in this mask."""
        same = self.owner[1:] == self.owner[:-1]
        return np.asarray(np.diff(self.times)[same & which[self.owner[1:]]])

    def tokens_at(self) -> np.ndarray:
        """Tokens per read: the first event's own count, the rest divided equally over the other events."""
        r, events = self.requests, self.events_of
        tokens = np.where(r["tokens"] > 0, r["tokens"], events)
        opening = np.maximum(r["first_tokens"], 1)
        each = np.where(events > 1, (tokens - opening) / np.maximum(events - 1, 1), 0.0)
        brought = self.events * each[self.owner]
        counted = r["reads"] > 0
        first = (np.cumsum(r["reads"]) - r["reads"])[counted]
        brought[first] = opening[counted] + (self.events[first] - 1) * each[counted]
        return np.asarray(brought)


class RequestLog:
    """A point's finished requests."""

    def __init__(self) -> None:
        self._requests, self._times, self._events = (_Spool() for _ in range(3))
        self.errors: Counter[str] = Counter()

    def add(self, reply: Reply, phase: str | None = None) -> None:
        """Store a request under its own phase or a given one. Raises ServebookError if there is no space."""
        stream, phase = reply.stream, phase or reply.phase
        if reply.error and phase in ("warmup", "measured"):
            # some servers' messages contain the request's id, so no two are equal
            known = reply.error in self.errors or len(self.errors) < 1000
            self.errors[reply.error if known else OTHER_ERRORS] += 1
        times = (reply.scheduled, reply.sent, reply.first, reply.last, reply.end)
        counts = (stream.prompt_tokens, stream.tokens, reply.prompt_tokens_asked, reply.output_tokens_asked)
        counts += (stream.first_tokens, stream.cached_tokens, reply.turn, len(stream.times))  # type: ignore[assignment]
        counts += (stream.hidden_tokens,)  # type: ignore[assignment]
        self._requests.write(
            _PACK(
                *[_NAN if t is None else t for t in times],
                *[-1 if n is None else n for n in counts],
                PHASES.index(phase),
                COUNTED.index(reply.counted),
                reply.ok,
            )
        )
        self._times.write(array("d", stream.times).tobytes())
        self._events.write(array("i", stream.counts).tobytes())

    def chunks(self) -> Iterator[Chunk]:
        """All requests once, CHUNK at a time."""
        for spool in (self._requests, self._times, self._events):
            spool.rewind()
        while len(requests := self._requests.read(REQUEST, CHUNK)):
            reads = int(requests["reads"].sum())
            yield Chunk(requests, self._times.read("f8", reads), self._events.read("i4", reads))

    def close(self) -> None:
        """Delete the temporary files; nothing can be read afterwards."""
        for spool in (self._requests, self._times, self._events):
            spool.close()


class _Spool:
    """Bytes written sequentially and read back as arrays, in memory while they are few."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115

    def rewind(self) -> None:
        self._file.seek(0)

    def close(self) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            fix = "Free some space there, or name another folder in TMPDIR"
            raise ServebookError(f"cannot write: {error.strerror or error}", tempfile.gettempdir(), fix) from None

    def read(self, kind: Any, count: int) -> np.ndarray:
        dtype = np.dtype(kind)
        return np.frombuffer(self._file.read(count * dtype.itemsize), dtype)


class Column:
    """Values collected chunk by chunk, without unknown ones."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Add a chunk's values; NaN means unknown."""
        self._parts.append(values[~np.isnan(values)])

    @property
    def values(self) -> np.ndarray:
        """All values, in order of arrival."""
        self._parts = [np.concatenate(self._parts)] if self._parts else [np.empty(0)]
        return self._parts[0]
