"""Predictions to play with: one load, several side by side, a curve, a curve with measured points on it.

Every function takes settings by name (see Setting) and returns an object that shows itself in a cell and holds its
figures as attributes. `panel` is the same with widgets. Nothing is measured and nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.figure import Figure

from .. import analysis, capacity, charts, explain, hardware, model
from ..charts import bars, style, words
from ..errors import ServebookError
from ..forecast import Outcome, Scenario, whole_rounds
from . import look, runs
from .look import Shown
from .runs import Run
from .setting import SAMPLES, Setting, engine_of, of_run

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GLANCE_ARRIVALS = 200  # of an open loop
HOW = f"80 % intervals, from {SAMPLES} draws of the constants (a run's own come from more)."


@dataclass(frozen=True)
class Forecast:
    """What a load is predicted to give. Seconds, tokens/s, requests/s; None where it is not served (see `note`)."""

    setting: Setting
    point: Mapping[str, Any] = field(repr=False)  # as in predictions.json; no low and high where it was a glance
    met_share: float | None = field(repr=False)  # of the requests, within the service level
    kv_tokens: int = field(repr=False)  # the KV cache's size
    how: str = field(repr=False, default="")

    @property
    def fits(self) -> bool:
        return bool(self.point["fits"])

    @property
    def note(self) -> str | None:
        return self.point.get("note")

    def value(self, metric: str) -> float | None:
        """The value of one of ttft_s, tpot_s, e2e_s, output_tok_per_s, decode_tok_per_s, request_rate_per_s."""
        return (self.point["metrics"].get(metric) or {}).get("value")

    def interval(self, metric: str) -> tuple[float, float] | None:
        """The 80 % interval of such a metric."""
        said = self.point["metrics"].get(metric)
        return (said["low"], said["high"]) if said and "low" in said else None

    @property
    def ttft_s(self) -> float | None:
        return self.value("ttft_s")

    @property
    def tpot_s(self) -> float | None:
        return self.value("tpot_s")

    @property
    def e2e_s(self) -> float | None:
        return self.value("e2e_s")

    @property
    def output_tok_per_s(self) -> float | None:
        return self.value("output_tok_per_s")

    @property
    def request_rate_per_s(self) -> float | None:
        return self.value("request_rate_per_s")

    @property
    def goodput_per_s(self) -> float | None:
        """Requests/s within the setting's service level; all of them where it sets none."""
        return None if self.met_share is None else self.met_share * (self.request_rate_per_s or 0.0)

    @property
    def kv_share(self) -> float | None:
        """Share of the KV cache that the running requests hold: each its prompt and half of its output."""
        if not self.fits or not self.kv_tokens:
            return None
        held = self.point["running_mean"] * (self.setting.prompt_tokens + self.setting.output_tokens / 2)
        return min(1.0, held / self.kv_tokens)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Of output; None without a price."""
        price, rate = self.setting.price_per_hour * self.setting.tensor_parallel_size, self.output_tok_per_s
        return price / 3600 / rate * 1e6 if price and rate else None

    def waterfalls(self) -> dict[str, list[tuple[str, float]]]:
        """Where the time of an output token and of the first token goes: {"TPOT": [(label, seconds)], "TTFT": ...}."""
        if not self.fits:
            return {}
        found = {
            "TPOT": [(label, seconds) for label, seconds in self.point["waterfall"]],
            "TTFT": analysis.first_token_parts(self.point["breakdown"].get("ttft_s") or {}),
        }
        return {metric: _shortened(parts) for metric, parts in found.items() if parts}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return look.page([self.html()], self.text()).bundle()

    def html(self) -> str:
        """What a cell shows, without the style around it."""
        if not self.fits:
            return f'{_head(self.setting)}<p class="bad">{look.text(self.note)}</p>'
        drawn = "".join(bars.waterfall(parts, what=metric) for metric, parts in self.waterfalls().items())
        notes = "".join(f'<p class="soft">{look.text(n)}</p>' for n in (self.note, self.how) if n)
        return f'{_head(self.setting)}{look.tiles(self._tiles())}<div class="pair">{drawn}</div>{notes}'

    def text(self) -> str:
        """The same in one line of plain text."""
        if not self.fits:
            return f"{self.setting.load_text}: {self.note}"
        return f"{self.setting.load_text}: " + ", ".join(
            f"{what} {value}" for what, value, _ in self._tiles() if value != "–"
        )

    def _tiles(self) -> list[tuple[str, str, str]]:
        s, met = self.setting, self.met_share
        level = " ".join(f"{n} ≤ {words.seconds(v)}" for n, v in (("TTFT", s.ttft_slo_s), ("TPOT", s.tpot_slo_s)) if v)
        return [
            ("TTFT", words.seconds(self.ttft_s), self._range("ttft_s", "s")),
            ("TPOT", words.seconds(self.tpot_s), self._range("tpot_s", "s")),
            ("Output tokens/s", words.number(self.output_tok_per_s), self._range("output_tok_per_s", "")),
            ("Requests/s", words.number(self.request_rate_per_s), f"latency {words.seconds(self.e2e_s)}"),
            ("Goodput/s", words.number(self.goodput_per_s), f"{words.percent(met)} within {level}" if level else "no service level"),
            ("KV cache in use", words.percent(self.kv_share), f"of {words.number(self.kv_tokens)} tokens"),
            ("Cost per 1M", _money(self.cost_per_million_tokens), "output tokens" if s.price_per_hour else "no price given"),
        ]  # fmt: skip

    def _range(self, metric: str, unit: str) -> str:
        if (span := self.interval(metric)) is None:
            return "…"
        low, high = span
        scale = 1e3 if unit == "s" and (self.value(metric) or 0.0) < 1 else 1.0
        return f"{words.number(low * scale)} to {words.number(high * scale)}"


def predict(setting: Setting | None = None, **settings: Any) -> Forecast:
    """One load predicted: `predict(model="qwen2.5-7b", gpu="H200", prompt_tokens=512, concurrency=16)`.

    settings: fields of Setting; `setting`: what they change, else Setting's defaults, or the run's where `run` is
    given. Raises ServebookError for an unknown name and a value that cannot be.
    """
    s = _setting(setting, settings)
    f, spec = s.forecaster(), s.spec()
    point = f.point(spec)
    if not math.isfinite((point["metrics"].get("e2e_s") or {}).get("value", 0.0)):
        point |= {"metrics": {}, "fits": False, "note": _overload(s)}
    met = capacity.carry(f, spec, s.slo, 0.0).met_share if point["fits"] else None
    return Forecast(s, point, met, f.server.kv_tokens, HOW)


def glance(setting: Setting | None = None, **settings: Any) -> Forecast:
    """The same from one simulation of fewer requests, without intervals: fast enough to follow a slider."""
    s = _setting(setting, settings)
    f, spec = s.forecaster(), s.spec()
    point: dict[str, Any] = {"metrics": {}, "fits": False, "note": f.server.refuses(s.prompt_tokens, s.output_tokens)}
    if point["note"]:
        return Forecast(s, point, None, f.server.kv_tokens)
    scenario = Scenario(f.server, spec, f.load, running_gauge=f.running_gauge)
    count = GLANCE_ARRIVALS if s.rate_per_s else whole_rounds(max(60, 2 * s.concurrency), s.concurrency)
    result = scenario.simulate(f.best, f.seed, count, log=True)
    outcome = scenario.summarize(result, f.best)
    if not result.requests:
        return Forecast(s, point | {"note": _overload(s)}, None, f.server.kv_tokens)
    if s.rate_per_s:  # a simulated window happens to hold more or fewer arrivals than the rate asks for
        tokens = outcome.output_tok_per_s * s.rate_per_s / outcome.request_rate_per_s
        outcome = replace(outcome, request_rate_per_s=s.rate_per_s, output_tok_per_s=tokens)
    parts = explain.breakdown(scenario, f.best, outcome, result)
    point |= {
        "metrics": {m: {"value": getattr(outcome, m)} for m in Outcome.METRICS}, "fits": True, "breakdown": parts,
        "waterfall": explain.waterfall(f.best, parts["tpot_s"]), "running_mean": outcome.running_mean,
    }  # fmt: skip
    how = f"A glance: one simulation of {count:,} requests. The interval follows."
    return Forecast(s, point, capacity.met_share(result, s.slo), f.server.kv_tokens, how)


def _overload(s: Setting) -> str:
    return f"overloaded: {s.rate_per_s:g} requests/s are more than it serves, and its queue grows without end"


@dataclass(frozen=True)
class SideBySide:
    """Forecasts by what was changed; the first is what the others are set against."""

    forecasts: dict[str, Forecast]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return look.page([self.html()], self.text()).bundle()

    def html(self) -> str:
        first = next(iter(self.forecasts.values()))
        head = ["", "TTFT", "TPOT", "Output tok/s", "Goodput/s", "KV in use", "Cost per 1M"]
        rows = [[name, *self._row(f, first)] for name, f in self.forecasts.items()]
        return look.table(f"What would change it: {first.setting.load_text} (one simulation each)", head, rows)

    def text(self) -> str:
        return "\n".join(f"{name}: {f.text()}" for name, f in self.forecasts.items())

    @staticmethod
    def _row(f: Forecast, first: Forecast) -> list[str]:
        if not f.fits:
            return [str(f.note).split(":")[0], *["–"] * 5]

        def against(value: float | None, base: float | None, shown: str) -> str:
            if f is first or not value or not base:
                return shown
            return f"{shown} ({words.percent(value / base - 1, signed=True)})"

        return [
            against(f.ttft_s, first.ttft_s, words.seconds(f.ttft_s)),
            against(f.tpot_s, first.tpot_s, words.seconds(f.tpot_s)),
            against(f.output_tok_per_s, first.output_tok_per_s, words.number(f.output_tok_per_s)),
            against(f.goodput_per_s, first.goodput_per_s, words.number(f.goodput_per_s)),
            words.percent(f.kv_share),
            _money(f.cost_per_million_tokens),
        ]  # fmt: skip


def compare(setting: Setting | None = None, /, **cases: Mapping[str, Any]) -> SideBySide:
    """A setting and changes to it side by side: `compare(s, fp8={"quantization": "fp8"}, h100={"gpu": "H100-80GB-SXM"})`."""
    s = setting or Setting()
    return SideBySide({"as it is": glance(s)} | {name: glance(s, **changes) for name, changes in cases.items()})


def what_if(setting: Setting | None = None, *, gpus: Sequence[str] = (), **settings: Any) -> SideBySide:
    """The usual questions side by side: fp8 weights, fp8 KV cache, half and twice the token budget, other GPUs."""
    s = _setting(setting, settings)
    cases: dict[str, dict[str, Any]] = {}
    if s.engine == "vllm":
        if s.quantization is None:
            cases["fp8 weights"] = {"quantization": "fp8"}
        if s.kv_cache_dtype == "auto":
            cases["fp8 KV cache"] = {"kv_cache_dtype": "fp8"}
        budget, seats = s.forecaster().server.config.max_num_batched_tokens, s.forecaster().server.config.max_num_seqs
        if budget // 2 >= seats:
            cases[f"budget {budget // 2:,}"] = {"max_num_batched_tokens": budget // 2}
        cases[f"budget {2 * budget:,}"] = {"max_num_batched_tokens": 2 * budget}
    cases |= {name: {"gpu": name, "price_per_hour": 0.0} for name in gpus}
    return SideBySide({"as it is": glance(s)} | {name: _tried(s, changes) for name, changes in cases.items()})


def _tried(s: Setting, changes: Mapping[str, Any]) -> Forecast:
    """A case, or why there is none (a GPU without bfloat16, say)."""
    try:
        return glance(s, **changes)
    except ServebookError as error:
        return Forecast(s.but(**changes), {"metrics": {}, "fits": False, "note": error.line()}, None, 0)


@dataclass(frozen=True)
class Curve:
    """Predictions along one axis, with a run's measured points where it has them."""

    setting: Setting
    sweep: str
    kind: str  # concurrency, prompt_length or arrival_rate
    predicted: list[dict[str, Any]] = field(repr=False)
    measured: list[dict[str, Any]] = field(repr=False)
    run: str | None = None

    def frame(self) -> Any:
        """One row a point and metric: predicted, low, high (a DataFrame)."""
        from .. import score

        return score.prediction_frame(self.predicted)

    def figures(self, narrow: bool = False) -> list[Figure]:
        """The book's own charts of such a sweep."""
        drawers = {"prompt_length": [charts.prompt_length], "arrival_rate": [charts.arrival_rate]}.get(
            self.kind, [charts.latencies, charts.output_rate]
        )
        return [style.at_width(d, self.measured, self.predicted, self.sweep, narrow=narrow) for d in drawers]

    def html(self) -> str:
        note = ""
        if self.measured:
            p = self.measured[0]
            own = self.kind == "prompt_length" or p["prompt_tokens"] == self.setting.prompt_tokens
            if not own or p["output_tokens"] != self.setting.output_tokens:
                note = f"Measured with {p['prompt_tokens']:,} tokens in and {p['output_tokens']:,} out; the prediction is for {self.setting.load_text.partition(', ')[2]}."
        head = f"{self.run}, {self.sweep}: measured and predicted" if self.measured else "Along the load, predicted"
        drawn = "".join(look.figure(f) for f in self.figures())
        return f"<p><b>{look.text(head)}</b></p>{drawn}" + (f'<p class="soft">{look.text(note)}</p>' if note else "")

    def text(self) -> str:
        return " ".join(style.text_of(f).takeaway for f in self.figures())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return look.page([self.html()], self.text()).bundle()


