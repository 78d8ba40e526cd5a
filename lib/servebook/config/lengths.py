"""Prompt and output lengths: a constant, a range, a normal or log-normal distribution, or a list from a file.

A request's length is a function of (distribution, seed, index) alone, so a run can be repeated token for token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..common import files
from ..common.errors import ServebookError

SYNTAX = "512, 100:1000 (uniform), normal:512,128 or lognormal:512,256 (mean, sd; with bounds: normal:512,128,LOW,HIGH)"


UNBOUNDED = 1 << 20  # the upper bound of a distribution without one


@dataclass(frozen=True)
class Spread:
    """A normal or log-normal distribution with this mean and standard deviation in tokens, redrawn until the length
    lies in [low, high]. Tight bounds therefore shift the mean."""

    law: Literal["normal", "lognormal"]
    mean: float
    sd: float
    low: int = 1
    high: int = UNBOUNDED

    def draw(self, rng: np.random.Generator) -> int:
        """One length in tokens."""
        for _ in range(1000):
            value = self._value(rng.normal())
            if self.low <= round(value) <= self.high:
                return round(value)
        return min(max(round(self.mean), self.low), self.high)  # bounds far from the distribution

    def _value(self, deviations: float) -> float:
        """The length that lies this many standard deviations from the median."""
        if self.law == "normal":
            return self.mean + self.sd * deviations
        variance = math.log1p((self.sd / self.mean) ** 2)
        return math.exp(min(700.0, math.log(self.mean) - variance / 2 + math.sqrt(variance) * deviations))

    def quantile(self, deviations: float) -> int:
        """The rounded and bounded length, as _value."""
        return max(self.low, round(self._value(deviations)))


@dataclass(frozen=True)
class Listed:
    """Lengths in this order; the list repeats when it is used up."""

    values: tuple[int, ...]


Length = (
    int | tuple[int, int] | Spread | Listed
)  # a constant; uniform over a range, both ends included; a distribution; a list


def length_at(length: Length, seed: list[int], index: int) -> int:
    """The length of request number `index`."""
    if isinstance(length, int):
        return length
    if isinstance(length, Listed):
        return length.values[index % len(length.values)]
    rng = np.random.default_rng([*seed, index])
    return length.draw(rng) if isinstance(length, Spread) else int(rng.integers(length[0], length[1] + 1))


def typical(length: Length) -> int:
    """The mean length, for a point's name and table."""
    if isinstance(length, int):
        return length
    if isinstance(length, Spread):
        return round(length.mean)
    return round(float(np.mean(length.values if isinstance(length, Listed) else length)))


def parse(text: str) -> Length:
    """A length as typed. Raises ValueError if it is none; SYNTAX is what is valid."""
    law, _, rest = text.partition(":")
    try:
        if law in ("normal", "lognormal"):
            mean, sd, *bounds = (float(part) for part in rest.split(","))
            low, high = (int(bounds[0]), int(bounds[1])) if bounds else (1, UNBOUNDED)
            if len(bounds) in (0, 2) and 0 < mean < math.inf and 0 <= sd < math.inf and 0 < low <= high:
                return Spread("normal" if law == "normal" else "lognormal", mean, sd, low, high)
        else:
            low, high = int(law), int(rest or law)
            if 0 < low <= high:
                return low if low == high else (low, high)
    except (ValueError, IndexError, OverflowError):  # of int(inf)
        pass
    raise ValueError(f"{text!r} is not a length")


def read_csv(path: Path) -> tuple[Listed, Listed]:
    """Prompt and output lengths, one request per line, from a CSV file with the columns prompt_tokens and
    output_tokens.

    Raises ServebookError for an unreadable file, a missing column, or a value that is not a positive integer.
    """
    columns = "prompt_tokens", "output_tokens"
    found: dict[str, list[int]] = {column: [] for column in columns}
    for where, row in files.read_csv(path, columns):
        for column in columns:
            try:
                count = int(row[column])
            except ValueError:
                count = 0
            if count < 1:
                raise ServebookError(f"{column} is {row[column]!r}", where, "Write a whole number of at least 1")
            found[column].append(count)
    if not found["prompt_tokens"]:
        raise ServebookError(
            "contains no lengths", str(path), "Write one request per line under prompt_tokens,output_tokens"
        )
    return Listed(tuple(found["prompt_tokens"])), Listed(tuple(found["output_tokens"]))


def mean(length: Length, draws: int = 4096) -> float:
    """The mean length; for a bounded distribution, the mean of this many draws."""
    if isinstance(length, Spread):
        return float(np.mean([length_at(length, [0], i) for i in range(draws)]))
    return float(length) if isinstance(length, int) else float(np.mean(_values(length)))


def shortest(length: Length) -> int:
    """The fewest tokens that a request can have."""
    return length.low if isinstance(length, Spread) else min(_values(length))


def longest(length: Length) -> int:
    """The most tokens that a request can have; for a distribution without upper bound, the length that 1 in 10,000
    exceeds."""
    if isinstance(length, Spread):
        return length.high if length.high < UNBOUNDED else length.quantile(3.72)
    return max(_values(length))


def _values(length: int | tuple[int, int] | Listed) -> tuple[int, ...]:
    if isinstance(length, int):
        return (length,)
    return length.values if isinstance(length, Listed) else length
