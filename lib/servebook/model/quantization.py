"""How a matrix is stored: bits, scales and zero points as a format's library writes them, and what it multiplies in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored. group: inputs that share a scale; 0: one scale an output row, -1: one for the matrix.
    block: rows and columns that share one. multiplies: fp4, fp8, int8, or None for the run's dtype."""

    bits: int
    group: int = -1
    block: tuple[int, int] | None = None
    scale_bytes: float = 2
    zeros: bool = False
    index: bool = False  # an int32 an input: the group that it belongs to
    extra_bytes: int = 0  # a matrix: global scales, shapes
    words: bool = False  # packed into int32, as many whole elements a word as fit
    multiplies: str | None = None

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix of `rows` outputs and `columns` inputs, everything beside it included."""
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


Chooser = Callable[[str, str], "Scheme | None"]  # (module's name, its role) -> how it is stored, None: as it is


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint, or the engine as it loads one, does to its matrices. kv: bytes of an element of the KV cache,
    None: the run's dtype."""

    method: str
    choose: Chooser
    kv_bytes: float | None = None
    weight_bits: int = 16


def none() -> Quantization:
    return Quantization("none", lambda name, role: None)


def online(asked: str) -> Quantization:
    """What the engine makes of unquantized weights when it loads them: fp8 and int8 with weights and activations in 8
    bits, int4 weights alone."""
    scheme = {
        "fp8": Scheme(8, -1, scale_bytes=4, multiplies="fp8"),
        "int8": Scheme(8, 0, scale_bytes=4, multiplies="int8"),
        "int4": Scheme(4, 128),
    }[asked]
    return Quantization(asked, lambda name, role: None if role == "head" else scheme, None, scheme.bits)
