"""The attention and state of each decoder layer: its range, its KV bytes per token, its state bytes per sequence.

Derived from the layer's weights (rows of the key and value projections, convolutions of state-space layers) and from
the configuration with its class defaults (layer types, windows, state sizes). The result corresponds to vLLM's
KVCacheSpec of the layer. One module, since each kind of layer is found with the same few helpers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .latent import EXPANDED, compressed, expanded, key_index, latent_layers
from .layer_kinds import AttentionLayers, causal_pairs, ends, number
from .tree import Tree

__all__ = ["AttentionLayers", "attention", "causal_pairs", "context_note", "context_tokens", "layer_count"]


def attention(tree: Tree, decoder: str, element_bytes: int, kv_bytes: float) -> tuple[AttentionLayers, ...]:
    """The decoder's kinds of layers with their counts, in order of first appearance."""
    found: Counter[AttentionLayers] = Counter()
    for index, weights in sorted(_by_layer(tree, decoder).items()):
        for one in _layer(index, weights, tree.text, element_bytes, kv_bytes):
            found[one] += 1
    return tuple(replace(one, layers=n) for one, n in found.items())


def layer_count(tree: Tree, decoder: str) -> int:
    return len(_by_layer(tree, decoder))


def _by_layer(tree: Tree, decoder: str) -> dict[int, dict[str, tuple[int, ...]]]:
    """{layer: {name within it: shape}}"""
    start = re.escape(decoder + ".") if decoder else ""
    pattern = re.compile(rf"^{start}(?:encoder\.)?(?:layers|h|blocks|layer)\.(\d+)\.(.+)$")
    out: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for w in tree.weights:
        if found := pattern.match(w.name):
            out[int(found.group(1))][f"{found.group(2)}.{w.parameter}"] = w.shape
    return out