def curve(setting: Setting | None = None, *, concurrency: Iterable[int] = CONCURRENCIES, **settings: Any) -> Curve:
    """TTFT, TPOT and output rate along the concurrency."""
    s = _setting(setting, settings)
    return _curve(s, "explore", "concurrency", [s.but(concurrency=int(c), rate_per_s=None) for c in concurrency], [])


def against(
    run: str, sweep: str | None = None, engine: str | None = None, setting: Setting | None = None, **settings: Any
) -> Curve:
    """A run's measured points of a sweep laid over the prediction for its own setting, or for a changed one.

    run: a name of `all_runs()`, or a folder. sweep: its first unless given. The prediction has learned from the run's
    C = 1 points where the GPU is the run's.
    """
    stored = runs.load(run)
    name = engine or next(iter(measured_engines(stored)), None)
    if name is None or not (sweeps := stored.sweeps(name)):
        raise ServebookError(
            "no sweep was measured", run, f"It has points of {', '.join(measured_engines(stored)) or 'nothing'}"
        )
    if sweep is None:
        sweep = sweeps[0]
    if sweep not in sweeps:
        raise ServebookError(f"no sweep {sweep!r} of {name}", run, f"There are: {', '.join(sweeps)}")
    s = _setting(setting or of_run(stored, name, sweep), settings)
    measured = stored.sweep(name, sweep)
    kind = kind_of(measured)
    axis = {"prompt_length": "prompt_tokens", "arrival_rate": "rate_per_s"}.get(kind, "concurrency")
    values = sorted({p[axis] for p in measured if p.get(axis)})
    at = [s.but(**{"rate_per_s": None} | {axis: v if axis == "rate_per_s" else int(v)}) for v in values]
    return _curve(s, sweep, kind, at, measured, name, run)


