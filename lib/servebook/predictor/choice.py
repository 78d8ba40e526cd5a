"""Which set-up meets a service level at a load for the least money: a search over set-ups and numbers of replicas.

Three looks, each at fewer set-ups. A closed form (steady_state) of all that fit: how many replicas, what they cost. One
simulation of each that this does not put far behind, with the number of replicas turned until the level is met. Of the
cheapest a simulation for each of several draws of the constants, which give the probability that the level is met. The
answer is the cheapest whose probability reaches the confidence asked for; at one cost the most probable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import ServebookError
from ..config.params import Load, RunParams
from ..config.search_space import SearchSpace
from ..model.shape import ModelShape
from .calibration import Calibration
from .scenario import capacity_per_s
from .server_limits import PredictedServer
from .set_ups import PricedGpu, SetUp, Workshop, set_ups
from .steady_state import Lengths, Steady, closed, lone, steady
from .steptime import VllmTimes
from .target_load import Judged, Limits, Target, Trial, attempt, judge

COARSE_REQUESTS, FINE_REQUESTS = 150, 300  # of one group, to measure in a simulation
DRAWS = 12  # of the constants, for a probability
COARSE_MOST, FINE_MOST = 360, 14  # set-ups that are simulated once, and with draws
REACH = 1.6  # a set-up whose cost by the closed form is more than this times the cheapest's is not simulated
SLACK = 1.25  # by which the closed form may be over a limit and the set-up still be simulated
MOST_TRIALS = 4  # numbers of replicas that one set-up is simulated with
FULL = 0.97  # of what a server can serve by the closed form, beyond which it is taken to fall behind
BUSY = 0.75  # from here on the simulated capacity is asked whether it does
KINDS = 6  # rivals that are named


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


@dataclass(frozen=True)
class Choice:
    """The answer. rivals: the best of each other kind of set-up, nearest first; dropped: why set-ups do not fit, with
    how many each reason took."""

    chosen: Candidate
    rivals: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    dropped: Mapping[str, int]
    target: Target
    limits: Limits
    space: SearchSpace
    workshop: Workshop
    searched: int
    simulated: int
    judged: int

    @property
    def currency(self) -> str:
        return self.workshop.params.hardware.currency

    def search_at(self, target: Target) -> Search:
        """A search of the same set-ups at another load."""
        return Search(self.workshop, self.space, target, self.limits, "")


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
            found = self._attempt(c, n)
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

    def _attempt(self, c: Candidate, replicas: int) -> Trial | None:
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
        scenario = self.target.scenario(c.server, replicas, self.load, COARSE_REQUESTS)
        tokens = self.target.prompt_tokens, self.target.output_tokens
        most = capacity_per_s(c.server, c.times, *tokens, most=128, like=scenario.spec)
        return rate / replicas > FULL * most

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


def choose(
    params: RunParams,
    cards: Sequence[PricedGpu],
    shapes: Mapping[tuple[str | None, str], ModelShape],
    *,
    where: str,
    space: SearchSpace | None = None,
    calibrated: Mapping[tuple[Any, ...], Calibration] | None = None,
) -> Choice:
    """Search the set-ups of a run for the cheapest that meets its slo at its target load.

    shapes: the model by (quantization, KV cache type). calibrated: constants learned on a kind of set-up (SetUp.kind).
    The same answer for the same seed (load.seed). Raises ServebookError, one line, for a run without a level or a
    target, a model that no card holds, and a level that nothing meets, with the nearest.
    """
    limits = params.slo.limits
    if not limits:
        raise ServebookError("no service level to meet", f"{where}, slo", "Set slo: {ttft_s: 0.5, tpot_s: 0.05}")
    target, space = Target.of(params, where), space or params.choose or SearchSpace()
    load = params.load.model_copy(update={"max_seconds": 1e6})
    search = Search(Workshop(params, shapes, load, calibrated or {}), space, target, limits, where)
    plain = shapes[params.model.quantization, params.model.kv_cache_dtype]
    longest = sum(target.longest())
    if longest > plain.max_context_tokens:
        what = f"requests of up to {longest:,} tokens exceed {plain.name}'s context of {plain.max_context_tokens:,}"
        raise ServebookError(what, where, "Give the workload's lengths bounds, as in lognormal:800,600,32,4000")
    every = list(set_ups(params, space, cards, plain, longest, target.repeats))
    found = search.fitting(every)
    for c in found:
        search.first_look(c)
    _simulate(search, found)
    met = [c for c in found if c.replicas is not None and c.trial is not None and c.trial.worst <= 1]
    if not met:
        raise _nothing_meets(search, found)
    best, judged = search.best(met)
    if best.judged is None or best.judged.probability < space.confidence:
        raise _too_unsure(search, best)
    rivals, more = _rivals(search, best, met)
    return Choice(
        best, tuple(rivals), tuple(found), dict(search.dropped), target, limits, space, search.workshop, len(every),
        search.simulated, judged + more,
    )  # fmt: skip


def _simulate(search: Search, found: Sequence[Candidate]) -> None:
    """The second look, cheapest first, as far as a set-up may still win or be a near rival."""
    queue = sorted((c for c in found if c.replicas is not None), key=Search._order)
    best = math.inf
    for c in queue[:COARSE_MOST]:
        if c.cost_per_hour > REACH * best:
            break
        search.second_look(c)
        if c.replicas is not None:
            best = min(best, c.cost_per_hour)


def _rivals(search: Search, best: Candidate, met: Sequence[Candidate]) -> tuple[list[Candidate], int]:
    """The best of every other kind, cheapest first, each judged; none that falls behind."""
    kinds: dict[Any, Candidate] = {}
    for c in sorted(met, key=Search._order):
        if c.set_up.kind != best.set_up.kind and not (c.judged is None and search.falls_behind(c, c.replicas or 1)):
            kinds.setdefault(c.set_up.kind, c)
            if len(kinds) == KINDS:
                break
    judged = 0
    for c in kinds.values():
        if c.judged is None or c.judged.replicas != c.replicas:
            c.judged, judged = search.third_look(c, c.replicas or 1), judged + 1
    return [c for c in kinds.values() if c.judged is not None], judged


def _nearest(found: Sequence[Candidate]) -> Candidate | None:
    tried = [c for c in found if c.trial is not None]
    return min(tried, key=lambda c: c.trial.worst if c.trial else math.inf) if tried else None


def _nothing_meets(search: Search, found: Sequence[Candidate]) -> ServebookError:
    """One line: nothing meets the level, and the set-up that comes nearest. Where the closed form ruled all out, the
    nearest of them is simulated."""
    near = _nearest(found)
    if near is None:
        near = min(found, key=lambda c: c.estimate.tpot_s if c.estimate else math.inf)
        near.trial = search._attempt(near, max(1, search.most_replicas(near)))
    if near.trial is None:
        return ServebookError("no set-up meets the service level", f"{search.where}, slo", "Relax a limit")
    said = [
        f"{name(m)} p{p:g} {near.trial.values[m]:.3g} s of {limit:g} s"
        for m, (limit, p) in search.limits.items() if near.trial.ratios[m] > 1
    ]  # fmt: skip
    cards = near.trial.replicas * near.set_up.gpus
    what = f"no set-up meets the service level; the nearest is {replicas_of(near.trial.replicas, near.set_up)}"
    fix = "Relax that limit, lower the target load, or allow more with --max-gpus or --gpu"
    return ServebookError(f"{what} on {cards} GPUs: {', '.join(said) or 'falls behind'}", f"{search.where}, slo", fix)


def _too_unsure(search: Search, best: Candidate) -> ServebookError:
    sure = best.judged.probability if best.judged else 0.0
    what = (
        f"no set-up meets the service level with a probability of {search.space.confidence:.0%}; the nearest, "
        f"{replicas_of(best.replicas or 1, best.set_up)}, does with {percent(sure)}"
    )
    fix = "Lower choose.confidence, relax a limit, or allow more with --max-gpus or --gpu"
    return ServebookError(what, f"{search.where}, slo", fix)


def replicas_of(count: int, s: SetUp) -> str:
    """So many of a set-up, in words."""
    return f"{count} replica{'s' * (count > 1)} of {s.name}"


def percent(probability: float) -> str:
    """A probability in words: nothing predicted is certain."""
    if probability > 0.99:
        return "over 99%"
    return "under 1%" if probability < 0.01 else f"{probability:.0%}"


def name(latency: str) -> str:
    """A latency as people write it."""
    return {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}[latency]
