"""The texts of a sweep figure, from its data: takeaway, note, text alternative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import words
from .lines import ChartMetric, Data


def sample_note(data: Data, bars: bool = True) -> str:
    """n per point and engine, and what bars and band are."""
    parts = []
    for engine in data.engines:
        rows = data.points[(data.points["engine"] == engine) & (data.points["verdict"] != "invalid")]
        counts = rows["requests"].dropna()
        if len(counts):
            low, high = int(counts.min()), int(counts.max())
            parts.append(f"{engine} {low if low == high else f'{low} to {high}'}")
    text = f"n = requests per point: {', '.join(parts)}. " if parts else ""
    if bars and len(data.measured) and data.measured["measured_low"].notna().any():
        text += "Bars: 95 % interval of the mean. "
    if len(data.predicted):
        stages = [*dict.fromkeys(data.predicted["stage"].astype(str).str.partition(":")[0])]
        band = ", band: 80 % interval" if bars and data.predicted["low"].notna().any() else ""
        text += f"Dashed: predicted ({words.listing(stages)}){band}. "
    lost = data.points[data.points["verdict"] == "invalid"]
    if len(lost):
        text += f"{len(lost)} failed {'point' if len(lost) == 1 else 'points'} marked × and left out. "
    return text.strip()


def errors_sentence(data: Data, metrics: Sequence[ChartMetric], x: str) -> str:
    """How far the predictions lay off on average, per metric and engine."""
    found = []
    for metric in metrics:
        parts = []
        for engine in data.engines:
            rows = data.curve(engine, metric.name, x).merge(
                data.forecast(engine, metric.name, x)[[x, "predicted"]], on=x
            )
            if len(rows):
                off = (rows["predicted"] / rows["measured"] - 1).abs().mean()
                parts.append(f"{words.percent(off)} ({engine})")
        if parts:
            found.append((f"{metric.in_words} " if len(metrics) > 1 else "") + words.listing(parts))
    text = f"Mean error of the prediction: {'; '.join(found)}." if found else ""
    return " ".join(part for part in (text, _others_error(data, metrics, x)) if part)


def _others_error(data: Data, metrics: Sequence[ChartMetric], x: str) -> str:
    """The same of somebody else's predictions, where the figure has them."""
    found = []
    for metric in metrics:
        parts = []
        for engine in data.engines:
            theirs = data.of_others(engine, metric.name, x)
            if len(theirs):
                rows = data.curve(engine, metric.name, x).merge(theirs[[x, "predicted"]], on=x)
                if len(rows):
                    off = (rows["predicted"] / rows["measured"] - 1).abs().mean()
                    parts.append(f"{words.percent(off)} ({engine})")
        if parts:
            found.append((f"{metric.in_words} " if len(metrics) > 1 else "") + words.listing(parts))
    return f"Mean error of the author's own prediction: {'; '.join(found)}." if found else ""


def trends(data: Data, metric: ChartMetric, x: str, at: str) -> list[str]:
    found = []
    for engine in data.engines:
        rows = data.curve(engine, metric.name, x)
        if len(rows):
            found.append(words.trend(engine, list(rows[x]), list(rows["measured"]), at, metric.unit))
    return found


def values_in_words(data: Data, metric: ChartMetric, x: str, at: str) -> str:
    """Every measured and predicted value of a metric, for the text alternative."""
    parts = []
    for engine in data.engines:
        seen, forecast = data.curve(engine, metric.name, x), data.forecast(engine, metric.name, x)
        pairs: Mapping[float, float] = dict(zip(forecast[x], forecast["predicted"], strict=True))
        values = []
        for value, measured in zip(seen[x], seen["measured"], strict=True):
            predicted = f" (predicted {words.quantity(pairs[value], metric.unit)})" if value in pairs else ""
            values.append(f"{at.format(words.label(value))}: {words.quantity(measured, metric.unit)}{predicted}")
        if not values:
            values = [
                f"{at.format(words.label(v))}: predicted {words.quantity(p, metric.unit)}" for v, p in pairs.items()
            ]
        if values:
            parts.append(f"{engine}, {metric.in_words}: {'; '.join(values)}.")
    return " ".join(parts)


def compare_at_last(data: Data, metric: ChartMetric, x: str, at: str) -> str:
    """A comparison of the two engines at the largest x that both measured."""
    if len(data.engines) < 2:
        return ""
    first, second = data.engines[:2]
    rows = data.curve(first, metric.name, x).merge(data.curve(second, metric.name, x), on=x, suffixes=("_a", "_b"))
    if rows.empty:
        return ""
    last = rows.iloc[-1]
    ratio = last["measured_b"] / last["measured_a"]
    return f"At {at.format(words.label(last[x]))} {second}'s {metric.in_words} is {words.times(ratio)} {first}'s."
