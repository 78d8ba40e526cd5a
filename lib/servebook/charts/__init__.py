"""Figures of the lab book: one style, light and dark, each with its takeaway and a text alternative.

A function takes the run's data and returns a matplotlib Figure; `show(figure)` as a cell's last line displays it. The
functions are imported when first used: matplotlib and pandas take seconds, which commands that only print do not need.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .choice import choice_front
    from .decode_model import saturation
    from .explain import predicted_vs_measured, roofline, waterfall
    from .inside import distributions, server_series
    from .mechanism import block_tables, decoder_layer, packed_step, scheduler_steps
    from .style import FigureText, text_of
    from .svg import html_figure, save, show, standalone_svg
    from .sweeps import arrival_rate, latencies, output_rate, prefix_cache, prompt_length, throughput
    from .tradeoffs import frontier, latency_throughput
    from .traffic import over_time, percentiles

_MODULES = {
    "choice": ("choice_front",),
    "decode_model": ("saturation",),
    "explain": ("predicted_vs_measured", "roofline", "waterfall"),
    "inside": ("distributions", "server_series"),
    "mechanism": ("block_tables", "decoder_layer", "packed_step", "scheduler_steps"),
    "style": ("FigureText", "text_of"),
    "svg": ("html_figure", "save", "show", "standalone_svg"),
    "sweeps": ("arrival_rate", "latencies", "output_rate", "prefix_cache", "prompt_length", "throughput"),
    "tradeoffs": ("frontier", "latency_throughput"),
    "traffic": ("over_time", "percentiles"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    if find_spec(f"{__name__}.{name}"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FigureText",
    "arrival_rate",
    "block_tables",
    "choice_front",
    "decoder_layer",
    "distributions",
    "frontier",
    "html_figure",
    "latencies",
    "latency_throughput",
    "output_rate",
    "over_time",
    "packed_step",
    "percentiles",
    "predicted_vs_measured",
    "prefix_cache",
    "prompt_length",
    "roofline",
    "saturation",
    "save",
    "scheduler_steps",
    "server_series",
    "show",
    "standalone_svg",
    "text_of",
    "throughput",
    "waterfall",
]
