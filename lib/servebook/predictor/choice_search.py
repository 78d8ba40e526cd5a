"""The three stages of a search for a set-up: the closed form, one simulation, simulations with draws of the constants.

Each stage keeps fewer set-ups than the one before. choice.choose runs them.
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
from .refusal import Refusal
from .scenario import capacity_per_s
from .server_limits import PredictedServer
from .set_ups import SetUp, Workshop
from .steady_state import Lengths, Steady, closed, lone, steady
from .steptime import VllmTimes
from .target_load import CERTAIN, Judged, Limits, Target, Trial, attempt, judge

COARSE_REQUESTS, FINE_REQUESTS = 150, 300  # minimum number of measured requests per simulation of one group
DRAWS = 12  # draws of the constants for one probability
FINE_MOST = 14  # maximum number of set-ups simulated with draws
SLACK = 1.25  # a set-up is simulated only if the closed form is within this factor of every limit
MOST_TRIALS = 4  # how many numbers of replicas are simulated per set-up, at most
FULL = 0.97  # utilization above which a server is assumed not to keep up
ALIKE = 0.05  # smaller differences of probabilities cannot be resolved with DRAWS draws
MOST_SPARE, SPARE_STEPS = 8.0, 8  # maximum of Search.spare, and bisections to find it
BUSY = 0.75  # utilization by the closed form from which on the capacity is simulated


@dataclass
class Candidate:
    """A set-up that fits, with the result of each stage. replicas: number needed; None: no allowed number meets
    the level (`misses` says why)."""

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
        """Cost of a million output tokens at the target load."""
        if trial is None or not trial.output_tok_per_s:
            return None
        return self.cost_per_hour / 3600 / trial.output_tok_per_s * 1e6


@dataclass
class Search:
    """One search. where: the parameter file, for error messages."""

    workshop: Workshop
    space: SearchSpace
    target: Target
    limits: Limits
    where: str
    lengths: Lengths | None = None  # the target's mean lengths, if they are known already
    load: Load = field(init=False)
    at: Lengths = field(init=False)  # mean lengths of the target's requests
    dropped: Counter[tuple[str, Refusal]] = field(default_factory=Counter)  # by card and reason
    simulated: int = 0

    def __post_init__(self) -> None:
        self.load = self.workshop.load
        self.at = self.lengths or self.target.lengths(self.load)

    # --- what fits --------------------------------------------------------------------------------------------------

    def fitting(self, all_set_ups: Sequence[SetUp]) -> list[Candidate]:
        """The set-ups that hold the model and its requests. Raises ServebookError with the most common reason if there
        is none."""
        found = []
        for s in all_set_ups:
            server = self.workshop.limits(s, *self.target.longest())
            if isinstance(server, Refusal):
                self.dropped[s.gpu.name, server] += 1
                continue
            times = self.workshop.times(s, server)
            assert isinstance(times, VllmTimes)
            found.append(Candidate(s, server, times))
        if not found:
            reason = "nothing to search"
            if self.dropped:
                [((card, refusal), _)] = self.dropped.most_common(1)
                reason = f"{card}: {refusal.text}"
            fix = "Raise --max-gpus, add a card with --gpu, allow fp8 weights, or shorten the requests"
            raise ServebookError(f"no card holds the model and its requests ({reason})", self.where, fix)
        return found

    # --- first stage: closed form -----------------------------------------------------------------------------------

    def most_replicas(self, c: Candidate) -> int:
        return self.space.max_gpus // c.set_up.gpus

    def estimated(self, c: Candidate, replicas: int) -> Steady:
        """The closed form for one group with its share of the load."""
        groups = replicas * c.server.layout.groups
        if self.target.users is not None:
            return closed(c.server, c.times, self.at, self.target.users / groups)
        return steady(c.server, c.times, self.at, (self.target.mean_rate_per_s() or 0.0) / groups)

    def estimate_replicas(self, c: Candidate) -> None:
        """Set the smallest number of replicas that may meet the level by the closed form, or the reason if none may."""
        alone = lone(c.times, self.at)
        limit = self.limits.get("tpot_s", (math.inf, 0))[0]
        most = self.most_replicas(c)
        if alone > SLACK * limit:
            c.misses = f"TPOT is {1e3 * alone:.1f} ms even at C = 1"
            c.estimate = self.estimated(c, most)
            return
        low, high = 0, most
        ends = self.target.ends(most * c.server.layout.groups)
        if not self._may_do(self.estimated(c, most)) and not ends:
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

    # --- second stage: one simulation -------------------------------------------------------------------------------

    def simulate_once(self, c: Candidate) -> None:
        """Simulate a set-up with more or fewer replicas until the smallest number that meets the level is known."""
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
        """The number of replicas to try after n; None when the smallest is known or none is left."""
        met = [k for k, t in tried.items() if t.worst <= 1]
        missed = max((k for k, t in tried.items() if t.worst > 1 and k < min(met, default=most + 1)), default=0)
        if not met:
            more = min(most, max(n + 1, math.ceil(n * min(tried[n].worst, 1.5))))
            return more if more > n else None
        least = min(met)
        if least - missed <= 1:
            return None
        fewer = (missed + least) // 2 if missed else math.ceil(least * max(tried[least].worst, 0.5))
        return min(max(fewer, missed + 1), least - 1)

    def attempted(self, c: Candidate, replicas: int) -> Trial | None:
        """The result of one simulation with `replicas` replicas; None if a request does not fit into the KV pool."""
        self.simulated += 1
        estimate = self.estimated(c, replicas)
        requests = max(COARSE_REQUESTS, min(4 * COARSE_REQUESTS, round(estimate.running)))
        return attempt(
            c.server, c.times, self.target, replicas, self.limits, load=self.load, running=estimate.running,
            requests=requests,
        )  # fmt: skip

    # --- third stage: simulations with draws of the constants -------------------------------------------------------

    def simulate_draws(self, c: Candidate, replicas: int) -> Judged | None:
        """The result of simulations with draws of the constants; None if the set-up cannot keep up with the load, or a
        request does not fit into the KV pool."""
        if self.falls_behind(c, replicas):
            return None
        estimate = self.estimated(c, replicas)
        f = self.workshop.forecaster(c.set_up, c.server, DRAWS)
        requests = max(FINE_REQUESTS, min(2 * FINE_REQUESTS, round(estimate.running)))
        return judge(f, self.target, replicas, self.limits, running=estimate.running, requests=requests)

    def falls_behind(self, c: Candidate, replicas: int) -> bool:
        """Whether the arrival rate exceeds FULL times the simulated capacity. It is simulated only from BUSY on."""
        rate = self.target.rate_per_s
        if rate is None or self.estimated(c, replicas).utilization < BUSY:
            return False
        return rate > FULL * self.carries_per_s(c, replicas)

    def carries_per_s(self, c: Candidate, replicas: int) -> float:
        """Maximum requests/s of `replicas` replicas, simulated."""
        scenario = self.target.scenario(c.server, replicas, self.load, COARSE_REQUESTS)
        tokens = self.target.prompt_tokens, self.target.output_tokens
        return replicas * capacity_per_s(c.server, c.times, *tokens, most=128, like=scenario.spec)

    def best(self, ranked: Sequence[Candidate]) -> tuple[Candidate, int]:
        """(the cheapest set-up that reaches the confidence, else the most probable; how many were judged).

        Goes through the costs in ascending order. At each cost it judges, of each kind, the set-up with the most room;
        those with the model's own precisions come first. Of those that reach the confidence it returns the preferred
        one (see _preferred). Those that do not reach it are tried again with one replica more."""
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
                c.judged, looked = self.simulate_draws(c, c.replicas), looked + 1
                if c.judged is not None and c.judged.probability >= self.space.confidence:
                    reached.append(c)
            if reached:
                return max(reached, key=self._preferred), looked
            waiting = [c for c in waiting if c not in here] + [c for c in kinds.values() if self._one_more(c)]
        seen = [c for c in ranked if c.judged is not None]
        return (max(seen, key=lambda c: c.judged.probability if c.judged else 0) if seen else ranked[0]), looked

    def _preferred(self, c: Candidate) -> tuple[float, ...]:
        """Among set-ups of one cost: the model's own precisions, then the more probable, as far as the draws can tell,
        then more room, then the simpler one (fewer GPUs per replica, no expert parallelism)."""
        sure, layout = c.judged.probability if c.judged else 0.0, c.set_up.layout
        rounded = round(min(sure, CERTAIN) / ALIKE), round(self.spare(c), 1)
        return (-_changes(c.set_up), *rounded, -layout.gpus, -layout.expert, sure)

    def spare(self, c: Candidate) -> float:
        """Multiple of the target load that the set-up carries by the closed form, from 1 to MOST_SPARE."""
        low, high = 1.0, MOST_SPARE
        for _ in range(SPARE_STEPS):
            middle = math.sqrt(low * high)
            other = Search(self.workshop, self.space, self.target.times(middle), self.limits, "", self.at)
            low, high = (middle, high) if other._may_do(other.estimated(c, c.replicas or 1)) else (low, middle)
        return low

    def _one_more(self, c: Candidate) -> bool:
        """Add a replica if enough cards are allowed; return whether it was added."""
        if c.replicas is None or c.replicas >= self.most_replicas(c):
            return False
        c.replicas += 1
        return True

    @staticmethod
    def _order(c: Candidate) -> tuple[Any, ...]:
        worst = round(c.trial.worst, 2) if c.trial and c.trial.replicas == c.replicas else 1.0
        return (round(c.cost_per_hour, 6), worst, _changes(c.set_up), c.set_up.name)


def _changes(s: SetUp) -> int:
    """Number of precisions (weights, KV cache) that differ from the model's own."""
    return (s.quantization is not None) + (s.kv_cache_dtype != "auto")
