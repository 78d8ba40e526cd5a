"""Load: prompts, arrivals, the streaming client, the closed and the open loop, and a point's figures.

Knows nothing of which engine answers. `measure_point` is the way in, `measure_ramp` for a load that grows.
"""

from ..config.points import PointSpec
from .point import measure_point, measure_point_sync, measure_ramp, measure_ramp_sync

__all__ = ["PointSpec", "measure_point", "measure_point_sync", "measure_ramp", "measure_ramp_sync"]
