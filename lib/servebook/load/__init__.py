"""Load generation: prompts, arrivals, the streaming client, closed and open loops, and a point's figures.

Knows nothing of the engine's kind. Entry points: `measure_point`, and `measure_ramp` for a load that grows.
"""

from ..config.points import PointSpec
from .point import measure_point, measure_point_sync, measure_ramp, measure_ramp_sync

__all__ = ["PointSpec", "measure_point", "measure_point_sync", "measure_ramp", "measure_ramp_sync"]
