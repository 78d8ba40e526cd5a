"""Figure of a choice: one user's tokens/s against cost per token, one mark per set-up, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import words
from .style import LIGHT, MARKERS, Canvas, FigureText, chart

COLOURS = ("e1", "e0", "e2", "e3", "e4")
Row = Mapping[str, Any]


BEYOND = 1.3  # times the dearest set-up that meets the level: the axis ends there


def cost(row: Row) -> float | None:
    """Cost of a million output tokens at the target load; None without output."""
    tokens = row.get("output_tok_per_s")
    return row["cost_per_hour"] / 3600 / tokens * 1e6 if tokens and row["user_tok_per_s"] else None


def front(rows: Sequence[Row]) -> list[Row]:
    """The Pareto front: set-ups that no other beats in both a user's tokens/s and cost per token, slowest user
    first."""
    best: list[Row] = []
    known = [(r, c) for r in rows if (c := cost(r)) is not None]
    lowest = math.inf
    for r, c in sorted(known, key=lambda pair: (-pair[0]["user_tok_per_s"], pair[1])):
        if c < lowest:
            best.append(r)
            lowest = c
    return best[::-1]


@chart
def choice_front(
    canvas: Canvas,
    rows: Sequence[Row],
    chosen: Row,
    measured: Sequence[Row] = (),
    currency: str = "USD",
) -> Figure:
    """Set-ups at the target load. rows: choice_answer.row; chosen: one of them; measured: kept runs' points with gpu,
    user_tok_per_s and tok_per_s_per_gpu, at loads of their own; shown at the price of the same card."""
    figure, [(ax, _)] = canvas.panels(1, height=3.8)
    known = [(r, c) for r in rows if (c := cost(r)) is not None]
    top = BEYOND * max([c for r, c in known if r["meets"]] + [cost(chosen) or 0.0])
    prices = {r["gpu"]: r["price_per_gpu_hour"] for r in rows}
    kept = [
        (r, prices[r["gpu"]] / 3600 / r["tok_per_s_per_gpu"] * 1e6)
        for r in measured if r["gpu"] in prices and r["tok_per_s_per_gpu"]
    ]  # fmt: skip
    shown, shown_kept = [p for p in known if p[1] <= top], [p for p in kept if p[1] <= top]
    cards = list(dict.fromkeys(r["gpu"] for r, _ in [*shown, *shown_kept]))
    looks = {g: (LIGHT[COLOURS[i % 5]], MARKERS[i // 5 % 5]) for i, g in enumerate(cards)}

    def dots(pairs: Sequence[tuple[Row, float]], gpu: str, **how: Any) -> None:
        own = [(r["user_tok_per_s"], c) for r, c in pairs if r["gpu"] == gpu]
        xs, ys = [x for x, _ in own], [y for _, y in own]
        ax.plot(xs, ys, looks[gpu][1], color=looks[gpu][0], **how)

    for gpu in cards:
        dots([p for p in shown if not p[0]["meets"]], gpu, markersize=3.5, alpha=0.35, markeredgewidth=0, zorder=3)
        dots([p for p in shown if p[0]["meets"]], gpu, markersize=5, alpha=0.9, markeredgewidth=0, zorder=3)
        dots(shown_kept, gpu, markersize=7, markeredgecolor=LIGHT["ink"], markeredgewidth=1.3, zorder=4)
    edge = front([r for r, _ in known if r["meets"]])
    ax.plot(
        [r["user_tok_per_s"] for r in edge],
        [cost(r) or 0.0 for r in edge],
        color=LIGHT["muted"],
        linewidth=1.4,
        zorder=2,
    )
    here = chosen["user_tok_per_s"], cost(chosen) or 0.0
    ax.plot(*here, "o", markersize=13, markerfacecolor="none", color=LIGHT["ink"], markeredgewidth=1.6, zorder=5)
    ax.annotate("choice", here, (9, -14), textcoords="offset points", fontweight="bold", annotation_clip=False)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0, top=top)
    ax.set_xlabel("Tokens/s of one user (1 / mean TPOT)")
    ax.set_ylabel(f"{currency} per million output tokens")
    entries = [
        Line2D([], [], color=looks[g][0], marker=looks[g][1], linestyle="none", markersize=5, label=g) for g in cards
    ]
    entries.append(Line2D([], [], color=LIGHT["muted"], linewidth=1.4, label="front"))
    if shown_kept:
        edged: dict[str, Any] = {"markeredgecolor": LIGHT["ink"], "color": LIGHT["muted"], "linestyle": "none"}
        entries.append(Line2D([], [], marker="o", label="measured, kept runs", **edged))
    figure.legend(handles=entries, loc="outside upper left", ncols=2 if canvas.narrow else 5, fontsize=8)
    beyond = len(known) - len(shown), len(kept) - len(shown_kept)
    figure.servebook = _described([r for r, _ in known], edge, chosen, beyond, bool(shown_kept), currency)  # type: ignore[attr-defined]
    return figure


def _described(
    known: Sequence[Row],
    edge: Sequence[Row],
    chosen: Row,
    beyond: tuple[int, int],
    measured: bool,
    currency: str,
) -> FigureText:
    """beyond: set-ups and measured points that cost more than the axis shows."""
    meeting = sum(bool(r["meets"]) for r in known)
    found = [
        f"{chosen['name']} gives one user {words.number(chosen['user_tok_per_s'])} tok/s for "
        f"{cost(chosen):.3g} {currency} per million output tokens",
        f"{meeting} of {len(known)} simulated set-ups meet the level",
    ]
    alt = "; ".join(
        f"{r['name']}: {words.number(r['user_tok_per_s'])} tok/s a user, {cost(r):.3g} {currency}" for r in edge
    )
    note = "Large: meets the level; small and faint: simulated, misses it or is not needed. The line joins set-ups "
    note += "that none beats in both: to the right and down is better."
    if measured:
        note += " With a dark edge: measured points of kept runs of the same model, each at its own load."
    dearer = [f"{n} {what}" for n, what in zip(beyond, ("set-ups", "measured points"), strict=True) if n]
    if dearer:
        note += f" Dearer than the axis shows: {' and '.join(dearer)}."
    heading = "What one user sees against what a token costs, at the target load"
    return FigureText("choice-front", heading, words.sentence(found), f"Scatter of set-ups. On the front: {alt}.", note)