def _curve(
    s: Setting, sweep: str, kind: str, at: Sequence[Setting], measured: list[dict[str, Any]], engine: str | None = None,
    run: str | None = None,
) -> Curve:  # fmt: skip
    f = s.forecaster()
    name = engine or f.server.name
    shares = {
        (p["prompt_tokens"], p["output_tokens"], p.get("concurrency")): p.get("cache_hit_share") for p in measured
    }
    predicted = []
    for each in at:
        spec = each.spec(sweep, name)
        hit = shares.get((spec.prompt_tokens, spec.output_tokens, spec.concurrency)) or 0.0
        predicted.append(f.point(spec, hit if hit > HIT else 0.0))
    return Curve(s, sweep, kind, predicted, measured, run)


HIT = 0.02  # prefix-cache hits of a measured point above which its prediction takes them into account


def kind_of(measured: Sequence[Mapping[str, Any]]) -> str:
    """What a sweep's points differ in: concurrency, prompt_length or arrival_rate."""
    if any(p.get("rate_per_s") for p in measured):
        return "arrival_rate"
    return "prompt_length" if len({p["prompt_tokens"] for p in measured}) > 1 else "concurrency"


def measured_engines(run: Run) -> list[str]:
    """Engines with points, those that batch first."""
    found = [n for n in run.params.engines if any(p["engine"] == n for p in run.points)]
    return sorted(found, key=lambda n: run.params.engines[n].kind == "naive")


