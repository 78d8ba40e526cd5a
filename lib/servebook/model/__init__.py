"""The served model: its shape, read from config.json, and the folder that engines load. Independent of hardware."""

from .reader import (
    PACKAGED,
    from_config,
    load_shape,
    local_folder,
    materialize,
    model_name,
    packaged,
    read_sidecar,
)
from .shape import ModelShape

__all__ = [
    "PACKAGED",
    "ModelShape",
    "from_config",
    "load_shape",
    "local_folder",
    "materialize",
    "model_name",
    "packaged",
    "read_sidecar",
]
