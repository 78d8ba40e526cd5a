"""What a notebook explores predictions with: `from servebook.lab import explore`. `panel` is the same with widgets."""

from __future__ import annotations

from typing import Any

from .forecasts import (
    Curve,
    Forecast,
    Setting,
    SideBySide,
    against,
    all_gpus,
    all_models,
    all_runs,
    compare,
    curve,
    glance,
    predict,
    setting_from,
    what_if,
)
from .panel import Panel


def panel(**settings: Any) -> Panel:
    """The widgets: everything above at hand, redrawn as it changes. settings: where they start."""
    return Panel(setting_from(None, settings))


__all__ = [
    "Curve", "Forecast", "Setting", "SideBySide", "against", "all_gpus", "all_models", "all_runs", "compare",
    "curve", "glance", "panel", "predict", "what_if",
]  # fmt: skip
