"""Time of vLLM's own AWQ kernel, which repeats its work every 16 tokens.

Versions up to 0.19 at least use it instead of Marlin where `--quantization awq` is given. The server's log then says
quantization=awq, otherwise awq_marlin.

Under 256 tokens (csrc/quantization/awq/gemm_kernels.cu), a block unpacks 128 columns for 16 rows of tokens, an eighth
of the inputs in pieces of 32, one after the other: every 16 tokens all weights are unpacked again, and narrow matrices
leave SMs idle. A matrix takes inputs ÷ 256 iterations; one takes ITERATION clocks, or PER_BLOCK clocks for each of an
SM's blocks. From 256 tokens on, every step first unpacks all matrices to 16 bits in memory and multiplies these
(auto_awq.py of vLLM 0.32, awq.py before).

Both constants and UNPACKED are from an H200 (the kernels' source compiled by itself, the four matrices of a Qwen3-32B
layer, medians of 10 repeats, one run): 0.42, 0.53, 0.66, 0.78, 1.49, 2.78 ms for 16, 32, 48, 64, 128, 255 rows, and
1.88 ms to unpack. Other cards by clocks and SMs. Checked, not fitted: on an A100 an engine with this kernel
takes 195 ms longer a prefill step than with 16-bit weights (P99 TTFT at 4 to 32 clients, cssnoeasy-a100's report); 206
follow from the H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.catalog import Gpu
from ..model.shape import ModelShape

REQUESTED = "awq"  # what a server reports of its quantization where it uses this kernel
AWQ_GEMM = "awq-gemm"  # ModelShape.quantization of a model served with it
WHOLE_FROM = 256  # tokens from which all weights are unpacked first
ROWS, COLUMNS, SPLIT, PIECE = 16, 128, 8, 32  # of a block: tokens, columns; parts of the inputs; inputs an iteration
# clocks; within 11 % of the measured times, less 3 µs in which each kernel starts and ends (priors.LAYER_S has these)
ITERATION, PER_BLOCK = 3500, 375
UNPACKED = 1.0  # weights that an SM unpacks to memory in a clock
CLOCK_HZ = {"turing": 1.59e9, "volta": 1.53e9, "ampere": 1.41e9, "ada": 2.5e9, "hopper": 1.98e9}
OTHER_CLOCK_HZ = 2.4e9


@dataclass(frozen=True)
class AwqKernel:
    """The quantized matrices of one rank. matrices: (inputs, outputs) of those of a layer."""

    matrices: tuple[tuple[int, int], ...]
    layers: int
    sms: float
    clock_hz: float
    element_bytes: int

    @property
    def weights(self) -> int:
        return self.layers * sum(i * o for i, o in self.matrices)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the unpacked matrices."""
        return self.weights * self.element_bytes

    @property
    def unpack_s(self) -> float:
        """Seconds to unpack all matrices to memory."""
        return self.weights / (UNPACKED * self.sms * self.clock_hz)

    def step_s(self, tokens: float) -> float:
        """Seconds of all matrices in a step with fewer than WHOLE_FROM tokens."""
        clocks = 0.0
        for inputs, outputs in self.matrices:
            blocks = -(-tokens // ROWS) * outputs / COLUMNS * SPLIT / self.sms
            clocks += inputs / (SPLIT * PIECE) * max(ITERATION, blocks * PER_BLOCK)
        return self.layers * clocks / self.clock_hz if tokens else 0.0


def awq_kernel(shape: ModelShape, gpu: Gpu) -> AwqKernel | None:
    """The kernel's times for a rank's share of a model; None if another kernel multiplies it."""
    if shape.quantization != AWQ_GEMM:
        return None
    hidden, heads, inner = shape.hidden, shape.heads * shape.head_dim, shape.intermediate
    matrices = (
        (hidden, heads + 2 * shape.kv_heads * shape.head_dim), (heads, hidden), (hidden, 2 * inner), (inner, hidden),
    )  # fmt: skip
    # an SM of an A100 or A30, whose tensor cores are 16 times as fast as its lanes, has 64 of these
    ga100 = gpu.generation == "ampere" and gpu.fp16_tflops > 8 * (gpu.fp32_tflops or gpu.fp16_tflops)
    lanes = 64 if gpu.generation in ("turing", "volta") or ga100 else 128
    clock_hz = CLOCK_HZ.get(gpu.generation, OTHER_CLOCK_HZ)
    sms = 1e12 * (gpu.fp32_tflops or gpu.fp16_tflops / 8) / (2 * lanes * clock_hz)
    return AwqKernel(matrices, shape.layers, sms, clock_hz, shape.element_bytes)
