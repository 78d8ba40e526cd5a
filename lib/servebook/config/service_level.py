"""The service level: limits on latencies, the percentile of each, and the load that must meet them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from .param_types import Name, Positive, Seconds, Strict, unfit
from .workloads import OneOf

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
PERCENTILE = 90.0


def _above_zero(value: float) -> float:
    if value == 0:
        raise unfit("a target load of zero needs no server", "Give a load above 0")
    return value


Percentile = Annotated[float, Field(gt=0, lt=100)]
TargetRate = Annotated[float, Field(ge=0, le=10_000), AfterValidator(_above_zero)]
TargetUsers = Annotated[int, Field(ge=0, le=20_000), AfterValidator(_above_zero)]


class TargetLoad(Strict):
    """The load that a set-up must carry, over all replicas. Exactly one of rate_per_s (arrivals per second), users
    (each sends its next request when its last one has ended), and trace_speed (speed-up of the replayed trace).
    workload: one of the run's; default: the first sweep's requests. arrivals, gamma_shape: as in an arrival_rate sweep;
    every replica's share arrives so."""

    workload: Name | None = OneOf
    rate_per_s: TargetRate | None = OneOf
    users: TargetUsers | None = OneOf
    trace_speed: Positive | None = OneOf
    arrivals: Annotated[Literal["poisson", "constant", "gamma"], Field(exclude_if=lambda value: value == "poisson")] = (
        "poisson"
    )
    gamma_shape: Annotated[Positive, Field(exclude_if=lambda value: value == 1.0)] = 1.0

    @model_validator(mode="after")
    def _one_load(self) -> TargetLoad:
        given = [k for k in ("rate_per_s", "users", "trace_speed") if getattr(self, k) is not None]
        if len(given) != 1:
            raise unfit(
                f"give exactly one of rate_per_s, users and trace_speed (found {', '.join(given) or 'none'})",
                "Keep one of them, e.g. rate_per_s: 10",
            )
        if self.arrivals != "poisson" and self.rate_per_s is None:
            raise unfit(f"{self.arrivals} arrivals come at a rate", "Give rate_per_s, or leave out arrivals")
        if self.gamma_shape != 1.0 and self.arrivals != "gamma":
            raise unfit(f"gamma_shape is unused for {self.arrivals} arrivals", "Set arrivals: gamma, or leave it out")
        return self


class Slo(Strict):
    """The service level: limits on a request's latencies; None: no limit.

    percentile: share of requests, in percent, that must be within each limit (`servebook choose`); a limit may have its
    own.
    """

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2e_s: Seconds | None = None
    percentile: Annotated[Percentile, Field(exclude_if=lambda value: value == PERCENTILE)] = PERCENTILE
    ttft_percentile: Percentile | None = OneOf
    tpot_percentile: Percentile | None = OneOf
    e2e_percentile: Percentile | None = OneOf
    target: TargetLoad | None = OneOf

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """{latency: (limit in seconds, percentile of the requests that must be within it)}."""
        found = {}
        for latency in LATENCIES:
            limit = getattr(self, latency)
            if limit is not None:
                own = getattr(self, latency.removesuffix("_s") + "_percentile")
                found[latency] = (limit, own if own is not None else self.percentile)
        return found
