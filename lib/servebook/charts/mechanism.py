"""Figures of how serving works: a decoder layer with its bytes, a packed step, the scheduler's steps, block tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from ..model.shape import ModelShape
from . import words
from .style import LIGHT, Canvas, FigureText, chart

COLOURS = ("e1", "e0", "e2", "e3", "e4")  # requests, in the order they are named


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: LIGHT[COLOURS[i % len(COLOURS)]] for i, name in enumerate(names)}


def _legend(figure: Figure, colours: Mapping[str, str], label: str, narrow: bool) -> None:
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    names = [f"{label}{name}" for name in colours]
    figure.legend(handles, names, loc="outside upper left", ncols=3 if narrow else 6, borderpad=0, handlelength=1)


def _visible(tokens: Mapping[str, int], least: float) -> dict[str, float]:
    """How wide each share of a step is drawn: none below `least`, the largest giving what that takes."""
    shown = {name: max(float(n), least) for name, n in tokens.items()}
    if shown:
        largest = max(shown, key=shown.__getitem__)
        shown[largest] -= min(sum(shown.values()) - sum(tokens.values()), shown[largest] - least)
    return shown


def layer_parts(shape: ModelShape, context_tokens: int) -> list[tuple[str, str, float]]:
    """Bytes read by one decoder layer in a decode step of one sequence, in the order of computation: (part, its
    size as text, bytes). The KV cache holds `context_tokens` tokens."""
    bits, hidden, heads, kv = shape.weight_bits, shape.hidden, shape.heads * shape.head_dim, shape.kv_heads
    kv_width, mlp = kv * shape.head_dim, shape.intermediate
    matrices = [
        ("Q", hidden, heads), ("K", hidden, kv_width), ("V", hidden, kv_width), ("KV cache", 0, 0),
        ("O", heads, hidden), ("gate", hidden, mlp), ("up", hidden, mlp), ("down", mlp, hidden),
    ]  # fmt: skip
    cache = shape.kv_read_bytes(context_tokens) / shape.layers
    return [
        (name, f"{context_tokens:,} tokens × {shape.kv_bytes_per_token // shape.layers:,} bytes", cache)
        if not rows
        else (name, f"{rows:,} × {columns:,}", rows * columns * bits / 8)
        for name, rows, columns in matrices
    ]


@chart
def decoder_layer(canvas: Canvas, shape: ModelShape, context_tokens: int) -> Figure:
    """One decoder layer in a decode step: its matrices from top to bottom, with lengths proportional to their
    bytes."""
    parts = layer_parts(shape, context_tokens)
    figure, [(ax, _)] = canvas.panels(1, height=0.55 + 0.34 * len(parts))
    reach = max(size for _, _, size in parts)
    scale, unit = (1e6, "MB") if reach >= 1e6 else (1e3, "kB")
    for row, (name, dims, size) in enumerate(parts):
        colour = LIGHT["e0"] if name == "KV cache" else LIGHT["e1"] if name in ("gate", "up", "down") else LIGHT["e2"]
        ax.barh(row, size / scale, color=colour, height=0.62, zorder=3)
        text = f"{words.number(size / scale)} {unit}" + ("" if canvas.narrow else f", {dims}")
        ax.text((size + reach * 0.012) / scale, row, text, va="center", fontsize=8.5, color=LIGHT["ink"])
    ax.set_yticks(range(len(parts)), [name for name, _, _ in parts])
    ax.invert_yaxis()
    ax.set_xlim(0, reach * (1.35 if canvas.narrow else 1.55) / scale)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"Bytes of one layer in a decode step ({unit})")
    total = sum(size for _, _, size in parts)
    mlp = sum(size for name, _, size in parts if name in ("gate", "up", "down"))
    cache = next(size for name, _, size in parts if name == "KV cache")
    found = (
        f"One of {shape.layers} layers reads {words.number(total / scale)} {unit}: the MLP is "
        f"{words.percent(mlp / total)} of it, the KV cache of one sequence of {context_tokens:,} tokens "
        f"{words.percent(cache / total)}. The matrices are read once for the whole batch, "
        "the cache once for each sequence"
    )
    listed = "; ".join(f"{name} ({dims}): {words.number(size / scale)} {unit}" for name, dims, size in parts)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        "decoder-layer", f"A decoder layer of {shape.name} with its bytes", found + ".",
        f"Bar chart of the bytes one decoder layer reads, in the order of a token's way through it. {listed}.",
        f"{shape.heads} query heads share {shape.kv_heads} key and value heads: K, V and the cache are "
        f"{words.number(shape.heads / shape.kv_heads)} times smaller than with one per query head.",
    )  # fmt: skip
    return figure


@chart
def scheduler_steps(
    canvas: Canvas, steps: Sequence[Mapping[str, int]], budget: int, *, id: str = "scheduler-steps"
) -> Figure:
    """Steps of the scheduler: which request gets how many tokens of each step's budget.

    steps: per step {request: tokens}; one token is a decode, drawn wide enough to be seen."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    colours = _colours(names)
    figure, [(ax, _)] = canvas.panels(1, height=0.8 + 0.27 * len(steps))
    least = budget * 0.02
    for row, step in enumerate(steps):
        left, shown = 0.0, _visible(step, least)
        ax.barh(row, budget, color=LIGHT["band"], height=0.7, zorder=1)
        for name, tokens in step.items():
            width = shown[name]
            ax.barh(row, width, left=left, color=colours[name], height=0.7, zorder=3, linewidth=0)
            if tokens > budget * (0.2 if canvas.narrow else 0.1):
                ax.text(left + width / 2, row, f"{name} {tokens:,}", va="center", ha="center", fontsize=8,
                        color=LIGHT["paper"], zorder=4)  # fmt: skip
            left += width
    ax.set_yticks(range(len(steps)), [str(i + 1) for i in range(len(steps))])
    ax.invert_yaxis()
    ax.set_ylabel("Step")
    ax.grid(visible=False)
    ax.set_xlim(0, budget)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words.label(v)))
    ax.set_xlabel(f"Tokens of a step (budget {budget:,})")
    _legend(figure, colours, "request ", canvas.narrow)
    by_request = [
        f"step {i + 1}: " + (", ".join(f"{name} {tokens:,}" for name, tokens in step.items()) or "nothing")
        for i, step in enumerate(steps)
    ]
    chunked = [[name for name, tokens in step.items() if tokens > 1] for step in steps]
    alone = sum(len(owners) == 1 and sum(step.values()) == budget for owners, step in zip(chunked, steps, strict=True))
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        id, f"{len(steps)} steps of the scheduler, {len(names)} requests",
        f"In {alone} of {len(steps)} steps a single prompt holds all of the budget that decodes leave; "
        "the others wait.",
        f"Bars of the tokens that each request gets in each step. {'; '.join(by_request)}.",
        "A thin bar is one decode token, drawn wider than it is; grey: unused budget.",
    )  # fmt: skip
    return figure


