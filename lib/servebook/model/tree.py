"""A model's weights by name, kind and shape, and its configuration; counting.py derives the model's shape from them.

They are read from the model's own code (blueprint.py), or else from PyTorch's meta device (meta.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..common.errors import ServebookError
from . import blueprint
from .config_checks import COUNTS, check_counts, check_form
from .meta import unflattened
from .stand_ins import Module, NeedsLibrary, NotBuildable, NotKnown, NotReadable, PreTrainedModel
from .torch_stand_ins import Conv1D, Embedding, Linear

# keys of a config.json that no weight depends on
IRRELEVANT = ("quantization_config", "compression_config", "auto_map", "_name_or_path", "transformers_version",
              "torch_dtype", "dtype")  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """One parameter. kind: linear (out × in), transposed (in × out), embedding, experts (count × …) or other."""

    name: str  # the module's name, e.g. model.layers.0.mlp.gate_proj
    kind: str
    shape: tuple[int, ...]
    parameter: str = "weight"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tree:
    """All weights in the order of the model's modules; tied weights appear once. top: the model's configuration,
    text: the decoder's."""

    weights: tuple[Weight, ...]
    text: dict[str, Any]
    top: dict[str, Any]
    tied: bool  # the LM head is the embedding table
    notes: tuple[str, ...] = ()
    beside: tuple[Weight, ...] = ()  # vision or audio towers that the server loads and `weights` does not contain

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)


def text_of(config: dict[str, Any]) -> Any:
    """The configuration of the decoder in a multimodal config; None if there is none."""
    return next((config[k] for k in ("text_config", "llm_config", "language_config") if config.get(k)), None)


def tree_of(config: dict[str, Any], where: str) -> Tree:
    """The weights and configuration of a config.json. Raises ServebookError if no installed library has the model."""
    plain = {k: v for k, v in config.items() if k not in IRRELEVANT}
    check_form(plain, where)
    text = text_of(plain)
    check_counts(text if isinstance(text, dict) else plain, where)
    try:
        return _read_once(json.dumps(plain, sort_keys=True))
    except NotReadable as e:
        kind = config.get("model_type")
        apart = isinstance(e, NeedsLibrary) or (isinstance(e, NotKnown) and not blueprint.known(str(kind)))
        if apart and isinstance(text, dict) and blueprint.known(str(text.get("model_type"))):
            # no installed library can build the whole model, but one can build its decoder
            inner = tree_of({k: v for k, v in text.items() if k != "text_config"}, where)
            why = str(e) if isinstance(e, NeedsLibrary) else f"no installed library has {kind}"
            note = f"only the decoder ({text['model_type']}) of {kind} is counted: {why}"
            return replace(inner, notes=(note, *inner.notes))
        if kind is None and not config.get("architectures"):
            raise ServebookError(
                "it has neither model_type nor architectures", where, "Give the config.json of a Hugging Face model"
            ) from None
        if isinstance(e, NotBuildable):
            raise ServebookError(
                f"transformers' code cannot build a {kind} model from it ({e})", where,
                "Compare it with the publisher's config.json: a key is missing, null or contradicts another",
            ) from None  # fmt: skip
        raise ServebookError(
            f"model_type {kind!r} is not supported ({e})", where,
            "Use an architecture that transformers has, or install a newer transformers",
        ) from None  # fmt: skip
    except TypeError as e:
        raise ServebookError(f"not a config.json ({e})", where) from None


@lru_cache(maxsize=256)
def _read_once(config: str) -> Tree:
    return _with_weights(read(json.loads(config)))


def _with_weights(tree: Tree) -> Tree:
    """Without experts that pass their input on (LongCat's): transformers has rows for them, checkpoints have not."""
    nothing, routed = tree.text.get("zero_expert_num"), tree.text.get("n_routed_experts")
    if not (isinstance(nothing, int) and isinstance(routed, int)):
        return tree
    weights = tuple(
        replace(w, shape=(routed, *w.shape[1:])) if w.kind == "experts" and w.shape[0] == routed + nothing else w
        for w in tree.weights
    )
    return replace(tree, weights=weights)


def _with_known_decoder(config: dict[str, Any]) -> dict[str, Any]:
    """The config, with a known model_type in text_config if that has an unknown one but a known architecture."""
    text = config.get("text_config")
    if not isinstance(text, dict) or blueprint.known(str(text.get("model_type"))):
        return config
    kind = blueprint.type_of(text)
    return {**config, "text_config": {**text, "model_type": kind}} if kind else config


