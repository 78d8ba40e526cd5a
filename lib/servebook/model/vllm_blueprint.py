"""Weights of models that only vLLM has, from running the constructors in vLLM's code as blueprint.py does.

The configuration is an object of vLLM's class for it, or else the keys of config.json as attributes. Only the decoder
is built. Projections that vLLM fuses stay fused.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from .config_classes import PreTrainedConfig, find, mappings, module_of
from .config_classes import configuration as configuration_of
from .source_files import LIBRARIES, Source, defined, source
from .stand_ins import Module, NotKnown, NotReadable, Unknown
from .vllm_stand_ins import NAMES


@cache
def home() -> Path:
    """vLLM's folder. Raises NotKnown if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        raise NotKnown("vLLM is not installed")
    LIBRARIES["vllm"] = Path(spec.origin).parent, NAMES
    return Path(spec.origin).parent


@cache
def _registry() -> dict[str, tuple[str, str]]:
    """{architecture: (module, class)} from vLLM's model registry."""
    found: dict[str, tuple[str, str]] = {}
    text = (home() / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                parts = [e.value for e in value.elts if isinstance(e, ast.Constant)]
                if len(parts) == 2:
                    found.setdefault(str(key.value), (str(parts[0]), str(parts[1])))
    return found


@cache
def last_version(architecture: str) -> str | None:
    """The last vLLM version with a class for the model, from its registry; None if it is not listed as dropped."""
    try:
        text = (home() / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    except (NotKnown, OSError):
        return None
    found = re.search(rf'"{re.escape(architecture)}": "([0-9.]+)"', text)
    return found.group(1) if found else None


def _until(architecture: str) -> str:
    last = last_version(architecture)
    return f": vLLM {last} was the last that did" if last else ""


def _files(module: str) -> list[Path]:
    if "." not in module:
        return [home() / "model_executor" / "models" / f"{module}.py"]
    folder = home().joinpath(*module.split(".")[1:])
    return sorted(folder.rglob("model.py"), key=lambda p: ("nvidia" not in p.parts, str(p)))


def _class(architecture: str) -> Any:
    registry = _registry()
    near = [a for a in registry if a.startswith(architecture.partition("For")[0]) and a.endswith("ForCausalLM")]
    entry = registry.get(architecture) or (registry[near[0]] if len(near) == 1 else None)
    if entry is None:
        raise NotKnown(f"neither transformers nor vLLM has {architecture}{_until(architecture)}")
    for file in _files(entry[0]):
        if entry[1] in defined(file):
            found = source(file).get(entry[1])
            if isinstance(found, Unknown):
                raise NotReadable(str(found))
            return found
    raise NotReadable(f"{entry[1]} is not in {entry[0]}")


# what custom configuration classes call the same
ALIASES = {
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"), "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"), "intermediate_size": ("ffn_hidden_size", "n_inner"),
    "rms_norm_eps": ("layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon"),
    "hidden_act": ("activation_function",), "max_position_embeddings": ("seq_length", "n_positions"),
    "text_config": ("llm_config", "language_config"),
}  # fmt: skip


class Settings(PreTrainedConfig):
    """A configuration without a class of its own: the keys of config.json as attributes, nested objects too."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        given.setdefault("tie_word_embeddings", False)
        for name, value in given.items():
            setattr(self, name, _inner_configuration(value) if _is_configuration(name, value) else _objects(value))

    def __getattr__(self, name: str) -> Any:
        for alias in ALIASES.get(name, ()):
            if alias in vars(self):
                return vars(self)[alias]
        if name.endswith(("dropout", "_pdrop")) or name.startswith("initializer_"):
            return 0.0  # of training
        if name == "_name_or_path":
            return ""
        raise AttributeError(f"config.json has no {name}")

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def get_text_config(self, *_: Any, **__: Any) -> Any:
        return getattr(self, "text_config", self)


def _is_configuration(name: str, value: Any) -> bool:
    return isinstance(value, dict) and name in ("text_config", *ALIASES["text_config"], "vision_config", "audio_config")


def _inner_configuration(given: dict[str, Any]) -> Any:
    """The configuration object of a nested config: of its class if transformers has one, else a Settings object."""
    for kind in (f"{given.get('model_type')}_vision_model", str(given.get("model_type"))):
        if kind in mappings().get("CONFIG_MAPPING_NAMES", {}):
            with contextlib.suppress(NotReadable):
                return configuration_of({**given, "model_type": kind})
    return Settings(**given)


def _objects(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return [_Part(v) for v in value]
    return value


class _Part:
    """A nested object of a configuration, with its keys as attributes."""

    def __init__(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            setattr(self, name, _Part(value) if isinstance(value, dict) else _objects(value))


def configuration(given: dict[str, Any]) -> Any:
    """The configuration object of a config.json: of vLLM's class for its model_type, else a Settings object."""
    own, plain = str(given.get("model_type")), {k: v for k, v in given.items() if k != "quantization_config"}
    for kind in [own] if "text_config" in given else [f"{own}_text", own]:
        if (made := _config_class(kind)) is not None:
            return made(**plain)
    return Settings(**plain)


@cache
def _config_class(kind: str) -> Any:
    for file in sorted((home() / "transformers_utils" / "configs").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant) and n.value.value == kind
                and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "model_type" for n in node.body
            ):  # fmt: skip
                made = source(file).get(node.name)
                if not isinstance(made, Unknown):
                    return made
    return None


class _Engine:
    """A stub for VllmConfig with one rank and no quantization; attributes that are not set are Unknown."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        self.model_config = _Engine.__new__(_Engine)
        vars(self.model_config).update(hf_config=config, hf_text_config=text, dtype=Unknown("dtype"))
        self.quant_config = self.cache_config = self.lora_config = self.speculative_config = None
        self.parallel_config = _Engine.__new__(_Engine)
        vars(self.parallel_config).update(
            enable_eplb=False, tensor_parallel_size=1, pipeline_parallel_size=1, use_sequence_parallel_moe=False
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name)


def _inner(vllm_config: Any = None, hf_config: Any = None, architectures: Any = None, **_: Any) -> Module:
    """Replaces init_vllm_registered_model: builds a model inside another, with its own configuration if given.

    Uses transformers' class where there is one: its module names are the checkpoint's, and it fuses nothing.
    """
    config = hf_config or vllm_config.model_config.hf_config
    name = mappings()["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"].get(str(getattr(config, "model_type", "")))
    if name and not isinstance(config, Settings):
        with contextlib.suppress(
            NotReadable, AttributeError, TypeError
        ):  # vLLM's own class takes what this one does not
            return find(module_of(config.model_type), "modeling", name)(config)  # type: ignore[no-any-return]
    named = architectures or getattr(config, "architectures", None) or [""]
    return _class(str(named[0]))(vllm_config=_Engine(config), prefix="")  # type: ignore[no-any-return]


NAMES["init_vllm_registered_model"] = _inner


def model(given: dict[str, Any]) -> tuple[Any, Module]:
    """(configuration, model built from stub layers). Raises NotReadable."""
    architecture = str(next(iter(given.get("architectures") or []), ""))
    if not architecture:
        raise NotKnown(f"no installed library has model_type {given.get('model_type')!r}, and architectures is empty")
    home()
    built = _class(architecture)
    try:
        config = configuration(given)
        return config, built(vllm_config=_Engine(config), prefix="")
    except NotReadable:
        raise
    except Exception as e:
        raise NotReadable(f"only vLLM has it, and its code needs what is not at hand here: {e}") from e


__all__ = ["Source", "configuration", "home", "model"]
