"""Boxes of the post: how to run it again, what the run does not show, what it took."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..charts import words
from .markup import Html, box, esc, notes_box

ONLY_TOLD = re.compile(r"--only[ =](?:0?[78]|report)")  # a session that measured nothing


def flags_line(value: Any) -> str:
    """A server's flags as they were typed."""
    return value if isinstance(value, str) else " ".join(map(str, value or []))


def reproducibility_box(
    provenance: Mapping[str, Any], params: Any = None, facts: Mapping[str, Any] | None = None
) -> Html:
    """What the run was made with: command, commit, locks, packages, machine, GPU and its state, seed, each server's
    flags. A run of several sessions gives the first in full and, folded, what differs in each later one."""
    first_record, *later = provenance.get("sessions") or [provenance]
    drawn = [s for s in later if ONLY_TOLD.search(str(s.get("command") or ""))]
    sessions = [_session(s) for s in (first_record, *later) if s not in drawn]
    own: list[tuple[str, Any]] = []
    if params is not None:
        own.append(("seed", f"{params.load.seed} (prompts, arrivals and jitter follow from it)"))
    for name, reported in (facts or {}).items():
        version = f"{reported.get('kind')} {reported['version']}" if reported.get("version") else "version not reported"
        own.append((f"server {name}", f"{version}; flags: {flags_line(reported.get('flags')) or 'none'}"))
    first = dict(sessions[0])
    title = "Reproducibility" if len(sessions) == 1 else f"Reproducibility: the first of {len(sessions)} sessions"
    parts: list[str] = [box(title, [*sessions[0], *own])]
    for k, session in enumerate(sessions[1:], 2):
        differs = [(n, v) for n, v in session if first.get(n) != v]
        if differs:
            summary = f"<summary>Session {k}, where it differs</summary>"
            parts.append(f'<details class="sb-long">{summary}{box(f"Session {k}", differs)}</details>')
    if drawn:
        times = "once" if len(drawn) == 1 else f"{len(drawn)} times"
        parts.append(f'<p class="sb-conditions">Analysed again {times} since, from the same measurements.</p>')
    return Html("".join(parts))


