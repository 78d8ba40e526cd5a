"""Curves along a load: predicted alone, or with the measured points that may be set against them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .. import charts
from ..charts import lab_html, style
from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..common.predicted_point import PredictedPoint
from ..scoring import score
from . import comparable, forecasters, runs
from .answers import Answer
from .asking import changed, setting_from, shows_settings
from .runs import Run
from .setting import Setting, engine_of, of_run

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIT = 0.02  # prefix-cache hits of a measured point above which its prediction takes them into account


@dataclass(frozen=True)
class Curve(Answer):
    """Predictions along one axis, with a run's measured points if it has any."""

    setting: Setting
    sweep: str
    kind: str  # concurrency, prompt_length or arrival_rate
    predicted: list[PredictedPoint] = field(repr=False)
    measured: list[MeasuredPoint] = field(repr=False)
    run: str | None = None  # that measured the points
    note: str = ""  # what does not compare, and why

    def __repr__(self) -> str:
        return self.text()

    def frame(self) -> Any:
        """One row a point and metric: predicted, low, high (a DataFrame)."""
        return score.prediction_frame(self.predicted)

    @functools.cached_property
    def figures(self) -> list[Figure]:
        """The book's own charts of such a sweep."""
        drawers = {"prompt_length": [charts.prompt_length], "arrival_rate": [charts.arrival_rate]}.get(
            self.kind, [charts.latencies, charts.output_rate]
        )
        return [style.at_width(d, self.measured, self.predicted, self.sweep, narrow=False) for d in drawers]

    def html(self) -> str:
        head = f"{self.run}, {self.sweep}: measured and predicted" if self.measured else "Along the load, predicted"
        drawn = "".join(lab_html.figure(f) for f in self.figures)
        return f"<p><b>{lab_html.text(head)}</b></p>{drawn}" + (
            f'<p class="soft">{lab_html.text(self.note)}</p>' if self.note else ""
        )

    def text(self) -> str:
        return " ".join([*(style.text_of(f).takeaway for f in self.figures), self.note]).strip()

    def to_csv(self, path: str | Path) -> Path:
        """Predicted points with their intervals and the measured values, as one CSV."""
        frame = self.frame()
        if self.measured:
            seen = score.measured_frame(score.complete_frame(self.measured))
            load = ["metric", "concurrency", "prompt_tokens", "output_tokens", "rate_per_s"]
            seen = seen[[*load, "measured", "measured_low", "measured_high", "verdict"]].assign(measured_in=self.run)
            frame = frame.merge(seen, on=load, how="outer")
        return files.write_text(Path(path), frame.to_csv(index=False))

    def to_png(self, path: str | Path) -> list[Path]:
        """Each figure as a PNG of 200 dpi; from the second on the name carries a number."""
        path, saved = Path(path), []
        for i, drawn in enumerate(self.figures):
            each = path if i == 0 else path.with_stem(f"{path.stem}-{i + 1}")
            with style.theme():
                drawn.savefig(each, dpi=200)
            saved.append(each)
        return saved


@shows_settings
def curve(model: str | Setting | None = None, *, concurrency: Iterable[int] = CONCURRENCIES, **settings: Any) -> Curve:
    """TTFT, TPOT and output rate predicted along the concurrency."""
    s = setting_from(model, settings)
    along = [s.but(concurrency=c, rate_per_s=None) for c in concurrency]
    return _curve(s, "explore", "concurrency", along, [])


