"""The served model: its shape, read from config.json, and the folder that engines load. Independent of hardware."""

from .reader import (
    PACKAGED,
    from_config,
    local_folder,
    materialize,
    model_name,
    packaged,
    read_shape,
    read_sidecar,
)
from .shape import ModelShape

__all__ = [
    "PACKAGED",
    "ModelShape",
    "from_config",
    "local_folder",
    "materialize",
    "model_name",
    "packaged",
    "read_shape",
    "read_sidecar",
]