@chart
def packed_step(
    canvas: Canvas, new_tokens: Mapping[str, int], context_tokens: Mapping[str, int], *, id: str = "packed-step"
) -> Figure:
    """One mixed step: its tokens side by side in the linear layers, and each request's attention to its own cache.

    new_tokens: {request: tokens computed in this step}; context_tokens: {request: tokens it attends to}."""
    names, colours = list(new_tokens), _colours(list(new_tokens))
    total, reach = sum(new_tokens.values()), max(context_tokens.values())
    figure, pairs = canvas.panels(2, height=1.0 + 0.3 * len(names), stack=canvas.narrow)
    (top, _), (bottom, _) = pairs
    left, shown = 0.0, _visible(new_tokens, total * 0.025)
    for name, tokens in new_tokens.items():
        width = shown[name]
        top.barh(0, width, left=left, color=colours[name], height=0.9, zorder=3, linewidth=0)
        if width > total * 0.2:
            top.text(left + width / 2, 0, f"{tokens:,}", va="center", ha="center", fontsize=8.5, color=LIGHT["paper"],
                     zorder=4)  # fmt: skip
        left += width
    top.set_ylim(-1.2, 1.2)
    top.set_yticks([])
    top.set_xlabel("Tokens in one matrix product")
    top.set_title("Linear layers: all together")
    for row, name in enumerate(names):
        bottom.barh(row, context_tokens[name], color=colours[name], height=0.62, zorder=3)
        bottom.text(context_tokens[name] + reach * 0.02, row, f"{new_tokens[name]:,} × {context_tokens[name]:,}",
                    va="center", fontsize=8, color=LIGHT["ink"])  # fmt: skip
    bottom.set_yticks(range(len(names)), names)
    bottom.invert_yaxis()
    bottom.set_xlim(0, reach * 1.5)
    bottom.set_xlabel("Tokens of its own KV cache")
    bottom.set_title("Attention: each for itself")
    for ax in (top, bottom):
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words.label(v)))
        ax.locator_params(axis="x", nbins=4)
    _legend(figure, colours, "request ", canvas.narrow)
    decodes = sum(tokens == 1 for tokens in new_tokens.values())
    chunk = max(new_tokens.values())
    listed = "; ".join(f"{n}: {new_tokens[n]:,} new, {context_tokens[n]:,} of context" for n in names)
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        id, "What is in one mixed step",
        f"{decodes} decode {'token rides' if decodes == 1 else 'tokens ride'} with a chunk of {chunk:,} prompt tokens: "
        "the weights are read once for all of them, and each waits until the chunk is done.",
        f"One step of {total:,} tokens. {listed}.",
        "Right: new tokens × tokens attended to. A single token is drawn wider than it is.",
    )  # fmt: skip
    return figure


