"""The pieces that tables and boxes are made of. Everything is escaped here.

Functions return `Html`; as a cell's last expression it shows itself, marked as made here.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..charts import words
from ..config.points import CALIBRATION
from .markdown import scroller

METRIC_NAMES = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "Request latency", "output_tok_per_s": "Output tok/s",
    "decode_tok_per_s": "Decode tok/s", "request_rate_per_s": "Requests/s",
}  # fmt: skip
Format = Callable[[Any], Any]  # gives text, Html, or None for what is unknown
LONG_TABLE = 20  # rows that stay unfolded


class Html(str):
    """HTML made by this module: trusted by the renderer, shown as HTML by Jupyter."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        plain = " ".join(html.unescape(_strip(self)).split())
        return {"text/html": str(self), "text/plain": plain}, {"servebook": {"trusted": "table"}}


def _strip(markup: str) -> str:
    return re.sub(r"<[^>]+>", " ", markup)


def esc(value: Any) -> str:
    """Text for HTML; Html stays as it is, what is unknown is a dash."""
    if isinstance(value, Html):
        return str(value)
    if value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NaT:
        return "–"
    return html.escape(words.unbroken(str(value)))


def columns(values: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Columns as they are given: pandas' text type would make plain text of Html."""
    return pd.DataFrame({name: pd.Series(list(v), dtype=object) for name, v in values.items()})


def table(
    frame: pd.DataFrame,
    caption: str,
    *,
    headers: Mapping[str, str] | None = None,
    formats: Mapping[str, Format] | None = None,
    right: Sequence[str] = (),
    row_header: bool = True,
    fold: bool = True,
) -> Html:
    """A DataFrame's columns as an accessible table: caption, header cells with scope, numbers to the right.

    headers: column to heading (columns left out keep their name); formats: column to a function of the value;
    right: further columns to set to the right; fold: a long table may be folded behind its caption.
    """
    headers, formats = headers or {}, formats or {}
    numeric = {c for c in frame.columns if pd.api.types.is_numeric_dtype(frame[c]) and frame[c].dtype != bool}
    to_right = (numeric | set(right)) - set(frame.columns[:1])

    def cls(column: str) -> str:
        return ' class="sb-right"' if column in to_right else ""

    head = "".join(f'<th scope="col"{cls(c)}>{esc(headers.get(c, str(c)))}</th>' for c in frame.columns)
    body = []
    for values in frame.itertuples(index=False, name=None):
        cells = []
        for i, (column, value) in enumerate(zip(frame.columns, values, strict=True)):
            shown = formats[column](value) if column in formats else plain(value)
            tag = 'th scope="row"' if i == 0 and row_header else "td"
            cells.append(f"<{tag}{cls(column)}>{esc(shown)}</{tag.split()[0]}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    capped = f'<caption><span class="sb-cap">{esc(caption)}</span></caption>'
    inner = f"<table>{capped}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    if not fold or len(body) <= LONG_TABLE:
        return Html(scroller(inner, caption))
    summary = f'<summary>{esc(caption)} <span class="sb-soft">({len(body)} rows)</span></summary>'
    return Html(f'<details class="sb-long">{summary}{scroller(inner, caption)}</details>')


def plain(value: Any) -> Any:
    """A cell's value as a reader writes it: yes, 1,024, a; b. None for what is unknown."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return words.label(float(value)) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    return value


def unit_of(metric: str) -> str:
    """The unit that a predicted metric is stored in."""
    return {"output_tok_per_s": "tok/s", "decode_tok_per_s": "tok/s", "request_rate_per_s": "/s"}.get(metric, "s")


def range_text(low: float, high: float, unit: str) -> str:
    if not (np.isfinite(low) and np.isfinite(high)):
        return "no interval"
    return f"{words.quantity(low, unit)} to {words.quantity(high, unit)}"


def verdict(name: str) -> Html:
    """hit, near or miss, coloured."""
    return Html(f'<span class="sb-verdict sb-{esc(name)}">{esc(name)}</span>')


def _again(row: Any) -> str:
    return ", prompts sent before" if pd.notna(row.repeats_prompts) and row.repeats_prompts else ""


def place(row: Any) -> str:
    """Where a point lies on its sweep, in words: C = 8, 0.5 requests/s, 2,048 prompt tokens."""
    if pd.notna(row.rate_per_s) and row.rate_per_s > 0:
        return f"{words.number(row.rate_per_s)} requests/s"
    if row.kind in ("prompt_length", CALIBRATION):
        return f"{row.prompt_tokens:,.0f} prompt tokens"
    return f"C = {row.concurrency:.0f}{_again(row)}" if pd.notna(row.concurrency) else str(row.point)


def with_range(value: float, low: float, high: float, unit: str) -> Html:
    """A value with its interval in brackets, both in the value's unit."""
    shown = esc(words.quantity(value, unit))
    if np.isfinite(low) and np.isfinite(high):
        scale = 1e3 if unit == "s" and value < 1 else 1.0
        span = f"[{words.number(low * scale)}, {words.number(high * scale)}]"
        shown += f" <small>{esc(span)}</small>"
    return Html(shown)


def audit(name: Any) -> Html:
    """The audit's verdict on a point, coloured."""
    name = "valid" if name is None or name != name else str(name)
    look = {"valid": "hit", "invalid": "miss"}.get(name, "near")
    return Html(f'<span class="sb-verdict sb-{look}">{esc(name)}</span>')


def box(title: str, pairs: Iterable[tuple[str, Any]]) -> Html:
    """A box of names and values."""
    inner = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in pairs)
    return Html(f'<div class="sb-box">{_box_title(title)}<dl>{inner}</dl></div>')


def _box_title(title: str) -> str:
    return f'<p class="sb-title"><b>{esc(title)}</b></p>' if title else ""


def without_pace(row: Any) -> str:
    """The load of a point that has neither clients nor a rate, in words."""
    count = row.get("finite_requests")
    of = f" of {count:.0f} requests" if pd.notna(count) else ""
    return f"a {'trace' if row.get('kind') == 'trace' else 'burst'}{of}"


def where(row: Any) -> str:
    """A point's load in words: C = 8, 512 in, 128 out."""
    if pd.notna(row["rate_per_s"]):
        load = f"{words.number(row['rate_per_s'])} requests/s"
    elif pd.notna(row["concurrency"]):
        load = f"C = {row['concurrency']:.0f}{_again(row)}"
    else:
        load = without_pace(row)
    return f"{load}, {row['prompt_tokens']:,.0f} in, {row['output_tokens']:,.0f} out"


def folded(summary: str, *parts: str) -> Html:
    """Parts folded under a line that describes them; empty if there is none."""
    inside = "".join(parts)
    return Html(f'<details class="sb-long"><summary>{esc(summary)}</summary>{inside}</details>' if inside else "")


def notes_box(title: str, lines: Iterable[str]) -> Html:
    """Short notes in a box: engines that did not start, sweeps that stopped early. Empty without lines."""
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    return Html(f'<div class="sb-box">{_box_title(title)}<ul>{items}</ul></div>' if items else "")
