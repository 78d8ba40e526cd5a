"""Layers with latent vectors, compressed ones, or an index of keys, as vLLM's classes cache them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layer_kinds import AttentionLayers, ends, number

# models with latent vectors whose class in vLLM (0.26 to 0.32) caches the keys and values of all heads instead
EXPANDED = ("minicpm3",)
# DeepSeek-V4's cached vector, fp8_ds_mla: 448 elements in fp8, 64 in 16 bits, scales; blocks are padded
V4_HEAD, V4_BYTES, V4_ALIGNMENT = 512, 584, 576
INDEXER_BYTES = 4 / 128  # the indexer's keys are fp8 with one fp32 scale per 128 elements


def latent_layers(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], latent: tuple[int, ...], kv_bytes: float
) -> list[AttentionLayers]:
    rank, heads = number(text, "kv_lora_rank"), number(text, "num_attention_heads")
    width = latent[0]
    rope = width - rank
    nope, value = number(text, "qk_nope_head_dim"), number(text, "v_head_dim")
    chosen = number(text, "index_topk") or None
    indexer = ends(weights, "indexer.wk.weight")
    indexed = indexer is not None or (chosen and text.get("index_topk"))
    vectors = AttentionLayers(
        kind="latent", layers=1, heads=heads, kv_heads=1, key_dim=nope + rope, value_dim=value,
        decode_dim=width + rank, elements=width, element_bytes=kv_bytes, limit=chosen if indexed else None, split=False,
    )  # fmt: skip
    out = [vectors.with_fp8() if kv_bytes == 1 else vectors]
    if indexer is not None:
        out.append(AttentionLayers(
            kind="indexer", layers=1, heads=number(text, "index_n_heads"), kv_heads=1, key_dim=indexer[0],
            decode_dim=indexer[0], elements=indexer[0], element_bytes=1 + INDEXER_BYTES, split=False,
        ))  # fmt: skip
    return out


def expanded(text: Mapping[str, Any], kv_bytes: float) -> AttentionLayers:
    """Keys and values of all heads, expanded from the latent vector; vLLM pads the values to the keys' dimension."""
    heads = number(text, "num_attention_heads")
    head = number(text, "qk_nope_head_dim") + number(text, "qk_rope_head_dim")
    return AttentionLayers(
        kind="full", layers=1, heads=heads, kv_heads=heads, key_dim=head, value_dim=head, decode_dim=2 * head,
        elements=2 * heads * head, element_bytes=kv_bytes,
    )  # fmt: skip


def compressed(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], kind: str, kv_bytes: float
) -> list[AttentionLayers]:
    """DeepSeek-V4: every layer has a short window. Most also cache one latent vector per group of tokens, and the
    inputs of the groups that are still open. Formats and blocks as in vllm/models/deepseek_v4 (0.26 to 0.32)."""
    head, heads = number(text, "head_dim"), number(text, "num_attention_heads")
    window, rates = number(text, "sliding_window") or 128, text.get("compress_rates") or {}
    common: dict[str, Any] = {
        "layers": 1, "heads": heads, "kv_heads": 1, "key_dim": head, "value_dim": head, "decode_dim": 2 * head,
        "elements": head, "element_bytes": V4_BYTES / head if head == V4_HEAD else kv_bytes, "split": False,
        "alignment": V4_ALIGNMENT,
    }  # fmt: skip
    out = [AttentionLayers(kind="sliding", window=window, limit=window, block=64, **common)]
    rate = rates.get(kind) if isinstance(rates, Mapping) else None
    if rate:
        indexer = ends(weights, "indexer.kv_proj.weight")
        limit = number(text, "index_topk") * int(rate) if indexer is not None else None
        out.append(AttentionLayers(kind="latent", tokens_per_state=int(rate), limit=limit, block=256, **common))
        out.append(_compressor(head, int(rate)))
        if indexer is not None:
            width = number(text, "index_head_dim")
            out.append(AttentionLayers(
                kind="indexer", layers=1, heads=number(text, "index_n_heads"), kv_heads=1, key_dim=width,
                decode_dim=width, elements=width, element_bytes=1 + INDEXER_BYTES, tokens_per_state=int(rate),
                block=256, alignment=V4_ALIGNMENT, split=False,
            ))  # fmt: skip
            out.append(_compressor(width, int(rate)))
    return out


def _compressor(width: int, rate: int) -> AttentionLayers:
    """The fp32 inputs (values and scores) of groups that are still open; groups of four tokens overlap."""
    overlap = 2 if rate == 4 else 1
    return AttentionLayers(
        kind="compressor", layers=1, elements=2 * overlap * width, element_bytes=4, window=overlap * rate,
        limit=overlap + 1, block=4 if rate == 4 else 8, alignment=V4_ALIGNMENT, split=False,
    )  # fmt: skip


def key_index(
    weights: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], element_bytes: int
) -> tuple[AttentionLayers, int] | None:
    """MiniMax-M3's index of keys beside a KV cache: (one key per token in the run's dtype, context tokens per query in
    the blocks that it chooses). None for a layer without one."""
    norm = ends(weights, "index_k_norm.weight", "indexer.k_norm.weight")
    sparse = text.get("sparse_attention_config") or {}
    given = {**{k.removeprefix("sparse_"): v for k, v in sparse.items()}, **text}
    chosen = number(given, "index_topk_blocks", "topk_blocks") * number(given, "index_block_size", "block_size")
    if norm is None or not chosen:
        return None
    keys = AttentionLayers(
        kind="indexer", layers=1, heads=number(given, "index_n_heads", "num_index_heads"), kv_heads=1, key_dim=norm[0],
        decode_dim=norm[0], elements=norm[0], element_bytes=element_bytes, split=False,
    )  # fmt: skip
    return keys, chosen
