"""A model's shape from its weights: each weight's part, how it is stored, how it is split over GPUs."""

from __future__ import annotations

import re
from typing import Any

from ..common.errors import ServebookError
from .layers import attention, context_note, context_tokens, layer_count
from .quantization import Quantization
from .shape import DTYPE_BYTES, TOWERS, AttentionLayers, Experts, Matrices, ModelShape
from .tree import Tree, Weight

ON_EVERY_RANK = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "wq_b", "wk", "weights_proj")
SAME_INPUT = ("k_proj", "v_proj", "up_proj", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba", "kv_a_proj_with_mqa")
SPLIT_INPUT = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "wo", "w2", "fc2", "fc_out")
DOWN = ("down_proj", "c_proj", "w2", "fc2", "fc_out", "proj_out", "dense_4h_to_h", "output_linear", "linear_2")
HEADS = ("lm_head", "output", "output_layer", "embed_out")
STACK = re.compile(r"^(.*?)\.?(?:encoder\.)?(?:layers|h|blocks|layer)\.\d+\.")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "experts_per_token",
             "moe_top_k", "num_selected_experts", "expert_top_k", "topk")  # fmt: skip


def shape_of(
    tree: Tree, quantization: Quantization, *, name: str, dtype: str, kv_cache_dtype: str, where: str
) -> ModelShape:
    """The shape of a model. Raises ServebookError if it has no decoder or its sizes contradict each other."""
    decoder = _decoder(tree, where)
    element_bytes = DTYPE_BYTES[dtype]
    kv_bytes = 1.0 if kv_cache_dtype == "fp8" else (quantization.kv_bytes or element_bytes)
    experts = _experts(tree, decoder, where)
    sums: dict[tuple[str, str, str | None], list[int]] = {}
    for w in tree.weights:
        part, split = _part(w, decoder)
        size, multiplies, inputs = _stored(w, part, quantization, dtype, experts)
        key = part, split, multiplies if part not in ("small", "embedding", "tower") else None
        total = sums.setdefault(key, [0, 0, 0, 0])
        for i, value in enumerate((w.size, size, inputs, inputs * _splits_input(w))):
            total[i] += value
    beside = sum(w.size for w in tree.beside)
    matrices = tuple(
        Matrices(part=p, split=s, multiplies=m, parameters=n, stored_bytes=b, quantized_inputs=q, split_inputs=r)
        for (p, s, m), (n, b, q, r) in sums.items()
    )
    kinds = attention(tree, decoder, element_bytes, kv_bytes)
    if not kinds:
        raise ServebookError(
            "the KV cache layout of its layers is not known", where, "Use a model whose layers vLLM can cache"
        )
    first = next((a for a in kinds if a.kind not in ("state", "indexer", "compressor")), None)
    try:
        context = context_tokens(tree)
    except (TypeError, ValueError, OverflowError) as e:
        raise ServebookError(f"its context length cannot be told ({e})", where, "Correct rope_scaling") from None
    layers = layer_count(tree, decoder)
    if not layers:
        raise ServebookError("no decoder layers found", where, "Use a decoder-only language model")
    return ModelShape(
        name=name,
        family=str(tree.top.get("model_type")),
        layers=layers,
        hidden=_hidden(tree, decoder),
        heads=first.heads if first else 1,
        kv_heads=first.kv_heads if first else 1,
        head_dim=first.key_dim if first else 1,
        intermediate=_intermediate(tree, decoder, experts),
        vocab=_embedding(tree, decoder).shape[0],
        tied_embeddings=tree.tied,
        max_context_tokens=context,
        matrices=matrices,
        attention=kinds,
        experts=experts,
        dtype=dtype,
        quantization=quantization.method,
        weight_bits=quantization.weight_bits if quantization.method != "none" else element_bytes * 8,
        kv_bytes_per_element=kv_bytes,
        tower_bytes_beside=beside * element_bytes,
        notes=(*tree.notes, *_notes(matrices, beside), *_index_note(tree, decoder, kinds), *context_note(tree)),
    )


