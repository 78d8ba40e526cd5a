"""Why a server cannot serve a load: a headline, and a reason with its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter


@dataclass(frozen=True)
class Refusal:
    """reason: a text with a replacement field ({:,} or {:.1f}) for each of the figures; without figures, plain text."""

    reason: str
    figures: tuple[float, ...] = ()
    headline: str = "does not fit"

    @property
    def text(self) -> str:
        return self.reason.format(*self.figures) if self.figures else self.reason

    def __str__(self) -> str:
        return f"{self.headline}: {self.text}"


def with_ranges(refusals: Sequence[Refusal]) -> str:
    """The text of refusals with the same reason: "7 to 30 GiB" where their figures differ."""
    first = refusals[0]
    if not first.figures:
        return first.text
    text = ""
    columns = iter(zip(*(r.figures for r in refusals), strict=True))
    for literal, field, form, _ in Formatter().parse(first.reason):
        text += literal
        if field is not None:
            figures = next(columns)
            low, high = format(min(figures), form or ""), format(max(figures), form or "")
            text += low if low == high else f"{low} to {high}"
    return text


__all__ = ["Refusal", "with_ranges"]
