"""Read a dense decoder's shape from its config.json, and give engines a folder they can load. Knows no GPU.

Of a multi-modal checkpoint only the text decoder is counted; mixtures of experts are refused.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from ..config.params import ModelParams
from .shape import DTYPE_BYTES, ModelShape

__all__ = ["ModelShape", "from_config", "load_shape", "materialize", "model_name", "packaged", "read_config"]

PACKAGED = Path(__file__).parent / "configs"
# Hub ids whose config.json is packaged: their shape is the same at every revision
SHIPPED = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b-v0.3",
    "google/gemma-2-9b": "gemma-2-9b",
}
INT4_GROUP = 128  # the usual group of AWQ, GPTQ and vLLM's int4 schemes


@dataclass(frozen=True)
class Family:
    """What a model_type implies and config.json does not say."""

    qkv_bias: bool = False  # biases even where attention_bias is absent
    qk_norm: bool = False  # an RMSNorm of head_dim on queries and on keys
    norms_per_layer: int = 2
    tied: bool = False  # tie_word_embeddings when the key is absent
    window_period: int = 1  # in every group of this many layers, all but the last are windowed (1: all layers are)


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(tied=True),
    "gemma2": Family(norms_per_layer=4, tied=True, window_period=2),
    "gemma3_text": Family(qk_norm=True, norms_per_layer=4, tied=True, window_period=6),
}


def packaged() -> list[str]:
    """Names of the configs that come with servebook."""
    return sorted(p.stem for p in PACKAGED.glob("*.json"))


def from_config(
    config: dict[str, Any],
    *,
    name: str,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    dtype: str = "bfloat16",
    source: str | None = None,
) -> ModelShape:
    """The shape that a config.json describes. `source` names the file in errors (default: `name`).

    quantization: fp8, int8 (8-bit weights and activations) or int4 (weights only), applied by the engine when it
    loads; a checkpoint that is already quantized says so itself in quantization_config.
    """
    where = source or name
    text = _text_config(config, where)
    kind = text.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ServebookError(
            f"model_type {kind!r} is not supported", where, f"Dense decoders of these types are: {known}"
        )
    family = FAMILIES[kind]

    def count(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if value is None:
            value = default
        if value is None:
            raise ServebookError(f"the key {key} is missing", where, "Add it: the model's shape cannot be told without")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ServebookError(f"{key} is {value!r}, not a positive whole number", where)
        return value

    layers, hidden, heads = count("num_hidden_layers"), count("hidden_size"), count("num_attention_heads")
    kv_heads = count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ServebookError(f"{heads} attention heads do not divide into {kv_heads} KV heads", where)
    if text.get("head_dim") is None and hidden % heads:
        raise ServebookError(
            f"the key head_dim is missing and {hidden}/{heads} is no whole number", where, "Add head_dim"
        )
    bias = bool(text.get("attention_bias", False))
    window, windowed = _sliding(text, family, layers, count)
    weights = _quantization(
        text.get("quantization_config") or config.get("quantization_config"), quantization, dtype, where
    )
    element_bytes = DTYPE_BYTES[dtype]
    kv_bytes = 1 if kv_cache_dtype == "fp8" or weights.pop("fp8_kv") else element_bytes
    return ModelShape(
        name=name,
        family=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=count("head_dim", hidden // heads),
        intermediate=count("intermediate_size"),
        vocab=count("vocab_size"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied))),
        max_context_tokens=count("max_position_embeddings"),
        dtype=dtype,
        kv_bytes_per_element=kv_bytes,
        sliding_window=window,
        sliding_layers=windowed,
        qkv_bias=family.qkv_bias or bias,
        out_bias=bias and not family.qkv_bias,
        mlp_bias=bool(text.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        norms_per_layer=family.norms_per_layer,
        **{k: v for k, v in weights.items() if k != "fp8_kv"},
    )


def _text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise ServebookError("not a JSON object", where, "Expected a Hugging Face config.json")
    text = config.get("text_config") or config
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), None)
    if experts:
        raise ServebookError(
            f"a mixture of experts ({experts} = {text[experts]}) is not supported", where, "Use a dense model"
        )
    if text.get("kv_lora_rank"):
        raise ServebookError("multi-head latent attention (kv_lora_rank) is not supported", where, "Use another model")
    if config.get("is_encoder_decoder"):
        raise ServebookError("an encoder-decoder is not supported", where, "Use a decoder-only model")
    return text


def _sliding(text: dict[str, Any], family: Family, layers: int, count: Any) -> tuple[int | None, int]:
    """(window in tokens, number of windowed layers)"""
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return None, 0
    window = count("sliding_window")
    if text.get("layer_types"):
        windowed = sum(t == "sliding_attention" for t in text["layer_types"])
    elif text.get("model_type") in ("qwen2", "qwen3"):
        if not text.get("use_sliding_window"):
            return None, 0
        windowed = max(layers - text.get("max_window_layers", 28), 0)
    elif family.window_period > 1:
        period = text.get("sliding_window_pattern") or family.window_period
        windowed = layers - layers // period
    else:
        windowed = layers
    return (window, windowed) if windowed else (None, 0)


def _quantization(given: dict[str, Any] | None, asked: str | None, dtype: str, where: str) -> dict[str, Any]:
    """Bits, group and compute dtype of the weights: from the checkpoint's own quantization_config, else as asked."""
    plain = DTYPE_BYTES[dtype] * 8
    out: dict[str, Any] = {"weight_bits": plain, "lm_head_bits": plain, "compute_dtype": dtype, "fp8_kv": False}
    if not given:
        if asked == "int4":
            out |= {"weight_bits": 4, "weight_group": INT4_GROUP}
        elif asked:
            out |= {"weight_bits": 8, "compute_dtype": asked}
        return out
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    if method in ("awq", "gptq", "awq-marlin", "gptq-marlin"):
        group = given.get("group_size", INT4_GROUP)
        out |= {"weight_bits": given.get("bits", given.get("w_bit", 4)), "weight_group": group if group > 0 else None}
        lm_head = bool(given.get("lm_head", False))
    elif method in ("fp8", "fbgemm-fp8"):
        out |= {"weight_bits": 8, "compute_dtype": "fp8"}
        lm_head = False
    elif method == "bitsandbytes":
        out |= {"weight_bits": 4, "weight_group": 64} if given.get("load_in_4bit") else {"weight_bits": 8}
        lm_head = False
    elif method == "compressed-tensors":
        schemes = list((given.get("config_groups") or {}).values())
        if len(schemes) != 1:
            raise ServebookError(f"quantization_config has {len(schemes)} config_groups, one is supported", where)
        weights, acts = schemes[0].get("weights") or {}, schemes[0].get("input_activations") or {}
        out |= {"weight_bits": weights.get("num_bits", 8), "weight_group": weights.get("group_size")}
        if out["weight_group"] is not None and out["weight_group"] <= 0:
            out["weight_group"] = None
        if acts.get("num_bits") == 8:
            out["compute_dtype"] = "fp8" if acts.get("type") == "float" else "int8"
        lm_head = "lm_head" not in (given.get("ignore") or [])
        out["fp8_kv"] = (given.get("kv_cache_scheme") or {}).get("num_bits") == 8
    else:
        known = "awq, gptq, fp8, compressed-tensors, bitsandbytes"
        raise ServebookError(f"quant_method {method!r} is not supported", where, f"Supported are: {known}")
    if asked and out["weight_bits"] != int(asked[-1]):
        bits = out["weight_bits"]
        raise ServebookError(
            f"quantization {asked} was asked of weights already quantized to {bits} bits",
            where,
            "Leave quantization out",
        )
    if lm_head:
        out["lm_head_bits"] = out["weight_bits"]
    return out


