"""What there is to turn in an exploration: one model on one GPU under one load, and the predictor for it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import model
from ..common.errors import ServebookError
from ..config.params import HardwareParams, Load, ModelParams, NaiveEngine, RunParams, Slo, VllmEngine
from ..config.points import PointSpec
from ..hardware import catalog as hardware
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from ..predictor import server_limits
from ..predictor.predict import Forecaster, forecaster
from . import runs

NAMES = {"vllm": "vllm", "naive": "hf"}  # an engine's name where no run gives it one
SAMPLES = 4  # draws behind an interval; a run's own predictions take 18
# Settings that say how the model is served, as VllmEngine has them
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SERVING = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", *PARALLEL)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to serve one model, and a load on it. None leaves a limit to the run, else to vLLM's default.

    model: a packaged config (qwen2.5-7b), a folder with config.json, or a Hub id. gpu: a name of the catalog, or a
    hardware.Gpu. engine: vllm or naive, or an engine of the run by its name. Closed loop at `concurrency`, or an open
    loop at `rate_per_s`. price_per_hour is one GPU's. run: learn the constants from that run's C = 1 points where the
    GPU is the run's.
    """

    model: str = "qwen2.5-7b"
    gpu: str | Gpu = "H200"
    engine: str = "vllm"
    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 16
    rate_per_s: float | None = None
    quantization: str | None = None  # fp8, int8, int4: of the weights
    kv_cache_dtype: str = "auto"  # or fp8
    dtype: str | None = None  # bfloat16, or float16 on a card without it
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    price_per_hour: float = 0.0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    run: str | None = None

    def but(self, **changes: Any) -> Setting:
        """The same setting with changes. Raises ServebookError for a name that there is not."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]}? " if near else ""
                raise ServebookError(f"no setting {name!r}", "explore", f"{hint}There are: {', '.join(known)}")
        return replace(self, **changes)

    @property
    def slo(self) -> Slo:
        return _checked(Slo, ttft_s=self.ttft_slo_s, tpot_s=self.tpot_slo_s)

    @property
    def shape(self) -> ModelShape:
        dtype = self.dtype or ("float16" if self.card.bf16_tflops is None else "bfloat16")
        return _shape(self.model, self.quantization, self.kv_cache_dtype, dtype)

    @property
    def card(self) -> Gpu:
        return self.gpu if isinstance(self.gpu, Gpu) else _card(self.gpu)

    @property
    def naive(self) -> bool:
        """Whether it is a server of batch 1."""
        known = runs.load(self.run).params.engines if self.run else {}
        return known[self.engine].kind == "naive" if self.engine in known else self.engine == "naive"

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def load_text(self) -> str:
        """The load in words: C = 16, 512 in, 128 out."""
        load = f"{self.rate_per_s:g} requests/s" if self.rate_per_s else f"C = {self.concurrency:,}"
        return f"{load}, {self.prompt_tokens:,} in, {self.output_tokens:,} out"

    def spec(self, sweep: str = "explore", engine: str = "vllm") -> PointSpec:
        """The load as a point of a sweep."""
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ServebookError(f"{name} is {value!r}, not a whole number above 0", "explore")
        if self.rate_per_s is not None:
            if not self.rate_per_s > 0:
                raise ServebookError(f"rate_per_s is {self.rate_per_s!r}, not above 0", "explore")
            name = f"r{self.rate_per_s:g}"
            return PointSpec(
                sweep, engine, name, "arrival_rate", self.prompt_tokens, self.output_tokens, rate_per_s=self.rate_per_s
            )
        name = f"c{self.concurrency:04d}"
        return PointSpec(sweep, engine, name, "concurrency", self.prompt_tokens, self.output_tokens, self.concurrency)

    def forecaster(self) -> Forecaster:
        """The predictor for this server; kept, for it does not depend on the load."""
        blank = Setting(prompt_tokens=1, output_tokens=1, concurrency=1)
        keep = ("model", "gpu", "engine", "quantization", "kv_cache_dtype", "dtype", *SERVING, "run")
        version = runs.load(self.run).version if self.run else 0
        return _forecaster(replace(blank, **{k: getattr(self, k) for k in keep}), version)


def of_run(run: runs.Run, engine: str, sweep: str | None = None) -> Setting:
    """The setting that a run's engine was measured at; of a sweep, its lengths and its largest load."""
    m, kind = run.params.model, "naive" if run.params.engines[engine].kind == "naive" else "vllm"
    name = m.config or m.hub or str(model.local_folder(str(m.path), run.base))
    dtype = None if m.dtype == "bfloat16" else m.dtype
    setting = Setting(
        model=name, gpu=_named(run.gpu), engine=kind if engine_of(run, kind) == engine else engine, dtype=dtype,
        quantization=m.quantization, kv_cache_dtype=m.kv_cache_dtype, ttft_slo_s=run.params.slo.ttft_s,
        tpot_slo_s=run.params.slo.tpot_s, run=run.name,
        **{k: getattr(run.params.engines[engine], k, 1) for k in PARALLEL},
    )  # fmt: skip
    setting = setting.but(price_per_hour=run.params.hardware.price_per_hour / setting.gpus)  # a run's is its machine's
    measured = run.sweep(engine, sweep) if sweep else []
    if not measured:
        return setting
    p = max(measured, key=lambda p: (p.get("rate_per_s") or 0, p.get("concurrency") or 0, p["prompt_tokens"]))
    return setting.but(
        prompt_tokens=int(p["prompt_tokens"]), output_tokens=int(p["output_tokens"]),
        concurrency=int(p.get("concurrency") or 1), rate_per_s=p.get("rate_per_s") or None,
    )  # fmt: skip


