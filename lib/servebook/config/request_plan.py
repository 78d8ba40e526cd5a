"""The exact requests of a load, from its seed: the client sends them, the predictor simulates them.

The lengths of request number i, its shared prompt parts, its place in a conversation and its arrival are functions of
(seed, workload, i) alone. The client chooses the token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import arrivals, lengths
from .arrivals import seed_of

if TYPE_CHECKING:
    from .params import Load
    from .points import PointSpec
    from .workloads import Workload

ENDLESS = 1 << 40  # requests planned for a workload without an end
GROUP, UNIQUE = 2, 3  # kinds of shared streams: a group's prefix, one of a few prompts


class Planned(NamedTuple):
    """One request. prompt_tokens: including its conversation so far. shared: leading parts of its own prompt that other
    requests have, too, as (stream, tokens); the rest of its own prompt is new. hit_tokens: for a prompt whose content
    is not modelled, the tokens assumed to be in the prefix cache."""

    prompt_tokens: int
    output_tokens: int
    hit_tokens: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    conversation: int | None = None
    turn: int = 0
    last_turn: bool = True
    own_tokens: int = -1  # tokens added by its turn; -1: all of prompt_tokens

    @property
    def adds(self) -> int:
        """Prompt tokens beyond the conversation so far."""
        return self.prompt_tokens if self.own_tokens < 0 else self.own_tokens


class RequestPlan(Sequence[Planned]):
    """A workload's requests by number; those of a conversation have consecutive numbers (in a trace any)."""

    def __init__(self, workload: Workload, *labels: object) -> None:
        self.workload, self._labels = workload, labels
        self._prompt_seed, self._output_seed = seed_of(*labels, "prompt"), seed_of(*labels, "output")
        self._known: dict[int, Planned] = {}

    def __len__(self) -> int:
        return len(self.workload.rows()) if self.workload.trace is not None else ENDLESS

    def __getitem__(self, index: int) -> Planned:  # type: ignore[override]
        found = self._known.get(index)
        if found is None:
            found = self._made(index) if self.workload.trace is None else self._row(index)
            if len(self._known) < 50_000:
                self._known[index] = found
        return found

    # --- lengths by a law -----------------------------------------------------------------------------------------

    @cached_property
    def _laws(self) -> tuple[lengths.Length, lengths.Length]:
        return self.workload.prompts, self.workload.outputs

    def _own(self, index: int) -> tuple[int, int]:
        """(prompt, output) tokens that request number `index` adds to its conversation."""
        prompts, outputs = self._laws
        prompt = index % self.workload.unique_prompts if self.workload.unique_prompts else index
        return (
            lengths.length_at(prompts, self._prompt_seed, prompt),
            lengths.length_at(outputs, self._output_seed, index),
        )

    def _made(self, index: int) -> Planned:
        w = self.workload
        prompt, output = self._own(index)
        talk, turn = divmod(index, w.turns)
        unique = index % w.unique_prompts if w.unique_prompts else talk
        shared: list[tuple[int, int]] = []
        if w.shared_prefix:
            shared.append((unique % w.shared_prefix.groups * 4 + GROUP, min(w.shared_prefix.tokens, prompt)))
        if w.unique_prompts:
            shared.append((unique * 4 + UNIQUE, prompt - sum(n for _, n in shared)))
        if w.turns == 1:
            return Planned(prompt, output, 0, tuple(shared))
        before = sum(sum(self._own(talk * w.turns + t)) for t in range(turn))
        return Planned(before + prompt, output, 0, tuple(shared), talk, turn, turn == w.turns - 1, prompt)

    # --- a trace ----------------------------------------------------------------------------------------------------

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[tuple[tuple[int, int], ...]]]:
        rows = self.workload.rows()
        return rows.prompt_tokens, rows.output_tokens, rows.before, rows.shared

    @cached_property
    def _followed(self) -> dict[int, int]:
        """For each request of a trace, the request that follows it in its conversation."""
        before = self._columns[2]
        at = (before >= 0).nonzero()[0]
        return dict(zip(before[at].tolist(), at.tolist(), strict=True))

    @cached_property
    def _first_turns(self) -> dict[int, tuple[int, int]]:
        """(conversation, turn) of each request of a trace that belongs to one; a conversation has the number of its
        first request."""
        before = self._columns[2]
        found: dict[int, tuple[int, int]] = {}
        for i in (before >= 0).nonzero()[0].tolist():
            first, turn = found.setdefault(int(before[i]), (int(before[i]), 0))
            found[i] = first, turn + 1
        return found

    def _row(self, index: int) -> Planned:
        prompts, outputs, before, shared = self._columns
        prompt, output, at = int(prompts[index]), int(outputs[index]), int(before[index])
        talk, turn = self._first_turns.get(index, (None, 0))
        own = prompt - int(prompts[at]) - int(outputs[at]) if at >= 0 else prompt
        parts = shared[self._first(index)]
        return Planned(prompt, output, 0, parts, talk, turn, index not in self._followed, own)

    def _first(self, index: int) -> int:
        talk, turn = self._first_turns.get(index, (None, 0))
        return talk if talk is not None and turn else index

    # --- order ------------------------------------------------------------------------------------------------------

    def follows(self, index: int) -> int | None:
        """The request that continues the conversation of `index`, None where none does."""
        if self.workload.trace is not None:
            return self._followed.get(index)
        return index + 1 if (index + 1) % self.workload.turns else None

    def starts(self, index: int) -> bool:
        """Whether `index` begins a conversation, or belongs to none."""
        return index % self.workload.turns == 0 if self.workload.trace is None else int(self._columns[2][index]) < 0

    def begins(self, number: int) -> int | None:
        """The first request of conversation `number`, None beyond the last."""
        if self.workload.trace is None:
            return number * self.workload.turns
        firsts = self._firsts
        return int(firsts[number]) if number < len(firsts) else None

    @cached_property
    def _firsts(self) -> np.ndarray:
        return (self._columns[2] < 0).nonzero()[0]

    @property
    def has_conversations(self) -> bool:
        """Whether requests belong to conversations."""
        return self.workload.turns > 1 if self.workload.trace is None else bool((self._columns[2] >= 0).any())