def read_config(model: ModelParams, base: Path) -> tuple[dict[str, Any], str]:
    """(config.json as a dict, where it was read); base: the folder that relative paths start from.

    Raises ServebookError for an unknown packaged name, a missing folder or file, broken JSON, or a Hub id that
    cannot be fetched. From the Hub only config.json is downloaded.
    """
    if model.config:
        file = PACKAGED / f"{model.config}.json"
        if not file.is_file():
            near = difflib.get_close_matches(model.config, packaged(), 1, 0.4)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ServebookError(
                f"no packaged config {model.config!r}", "model.config", hint + f"There are: {', '.join(packaged())}"
            )
    elif model.path:
        folder = local_folder(model.path, base)
        file = folder / "config.json"
        if not folder.is_dir():
            raise ServebookError(
                "no such model folder", str(folder), "Correct model.path (relative to the parameter file)"
            )
        if not file.is_file():
            raise ServebookError(
                "the model folder has no config.json", str(folder), "Point model.path to a Hugging Face model folder"
            )
    elif model.hub in SHIPPED:
        file = PACKAGED / f"{SHIPPED[model.hub]}.json"  # a plan or a prediction needs no network for these
    else:
        file = _from_hub(str(model.hub), model.revision)
    try:
        return json.loads(file.read_text(encoding="utf-8")), str(file) if model.path else model_name(model)
    except ValueError as e:
        raise ServebookError(f"not valid JSON ({e})", str(file)) from None
    except OSError as e:
        raise ServebookError(f"cannot be read ({e.strerror})", str(file)) from None


def _from_hub(hub: str, revision: str | None) -> Path:
    import logging

    from huggingface_hub import hf_hub_download

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # its retries are not the user's to read
    try:
        return Path(hf_hub_download(hub, "config.json", revision=revision))
    except Exception as e:  # huggingface_hub raises dozens of kinds: connection, gated, not found, offline, bad id
        raise ServebookError(
            f"its config.json could not be fetched from the Hub ({type(e).__name__})",
            hub,
            "Check the id, the connection and HF_TOKEN, or give model.path or model.config",
        ) from None


def local_folder(path: str, base: Path) -> Path:
    """A model's folder; relative paths start from `base`."""
    return (base / Path(path).expanduser()).resolve()


def model_name(model: ModelParams) -> str:
    """What the run calls its model, and servers serve it as."""
    return model.config or model.hub or Path(str(model.path)).name


def load_shape(model: ModelParams, base: Path) -> ModelShape:
    """The shape of a run's model; see read_config for where it comes from and what may be wrong with it."""
    config, where = read_config(model, base)
    return from_config(
        config,
        name=model_name(model),
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        dtype=model.dtype,
        source=where,
    )


def materialize(model: ModelParams, base: Path, into: Path) -> Path | str:
    """A folder or Hub id that vLLM and Transformers load. A folder of the user's is only read.

    A packaged config, or a local folder without a tokenizer used with dummy weights, is written to `into`/<name> with
    a synthetic tokenizer; whatever is there already with the same config is left as it is.
    """
    from .tokenizer import TOKENIZER_FILES, write_model_folder

    if model.hub:
        return model.hub
    if model.path:
        folder = local_folder(model.path, base)
        config, _ = read_config(model, base)
        if model.weights == "real" or any((folder / f).exists() for f in TOKENIZER_FILES):
            return folder
    config, _ = read_config(model, base)
    shape = load_shape(model, base)
    return write_model_folder(config, vocab=shape.vocab, context=shape.max_context_tokens, into=into / shape.name)
