"""Finds the cheapest set-up that meets a service level at a load, by searching over set-ups and numbers of replicas.

Three stages, each on fewer set-ups. First, a closed form (steady_state) for all that fit gives the number of replicas
and the cost. Second, each set-up that may still be among the cheapest is simulated once, with more or fewer replicas
until it meets the level with the fewest. Third, the cheapest are simulated once per draw of the constants, which gives
the probability of meeting the level. The answer is the cheapest set-up whose probability reaches the requested
confidence; at equal cost, the most probable one, and of those that are almost certain the one that carries more load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import ServebookError
from ..config.params import RunParams, VllmEngine
from ..config.search_space import SearchSpace
from ..model.shape import ModelShape
from . import server_flags
from .calibration import Calibration
from .choice_search import Candidate, Search
from .refusal import Refusal
from .set_ups import PricedGpu, SetUp, Workshop, set_ups
from .target_load import Limits, Target, Trial

COARSE_MOST = 360  # maximum number of set-ups that are simulated once
REACH = 1.6  # a set-up whose cost by the closed form is more than this times the cheapest's is not simulated
KINDS, A_CARD = 6, 3  # maximum number of rivals in the answer, and of one card where there are several


@dataclass(frozen=True)
class Choice:
    """The answer. rivals: the best of each other kind of set-up, cheapest first. dropped: {why set-ups do not fit:
    number of them}. judged: number of set-ups that were simulated with draws of the constants."""

    chosen: Candidate
    rivals: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    dropped: Mapping[tuple[str, Refusal], int]
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


def choose(
    params: RunParams,
    cards: Sequence[PricedGpu],
    shapes: Mapping[tuple[str | None, str], ModelShape],
    *,
    where: str,
    space: SearchSpace | None = None,
    calibrated: Mapping[tuple[Any, ...], Calibration] | None = None,
) -> Choice:
    """The cheapest set-up that meets the run's slo at its target load. Deterministic for a given load.seed.

    shapes: {(quantization, KV cache type): model}. calibrated: {kind of set-up (SetUp.kind): fitted constants}. Raises
    ServebookError for a run without a service level or a target, for a model that no card holds, and for a level that
    no set-up meets (it names the nearest one).
    """
    limits = params.slo.limits
    if not limits:
        raise ServebookError("no service level is given", f"{where}, slo", "Set slo: {ttft_s: 0.5, tpot_s: 0.05}")
    _reject_searched_flags(params, where)
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
        search.estimate_replicas(c)
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


def _reject_searched_flags(params: RunParams, where: str) -> None:
    """Raises ServebookError if extra_args sets what is searched: on vLLM's command line they override the set-up."""
    for engine_name, engine in params.engines.items():
        if not isinstance(engine, VllmEngine):
            continue
        for flag, _ in server_flags.pairs(engine.extra_args):
            if flag in server_flags.SEARCHED:
                fix = "Remove it, and list the values to search under choose:"
                raise ServebookError(
                    f"the search itself sets {flag}", f"{where}, engines.{engine_name}.extra_args", fix
                )


def _simulate(search: Search, found: Sequence[Candidate]) -> None:
    """The second stage: simulate set-ups, cheapest first, until the rest cost too much to win or to be a rival."""
    queue = sorted((c for c in found if c.replicas is not None), key=Search._order)
    best = math.inf
    for c in queue[:COARSE_MOST]:
        if c.cost_per_hour > REACH * best:
            break
        search.simulate_once(c)
        if c.replicas is not None:
            best = min(best, c.cost_per_hour)


