"""The kinds of sweep: what each is given under `sweeps:` in a parameter file, and the points it consists of.

A new kind is one class here, with its name in `Sweep` at the end. See CONTRIBUTING.md for a worked example.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .engines import Engine
from .param_types import Clients, Count, Once, Positive, Rate, Strict, unfit
from .points import SAME, PointSpec, RepeatedPoint


class SweepKind(Strict):
    """What all kinds share. A kind adds its fields (`prompt_tokens` and `output_tokens`, each one count or a list of
    them, among others) and says in `points` what is measured."""

    told_as: ClassVar[str] = "concurrency"  # the kind that chapters over all sweeps take it for
    notebook: ClassVar[str] = "03_short_prompts"  # tells the sweep where none is named after it
    kind: str
    engines: Annotated[list[str], Once] | None = None  # all of the run's engines unless given
    minutes_per_engine: dict[str, Positive] = {}  # stop the sweep there after so long

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        """The points of the sweep `name` for one engine and its parameters `how`, cheapest load first.

        capacity_per_s: the engine's predicted request rate at saturation, None where it is not known yet."""
        raise NotImplementedError

    def workloads(self) -> list[tuple[int, int]]:
        """The (prompt, output) tokens of its requests, each pair once, in order."""
        given: Any = self
        prompts, outputs = ([v] if isinstance(v, int) else v for v in (given.prompt_tokens, given.output_tokens))
        return list(dict.fromkeys((p, o) for p in prompts for o in outputs))


class ConcurrencySweep(SweepKind):
    """Closed loop at exactly C requests in flight."""

    kind: Literal["concurrency"]
    prompt_tokens: Count
    output_tokens: Count
    concurrency: Annotated[list[Clients], Field(min_length=1), Once]

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        tokens = self.prompt_tokens, self.output_tokens
        return [PointSpec(name, engine, f"c{c:04d}", self.kind, *tokens, concurrency=c) for c in self.concurrency]


class PromptLengthSweep(SweepKind):
    """One client, prompts of growing length."""

    told_as, notebook = "prompt_length", "05_prompt_length"
    kind: Literal["prompt_length"]
    prompt_tokens: Annotated[list[Count], Field(min_length=1), Once]
    output_tokens: Count
    concurrency: Clients = 1

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        return [
            PointSpec(name, engine, f"p{n:05d}", self.kind, n, self.output_tokens, concurrency=self.concurrency)
            for n in self.prompt_tokens
        ]


class ArrivalRateSweep(SweepKind):
    """Open loop: requests arrive at a rate, whatever the server does."""

    told_as, notebook = "arrival_rate", "06_arrival_rate"
    kind: Literal["arrival_rate"]
    prompt_tokens: Count
    output_tokens: Count
    rates_per_s: Annotated[list[Rate], Once] = []
    shares_of_capacity: Annotated[list[Positive], Once] = []  # of the engine's predicted request rate
    arrivals: Literal["poisson", "constant", "gamma"] = "poisson"
    gamma_shape: Positive = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> ArrivalRateSweep:
        if bool(self.rates_per_s) == bool(self.shares_of_capacity):
            raise ValueError("give exactly one of rates_per_s and shares_of_capacity")
        if self.gamma_shape != 1.0 and self.arrivals != "gamma":
            raise unfit(f"gamma_shape says nothing of {self.arrivals} arrivals", "Set arrivals: gamma, or leave it out")
        return self

    def points(self, name: str, engine: str, how: Engine, capacity_per_s: float | None) -> list[PointSpec]:
        """Shares have no points before the capacity is known."""
        tokens = self.prompt_tokens, self.output_tokens
        process = {"arrivals": self.arrivals, "gamma_shape": self.gamma_shape}
        return [
            PointSpec(name, engine, f"r{rate:.3f}", self.kind, *tokens, rate_per_s=rate, **process)  # type: ignore[arg-type]
            for rate in self.rates(capacity_per_s)
        ]

    def rates(self, capacity_per_s: float | None) -> Iterable[float]:
        """Requests per second; shares are rounded so that a point's name stays what it was."""
        if self.rates_per_s:
            return list(self.rates_per_s)
        if capacity_per_s is None:
            return []
        return list(dict.fromkeys(max(0.001, round(share * capacity_per_s, 3)) for share in self.shares_of_capacity))


class PrefixCacheSweep(SweepKind):
    """Closed loop with fresh prompts, then over the same C with one seed for all: what a warm prefix cache flatters.

    An engine without prefix caching (prefix_caching: false, the naive one) is measured with fresh prompts only."""

    told_as, notebook = "prefix_cache", "06_prefix_cache"
    kind: Literal["prefix_cache"]
    prompt_tokens: Count
    output_tokens: Count
    concurrency: Annotated[list[Clients], Field(min_length=1), Once]

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


Sweep = Annotated[
    ConcurrencySweep | PromptLengthSweep | ArrivalRateSweep | PrefixCacheSweep, Field(discriminator="kind")
]
