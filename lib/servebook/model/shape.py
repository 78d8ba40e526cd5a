"""A dense decoder's arithmetic: parameters, bytes and FLOPs as exact counts. Knows no GPU and reads no file.

Conventions. A matrix-vector product of an m×n matrix costs 2·m·n FLOPs. "Linear" means the matrices of the decoder
layers (attention projections and MLP), not the LM head. Quantization touches the linear matrices only: embedding, LM
head, norms and biases keep the run's dtype unless the checkpoint's quantization_config says the LM head is quantized.
Scales of group-quantized weights are counted (one element of the run's dtype per group); zero points and the scales
per tensor, channel or 128×128 block are not (under 1 % of the weights).
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of `layers` equal layers with grouped-query attention and a gated MLP. All counts are exact ints."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    max_context_tokens: int
    family: str = "llama"
    dtype: str = "bfloat16"
    weight_bits: int = 16  # of the linear matrices
    weight_group: int | None = None  # weights per scale, where they share one
    lm_head_bits: int = 16
    compute_dtype: str = "bfloat16"  # what the tensor cores multiply: weight-only quantization keeps the run's dtype
    kv_bytes_per_element: int = 2
    sliding_window: int | None = None  # tokens a windowed layer attends to
    sliding_layers: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2

    @property
    def element_bytes(self) -> int:
        """Bytes of one unquantized weight or activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def linear_parameters(self) -> int:
        """Weights in the matrices of all layers: Q, K, V, O, gate, up, down."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def embedding_parameters(self) -> int:
        """vocab · hidden."""
        return self.vocab * self.hidden

    @property
    def lm_head_parameters(self) -> int:
        """Parameters of an LM head of its own; 0 where it shares the embedding table."""
        return 0 if self.tied_embeddings else self.vocab * self.hidden

    @property
    def small_parameters(self) -> int:
        """Norms and biases."""
        layer = self.norms_per_layer * self.hidden
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        layer += self.hidden if self.out_bias else 0
        layer += 2 * self.intermediate + self.hidden if self.mlp_bias else 0
        return self.layers * layer + self.hidden

    @property
    def parameters(self) -> int:
        """All of them; a table that embedding and LM head share counts once."""
        return self.linear_parameters + self.small_parameters + self.embedding_parameters + self.lm_head_parameters

    @property
    def linear_weight_bytes(self) -> int:
        """Bytes of the linear matrices, with the scales of their groups."""
        scales = self.linear_parameters // self.weight_group * self.element_bytes if self.weight_group else 0
        return self.linear_parameters * self.weight_bits // 8 + scales

    @property
    def activation_quantization_bytes(self) -> int:
        """Bytes a token that quantizing the inputs of all matrices moves: read in the run's dtype, written in 8 bits. 0
        where the matrices multiply in the run's dtype."""
        if self.compute_dtype not in ("fp8", "int8"):
            return 0
        inputs = 2 * self.hidden + self.heads * self.head_dim + self.intermediate  # of Q/K/V, gate/up; of O; of down
        return self.layers * inputs * (self.element_bytes + 1)

    @property
    def lm_head_bytes(self) -> int:
        """Bytes the LM head reads per step; the embedding table where it is tied."""
        return self.embedding_parameters * self.lm_head_bits // 8

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding table."""
        return self.embedding_parameters * self.element_bytes

    @property
    def decode_weight_bytes(self) -> int:
        """Weight bytes streamed by one decode step: everything but the embedding lookup (post 1, value 2)."""
        return self.linear_weight_bytes + self.small_parameters * self.element_bytes + self.lm_head_bytes

    @property
    def weight_bytes(self) -> int:
        """Weight bytes resident in memory."""
        return self.decode_weight_bytes + (0 if self.tied_embeddings else self.embedding_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """layers · kv_heads · head_dim · 2 (K and V) · bytes per element (post 1, value 1)."""
        return self.layers * self.kv_heads * self.head_dim * 2 * self.kv_bytes_per_element

    @property
    def linear_flops_per_token(self) -> int:
        """2·m·n summed over the matrices of all layers (post 2); no LM head."""
        return 2 * self.linear_parameters

    @property
    def lm_head_flops(self) -> int:
        """FLOPs of the LM head for one token: 2 · hidden · vocab."""
        return 2 * self.hidden * self.vocab

    @property
    def attention_flops_per_context_token(self) -> int:
        """4 · layers · heads · head_dim: QKᵀ and the weighted sum of V, per query token and token attended to."""
        return 4 * self.layers * self.heads * self.head_dim

    def attended(self, context_tokens: float) -> float:
        """Tokens attended to by one query, averaged over the layers: the context, cut by the window where there is one.

        Exactly `context_tokens` without a sliding window. KV bytes read and attention FLOPs are proportional to it.
        """
        if self.sliding_window is None or context_tokens <= self.sliding_window:
            return context_tokens
        full = (self.layers - self.sliding_layers) * context_tokens
        return (full + self.sliding_layers * self.sliding_window) / self.layers

    def kv_read_bytes(self, context_tokens: float) -> float:
        """KV bytes one decode step reads for one sequence."""
        return self.attended(context_tokens) * self.kv_bytes_per_token

    def attention_flops(self, start: int, tokens: int) -> int:
        """Causal attention FLOPs of query tokens start+1 … start+tokens (a chunk; decode: tokens=1)."""
        per_layer = self.attention_flops_per_context_token // self.layers
        windowed = self.sliding_layers if self.sliding_window else 0
        pairs = (self.layers - windowed) * _causal_pairs(start, tokens, None)
        pairs += windowed * _causal_pairs(start, tokens, self.sliding_window)
        return per_layer * pairs

    def prefill_flops(self, prompt_tokens: int) -> int:
        """L·linear + attention·L(L+1)/2 + one LM head (post 2)."""
        attention = self.attention_flops(0, prompt_tokens)
        return prompt_tokens * self.linear_flops_per_token + attention + self.lm_head_flops

    def decode_flops(self, batch: int, context_tokens: int) -> int:
        """batch · (linear + LM head + attention at a context of T tokens) (post 1, value 5)."""
        attention = int(self.attention_flops_per_context_token * self.attended(context_tokens))
        return batch * (self.linear_flops_per_token + self.lm_head_flops + attention)


def _causal_pairs(start: int, tokens: int, window: int | None) -> int:
    """sum of min(i, window) over i = start+1 … start+tokens"""
    end = start + tokens
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    below = max(window - start, 0)
    return _causal_pairs(start, below, None) + (tokens - below) * window
