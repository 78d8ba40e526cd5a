"""Figures of the lab book: one style, light and dark, each with its takeaway and a text alternative.

A function takes the run's data and returns a matplotlib Figure; `show(figure)` as a cell's last line displays it.
"""

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
