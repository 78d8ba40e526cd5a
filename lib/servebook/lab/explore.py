"""Predictions to play with: one load, several side by side, a curve, a curve with measured points on it.

Every function takes settings by name (see Setting) and returns an object that shows itself in a cell and holds its
figures as attributes. `panel` is the same with widgets. Nothing is measured and nothing is written.
"""

from .answers import Forecast, SideBySide
from .curves import Curve, against, curve
from .panel import panel
from .questions import all_gpus, all_models, all_runs, compare, predict, quick_predict, what_if
from .setting import Setting

__all__ = [
    "Curve",
    "Forecast",
    "Setting",
    "SideBySide",
    "against",
    "all_gpus",
    "all_models",
    "all_runs",
    "compare",
    "curve",
    "panel",
    "predict",
    "quick_predict",
    "what_if",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "glance":
        import warnings  # here, so that Tab does not show it

        warnings.warn("glance is now quick_predict", DeprecationWarning, stacklevel=2)
        return quick_predict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
