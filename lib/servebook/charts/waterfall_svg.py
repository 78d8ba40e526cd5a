"""The waterfall as a string of SVG, for a screen that redraws while a slider moves: well under a millisecond.

Colours are the variables that every figure of a page uses.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from . import words
from .style import LIGHT

WIDTH, ROW, TEXT, VALUE = 430, 24, 150, 76  # px: of all, of a row, of the labels, of the values at the right


def waterfall(parts: Sequence[tuple[str, float]], *, what: str, total: float, unit: str = "s") -> str:
    """Where the time goes: from the first part, part by part, to the total. parts: (label, value), all in one unit;
    what is too small to see may be left out of them."""
    rows = [*parts, ("predicted", total)]
    reach, level = 0.0, 0.0
    for _, value in parts:
        level += value
        reach = max(reach, level)
    room = (WIDTH - TEXT - VALUE) / reach if reach > 0 else 0.0
    drawn, level = [], 0.0
    for i, (label, value) in enumerate(rows):
        last, y = i == len(rows) - 1, i * ROW
        left = 0.0 if last else min(level, level + value)
        x, size = TEXT + left * room, max(abs(value) * room, 0.8)
        shown = words.quantity(value, unit)
        shown = shown if last or i == 0 else ("−" if value < 0 else "+") + shown.lstrip("-")
        colour = _colour("e1") if last else _colour("muted")
        drawn.append(
            f'<text x="{TEXT - 8}" y="{y + 16}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect x="{x:.1f}" y="{y + 4}" width="{size:.1f}" height="16" fill="{colour}"/>'
            f'<text x="{x + size + 6:.1f}" y="{y + 16}">{html.escape(words.unbroken(shown))}</text>'
        )
        if not last:
            level += value
            at = TEXT + level * room
            drawn.append(f'<path d="M{at:.1f} {y + 4}V{y + ROW + 20}" stroke="{_colour("muted")}" stroke-width=".7"/>')
    described = "; ".join(f"{label}: {words.quantity(value, unit)}" for label, value in rows)
    return (
        f'<figure style="max-width:{WIDTH}px"><figcaption>Where {html.escape(what)} goes</figcaption>'
        f'<svg role="img" aria-label="Waterfall of {html.escape(what)}. {html.escape(described)}." '
        f'viewBox="0 0 {WIDTH} {ROW * len(rows)}" fill="{_colour("ink")}" '
        f'style="width:100%;height:auto;font-size:12px;font-family:var(--sans,sans-serif)">{"".join(drawn)}</svg></figure>'
    )


def _colour(name: str) -> str:
    return f"var(--{name},{LIGHT[name]})"


__all__ = ["waterfall"]
