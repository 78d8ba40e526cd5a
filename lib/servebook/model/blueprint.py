"""A model's parameters by name and shape, from running its own constructors without PyTorch and without weights.

transformers' configuration_*.py and modeling_*.py are read as text. Their classes are executed with stub layers in
place of torch.nn that keep shapes only. Where a stub does not suffice, NotReadable is raised, and the caller uses
PyTorch's meta device instead (meta.py), which takes seconds to import. Tests compare the two.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from .config_classes import configuration, find, home_of, mappings, module_of
from .source_files import KNOWN, defined, home
from .stand_ins import Module, NeedsLibrary, NotKnown, NotReadable, failure


class _AutoModel:
    """Replaces transformers' auto classes: from_config builds the class that its tables list for the configuration."""

    def __init__(self, *tables: str) -> None:
        self.tables = tables

    def from_config(self, config: Any, **_: Any) -> Any:
        for table in self.tables:
            name = mappings().get(table, {}).get(config.model_type)
            if name and name.startswith("Timm") and importlib.util.find_spec("timm") is None:
                raise NeedsLibrary("timm is not installed")
            if name:
                return find(module_of(config.model_type), "modeling", name)(config)
        raise NotReadable(f"no model class for {config.model_type}")

    _from_config = from_config


CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
KNOWN.update(
    AutoModel=_AutoModel("MODEL_MAPPING_NAMES"),
    AutoModelForCausalLM=_AutoModel(CAUSAL),
    AutoModelForImageTextToText=_AutoModel("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    AutoModelForSeq2SeqLM=_AutoModel("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    AutoModelForTextEncoding=_AutoModel("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_MAPPING_NAMES"),
)


def known(model_type: str) -> bool:
    """Whether transformers has a configuration class of this type."""
    return model_type in mappings().get("CONFIG_MAPPING_NAMES", {})


def type_of(given: dict[str, Any]) -> str | None:
    """The model_type under which transformers lists the config's architecture; None if it does not list it."""
    own = next(iter(given.get("architectures") or []), None)
    return next((kind for kind, name in mappings().get(CAUSAL, {}).items() if name == own and known(kind)), None)


def class_name(given: dict[str, Any]) -> tuple[str, str]:
    """(module, class) of the language model: the causal LM class if transformers has one, else the full model's."""
    kind = str(given.get("model_type"))
    name = mappings().get(CAUSAL, {}).get(kind)
    own = next(iter(given.get("architectures") or []), None)
    if not name and own and any(own in defined(f) for f in (home() / "models" / module_of(kind)).glob("modeling_*.py")):
        name = own
    if not name:
        for table in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"):
            name = name or mappings().get(table, {}).get(kind)
    if not name:
        raise NotKnown(f"transformers has no language model of type {kind!r}")
    return home_of(name, kind), name


def model(given: dict[str, Any]) -> tuple[Any, Module]:
    """(configuration, model built from stub layers). Raises NotReadable."""
    module, name = class_name(given)
    config = configuration(given)
    try:
        # the causal LM inside a multimodal model is built from the text part of its configuration
        built = find(module, "modeling", name)
        wanted = str(inspect.get_annotations(built).get("config", ""))
        return config, built(_part(config, wanted))
    except NotReadable:
        raise
    except Exception as e:
        raise failure(e) from e


def whole(given: dict[str, Any], config: Any) -> Module | None:
    """The full model that `architectures` names, with vision and audio towers; None if it cannot be built."""
    module, own = module_of(str(given.get("model_type"))), next(iter(given.get("architectures") or []), None)
    if not own or not getattr(config, "sub_configs", None):
        return None
    try:
        built = find(module, "modeling", own)(config)
    except Exception:
        return None
    return built if isinstance(built, Module) else None


def _part(config: Any, wanted: str) -> Any:
    if wanted and wanted.strip("'\"") != type(config).__name__:
        for name in type(config).sub_configs:
            part = getattr(config, name, None)
            if type(part).__name__ == wanted.strip("'\""):
                return part
    return config
