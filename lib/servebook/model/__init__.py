"""What is served: a model's shape read from its config.json, and the folder that engines load. Knows no hardware."""

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
