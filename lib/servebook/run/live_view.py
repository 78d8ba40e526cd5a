"""The display of a live run: a bar, the figures so far, and two small plots, as HTML and SVG text.

It does not use matplotlib, because it is drawn once per second beside a load generator that needs the processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..charts import lab_html, words
from ..common.measured_point import Metric
from ..common.predicted_point import interval
from ..config.points import PointSpec
from .live_state import Follower, State

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 380, 150, 58, 24, 10
NAMES: dict[Metric, str] = {"ttft_s": "TTFT", "tpot_s": "TPOT"}


def progress(follower: Follower, state: State, lines: Sequence[str]) -> lab_html.Page:
    """The content of a cell while a sweep is measured."""
    done, of = len(state.done), len(follower.specs)
    left = f", about {words.seconds(state.left_s, 2)} of measuring left" if state.left_s else ""
    head = f"{follower.sweep} on {follower.engine}: {done} of {of} points{left}"
    bar = f'<div class="bar"><i style="width:{100 * done / max(of, 1):.0f}%"></i></div>'
    now = _now(follower, state)
    plots = "".join(_plot(follower, state, metric) for metric in NAMES)
    shown_lines = "".join(f'<p class="soft">{lab_html.text(line)}</p>' for line in lines)
    return lab_html.page(
        [
            f"<p><b>{lab_html.text(head)}</b></p>",
            bar,
            f"<p>{lab_html.text(now)}</p>",
            f'<div class="pair">{plots}</div>',
            shown_lines,
        ],
        head,
    )


def _now(follower: Follower, state: State) -> str:
    if state.now is None:
        return state.status if follower.engine_is_up else f"starting {follower.engine}, or joining the one that runs"
    point = follower.predicted.get(state.now.point)
    parts = []
    for metric, name in NAMES.items():
        if (value := state.means.get(metric)) is not None:
            prediction = point["metrics"].get(metric) if point else None
            predicted = prediction["value"] if prediction else None
            parts.append(
                f"{name} {words.seconds(value)}" + (f" (predicted {words.seconds(predicted)})" if predicted else "")
            )
    phase = "warming up" if state.warm else "so far"
    return f"{_name(state.now)}, {phase}: {', '.join(parts) or 'no answer yet'}; {state.status}"


def _name(spec: PointSpec) -> str:
    if spec.rate_per_s is not None:
        return f"{spec.rate_per_s:g} requests/s"
    return (
        f"{spec.prompt_tokens:,} prompt tokens"
        if spec.kind in ("prompt_length", "calibration")
        else f"C = {spec.concurrency}"
    )


def _tick(spec: PointSpec) -> str:
    if spec.rate_per_s is not None:
        return f"{spec.rate_per_s:.3g}"
    return f"{spec.prompt_tokens:,}" if spec.kind in ("prompt_length", "calibration") else f"{spec.concurrency}"


def _plot(follower: Follower, state: State, metric: Metric) -> str:
    """One metric over the sweep's points: predicted dashed, measured solid, the current point hollow."""
    specs = follower.specs
    place = {s.point: i for i, s in enumerate(specs)}
    intervals = [
        (place[p], m["value"], *span)
        for p, entry in follower.predicted.items()
        if p in place and (m := entry["metrics"].get(metric)) and m["value"] and (span := interval(m))
    ]
    seen = [(place[s.point], v) for s, means in state.done if (v := means.get(metric))]
    live = (place[state.now.point], state.means.get(metric)) if state.now else None
    values = [v for _, v in seen] + [v for row in intervals for v in row[1:]] + ([live[1]] if live and live[1] else [])
    if not values:
        return ""
    low, high = math.log(min(values)), math.log(max(values))
    low, high = (low - 0.05, high + 0.05) if high - low < 0.1 else (low, high)

    def x(i: int) -> float:
        return LEFT + (i + 0.5) * (WIDTH - LEFT) / len(specs)

    def y(value: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (high - math.log(value)) / (high - low)

    intervals.sort()
    seen.sort()
    band = " ".join(
        f"{x(i):.1f},{y(v):.1f}" for i, v in [(r[0], r[2]) for r in intervals] + [(r[0], r[3]) for r in intervals[::-1]]
    )
    dashed = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v, *_ in intervals)
    solid = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in seen)
    colour = "var(--e0)" if follower.engine in ("hf", "naive") else "var(--e1)"
    marks = "".join(f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="4" fill="{colour}"/>' for i, v in seen)
    if live and live[1]:
        at = f'cx="{x(live[0]):.1f}" cy="{y(live[1]):.1f}"'
        marks += f'<circle {at} r="5" fill="var(--paper)" stroke="{colour}" stroke-width="2"/>'
    room = max(1, math.ceil(len(specs) / 8))
    ticks = "".join(
        f'<text x="{x(i):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{lab_html.text(_tick(s))}</text>'
        for i, s in enumerate(specs) if i % room == 0
    )  # fmt: skip
    ends = ""
    for v in (low, high):
        level, shown = y(math.exp(v)), lab_html.text(words.seconds(math.exp(v), 2))
        ends += f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{shown}</text>'
        ends += f'<line x1="{LEFT}" x2="{WIDTH}" y1="{level:.1f}" y2="{level:.1f}" stroke="var(--grid)"/>'
    name = NAMES[metric]
    return (
        f"<figure><figcaption>{name}, mean: measured (dots), predicted (dashed, 80 % interval)</figcaption>"
        f'<svg role="img" aria-label="{name} so far over the points of the sweep" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'style="width:100%;max-width:{WIDTH}px;height:auto;font-size:11px" fill="var(--muted)">{ends}{ticks}'
        f'<polygon points="{band}" fill="{colour}" opacity=".13"/>'
        f'<polyline points="{dashed}" fill="none" stroke="{colour}" stroke-width="1.4" stroke-dasharray="5 3"/>'
        f'<polyline points="{solid}" fill="none" stroke="{colour}" stroke-width="2"/>{marks}</svg></figure>'
    )


__all__ = ["progress"]