def _index_note(tree: Tree, decoder: str, kinds: tuple[AttentionLayers, ...]) -> tuple[str, ...]:
    """A note if layers have an index of keys whose cache is not known; else empty."""
    names = (f"{w.name}.{w.parameter}".removeprefix(decoder) for w in tree.weights if w.name.startswith(decoder))
    if any(a.kind == "indexer" for a in kinds) or not any(re.search(r"\bindex", n) for n in names):
        return ()
    return ("its layers choose what they attend to by an index, whose cache is not counted",)


def _notes(matrices: tuple[Matrices, ...], beside: int) -> tuple[str, ...]:
    towers = sum(m.parameters for m in matrices if m.part == "tower") + beside
    if not towers:
        return ()
    return (f"{TOWERS} ({towers / 1e9:.2f}e9 parameters) take memory; only text requests are predicted",)


def _decoder(tree: Tree, where: str) -> str:
    """The name of the module that holds token embeddings and layers."""
    if any(".cross_attn." in w.name and STACK.match(w.name) for w in tree.weights):
        raise ServebookError(
            "its decoder attends to images by layers of cross-attention", where,
            "Use another model: no vLLM after 0.10 serves such layers",
        )  # fmt: skip
    stacks = [m.group(1) for w in tree.weights if (m := STACK.match(w.name))]
    tables = [w for w in tree.weights if w.kind == "embedding" and w.name.rpartition(".")[0] in set(stacks)]
    if not tables:
        raise ServebookError("no stack of layers with a token embedding found", where, "Use a decoder-only model")
    text = [w for w in tables if not re.search(r"vision|visual|audio|image", w.name)]
    return max(text or tables, key=lambda w: w.shape[0]).name.rpartition(".")[0]


def _embedding(tree: Tree, decoder: str) -> Weight:
    tables = [w for w in tree.weights if w.kind == "embedding" and w.name.rpartition(".")[0] == decoder]
    vocab = tree.text.get("vocab_size")
    return next((w for w in tables if w.shape[0] == vocab), tables[0])


def _hidden(tree: Tree, decoder: str) -> int:
    head = next((w for w in tree.weights if w.name.endswith("lm_head")), None)
    table = _embedding(tree, decoder)
    return int(head.shape[1] if head is not None and len(head.shape) == 2 else table.shape[1])


def _experts(tree: Tree, decoder: str, where: str) -> Experts | None:
    found = [w for w in tree.weights if w.kind == "experts" and w.name.startswith(decoder) and "shared" not in w.name]
    if not found:
        return None
    count = found[0].shape[0]
    chosen = _per_token(tree.text)
    if chosen is None:
        raise ServebookError(
            f"the number of experts per token (of {count}) is not given", where, "Add num_experts_per_tok"
        )
    down = next((w for w in found if "down" in w.parameter or w.parameter.endswith("w2")), found[-1])
    layers = len({w.name for w in found})
    nothing = tree.text.get("zero_expert_num") or 0  # experts without weights that the router may choose
    if chosen > count + nothing:
        raise ServebookError(
            f"a token is routed to {chosen} of {count + nothing} experts", where, "Correct num_experts_per_tok"
        )
    chosen = round(chosen * count / (count + nothing))
    return Experts(count=count, per_token=min(chosen, count), layers=layers, intermediate=_inner(down, tree))


def _per_token(text: dict[str, Any]) -> int | None:
    """Experts per token; the maximum where layers differ."""
    inner = text.get("ffn_config")
    for place in (text, inner if isinstance(inner, dict) else {}):
        for key in PER_TOKEN:
            given = place.get(key)
            counts = [n for n in (given if isinstance(given, list) else [given]) if isinstance(n, int) and n > 0]
            if counts:
                return max(counts)
    return None


def _inner(down: Weight, tree: Tree) -> int:
    """An expert's intermediate dimension: the dimension of its down projection that is not the hidden size."""
    hidden = tree.text.get("hidden_size")
    return down.shape[1] if down.shape[2] == hidden and down.shape[1] != hidden else down.shape[2]


