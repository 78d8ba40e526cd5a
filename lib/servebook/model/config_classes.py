"""Configuration objects like those that transformers builds from a config.json, without importing transformers.

Its configuration_*.py files are executed with a replacement for their base class, so that class defaults apply.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import re
from functools import cache
from typing import Any, ClassVar

from .source_files import FINDERS, KNOWN, defined, home, source
from .stand_ins import NotKnown, NotReadable, Unknown, failure

# {layer type as older checkpoints name it: transformers' current name}
LAYER_TYPES = {
    "mamba": "linear_attention", "attention": "full_attention", "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}  # fmt: skip


def remapped(layer_types: Any = None, config: Any = None) -> Any:
    """The layer types under their current names (transformers' remap_legacy_layer_types); None if `config` is given,
    which is then changed in place."""
    kinds = layer_types if config is None else getattr(config, "layer_types", None)
    renamed = [LAYER_TYPES.get(k, k) for k in kinds] if isinstance(kinds, list | tuple) else kinds
    if config is None:
        return renamed
    if isinstance(kinds, list) and renamed != kinds:
        config.layer_types = renamed
    return None


class PreTrainedConfig:
    """Replaces transformers' base class of configurations. Its fields are the annotated names of a class."""

    attribute_map: ClassVar[dict[str, str]] = {}
    sub_configs: ClassVar[dict[str, Any]] = {}
    never_null: ClassVar[frozenset[str]] = frozenset()
    numbers: ClassVar[dict[str, str]] = {}
    model_type = ""
    base_model_tp_plan = None
    default_theta = 10000.0
    _attn_implementation = "eager"
    _experts_implementation = "eager"
    is_encoder_decoder = False
    num_labels = 2
    rope_parameters: Any = None
    per_layer_config = None
    dtype = None
    chunk_size_feed_forward = 0
    output_attentions = output_hidden_states = False

    def __init_subclass__(cls, **_: Any) -> None:
        cls.__dataclass_fields__ = _fields(cls)  # type: ignore[attr-defined]
        cls.never_null = _never_null(cls)
        cls.numbers = _numbers(cls)
        if "__init__" in cls.__dict__:
            return

        def init(self: Any, **given: Any) -> None:
            PreTrainedConfig.__init__(self, **given)

        names = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in _fields(cls)]
        init.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[method-assign]

    def __init__(self, **given: Any) -> None:
        rest = dict(given)
        for name in sorted(type(self).never_null & {k for k, v in given.items() if v is None}):
            raise ValueError(f"{name} is null, which its class does not allow: set a value or remove the key")
        for name, default in _fields(type(self)).items():
            if name in rest and (wrong := _wrong_type(type(self).numbers.get(name), rest[name])):
                raise ValueError(f"{name} is {rest[name]!r}, {wrong}")
            setattr(self, name, rest.pop(name) if name in rest else default())
        self.__post_init__(**rest)
        kinds, layers = getattr(self, "layer_types", None), getattr(self, "num_hidden_layers", None)
        type(self).validate_layer_type(self)  # a static method in some classes
        if isinstance(kinds, list | tuple) and isinstance(layers, int) and layers != len(kinds):
            raise ValueError(f"num_hidden_layers is {layers}, but layer_types has {len(kinds)} entries")
        self.validate_architecture()

    def __post_init__(self, **rest: Any) -> None:
        rest = self.convert_rope_params_to_dict(**rest)
        layers = rest.pop("per_layer_config", None)
        for name, value in rest.items():
            if name != "attn_implementation":
                try:
                    setattr(self, name, value)
                except AttributeError:
                    continue
        self.per_layer_config = _Layers(self, layers or {})
        remapped(config=self)

    def convert_rope_params_to_dict(self, **rest: Any) -> dict[str, Any]:
        scaling = rest.pop("rope_scaling", None)
        if scaling is not None and not isinstance(scaling, dict):
            raise ValueError(f"rope_scaling is {scaling!r}, not an object")
        found = scaling or self.rope_parameters or {}
        found = dict(found) if isinstance(found, dict) else {}
        found.setdefault("rope_type", found.get("type", "default"))
        if (part := rest.get("partial_rotary_factor", getattr(self, "partial_rotary_factor", None))) is not None:
            found.setdefault("partial_rotary_factor", part)
        found.setdefault("rope_theta", rest.get("rope_theta", getattr(self, "rope_theta", self.default_theta)))
        self.rope_parameters = _Rope(found)
        return rest

    def standardize_rope_params(self) -> None:
        return None

    validate_rope = validate_architecture = standardize_rope_params

    def validate_layer_type(self) -> None:
        kinds, allowed = getattr(self, "layer_types", None), _layer_types()
        if isinstance(kinds, list | tuple) and allowed and (odd := [k for k in kinds if k not in allowed]):
            raise ValueError(f"layer_types has {odd[0]!r}, which transformers does not know")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(type(self).attribute_map.get(name, name), value)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            name = type(self).attribute_map.get(name, name)
        return super().__getattribute__(name)

    def get_text_config(self, *_: Any, **__: Any) -> Any:
        for name in ("decoder", "generator", "text_config", "text_encoder"):
            if (found := getattr(self, name, None)) is not None:
                return found
        return self

    @classmethod
    def from_dict(cls, given: dict[str, Any], **_: Any) -> Any:
        return cls(**given)


