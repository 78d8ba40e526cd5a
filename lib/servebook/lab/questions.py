"""What explore's functions answer: one load, and several side by side. explore.py holds the public names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import model as models
from ..common.errors import ServebookError
from ..common.measured_point import METRICS
from ..hardware import catalog as hardware
from ..predictor import capacity, explain
from ..predictor.forecaster import Forecaster
from ..predictor.point_fields import unserved
from ..predictor.refusal import Refusal
from ..predictor.scenario import Scenario, whole_rounds
from . import comparable, forecasters, runs
from .answers import Forecast, SideBySide
from .asking import changed, setting_from, shows_settings
from .runs import Run
from .setting import Setting, engine_of

QUICK_ARRIVALS = 200  # of an open loop


@shows_settings
def predict(model: str | Setting | None = None, **settings: Any) -> Forecast:
    """One load predicted, with 80 % intervals: `predict("qwen2.5-7b", gpu="H200", concurrency=16)`.

    model: a packaged model, a folder with config.json, a Hub id, or a Setting that the others change. With `run` the
    settings start from that run's own. Raises ServebookError for an unknown name and an impossible value.
    """
    return forecast(setting_from(model, settings))


def forecast(s: Setting) -> Forecast:
    """A setting's load predicted: the one simulation that tiles, cases and curves share."""
    f, spec = forecasters.of(s), s.spec()
    point = forecasters.point(s, spec)
    met = capacity.carry(f, spec, s.slo, 0.0).met_share if point["fits"] else None
    return Forecast(s, point, met, _kv_tokens(f), learned_text(s))


@shows_settings
def quick_predict(model: str | Setting | None = None, **settings: Any) -> Forecast:
    """A quick estimate from one short simulation, without intervals: fast enough to follow a slider."""
    s = setting_from(model, settings)
    f, spec = forecasters.of(s), s.spec()
    refusal = f.server.refuses(s.prompt_tokens, s.output_tokens) or f.overload(spec)
    point = unserved(spec, refusal)
    if refusal:
        return Forecast(s, point, None, _kv_tokens(f))
    scenario = Scenario(f.server, spec, f.load, running_gauge=f.running_gauge)
    count = QUICK_ARRIVALS if s.rate_per_s else whole_rounds(max(120, 3 * s.concurrency), s.concurrency)
    result = scenario.simulate(f.best, f.seed, count, log=True)
    outcome = scenario.summarize(result, f.best)
    if s.rate_per_s:  # a simulated window may contain more or fewer arrivals than the rate gives on average
        tokens = outcome.output_tok_per_s * s.rate_per_s / outcome.request_rate_per_s
        outcome = replace(outcome, request_rate_per_s=s.rate_per_s, output_tok_per_s=tokens)
    parts = explain.breakdown(scenario, f.best, outcome, result)
    point["metrics"] = {m: {"value": getattr(outcome, m)} for m in METRICS}
    point["fits"], point["breakdown"], point["running_mean"] = True, parts, outcome.running_mean
    point["waterfall"] = [list(step) for step in explain.waterfall(f.best, parts["tpot_s"])]
    how = f"Quick estimate while you turn: one simulation of {count:,} requests. The prediction follows when you stop."
    return Forecast(s, point, capacity.met_share(result, s.slo), _kv_tokens(f), how)


def learned_text(s: Setting) -> str:
    """Where the constants come from, and what the interval does not know."""
    drawn = f"80 % interval from {forecasters.SAMPLES} draws of the constants"
    if s.run is None:
        return f"{drawn}; constants from the datasheet and priors, no measurement."
    run = forecasters.learns_from(s)
    if run is None:
        own = runs.read_run(s.run)
        return f"{drawn}; constants from the datasheet and priors, as {own.name} ran on {own.gpu.name}."
    text = f"{drawn}; constants learned from the C = 1 points of {run.name}"
    if comparable.differences(s, run, _engine(s, run)):
        text += f" ({run.shape.name}, {comparable.weights(run.shape)} weights on {run.gpu.name})"
    if extra := forecasters.type_change(s):
        text += (
            f". Widened by {extra:.0%}, as weights or KV cache have another type there: so far off was the one such "
            "change that was measured (fp8 weights predicted from the bf16 run on an H200)"
        )
    return text + "."