def engine_of(run: runs.Run, kind: str) -> str | None:
    """The run's first engine of a kind (vllm: the first that batches)."""
    return next((n for n, e in run.params.engines.items() if (e.kind == "naive") == (kind == "naive")), None)


def _named(gpu: Gpu) -> str | Gpu:
    """A card of the catalog by its name; another one is itself."""
    return gpu.name if gpu.name in hardware.catalog() else gpu


def _checked(of: Any, **given: Any) -> Any:
    """A part of the parameters from settings. Raises ServebookError for a value that it does not take."""
    try:
        return of(**given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in fault["loc"]) or of.__name__
        raise ServebookError(f"{key} is {fault.get('input')!r}: {fault['msg']}", "explore") from None


@lru_cache(maxsize=64)
def _shape(name: str, quantization: str | None, kv_cache_dtype: str, dtype: str) -> ModelShape:
    where = "config" if name in model.packaged() else "path" if Path(name).expanduser().is_dir() else "hub"
    asked = _checked(
        ModelParams, **{where: name}, weights="dummy", quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
    )  # fmt: skip
    return model.load_shape(asked, Path())


@lru_cache(maxsize=64)
def _card(name: str) -> Gpu:
    return hardware.resolve(HardwareParams(gpu=name))


@lru_cache(maxsize=256)
def _forecaster(s: Setting, version: int) -> Forecaster:
    run = runs.load(s.run) if s.run else None
    known = list(run.params.engines) if run else []
    if s.engine not in (*NAMES, *known):
        raise ServebookError(
            f"no engine {s.engine!r}", "explore", f"There are: {', '.join({**NAMES, **dict.fromkeys(known)})}"
        )
    name = (s.engine if s.engine in known else engine_of(run, s.engine)) if run else None
    given = {} if s.naive else {k: v for k in SERVING if (v := getattr(s, k)) is not None}
    if run is None or name is None:
        made = NaiveEngine(kind="naive") if s.naive else _checked(VllmEngine, kind="vllm", **given)
        return forecaster(_alone(NAMES[s.engine], made, Load()), NAMES[s.engine], s.shape, s.card, samples=SAMPLES)
    engine = run.params.engines[name]
    if isinstance(engine, VllmEngine):
        engine = _checked(VllmEngine, **(engine.model_dump() | given))
    params = _alone(name, engine, run.params.load)
    if s.card.name != run.gpu.name:  # another GPU: nothing learned here is known to hold there
        return forecaster(params, name, s.shape, s.card, samples=SAMPLES)
    base = _calibrated(run.name, name, version)
    facts = run.facts.get(name) or {}
    as_run = replace(s.shape, name="") == replace(run.shape, name="") and all(
        given.get(k) in (None, getattr(run.params.engines[name], k, None)) for k in SERVING
    )
    if not as_run:
        # the constants are shares of datasheet figures, so they hold for other limits and weights on the same GPU
        said = _still_true(facts, s, run)
        if not isinstance(engine, VllmEngine):  # what it is not started with it may still be thought to have
            said |= given
        server = server_limits.server(name, engine, s.shape, run.gpu, said)
        return Forecaster(server, base.calibration, base.load, SAMPLES, base.seed, running_gauge=base.running_gauge)
    return base


@lru_cache(maxsize=16)
def _calibrated(name: str, engine: str, version: int) -> Forecaster:
    """A run's own engine, with the constants that its C = 1 points teach."""
    run = runs.load(name)
    f = forecaster(
        run.params, engine, run.shape, run.gpu, facts=run.facts.get(engine), measured=run.alone(engine), samples=SAMPLES
    )
    f.running_gauge = run.published
    return f


def _still_true(facts: Mapping[str, Any], s: Setting, run: runs.Run) -> dict[str, Any]:
    """What the run's engine said of itself, without what the setting changes."""
    gone = {k for k in SERVING if getattr(s, k) is not None}
    if replace(s.shape, name="") != replace(run.shape, name="") or s.gpus > 1:
        gone |= {"kv_cache_tokens", "kv_cache_gib"}
    return {k: v for k, v in facts.items() if k not in gone}


def _alone(name: str, engine: Any, load: Load) -> RunParams:
    """A run of nothing but this engine, for the predictor."""
    model_params, hardware_params = ModelParams(config="tiny-qwen2", weights="dummy"), HardwareParams(gpu="H200")
    return RunParams(
        run="explore", title="explore", model=model_params, hardware=hardware_params, engines={name: engine}, load=load
    )


__all__ = ["SAMPLES", "Setting", "engine_of", "of_run"]
