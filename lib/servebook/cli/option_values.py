"""Values of command-line options: text to a checked value, or argparse's one-line error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from ..config import lengths

MOST_IDS = 1 << 20  # four times the largest vocabulary in use (Gemma's 262,144)
MOST_PER_S, LEAST_SHAPE = 10_000, 0.01  # as in parameter files (param_types.Rate, sweeps.ArrivalRateSweep)

N = TypeVar("N", int, float)


def _number(text: str, kind: type[N], what: str, fits: Callable[[float], bool]) -> N:
    try:
        if not text.isascii() or "_" in text:  # Python accepts other digits and 1_000; other programs do not
            raise ValueError
        value: N = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}") from None
    if not (abs(value) < math.inf and fits(value)):  # math.isfinite raises for an int of 400 digits
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return value


def text(text: str) -> str:
    """An option's text, which must be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8") from None
    return text


def positive_count(text: str) -> int:
    """A whole number above 0."""
    return _number(text, int, "positive whole number", lambda v: v > 0)


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _number(text, int, "whole number from 0 on", lambda v: v >= 0)


def seed(text: str) -> int:
    """A whole number that fits 63 bits."""
    return _number(text, int, "whole number from 0 on, below 2^63", lambda v: 0 <= v < 2**63)


def shape(text: str) -> float:
    """The shape of a gamma distribution."""
    return _number(text, float, f"positive number from {LEAST_SHAPE} on", lambda v: v >= LEAST_SHAPE)


def positive(text: str) -> float:
    """A number above 0."""
    return _number(text, float, "positive number", lambda v: v > 0)


def not_negative(text: str) -> float:
    """A number from 0 on."""
    return _number(text, float, "number from 0 on", lambda v: v >= 0)


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    return _number(text, float, "share above 0 and up to 1", lambda v: 0 < v <= 1)


def prefix(text: str) -> float:
    """A number of tokens, or as N% a share below 1 of the mean prompt length."""
    if text.endswith("%"):
        return _number(text[:-1], float, "percentage below 100", lambda v: 0 <= v < 100) / 100
    return count(text)


def length(text: str) -> lengths.Length:
    """A length distribution, in the syntax of config.lengths."""
    try:
        return lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; valid: {lengths.SYNTAX}") from None


def counts(text: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    return [positive_count(part) for part in text.split(",")]


def rates(text: str) -> list[float]:
    """Requests per second, separated by commas."""
    what = f"positive number up to {MOST_PER_S}"
    return [_number(part, float, what, lambda v: 0 < v <= MOST_PER_S) for part in text.split(",")]


def id_range(text: str) -> list[range]:
    """A range of token ids, LOW:HIGH, as a list of one range."""
    low, _, high = text.partition(":")
    what = f"range such as 256:8000, up to {MOST_IDS}"
    digits = text.isascii() and low.isdigit() and high.isdigit() and len(text) < 20
    if not (digits and int(low) < int(high) <= MOST_IDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return [range(int(low), int(high))]
