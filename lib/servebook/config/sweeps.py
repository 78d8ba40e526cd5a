"""The kinds of sweep: their parameters under `sweeps:` in a parameter file, and their points.

To add a kind, write a class here and add it to `Sweep` at the end. CONTRIBUTING.md has a worked example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from .engines import Engine
from .param_types import Clients, Count, Once, Positive, Rate, Requests, Strict, unfit
from .points import SAME, PointSpec, RepeatedPoint
from .workloads import OneOf, Workload

MOST_POINTS = 512  # per sweep: predicting a point takes at least a tenth of a second, measuring it about a minute


class SweepKind(Strict):
    """Base class of all kinds. A kind adds its fields (among them `prompt_tokens` and `output_tokens`, each a count or
    a list of counts) and implements `points`, the points to measure."""

    report_as: ClassVar[str] = "concurrency"  # the kind whose tables and charts it uses in chapters on all sweeps
    notebook: ClassVar[str] = "03_short_prompts"  # the notebook that reports the sweep if none is named after it
    kind: str
    engines: Annotated[list[str], Once] | None = None  # default: all engines of the run
    minutes_per_engine: dict[str, Positive] = {}  # {engine: time limit of the sweep}

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        """The points of the sweep `name` for one engine and its parameters `how`, in the order of the parameter file.

        capacity_per_s: the engine's predicted request rate at saturation; None if it is not known yet."""
        raise NotImplementedError

    @property
    def notebook_name(self) -> str:
        """The notebook that reports this sweep: its kind's, or with a workload the one about traffic."""
        return self.notebook

    def lengths(self) -> list[tuple[int, int]]:
        """The distinct (prompt, output) tokens of its requests, in order; with a workload, their means."""
        given: Any = self
        prompts, outputs = ([v] if isinstance(v, int) else v for v in (given.prompt_tokens, given.output_tokens))
        return list(dict.fromkeys((p, o) for p in prompts for o in outputs))

    def longest(self) -> tuple[int, int]:
        """(prompt, output) tokens of the request that needs the longest context."""
        return max(self.lengths(), key=sum)


class LoadKind(SweepKind):
    """A sweep whose requests all have the same lengths (prompt_tokens, output_tokens) or come from a named workload."""

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
        """Set the named workload from the run's workloads. Raises KeyError if there is none of that name."""
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
        """A point with the sweep's workload; None if it has none."""
        return self._spec(name, engine, "") if self._given is not None else None

    def _spec(self, name: str, engine: str, point: str, **load: Any) -> PointSpec:
        """A point of the sweep with the given load."""
        load |= {"workload": self._given, "workload_name": self.workload or ""}
        return PointSpec(name, engine, point, self.kind, *self.tokens, **load)


Finite = Annotated[Requests, Field(gt=0)]


class ConcurrencySweep(LoadKind):
    """Closed loop with exactly C requests in flight. requests: a finite run of that many requests, all measured;
    without it, a window in the steady state is measured."""

    kind: Literal["concurrency"]
    concurrency: Annotated[list[Clients], Field(min_length=1, max_length=MOST_POINTS), Once]
    requests: Finite | None = OneOf

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        return [self._spec(name, engine, f"c{c:04d}", concurrency=c, requests=self.requests) for c in self.concurrency]


class PromptLengthSweep(SweepKind):
    """Prompts of several lengths at one concurrency (default: 1)."""

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
    """Open loop: requests arrive at a given rate, independent of the server. concurrency: maximum in flight; further
    requests wait in the client. requests: a finite run of that many requests, all measured."""

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
        """shares_of_capacity give no points before the capacity is known."""
        load = {
            "arrivals": self.arrivals, "gamma_shape": self.gamma_shape, "concurrency": self.concurrency,
            "requests": self.requests,
        }  # fmt: skip
        return [
            self._spec(name, engine, f"r{rate:.3f}", rate_per_s=rate, **load) for rate in self.rates(capacity_per_s)
        ]

    def rates(self, capacity_per_s: float | None) -> Iterable[float]:
        """Requests per second. Those from shares are rounded, so that the names of points do not change."""
        if self.rates_per_s:
            return list(self.rates_per_s)
        if capacity_per_s is None:
            return []
        return list(dict.fromkeys(max(0.001, round(share * capacity_per_s, 3)) for share in self.shares_of_capacity))


class PrefixCacheSweep(SweepKind):
    """Closed loop with fresh prompts, then at the same C with repeated prompts: the effect of a warm prefix cache.

    Engines without prefix caching (prefix_caching: false, the naive server) are measured with fresh prompts only."""

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
    """A number of requests sent at once, all measured until the last one ends."""

    report_as, notebook = "burst", "06_traffic"
    kind: Literal["burst"]
    requests: Annotated[list[Finite], Field(min_length=1, max_length=MOST_POINTS), Once]
    concurrency: Clients | None = OneOf  # maximum in flight

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        cap = self.concurrency
        return [self._spec(name, engine, f"b{n:05d}", requests=n, concurrency=cap) for n in self.requests]


class TraceSweep(LoadKind):
    """Replay of a trace: requests arrive at the trace's times divided by `speed`, until the last one ends. A turn of a
    conversation waits for the one before to end."""

    report_as, notebook = "trace", "06_traffic"
    kind: Literal["trace"]
    speeds: Annotated[list[Positive], Field(min_length=1, max_length=MOST_POINTS), Once] = [1.0]
    concurrency: Clients | None = OneOf  # maximum in flight

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
