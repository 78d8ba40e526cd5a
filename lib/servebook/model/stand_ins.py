"""Stubs for tensors and modules that keep shapes only, with which a model's constructors are run."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar


class NotReadable(Exception):
    """The model's constructors need a value that only the real libraries can compute."""


class NotKnown(NotReadable):
    """No installed library has this model."""


class NeedsLibrary(NotReadable):
    """The model's code needs a library that is not installed."""


class NotBuildable(NotReadable):
    """The model's own code cannot build it from this config.json, so PyTorch's meta device cannot either."""


def failure(error: Exception) -> NotReadable:
    """The exception for an error that a model's own code raised. NotBuildable unless a stub may have caused it."""
    message = f"{type(error).__name__}: {error}"
    own = isinstance(error, TypeError | ValueError | LookupError | ZeroDivisionError) and "Unknown" not in message
    return NotBuildable(message) if own else NotReadable(message)


def _why(unknown: Unknown) -> str:
    return str(object.__getattribute__(unknown, "_why"))


# names of layers that have parameters: an unknown one of these is an error, since its weights would not be counted
HOLDS_WEIGHTS = re.compile(r"^[A-Z]\w*(Linear|MoE|Experts|Norm|Embedding|Conv[123]d|Mixer\d?|MLP)$")


class Unknown:
    """A value that no parameter's shape should depend on. Accepts every operation; the result is Unknown again."""

    def __init__(self, why: str = "") -> None:
        object.__setattr__(self, "_why", why)

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{_why(self)}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Unknown:
        if HOLDS_WEIGHTS.search(_why(self)):
            raise NotReadable(f"unknown layer {_why(self)}")
        if _why(self) == "timm.create_model":
            raise NeedsLibrary("its tower is a model of timm")
        return Unknown(f"{_why(self)}()")

    def __getitem__(self, key: Any) -> Unknown:
        return Unknown(f"{_why(self)}[]")

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter((Unknown(_why(self)), Unknown(_why(self))))

    def __enter__(self) -> Unknown:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Unknown({_why(self)})"

    def __or__(self, other: Any) -> Unknown:
        return self

    __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __or__
    __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __matmul__ = __or__
    __lt__ = __le__ = __gt__ = __ge__ = __or__

    def __neg__(self) -> Unknown:
        return self

    __pos__ = __abs__ = __invert__ = __neg__


def as_shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if not all(isinstance(n, int) for n in given):
        raise NotReadable(f"a tensor of shape {given}")
    return tuple(given)


class Tensor:
    """A tensor without data. Elementwise operations keep its shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.data = self

    def _same(self, *_: Any, **__: Any) -> Tensor:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _same
    __rpow__ = __neg__ = __lt__ = __gt__ = to = float = clone = contiguous = log = exp = clamp = uniform_ = _same
    fill_ = copy_ = normal_ = zero_ = bfloat16 = half = detach = requires_grad_ = masked_fill = sqrt = _same
    __le__ = __ge__ = __floordiv__ = __rfloordiv__ = __mod__ = __abs__ = __invert__ = __and__ = __or__ = _same
    expm1 = abs = ceil = floor = round = type = cpu = cuda = long = _same

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"tensor.{name}")

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        out: list[int] = []
        rest = list(self.shape)
        for k in keys:
            if k is None:
                out.append(1)
            elif isinstance(k, slice):
                out.append(len(range(*k.indices(rest.pop(0)))))
            elif isinstance(k, int):
                rest.pop(0)
            else:
                return Unknown("an index of a tensor")  # fine for a buffer; Parameter rejects it
        return Tensor((*out, *rest))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def unsqueeze(self, dim: int) -> Tensor:
        shape = list(self.shape)
        shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, 1)
        return Tensor(tuple(shape))

    def expand(self, *sizes: Any) -> Tensor:
        wanted = as_shape(sizes)
        pad = (1,) * (len(wanted) - len(self.shape)) + self.shape
        return Tensor(tuple(p if w == -1 else w for p, w in zip(pad, wanted, strict=True)))

    def repeat(self, *sizes: Any) -> Tensor:
        wanted = as_shape(sizes)
        pad = (1,) * (len(wanted) - len(self.shape)) + self.shape
        return Tensor(tuple(p * w for p, w in zip(pad, wanted, strict=True)))

    def view(self, *sizes: Any) -> Tensor:
        wanted, count = as_shape(sizes), math.prod(self.shape)
        known = math.prod(w for w in wanted if w != -1)
        return Tensor(tuple(count // known if w == -1 else w for w in wanted))

    reshape = view

    def numel(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[Any]:
        return iter(Unknown("element") for _ in range(self.shape[0] if self.shape else 0))


class Parameter(Tensor):
    def __init__(self, data: Any = None, requires_grad: bool = True) -> None:
        if not isinstance(data, Tensor):
            raise NotReadable(f"a parameter of unknown shape ({data!r})")
        super().__init__(data.shape)


class Module:
    """torch.nn.Module: its parameters and children are its attributes, in the order of assignment."""

    packed_modules_mapping: ClassVar[dict[str, Any]] = {}
    embedding_modules: ClassVar[dict[str, Any]] = {}

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def register_buffer(self, name: str, value: Any = None, persistent: bool = True) -> None:
        object.__setattr__(self, name, Unknown(name) if isinstance(value, Tensor) else value)

    def register_parameter(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def add_module(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    register_module = add_module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{type(self).__name__}.{name}")

    def to(self, *_: Any, **__: Any) -> Module:
        return self

    eval = train = cuda = cpu = half = float = bfloat16 = requires_grad_ = apply = to

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def own(self) -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def modules(self, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Module]]:
        """(name, module) of this module and all modules below it, each once."""
        seen = set() if seen is None else seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, child in self.children():
            yield from child.modules(f"{prefix}.{name}" if prefix else name, seen)

    @classmethod
    def _from_config(cls, config: Any, **_: Any) -> Module:
        return cls(config)


class PreTrainedModel(Module):
    def __init__(self, config: Any = None, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def post_init(self) -> None:
        return None


class ModuleList(Module):
    def __init__(self, modules: Any = ()) -> None:
        self._items: dict[str, Module] = {str(i): m for i, m in enumerate(modules)}

    def children(self) -> Iterator[tuple[str, Module]]:
        yield from ((k, m) for k, m in self._items.items() if isinstance(m, Module))

    def append(self, module: Module) -> ModuleList:
        self._items[str(len(self._items))] = module
        return self

    def extend(self, modules: Any) -> ModuleList:
        for m in modules:
            self.append(m)
        return self

    def add_module(self, name: str, value: Any) -> None:
        self._items[name] = value

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items.values())

    def __getitem__(self, key: Any) -> Any:
        items = list(self._items.values())
        return items[key] if isinstance(key, int | slice) else self._items[key]


class Sequential(ModuleList):
    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], dict | OrderedDict):
            self._items = dict(modules[0])
        else:
            super().__init__(modules)


class ModuleDict(ModuleList):
    def __init__(self, modules: Any = None) -> None:
        self._items = dict(modules or {})

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def keys(self) -> Any:
        return self._items.keys()

    def values(self) -> Any:
        return self._items.values()

    def items(self) -> Any:
        return self._items.items()

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def update(self, modules: Any) -> None:
        self._items.update(modules)