def read(config: dict[str, Any]) -> Tree:
    """The weights and configuration of a config.json. Raises NotReadable if no installed library has the model."""
    config = _with_known_decoder(config)
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict):  # a speech model, of which servers load the part that generates text
        whole = str(config.get("model_type"))
        inner = read({"model_type": f"{whole}_thinker", **thinker})
        note = f"only the thinker of {whole} is served; its talker and vocoder are not counted"
        return replace(inner, notes=(note, *inner.notes))
    if not blueprint.known(str(config.get("model_type"))):
        if kind := blueprint.type_of(config):
            return read({**config, "model_type": kind})
        return read_vllm(config)
    try:
        found = read_blueprint(config)
    except (NotKnown, NeedsLibrary, NotBuildable):
        raise
    except NotReadable:
        return read_meta(config)
    given = {k: config[k] for k in COUNTS if k != "head_dim" and config.get(k) is not None}
    if text_of(config) is None and found.top != found.text and any(v != found.text.get(k) for k, v in given.items()):
        # the class ignores the decoder's keys outside text_config: move them there
        own = ("model_type", "architectures", "vision_config")
        decoder = {k: v for k, v in config.items() if k not in own}
        return read({**{k: v for k, v in config.items() if k in own}, "text_config": decoder})
    return found


def read_meta(config: dict[str, Any]) -> Tree:
    """Weights and configuration from PyTorch's meta device. Raises NotReadable."""
    from . import meta

    made, found, tied = meta.read(config)
    weights = tuple(Weight(name, kind, shape, parameter) for name, kind, shape, parameter in found)
    return Tree(weights, _plain(made.get_text_config()), _plain(made), tied)


def read_vllm(config: dict[str, Any]) -> Tree:
    """Weights and configuration from the constructors in vLLM's code. Raises NotReadable."""
    from . import vllm_blueprint

    made, model = vllm_blueprint.model(config)
    text = made.get_text_config()
    weights = _weights(model, _tied_names(model, False))
    return Tree(weights, _plain(text), _plain(made), bool(getattr(text, "tie_word_embeddings", False)))


def read_blueprint(config: dict[str, Any]) -> Tree:
    """Weights and configuration from the constructors in transformers' code. Raises NotReadable."""
    made, model = blueprint.model(config)
    tied = bool(getattr(model.config, "tie_word_embeddings", None) or getattr(made, "tie_word_embeddings", False))
    weights = _weights(model, _tied_names(model, tied))
    text = made.get_text_config()
    beside = _beside(config, made, model)
    return Tree(weights, _plain(text), _plain(made), tied, beside=beside)


def _weights(model: Module, dropped: set[str]) -> tuple[Weight, ...]:
    """Every parameter once, without the `dropped` (tied) ones."""
    seen: set[int] = set()
    found = []
    for name, module in model.modules():
        for parameter, value in module.own():
            if id(value) not in seen and f"{name}.{parameter}" not in dropped:
                seen.add(id(value))
                shape = unflattened(module, value.shape)
                found.append(Weight(name, _kind(module, parameter, shape), shape, parameter))
    return tuple(found)


def _beside(config: dict[str, Any], made: Any, model: Module) -> tuple[Weight, ...]:
    whole = blueprint.whole(config, made)
    if whole is None or type(whole) is type(model):
        return ()
    towers = re.compile(r"vision|visual|audio|projector|image")
    found = []
    for name, module in whole.modules():
        found += [Weight(name, "other", v.shape, p) for p, v in module.own() if towers.search(name)]
    return tuple(found)


def _tied_names(model: Module, tied: bool) -> set[str]:
    """Names of parameters that share another's data, by the rules of transformers: each PreTrainedModel inside the
    model has a list _tied_weights_keys of names or of expressions that match the start of a parameter's name."""
    out: set[str] = set()
    for prefix, module in model.modules():
        keys = getattr(module, "_tied_weights_keys", None) if isinstance(module, PreTrainedModel) else None
        own = tied if module is model else bool(getattr(module.config, "tie_word_embeddings", False)) if keys else False
        if not own or not isinstance(keys, dict | list):
            continue
        start = f"{prefix}." if prefix else ""
        if all(re.fullmatch(r"[\w.]+", k) and k.endswith(("weight", "bias")) for k in keys):
            out |= {start + k for k in keys}
            continue
        names = [f"{n}.{p}" if n else p for n, m in module.modules() for p, _ in m.own()]
        out |= {start + n for n in names if any(re.match(k, n) for k in keys)}
    return out


def _kind(module: Module, parameter: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and "expert" in type(module).__name__.lower():
        return "experts"
    if parameter == "weight" and isinstance(module, Linear):
        return "linear"
    if parameter == "weight" and isinstance(module, Conv1D):
        return "transposed"
    if parameter == "weight" and isinstance(module, Embedding):
        return "embedding"
    return "other"


def _plain(config: Any) -> dict[str, Any]:
    """The values of a configuration object and of its class that JSON can represent."""
    found: dict[str, Any] = {}
    names: Iterable[str] = [*vars(type(config)), *vars(config)]
    for name in names:
        if name.startswith("_"):
            continue
        try:
            value = getattr(config, name, None)
        except Exception:
            continue  # a property that needs more than the configuration
        if name in ("ffn_config", "attn_config") and hasattr(value, "__dict__"):
            value = _plain(value)
        if isinstance(value, str | int | float | bool | list | dict) or value is None:
            try:
                found[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                continue
    for alias, name in getattr(type(config), "attribute_map", {}).items():
        if name in found:
            found.setdefault(alias, found[name])
    return found