class _Rope(dict[str, Any]):
    """RoPE's parameters. No weight depends on them, so a key that is missing is Unknown rather than an error."""

    def __missing__(self, key: str) -> Any:
        return Unknown(key)


class _Layers:
    """The configuration of each layer, by index or by layer type: the model's, with that layer's overrides."""

    def __init__(self, config: Any, overrides: dict[Any, dict[str, Any]]) -> None:
        self.config, self.overrides = config, {int(k): v for k, v in overrides.items()}
        if any("skip" in v for v in self.overrides.values()):
            raise NotReadable("skipped layers")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            key = list(self.config.layer_types).index(key)
        layer = copy.copy(self.config)
        for name, value in self.overrides.get(key, {}).items():
            setattr(layer, name, value)
        return layer


def _fields(cls: type) -> dict[str, Any]:
    """{field: a function that makes its default}"""
    found: dict[str, Any] = {}
    for c in reversed(cls.__mro__):
        if c in (object, PreTrainedConfig):
            continue
        for name, kind in inspect.get_annotations(c).items():
            if "ClassVar" in str(kind):
                continue
            value = c.__dict__.get(name)
            if isinstance(value, dataclasses.Field):
                factory = value.default_factory
                found[name] = factory if factory is not dataclasses.MISSING else (lambda v=value.default: v)
            else:
                found[name] = lambda v=value: v
    return found


def _never_null(cls: type) -> frozenset[str]:
    """Fields for which transformers rejects null."""
    found: dict[str, bool] = {}
    for c in reversed(cls.__mro__):
        if c not in (object, PreTrainedConfig):
            found |= {n: not re.search("None|Optional|Any", str(k)) for n, k in inspect.get_annotations(c).items()}
    return frozenset(n for n, never in found.items() if never)


def _numbers(cls: type) -> dict[str, str]:
    """{field that holds a number or a truth value alone: its annotation}"""
    found: dict[str, str] = {}
    for c in reversed(cls.__mro__):
        if c not in (object, PreTrainedConfig):
            found |= {n: str(k) for n, k in inspect.get_annotations(c).items()}
    return {n: k for n, k in found.items() if set(re.findall(r"\w+", k)) <= {"int", "float", "bool", "None"}}


def _wrong_type(annotation: str | None, value: Any) -> str:
    """Why transformers rejects a value for a field of numbers; empty if it does not."""
    if annotation is None or not isinstance(value, str | list | dict):
        return ""
    return "not true or false" if "bool" in annotation else "not a number"


