"""A run's parameters: typed, strict, read from one YAML file. Sweeps are in sweeps.py, workloads in workloads.py.

`read_file` rejects unknown keys with one line that has the key, its line and the nearest valid name, before any work
is done. Units are in the names; times are in seconds, sizes in bytes (GB = 1e9, GiB = 2**30). One module, since the
sections are validated together in RunParams.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from ..common.errors import ServebookError
from . import strict_yaml, yaml_nodes
from .engines import BatchingEngine, Engine, NaiveEngine, OpenAIEngine, VllmEngine
from .param_types import (
    Count,
    Generation,
    Name,
    NotNegative,
    Positive,
    Requests,
    RunName,
    Seconds,
    Share,
    Strict,
    SweepName,
    unfit,
)
from .points import CALIBRATION, PointSpec
from .search_space import SearchSpace
from .service_level import Slo, TargetLoad
from .sweeps import (
    ArrivalRateSweep,
    BurstSweep,
    ConcurrencySweep,
    LoadKind,
    PrefixCacheSweep,
    PromptLengthSweep,
    Sweep,
    TraceSweep,
)
from .workloads import Workload

__all__ = [
    "ArrivalRateSweep", "BatchingEngine", "BurstSweep", "CalibrationPoint", "ConcurrencySweep", "Engine",
    "HardwareFigures", "HardwareParams", "Load", "ModelParams", "NaiveEngine", "OpenAIEngine", "PrefixCacheSweep",
    "PromptLengthSweep", "RunParams", "SearchSpace", "Slo", "Sweep", "TargetLoad", "TraceSweep", "VllmEngine",
    "Workload", "dump", "read_file", "read_text",
]  # fmt: skip


class ModelParams(Strict):
    """The model. Exactly one of hub, path and config gives its shape (and weights)."""

    hub: str | None = None  # Hugging Face id, e.g. Qwen/Qwen2.5-7B-Instruct
    path: str | None = None  # local folder with config.json (relative to the parameter file)
    config: str | None = None  # a config packaged with servebook, e.g. qwen2.5-7b
    revision: str | None = None  # Hub commit, tag or branch
    weights: Literal["real", "dummy"] = "real"  # dummy: random values, nothing is downloaded
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: Literal["fp8", "int8", "int4"] | None = None  # weights only
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelParams:
        given = [k for k in ("hub", "path", "config") if getattr(self, k)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of hub, path, config (found {', '.join(given) or 'none'})")
        if self.config and self.weights == "real":
            raise ValueError("a packaged config has no weights: set weights: dummy")
        return self


UNLESS_GIVEN = Field(exclude_if=lambda value: value is None)  # not stored in the run folder


class HardwareFigures(Strict):
    """Datasheet figures of hardware that is not in the catalog."""

    name: str
    tensor_tflops: Positive  # dense, in the model's dtype, 1e12 FLOP/s
    memory_bandwidth_gb_per_s: Positive  # 1e9 bytes/s
    memory_gib: Positive
    # bandwidth to the other GPUs of the machine, one direction, 1e9 bytes/s; default: 16 lanes of PCIe 4
    link_gb_per_s: Annotated[Positive | None, UNLESS_GIVEN] = None
    # the generation decides the priors of kernel and launch constants, as for a catalog card
    generation: Annotated[Generation | None, UNLESS_GIVEN] = None
    attention_backend: Annotated[str | None, UNLESS_GIVEN] = None  # vLLM's attention backend; default: the generation's
    # dense rates by operand type, where they differ from tensor_tflops
    fp16_tflops: Annotated[Positive | None, UNLESS_GIVEN] = None
    bf16_tflops: Annotated[Positive | None, UNLESS_GIVEN] = None
    fp8_tflops: Annotated[Positive | None, UNLESS_GIVEN] = None
    int8_tflops: Annotated[Positive | None, UNLESS_GIVEN] = None
    fp4_tflops: Annotated[Positive | None, UNLESS_GIVEN] = None
    fp32_tflops: Annotated[Positive | None, UNLESS_GIVEN] = None
    source: str = "given in params"


class HardwareParams(Strict):
    """The device, by name or by its figures, and its price per hour."""

    gpu: str | None = None  # a catalog name, or "detect"
    figures: HardwareFigures | None = None
    price_per_hour: NotNegative = 0.0  # price of the machine with all GPUs of the run
    currency: str = "USD"

    @model_validator(mode="after")
    def _one_source(self) -> HardwareParams:
        if bool(self.gpu) == bool(self.figures):
            raise ValueError("give exactly one of gpu (a catalog name or detect) and figures")
        return self


class CalibrationPoint(Strict):
    """A closed-loop measurement at C = 1 for calibrating the predictor."""

    prompt_tokens: Count
    output_tokens: Count
    requests: Annotated[Requests, Field(gt=0)] = 5


class Load(Strict):
    """How the client loads a server, and when a point ends."""

    jitter_s: NotNegative = 0.05  # a client waits U(0, jitter) before its next request
    warmup_requests: Requests = 10  # the first max(C, this) completions are not measured
    min_requests: Annotated[Requests, Field(gt=0)] = 20  # least measured completions of a point
    max_requests: Annotated[Requests, Field(gt=0)] = 400
    max_rounds: Annotated[Requests, Field(gt=0)] | None = None  # closed loop: at most this many requests per client
    min_seconds: NotNegative = 10
    max_seconds: Seconds = 120  # warm-up included; at this limit a point ends in any case
    request_timeout_s: Seconds = 600
    # vLLM uses its fused sampler only for requests that set top_p or top_k; otherwise, and for greedy decoding, the
    # native sampler is measured. Requests carry no seed, because a seed would disable the fused sampler, too.
    temperature: NotNegative = 0.0
    top_p: Share | None = None
    top_k: Count | None = None
    scrape_interval_s: Seconds = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1

    def least_and_most(self, concurrency: int | None) -> tuple[int, int]:
        """Measured requests of a point: (minimum before it may end, maximum).

        Both grow with the concurrency of a closed loop, because its clients move in waves: at least two rounds, and
        whole rounds only. None: an open loop.
        """
        c = concurrency or 1
        least = max(self.min_requests, 2 * c)
        most = -(-max(self.max_requests, 2 * least) // c) * c
        if concurrency and self.max_rounds is not None:
            most = min(most, self.max_rounds * c)
        return min(least, most), most


class RunParams(Strict):
    """One run: the whole parameter file."""

    run: RunName  # folder name under outputs/
    title: str
    description: str = ""
    model: ModelParams
    hardware: HardwareParams
    engines: Annotated[dict[Name, Engine], Field(min_length=1)]
    calibration: list[CalibrationPoint] = []
    workloads: Annotated[dict[Name, Workload], Field(exclude_if=lambda value: not value)] = {}
    sweeps: dict[SweepName, Sweep] = {}
    slo: Slo = Slo()
    load: Load = Load()
    choose: Annotated[SearchSpace | None, Field(exclude_if=lambda value: value is None)] = None

    @field_validator("calibration")
    @classmethod
    def _each_once(cls, calibration: list[CalibrationPoint]) -> list[CalibrationPoint]:
        sizes = [(p.prompt_tokens, p.output_tokens) for p in calibration]
        if again := next((s for i, s in enumerate(sizes) if s in sizes[:i]), None):
            raise unfit(f"{again[0]} in, {again[1]} out is given twice", "Keep one of them")
        return calibration

    @field_validator("load")
    @classmethod
    def _least_below_most(cls, load: Load) -> Load:
        for least, most in (("min_requests", "max_requests"), ("min_seconds", "max_seconds")):
            low, high = getattr(load, least), getattr(load, most)
            if low > high:
                raise unfit(f"{least} ({low:g}) is more than {most} ({high:g})", f"Lower {least} or raise {most}")
        return load

    @model_validator(mode="after")
    def _names_agree(self) -> RunParams:
        unused = dict.fromkeys(self.workloads)
        for name, sweep in self.sweeps.items():
            for engine in [*(sweep.engines or []), *sweep.minutes_per_engine]:
                if engine not in self.engines:
                    raise ValueError(
                        f"sweep {name} names the engine {engine!r}; this run has {', '.join(self.engines)}"
                    )
            if isinstance(sweep, LoadKind) and sweep.workload is not None:
                unused.pop(sweep.workload, None)
                self._give_workload(name, sweep)
            elif isinstance(sweep, TraceSweep):
                raise unfit(f"sweep {name} replays no trace", "Set workload: to one that has a trace")
        self._check_target(unused)
        if unused:
            raise unfit(f"no sweep uses the workload {', '.join(unused)}", "Name it in a sweep, or leave it out")
        return self

    def _check_target(self, unused: dict[str, None]) -> None:
        """Check that the target's workload exists and has a trace if the target replays one."""
        target = self.slo.target
        if target is None:
            return
        if target.workload is not None:
            if target.workload not in self.workloads:
                known = ", ".join(self.workloads) or "none"
                what = f"slo.target names the workload {target.workload!r}"
                raise unfit(what, f"Workloads of this run: {known}")
            unused.pop(target.workload, None)
        elif not self.sweeps:
            raise unfit("slo.target names no workload, and there is no sweep to take one from", "Name a workload")
        workload = self.workloads.get(target.workload or "")
        if target.trace_speed is not None and (workload is None or workload.trace is None):
            raise unfit("slo.target.trace_speed replays a trace", "Name a workload that has one, or give rate_per_s")
        first = next(iter(self.sweeps.values()), None)
        if target.workload is None and isinstance(first, LoadKind):
            workload = self.workloads.get(first.workload or "")
        if target.rate_per_s is not None and workload is not None and workload.turns > 1:
            raise unfit("slo.target.rate_per_s: a conversation waits for its answers", "Give users instead")

    def _give_workload(self, name: str, sweep: LoadKind) -> None:
        if sweep.workload not in self.workloads:
            known = ", ".join(self.workloads) or "none"
            raise unfit(f"sweep {name} names the workload {sweep.workload!r}", f"Workloads of this run: {known}")
        workload = self.workloads[sweep.workload]
        if isinstance(sweep, TraceSweep) and workload.trace is None:
            raise unfit(f"sweep {name} replays the workload {sweep.workload!r}, which has no trace", "Give it a trace")
        if workload.turns > 1 and not isinstance(sweep, ConcurrencySweep):
            raise unfit(
                f"sweep {name}: a conversation waits for its answers", "Use kind: concurrency, or a trace with sessions"
            )
        sweep.with_workloads(self.workloads)

    def calibration_points(self, engine: str) -> list[PointSpec]:
        """The C = 1 points for calibration, in the order given."""
        return [
            PointSpec(
                CALIBRATION,
                engine,
                f"p{p.prompt_tokens:05d}-o{p.output_tokens:04d}",
                "calibration",
                p.prompt_tokens,
                p.output_tokens,
                concurrency=1,
                fixed_requests=p.requests,
            )
            for p in self.calibration
        ]

    def sweep_points(self, sweep: str, engine: str, capacity_per_s: float | None = None) -> list[PointSpec]:
        """The points of one sweep for one engine, lowest load first; none if the engine is not part of the sweep.

        capacity_per_s: the request rate that shares_of_capacity refer to; without it such a sweep has no points.
        """
        s = self.sweeps[sweep]
        if s.engines is not None and engine not in s.engines:
            return []
        return s.points(sweep, engine, self.engines[engine], capacity_per_s)


