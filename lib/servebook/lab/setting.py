"""The settings of an exploration: one model on one GPU under one load. Every value is checked when it is set."""

from __future__ import annotations

import difflib
import math
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .. import model
from ..common.errors import ServebookError
from ..config.params import HardwareParams, ModelParams, Slo
from ..config.points import PointSpec
from ..hardware import catalog as hardware
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from . import runs

NAMES = {"vllm": "vllm", "naive": "hf"}  # an engine's name where no run gives it one
# settings of the server, with VllmEngine's names
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SERVING = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", *PARALLEL)
WHOLE = ("prompt_tokens", "output_tokens", "concurrency", *SERVING)
ABOVE_ZERO = ("rate_per_s", "ttft_slo_s", "tpot_slo_s")
CHOICES = {"quantization": (None, "fp8", "int8", "int4"), "kv_cache_dtype": ("auto", "fp8"),
           "dtype": (None, "bfloat16", "float16", "float32")}  # fmt: skip

M = TypeVar("M", bound=BaseModel)


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

    def __post_init__(self) -> None:
        """Raises ServebookError for a value that cannot be, whichever field it is in."""
        for name in ("model", "engine"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise _unfit(name, getattr(self, name), "Give a name")
        if not isinstance(self.gpu, str | Gpu):
            raise _unfit("gpu", self.gpu, f"Give a name of the catalog: {', '.join(hardware.catalog())}")
        for name in WHOLE:
            value = getattr(self, name)
            if value is None and _DEFAULTS[name] is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _unfit(name, value, "Give a whole number above 0")
        for name in ABOVE_ZERO:
            if getattr(self, name) is not None and not (_number(getattr(self, name)) and getattr(self, name) > 0):
                raise _unfit(name, getattr(self, name), "Give a number above 0, or None")
        if not (_number(self.price_per_hour) and self.price_per_hour >= 0):
            raise _unfit("price_per_hour", self.price_per_hour, "Give a number from 0 on; 0 means no price")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise _unfit(name, getattr(self, name), f"Give one of {', '.join(map(repr, choices))}")

    def but(self, **changes: Any) -> Setting:
        """The same setting with changes. Raises ServebookError for an unknown name and an impossible value."""
        for name in changes:
            if name not in _DEFAULTS:
                near = difflib.get_close_matches(name, _DEFAULTS, 1)
                hint = f"Did you mean {near[0]}? " if near else ""
                raise ServebookError(f"no setting {name!r}", "explore", f"{hint}There are: {', '.join(_DEFAULTS)}")
        return replace(self, **changes)

    def changed(self, base: Setting) -> dict[str, Any]:
        """The fields in which this setting differs from another, with its own values."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(base, f.name)}

    @property
    def slo(self) -> Slo:
        return checked(Slo, ttft_s=self.ttft_slo_s, tpot_s=self.tpot_slo_s)

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
        known = runs.read_run(self.run).params.engines if self.run else {}
        return known[self.engine].kind == "naive" if self.engine in known else self.engine == "naive"

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def load_text(self) -> str:
        """The load in words: C = 16, 512 in, 128 out."""
        load = f"{self.rate_per_s:g} requests/s" if self.rate_per_s else f"C = {self.concurrency:,}"
        return f"{load}, {self.lengths_text}"

    @property
    def lengths_text(self) -> str:
        return f"{self.prompt_tokens:,} in, {self.output_tokens:,} out"

    def spec(self, sweep: str = "explore", engine: str = "vllm") -> PointSpec:
        """The load as a point of a sweep."""
        if self.rate_per_s is not None:
            name = f"r{self.rate_per_s:g}"
            return PointSpec(
                sweep, engine, name, "arrival_rate", self.prompt_tokens, self.output_tokens, rate_per_s=self.rate_per_s
            )
        name = f"c{self.concurrency:04d}"
        return PointSpec(sweep, engine, name, "concurrency", self.prompt_tokens, self.output_tokens, self.concurrency)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unfit(name: str, value: Any, fix: str) -> ServebookError:
    return ServebookError(f"{name} is {value!r}", "explore", fix)


_DEFAULTS: dict[str, Any] = {f.name: None if f.default is MISSING else f.default for f in fields(Setting)}


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
    p = max(measured, key=lambda p: (p.rate_per_s or 0, p.concurrency or 0, p.prompt_tokens))
    return setting.but(
        prompt_tokens=p.prompt_tokens, output_tokens=p.output_tokens, concurrency=p.concurrency or 1,
        rate_per_s=p.rate_per_s or None,
    )  # fmt: skip


def engine_of(run: runs.Run, kind: str) -> str | None:
    """The run's first engine of a kind (vllm: the first that batches)."""
    return next((n for n, e in run.params.engines.items() if (e.kind == "naive") == (kind == "naive")), None)


def _named(gpu: Gpu) -> str | Gpu:
    """A card of the catalog by its name; another one is itself."""
    return gpu.name if gpu.name in hardware.catalog() else gpu


def checked(of: type[M], **given: Any) -> M:
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
    asked = checked(
        ModelParams, **{where: name}, weights="dummy", quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
    )  # fmt: skip
    return model.read_shape(asked, Path())


@lru_cache(maxsize=64)
def _card(name: str) -> Gpu:
    return hardware.resolve(HardwareParams(gpu=name))


__all__ = ["NAMES", "SERVING", "Setting", "checked", "engine_of", "of_run"]
