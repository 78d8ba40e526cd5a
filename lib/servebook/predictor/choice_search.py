"""The looks of a search for a set-up: the closed form, one simulation, simulations with draws of the constants.

Each look is at fewer set-ups than the one before; choice.choose walks them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import ServebookError
from ..config.params import Load
from ..config.search_space import SearchSpace
from .scenario import capacity_per_s
from .server_limits import PredictedServer
from .set_ups import SetUp, Workshop
from .steady_state import Lengths, Steady, closed, lone, steady
from .steptime import VllmTimes
from .target_load import Judged, Limits, Target, Trial, attempt, judge

COARSE_REQUESTS, FINE_REQUESTS = 150, 300  # of one group, to measure in a simulation
DRAWS = 12  # of the constants, for a probability
FINE_MOST = 14  # set-ups that are simulated with draws
SLACK = 1.25  # by which the closed form may be over a limit and the set-up still be simulated
MOST_TRIALS = 4  # numbers of replicas that one set-up is simulated with
FULL = 0.97  # of what a server can serve by the closed form, beyond which it is taken to fall behind
BUSY = 0.75  # from here on the simulated capacity is asked whether it does


@dataclass
class Candidate:
    """A set-up that fits, with what each look found. replicas: that it takes; None: it misses the level whatever their
    number, or there are too few cards."""

    set_up: SetUp
    server: PredictedServer
    times: VllmTimes
    estimate: Steady | None = None
    replicas: int | None = None
    trial: Trial | None = None
    judged: Judged | None = None
    misses: str = ""

    @property
    def cards(self) -> int:
        return (self.replicas or 0) * self.set_up.gpus

    @property
    def cost_per_hour(self) -> float:
        return self.cards * self.set_up.card.price_per_hour if self.replicas else math.inf

    def cost_per_million(self, trial: Trial | None) -> float | None:
        """Of a million output tokens at the target load."""
        if trial is None or not trial.output_tok_per_s:
            return None
        return self.cost_per_hour / 3600 / trial.output_tok_per_s * 1e6


@dataclass
class Search:
    """One search. where: the parameter file, for messages."""

    workshop: Workshop
    space: SearchSpace
    target: Target
    limits: Limits
    where: str
    load: Load = field(init=False)
    at: Lengths = field(init=False)
    dropped: Counter[str] = field(default_factory=Counter)
    simulated: int = 0

    def __post_init__(self) -> None:
        self.load = self.workshop.load
        self.at = self.target.lengths(self.load)

    # --- what fits --------------------------------------------------------------------------------------------------

    def fitting(self, all_set_ups: Sequence[SetUp]) -> list[Candidate]:
        """Those that hold the model and its requests. Raises ServebookError, with the commonest reason, for none."""
        found = []
        for s in all_set_ups:
            server, reason = self.workshop.why_not(s, *self.target.longest())
            if server is None:
                self.dropped[f"{s.gpu.name}: {reason}" if s.gpu.name not in str(reason) else str(reason)] += 1
                continue
            times = self.workshop.times(s, server)
            assert isinstance(times, VllmTimes)
            found.append(Candidate(s, server, times))
        if not found:
            reason, _ = self.dropped.most_common(1)[0] if self.dropped else ("nothing to search", 0)
            fix = "Raise --max-gpus, add a card with --gpu, allow fp8 weights, or shorten the requests"
            raise ServebookError(f"no card holds the model and its requests ({reason})", self.where, fix)
        return found

    # --- first look -------------------------------------------------------------------------------------------------

    def most_replicas(self, c: Candidate) -> int:
        return self.space.max_gpus // c.set_up.gpus

    def estimated(self, c: Candidate, replicas: int) -> Steady:
        """The closed form of one group's share of the load."""
        groups = replicas * c.server.layout.groups
        if self.target.users is not None:
            return closed(c.server, c.times, self.at, self.target.users / groups)
        return steady(c.server, c.times, self.at, (self.target.mean_rate_per_s() or 0.0) / groups)

    def first_look(self, c: Candidate) -> None:
        """The least number of replicas that may do by the closed form."""
        alone = lone(c.times, self.at)
        limit = self.limits.get("tpot_s", (math.inf, 0))[0]
        most = self.most_replicas(c)
        if alone > SLACK * limit:
            c.misses = f"a lone request's TPOT is {1e3 * alone:.1f} ms"
            c.estimate = self.estimated(c, most)
            return
        low, high = 0, most
        if not self._may_do(self.estimated(c, most)):
            c.estimate, c.misses = self.estimated(c, most), f"{most * c.set_up.gpus} GPUs are not enough"
            return
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._may_do(self.estimated(c, middle)) else (middle, high)
        c.replicas, c.estimate = high, self.estimated(c, high)

    def _may_do(self, found: Steady) -> bool:
        if self.target.users is None and found.utilization > FULL:
            return False
        e2e = found.ttft_s + self.at.output * found.tpot_s
        values = {"ttft_s": found.ttft_s, "tpot_s": found.tpot_s, "e2e_s": e2e}
        return all(values[m] <= SLACK * limit for m, (limit, _) in self.limits.items())

    # --- second look ------------------------------------------------------------------------------------------------

    def second_look(self, c: Candidate) -> None:
        """Simulated once, with one replica more or less until the level is met by the fewest."""
        tried: dict[int, Trial] = {}
        n = c.replicas
        while n is not None and len(tried) < MOST_TRIALS:
            found = self.attempted(c, n)
            if found is None:
                c.replicas, c.misses = None, "a request does not fit into its share of the KV pool"
                return
            tried[n] = found
            n = self._next(n, tried, self.most_replicas(c))
        met = [n for n, t in tried.items() if t.worst <= 1]
        if met:
            c.replicas, c.trial = min(met), tried[min(met)]
            return
        last = max(tried)
        c.trial, c.replicas = tried[last], None
        c.misses = f"misses the level with {last * c.set_up.gpus} GPUs"

    @staticmethod
    def _next(n: int, tried: Mapping[int, Trial], most: int) -> int | None:
        """The number of replicas to try after n; None where the least is known."""
        worst = tried[n].worst
        if worst <= 1:
            fewer = n - 1
            return fewer if fewer >= 1 and fewer not in tried else None
        more = min(most, max(n + 1, math.ceil(n * min(worst, 1.5))))
        if any(t.worst <= 1 for t in tried.values()):
            return None
        return more if more > n and more not in tried else None

    def attempted(self, c: Candidate, replicas: int) -> Trial | None:
        """One simulation of so many replicas; None where a request does not fit."""
        self.simulated += 1
        estimate = self.estimated(c, replicas)
        requests = max(COARSE_REQUESTS, min(4 * COARSE_REQUESTS, round(estimate.running)))
        return attempt(
            c.server, c.times, self.target, replicas, self.limits, load=self.load, running=estimate.running,
            requests=requests,
        )  # fmt: skip

    # --- third look -------------------------------------------------------------------------------------------------

    def third_look(self, c: Candidate, replicas: int) -> Judged | None:
        """Simulated with draws of the constants; None where it falls behind."""
        if self.falls_behind(c, replicas):
            return None
        estimate = self.estimated(c, replicas)
        f = self.workshop.forecaster(c.set_up, c.server, DRAWS)
        requests = max(FINE_REQUESTS, min(2 * FINE_REQUESTS, round(estimate.running)))
        return judge(f, self.target, replicas, self.limits, running=estimate.running, requests=requests)

    def falls_behind(self, c: Candidate, replicas: int) -> bool:
        """Whether more arrives than it serves, by the simulated capacity where the closed form is near it."""
        rate = self.target.rate_per_s
        if rate is None or self.estimated(c, replicas).utilization < BUSY:
            return False
        return rate > FULL * self.carries_per_s(c, replicas)

    def carries_per_s(self, c: Candidate, replicas: int) -> float:
        """Requests/s that so many replicas serve at most, simulated."""
        scenario = self.target.scenario(c.server, replicas, self.load, COARSE_REQUESTS)
        tokens = self.target.prompt_tokens, self.target.output_tokens
        return replicas * capacity_per_s(c.server, c.times, *tokens, most=128, like=scenario.spec)

    def best(self, ranked: Sequence[Candidate]) -> tuple[Candidate, int]:
        """(the cheapest that reaches the confidence, else the most probable; how many were judged). Cost by cost; at
        each the one with the most room of every kind, the model's own precisions first. One that does not reach it is
        tried again with a replica more."""
        waiting, looked = list(ranked), 0
        while waiting and looked < FINE_MOST:
            cost = min(c.cost_per_hour for c in waiting)
            here = [c for c in waiting if c.cost_per_hour <= cost * (1 + 1e-9)]
            kinds: dict[Any, Candidate] = {}
            for c in sorted(here, key=self._order):
                kinds.setdefault(c.set_up.kind, c)
            reached: list[Candidate] = []
            for c in sorted(kinds.values(), key=lambda c: (_changes(c.set_up), self._order(c))):
                if looked >= FINE_MOST or (reached and _changes(c.set_up) > _changes(reached[0].set_up)):
                    break
                assert c.replicas is not None
                c.judged, looked = self.third_look(c, c.replicas), looked + 1
                if c.judged is not None and c.judged.probability >= self.space.confidence:
                    reached.append(c)
            if reached:
                return max(
                    reached, key=lambda c: (-_changes(c.set_up), c.judged.probability if c.judged else 0)
                ), looked
            waiting = [c for c in waiting if c not in here] + [c for c in kinds.values() if self._one_more(c)]
        seen = [c for c in ranked if c.judged is not None]
        return (max(seen, key=lambda c: c.judged.probability if c.judged else 0) if seen else ranked[0]), looked

    def _one_more(self, c: Candidate) -> bool:
        """A replica more, where there are the cards for it."""
        if c.replicas is None or c.replicas >= self.most_replicas(c):
            return False
        c.replicas += 1
        return True

    @staticmethod
    def _order(c: Candidate) -> tuple[Any, ...]:
        worst = round(c.trial.worst, 2) if c.trial and c.trial.replicas == c.replicas else 1.0
        return (round(c.cost_per_hour, 6), worst, _changes(c.set_up), c.set_up.name)


def _changes(s: SetUp) -> int:
    """Precisions that are not the model's own."""
    return (s.quantization is not None) + (s.kv_cache_dtype != "auto")
