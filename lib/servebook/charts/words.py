"""Figures as text: quantities with units, and sentences that describe curves. Every number comes from the data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

TINY = 1e-9  # smaller than anything that is measured or predicted here: rounding


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands separated: 0.0288, 83.1, 13,870; "–" for what is unknown, 0 below TINY."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < TINY:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 4:
        return f"{value:,.0f}"
    rounded = round(value, digits - 1 - size)
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def label(value: float) -> str:
    """An axis value as text; exact if it is a whole number (8,192, not 8,190)."""
    return f"{value:,.0f}" if float(value).is_integer() else number(value)


def seconds(value: float | None, digits: int = 3) -> str:
    """A time in the unit that reads best: 850 µs, 28.8 ms, 1.25 s, 2 min 50 s."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if TINY <= size < 0.001:
        return f"{number(value * 1e6, digits)} µs"
    if size < TINY:
        return "0 s"
    if size < 1 and size != 0:
        return f"{number(value * 1e3, digits)} ms"
    if size < 100:
        return f"{number(value, digits)} s"
    if size < 3600:
        minutes, rest = divmod(round(size), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(size / 60), 60)
    return f"{hours} h {rest} min"


def quantity(value: float | None, unit: str) -> str:
    """A quantity with its unit. "s" is converted to the most readable unit of time; other units are appended."""
    if unit == "s":
        return seconds(value)
    return f"{number(value)}{'' if unit == '×' else ' '}{unit}".rstrip()


def percent(share: float | None, signed: bool = False) -> str:
    """A share as 31 %, 4.2 % below ten, signed where asked."""
    if share is None or not math.isfinite(share):
        return "–"
    digits = 1 if 0 < abs(share) < 0.0995 else 0
    value = round(100 * share, digits)
    if value == 0:
        return "0 %"
    return f"{value:{'+' if signed else ''}.{digits}f} %".replace("-", "−")


def factor(ratio: float) -> str:
    """A factor that stands by itself: 2.4×, 0.25×."""
    return f"{number(ratio, 2 if ratio < 100 else 3)}×"


def times(ratio: float) -> str:
    """A ratio before what it is a ratio of: 2.4×, but below 1/2 its inverse, "1/116 of"."""
    if 0 < ratio < 0.5:
        return f"1/{number(1 / ratio, 2 if 1 / ratio < 100 else 3)} of"
    return factor(ratio)


def unbroken(text: str) -> str:
    """No line break between a number and its unit, nor inside "C = 16"."""
    text = re.sub(r"\b([BC]) = (?=\d)", "\\1\u00a0=\u00a0", text)
    return re.sub(
        r"(?<=\d) (?=(?:%|µs|ms|s|min|h|tok/s|output tok/s|GB/s|TFLOP/s|kB|requests/s)(?!\w))", "\u00a0", text
    )


def listing(parts: Sequence[str]) -> str:
    """a · a and b · a, b and c"""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def trend(name: str, xs: Sequence[float], ys: Sequence[float], at: str, unit: str) -> str:
    """What a curve does, with its figures: stays flat, rises, falls, or turns. `at` like "C = {}"."""
    pairs = sorted((x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y))
    if not pairs:
        return f"{name} has no measured point"

    def place(pair: tuple[float, float]) -> str:
        return f"{quantity(pair[1], unit)} at {at.format(label(pair[0]))}"

    first, last = pairs[0], pairs[-1]
    if len(pairs) == 1:
        return f"{name} gives {place(first)}"
    low, high = min(p[1] for p in pairs), max(p[1] for p in pairs)
    if low > 0 and high / low < 1.1:
        mean = math.fsum(p[1] for p in pairs) / len(pairs)
        span = f"from {at.format(label(first[0]))} to {label(last[0])}"
        return f"{name} stays near {quantity(mean, unit)} {span}"
    top = max(pairs, key=lambda p: p[1])
    bottom = min(pairs, key=lambda p: p[1])
    if top not in (first, last) and last[1] < 0.95 * top[1] and top[1] > 1.1 * first[1]:
        return f"{name} rises from {place(first)} to {place(top)}, then falls to {place(last)}"
    if bottom not in (first, last) and last[1] > 1.05 * bottom[1] and bottom[1] < 0.9 * first[1]:
        return f"{name} falls from {place(first)} to {place(bottom)}, then rises to {place(last)}"
    if last[1] >= first[1]:
        factor = f" ({times(last[1] / first[1])})" if first[1] > 0 else ""
        return f"{name} rises from {place(first)} to {place(last)}{factor}"
    factor = f" ({times(first[1] / last[1])} less)" if last[1] > 0 else ""
    return f"{name} falls from {place(first)} to {place(last)}{factor}"


def sentence(parts: Iterable[str]) -> str:
    """Join clauses into one sentence that starts with a capital only where the engine's name does not."""
    joined = "; ".join(p for p in parts if p)
    return f"{joined}." if joined else ""
