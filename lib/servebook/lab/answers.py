"""What an exploration answers: a forecast, several side by side. Each shows itself in a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..charts import lab_html, waterfall_svg, words
from ..common.measured_point import MeasuredPoint, Metric
from ..common.predicted_point import PredictedPoint, interval
from ..scoring import analysis
from . import forecasters
from .setting import Setting


class Answer:
    """A result that displays itself: `html` in Lab's style, `text` if HTML cannot be shown."""

    def html(self) -> str:
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return lab_html.page([self.html()], self.text()).bundle()


@dataclass(frozen=True)
class Forecast(Answer):
    """The predicted figures of a load, in seconds, tokens/s and requests/s; None if it cannot be served (see
    `note`)."""

    setting: Setting
    point: PredictedPoint = field(repr=False)  # as in predictions.json; no low and high of a quick prediction
    met_share: float | None = field(repr=False)  # of the requests, within the service level
    kv_tokens: int = field(repr=False)  # the KV cache's size
    how: str = field(repr=False, default="")

    def __repr__(self) -> str:
        return self.text()

    @property
    def fits(self) -> bool:
        return bool(self.point["fits"])

    @property
    def note(self) -> str | None:
        return self.point.get("note")

    def value(self, metric: Metric) -> float | None:
        """The value of one of ttft_s, tpot_s, e2e_s, output_tok_per_s, decode_tok_per_s, request_rate_per_s."""
        predicted = self.point["metrics"].get(metric)
        return predicted["value"] if predicted else None

    def interval(self, metric: Metric) -> tuple[float, float] | None:
        """The 80 % interval of such a metric."""
        predicted = self.point["metrics"].get(metric)
        return interval(predicted) if predicted else None

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
        """Requests/s within the setting's service level; all requests if it has none."""
        return None if self.met_share is None else self.met_share * (self.request_rate_per_s or 0.0)

    @property
    def kv_share(self) -> float | None:
        """Share of the KV cache that the running requests hold: each its prompt and half of its output."""
        if not self.fits or not self.kv_tokens:
            return None
        held = self.point["running_mean"] * (self.setting.prompt_tokens + self.setting.output_tokens / 2)
        return float(min(1.0, held / self.kv_tokens))

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Of output; None without a price."""
        price, rate = self.setting.price_per_hour * self.setting.gpus, self.output_tok_per_s
        return price / 3600 / rate * 1e6 if price and rate else None

    def waterfalls(self) -> dict[str, list[tuple[str, float]]]:
        """Where the time of an output token and of the first token goes: {"TPOT": [(label, seconds)], "TTFT": ...}."""
        if not self.fits:
            return {}
        found: dict[Literal["TPOT", "TTFT"], list[tuple[str, float]]] = {
            "TPOT": [(label, seconds) for label, seconds in self.point["waterfall"]],
            "TTFT": analysis.first_token_parts(self.point["breakdown"].get("ttft_s") or {}),
        }
        return {metric: _shortened(parts) for metric, parts in found.items() if parts}

    def html(self) -> str:
        """What a cell shows, without the style around it."""
        if not self.fits:
            return f'{_head(self.setting)}<p class="bad">{lab_html.text(self.note)}</p>'
        drawn = "".join(
            waterfall_svg.waterfall(parts, what=metric, total=(self.ttft_s if metric == "TTFT" else self.tpot_s) or 0.0)
            for metric, parts in self.waterfalls().items()
        )
        notes = "".join(f'<p class="soft">{lab_html.text(n)}</p>' for n in (self.note, self.how) if n)
        return f'{_head(self.setting)}{lab_html.tiles(self._tiles())}<div class="pair">{drawn}</div>{notes}'

    def text(self) -> str:
        """The same in one line of plain text."""
        if not self.fits:
            return f"{self.setting.load_text}: {self.note}"
        return f"{self.setting.load_text}: " + ", ".join(
            f"{what} {value}" for what, value, _ in self._tiles() if value != "–"
        )

    def _tiles(self) -> list[tuple[str, str, str]]:
        s, met = self.setting, self.met_share
        level = ", ".join(words.seconds(v) for v in (s.ttft_slo_s, s.tpot_slo_s) if v)
        within = f"{words.percent(met)} meet {level}" if level else "no service level"
        return [
            ("TTFT", words.seconds(self.ttft_s), self._range("ttft_s", "s")),
            ("TPOT", words.seconds(self.tpot_s), self._range("tpot_s", "s")),
            ("Output tokens/s", words.number(self.output_tok_per_s), self._range("output_tok_per_s", "")),
            ("Requests/s", words.number(self.request_rate_per_s), f"latency {words.seconds(self.e2e_s)}"),
            ("Goodput/s", words.number(self.goodput_per_s), within),
            ("KV cache in use", words.percent(self.kv_share), f"of {words.number(self.kv_tokens)} tokens"),
            (
                "Cost per 1M",
                _money(self.cost_per_million_tokens),
                "output tokens" if s.price_per_hour else "no price given",
            ),
        ]

    def _range(self, metric: Metric, unit: str) -> str:
        if (span := self.interval(metric)) is None:
            return "…"
        low, high = span
        scale = 1e3 if unit == "s" and (self.value(metric) or 0.0) < 1 else 1.0
        return f"{words.number(low * scale)} to {words.number(high * scale)}"


@dataclass(frozen=True)
class SideBySide(Answer):
    """Forecasts by what was changed; the first is what the others are set against. measured: {case: (run, point)} of
    stored runs that measured a case under this load."""

    forecasts: dict[str, Forecast]
    measured: Mapping[str, tuple[str, MeasuredPoint]] = field(repr=False, default_factory=dict)

    def __repr__(self) -> str:
        return self.text()

    def html(self) -> str:
        first = next(iter(self.forecasts.values()))
        head = ["", "TTFT", "TPOT", "Output tok/s", "80 % interval", "Goodput/s", "Cost per 1M"]
        head += ["Measured tok/s"] if self.measured else []
        rows = [[name, *self._row(f, first), *self._measured(name)] for name, f in self.forecasts.items()]
        table = lab_html.table(f"What would change it: {first.setting.load_text}", head, rows)
        known = dict.fromkeys(run for run, _ in self.measured.values())
        notes = [f"Measured: {words.listing(list(known))}. In brackets: against the first row."] if known else []
        notes += ["Wider intervals: the constants were learned with another type of weights or KV cache."] * any(
            forecasters.type_change(f.setting) for f in self.forecasts.values() if f.fits
        )
        return table + "".join(f'<p class="soft">{lab_html.text(n)}</p>' for n in notes)

    def text(self) -> str:
        lines = [f"{name}: {f.text()}" for name, f in self.forecasts.items()]
        for i, name in enumerate(self.forecasts):
            if shown := "".join(self._measured(name)).replace("–", ""):
                lines[i] += f"; measured {shown} output tok/s"
        return "\n".join(lines)

    def _measured(self, name: str) -> list[str]:
        if not self.measured:
            return []
        if name not in self.measured:
            return ["–"]
        base = self.measured.get(next(iter(self.forecasts)))
        value, against = self.measured[name][1].output_tok_per_s, base and base[1].output_tok_per_s
        return [_against(value, None if base is self.measured[name] else against, words.number(value))]

    @staticmethod
    def _row(f: Forecast, first: Forecast) -> list[str]:
        if not f.fits:
            return [f.point.get("refused", ""), *["–"] * 5]

        def against(value: float | None, base: float | None, shown: str) -> str:
            return _against(value, None if f is first else base, shown)

        span = f.interval("output_tok_per_s")
        return [
            against(f.ttft_s, first.ttft_s, words.seconds(f.ttft_s)),
            against(f.tpot_s, first.tpot_s, words.seconds(f.tpot_s)),
            against(f.output_tok_per_s, first.output_tok_per_s, words.number(f.output_tok_per_s)),
            f"{words.number(span[0])} to {words.number(span[1])}" if span else "–",
            against(f.goodput_per_s, first.goodput_per_s, words.number(f.goodput_per_s)),
            _money(f.cost_per_million_tokens),
        ]


def _against(value: float | None, base: float | None, shown: str) -> str:
    """A value with its ratio to a base in brackets."""
    if not value or not base or 0.995 < value / base < 1.005:
        return shown
    return f"{shown} ({words.factor(value / base)})"


def _shortened(parts: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The parts of at least 1 % of the whole, and the rest as one."""
    total = sum(v for _, v in parts)
    kept = [p for i, p in enumerate(parts) if i == 0 or p[1] >= 0.01 * total]
    rest = total - sum(v for _, v in kept)
    return [*kept, ("small parts", rest)] if rest >= 0.0005 * total else kept


def _head(s: Setting) -> str:
    made = [
        s.model,
        s.card.name + (f" × {s.gpus}" if s.gpus > 1 else ""),
        {"vllm": "vLLM", "naive": "naive server"}.get(s.engine, s.engine),
    ]
    made += [f"{s.quantization} weights"] if s.quantization else []
    made += ["fp8 KV cache"] if s.kv_cache_dtype == "fp8" else []
    if s.run:
        learned = forecasters.learns_from(s)
        made.append(f"constants learned from {learned.name}" if learned else f"not comparable with {s.run}")
    return f'<p><b>{lab_html.text(s.load_text)}</b> <span class="soft">{lab_html.text(", ".join(made))}</span></p>'


def _money(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


__all__ = ["Answer", "Forecast", "SideBySide"]
