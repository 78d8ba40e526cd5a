"""Breakdown of a predicted time into seconds by cause, and a waterfall from the roofline bound to the prediction."""

from __future__ import annotations

from collections.abc import Iterator

from ..common.predicted_point import CAUSES, ROOFLINE, Latency, Parts
from .scenario import Outcome, Scenario
from .server_limits import Times
from .simulation_result import LogEntry, Result
from .steptime import NaiveTimes, VllmTimes

PART_FLOOR_S = 1e-9  # a smaller part is a rounding error


def breakdown(scenario: Scenario, times: Times, outcome: Outcome, result: Result) -> dict[Latency, Parts]:
    """{"tpot_s": parts, "ttft_s": parts}; each sums to the outcome's mean. result: of one seed, with log=True."""
    if isinstance(times, NaiveTimes):
        parts = _naive(scenario, times, result)
    else:
        parts = {"tpot_s": _per_token(times, result), "ttft_s": _first_token(times, result)}
    seed = scenario.summarize(result)
    for metric in ("tpot_s", "ttft_s"):
        # the log and the requests differ at the edges of the window, and a late first event shortens the part of the
        # steps that a client observes: the parts are scaled to the mean. Overlapping steps can make a part negative:
        # it is removed
        own = parts[metric] = {k: v for k, v in parts[metric].items() if v > PART_FLOOR_S}
        total, mean = getattr(seed, metric), getattr(outcome, metric)
        explained = sum(own.values())
        if not explained > 0:
            continue
        if explained < 0.97 * total:
            own["waiting_s"] = own.get("waiting_s", 0.0) + total - explained
            explained = total
        parts[metric] = {k: v * mean / explained for k, v in own.items()}
    return parts


def _steps(times: VllmTimes, result: Result) -> Iterator[tuple[LogEntry, Parts]]:
    """The steps with their seconds by cause. Time beyond the GPU's counts as "launch", up to the host's time for
    preparing and launching the step; the rest of that host time overlapped with the step before."""
    before = 0.0
    for e in result.log:
        parts = times.parts(e.decodes, e.kv_tokens, [c[1:] for c in e.chunks])
        host = times.prepare(e.decodes + len(e.chunks)) + (
            times.launch(e.decodes + sum(c[1] for c in e.chunks), True) if e.chunks else 0.0
        )
        parts["power_cap"] = parts.get("power_cap", 0.0) + e.capped_s
        late = (e.end_s - before) / e.steps - sum(parts.values())
        parts["launch"] = parts.get("launch", 0.0) + min(max(late, 0.0), host)
        before = e.end_s
        yield e, parts


def _per_token(times: VllmTimes, result: Result) -> Parts:
    """Seconds per output token by cause: the mean over the steps, weighted by their decoded tokens."""
    total: Parts = {}
    tokens = 0
    start, end = result.window
    for e, parts in _steps(times, result):
        if not e.decodes or not start <= e.end_s <= end:
            continue
        weight = e.steps * e.decodes
        tokens += weight
        for name, seconds in parts.items():
            total[name] = total.get(name, 0.0) + weight * seconds
    renamed = {"prefill": "prefill_of_others"}
    return {f"{renamed.get(n, n)}_s": v / max(tokens, 1) for n, v in total.items()}


def _first_token(times: VllmTimes, result: Result) -> Parts:
    """Seconds to the first token by cause: front end, queue, and the steps that computed its prompt."""
    measured = {r.id for r in result.requests}
    if not measured:
        return {}
    total = {
        "front_end_s": sum(r.ready_s - r.sent_s + times.first_event(r.prompt_tokens) for r in result.requests),
        "queue_s": sum(r.scheduled_s - r.ready_s for r in result.requests),
    }

    def add(name: str, seconds: float) -> None:
        total[name] = total.get(name, 0.0) + seconds

    inside = 0.0
    for e, parts in _steps(times, result):
        mine = [c for c in e.chunks if c[0] in measured]
        if not mine:
            continue
        new = sum(c[1] for c in e.chunks)
        for c in mine:
            share = c[1] / new
            add("own_prefill_s", parts["prefill"] * share)
            add("prefill_of_others_s", parts["prefill"] * (1 - share))
            add("weights_s", parts["weights"])
            add("experts_s", parts.get("experts", 0.0))
            add("decodes_of_others_s", parts["compute"] + parts["kv_reads"] + parts.get("states", 0.0))
            add("mixed_attention_s", parts["mixed_attention"])
            add("host_s", parts["host"])
            add("launch_s", parts["launch"])
            add("power_cap_s", parts["power_cap"])
            add("links_s", parts.get("links", 0.0))
            add("replicas_s", parts.get("replicas", 0.0))
            inside += sum(parts.values())
    # time between scheduling and first token outside these steps also counts as queue: other prompts may take the whole
    # token budget between two chunks, and a preempted prompt is computed twice
    late = sum(times.first_event(r.prompt_tokens) for r in result.requests)
    add("queue_s", sum(r.first_s - r.scheduled_s for r in result.requests) - inside - late)
    return {n: v / len(measured) for n, v in total.items()}


def _naive(scenario: Scenario, times: NaiveTimes, result: Result) -> dict[Latency, Parts]:
    prompt, output = scenario.spec.prompt_tokens, scenario.spec.output_tokens
    attention = times.prefill_attention(0, prompt)
    first = {
        "front_end_s": times.frontend(prompt),
        "queue_s": result.mean("queue_s"),
        "weights_s": times.weights_s,
        "own_prefill_s": times.weights.step_s(prompt, 1) - times.weights_s + attention,
    }
    first["host_s"] = times.prefill(prompt) - first["weights_s"] - first["own_prefill_s"]
    token = {f"{n}_s": v for n, v in times.parts(prompt, output).items()} if output > 1 else {}
    return {"tpot_s": token, "ttft_s": first}


def waterfall(times: Times, parts: Parts) -> list[tuple[str, float]]:
    """TPOT from the roofline bound to the prediction: [(label, seconds)], which sum to the prediction.

    The first entry is the time to read weights and KV at the datasheet's bandwidth. The second is the additional time
    at the bandwidth that is reached.
    """
    known, share = times.constants, times.constants["bandwidth_share"]
    shares = {
        "weights_s": share, "experts_s": share * known.get("expert_bandwidth", 1.0),
        "kv_reads_s": known.get("kv_share", share),
    }  # fmt: skip
    reads = sum(parts.get(n, 0.0) for n in shares)
    bound = sum(parts.get(n, 0.0) * reached for n, reached in shares.items())
    steps = [(ROOFLINE, bound), ("bandwidth reached", reads - bound)]
    rest = [(CAUSES[n][0], v) for n, v in parts.items() if n not in shares and v]
    return [step for step in steps if step[1] > 0] + sorted(rest, key=lambda p: -p[1])
