"""Request traces: JSONL or CSV with arrivals, lengths and what prompts share, in servebook's form and the public ones.

Our own form has arrival_s, prompt_tokens and output_tokens, and where known session and turn (prompt_tokens then has
all turns before), prefix and prefix_tokens (leading tokens shared by all requests that name the same prefix).
The public forms are read by their own column names (trace_forms.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..common import record_files
from ..common.errors import ServebookError
from . import trace_forms
from .trace_forms import FORMATS, TraceRow

__all__ = ["FORMATS", "Trace", "read"]

OWN = "One request a line with arrival_s, prompt_tokens and output_tokens"
Segments = tuple[tuple[int, int], ...]  # (token stream, number of its first tokens)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order they arrive. times: whether arrival_s is given. before: the previous request of each one's
    conversation, -1 without one. shared: for each request, the leading parts of its prompt that others share, () if no
    prompt does. sha256: of the file. notes: assumptions and omissions."""

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    before: np.ndarray
    shared: Sequence[Segments]
    times: bool
    sha256: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, count: int) -> Trace:
        """Only the first `count` requests."""
        cut = {k: getattr(self, k)[:count] for k in ("arrival_s", "prompt_tokens", "output_tokens", "before", "shared")}
        return replace(self, **cut)

    @property
    def shares(self) -> bool:
        """Whether prompts begin with earlier sent tokens."""
        return any(self.shared) or bool((self.before >= 0).any())


def read(path: Path, form: str | None = None, *, tokens_per_word: float = 1.3) -> Trace:
    """The trace in a file. form: one of FORMATS, else what its keys tell.

    Raises ServebookError, with the line, for a file that cannot be read, is empty or not in order, and a line that is
    no request.
    """
    raw, text = record_files.read_text(path, "the trace", "Give a JSONL, CSV, JSON or YAML file, plain or gzipped")
    notes: list[str] = []
    rows = trace_forms.rows(_records(text, path), form, path, tokens_per_word, notes)
    return _trace(rows, path, hashlib.sha256(raw).hexdigest(), notes)


def _records(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """(line, content) of a file of any supported kind."""
    start = text.lstrip()[:1]
    if path.name.removesuffix(".gz").endswith((".yaml", ".yml")):
        yield from trace_forms.of_config(text, path)
    elif start == "[":
        yield from enumerate(record_files.json_value(text, str(path), OWN), 1)
    elif start == "{":
        for number, line in enumerate(record_files.lines(text), 1):
            if line.strip():
                yield number, record_files.json_value(line, f"{path}, line {number}", OWN)
    else:
        yield from record_files.table(text, str(path))


def _trace(rows: Iterable[TraceRow], path: Path, sha256: str, notes: list[str]) -> Trace:
    """Rows collected into columns: a million rows take a few dozen bytes each."""
    arrivals, prompts, outputs, before = array("d"), array("q"), array("q"), array("q")
    parts: list[tuple[tuple[Hashable, int], ...]] = []
    last: dict[Hashable, int] = {}
    times, cut = None, 0
    for i, row in enumerate(rows):
        where = f"{path}, line {row.line}"
        timed = row.arrival_s is not None
        if times is None:
            times = timed
        elif timed != times:
            raise ServebookError("arrival_s is missing on some lines", where, "Give it on all of them or on none")
        arrival = row.arrival_s or 0.0
        if i and arrival < arrivals[-1]:
            what = f"arrives at {arrival:g} s, before the line above ({arrivals[-1]:g} s)"
            raise ServebookError(what, where, "Sort the trace by its arrivals")
        follows = last.get(row.session, -1) if row.session is not None else -1
        if row.session is not None:
            last[row.session] = i
        if follows >= 0 and row.prompt_tokens <= prompts[follows] + outputs[follows]:
            follows, cut = -1, cut + 1
        arrivals.append(arrival)
        prompts.append(row.prompt_tokens)
        outputs.append(row.output_tokens)
        before.append(follows)
        parts.append(row.parts)
    if not len(arrivals):
        raise ServebookError("; ".join(["the trace contains no request", *notes]), str(path), OWN)
    if cut:
        notes.append(f"{cut} prompts of a session are no longer than what came before them: taken as new ones")
    at = np.array(arrivals)
    return Trace(
        at - at[0], np.array(prompts, np.int64), np.array(outputs, np.int64), np.array(before, np.int64),
        _shared(parts, prompts), bool(times), sha256, tuple(notes),
    )  # fmt: skip


def _shared(parts: Sequence[tuple[tuple[Hashable, int], ...]], prompts: Sequence[int]) -> Sequence[Segments]:
    """For each prompt the leading parts that others have, too, with streams numbered from 0."""
    seen: Counter[Hashable] = Counter(stream for row in parts for stream, _ in row)
    if not seen:
        return [()] * len(parts)
    numbers: dict[Hashable, int] = {}
    out: list[Segments] = []
    for row, left in zip(parts, prompts, strict=True):
        kept = []
        for stream, tokens in row:
            if seen[stream] < 2 or left <= 0:  # what follows an unshared part is unshared
                break
            kept.append((numbers.setdefault(stream, len(numbers)), min(tokens, left)))
            left -= tokens
        out.append(tuple(kept))
    return out
