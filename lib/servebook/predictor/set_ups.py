"""The set-ups that could serve a model (card, parallelism, precisions, vLLM's settings), and which of them fit.

A set-up describes one replica. The number of replicas is chosen in choice.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..common.errors import ServebookError
from ..config.params import Load, ModelParams, RunParams, VllmEngine
from ..config.search_space import SearchSpace
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape
from .calibration import Calibration, calibrate
from .forecaster import Forecaster
from .parallel import Layout
from .refusal import Refusal
from .server_limits import PredictedServer, Times, server

ROUND_CONTEXT = 1024  # max_model_len is the longest request, rounded up to a multiple of this
NAME = "vllm"


@dataclass(frozen=True)
class PricedGpu:
    """A card with its price per hour and the source of the price."""

    gpu: Gpu
    price_per_hour: float
    source: str


@dataclass(frozen=True)
class SetUp:
    """One replica: its card and its settings, with vLLM's names."""

    card: PricedGpu
    quantization: str | None
    kv_cache_dtype: str
    engine: VllmEngine

    @property
    def gpu(self) -> Gpu:
        return self.card.gpu

    @cached_property
    def layout(self) -> Layout:
        e = self.engine
        return Layout(
            e.tensor_parallel_size, e.pipeline_parallel_size, e.data_parallel_size, e.enable_expert_parallel
        )  # fmt: skip

    @property
    def gpus(self) -> int:
        """Number of cards per replica."""
        return self.layout.gpus

    @property
    def kind(self) -> tuple[Any, ...]:
        """Card, layout and precisions. Set-ups of one kind differ only in vLLM's other settings."""
        return (self.gpu.name, self.layout, self.quantization, self.kv_cache_dtype)

    @property
    def name(self) -> str:
        """Display name, without the number of replicas."""
        e, parts = self.engine, [f"{self.gpus} × {self.gpu.name}" if self.gpus > 1 else self.gpu.name]
        for degree, short in ((e.tensor_parallel_size, "TP"), (e.pipeline_parallel_size, "PP")):
            parts += [f"{short} {degree}"] if degree > 1 else []
        parts += [f"DP {e.data_parallel_size}"] if e.data_parallel_size > 1 else []
        parts += ["expert parallel"] if e.enable_expert_parallel else []
        parts.append(f"{self.quantization} weights" if self.quantization else "weights as given")
        parts += ["fp8 KV"] if self.kv_cache_dtype == "fp8" else []
        parts.append(f"budget {e.max_num_batched_tokens}, {e.max_num_seqs} sequences")
        parts += [] if e.prefix_caching else ["no prefix caching"]
        return ", ".join(parts)

    def model(self, given: ModelParams) -> ModelParams:
        """The run's model with this set-up's precisions."""
        return given.model_copy(update={"quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype})

    def as_dict(self) -> dict[str, Any]:
        e = self.engine
        return {
            "name": self.name, "gpu": self.gpu.name, "gpus": self.gpus, "price_per_gpu_hour": self.card.price_per_hour,
            "price_source": self.card.source, "quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype,
            "tensor_parallel_size": e.tensor_parallel_size, "pipeline_parallel_size": e.pipeline_parallel_size,
            "data_parallel_size": e.data_parallel_size, "enable_expert_parallel": e.enable_expert_parallel,
            "max_num_batched_tokens": e.max_num_batched_tokens, "max_num_seqs": e.max_num_seqs,
            "max_model_len": e.max_model_len, "prefix_caching": e.prefix_caching,
        }  # fmt: skip


def set_ups(
    params: RunParams, space: SearchSpace, cards: Sequence[PricedGpu], shape: ModelShape, longest: int, repeats: bool
) -> Iterator[SetUp]:
    """Every set-up of the search space, in a fixed order.

    shape: the model with the precisions of the parameters. longest: tokens of the longest request. repeats: whether
    prompts share prefixes; if not, prefix caching has no effect and stays on.
    """
    base = next((e for e in params.engines.values() if isinstance(e, VllmEngine)), None) or VllmEngine(kind="vllm")
    context = base.max_model_len or min(shape.max_context_tokens, -(-longest // ROUND_CONTEXT) * ROUND_CONTEXT)
    caching = space.prefix_caching if repeats else [True]
    for card in cards:
        for layout in layouts(space, shape):
            for quantization, kv in precisions(params.model, space, shape, card.gpu):
                for budget, seqs, cached in itertools.product(
                    space.max_num_batched_tokens, space.max_num_seqs, caching
                ):
                    if budget < seqs:
                        continue  # vLLM would raise the budget to the number of sequences, which is another set-up
                    engine = base.model_copy(update={
                        "tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline,
                        "data_parallel_size": layout.data, "enable_expert_parallel": layout.expert,
                        "max_num_batched_tokens": budget, "max_num_seqs": seqs, "prefix_caching": cached,
                        "max_model_len": context, "port": None,
                    })  # fmt: skip
                    yield SetUp(card, quantization, kv, engine)


def layouts(space: SearchSpace, shape: ModelShape) -> list[Layout]:
    """The layouts that fit on one machine. A dense model is replicated instead of data parallel: the prediction is the
    same, and each replica is a server that can be measured alone."""
    most = min(space.max_gpus, space.gpus_per_machine)
    data = space.data_parallel_size if shape.experts else [1]
    found = []
    for tp, pp, dp in itertools.product(space.tensor_parallel_size, space.pipeline_parallel_size, data):
        if tp * pp * dp > most:
            continue
        found.append(Layout(tp, pp, dp))
        if shape.experts and tp * dp > 1:
            found.append(Layout(tp, pp, dp, True))
    return sorted(found, key=lambda at: (at.gpus, at.pipeline, at.data, at.expert))


def precisions(model: ModelParams, space: SearchSpace, shape: ModelShape, gpu: Gpu) -> list[tuple[str | None, str]]:
    """The (quantization, KV cache type) pairs that vLLM supports on this card, the run's own first. Weights that are
    already quantized stay as they are. fp8 weights need Ampere or later; an fp8 KV cache needs fp8 units."""
    weights: list[str | None] = [model.quantization]
    plain = model.quantization is None and shape.quantization == "none"
    if plain and "fp8" in space.quantization and gpu.generation not in ("turing", "cpu"):
        weights.append("fp8")
        if "none" not in space.quantization:
            weights = ["fp8"]
    caches = [model.kv_cache_dtype]
    if model.kv_cache_dtype == "auto" and "fp8" in space.kv_cache_dtype and gpu.fp8_tflops:
        caches.append("fp8")
        if "auto" not in space.kv_cache_dtype:
            caches = ["fp8"]
    return [(w, c) for w in weights for c in caches]


@dataclass
class Workshop:
    """Builds servers and step times of set-ups; caches what several of them share.

    calibrated: {SetUp.kind: constants fitted to C = 1 points}; other kinds use the datasheet's priors."""

    params: RunParams
    shapes: Mapping[tuple[str | None, str], ModelShape]
    load: Load
    calibrated: Mapping[tuple[Any, ...], Calibration] = field(default_factory=dict)
    _known: dict[Any, Calibration] = field(default_factory=dict)

    def shape(self, s: SetUp) -> ModelShape:
        return self.shapes[s.quantization, s.kv_cache_dtype]

    def server(self, s: SetUp) -> PredictedServer:
        """The set-up's limits. Raises ServebookError if vLLM would reject the layout."""
        return server(NAME, s.engine, self.shape(s), s.gpu)

    def limits(self, s: SetUp, prompt: int, output: int) -> PredictedServer | Refusal:
        """The set-up's limits, or why it does not fit."""
        if self.shape(s).dtype == "bfloat16" and s.gpu.bf16_tflops is None:
            return Refusal("the card has no bfloat16 tensor cores")
        try:
            found = self.server(s)
        except ServebookError as error:
            return Refusal(error.what)
        return found.refuses(prompt, output) or found

    def calibration(self, s: SetUp, found: PredictedServer) -> Calibration:
        if s.kind in self.calibrated:
            return self.calibrated[s.kind]
        if s.kind not in self._known:
            self._known[s.kind] = calibrate("vllm", found.shape, found.gpu, layout=found.layout)
        return self._known[s.kind]

    def times(self, s: SetUp, found: PredictedServer) -> Times:
        """Step times with the most probable constants."""
        return found.times(self.calibration(s, found).constants)

    def forecaster(self, s: SetUp, found: PredictedServer, samples: int) -> Forecaster:
        """A Forecaster with `samples` draws of the constants."""
        return Forecaster(found, self.calibration(s, found), self.load, samples, self.load.seed)

    def learned(self, s: SetUp) -> bool:
        """Whether its constants were fitted to measured points."""
        return s.kind in self.calibrated
