"""The kinds of sweep: what each is given under `sweeps:` in a parameter file, and the points it consists of.

A new kind is one class here, with its name in `Sweep` at the end. See CONTRIBUTING.md for a worked example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from .engines import Engine
from .param_types import Clients, Count, Once, Positive, Rate, Requests, Strict, unfit
from .points import SAME, PointSpec, RepeatedPoint
from .workloads import OneOf, Workload

MOST_POINTS = 512  # of a sweep: each is predicted in a tenth of a second or more, and measured in a minute


class SweepKind(Strict):
    """What all kinds share. A kind adds its fields (`prompt_tokens` and `output_tokens`, each one count or a list of
    them, among others) and says in `points` what is measured."""

    report_as: ClassVar[str] = "concurrency"  # the kind as which chapters that cover all sweeps treat it
    notebook: ClassVar[str] = "03_short_prompts"  # the notebook that reports the sweep if none is named after it
    kind: str
    engines: Annotated[list[str], Once] | None = None  # all of the run's engines unless given
    minutes_per_engine: dict[str, Positive] = {}  # stop the sweep there after so long

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        """The points of the sweep `name` for one engine and its parameters `how`, in the order of the parameter file.

        capacity_per_s: the engine's predicted request rate at saturation, None where it is not known yet."""
        raise NotImplementedError

    @property
    def notebook_name(self) -> str:
        """The notebook that tells this sweep: its kind's, or of a workload the one about traffic."""
        return self.notebook

    def lengths(self) -> list[tuple[int, int]]:
        """The (prompt, output) tokens of its requests, each pair once, in order; of a workload their means."""
        given: Any = self
        prompts, outputs = ([v] if isinstance(v, int) else v for v in (given.prompt_tokens, given.output_tokens))
        return list(dict.fromkeys((p, o) for p in prompts for o in outputs))

    def longest(self) -> tuple[int, int]:
        """(prompt, output) tokens of the request that needs the longest context."""
        return max(self.lengths(), key=sum)


class LoadKind(SweepKind):
    """A sweep whose requests are of one length each (prompt_tokens, output_tokens), or as a named workload says."""

    workload: str | None = OneOf
    prompt_tokens: Count | None = OneOf
    output_tokens: Count | None = OneOf
    _given: Workload | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_of_both(self) -> LoadKind:
        lengths = self.prompt_tokens is not None, self.output_tokens is not None
        if (self.workload is None) != all(lengths) or (self.workload is not None and any(lengths)):
            raise unfit("give either a workload or both prompt_tokens and output_tokens", "Keep one of the two")
        return self

    @property
    def notebook_name(self) -> str:
        return "06_traffic" if self.workload is not None else self.notebook

    def with_workloads(self, workloads: Mapping[str, Workload]) -> None:
        """Take the workload that is named from the run's. Raises KeyError where there is none."""
        if self.workload is not None:
            self._given = workloads[self.workload]

    @property
    def tokens(self) -> tuple[int, int]:
        """Mean (prompt, output) tokens of a request."""
        if self._given is not None:
            return self._given.mean_tokens()
        return self.prompt_tokens or 0, self.output_tokens or 0

    def lengths(self) -> list[tuple[int, int]]:
        return [self.tokens]

    def longest(self) -> tuple[int, int]:
        return self._given.longest_tokens() if self._given is not None else self.tokens

    def example(self, name: str, engine: str) -> PointSpec | None:
        """A point with its workload, None where all requests are alike."""
        return self._spec(name, engine, "") if self._given is not None else None

    def _spec(self, name: str, engine: str, point: str, **load: Any) -> PointSpec:
        """A point of it with this load."""
        load |= {"workload": self._given, "workload_name": self.workload or ""}
        return PointSpec(name, engine, point, self.kind, *self.tokens, **load)


Finite = Annotated[Requests, Field(gt=0)]


class ConcurrencySweep(LoadKind):
    """Closed loop at exactly C requests in flight. requests: a finite run of so many, measured from the first to the
    last; else a window in the steady state."""

    kind: Literal["concurrency"]
    concurrency: Annotated[list[Clients], Field(min_length=1, max_length=MOST_POINTS), Once]
    requests: Finite | None = OneOf

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        return [self._spec(name, engine, f"c{c:04d}", concurrency=c, requests=self.requests) for c in self.concurrency]


class PromptLengthSweep(SweepKind):
    """Prompts of several lengths at one concurrency (1 unless given)."""

    report_as, notebook = "prompt_length", "05_prompt_length"
    kind: Literal["prompt_length"]
    prompt_tokens: Annotated[list[Count], Field(min_length=1, max_length=MOST_POINTS), Once]
    output_tokens: Count
    concurrency: Clients = 1

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        return [
            PointSpec(name, engine, f"p{n:05d}", self.kind, n, self.output_tokens, concurrency=self.concurrency)
            for n in self.prompt_tokens
        ]


