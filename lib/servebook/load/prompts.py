"""Prompts as random token ids, encoded to request bodies by table look-up: no tokenizer, no JSON encoder.

A prompt is a function of (seed, labels, index) alone, so a run can be repeated to the token, and two points never
share a prompt because their labels differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.arrivals import seed_of
from ..config.lengths import Length, length_at
from .stream import TokenStream


def usable_ids(vocab: range | Sequence[int]) -> np.ndarray:
    """Token ids that prompts may draw from, as an int64 array (special ids are the caller's to leave out)."""
    ids = np.arange(vocab.start, vocab.stop, vocab.step) if isinstance(vocab, range) else np.asarray(vocab, np.int64)
    if not len(ids):
        raise ValueError("no usable token ids")
    return ids


class Prompts:
    """Request number i's prompt of one point: `ids(i)` or `inside(i)`, independent between requests.

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
        """Tokens (words, where text is sent) of a request's own prompt."""
        return length_at(self.length, [*self._seed, 2], index)

    def _rows(self, index: int, prefix: bool = True) -> np.ndarray:
        length, shared = self.length_of(index), self._prefix if prefix else self._prefix[:0]
        own = np.random.default_rng([*self._seed, 1, index]).integers(0, len(self.vocab), max(0, length - len(shared)))
        return np.concatenate([shared[:length], own]) if len(shared) else own

    def ids(self, index: int) -> list[int]:
        """Request number `index`'s prompt as token ids."""
        return self.vocab[self._rows(index)].tolist()

    def inside(self, index: int, *, prefix: bool = True) -> bytes:
        """The prompt as the inside of a JSON array (ids, each with its comma) or string (words)."""
        return self._table[self._rows(index, prefix)].tobytes()

    def stand_in(self, index: int, tokens: int) -> bytes:
        """Random tokens in place of an answer that the server did not give the ids of."""
        rows = np.random.default_rng([*self._seed, 3, index]).integers(0, len(self.vocab), tokens)
        return self._table[rows].tobytes()


@dataclass(frozen=True)
class Talk:
    """A conversation so far: what was said by turns, the user first, as JSON insides, and its length in tokens."""

    said: tuple[bytes, ...] = ()
    tokens: int = 0

    @property
    def turn(self) -> int:
        """Answers so far."""
        return len(self.said) // 2


FRESH = Talk()


class Bodies:
    """Request bodies: the constant part encoded once, prompt and length spliced in. chat: as messages."""

    def __init__(self, prompts: Prompts, payload: dict[str, Any], output_tokens: Length, *, chat: bool = False) -> None:
        self.prompts, self.output_tokens, self.chat = prompts, output_tokens, chat
        self._seed = seed_of("output")
        self._tail = b"," + json.dumps(payload, separators=(",", ":")).encode()[1:-1] + b',"max_tokens":%d}'

    def asked(self, index: int, talk: Talk = FRESH) -> tuple[int, int]:
        """Prompt tokens (0: not known beforehand) and output tokens of a request."""
        output = length_at(self.output_tokens, self._seed, index)
        return 0 if self.prompts.text else talk.tokens + self.prompts.length_of(index), output

    def __call__(self, index: int, talk: Talk = FRESH) -> bytes:
        """The body of request number `index`: its own prompt, after what its conversation has said before."""
        said = (*talk.said, self.prompts.inside(index, prefix=not talk.said))
        if self.chat:
            roles = (b"user", b"assistant")
            messages = [b'{"role":"%b","content":"%b"}' % (roles[i % 2], part) for i, part in enumerate(said)]
            prompt = b'{"messages":[' + b",".join(messages) + b"]"
        elif self.prompts.text:
            prompt = b'{"prompt":"' + b"".join(said) + b'"'
        else:
            prompt = b'{"prompt":[' + b"".join(said)[:-1] + b"]"
        return prompt + self._tail % self.asked(index)[1]

    def after(self, index: int, talk: Talk, stream: TokenStream) -> Talk:
        """The conversation after an answer: with the server's own ids or text, where ids were asked for and not given
        with random ones of the same number."""
        ids, text = stream.answer()
        tokens = stream.tokens or 0
        if self.prompts.text:
            answer = json.dumps(text).encode()[1:-1]
        elif ids and len(ids) == tokens:
            answer = b"".join(b"%d," % i for i in ids)
        else:
            answer = self.prompts.stand_in(index, tokens)
        said = (*talk.said, self.prompts.inside(index, prefix=not talk.said), answer)
        return Talk(said, talk.tokens + self.prompts.length_of(index) + tokens)


def _word(number: int) -> str:
    letters = ""
    while number or len(letters) < 2:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
    return f" {letters}"