@cache
def _layer_types() -> frozenset[str]:
    """The names that transformers allows in layer_types."""
    found: set[str] = set()
    for node in ast.parse((home() / "configuration_utils.py").read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and re.fullmatch(r"ALLOWED_\w*LAYER_TYPES", target.id):
            found |= {e.value for e in ast.walk(node) if isinstance(e, ast.Constant) and isinstance(e.value, str)}
    return frozenset(found)


@cache
def mappings() -> dict[str, dict[str, str]]:
    """transformers' tables of model types: {table: {model_type: class}}"""
    found: dict[str, dict[str, str]] = {}
    for file in ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py"):
        for node in ast.parse((home() / "models" / "auto" / file).read_text(encoding="utf-8")).body:
            call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
            if not isinstance(call, ast.Call) or not call.args:
                continue
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
                name = call.func.value.id  # NAMES.update(…)
            else:
                continue
            try:
                pairs = dict(ast.literal_eval(call.args[0]))
            except (ValueError, TypeError):
                continue
            found.setdefault(name, {}).update({k: v[-1] if isinstance(v, tuple) else v for k, v in pairs.items()})
    return found


def module_of(model_type: str) -> str:
    special = mappings().get("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", {})
    return special.get(model_type, model_type.replace("-", "_"))


@cache
def config_class(model_type: str) -> Any:
    """The configuration class of a model_type. Raises NotKnown if transformers has none."""
    name = mappings().get("CONFIG_MAPPING_NAMES", {}).get(model_type)
    if name is None:
        raise NotKnown(f"transformers has no model_type {model_type!r}")
    return find(module_of(model_type), "configuration", name)


def find(module: str, kind: str, name: str) -> Any:
    folder = home() / "models" / module
    for file in sorted(folder.glob(f"{kind}_*.py")):
        if name in defined(file):
            found = source(file).get(name)
            if not isinstance(found, Unknown):
                return found
            raise NotReadable(str(found))
    raise NotReadable(f"{name} is not in {folder.name}")


def home_of(name: str, kind: str) -> str:
    """The module that defines a model class: that of its model_type, or of another model_type that shares the class."""
    own = module_of(kind)
    if any(name in defined(f) for f in (home() / "models" / own).glob("modeling_*.py")):
        return own
    others = (k for table in mappings().values() for k, v in table.items() if v == name and k != kind)
    for other in map(module_of, others):
        if any(name in defined(f) for f in (home() / "models" / other).glob("modeling_*.py")):
            return other
    return own


class _ConfigMapping:
    def __getitem__(self, model_type: str) -> Any:
        return config_class(model_type)

    def __contains__(self, model_type: object) -> bool:
        return model_type in mappings().get("CONFIG_MAPPING_NAMES", {})


class AutoConfig:
    @staticmethod
    def for_model(model_type: str, **given: Any) -> Any:
        return config_class(model_type)(**given)


def _config_named(name: str) -> Any:
    kind = next((k for k, v in mappings().get("CONFIG_MAPPING_NAMES", {}).items() if v == name), None)
    return config_class(kind) if kind else None


FINDERS.append(_config_named)
KNOWN.update(
    remap_legacy_layer_types=remapped, PreTrainedConfig=PreTrainedConfig, PretrainedConfig=PreTrainedConfig,
    CONFIG_MAPPING=_ConfigMapping(), AutoConfig=AutoConfig,
)  # fmt: skip


def configuration(given: dict[str, Any]) -> Any:
    """The configuration object for a config.json, with the defaults of its class. Raises NotReadable."""
    text = {k: v for k, v in given.items() if k not in ("quantization_config", "compression_config")}
    try:
        return config_class(str(given.get("model_type")))(**text)
    except NotReadable:
        raise
    except Exception as e:
        raise failure(e) from e
