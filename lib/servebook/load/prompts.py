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


Length = int | tuple[int, int]  # fixed, or uniform between two lengths, both included


class Prompts:
    """Request number i's prompt of one point: `ids(i)` or `encoded(i)`, independent between requests.

    shared_tokens: so many leading tokens are the same in every prompt of the set (a shared prefix).
    text: words instead of token ids, for servers that take no ids; a word is a token or two, usage tells.
    """

    def __init__(
        self,
        vocab: range | Sequence[int],
        length: Length,
        *labels: object,
        shared_tokens: int = 0,
        text: bool = False,
    ) -> None:
        self.vocab, self.length, self.text = usable_ids(vocab), length, text
        self._seed = seed_of(*labels)
        words = [_word(i) if text else f"{i}," for i in self.vocab.tolist()]
        # each id as fixed-width text with its comma: a gather of table rows is then the JSON array's inside
        width = max(map(len, words))
        self._table = np.array([w.rjust(width) for w in words], f"S{width}")
        self._prefix = np.random.default_rng([*self._seed, 0]).integers(0, len(self.vocab), shared_tokens)

    def length_of(self, index: int) -> int:
        return length_at(self.length, [*self._seed, 2, index])

    def _rows(self, index: int) -> np.ndarray:
        length, shared = self.length_of(index), self._prefix
        own = np.random.default_rng([*self._seed, 1, index]).integers(0, len(self.vocab), max(0, length - len(shared)))
        return np.concatenate([shared[:length], own]) if len(shared) else own

    def ids(self, index: int) -> list[int]:
        return self.vocab[self._rows(index)].tolist()

    def encoded(self, index: int) -> bytes:
        """The prompt as JSON: an array of integers, or a string."""
        inside = self._table[self._rows(index)].tobytes()
        return b'"' + inside + b'"' if self.text else b"[" + inside[:-1] + b"]"


class Bodies:
    """Request bodies: the constant part encoded once, prompt and length spliced in. chat: as messages."""

    def __init__(self, prompts: Prompts, payload: dict[str, Any], output_tokens: Length, *, chat: bool = False) -> None:
        self.prompts, self.output_tokens = prompts, output_tokens
        before, after = (b'"messages":[{"role":"user","content":', b"}]") if chat else (b'"prompt":', b"")
        self._head = b"{" + before
        self._tail = after + b"," + json.dumps(payload, separators=(",", ":")).encode()[1:-1] + b',"max_tokens":%d}'

    def asked(self, index: int) -> tuple[int, int]:
        """Prompt tokens (0: not known beforehand) and output tokens of a request."""
        output = length_at(self.output_tokens, [*seed_of("output"), index])
        return 0 if self.prompts.text else self.prompts.length_of(index), output

    def __call__(self, index: int) -> bytes:
        return self._head + self.prompts.encoded(index) + self._tail % self.asked(index)[1]


def length_at(length: Length, seed: list[int]) -> int:
    """A request's length: the fixed one, or its draw from the range."""
    if isinstance(length, int):
        return length
    return int(np.random.default_rng(seed).integers(length[0], length[1] + 1))


def _word(number: int) -> str:
    letters = ""
    while number or len(letters) < 2:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
    return f" {letters}"
