"""A decoder's arithmetic: parameters, bytes and FLOPs as exact counts. Independent of hardware; reads no files.

Conventions. A matrix-vector product of an m×n matrix costs 2·m·n FLOPs. "Linear" means the matrices of the decoder
layers (attention and state-space projections, MLPs, experts, routers), not the LM head. Stored bytes are those of the
checkpoint's format, with scales and zero points. In a mixture of experts a token is multiplied by the experts that it
is routed to. A step reads every expert that any of its tokens is routed to. Routing is assumed uniform. One module,
since it is one class of short properties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .layers import AttentionLayers, causal_pairs

__all__ = ["DTYPE_BYTES", "AttentionLayers", "Experts", "Matrices", "ModelShape", "causal_pairs"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """Total of all weights, over all layers, that share part, split and dtype of multiplication.

    part: attention, mlp, experts, router, state, head, embedding, small (norms, biases), tower (vision, audio).
    split: how tensor parallelism divides them: tensor (evenly), kv (by KV heads), none (copied to each rank), vocab,
    experts. multiplies: dtype of the multiplication; None: not multiplied (embeddings, norms). quantized_inputs: input
    elements per token that are quantized before the multiplication; split_inputs: those of which a rank has only its
    part (the inputs of O and down, Megatron's row-parallel matrices)."""

    part: str
    split: str
    parameters: int
    stored_bytes: int
    multiplies: str | None = None
    quantized_inputs: int = 0
    split_inputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed experts: `count` per layer in `layers` layers; each token is routed to `per_token` of them."""

    count: int
    per_token: int
    layers: int
    intermediate: int

    def touched(self, tokens: float) -> float:
        """Expected number of distinct experts per layer for `tokens` tokens, uniform routing: E·(1 − (1 − k/E)^n)."""
        return float(self.count * (1 - (1 - self.per_token / self.count) ** tokens))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder as it is served. Counts are exact for the whole model, rounded for its ranks and pipeline stages.

    Times and sizes are computed from `matrices` and `attention`. heads, kv_heads and head_dim (of the first attention
    layer) and intermediate (of the widest MLP) serve only for tensor-parallel KV shares, online FP8 and activation
    memory."""

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
    matrices: tuple[Matrices, ...]
    attention: tuple[AttentionLayers, ...]
    experts: Experts | None = None
    family: str = "llama"
    dtype: str = "bfloat16"
    quantization: str = "none"
    weight_bits: int = 16  # per weight of the quantized matrices
    kv_bytes_per_element: float = 2
    tower_bytes_beside: int = 0  # vision or audio towers that the server loads and `matrices` does not contain
    notes: tuple[str, ...] = ()  # parts of the model that are not predicted

    def _sum(self, field: str, *parts: str) -> int:
        return sum(getattr(m, field) for m in self.matrices if m.part in parts)

    @property
    def element_bytes(self) -> int:
        """Bytes of one unquantized weight or activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied embedding table counts once."""
        return sum(m.parameters for m in self.matrices)

    @property
    def active_parameters(self) -> int:
        """Parameters used for one text token: only the experts that it is routed to, no towers."""
        routed = self._sum("parameters", "experts")
        return self.parameters - self._sum("parameters", "tower") - routed + round(routed * self.expert_share)

    @property
    def expert_share(self) -> float:
        """Fraction of the experts that one token is routed to; 1 without experts."""
        return self.experts.per_token / self.experts.count if self.experts else 1.0

    @property
    def embedding_parameters(self) -> int:
        """vocab · hidden."""
        return self.vocab * self.hidden

    @property
    def lm_head_parameters(self) -> int:
        """Parameters of the LM head; 0 if it shares the embedding table."""
        return self._sum("parameters", "head")

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self._sum("stored_bytes", "experts")

    @property
    def activation_quantization_bytes(self) -> int:
        """Bytes per token moved to quantize the matrices' inputs: read in the run's dtype, written in 8 bits."""
        return sum(m.quantized_inputs for m in self.matrices) * (self.element_bytes + 1)

    @property
    def lm_head_bytes(self) -> int:
        """Bytes that the LM head reads per step; those of the embedding table if it is tied."""
        return self._sum("stored_bytes", "head") or self.embedding_parameters * self.element_bytes

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding tables."""
        return self._sum("stored_bytes", "embedding")

    @property
    def dense_read_bytes(self) -> int:
        """Weight bytes that every step reads: all except embeddings, towers and routed experts."""
        read = self._sum("stored_bytes", "small", "head", *LINEAR) - self.expert_bytes
        return read + (0 if self.lm_head_parameters else self.lm_head_bytes)

    @property
    def decode_weight_bytes(self) -> int:
        """Weight bytes read by a decode step of one sequence: all except the embedding table and the experts that the
        token is not routed to (post 1, value 2)."""
        return self.read_bytes(1)

    def read_bytes(self, tokens: float) -> int:
        """Weight bytes that a step of `tokens` tokens reads."""
        if not self.experts:
            return self.dense_read_bytes
        return self.dense_read_bytes + round(self.expert_bytes * self.experts.touched(tokens) / self.experts.count)

    @property
    def weight_bytes(self) -> int:
        """Weight bytes resident in memory."""
        return sum(m.stored_bytes for m in self.matrices)

    @property
    def kv_bytes_per_token(self) -> int:
        """Cached bytes per token: KV heads · head dimension · 2 (K and V) · bytes per element, summed over the layers
        (post 1, value 1). Latent attention caches its latent vector instead."""
        return round(sum(a.layers * a.token_bytes for a in self.attention if a.kind != "compressor"))

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of state per sequence: of state-space and linear-attention layers, and of groups of tokens that are
        still to be compressed."""
        open_groups = sum(a.layers * (a.window or 0) * a.token_bytes for a in self.attention if a.kind == "compressor")
        return sum(a.layers * a.state_bytes for a in self.attention) + round(open_groups)

    @property
    def compute_dtype(self) -> str:
        """The dtype of most of a token's FLOPs."""
        by_dtype: dict[str, float] = {}
        for m in self.matrices:
            if m.part in LINEAR and m.multiplies:
                by_dtype[m.multiplies] = by_dtype.get(m.multiplies, 0.0) + self._active(m)
        return max(by_dtype, key=lambda d: by_dtype[d]) if by_dtype else self.dtype

    def _active(self, m: Matrices) -> float:
        return m.parameters * (self.expert_share if m.part == "experts" else 1.0)

    def linear_flops(self) -> dict[str, float]:
        """{dtype of the multiplication: FLOPs per token in the layers' matrices}"""
        out: dict[str, float] = {}
        for m in self.matrices:
            if m.part in LINEAR and m.multiplies:
                out[m.multiplies] = out.get(m.multiplies, 0.0) + 2 * self._active(m)
        return out

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs per token in the layers' matrices (post 2): 2·m·n summed over those it uses; without the LM head."""
        return round(sum(self.linear_flops().values()))

    @property
    def lm_head_flops(self) -> int:
        """FLOPs of the LM head for one token: 2 · hidden · vocab."""
        return 2 * self.hidden * self.vocab

    @property
    def attention_flops_per_context_token(self) -> int:
        """FLOPs per query and context token (QKᵀ, weighted sum of V): Σ 2·layers·heads·(key_dim + value_dim)."""
        return sum(2 * a.layers * a.heads * (a.key_dim + a.value_dim) for a in self.attention)

    @property
    def sliding_window(self) -> int | None:
        """Smallest attention limit of any layer (window, chunk, top-k), in tokens; None if no layer has a limit."""
        return min((a.limit for a in self.attention if a.limit and a.kind != "compressor"), default=None)

    def attended(self, context_tokens: float) -> float:
        """Context tokens attended to by one query: an average over the layers, weighted by KV bytes. Equals
        `context_tokens` if no layer's limit is below it."""
        if self.sliding_window is None or context_tokens <= self.sliding_window:
            return context_tokens
        kinds = [a for a in self.attention if a.kind != "compressor"]
        whole = sum(a.layers * a.token_bytes for a in kinds)
        return sum(a.layers * a.token_bytes * a.attended(context_tokens) for a in kinds) / whole

    def kv_read_bytes(self, context_tokens: float) -> float:
        """KV bytes that a decode step reads for one sequence."""
        return self.attended(context_tokens) * self.kv_bytes_per_token

    def attention_flops(self, start: int, tokens: int) -> int:
        """Causal attention FLOPs of query tokens start+1 … start+tokens (a chunk; decode: tokens=1)."""
        pairs = sum(2 * a.layers * a.heads * (a.key_dim + a.value_dim) * a.pairs(start, tokens) for a in self.attention)
        return round(pairs + tokens * self.state_flops_per_token)

    @property
    def state_flops_per_token(self) -> int:
        """FLOPs of a token in the recurrences of state-space and linear-attention layers."""
        return sum(a.layers * a.state_flops for a in self.attention)

    def prefill_flops(self, prompt_tokens: int) -> int:
        """FLOPs of a prefill of L tokens: L·linear + attention·L(L+1)/2 + one LM head (post 2)."""
        attention = self.attention_flops(0, prompt_tokens)
        return prompt_tokens * self.linear_flops_per_token + attention + self.lm_head_flops

    def decode_flops(self, batch: int, context_tokens: int) -> int:
        """FLOPs of a decode step: batch · (linear + LM head + attention over `context_tokens`) (post 1, value 5)."""
        attention = sum(
            2 * a.layers * a.heads * a.decode_dim * a.attended(context_tokens) / a.tokens_per_state
            for a in self.attention
        )
        own = self.linear_flops_per_token + self.lm_head_flops + self.state_flops_per_token
        return batch * (own + int(attention))

    def rank(self, tensor: int, experts_over: int = 1) -> ModelShape:
        """The share of one of `tensor` tensor-parallel ranks. experts_over: number of expert-parallel ranks, each with
        whole experts; 1: every expert is split like the other matrices."""
        if tensor == 1 and experts_over == 1:
            return self
        matrices = tuple(self._part_of(m, tensor, experts_over) for m in self.matrices)
        attention = tuple(a.rank(tensor) for a in self.attention)
        return replace(
            self, heads=max(1, self.heads // tensor), kv_heads=max(1, self.kv_heads // tensor),
            intermediate=self.intermediate // tensor, vocab=-(-self.vocab // tensor), matrices=matrices,
            attention=attention,
        )  # fmt: skip

    def with_fp8_weights(self) -> ModelShape:
        """The same model with FP8 weights and activations in its layers' matrices, as an engine quantizes at load."""
        split = self.layers * (self.heads * self.head_dim + self.intermediate)  # inputs of O; of down
        every = self.layers * 2 * self.hidden  # of Q/K/V; of gate/up
        quantized = []
        for m in self.matrices:
            if m.part in LINEAR and m.part != "router":
                mine = split if m.split in ("tensor", "experts") else 0
                m = replace(
                    m, stored_bytes=m.parameters, multiplies="fp8", quantized_inputs=every + mine, split_inputs=mine
                )
                every, split = 0, split - mine  # counted once, with the first of them
            quantized.append(m)
        return replace(self, matrices=tuple(quantized), weight_bits=8, quantization="fp8")

    def with_fp8_kv(self) -> ModelShape:
        """The same model with an FP8 KV cache."""
        return replace(self, attention=tuple(a.with_fp8() for a in self.attention), kv_bytes_per_element=1)

    @property
    def towers(self) -> bool:
        """Whether vision or audio towers take memory."""
        return bool(self.tower_bytes_beside) or any(m.part == "tower" for m in self.matrices)

    def without_towers(self) -> ModelShape:
        """The same model without its towers, as a server of text alone loads it."""
        matrices = tuple(m for m in self.matrices if m.part != "tower")
        notes = tuple(n for n in self.notes if not n.startswith(TOWERS))
        return replace(self, matrices=matrices, tower_bytes_beside=0, notes=notes)

    def stage(self, stages: int) -> ModelShape:
        """The largest of `stages` pipeline stages, with embeddings and LM head."""
        return self if stages == 1 else self.with_layers(-(-self.layers // stages))

    def with_layers(self, layers: int) -> ModelShape:
        """The same model with another number of layers, in the same proportions of kinds."""
        share = layers / self.layers
        matrices = tuple(
            replace(
                m, parameters=round(m.parameters * share), stored_bytes=round(m.stored_bytes * share),
                quantized_inputs=round(m.quantized_inputs * share), split_inputs=round(m.split_inputs * share),
            )
            if m.part in (*LINEAR, "small") else m
            for m in self.matrices
        )  # fmt: skip
        attention = tuple(replace(a, layers=math.ceil(a.layers * share)) for a in self.attention)
        experts = self.experts and replace(self.experts, layers=math.ceil(self.experts.layers * share))
        return replace(self, layers=layers, matrices=matrices, attention=attention, experts=experts)

    def _part_of(self, m: Matrices, tensor: int, experts_over: int) -> Matrices:
        share = 1.0
        if m.split == "tensor":
            share = 1 / tensor
        elif m.split == "kv":
            share = max(1, self.kv_heads // tensor) / self.kv_heads
        elif m.split == "vocab":
            share = -(-self.vocab // tensor) / self.vocab
        elif m.split == "experts":
            share = 1 / (experts_over if experts_over > 1 else tensor)
        if share == 1.0:
            return m
        split = round(m.split_inputs * share)
        return replace(
            m, parameters=round(m.parameters * share), stored_bytes=round(m.stored_bytes * share),
            quantized_inputs=m.quantized_inputs - m.split_inputs + split, split_inputs=split,
        )  # fmt: skip


TOWERS = "vision and audio towers"  # how the note on them begins
LINEAR = ("attention", "mlp", "experts", "router", "state")