def _layer(
    index: int, weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], element_bytes: int, kv_bytes: float,
) -> list[AttentionLayers]:  # fmt: skip
    kinds = text.get("layer_types")
    kind = str(kinds[index]) if isinstance(kinds, list) and index < len(kinds) else ""
    out = []
    if (state := _state(weights, text, element_bytes)) is not None:
        if "linear" in kind:
            return [state]  # its projections of keys and values are the state's
        out.append(state)
    elif "linear" in kind and (state := _lightning(weights, text, element_bytes)) is not None:
        return [state]
    latent = ends(weights, "kv_a_proj_with_mqa.weight", "kv_a_proj.weight")
    if latent is not None and number(text, "kv_lora_rank"):
        if text.get("model_type") in EXPANDED:
            return [*out, expanded(text, kv_bytes)]
        often = sum(n.endswith(("kv_a_proj_with_mqa.weight", "kv_a_proj.weight")) for n in weights)
        return [*out, *latent_layers(weights, text, latent, kv_bytes) * often]
    if "compress" in kind or (text.get("compress_rates") and ends(weights, "self_attn.kv_proj.weight")):
        return [*out, *compressed(weights, text, kind, kv_bytes)]
    rows = _key_and_value_rows(weights, text)
    if rows is None or any("time_decay" in n for n in weights):  # RWKV's keys and values go into a state
        return out
    key_rows, value_rows, head = rows
    heads_times_value = ends(weights, "o_proj.weight", "out_proj.weight", "dense.weight", "attn.c_proj.weight")
    kv_heads = max(1, key_rows // head)
    value_dim = value_rows // kv_heads
    heads = number(text, "num_attention_heads", "n_head") or kv_heads
    if heads_times_value is not None and value_dim and heads_times_value[-1] % value_dim == 0:
        heads = heads_times_value[-1] // value_dim
    window, limit, how = _window(kind, text)
    one = AttentionLayers(
        kind=how, layers=1, heads=heads, kv_heads=kv_heads, key_dim=head, value_dim=value_dim,
        decode_dim=head + value_dim, elements=key_rows + value_rows, element_bytes=kv_bytes, window=window, limit=limit,
    )  # fmt: skip
    if (keys := key_index(weights, text, element_bytes)) is not None:
        return [*out, replace(one, limit=keys[1]), keys[0]]
    return [*out, one]


def _key_and_value_rows(weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(rows of the key projection, rows of the value projection, head dimension); None if they are not found."""
    heads = number(text, "num_attention_heads", "n_head")
    hidden = number(text, "hidden_size", "n_embd")
    head = number(text, "head_dim") or (hidden // heads if heads else 0)
    key = ends(weights, "k_proj.weight", "key.weight")
    if key is not None:
        norm = ends(weights, "k_norm.weight", "k_layernorm.weight", "key_layernorm.weight")
        if norm is not None and len(norm) == 1 and norm[0] != key[0] and key[0] % norm[0] == 0:
            head = norm[0]
        if not head or key[0] % head:
            head = key[0]
        value = ends(weights, "v_proj.weight", "value.weight")
        return key[0], value[0] if value is not None else key[0], head
    fused = ends(weights, "qkv_proj.weight", "c_attn.weight", "query_key_value.weight", "Wqkv.weight", "wqkv.weight")
    if fused is None or not head:
        return None
    rows = fused[0] if fused[0] != hidden or len(fused) < 2 else max(fused)  # GPT-2 stores the matrix transposed
    low_rank = ends(weights, "wq.weight")  # Step-3's queries, expanded by another matrix
    own = (rows - (low_rank[1] if low_rank is not None else heads * head)) // 2
    return (own, own, head) if own > 0 and own % head == 0 else None


def _window(kind: str, text: Mapping[str, Any]) -> tuple[int | None, int | None, str]:
    """(window of the cache, maximum context tokens per query, kind as vLLM caches the layer)"""
    window = number(text, "sliding_window") or None
    if "sliding" in kind:
        return (window, window, "sliding") if window else (None, None, "full")
    if "chunked" in kind:
        chunk = number(text, "attention_chunk_size") or None
        return chunk, chunk, "chunked" if chunk else "full"
    if kind or not window or text.get("use_sliding_window") is False:
        return None, None, "full"
    return window, window, "sliding"  # without layer_types, every layer has the window


def _state(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], element_bytes: int
) -> AttentionLayers | None:
    """A state-space or linear-attention layer with a convolution; None if it has none. Its state: the convolution's
    last inputs and the recurrent state."""
    convolutions = [s for n, s in weights.items() if len(s) == 3 and re.search(r"conv\w*\.weight$", n)]
    if not convolutions:
        return None
    convolved = sum(s[0] * (s[2] - 1) for s in convolutions)
    decay = next((s for n, s in weights.items() if n.endswith("A_log")), None)
    recurrent = 0
    if decay is not None and len(decay) == 2:  # Mamba 1: one state per channel
        recurrent = decay[0] * decay[1]
    elif decay is not None:
        count = max(decay)
        keys, values = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
        if not (keys and values):
            inner = ends(weights, "out_proj.weight", "o_proj.weight")
            values = inner[-1] // count if inner is not None else number(text, "mamba_head_dim", "mamba_d_head")
            keys = number(text, "ssm_state_size", "mamba_d_state", "state_size") or values
        recurrent = count * keys * values
    kind = str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or "auto")
    decays_by_channel = ends(weights, "f_a_proj.weight")  # Kimi's delta attention: fp32 unless stated otherwise
    wide = 4 if "32" in kind or (kind == "auto" and decays_by_channel) else element_bytes
    size = convolved * element_bytes + recurrent * wide
    # FLOPs per token and state element: two multiply-adds (update and read), plus the decay
    return AttentionLayers(kind="state", layers=1, state_bytes=size, state_flops=6 * recurrent)


MOST_FACTOR = 1e5
ASSUMED_CONTEXT = 2048  # vLLM's default if the config gives no context length


def _contexts(tree: Tree) -> list[int]:
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
            "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len")  # fmt: skip
    values = [tree.text.get(k) for k in keys]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]


def _lightning(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], element_bytes: int
) -> AttentionLayers | None:
    """Linear attention without a convolution: per head, a state of key dimension × value dimension."""
    rows, heads = ends(weights, "qkv_proj.weight"), number(text, "num_attention_heads")
    if rows is None or not heads:
        return None
    head = rows[0] // 3 // heads
    recurrent = heads * head * head
    return AttentionLayers(kind="state", layers=1, state_bytes=recurrent * element_bytes, state_flops=6 * recurrent)


def context_note(tree: Tree) -> tuple[str, ...]:
    """A note if the config gives no context length; else empty."""
    if _contexts(tree):
        return ()
    return (f"the config gives no context length: {ASSUMED_CONTEXT:,} tokens assumed, as in vLLM (max_model_len)",)


def context_tokens(tree: Tree) -> int:
    """The maximum context length, as vLLM derives it: the number of positions, times the RoPE scaling factor for the
    scaling types where vLLM applies it; the original length with LongRoPE; 2,048 if the config gives none."""
    text = tree.text
    given = _contexts(tree)
    if not given:
        return ASSUMED_CONTEXT
    longest = float(number(text, "model_max_length") or min(given))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    parts = [p for p in rope.values() if isinstance(p, Mapping)] or [rope]
    kinds = [str(p.get("rope_type") or p.get("type") or "default") for p in parts]
    if "longrope" in kinds or "su" in kinds:
        return number(text, "original_max_position_embeddings") or int(longest)
    if "gemma3" not in str(text.get("model_type")):
        scaled = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
        factor = 1.0
        for part, kind in zip(parts, kinds, strict=True):
            if kind not in scaled:
                factor = 1.0 if part.get("factor") is None else float(part["factor"])
        if not 0 < factor < MOST_FACTOR:
            raise ValueError(f"the RoPE factor is {factor:g}")
        longest *= factor
    return int(longest)
