"""Stubs for the names that a model's code imports: torch, torch.nn and its layers, transformers' base classes."""

from __future__ import annotations

import math
from typing import Any

from .stand_ins import (
    Module,
    ModuleDict,
    ModuleList,
    NotReadable,
    Parameter,
    PreTrainedModel,
    Sequential,
    Tensor,
    Unknown,
    as_shape,
)


def _filled(shape: Any) -> Parameter:
    return Parameter(Tensor(as_shape(tuple(shape))))


class Linear(Module):
    def __init__(self, in_features: int, out_features: int, bias: Any = True, **_: Any) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = _filled((out_features, in_features))
        self.bias = _filled((out_features,)) if bias else None


class Embedding(Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, *_: Any, **__: Any) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = _filled((num_embeddings, embedding_dim))


class LayerNorm(Module):
    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: Any = True,
        *_: Any,
        **__: Any,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, list | tuple) else (normalized_shape,)
        if elementwise_affine:
            self.weight = _filled(shape)
            if bias:
                self.bias = _filled(shape)


class RMSNorm(Module):
    def __init__(self, normalized_shape: Any, eps: Any = None, elementwise_affine: bool = True, **_: Any) -> None:
        if elementwise_affine:
            shape = normalized_shape if isinstance(normalized_shape, list | tuple) else (normalized_shape,)
            self.weight = _filled(shape)


class GroupNorm(Module):
    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, **_: Any) -> None:
        if affine:
            self.weight, self.bias = _filled((num_channels,)), _filled((num_channels,))


class BatchNorm(Module):
    def __init__(self, num_features: int, *_: Any, affine: bool = True, **__: Any) -> None:
        if affine:
            self.weight, self.bias = _filled((num_features,)), _filled((num_features,))


def _conv(dims: int, transposed: bool = False) -> type[Module]:
    class Conv(Module):
        def __init__(
            self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
            *rest: Any, groups: int = 1, bias: Any = True, **_: Any,
        ) -> None:  # fmt: skip
            kernel = kernel_size if isinstance(kernel_size, list | tuple) else (kernel_size,) * dims
            rows, cols = (in_channels, out_channels) if transposed else (out_channels, in_channels)
            self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, tuple(kernel)
            self.weight = _filled((rows, cols // groups, *kernel))
            self.bias = _filled((out_channels,)) if bias else None

    Conv.__name__ = f"Conv{'Transpose' if transposed else ''}{dims}d"
    return Conv


class Conv1D(Module):
    """transformers' Conv1D (GPT-2): a linear layer with a transposed weight."""

    def __init__(self, nf: int, nx: int) -> None:
        self.weight, self.bias = _filled((nx, nf)), _filled((nf,))


class MultiheadAttention(Module):
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, **_: Any) -> None:
        self.in_proj_weight = _filled((3 * embed_dim, embed_dim))
        if bias:
            self.in_proj_bias = _filled((3 * embed_dim,))
        self.out_proj = Linear(embed_dim, embed_dim, bias)


class _Namespace:
    """torch, torch.nn or torch.nn.functional: the given names; every other name is Unknown."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper() and self is NN:
            return Module  # activations, dropouts, poolings: no parameters
        return Unknown(name)


def _new(*args: Any, **kwargs: Any) -> Any:
    if "size" in kwargs:
        args = (kwargs["size"],)
    try:
        return Tensor(as_shape(args))
    except NotReadable as e:
        return Unknown(str(e))  # fine for a buffer; Parameter rejects it


def _normal(*_: Any, size: Any = None, **__: Any) -> Any:
    return Unknown("normal") if size is None else _new(size=size)


def _linspace(start: Any, end: Any, steps: Any, *_: Any, **__: Any) -> Any:
    return _new(steps)


def _full(size: Any, *_: Any, **__: Any) -> Tensor:
    return Tensor(as_shape((size,) if isinstance(size, int) else tuple(size)))


def _arange(*args: Any, **_: Any) -> Any:
    if not all(isinstance(a, int | float) for a in args):
        return Unknown("arange")
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return Tensor((max(0, math.ceil((stop - start) / step)),))


def _tensor(value: Any, *_: Any, **__: Any) -> Tensor:
    shape = []
    while isinstance(value, list | tuple):
        shape.append(len(value))
        value = value[0] if value else 0
    return Tensor(tuple(shape))


def _like(value: Any, *_: Any, **__: Any) -> Any:
    return Tensor(value.shape) if isinstance(value, Tensor) else Unknown("like")


NN = _Namespace()
vars(NN).update(
    Module=Module, ModuleList=ModuleList, ModuleDict=ModuleDict, Sequential=Sequential, Parameter=Parameter,
    Linear=Linear, Embedding=Embedding, LayerNorm=LayerNorm, RMSNorm=RMSNorm, GroupNorm=GroupNorm,
    BatchNorm1d=BatchNorm, BatchNorm2d=BatchNorm, BatchNorm3d=BatchNorm, Conv1d=_conv(1), Conv2d=_conv(2),
    Conv3d=_conv(3), ConvTranspose1d=_conv(1, True), ConvTranspose2d=_conv(2, True),
    MultiheadAttention=MultiheadAttention, Buffer=lambda *a, **k: Unknown("buffer"), ParameterList=ModuleList,
    functional=Unknown("functional"), init=Unknown("init"), parameter=_Namespace(Parameter=Parameter),
)  # fmt: skip
TORCH = _Namespace(
    nn=NN, empty=_new, zeros=_new, ones=_new, randn=_new, rand=_new, full=_full, arange=_arange, tensor=_tensor,
    log=_like, exp=_like, sqrt=_like, zeros_like=_like, ones_like=_like, empty_like=_like, Tensor=Tensor,
    clamp=_like, abs=_like, expm1=_like, normal=_normal, linspace=_linspace, inf=math.inf, pi=math.pi,
)  # fmt: skip


class _Xielu(Module):
    """xIELU, the only activation with parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.alpha_p, self.alpha_n = _filled((1,)), _filled((1,))


class _Classes:
    """ACT2CLS: an activation's class for any key."""

    def __getitem__(self, key: Any) -> type[Module]:
        return _Xielu if key == "xielu" else Module

    def get(self, key: Any, default: Any = None) -> type[Module]:
        return self[key]

    def keys(self) -> list[str]:
        return []


class _Activations(_Classes):
    """ACT2FN: an activation module for any key."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()


_NAMED = {
    "PreTrainedModel": PreTrainedModel, "GradientCheckpointingLayer": Module, "Conv1D": Conv1D,
    "ACT2FN": _Activations(), "ACT2CLS": _Classes(), "GenerationMixin": Unknown("GenerationMixin"),
    "is_torch_available": lambda: True,
}  # fmt: skip


def stand_in(name: str) -> Any:
    """The stub for a name that a model's code imports; None if there is none."""
    return _NAMED.get(name)
