"""The GPU board's power cap: continuous prefill reaches it, and the clocks fall.

Found on the H200 run of 2026-11-29 (outputs/reference): 485 of 700 W when decoding one sequence, 700 to 740 W in single
prefills, and 690 W in continuous prefill, which is 7 to 8 % slower. A single prefill may exceed the cap, but not the
average over CAP_WINDOW_S. Power draws are fractions of the cap.
"""

from __future__ import annotations

import math

# power when idle, and additional power of streaming at full rate, GEMMs and attention
IDLE_DRAW, STREAM_DRAW, GEMM_DRAW, ATTENTION_DRAW = 0.25, 0.58, 0.80, 0.62
DECODE_FROM, DECODE_FULL = 0.90, 0.97  # as CAP_FROM and CAP_FULL, in decodes: H200, Llama-3.1-8B, 64 to 512 sequences
CAP_FROM, CAP_FULL, CAP_WINDOW_S = 0.93, 1.03, 0.5  # draws at which clocks begin to fall, and are at their lowest


def draw(read_s: float, gemm_s: float, attention_s: float, seconds: float) -> float:
    """Power draw of a step of `seconds`, with the seconds of reads, GEMMs and attention in it (which overlap)."""
    return IDLE_DRAW + (STREAM_DRAW * read_s + GEMM_DRAW * gemm_s + ATTENTION_DRAW * attention_s) / seconds


def throttled(drawn: float, since: float = CAP_FROM, full: float = CAP_FULL) -> float:
    """0 if clocks are not reduced, 1 if they are at their lowest. drawn: recent average draw; since, full: draws at
    which clocks begin to fall, and are at their lowest."""
    return min(max((drawn - since) / (full - since), 0.0), 1.0)


class Power:
    """The power draw, as an exponential average with time constant CAP_WINDOW_S."""

    def __init__(self) -> None:
        self.drawn, self._at = IDLE_DRAW, 0.0

    def step(self, level: float, start: float, end: float) -> None:
        """Add a step that draws `level` from start to end, and is preceded by idle time."""
        for drawn, until in ((IDLE_DRAW, start), (level, end)):
            if until > self._at:
                self.drawn = drawn + (self.drawn - drawn) * math.exp((self._at - until) / CAP_WINDOW_S)
                self._at = until
