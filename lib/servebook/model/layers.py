"""The attention and state of each decoder layer: its range, its KV bytes per token, its state bytes per sequence.

Derived from the layer's weights (rows of the key and value projections, convolutions of state-space layers) and from
the configuration with its class defaults (layer types, windows, state sizes). The result corresponds to vLLM's
KVCacheSpec of the layer. One module, since each kind of layer is found with the same few helpers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .tree import Tree

# models with latent vectors whose class in vLLM (0.26 to 0.32) caches the keys and values of all heads instead
EXPANDED = ("minicpm3",)
INDEXER_BYTES = 4 / 128  # the indexer's keys are fp8 with one fp32 scale per 128 elements


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """`layers` identical layers. kind, as vLLM caches them: full, sliding, chunked, latent, indexer, state.

    Per pair of query and context token, heads × (key_dim + value_dim) elements are multiplied in a prefill and heads ×
    decode_dim in a decode (where latent attention works on the latent vector). elements: cached per token. window:
    tokens that the cache keeps. limit: maximum context tokens per query (a window, a chunk, or the top-k of an
    indexer). state_bytes: per sequence. tokens_per_state: tokens that share one cached entry."""

    kind: str
    layers: int
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decode_dim: int = 0
    elements: int = 0
    element_bytes: float = 2  # per cached element
    window: int | None = None
    limit: int | None = None
    state_bytes: int = 0
    tokens_per_state: int = 1
    state_flops: int = 0  # per token
    split: bool = True  # whether tensor parallelism divides the cache; latent vectors are copied to every rank

    @property
    def token_bytes(self) -> float:
        """Cached bytes per token and layer."""
        return self.elements * self.element_bytes / self.tokens_per_state

    def attended(self, context_tokens: float) -> float:
        """Context tokens that one query attends to."""
        return min(context_tokens, self.limit) if self.limit else context_tokens

    def pairs(self, start: int, tokens: int) -> float:
        """Number of causal query-context pairs of query tokens start+1 … start+tokens."""
        return causal_pairs(start, tokens, self.limit) / self.tokens_per_state

    def rank(self, tensor: int) -> AttentionLayers:
        """The share of one of `tensor` tensor-parallel ranks. With fewer KV heads than ranks, each rank has one."""
        if tensor == 1:
            return self
        if self.kind == "state":
            return replace(self, state_bytes=-(-self.state_bytes // tensor), state_flops=self.state_flops // tensor)
        if not self.split:
            return replace(self, heads=max(1, self.heads // tensor)) if self.kind == "latent" else self
        kv = max(1, self.kv_heads // tensor)
        elements = self.elements * kv // max(self.kv_heads, 1)
        return replace(self, heads=max(1, self.heads // tensor), kv_heads=kv, elements=elements)


def causal_pairs(start: int, tokens: int, limit: int | None) -> int:
    """sum of min(i, limit) over i = start+1 … start+tokens"""
    end = start + tokens
    if limit is None or end <= limit:
        return (end * (end + 1) - start * (start + 1)) // 2
    below = max(limit - start, 0)
    return causal_pairs(start, below, None) + (tokens - below) * limit


def attention(tree: Tree, decoder: str, element_bytes: int, kv_bytes: float) -> tuple[AttentionLayers, ...]:
    """The decoder's kinds of layers with their counts, in order of first appearance."""
    found: Counter[AttentionLayers] = Counter()
    for index, weights in sorted(_by_layer(tree, decoder).items()):
        for one in _layer(index, weights, tree.text, element_bytes, kv_bytes):
            found[one] += 1
    shared = _number(tree.text, "num_kv_shared_layers")
    if shared and not any("k_proj" in n for n in _by_layer(tree, decoder).get(_last(tree, decoder), {})):
        shared = 0  # layers that share another's KV cache have no projections, so none was counted
    return tuple(replace(one, layers=n) for one, n in found.items())


def layer_count(tree: Tree, decoder: str) -> int:
    return len(_by_layer(tree, decoder))


def _last(tree: Tree, decoder: str) -> int:
    return max(_by_layer(tree, decoder), default=-1)


def _by_layer(tree: Tree, decoder: str) -> dict[int, dict[str, tuple[int, ...]]]:
    """{layer: {name within it: shape}}"""
    start = re.escape(decoder + ".") if decoder else ""
    pattern = re.compile(rf"^{start}(?:encoder\.)?(?:layers|h|blocks|layer)\.(\d+)\.(.+)$")
    out: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for w in tree.weights:
        if found := pattern.match(w.name):
            out[int(found.group(1))][f"{found.group(2)}.{w.parameter}"] = w.shape
    return out