def _session(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """One session's record as names and values, in the order in which a reader asks."""
    given = {k: v for k, v in record.items() if v not in (None, [], {})}
    pairs: list[tuple[str, Any]] = []
    git = given.pop("git", None)
    if command := given.pop("command", None):
        pairs.append(("command", Html(f"<code>{esc(command)}</code>")))
    if git:
        state = {True: ", with local changes", False: ", nothing changed"}.get(git.get("changed"), "")
        pairs.append(("git", f"commit {git['commit']}{state}" if git.get("commit") else "not a git checkout"))
    if started := given.pop("started_utc", None):
        pairs.append(("started", started))
    gpu = given.pop("gpu", None)
    if isinstance(gpu, Mapping):
        pairs += _gpu(gpu)
    machine = given.pop("machine", None)
    if isinstance(machine, Mapping):
        words_of = {"cores": "{} cores", "memory_gib": "{} GiB"}
        pairs.append(("machine", ", ".join(words_of.get(k, "{}").format(v) for k, v in machine.items())))
    if seconds := given.pop("seconds", None):
        pairs.append(("took", words.seconds(seconds)))
    if "python" in (given.get("versions") or {}):
        given.pop("python", None)
    return pairs + _flat(given)


def _gpu(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    name = gpu.get("gpu")
    if not name or name == "not available":
        return [("gpu", "none in use")]
    count = f"{gpu['gpus']} × " if (gpu.get("gpus") or 1) > 1 else ""
    driver = f", driver {gpu['driver']}" if gpu.get("driver") else ""
    cuda = f", CUDA {gpu['cuda_driver']}" if gpu.get("cuda_driver") else ""
    state = [
        ("clock {} MHz", "sm_clock_mhz"), ("at most {} MHz", "sm_clock_max_mhz"), ("memory {} MHz", "memory_clock_mhz"),
        ("power {:.0f} W", "power_w"), ("limit {:.0f} W", "power_limit_w"), ("{} °C", "temperature_c"),
        ("{} % busy", "utilization_percent"),
    ]  # fmt: skip
    parts = [text.format(gpu[key]) for text, key in state if gpu.get(key) is not None]
    if gpu.get("memory_used_bytes") is not None and gpu.get("memory_total_bytes"):
        used, total = (words.number(gpu[f"memory_{k}_bytes"] / 2**30) for k in ("used", "total"))
        parts.append(f"{used} of {total} GiB in use")
    if gpu.get("ecc") is not None:
        parts.append(f"ECC {'on' if gpu['ecc'] else 'off'}")
    if gpu.get("processes"):
        parts.append(f"{len(gpu['processes'])} other processes")
    return [("gpu", f"{count}{name}{driver}{cuda}"), ("gpu before the run", ", ".join(parts) or "not reported")]


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in record.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            if value and all(not isinstance(v, Mapping | list) for v in value.values()):
                pairs.append((name, ", ".join(f"{k} {_word(v)}" for k, v in value.items())))
            else:
                pairs += _flat(value, f"{name}, ")
        elif isinstance(value, list):
            if value:
                pairs.append((name, "; ".join(_word(v) for v in value)))
        else:
            pairs.append((name, _word(value)))
    return pairs


def _word(value: Any) -> str:
    return "unknown" if value is None else "yes" if value is True else "no" if value is False else str(value)


def limits(params: Any) -> dict[str, str]:
    """What this run does not show, from its own parameters (RunParams or the same as a mapping), by kind."""
    run = params.model_dump(mode="json") if hasattr(params, "model_dump") else dict(params)
    model, load = run.get("model", {}), run.get("load", {})
    kinds = {s.get("kind") for s in run.get("sweeps", {}).values()}
    found = {
        "prompts": "Prompts are random token ids of one length per point: no shared prefixes, no spread of lengths, "
        "no text that would end early."
    }
    if model.get("weights") == "dummy":
        found["weights"] = (
            "Weights are random. Step times do not depend on their values; the text that comes out means nothing, "
            "and speculative decoding or early stopping would behave otherwise."
        )
    if kinds - {"arrival_rate"}:
        found["closed loop"] = (
            "Closed loop: a client sends its next request when the last one ends, so load never outruns the server. "
            "Real users do not wait for each other."
        )
    if "arrival_rate" in kinds:
        found["open loop"] = (
            "The open-loop sweep draws arrivals from a simple process without daily or bursty patterns."
        )
    if load.get("max_seconds"):
        found["time"] = (
            f"A point ends after {load['max_seconds']:g} s at most, warm-up included: slow points rest on few "
            "requests, and their p99 is close to their slowest one."
        )
    found["network"] = "One server on one machine, client and server on the same host: no network between them."
    return found


def limit(params: Any, *kinds: str) -> Html:
    """Some of `limits` as a small note for the figures that they concern; empty if none applies."""
    known = limits(params)
    text = " ".join(known[k] for k in kinds if k in known)
    return Html(f'<p class="sb-caution">{esc(text)}</p>' if text else "")


def limits_box(params: Any) -> Html:
    """All of `limits` in one box."""
    return notes_box("", limits(params).values())


def cost_box(seconds: float, price_per_hour: float, currency: str, *, extra: Sequence[tuple[str, Any]] = ()) -> Html:
    """Run time and what it cost at the hardware's price."""
    pairs: list[tuple[str, Any]] = [("run time", words.seconds(seconds))]
    if price_per_hour:
        pairs.append(("price", f"{price_per_hour:g} {currency} per hour"))
        cost = seconds / 3600 * price_per_hour
        pairs.append(("cost", f"{cost:.2f} {currency}" if cost >= 0.005 or not cost else f"under 0.01 {currency}"))
    else:
        pairs.append(("cost", "no price is set for this hardware"))
    return box("Run time and cost", [*pairs, *extra])
