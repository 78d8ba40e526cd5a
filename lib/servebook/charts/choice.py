"""Figure of a choice: what one user sees against what a card gives, every set-up a point, the front marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import words
from .style import LIGHT, MARKERS, Canvas, FigureText, chart

COLOURS = ("e1", "e0", "e2", "e3", "e4")
Row = Mapping[str, Any]


def front(rows: Sequence[Row]) -> list[Row]:
    """Set-ups that no other beats in both tokens/s of a user and tokens/s of a card, slowest user first."""
    known = [r for r in rows if r["user_tok_per_s"] and r["tok_per_s_per_gpu"]]
    best: list[Row] = []
    for r in sorted(known, key=lambda r: (-r["user_tok_per_s"], -r["tok_per_s_per_gpu"])):
        if not best or r["tok_per_s_per_gpu"] > best[-1]["tok_per_s_per_gpu"]:
            best.append(r)
    return best[::-1]


@chart
def choice_front(
    canvas: Canvas, rows: Sequence[Row], chosen: Row, measured: Sequence[Row] = (), title: str = ""
) -> Figure:
    """Set-ups at the target load. rows: choice_answer.row; chosen: one of them; measured: kept runs' points with gpu,
    user_tok_per_s and tok_per_s_per_gpu, at loads of their own."""
    figure, [(ax, _)] = canvas.panels(1, height=3.8)
    known = [r for r in rows if r["user_tok_per_s"] and r["tok_per_s_per_gpu"]]
    cards = list(dict.fromkeys(r["gpu"] for r in [*known, *measured]))
    looks = {g: (LIGHT[COLOURS[i % 5]], MARKERS[i // 5 % 5]) for i, g in enumerate(cards)}
    for gpu in cards:
        colour, marker = looks[gpu]
        for meets in (False, True):
            own = [r for r in known if r["gpu"] == gpu and bool(r["meets"]) == meets]
            xs, ys = [r["user_tok_per_s"] for r in own], [r["tok_per_s_per_gpu"] for r in own]
            ax.plot(
                xs, ys, marker, color=colour, markersize=5 if meets else 3.5, alpha=0.9 if meets else 0.35,
                markeredgewidth=0, zorder=3,
            )  # fmt: skip
        own = [r for r in measured if r["gpu"] == gpu]
        xs, ys = [r["user_tok_per_s"] for r in own], [r["tok_per_s_per_gpu"] for r in own]
        ax.plot(xs, ys, marker, color=colour, markeredgecolor=LIGHT["ink"], markeredgewidth=1.3, markersize=7, zorder=4)
    edge = front([r for r in known if r["meets"]])
    steps = [r["user_tok_per_s"] for r in edge], [r["tok_per_s_per_gpu"] for r in edge]
    ax.plot(*steps, color=LIGHT["muted"], linewidth=1.4, zorder=2)
    here = chosen["user_tok_per_s"], chosen["tok_per_s_per_gpu"]
    ax.plot(*here, "o", markersize=13, markerfacecolor="none", color=LIGHT["ink"], markeredgewidth=1.6, zorder=5)
    ax.annotate("choice", here, (9, 9), textcoords="offset points", fontweight="bold", annotation_clip=False)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("Tokens/s of one user (1 / mean TPOT)")
    ax.set_ylabel("Output tokens/s of a card")
    entries = [
        Line2D([], [], color=looks[g][0], marker=looks[g][1], linestyle="none", markersize=5, label=g) for g in cards
    ]
    entries.append(Line2D([], [], color=LIGHT["muted"], linewidth=1.4, label="front"))
    if measured:
        edged: dict[str, Any] = {"markeredgecolor": LIGHT["ink"], "color": LIGHT["muted"], "linestyle": "none"}
        entries.append(Line2D([], [], marker="o", label="measured, kept runs", **edged))
    figure.legend(handles=entries, loc="outside upper left", ncols=2 if canvas.narrow else 5, fontsize=8)
    _describe(figure, known, edge, chosen, measured, title)
    return figure


def _describe(
    figure: Figure, known: Sequence[Row], edge: Sequence[Row], chosen: Row, measured: Sequence[Row], title: str
) -> None:
    meeting = sum(bool(r["meets"]) for r in known)
    found = [
        f"{chosen['name']} gives one user {words.number(chosen['user_tok_per_s'])} tok/s and takes "
        f"{words.number(chosen['tok_per_s_per_gpu'])} tok/s from a card",
        f"{meeting} of {len(known)} simulated set-ups meet the level",
    ]
    alt = "; ".join(
        f"{r['name']}: {words.number(r['user_tok_per_s'])} tok/s a user, {words.number(r['tok_per_s_per_gpu'])} a card"
        for r in edge
    )
    note = (
        "Solid: meets the level; faint: simulated, misses it or is not needed. The line joins set-ups that none beats "
    )
    note += "in both."
    if measured:
        note += " With a dark edge: measured points of kept runs of the same model, each at its own load."
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        "choice-front", title or "What one user sees against what a card gives, at the target load",
        words.sentence(found), f"Scatter of set-ups. On the front: {alt}.", note,
    )  # fmt: skip