def _ends(weights: Mapping[str, tuple[int, ...]], *endings: str) -> tuple[int, ...] | None:
    return next((s for e in endings for n, s in weights.items() if f".{n}".endswith(f".{e}")), None)


def _number(text: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


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
    latent = _ends(weights, "kv_a_proj_with_mqa.weight", "kv_a_proj.weight")
    if latent is not None and _number(text, "kv_lora_rank"):
        if text.get("model_type") in EXPANDED:
            return [*out, _expanded(text, kv_bytes)]
        often = sum(n.endswith(("kv_a_proj_with_mqa.weight", "kv_a_proj.weight")) for n in weights)
        return [*out, *_latent(weights, text, latent, kv_bytes) * often]
    if "compress" in kind or (text.get("compress_rates") and _ends(weights, "self_attn.kv_proj.weight")):
        return [*out, *_compressed(weights, text, kind, kv_bytes)]
    rows = _key_and_value_rows(weights, text)
    if rows is None or any("time_decay" in n for n in weights):  # RWKV's keys and values go into a state
        return out
    keys, values, head = rows
    heads_times_value = _ends(weights, "o_proj.weight", "out_proj.weight", "dense.weight", "attn.c_proj.weight")
    kv_heads = max(1, keys // head)
    value_dim = values // kv_heads
    heads = _number(text, "num_attention_heads", "n_head") or kv_heads
    if heads_times_value is not None and value_dim and heads_times_value[-1] % value_dim == 0:
        heads = heads_times_value[-1] // value_dim
    window, limit, how = _window(kind, text)
    one = AttentionLayers(
        kind=how, layers=1, heads=heads, kv_heads=kv_heads, key_dim=head, value_dim=value_dim,
        decode_dim=head + value_dim, elements=keys + values, element_bytes=kv_bytes, window=window, limit=limit,
    )  # fmt: skip
    return [*out, one]


def _key_and_value_rows(weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(rows of the key projection, rows of the value projection, head dimension); None if they are not found."""
    heads = _number(text, "num_attention_heads", "n_head")
    hidden = _number(text, "hidden_size", "n_embd")
    head = _number(text, "head_dim") or (hidden // heads if heads else 0)
    key = _ends(weights, "k_proj.weight", "key.weight")
    if key is not None:
        norm = _ends(weights, "k_norm.weight", "k_layernorm.weight", "key_layernorm.weight")
        if norm is not None and len(norm) == 1 and norm[0] != key[0] and key[0] % norm[0] == 0:
            head = norm[0]
        if not head or key[0] % head:
            head = key[0]
        value = _ends(weights, "v_proj.weight", "value.weight")
        return key[0], value[0] if value is not None else key[0], head
    fused = _ends(weights, "qkv_proj.weight", "c_attn.weight", "query_key_value.weight", "Wqkv.weight", "wqkv.weight")
    if fused is None or not head:
        return None
    rows = fused[0] if fused[0] != hidden or len(fused) < 2 else max(fused)  # GPT-2 stores the matrix transposed
    low_rank = _ends(weights, "wq.weight")  # Step-3's queries, expanded by another matrix
    own = (rows - (low_rank[1] if low_rank is not None else heads * head)) // 2
    return (own, own, head) if own > 0 and own % head == 0 else None


def _window(kind: str, text: Mapping[str, Any]) -> tuple[int | None, int | None, str]:
    """(window of the cache, maximum context tokens per query, kind as vLLM caches the layer)"""
    window = _number(text, "sliding_window") or None
    if "sliding" in kind:
        return (window, window, "sliding") if window else (None, None, "full")
    if "chunked" in kind:
        chunk = _number(text, "attention_chunk_size") or None
        return chunk, chunk, "chunked" if chunk else "full"
    if kind or not window or text.get("use_sliding_window") is False:
        return None, None, "full"
    return window, window, "sliding"  # without layer_types, every layer has the window


def _latent(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], latent: tuple[int, ...], kv_bytes: float
) -> list[AttentionLayers]:
    rank, heads = _number(text, "kv_lora_rank"), _number(text, "num_attention_heads")
    width = latent[0]
    rope = width - rank
    nope, value = _number(text, "qk_nope_head_dim"), _number(text, "v_head_dim")
    chosen = _number(text, "index_topk") or None
    indexer = _ends(weights, "indexer.wk.weight")
    indexed = indexer is not None or (chosen and text.get("index_topk"))
    out = [AttentionLayers(
        kind="latent", layers=1, heads=heads, kv_heads=1, key_dim=nope + rope, value_dim=value,
        decode_dim=width + rank, elements=width, element_bytes=kv_bytes, limit=chosen if indexed else None, split=False,
    )]  # fmt: skip
    if indexer is not None:
        out.append(AttentionLayers(
            kind="indexer", layers=1, heads=_number(text, "index_n_heads"), kv_heads=1, key_dim=indexer[0],
            decode_dim=indexer[0], elements=indexer[0], element_bytes=1 + INDEXER_BYTES, split=False,
        ))  # fmt: skip
    return out


def _expanded(text: Mapping[str, Any], kv_bytes: float) -> AttentionLayers:
    """Keys and values of all heads, expanded from the latent vector; vLLM pads the values to the keys' dimension."""
    heads, head = (
        _number(text, "num_attention_heads"),
        _number(text, "qk_nope_head_dim") + _number(text, "qk_rope_head_dim"),
    )
    return AttentionLayers(
        kind="full", layers=1, heads=heads, kv_heads=heads, key_dim=head, value_dim=head, decode_dim=2 * head,
        elements=2 * heads * head, element_bytes=kv_bytes,
    )  # fmt: skip


def _compressed(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], kind: str, kv_bytes: float
) -> list[AttentionLayers]:
    """DeepSeek-V4: every layer has a short window. Most also cache one latent vector per group of tokens."""
    head, heads = _number(text, "head_dim"), _number(text, "num_attention_heads")
    window, rates = _number(text, "sliding_window") or 128, text.get("compress_rates") or {}
    common: dict[str, Any] = {
        "layers": 1, "heads": heads, "kv_heads": 1, "key_dim": head, "value_dim": head, "decode_dim": 2 * head,
        "elements": head, "element_bytes": kv_bytes, "split": False,
    }  # fmt: skip
    out = [AttentionLayers(kind="sliding", window=window, limit=window, **common)]
    rate = rates.get(kind) if isinstance(rates, Mapping) else None
    if rate:
        indexer = _ends(weights, "indexer.kv_proj.weight")
        limit = _number(text, "index_topk") * int(rate) if indexer is not None else None
        out.append(AttentionLayers(kind="latent", tokens_per_state=int(rate), limit=limit, **common))
        if indexer is not None:
            width = _number(text, "index_head_dim")
            out.append(AttentionLayers(
                kind="indexer", layers=1, heads=_number(text, "index_n_heads"), kv_heads=1, key_dim=width,
                decode_dim=width, elements=width, element_bytes=1 + INDEXER_BYTES, tokens_per_state=int(rate),
                split=False,
            ))  # fmt: skip
    return out


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
        keys, values = _number(text, "linear_key_head_dim"), _number(text, "linear_value_head_dim")
        if not (keys and values):
            inner = _ends(weights, "out_proj.weight", "o_proj.weight")
            values = inner[-1] // count if inner is not None else _number(text, "mamba_head_dim", "mamba_d_head")
            keys = _number(text, "ssm_state_size", "mamba_d_state", "state_size") or values
        recurrent = count * keys * values
    kind = str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or "auto")
    decays_by_channel = _ends(weights, "f_a_proj.weight")  # Kimi's delta attention: fp32 unless something else is said
    wide = 4 if "32" in kind or (kind == "auto" and decays_by_channel) else element_bytes
    size = convolved * element_bytes + recurrent * wide
    # FLOPs per token and state element: two multiply-adds (update and read), plus the decay
    return AttentionLayers(kind="state", layers=1, state_bytes=size, state_flops=6 * recurrent)


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
    rows, heads = _ends(weights, "qkv_proj.weight"), _number(text, "num_attention_heads")
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
    longest = float(_number(text, "model_max_length") or min(given))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    parts = [p for p in rope.values() if isinstance(p, Mapping)] or [rope]
    kinds = [str(p.get("rope_type") or p.get("type") or "default") for p in parts]
    if "longrope" in kinds or "su" in kinds:
        return _number(text, "original_max_position_embeddings") or int(longest)
    if "gemma3" not in str(text.get("model_type")):
        scaled = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
        factor = 1.0
        for part, kind in zip(parts, kinds, strict=True):
            if kind not in scaled:
                factor = part.get("factor") or factor
        longest *= float(factor)
    return int(longest)
