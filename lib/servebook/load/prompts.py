"""Prompts as random token ids, encoded to request bodies by table look-up: no tokenizer, no JSON encoder.

A prompt is a function of (seed, labels, index) alone, so a run can be repeated token for token, and points never share
prompts because their labels differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.arrivals import seed_of
from ..config.lengths import Length
from ..config.request_plan import Planned, RequestPlan
from ..config.workloads import Workload
from .stream import TokenStream

KEPT_STREAMS = 4096


def usable_ids(vocab: range | Sequence[int]) -> np.ndarray:
    """Token ids for prompts, as an int64 array (the caller leaves special ids out)."""
    ids = np.arange(vocab.start, vocab.stop, vocab.step) if isinstance(vocab, range) else np.asarray(vocab, np.int64)
    if not len(ids):
        raise ValueError("no usable token ids")
    return ids


class Prompts:
    """The prompts of one point by request number: `ids(i)` or `inside(i)`, independent except for what the plan shares.

    plan: the requests, or one length for all prompts. text: words instead of token ids, for servers that take no ids; a
    word is one or two tokens, usage gives the count.
    """

    def __init__(
        self,
        vocab: range | Sequence[int],
        plan: RequestPlan | Length,
        *labels: object,
        text: bool = False,
    ) -> None:
        self.vocab, self.text = usable_ids(vocab), text
        self.plan = plan if isinstance(plan, RequestPlan) else RequestPlan(Workload.of(plan, 1), *labels)
        self._seed = bytes(np.array(seed_of(*labels), np.uint32))
        words = [_word(i) if text else f"{i}," for i in self.vocab.tolist()]
        # each id as fixed-width text with its comma: gathering table rows gives the content of the JSON array
        width = max(map(len, words))
        self._table = np.array([w.rjust(width) for w in words], f"S{width}")
        self._streams: dict[int, np.ndarray] = {}  # shared parts, as far as needed so far

    def planned(self, index: int) -> Planned:
        """The plan of request number `index`; a trace repeats when it is used up."""
        return self.plan[index % len(self.plan)]

    def follows(self, index: int) -> int | None:
        """The request that continues the conversation of `index`, None if there is none."""
        return self.plan.follows(index) if self.plan.has_conversations else None

    def _drawn(self, number: int, purpose: int, tokens: int) -> np.ndarray:
        """Rows of the table, uniform and a function of the seed and the numbers: bytes of SHAKE-128, scaled. Setting up
        one of numpy's generators for every request costs four times as much."""
        drawn = hashlib.shake_128(b"%d %d %b" % (purpose, number, self._seed)).digest(4 * tokens)
        return (np.frombuffer(drawn, "<u4") * np.uint64(len(self.vocab))) >> np.uint64(32)

    def _stream(self, number: int, tokens: int) -> np.ndarray:
        """The first tokens of a stream that several prompts share."""
        known = self._streams.get(number)
        if known is None or len(known) < tokens:
            known = self._drawn(number, 0, tokens)
            if len(self._streams) < KEPT_STREAMS:
                self._streams[number] = known
        return known[:tokens]

    def _rows(self, index: int) -> np.ndarray:
        planned = self.planned(index)
        parts = [self._stream(*part) for part in planned.shared] if planned.turn == 0 else []
        new = max(0, planned.adds - sum(map(len, parts)))
        own = self._drawn(index, 1, new)
        return np.concatenate([*parts, own]) if parts else own

    def ids(self, index: int) -> list[int]:
        """The token ids that request number `index` adds to its conversation."""
        return [int(v) for v in self.vocab[self._rows(index)]]

    def inside(self, index: int) -> bytes:
        """The same as the content of a JSON array (ids, each with its comma) or string (words)."""
        return bytes(self._table[self._rows(index)].tobytes())

    def stand_in(self, index: int, tokens: int) -> bytes:
        """Random tokens in place of an answer whose ids the server did not return."""
        return bytes(self._table[self._drawn(index, 3, tokens)].tobytes())


@dataclass(frozen=True)
class Talk:
    """A conversation so far: its messages in turn, the user's first, as JSON content, and its length in tokens."""

    messages: tuple[bytes, ...] = ()
    tokens: int = 0

    @property
    def turn(self) -> int:
        """Number of answers so far."""
        return len(self.messages) // 2


FRESH = Talk()


class Bodies:
    """Request bodies: the constant part is encoded once, prompt and length are inserted. chat: as messages."""

    def __init__(self, prompts: Prompts, payload: dict[str, Any], *, chat: bool = False) -> None:
        self.prompts, self.chat = prompts, chat
        self._tail = b"," + json.dumps(payload, separators=(",", ":")).encode()[1:-1] + b',"max_tokens":%d}'

    def asked(self, index: int, talk: Talk = FRESH) -> tuple[int, int]:
        """Prompt tokens (0: not known in advance) and output tokens of a request."""
        planned = self.prompts.planned(index)
        return 0 if self.prompts.text else talk.tokens + planned.adds, planned.output_tokens

    def __call__(self, index: int, talk: Talk = FRESH) -> bytes:
        """The body of request number `index`: its conversation so far and its own prompt."""
        messages = (*talk.messages, self.prompts.inside(index))
        if self.chat:
            roles = (b"user", b"assistant")
            turns = [b'{"role":"%b","content":"%b"}' % (roles[i % 2], text) for i, text in enumerate(messages)]
            prompt = b'{"messages":[' + b",".join(turns) + b"]"
        elif self.prompts.text:
            prompt = b'{"prompt":"' + b"".join(messages) + b'"'
        else:
            prompt = b'{"prompt":[' + b"".join(messages)[:-1] + b"]"
        return prompt + self._tail % self.asked(index)[1]

    def after(self, index: int, talk: Talk, stream: TokenStream) -> Talk:
        """The conversation after an answer: with the server's ids or text; if ids were requested and not returned, with
        random ones of the same number."""
        ids, text = stream.answer()
        tokens = stream.tokens or 0
        if self.prompts.text:
            answer = json.dumps(text).encode()[1:-1]
        elif ids and len(ids) == tokens:
            answer = b"".join(b"%d," % i for i in ids)
        else:
            answer = self.prompts.stand_in(index, tokens)
        messages = (*talk.messages, self.prompts.inside(index), answer)
        return Talk(messages, talk.tokens + self.prompts.planned(index).adds + tokens)


def _word(number: int) -> str:
    letters = ""
    while number or len(letters) < 2:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
    return f" {letters}"
