"""Prompts as random token ids, encoded to request bodies by table look-up: no tokenizer, no JSON encoder.

A prompt is a function of (seed, labels, index) alone, so a run can be repeated to the token, and two points never
share a prompt because their labels differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np


def usable_ids(vocab: range | Sequence[int]) -> np.ndarray:
    """Token ids that prompts may draw from, as an int64 array (special ids are the caller's to leave out)."""
    ids = np.arange(vocab.start, vocab.stop, vocab.step) if isinstance(vocab, range) else np.asarray(vocab, np.int64)
    if not len(ids):
        raise ValueError("no usable token ids")
    return ids


def seed_of(*labels: object) -> list[int]:
    """128 bits out of any labels, stable between processes (unlike hash())."""
    digest = hashlib.sha256("\x1f".join(map(str, labels)).encode()).digest()
    return np.frombuffer(digest[:16], np.uint32).tolist()


class Prompts:
    """Request number i's prompt of one point: `ids(i)` or `encoded(i)`, fixed length, independent between requests.

    shared_tokens: so many leading tokens are the same in every prompt of the set (a shared prefix).
    """

    def __init__(self, vocab: range | Sequence[int], length: int, *labels: object, shared_tokens: int = 0) -> None:
        self.vocab, self.length, self.shared = usable_ids(vocab), length, min(shared_tokens, length)
        self._seed = seed_of(*labels)
        # each id as fixed-width text with its comma: a gather of table rows is then the JSON array's inside
        width = len(str(int(self.vocab.max()))) + 1
        self._table = np.array([f"{i},".rjust(width) for i in self.vocab.tolist()], f"S{width}")
        self._prefix = np.random.default_rng([*self._seed, 0]).integers(0, len(self.vocab), self.shared)

    def _rows(self, index: int) -> np.ndarray:
        own = np.random.default_rng([*self._seed, 1, index]).integers(0, len(self.vocab), self.length - self.shared)
        return np.concatenate([self._prefix, own]) if self.shared else own

    def ids(self, index: int) -> list[int]:
        return self.vocab[self._rows(index)].tolist()

    def encoded(self, index: int) -> bytes:
        """The prompt as a JSON array of integers."""
        return b"[" + self._table[self._rows(index)].tobytes()[:-1] + b"]"


class Bodies:
    """Request bodies: the constant part encoded once, the prompt spliced in."""

    def __init__(self, prompts: Prompts, payload: dict[str, Any]) -> None:
        self.prompts = prompts
        self._tail = b"," + json.dumps(payload, separators=(",", ":")).encode()[1:]

    def __call__(self, index: int) -> bytes:
        return b'{"prompt":' + self.prompts.encoded(index) + self._tail