@shows_settings
def against(
    run: str, sweep: str | None = None, engine: str | None = None, setting: Setting | None = None,
    **settings: Any,
) -> Curve:  # fmt: skip
    """A run's measured points of a sweep, compared with the prediction for its own setting or for a changed one.

    run: a name of `all_runs()`, or a folder. sweep, engine: default: the run's first. If the setting is not the one
    that the run measured, the answer lists the differences and gives no error; a stored run that did measure the
    setting is used instead."""
    stored = runs.read_run(run)
    name = engine
    if name is not None and name not in stored.params.engines:
        name = engine_of(stored, name)
    name = name or next(iter(measured_engines(stored)), None)
    if name is None or not (sweeps := stored.sweeps(name)):
        raise ServebookError(
            "no sweep was measured", run, f"It has points of {', '.join(measured_engines(stored)) or 'nothing'}"
        )
    if sweep is None:
        sweep = sweeps[0]
    if sweep not in sweeps:
        raise ServebookError(f"no sweep {sweep!r} of {name}", run, f"There are: {', '.join(sweeps)}")
    s = changed(setting or of_run(stored, name, sweep), settings)
    measured = stored.sweep(name, sweep)
    kind = kind_of(measured)
    axis = {"prompt_length": "prompt_tokens", "arrival_rate": "rate_per_s"}.get(kind, "concurrency")
    values = sorted({v for p in measured if (v := getattr(p, axis))})
    at = [s.but(**{"rate_per_s": None} | {axis: v if axis == "rate_per_s" else int(v)}) for v in values]
    apart = comparable.differences(s, stored, name) + _other_lengths(s, kind, measured)
    if not apart:
        return _curve(s, sweep, kind, at, measured, name, stored.name)
    for other, its in comparable.measuring(s):  # this setting was measured, by another run
        for there in other.sweeps(its):
            points = [replace(p, sweep=sweep, engine=name) for p in other.sweep(its, there)]
            if kind_of(points) == kind and not _other_lengths(s, kind, points):
                return _curve(s, sweep, kind, at, points, name, other.name)
    note = f"Not comparable with {stored.name}: {'; '.join(d.text for d in apart)}."
    if any(d.other for d in apart):
        return _curve(s, sweep, kind, at, [], name, None, f"{note} Its points are left out.")
    apart_name = f"{name} as measured"
    return _curve(s, sweep, kind, at, [replace(p, engine=apart_name) for p in measured], name, stored.name, note)


def _other_lengths(s: Setting, kind: str, measured: Sequence[MeasuredPoint]) -> list[comparable.Difference]:
    p = measured[0]
    own = kind == "prompt_length" or p.prompt_tokens == s.prompt_tokens
    if own and p.output_tokens == s.output_tokens:
        return []
    return [comparable.Difference(f"{s.lengths_text}, measured with {p.prompt_tokens:,} in, {p.output_tokens:,} out")]


def _curve(
    s: Setting, sweep: str, kind: str, at: Sequence[Setting], measured: list[MeasuredPoint], engine: str | None = None,
    run: str | None = None, note: str = "",
) -> Curve:  # fmt: skip
    name = engine or forecasters.of(s).server.name
    shares = {(p.prompt_tokens, p.output_tokens, p.concurrency): p.cache_hit_share for p in measured}
    predicted, hits = [], False
    for each in at:
        spec = each.spec(sweep, name)
        hit = shares.get((spec.prompt_tokens, spec.output_tokens, spec.concurrency)) or 0.0
        hits |= hit > HIT
        predicted.append(forecasters.point(each, spec, hit if hit > HIT else 0.0))
    if hits:
        note = f"{note} Predicted with the prefix-cache hits that were measured; the load above has none.".strip()
    return Curve(s, sweep, kind, predicted, measured, run, note)


def kind_of(measured: Sequence[MeasuredPoint]) -> str:
    """What a sweep's points differ in: concurrency, prompt_length or arrival_rate."""
    if any(p.rate_per_s for p in measured):
        return "arrival_rate"
    return "prompt_length" if len({p.prompt_tokens for p in measured}) > 1 else "concurrency"


def measured_engines(run: Run) -> list[str]:
    """Engines with points, those that batch first."""
    found = [n for n in run.params.engines if any(p.engine == n for p in run.points)]
    return sorted(found, key=lambda n: run.params.engines[n].kind == "naive")


__all__ = ["Curve", "against", "curve", "kind_of", "measured_engines"]
