"""How a quantized matrix is stored (bits, scales, zero points) and in which dtype it is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored. group: inputs that share a scale; 0: one scale per output row, -1: one per matrix.
    block: rows and columns that share a scale. zeros: whether zero points are stored. multiplies: dtype of the
    multiplication (fp4, fp8, int8), or None for the run's dtype."""

    bits: int
    group: int = -1
    block: tuple[int, int] | None = None
    scale_bytes: float = 2
    zeros: bool = False
    index: bool = False  # one int32 per input: the group that it belongs to
    extra_bytes: int = 0  # per matrix: global scales, shapes
    words: bool = False  # packed into int32 words; no element crosses a word
    multiplies: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 16:
            raise ValueError(f"{self.bits} bits a weight")
        if self.block and min(self.block) < 1:
            raise ValueError(f"blocks of {self.block[0]} × {self.block[1]} weights")

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix of `rows` outputs and `columns` inputs, with its scales, zero points and index."""
        if self.block:
            scales: float = -(-rows // self.block[0]) * -(-columns // self.block[1])
        elif self.group > 0:
            scales = rows * -(-columns // self.group)
        else:
            scales = rows if self.group == 0 else 1
        weights, zeros = rows * columns * self.bits / 8, scales * self.bits / 8
        if self.words:
            fit = 32 // self.bits
            weights, zeros = rows * -(-columns // fit) * 4, -(-rows // fit) * 4 * scales / rows
        size = weights + scales * self.scale_bytes + self.extra_bytes + (zeros if self.zeros else 0)
        return int(size + (4 * columns if self.index else 0))


Chooser = Callable[[str, str], "Scheme | None"]  # (module's name, its part) -> how it is stored; None: unquantized


@dataclass(frozen=True)
class Quantization:
    """The quantization of a checkpoint, or the one that the engine applies at load. kv_bytes: bytes per element of the
    KV cache; None: the run's dtype."""

    method: str
    choose: Chooser
    kv_bytes: float | None = None
    weight_bits: int = 16


def none() -> Quantization:
    return Quantization("none", lambda name, role: None)


def online(asked: str) -> Quantization:
    """The quantization that the engine applies to unquantized weights at load. fp8, int8: 8-bit weights and
    activations. int4: weights only."""
    scheme = {
        "fp8": Scheme(8, -1, scale_bytes=4, multiplies="fp8"),
        "int8": Scheme(8, 0, scale_bytes=4, multiplies="int8"),
        "int4": Scheme(4, 128),
    }[asked]
    return Quantization(asked, lambda name, role: None if role == "head" else scheme, None, scheme.bits)