@chart
def block_tables(canvas: Canvas, blocks: Mapping[str, Sequence[int]], pool: int, block_tokens: int) -> Figure:
    """A paged KV pool: which block of memory belongs to which request, and in which order its table names them."""
    names, colours = list(blocks), _colours(list(blocks))
    owner = {block: (name, i) for name, table in blocks.items() for i, block in enumerate(table)}
    across = 8 if canvas.narrow else 16
    rows = -(-pool // across)
    figure, [(ax, _)] = canvas.panels(1, height=0.75 + 0.42 * rows + 0.24 * len(names))
    for block in range(pool):
        x, y = block % across, block // across
        held = owner.get(block)
        ax.add_patch(Rectangle((x + 0.05, y + 0.08), 0.9, 0.84, color=colours[held[0]] if held else LIGHT["band"]))
        text, ink = (f"{held[0]}{held[1]}", LIGHT["paper"]) if held else (str(block), LIGHT["muted"])
        ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink, zorder=3)
    for i, (name, table) in enumerate(blocks.items()):
        listed = ", ".join(map(str, table))
        ax.text(0.05, rows + 0.45 + 0.6 * i, f"Table of {name}: {listed}", fontsize=8.5, va="center",
                color=colours[name])  # fmt: skip
    ax.set(xlim=(0, across), ylim=(rows + 0.6 * len(names) + 0.3, 0))
    ax.set_axis_off()
    used = len(owner)
    scattered = [name for name, t in blocks.items() if any(b - a != 1 for a, b in itertools.pairwise(t))]
    tables = "; ".join(f"{name}: {', '.join(map(str, table))}" for name, table in blocks.items())
    figure.servebook = FigureText(  # type: ignore[attr-defined]
        "block-tables", "A paged KV pool and its block tables",
        f"{used} of {pool} blocks are taken. "
        + (f"The blocks of {words.listing(scattered)} do not lie side by side; its table puts them in order. "
           if scattered else "")
        + f"No request holds more than {block_tokens - 1} tokens that it does not use.",
        f"Grid of {pool} blocks of {block_tokens} tokens. Block tables: {tables}.",
        f"A block holds the keys and values of {block_tokens} tokens; B2 is the third block of request B.",
    )  # fmt: skip
    return figure