def _engine(s: Setting, run: Run) -> str:
    return s.engine if s.engine in run.params.engines else engine_of(run, s.engine) or next(iter(run.params.engines))


def _kv_tokens(f: Forecaster) -> int:
    """Of all replicas together."""
    return f.server.kv_tokens * f.server.layout.data


def compare(model: str | Setting | None = None, /, **cases: Mapping[str, Any] | Setting) -> SideBySide:
    """A setting and changes to it side by side: `compare(s, fp8={"quantization": "fp8"}, a40={"gpu": "A40"})`.

    Each case is a mapping of settings to change, or a Setting. Raises ServebookError for anything else.
    """
    s = setting_from(model, {})
    found = {"as it is": forecast(s)}
    for name, changes in cases.items():
        if not isinstance(changes, Mapping | Setting):
            raise ServebookError(
                f"the case {name!r} is {changes!r}, not a mapping of settings", "explore.compare",
                f'Write {name}={{"quantization": "fp8"}}',
            )  # fmt: skip
        found[name.replace("_", " ")] = forecast(changes if isinstance(changes, Setting) else changed(s, changes))
    return _side_by_side(found)


@shows_settings
def what_if(model: str | Setting | None = None, *, gpus: str | Sequence[str] = (), **settings: Any) -> SideBySide:
    """The usual questions side by side: fp8 weights, fp8 KV cache, half and twice the token budget, other GPUs.

    gpus: names of the catalog, one or several.
    """
    s = setting_from(model, settings)
    return _side_by_side({"as it is": forecast(s)} | {name: _tried(s, c) for name, c in usual_cases(s, gpus).items()})


def usual_cases(s: Setting, gpus: str | Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The changes that `what_if` asks about, by name. Raises ServebookError for a GPU that is not in the catalog."""
    others = [gpus] if isinstance(gpus, str) else list(gpus)
    for name in others:
        if name not in hardware.catalog():
            raise ServebookError(f"no GPU {name!r}", "explore.what_if", f"There are: {', '.join(hardware.catalog())}")
    cases: dict[str, dict[str, Any]] = {}
    if not s.naive:
        if s.quantization is None:
            cases["fp8 weights"] = {"quantization": "fp8"}
        if s.kv_cache_dtype == "auto":
            cases["fp8 KV cache"] = {"kv_cache_dtype": "fp8"}
        config = forecasters.of(s).server.config
        budget = config.max_num_batched_tokens
        if budget // 2 >= config.max_num_seqs:
            cases[f"budget {budget // 2:,}"] = {"max_num_batched_tokens": budget // 2}
        cases[f"budget {2 * budget:,}"] = {"max_num_batched_tokens": 2 * budget}
    return cases | {name: {"gpu": name} for name in others}


def _tried(s: Setting, changes: Mapping[str, Any]) -> Forecast:
    """A case, or the reason why it is not possible (for example, a GPU without bfloat16)."""
    try:
        return forecast(changed(s, changes))
    except ServebookError as error:
        other = s.but(**changes)
        return Forecast(other, unserved(s.spec(), Refusal(error.line(), headline="not possible")), None, 0)


def _side_by_side(forecasts: dict[str, Forecast]) -> SideBySide:
    measured = {
        name: found for name, f in forecasts.items() if f.fits and (found := comparable.measured_point(f.setting))
    }
    return SideBySide(forecasts, {name: (run.name, p) for name, (run, p) in measured.items()})


def all_runs() -> list[str]:
    """Runs that `against` and the panel can load: own ones, the reference runs, published points."""
    return list(runs.names())


def all_models() -> list[str]:
    """Packaged models; a folder with config.json and a Hub id do as well."""
    return models.packaged()


def all_gpus() -> list[str]:
    """GPUs of the catalog."""
    return list(hardware.catalog())


__all__ = [
    "all_gpus",
    "all_models",
    "all_runs",
    "compare",
    "forecast",
    "predict",
    "quick_predict",
    "usual_cases",
    "what_if",
]  # fmt: skip
