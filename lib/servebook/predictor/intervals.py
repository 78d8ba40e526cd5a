"""80 % intervals of predictions: the spread over drawn constants, combined with the model's own error.

The distribution is log-normal in each metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..common.predicted_point import PredictedValue
from .calibration import Z80

# Relative standard deviation of the model's own error: at C = 1 on a calibrated shape, and elsewhere.
# For TPOT and the rates it is the size of the residuals of the two published tables and of 73 H200 points (mean
# absolute errors 1.8 and 1.6 %).
DISCREPANCY = {"ttft_s": (0.02, 0.05), "tpot_s": (0.010, 0.010)}
RATE_DISCREPANCY = (0.012, 0.010)
CPU_DISCREPANCY = 5.0  # factor on these for a CPU, whose cores are shared

# The same on loads and hosts of other people, by metric: (from the datasheet, calibrated)
FORM_ERROR = {"ttft": (0.20, 0.16), "tpot": (0.016, 0.032), "output": (0.035, 0.034)}


def form_error(metric: str, stage: str) -> float:
    """Relative standard deviation of the model's error on loads of other people. metric: ttft, tpot or output."""
    return FORM_ERROR[metric][stage == "calibrated"]


def discrepancy(metric: str, *, calibrated_alone: bool, cpu: bool) -> float:
    """Relative standard deviation of the model's error on a run's own points.

    calibrated_alone: whether the point is at C = 1 with a prompt length that calibration measured.
    """
    share = DISCREPANCY.get("tpot_s" if metric == "decode_tok_per_s" else metric, RATE_DISCREPANCY)
    return share[0 if calibrated_alone else 1] * (CPU_DISCREPANCY if cpu else 1.0)


def interval(value: float, drawn: Sequence[float], form_sd: float) -> PredictedValue:
    """The value with its 80 % interval. drawn: the same metric from drawn constants. form_sd: see discrepancy."""
    values = [v for v in drawn if v > 0 and math.isfinite(v)]
    if not values or not value > 0:
        return {"value": value, "low": value, "high": value}
    logs = [math.log(v) for v in values]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / max(len(logs) - 1, 1))
    half = Z80 * math.hypot(spread, form_sd)
    return {"value": value, "low": value * math.exp(-half), "high": value * math.exp(half)}