def _intermediate(tree: Tree, decoder: str, experts: Experts | None) -> int:
    widths = [
        w.shape[1] if w.kind == "linear" else w.shape[0]
        for w in tree.weights
        if w.name.startswith(f"{decoder}.") and w.kind in ("linear", "transposed")
        and w.name.rpartition(".")[2] in DOWN and "attn" not in w.name
    ]  # fmt: skip
    given = tree.text.get("intermediate_size")
    given = max((g for g in given if isinstance(g, int)), default=1) if isinstance(given, list) else int(given or 1)
    return max(widths, default=experts.intermediate if experts else given)


def _part(w: Weight, decoder: str) -> tuple[str, str]:
    """(part, split) of a weight, with the values that Matrices lists."""
    names = w.name.split(".")
    last = names[-1]
    if last in HEADS and (last == "lm_head" or not STACK.match(w.name)):
        return ("head", "vocab") if len(w.shape) == 2 else ("small", "none")
    if not w.name.startswith(f"{decoder}."):
        return "tower", "tensor"
    if w.kind == "experts":
        return ("mlp", "tensor") if "shared" in w.name else ("experts", "experts")
    if w.kind == "embedding":
        return "embedding", "vocab"
    if len(w.shape) == 2 and w.parameter == "weight" and (last in ("gate", "router") or "router" in names):
        return "router", "none"
    if w.kind not in ("linear", "transposed"):
        return ("small", "experts") if "experts" in names and len(w.shape) == 2 else ("small", "none")
    if "indexer" in names or last in ON_EVERY_RANK:
        return "attention", "none"
    if last in ("k_proj", "v_proj", "key", "value"):
        return "attention", "kv"
    if {"linear_attn", "mamba", "short_conv"} & set(names) or ("mixer" in names and last in ("in_proj", "out_proj")):
        return "state", "tensor"
    if any("attn" in n or "attention" in n for n in names) or last in ("q_proj", "o_proj"):
        return "attention", "tensor"
    return "mlp", "tensor"


def _splits_input(w: Weight) -> bool:
    """Whether tensor parallel gives each rank its part of the weight's input, not all of it."""
    if w.kind == "experts":
        return "down" in w.parameter or w.parameter.endswith("w2")
    return w.name.rpartition(".")[2] in SPLIT_INPUT


def _stored(
    w: Weight, part: str, quantization: Quantization, dtype: str, experts: Experts | None
) -> tuple[int, str | None, int]:
    """(stored bytes, dtype of its multiplication, input elements per token that are quantized first)"""
    plain = w.size * DTYPE_BYTES[dtype]
    if w.kind == "experts":
        return _stored_experts(w, quantization, dtype, experts, plain)
    if w.kind not in ("linear", "transposed"):
        return plain, dtype, 0
    scheme = quantization.choose(w.name, part)
    if scheme is None:
        return plain, dtype, 0
    rows, columns = w.shape if w.kind == "linear" else (w.shape[1], w.shape[0])
    inputs = columns if scheme.multiplies and part != "tower" and w.name.rpartition(".")[2] not in SAME_INPUT else 0
    return scheme.stored_bytes(rows, columns), scheme.multiplies or dtype, inputs


def _stored_experts(
    w: Weight, quantization: Quantization, dtype: str, experts: Experts | None, plain: int
) -> tuple[int, str | None, int]:
    """The same for all experts of a layer. A checkpoint stores each expert separately, and its gate and up apart."""
    double = "gate_up" in w.parameter
    own = "gate_proj" if double else w.parameter
    scheme = quantization.choose(f"{w.name}.0.{own}", "experts")
    if scheme is None:
        return plain, dtype, 0
    count, a, b = w.shape
    inner = experts.intermediate if experts else b
    halves = 2 if double else 1
    rows, columns = (a, b) if a in (halves * inner, inner) or b != halves * inner else (b, a)
    size = count * halves * scheme.stored_bytes(rows // halves, columns)
    inputs = 0
    if scheme.multiplies and experts:
        layer = columns * experts.per_token if "down" in w.parameter else columns
        inputs = layer
    return size, scheme.multiplies or dtype, inputs
