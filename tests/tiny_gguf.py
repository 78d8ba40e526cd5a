"""A GGUF file of a tiny Llama with random weights and a vocabulary of bytes and letters, for llama.cpp's servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LAYERS, HIDDEN, HEADS, FEED, CONTEXT = 2, 64, 4, 128, 512


def write_tiny_gguf(path: Path) -> Path:
    """Write the file."""
    import gguf

    w = gguf.GGUFWriter(str(path), "llama")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FEED)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_rope_dimension_count(HIDDEN // HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    words = [chr(97 + i) + chr(97 + j) for i in range(26) for j in range(26)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *(f"\u2581{x}" for x in words)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(words)
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * len(tokens))
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    w.add_tensor("token_embd.weight", random(len(tokens), HIDDEN))
    w.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    w.add_tensor("output.weight", random(len(tokens), HIDDEN))
    for k in range(LAYERS):
        for name, shape in (
            ("attn_q", (HIDDEN, HIDDEN)), ("attn_k", (HIDDEN, HIDDEN)), ("attn_v", (HIDDEN, HIDDEN)),
            ("attn_output", (HIDDEN, HIDDEN)), ("ffn_gate", (FEED, HIDDEN)), ("ffn_up", (FEED, HIDDEN)),
            ("ffn_down", (HIDDEN, FEED)),
        ):  # fmt: skip
            w.add_tensor(f"blk.{k}.{name}.weight", random(*shape))
        for name in ("attn_norm", "ffn_norm"):
            w.add_tensor(f"blk.{k}.{name}.weight", np.ones(HIDDEN, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
