"""Which measured points may be set against a setting: those of a run that served the same model the same way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.measured_point import MeasuredPoint
from ..model.reader import ModelShape
from . import forecasters, runs
from .runs import Run
from .setting import SERVING, Setting, of_run

LIMITS = ("max_num_batched_tokens", "max_num_seqs")  # that decide how requests are batched


@dataclass(frozen=True)
class Difference:
    """A difference between a setting and a run. other: another GPU or model, to which the run's points do not
    apply."""

    text: str
    other: bool = False


def differences(s: Setting, run: Run, engine: str) -> list[Difference]:
    """Reasons why the points of a run's engine are not measurements of this setting's server; empty if they are."""
    found = []
    own = of_run(run, engine)
    if s.card.name != run.gpu.name:
        found.append(Difference(f"GPU {s.card.name}, measured on {run.gpu.name}", True))
    if _architecture(s.shape) != _architecture(run.shape):
        found.append(Difference(f"model {s.shape.name}, measured with {run.shape.name}", True))
    if s.naive != own.naive:
        found.append(Difference(f"engine {s.engine}, measured with {engine}", True))
    for what, mine, theirs in (
        ("weights", weights(s.shape), weights(run.shape)), ("KV cache", kv_type(s.shape), kv_type(run.shape)),
    ):  # fmt: skip
        if mine != theirs:
            found.append(Difference(f"{mine} {what}, measured with {theirs}"))
    if s.naive or (found and found[0].other):
        return found
    given = {k: getattr(s, k) for k in SERVING if getattr(s, k) not in (None, getattr(own, k))}
    if s.run == run.name:
        its = run.params.engines[engine]
        given = {k: v for k, v in given.items() if v != getattr(its, k, None)}
        found += [Difference(f"{k} {v:,}, measured with {getattr(its, k, None)}") for k, v in given.items()]
    elif not found:
        server, other = forecasters.of(s).server, forecasters.of(own).server
        found += [
            Difference(f"{k} {getattr(server.config, k):,}, measured with {getattr(other.config, k):,}")
            for k in LIMITS if getattr(server.config, k) != getattr(other.config, k)
        ]  # fmt: skip
        if server.layout != other.layout:
            found.append(Difference(f"{s.gpus} GPUs, measured with {own.gpus}"))
    return found


def _architecture(shape: ModelShape) -> tuple[object, ...]:
    """What a shape is without its name and without the types of its numbers."""
    parts: dict[tuple[str, str], int] = {}
    for m in shape.matrices:
        parts[m.part, m.split] = parts.get((m.part, m.split), 0) + m.parameters
    attention = tuple(replace(a, element_bytes=0, state_bytes=0) for a in shape.attention)
    return shape.family, shape.layers, shape.vocab, shape.max_context_tokens, shape.experts, attention, parts


def weights(shape: ModelShape) -> str:
    """The weights' type in words: bf16, fp8, int4."""
    if shape.weight_bits == 16:
        return {"bfloat16": "bf16", "float16": "fp16"}.get(shape.dtype, shape.dtype)
    return shape.compute_dtype if shape.compute_dtype in ("fp8", "int8") else f"int{shape.weight_bits}"


def kv_type(shape: ModelShape) -> str:
    return "fp8" if shape.kv_bytes_per_element == 1 else "16-bit"


def measuring(s: Setting) -> list[tuple[Run, str]]:
    """Every stored run and its engine that measured the setting's server, the loaded run first."""
    names = sorted(runs.names(), key=lambda name: name != s.run)
    found = []
    for name in names:
        run = runs.read_run(name)
        engines = [e for e in run.params.engines if any(p.engine == e for p in run.points)]
        found += [(run, e) for e in engines if not differences(s, run, e)]
    return found


def measured_point(s: Setting) -> tuple[Run, MeasuredPoint] | None:
    """A stored measurement of exactly this server under exactly this load."""
    for run, engine in measuring(s):
        for sweep in run.sweeps(engine):
            for p in run.sweep(engine, sweep):
                if _same_load(s, p):
                    return run, p
    return None


def _same_load(s: Setting, p: MeasuredPoint) -> bool:
    if (p.prompt_tokens, p.output_tokens) != (s.prompt_tokens, s.output_tokens) or p.verdict == "invalid":
        return False
    if s.rate_per_s or p.rate_per_s:
        return abs((p.rate_per_s or 0.0) - (s.rate_per_s or 0.0)) <= 0.005 * (s.rate_per_s or 0.0)
    return p.concurrency == s.concurrency


__all__ = ["Difference", "differences", "kv_type", "measured_point", "measuring", "weights"]
