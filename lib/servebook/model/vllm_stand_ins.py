"""Stubs for vLLM's layers with unsplit shapes, for models that only vLLM has (see vllm_blueprint)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .stand_ins import Module, ModuleList, Parameter, Tensor, Unknown
from .torch_stand_ins import Embedding, Linear


class PackedLinear(Linear):
    """MergedColumnParallelLinear: several matrices with the same input, stacked along the outputs."""

    def __init__(self, input_size: int, output_sizes: Any, bias: Any = True, **_: Any) -> None:
        super().__init__(input_size, sum(output_sizes), bias)


class QKVLinear(Linear):
    """QKVParallelLinear."""

    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int | None = None,
        bias: Any = True, **more: Any,
    ) -> None:  # fmt: skip
        kv = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        value = more.get("v_head_size") or head_size
        super().__init__(hidden_size, head_size * (total_num_heads + kv) + value * kv, bias)


class QKVWithIndexer(QKVLinear):
    """MinimaxM3QKVParallelLinearWithIndexer: QKV stacked with an indexer's queries and its single key."""

    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int,
        total_num_index_heads: int, index_head_size: int, bias: Any = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, head_size, total_num_heads, total_num_kv_heads, bias)
        self.index_weight = Parameter(Tensor((index_head_size * (total_num_index_heads + 1), hidden_size)))


class RowLinear(Linear):
    """ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, GateLinear: (inputs, outputs)."""

    def __init__(self, input_size: int, output_size: int, bias: Any = True, *_: Any, **__: Any) -> None:
        super().__init__(input_size, output_size, bias)


class GateLinear(Linear):
    def __init__(self, input_size: int, output_size: int, bias: Any = False, *_: Any, **__: Any) -> None:
        super().__init__(input_size, output_size, bias)


class VocabEmbedding(Embedding):
    def tie_weights(self, other: Any) -> Module:
        return Module()


class LMHead(Linear):
    def __init__(self, num_embeddings: int, embedding_dim: int, bias: Any = False, *_: Any, **__: Any) -> None:
        super().__init__(embedding_dim, num_embeddings, bias)

    def tie_weights(self, other: Any) -> Module:
        return Module()


class Norm(Module):
    """RMSNorm, GemmaRMSNorm."""

    def __init__(self, hidden_size: int, eps: Any = None, *_: Any, **more: Any) -> None:
        if more.get("has_weight", True):
            self.weight = Parameter(Tensor((hidden_size,)))


class RoutedExperts(Module):
    """FusedMoE: the stacked gate/up and down matrices of all experts."""

    def __init__(self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, **more: Any) -> None:
        gates = 2 if more.get("is_act_and_mul", True) else 1
        name = "gate_up_proj" if gates == 2 else "up_proj"
        setattr(self, name, Parameter(Tensor((num_experts, gates * intermediate_size, hidden_size))))
        self.down_proj = Parameter(Tensor((num_experts, hidden_size, intermediate_size)))
        for key in ("shared_experts", "gate"):
            if isinstance(more.get(key), Module):
                object.__setattr__(self, f"_{key}", None)  # they belong to the enclosing block


class _Group:
    """A process group of one rank."""

    world_size, rank_in_group, is_first_rank, is_last_rank = 1, 0, True, True

    def __getattr__(self, name: str) -> Any:
        return Unknown(name)


def make_layers(count: int, make: Callable[..., Module], prefix: str = "", **_: Any) -> tuple[int, int, ModuleList]:
    return 0, count, ModuleList([make(prefix=f"{prefix}.{i}") for i in range(count)])


def layer_index(prefix: str, *_: Any) -> int:
    return next((int(part) for part in prefix.split(".") if part.isdigit()), 0)


def _one(*_: Any, **__: Any) -> int:
    return 1


def _zero(*_: Any, **__: Any) -> int:
    return 0


NAMES: dict[str, Any] = {
    "WeightsMapper": Unknown("WeightsMapper"),
    "ColumnParallelLinear": RowLinear, "RowParallelLinear": RowLinear, "ReplicatedLinear": RowLinear,
    "GateLinear": GateLinear, "MergedColumnParallelLinear": PackedLinear, "QKVParallelLinear": QKVLinear,
    "MergedReplicatedLinear": PackedLinear, "VocabParallelEmbedding": VocabEmbedding, "ParallelLMHead": LMHead,
    "RMSNorm": Norm, "GemmaRMSNorm": Norm, "FusedMoE": RoutedExperts, "FusedMoEFactory": RoutedExperts,
    "MinimaxM3QKVParallelLinearWithIndexer": QKVWithIndexer, "SharedFusedMoE": RoutedExperts,
    "PPMissingLayer": Module, "make_layers": make_layers, "extract_layer_index": layer_index,
    "maybe_prefix": lambda prefix, name: f"{prefix}.{name}" if prefix else name,
    "get_tensor_model_parallel_world_size": _one, "get_tensor_model_parallel_rank": _zero,
    "get_pp_group": _Group, "get_ep_group": _Group, "get_tp_group": _Group, "get_dp_group": _Group,
    "divide": lambda a, b: a // b, "cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b,
}  # fmt: skip
