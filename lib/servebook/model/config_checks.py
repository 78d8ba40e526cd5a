"""Checks of a config.json before anything is built from it: types of its parts, and counts that a model can have."""

from __future__ import annotations

from typing import Any

from ..common.errors import ServebookError

MOST_LAYERS = 2048  # sixteen times the deepest model's in use (Llama-3.1-405B: 126): each is made by its own code
MOST = 10**8  # beyond any dimension of a model
COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "head_dim")  # fmt: skip
OTHER_COUNTS = ("max_position_embeddings", "moe_intermediate_size", "num_experts", "n_routed_experts",
                "num_local_experts")  # fmt: skip
PARTS = ("text_config", "llm_config", "language_config", "vision_config", "audio_config")
# how config.json files without a text_config call the decoder's dimensions
SIZES = ("hidden_size", "num_hidden_layers", "num_layers", "n_layer", "n_layers", "n_embd", "d_model", "dim")


def check_form(config: dict[str, Any], where: str) -> None:
    """Raises ServebookError for keys of another type than every config.json has."""
    for key in PARTS:
        if config.get(key) is not None and not isinstance(config[key], dict):
            raise ServebookError(f"{key} is {str(config[key])[:40]}, not an object", where, "Correct it")
    if not isinstance(config.get("model_type", ""), str | None):
        raise ServebookError(f"model_type is {config['model_type']!r}, not a name", where, "Correct it")
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(n, str) for n in named)):
        raise ServebookError(f"architectures is {named!r}, not a list of names", where, "Correct it")
    if config.get("vision_config") and not any(config.get(k) for k in (*PARTS[:3], *SIZES)):
        raise ServebookError(
            "it has a vision_config and nothing about the decoder",
            where,
            "Add text_config, as the publisher's file has it",
        )


def check_counts(text: dict[str, Any], where: str) -> None:
    """Raises ServebookError for a count that is not a positive whole number."""
    for key in (*COUNTS, *OTHER_COUNTS):
        value = text.get(key)
        if value is None or isinstance(value, list):
            continue
        if value == 0 and ((key == "head_dim" and text.get("kv_lora_rank")) or "experts" in key or key[:3] == "moe"):
            continue  # latent attention has no head_dim; a dense model may have no experts
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ServebookError(f"{key} is {value!r}, not a positive whole number", where, "Correct it")
        if value > MOST:
            raise ServebookError(f"{key} is {value:.3g}, more than any model has", where, "Correct it")
    if isinstance(layers := text.get("num_hidden_layers"), int) and layers > MOST_LAYERS:
        raise ServebookError(f"num_hidden_layers is {layers}", where, f"At most {MOST_LAYERS} are read")
    heads, kv = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv, int) and heads % kv:
        raise ServebookError(f"{heads} attention heads do not divide into {kv} KV heads", where, "Correct them")