class ArrivalRateSweep(LoadKind):
    """Open loop: requests arrive at a rate, whatever the server does. concurrency: at most so many are in flight, the
    others wait at the client. requests: a finite run of so many, measured from the first to the last."""

    report_as, notebook = "arrival_rate", "06_arrival_rate"
    kind: Literal["arrival_rate"]
    rates_per_s: Annotated[list[Rate], Once] = []
    shares_of_capacity: Annotated[list[Positive], Once] = []  # of the engine's predicted request rate
    arrivals: Literal["poisson", "constant", "gamma"] = "poisson"
    gamma_shape: Annotated[Positive, Field(ge=0.01)] = 1.0  # at 0.01 bursts of a hundred
    concurrency: Clients | None = OneOf
    requests: Finite | None = OneOf

    @model_validator(mode="after")
    def _one_source(self) -> ArrivalRateSweep:
        if bool(self.rates_per_s) == bool(self.shares_of_capacity):
            raise ValueError("give exactly one of rates_per_s and shares_of_capacity")
        if self.gamma_shape != 1.0 and self.arrivals != "gamma":
            raise unfit(f"gamma_shape is unused for {self.arrivals} arrivals", "Set arrivals: gamma, or leave it out")
        return self

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        """Shares have no points before the capacity is known."""
        load = {
            "arrivals": self.arrivals, "gamma_shape": self.gamma_shape, "concurrency": self.concurrency,
            "requests": self.requests,
        }  # fmt: skip
        return [
            self._spec(name, engine, f"r{rate:.3f}", rate_per_s=rate, **load) for rate in self.rates(capacity_per_s)
        ]

    def rates(self, capacity_per_s: float | None) -> Iterable[float]:
        """Requests per second; shares are rounded so that a point's name stays what it was."""
        if self.rates_per_s:
            return list(self.rates_per_s)
        if capacity_per_s is None:
            return []
        return list(dict.fromkeys(max(0.001, round(share * capacity_per_s, 3)) for share in self.shares_of_capacity))


class PrefixCacheSweep(SweepKind):
    """Closed loop with fresh prompts, then at the same C with repeated ones: the effect of a warm prefix cache.

    An engine without prefix caching (prefix_caching: false, the naive one) is measured with fresh prompts only."""

    report_as, notebook = "prefix_cache", "06_prefix_cache"
    kind: Literal["prefix_cache"]
    prompt_tokens: Count
    output_tokens: Count
    concurrency: Annotated[list[Clients], Field(min_length=1, max_length=MOST_POINTS), Once]

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        tokens = self.prompt_tokens, self.output_tokens
        fresh = [
            PointSpec(name, engine, f"fresh-c{c:04d}", self.kind, *tokens, concurrency=c) for c in self.concurrency
        ]
        if not how.prefix_caching:
            return fresh
        same = [
            RepeatedPoint(
                name, engine, f"{SAME}c{c:04d}", self.kind, *tokens, concurrency=c, prompt_set=f"{name}/{engine}"
            )
            for c in self.concurrency
        ]
        return [*fresh, *same]


class BurstSweep(LoadKind):
    """So many requests at once, until the last has ended."""

    report_as, notebook = "burst", "06_traffic"
    kind: Literal["burst"]
    requests: Annotated[list[Finite], Field(min_length=1, max_length=MOST_POINTS), Once]
    concurrency: Clients | None = OneOf  # at most so many in flight

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        cap = self.concurrency
        return [self._spec(name, engine, f"b{n:05d}", requests=n, concurrency=cap) for n in self.requests]


class TraceSweep(LoadKind):
    """A trace replayed: its requests arrive when it says, `speed` times as fast, until the last has ended. A turn of a
    conversation waits for the end of the one before."""

    report_as, notebook = "trace", "06_traffic"
    kind: Literal["trace"]
    speeds: Annotated[list[Positive], Field(min_length=1, max_length=MOST_POINTS), Once] = [1.0]
    concurrency: Clients | None = OneOf  # at most so many in flight

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        assert self._given is not None
        count = len(self._given.rows())
        return [
            self._spec(name, engine, f"x{speed:07.3f}", requests=count, concurrency=self.concurrency, speed=speed)
            for speed in self.speeds
        ]


Sweep = Annotated[
    ConcurrencySweep | PromptLengthSweep | ArrivalRateSweep | PrefixCacheSweep | BurstSweep | TraceSweep,
    Field(discriminator="kind"),
]
