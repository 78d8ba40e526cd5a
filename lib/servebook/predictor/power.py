"""The board's power cap: prefills that never rest run into it, and their clocks fall.

Found on the H200 run of 2026-11-29 (outputs/reference): 485 of 700 W decoding one sequence, 700 to 740 W in lone
prefills, 690 W where prefills never rest, which are 7 to 8 % slower. A lone prefill may overshoot the cap; on average
over CAP_WINDOW_S no work may. Draws are shares of the cap.
"""

from __future__ import annotations

import math

# idle, and what streaming at full rate, GEMMs and attention add
IDLE_DRAW, STREAM_DRAW, GEMM_DRAW, ATTENTION_DRAW = 0.25, 0.58, 0.80, 0.62
DECODE_FROM, DECODE_FULL = 0.90, 0.97  # the same in decodes: an H200 and Llama-3.1-8B, 64 to 512 sequences
CAP_FROM, CAP_FULL, CAP_WINDOW_S = 0.93, 1.03, 0.5  # clocks begin to fall; have fallen as far as they do


def draw(read_s: float, gemm_s: float, attention_s: float, seconds: float) -> float:
    """A step's draw: of its seconds so many stream, multiply and attend (they overlap)."""
    return IDLE_DRAW + (STREAM_DRAW * read_s + GEMM_DRAW * gemm_s + ATTENTION_DRAW * attention_s) / seconds


def throttled(drawn: float, since: float = CAP_FROM, full: float = CAP_FULL) -> float:
    """0 where the cap is far, 1 where the clocks have fallen as far as they do; drawn: on average of late."""
    return min(max((drawn - since) / (full - since), 0.0), 1.0)


class Power:
    """The draw, averaged over about the last CAP_WINDOW_S seconds."""

    def __init__(self) -> None:
        self.drawn, self._at = IDLE_DRAW, 0.0

    def step(self, level: float, start: float, end: float) -> None:
        """`level` from start to end; idle before."""
        for drawn, until in ((IDLE_DRAW, start), (level, end)):
            if until > self._at:
                self.drawn = drawn + (self.drawn - drawn) * math.exp((self._at - until) / CAP_WINDOW_S)
                self._at = until
