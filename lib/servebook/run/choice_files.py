"""Files for using a choice: the command that serves it, and parameter files that measure it."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from ..common import files
from ..config import params as config
from ..config.params import ModelParams
from ..engines.vllm import serve_flags
from ..hardware.catalog import catalog
from ..model.reader import SHIPPED
from ..predictor.choice import Choice
from ..predictor.choice_search import Candidate
from ..predictor.set_ups import SetUp
from .router_files import router_configs

RIVALS = 2  # set-ups measured beside the choice
MEASURED_REQUESTS = 300  # requests of a point, so that its p90 and p99 are meaningful


def served_model(m: ModelParams) -> str:
    """The model argument for vLLM: the Hub id or folder; for a packaged config the Hub id it comes from."""
    if m.config:
        return next((hub for hub, name in SHIPPED.items() if name == m.config), m.config)
    return str(m.hub or m.path)


def serve_command(choice: Choice, s: SetUp) -> str:
    """The command line that serves one replica."""
    given = choice.workshop.params.model
    m = s.model(given).model_copy(update={"weights": "real"} if served_model(given) != given.config else {})
    return shlex.join(["vllm", "serve", served_model(given), *serve_flags(m, s.engine)])


# --- measuring it ---------------------------------------------------------------------------------------------------


def write_params(choice: Choice, base: Path, into: Path) -> list[Path]:
    """Write parameter files that measure the choice and its nearest alternatives at one replica's share of the load,
    each as an engine; those that need other machines or weights get separate files. With several replicas, also router
    configurations. base: the folder of the run's relative paths."""
    named = [("choice", choice.chosen), *((f"rival-{i + 1}", c) for i, c in enumerate(choice.rivals[:RIVALS]))]
    groups: dict[Any, list[tuple[str, Candidate]]] = {}
    for name, c in named:
        key = c.set_up.gpu.name, c.set_up.gpus, c.set_up.quantization, c.set_up.kv_cache_dtype
        groups.setdefault(key, []).append((name, c))
    texts: dict[Path, str] = {}
    files.check_folder(into)  # relative paths in the files lead out of it
    for members in groups.values():
        run = f"{choice.workshop.params.run}-{members[0][0]}"
        body = yaml.safe_dump(_run(choice, run, members, base, into), sort_keys=False, allow_unicode=True, width=120)
        config.read_text(body, f"{run}.yaml", into)
        head = f"# Measures {', '.join(f'{n}: {c.set_up.name}' for n, c in members)}.\n# Made by servebook choose; "
        head += f"one replica's share of: {choice.target.text()}.\n"
        texts[into / f"{run}.yaml"] = head + body
    written = [files.write_text(path, text) for path, text in texts.items()]
    if (choice.chosen.replicas or 1) > 1:
        for name, content in router_configs(choice, served_model(choice.workshop.params.model)).items():
            written.append(files.write_text(into / name, content))
    return written


def _run(choice: Choice, run: str, members: list[tuple[str, Candidate]], base: Path, into: Path) -> dict[str, Any]:
    given = choice.workshop.params
    data: dict[str, Any] = given.model_dump(mode="json", exclude_defaults=True)
    first = members[0][1].set_up
    card: dict[str, Any] = {"gpu": first.gpu.name}
    if first.gpu.name not in catalog():  # the run's own, given by its figures
        card = given.hardware.model_dump(mode="json", exclude_defaults=True, include={"figures"})
    data |= {
        "run": run, "title": f"{given.title or given.run}: the choice and its rivals",
        "model": first.model(given.model).model_dump(mode="json", exclude_defaults=True),
        "hardware": {
            **card, "price_per_hour": first.card.price_per_hour * first.gpus, "currency": given.hardware.currency,
        },
        "engines": {n: c.set_up.engine.model_dump(mode="json", exclude_defaults=True) for n, c in members},
        "sweeps": {f"target-{n}": _sweep(choice, n, c) for n, c in members},
        "slo": given.slo.model_dump(mode="json", exclude_defaults=True, exclude={"target"}),
        "load": _load(choice, members),
    }  # fmt: skip
    if not data.get("calibration"):
        lengths = choice.target.prompt_tokens, choice.target.output_tokens
        data["calibration"] = [dict(zip(("prompt_tokens", "output_tokens"), lengths, strict=True))]
    data.pop("choose", None)
    used = choice.target.workload_name
    data["workloads"] = {n: w for n, w in (data.get("workloads") or {}).items() if n == used}
    for holder, key in [(data["model"], "path"), *((w, "trace") for w in data["workloads"].values())]:
        path = holder.get(key)
        if path and not Path(path).is_absolute():
            holder[key] = os.path.relpath((base / path).resolve(), into.resolve())
    return data


def _sweep(choice: Choice, engine: str, c: Candidate) -> dict[str, Any]:
    """One replica's share of the target load."""
    target, replicas = choice.target, c.replicas or 1
    what: dict[str, Any] = {"workload": target.workload_name}
    if not target.workload_name:
        what = {"prompt_tokens": target.prompt_tokens, "output_tokens": target.output_tokens}
    if target.users is not None:
        return {"kind": "concurrency", "engines": [engine], **what, "concurrency": [math.ceil(target.users / replicas)]}
    if target.rate_per_s is not None:
        rate = round(target.rate_per_s / replicas, 4)
        how = {"arrivals": target.arrivals, "gamma_shape": target.gamma_shape} if target.arrivals != "poisson" else {}
        return {"kind": "arrival_rate", "engines": [engine], **what, "rates_per_s": [rate], **how}
    return {"kind": "trace", "engines": [engine], **what, "speeds": [round((target.trace_speed or 1.0) / replicas, 6)]}


def _load(choice: Choice, members: list[tuple[str, Candidate]]) -> dict[str, Any]:
    """The run's load settings, with time for enough requests."""
    load = choice.workshop.params.load.model_dump(mode="json", exclude_defaults=True)
    own = choice.workshop.params.load
    load["min_requests"] = max(own.min_requests, MEASURED_REQUESTS)
    load["max_requests"] = max(own.max_requests, MEASURED_REQUESTS)
    rates = [c.trial.request_rate_per_s / (c.replicas or 1) for _, c in members if c.trial]
    seconds = (1.3 * MEASURED_REQUESTS + own.warmup_requests) / max(min(rates, default=1.0), 1e-3) + 60
    load["max_seconds"] = float(max(own.max_seconds, math.ceil(seconds)))
    return load
