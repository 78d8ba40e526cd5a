"""A choice for a run: cards and prices, the model in every precision, calibration on the run's C = 1 points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import model
from ..common.errors import ServebookError
from ..config.params import HardwareParams, VllmEngine, read_file
from ..config.points import CALIBRATION
from ..config.search_space import SearchSpace
from ..hardware import catalog, prices
from ..predictor.calibration import Calibration
from ..predictor.choice import Choice, choose
from ..predictor.forecaster import forecaster
from ..predictor.parallel import Layout
from ..predictor.set_ups import PricedGpu, precisions
from ..run_folder.stored_run import StoredRun


def choice_for(
    run: StoredRun, where: str, gpus: Sequence[str] = (), max_gpus: int | None = None, space: SearchSpace | None = None
) -> Choice:
    """The cheapest set-up for a run's slo and target load.

    where: its parameter file, for messages. gpus: "NAME" or "NAME=PRICE" of cards to search instead of the parameters'.
    Raises ServebookError if the search is not possible or no set-up meets the level.
    """
    params, asked = run.params, space or run.params.choose or SearchSpace()
    if max_gpus is not None:
        if max_gpus < 1:
            raise ServebookError(f"{max_gpus} is not a number of GPUs", "--max-gpus", "Give at least 1")
        asked = asked.model_copy(update={"max_gpus": max_gpus})
    cards = priced_gpus(run, gpus, asked, where)
    shapes = {}
    for card in cards:
        for precision in precisions(params.model, asked, run.shape, card.gpu):
            if precision not in shapes:
                changed = dict(zip(("quantization", "kv_cache_dtype"), precision, strict=True))
                shapes[precision] = model.read_shape(params.model.model_copy(update=changed), run.base)
    own = params.model.quantization, params.model.kv_cache_dtype
    shapes.setdefault(own, run.shape)
    return choose(params, cards, shapes, where=where, space=asked, calibrated=_learned(run))


def priced_gpus(run: StoredRun, gpus: Sequence[str], space: SearchSpace, where: str) -> list[PricedGpu]:
    """The cards to search: the named ones, otherwise the parameters' choose.gpus, otherwise all with a public list
    price and the run's own. Raises ServebookError for an unknown card or one without a price."""
    named = [_parsed(option) for option in gpus] or list(space.gpus.items())
    own = run.params.hardware
    engine = next((e for e in run.params.engines.values() if isinstance(e, VllmEngine)), None)
    shared = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size if engine else 1
    own_price = own.price_per_hour / shared if own.price_per_hour else None
    found: dict[str, PricedGpu] = {}
    if not named:
        cards = catalog.catalog()
        found = {n: PricedGpu(cards[n], *prices.price_of(cards[n], None, where)) for n in prices.list_prices()}
        if own_price and own.gpu != "detect" and not run.gpu.is_cpu:
            found[run.gpu.name] = PricedGpu(run.gpu, own_price, f"given in {where}")
        return list(found.values())
    for name, price in named:
        origin = f"--gpu {name}" if gpus else f"{where}, choose.gpus"
        gpu = _card(name, origin)
        if price is None and own_price and own.gpu != "detect" and gpu.name == run.gpu.name:
            price = own_price
        if gpu.name in found:
            raise ServebookError(f"{gpu.name} is given twice", origin, "Keep one of them")
        found[gpu.name] = PricedGpu(gpu, *prices.price_of(gpu, price, origin))
    return list(found.values())


def _card(name: str, origin: str) -> catalog.Gpu:
    try:
        gpu = catalog.resolve(HardwareParams(gpu=name))
    except ServebookError as error:
        raise ServebookError(error.what, origin, error.fix) from None
    if gpu.is_cpu:
        raise ServebookError("no GPU is found on this machine", origin, "Name a card of the catalog, as in H200=3.50")
    return gpu


def _parsed(option: str) -> tuple[str, float | None]:
    name, equals, price = option.partition("=")
    try:
        cost = float(price) if equals else None
    except ValueError:
        cost = math.nan
    if not name or (cost is not None and not 0 < cost < math.inf):
        fault = f"{price!r} is not a price" if name else "names no GPU"
        raise ServebookError(fault, f"--gpu {option}", "Write NAME=PRICE per hour, as in H200=3.50")
    return name, cost


def _learned(run: StoredRun) -> dict[tuple[Any, ...], Calibration]:
    """Constants from the run's own C = 1 points, for set-ups of the same card, split and precision."""
    found: dict[tuple[Any, ...], Calibration] = {}
    measured = [p for p in run.stored_points() if p.sweep == CALIBRATION]
    for name, engine in run.params.engines.items():
        own = [p for p in measured if p.engine == name]
        if not own or not isinstance(engine, VllmEngine):
            continue
        f = forecaster(run.params, name, run.shape, run.gpu, facts=run.facts(name), measured=own, samples=2)
        layout = Layout(
            engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size,
            engine.enable_expert_parallel,
        )  # fmt: skip
        found[run.gpu.name, layout, run.params.model.quantization, run.params.model.kv_cache_dtype] = f.calibration
    return found


def kept_points(run: StoredRun, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Measured points of vLLM engines in stored runs of the same model, for the chart: gpu, user_tok_per_s (1 / mean
    TPOT), tok_per_s_per_gpu, run. folders: folders that contain runs' folders."""
    wanted, found = _size(run), []
    for folder in folders:
        for path in sorted(folder.glob("*/params.yaml")):
            try:
                kept = StoredRun(read_file(path), path.parent, path.parent)
                alike = _size(kept) == wanted
            except ServebookError:
                continue  # skip runs whose model or parameters cannot be read any more
            for p in kept.stored_points() if alike else []:
                engine = kept.params.engines.get(p.engine)
                if not isinstance(engine, VllmEngine) or not (p.tpot_mean_s and p.output_tok_per_s):
                    continue
                if p.verdict == "invalid" or p.sweep == CALIBRATION:
                    continue
                gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
                found.append({
                    "gpu": kept.gpu.name, "user_tok_per_s": 1 / p.tpot_mean_s,
                    "tok_per_s_per_gpu": p.output_tok_per_s / gpus, "run": kept.params.run,
                })  # fmt: skip
    return found


def _size(run: StoredRun) -> tuple[int, ...]:
    s = run.shape
    return s.layers, s.hidden, s.heads, s.kv_heads, s.vocab
