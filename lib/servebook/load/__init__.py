"""Load: prompts, arrivals, the streaming client, the closed and the open loop, and a point's figures.

Knows nothing of which engine answers. `measure_point` is the way in.
"""

from .point import PointSpec, measure_point, measure_point_sync

__all__ = ["PointSpec", "measure_point", "measure_point_sync"]