class Part(Sequence[Planned]):
    """Every n-th request of a plan, from a given one on."""

    def __init__(self, plan: RequestPlan, every: int, offset: int) -> None:
        self._plan, self._every, self._offset = plan, every, offset

    def __len__(self) -> int:
        return max(0, -(-(len(self._plan) - self._offset) // self._every))

    def __getitem__(self, index: int) -> Planned:  # type: ignore[override]
        return self._plan[(self._offset + index * self._every) % len(self._plan)]


def of_point(spec: PointSpec, load: Load) -> RequestPlan | None:
    """The requests of a point, None if all have the same length and share nothing. They are the same for every point of
    a workload, so that points differ by their load alone."""
    if spec.workload is None:
        return None
    if spec.workload.trace is None:
        return _by_law(spec.workload, load.seed, spec.workload_name)
    return RequestPlan(spec.workload, load.seed, spec.workload_name)


@lru_cache(maxsize=2)
def _by_law(workload: Workload, seed: int, name: str) -> RequestPlan:
    """Drawing lengths takes as long as a short simulation, so the points of a workload share one plan."""
    return RequestPlan(workload, seed, name)


def arrival_labels(spec: PointSpec, load: Load) -> tuple[object, ...]:
    """The labels that determine a point's arrivals."""
    return load.seed, spec.sweep, spec.engine, spec.point


def due_times(spec: PointSpec, load: Load, count: int) -> np.ndarray:
    """Due times of the first `count` requests of an open loop, a burst or a trace, in seconds from its start."""
    if spec.kind == "trace":
        assert spec.workload is not None
        return spec.workload.rows().arrival_s[:count] / spec.speed
    if spec.kind == "burst":
        return np.zeros(count)
    labels = arrival_labels(spec, load)
    due = arrivals.schedule(spec.arrivals, spec.rate_per_s or 1.0, *labels, gamma_shape=spec.gamma_shape)
    return np.fromiter(itertools.islice(due, count), float, count)