def read_file(path: Path | str) -> RunParams:
    """The validated parameters of a parameter file.

    Raises ServebookError with file, line and key for anything unreadable, unknown or of the wrong type. It reports the
    first fault and the number of further ones.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:  # a device file may be endless
            text = file.read(4 * yaml_nodes.LONGEST_TEXT + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ServebookError("is not UTF-8 text", f"{path}, line {line}", "Save it as UTF-8") from None
    except OSError as error:
        others = [p.name for p in path.parent.glob("*.yaml") if p.name != path.name]
        near = difflib.get_close_matches(path.name, others, n=1)
        hint = (
            f"Did you mean {path.parent / near[0]}?"
            if near
            else "Give the path of a parameter file such as params/demo.yaml"
        )
        raise ServebookError(f"cannot read the parameter file ({error.strerror})", str(path), hint) from error
    return read_text(text, str(path), path.parent)


def read_text(text: str, where: str = "params", base: Path = Path()) -> RunParams:
    """As read_file, from YAML text; `where` names it in messages, `base` is the folder of relative trace paths."""
    params = strict_yaml.validate(text, RunParams, where)
    for name, workload in params.workloads.items():
        if workload.trace is not None:
            rows = workload.at(base).rows()
            replayed = any(isinstance(s, TraceSweep) and s.workload == name for s in params.sweeps.values())
            target = params.slo.target
            replayed |= target is not None and target.workload == name and target.trace_speed is not None
            if replayed and not rows.times:
                fix = "Use it with kind concurrency, arrival_rate or burst, or give its lines arrival_s"
                raise ServebookError("the trace has no arrivals to replay", str(base / workload.trace), fix)
    return params


def dump(params: RunParams) -> str:
    """The resolved parameters as YAML, including defaults."""
    return yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