def _rivals(search: Search, best: Candidate, met: Sequence[Candidate]) -> tuple[list[Candidate], int]:
    """(the best of every other kind, cheapest first; how many were judged here). Leaves out set-ups that cannot keep
    up with the load. The best of a kind reaches the confidence if one was found that does. A card has at most A_CARD
    of them."""

    def unsure(c: Candidate) -> bool:
        return c.judged is None or c.judged.probability < search.space.confidence

    kinds: dict[Any, Candidate] = {}
    cards: Counter[str] = Counter()
    most = A_CARD if len({c.set_up.gpu.name for c in met}) > 1 else KINDS
    for c in sorted(met, key=lambda c: (unsure(c), *Search._order(c))):
        if c.set_up.kind in kinds or cards[c.set_up.gpu.name] == most:
            continue
        if c.set_up.kind != best.set_up.kind and not (c.judged is None and search.falls_behind(c, c.replicas or 1)):
            kinds[c.set_up.kind] = c
            cards[c.set_up.gpu.name] += 1
            if len(kinds) == KINDS:
                break
    judged = 0
    for c in kinds.values():
        if c.judged is None or c.judged.replicas != c.replicas:
            c.judged, judged = search.simulate_draws(c, c.replicas or 1), judged + 1
    return sorted((c for c in kinds.values() if c.judged is not None), key=lambda c: c.cost_per_hour), judged


def _nearest(search: Search, found: Sequence[Candidate]) -> tuple[Candidate, Trial | None]:
    """The set-up nearest to the level, with its simulation (on all allowed cards if no set-up was simulated yet)."""
    tried = [(c, c.trial) for c in found if c.trial is not None]
    if tried:
        return min(tried, key=lambda pair: (pair[1].worst, pair[0].set_up.name))
    near = min(found, key=_distance)
    return near, search.attempted(near, max(1, search.most_replicas(near)))


def _distance(c: Candidate) -> tuple[float, float, str]:
    """Sort key for how far a set-up misses the level by the closed form: first its utilization, then its TPOT."""
    e = c.estimate
    return (max(e.utilization, 1.0), e.tpot_s, c.set_up.name) if e else (math.inf, math.inf, c.set_up.name)


def _nothing_meets(search: Search, found: Sequence[Candidate]) -> ServebookError:
    """The error that no set-up meets the level; it names the nearest one and the limits that it misses."""
    near, trial = _nearest(search, found)
    replicas = trial.replicas if trial else max(1, search.most_replicas(near))
    lacks = [
        f"{name(m)} p{p:g} is {trial.values[m]:.3g} s, limit {limit:g} s"
        for m, (limit, p) in search.limits.items() if trial and 1 < trial.ratios[m] < math.inf
    ]  # fmt: skip
    rate = search.target.rate_per_s
    if rate and (most := search.carries_per_s(near, replicas)) < rate:
        lacks = [f"it serves {most:.3g} of {rate:g} requests/s"]  # its latencies grow with the length of the run
    cards = replicas * near.set_up.gpus
    what = f"no set-up meets the service level; the nearest is {replicas_of(replicas, near.set_up)}"
    fix = "Relax that limit, lower the target load, or allow more GPUs (--max-gpus) or other cards (--gpu)"
    return ServebookError(
        f"{what} on {cards} GPUs: {', '.join(lacks) or 'it cannot keep up'}", f"{search.where}, slo", fix
    )


def _too_unsure(search: Search, best: Candidate) -> ServebookError:
    sure = best.judged.probability if best.judged else 0.0
    what = (
        f"no set-up meets the service level with a probability of {search.space.confidence:.0%}; the nearest, "
        f"{replicas_of(best.replicas or 1, best.set_up)}, reaches {percent(sure)}"
    )
    fix = "Lower choose.confidence, relax a limit, or allow more GPUs (--max-gpus) or other cards (--gpu)"
    return ServebookError(what, f"{search.where}, slo", fix)


def replicas_of(count: int, s: SetUp) -> str:
    """A number of replicas of a set-up, as text."""
    return f"{count} replica{'s' * (count > 1)} of {s.name}"


def percent(probability: float) -> str:
    """A probability as text; never 0 or 100 %, since predictions are not certain."""
    if probability > 0.99:
        return "over 99%"
    return "under 1%" if probability < 0.01 else f"{probability:.0%}"


def name(latency: str) -> str:
    """A latency's display name."""
    return {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}[latency]