def all_runs() -> list[str]:
    """Runs that `against` and the panel can load: own ones, the reference runs, published points."""
    return list(runs.names())


def all_models() -> list[str]:
    """Packaged models; a folder with config.json and a Hub id do as well."""
    return model.packaged()


def all_gpus() -> list[str]:
    """GPUs of the catalog."""
    return list(hardware.catalog())


def panel(**settings: Any) -> Any:
    """The widgets: everything above at hand, redrawn as it changes. settings: where they start."""
    from .panel import Panel

    return Panel(_setting(None, settings))


def _setting(base: Setting | None, changes: Mapping[str, Any]) -> Setting:
    if base is None and changes.get("run"):
        run = runs.load(changes["run"])
        engine = engine_of(run, changes.get("engine") or "vllm") or next(iter(run.params.engines))
        base = of_run(run, engine, next(iter(run.sweeps(engine)), None))
    return (base or Setting()).but(**changes)


def _shortened(parts: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The parts of at least 1 % of the whole, and the rest as one."""
    floor = 0.01 * sum(v for _, v in parts)
    kept = [p for i, p in enumerate(parts) if i == 0 or abs(p[1]) >= floor]
    rest = sum(v for i, (_, v) in enumerate(parts) if i and abs(v) < floor)
    return [*kept, ("small parts", rest)] if rest else kept


def _head(s: Setting) -> str:
    made = [
        s.model,
        s.card.name + (f" × {s.tensor_parallel_size}" if s.tensor_parallel_size > 1 else ""),
        "vLLM" if s.engine == "vllm" else "naive server",
    ]
    made += [f"{s.quantization} weights"] if s.quantization else []
    made += ["fp8 KV cache"] if s.kv_cache_dtype == "fp8" else []
    made += [f"constants learned from {s.run}"] if s.run else []
    return f'<p><b>{look.text(s.load_text)}</b> <span class="soft">{look.text(", ".join(made))}</span></p>'


def _money(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


__all__ = [
    "Curve", "Forecast", "Setting", "Shown", "SideBySide", "against", "all_gpus", "all_models", "all_runs", "compare",
    "curve", "glance", "panel", "predict", "what_if",
]  # fmt: skip
