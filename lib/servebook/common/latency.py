"""TPOT from a request's time stamps: the one definition for the client, the simulation and stored rows."""

from __future__ import annotations

import numpy as np


def tpot_s(first_s: float, last_s: float, tokens: int, first_event_tokens: int = 1) -> float | None:
    """Time per output token: time from the first to the last token's event, divided by the tokens after the first
    event. None if there are none."""
    later = tokens - first_event_tokens
    return (last_s - first_s) / later if later > 0 else None


def tpots_s(
    first_s: np.ndarray, last_s: np.ndarray, tokens: np.ndarray, first_event_tokens: np.ndarray | int = 1
) -> np.ndarray:
    """tpot_s of many requests; NaN where tpot_s is None or a time is unknown."""
    later = np.asarray(tokens - first_event_tokens, float)
    spans = np.asarray(last_s - first_s, float)
    tpots: np.ndarray = np.divide(spans, later, out=np.full(later.shape, np.nan), where=later > 0)
    return tpots
