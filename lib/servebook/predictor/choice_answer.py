"""The details of a choice: its bottleneck, its headroom, what would make each rival win; as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.predicted_point import CAUSES, Latency
from . import explain
from .choice import Choice, name
from .choice_search import Candidate
from .refusal import Refusal, with_ranges
from .target_load import Target, attempt

ROOM_MOST, ROOM_STEPS = 8.0, 6  # largest multiple of the target load to try, and number of bisections
HEADROOM_REQUESTS = 300
# {regime of a cause in explain.py: the resource that bounds it}
BOUND_BY = {"memory": "bandwidth", "compute": "compute", "mixed step": "compute", "host": "host", "links": "link"}
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
KV_FULL = 0.85  # fraction of the KV pool in use above which the pool is the bottleneck


@dataclass(frozen=True)
class Binding:
    """The bottleneck. latency: the one with the tightest limit; by: the resource that takes most of its time; shares:
    {resource: share of that time}; kv_share: share of the KV pool in use."""

    latency: str
    by: str
    shares: dict[str, float]
    kv_share: float


def binding(choice: Choice, c: Candidate) -> Binding:
    """The bottleneck of a set-up, from one more simulation with its steps logged."""
    assert c.replicas is not None and c.estimate is not None
    load = choice.workshop.load.model_copy(update={"warmup_requests": max(10, round(c.estimate.running))})
    scenario = choice.target.scenario(c.server, c.replicas, load, HEADROOM_REQUESTS)
    result = scenario.simulate(c.times, load.seed, max(HEADROOM_REQUESTS, 2 * (scenario.spec.clients or 1)), log=True)
    outcome = scenario.summarize(result, c.times)
    parts = explain.breakdown(scenario, c.times, outcome, result)
    tightest = c.judged.tightest if c.judged else next(iter(choice.limits))
    metric: Latency = "ttft_s" if tightest == "ttft_s" else "tpot_s"
    seconds: dict[str, float] = {}
    for cause, spent in parts[metric].items():
        what = BOUND_BY.get(CAUSES[cause][1], "queue")
        seconds[what] = seconds.get(what, 0.0) + spent
    total = sum(seconds.values()) or 1.0
    shares = {what: value / total for what, value in seconds.items() if value > 0.005 * total}
    at = choice.target.lengths(load)
    kv = result.running_mean * at.context / max(c.server.config.kv_blocks * c.server.config.block_size, 1)
    by = max(shares, key=lambda what: shares[what]) if shares else "host"
    if kv > KV_FULL or result.preemptions:
        by = "KV"
    elif by == "queue":  # the bottleneck of the running requests causes the queue
        rest = {what: share for what, share in shares.items() if what != "queue"}
        by = max(rest, key=lambda what: rest[what]) if rest else "host"
    return Binding(tightest, by, shares, min(kv, 1.0))


def room(choice: Choice, c: Candidate) -> float:
    """The largest multiple of the target load that the same cards carry within the level, with the most probable
    constants; to a few percent, at most ROOM_MOST."""
    low, high = 1.0, ROOM_MOST
    if not _carries(choice, c, choice.target):
        return 1.0  # the draws of the constants meet it on average, the most probable constants just miss it
    if _carries(choice, c, choice.target.times(ROOM_MOST)):
        return ROOM_MOST
    for _ in range(ROOM_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _carries(choice, c, choice.target.times(middle)) else (low, middle)
    return low


def more(room: float) -> str:
    """How much more load than the target, in words. room: as room() returns it."""
    return f"{'at least ' if room >= ROOM_MOST else ''}{room - 1:.0%}"


def _carries(choice: Choice, c: Candidate, target: Target) -> bool:
    assert c.replicas is not None
    search = choice.search_at(target)
    estimate = search.estimated(c, c.replicas)
    if target.users is None and estimate.utilization > 1 and not target.ends(c.replicas * c.server.layout.groups):
        return False
    if search.falls_behind(c, c.replicas):
        return False
    found = attempt(
        c.server, c.times, target, c.replicas, choice.limits, load=choice.workshop.load, running=estimate.running,
        requests=max(HEADROOM_REQUESTS, round(estimate.running)),
    )  # fmt: skip
    return found is not None and found.worst <= 1


def wins_if(choice: Choice, c: Candidate, own_room: float) -> str:
    """What would have to change for a rival to win, as text. own_room: the room of the chosen set-up."""
    best, changes = choice.chosen, []
    if c.cost_per_hour > best.cost_per_hour * (1 + 1e-9):
        price = best.cost_per_hour / max(c.cards, 1)
        change = price / c.set_up.card.price_per_hour - 1
        changes.append(f"{c.set_up.gpu.name} below {price:.2f} {choice.currency}/h a card ({change:+.0%})")
    if c.judged and c.judged.probability < choice.space.confidence:
        tight = c.judged.tightest
        limit, percentile = choice.limits[tight]
        reach = c.judged.reach(tight, choice.space.confidence)
        if reach > limit:
            changes.append(f"{name(tight)} p{percentile:g} within {reach:.3g} s instead of {limit:g} s")
        else:
            changes.append(f"a confidence of {c.judged.probability:.0%}")
    if not changes:
        theirs = room(choice, c)
        if theirs > own_room * 1.02:
            changes.append(
                f"a load more than {own_room - 1:.0%} above the target: it carries {more(theirs)} more at this cost"
            )
        else:
            changes.append(f"other prices only: it costs the same and carries {more(theirs)} more load")
    return " and ".join(changes)


def answer(choice: Choice) -> dict[str, Any]:
    """The whole answer as JSON: target, level, the chosen set-up with its room and bottleneck, rivals, all simulated
    set-ups, and counts of those dropped by reason."""
    best = choice.chosen
    own_room = room(choice, best)
    return {
        "target": choice.target.text(),
        "level": {m: {"limit_s": limit, "percentile": p} for m, (limit, p) in choice.limits.items()},
        "confidence": choice.space.confidence, "max_gpus": choice.space.max_gpus, "currency": choice.currency,
        "seed": choice.target.seed, "notes": list(best.server.notes),
        "searched": choice.searched, "fit": len(choice.candidates), "simulated": choice.simulated,
        "judged": choice.judged,
        "chosen": row(choice, best) | {"room": own_room, "binds": _binds(choice, best)},
        "rivals": [row(choice, c) | {"wins_if": wins_if(choice, c, own_room)} for c in choice.rivals],
        "set_ups": [row(choice, c) for c in choice.candidates if c.trial is not None],
        "dropped": {f"{card}: {why.text}": n for (card, why), n in choice.dropped.items()},
        "not_simulated": sum(c.trial is None for c in choice.candidates),
    }  # fmt: skip


def reasons(dropped: Mapping[tuple[str, Refusal], int]) -> list[tuple[str, list[str], int]]:
    """[(why set-ups do not fit, on which cards, how many)], most common first. Reasons that differ only in their
    figures become one, with the smallest and the largest figure."""
    found: dict[str, list[tuple[str, Refusal, int]]] = {}
    for (card, refusal), count in dropped.items():
        found.setdefault(refusal.reason, []).append((card, refusal, count))
    rows = []
    for same in found.values():
        cards = list(dict.fromkeys(card for card, _, _ in same))
        rows.append((with_ranges([refusal for _, refusal, _ in same]), cards, sum(count for _, _, count in same)))
    return sorted(rows, key=lambda row: -row[2])


def _binds(choice: Choice, c: Candidate) -> dict[str, Any]:
    found = binding(choice, c)
    return {"latency": found.latency, "by": found.by, "shares": found.shares, "kv_share": found.kv_share}


def row(choice: Choice, c: Candidate) -> dict[str, Any]:
    """One set-up at the target load, as JSON."""
    trial, judged = c.trial, c.judged
    tokens = trial.output_tok_per_s if trial else None
    cards = c.cards or (trial.replicas * c.set_up.gpus if trial else 0)
    return {
        **c.set_up.as_dict(), "replicas": c.replicas, "cards": cards,
        "cost_per_hour": c.cost_per_hour if c.replicas else cards * c.set_up.card.price_per_hour,
        "cost_per_million_output_tokens": c.cost_per_million(trial) if c.replicas else None,
        "probability": judged.probability if judged else None,
        "probability_by_limit": judged.by_limit if judged else None,
        "values": judged.values if judged else {m: {"value": v} for m, v in trial.values.items()} if trial else {},
        "user_tok_per_s": 1 / trial.tpot_mean_s if trial and trial.tpot_mean_s else None,
        "output_tok_per_s": tokens, "tok_per_s_per_gpu": tokens / cards if tokens and cards else None,
        "meets": bool(c.replicas and trial and trial.worst <= 1), "misses": c.misses or None,
        "learned": choice.workshop.learned(c.set_up),
    }  # fmt: skip
