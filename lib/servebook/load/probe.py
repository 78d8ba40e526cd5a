"""Finds out which requests a server accepts, with one cheap request that it answers.

A refused request costs nothing, so the richest form is tried first and a simpler one after a refusal, by a status or
inside a stream. A busy server is waited for. Any answer, whatever its quality, ends the search.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import ServebookError, ServerBusy
from .client import Client, Reply, without_secrets
from .stream import TokenStream

BUSY = (429, 503)
_NOT_ABOUT_A_FIELD = (401, 403, 404, 405)
_REDIRECTS = (301, 302, 307, 308)
_INVALID = re.compile(r"validation error|invalid (?:request|type|value)", re.IGNORECASE)
PATIENCE_S = 60.0  # seconds to wait for a busy server

# further fields, richest first. ignore_eos fixes the length; continuous usage gives the token count of the first
# event. A server that refuses a field gets requests without it.
OPTIONS: list[dict[str, Any]] = [
    {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
]


_CHECK = "Check the model's name and whether the server has this endpoint"
_REFUSED_IDS = (
    "Check the model's name and the endpoint; servebook measure sends other token ids with --vocab LOW:HIGH, and words "
    "to a server that takes only text with --text (in a run: text: true at its engine)"
)


MOST_EVENTS = 64  # of an answer of two tokens


class ShortStream(TokenStream):
    """The answer to a probe, cut off when it gets long: such a server ignores the requested length, and its tokens cost
    money."""

    __slots__ = ()

    def feed(self, data: bytes, now: float) -> None:
        """As TokenStream.feed, until there have been far more events than two tokens need."""
        super().feed(data, now)
        if self.events > MOST_EVENTS and not self.over:
            self.fault = f"the answer to a request of 2 tokens goes on after {self.events} events"
            self._end()


class Refused(ServebookError):
    """The server accepts none of the tried request forms."""


@dataclass
class Dialect:
    """What a server accepts: token ids for prompts, further fields; and the probe requests that were sent."""

    vocab: range | Sequence[int] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    answered: int = 0  # probes that the server answered, at most one
    refused: int = 0
    notes: list[str] = field(default_factory=list)


class Probe:
    """Tries forms of one request until the server answers one. patience_s: longest wait for a busy server."""

    def __init__(self, client: Client, patience_s: float, tell: Callable[[str], None] | None = None) -> None:
        self._client, self._left_s, self._tell = client, min(PATIENCE_S, patience_s), tell
        self.dialect = Dialect()

    async def accepted(self, options: Sequence[dict[str, Any]], base: dict[str, Any], fix: str) -> dict[str, Any]:
        """The richest of `options` (best first) that the server accepts in addition to `base`.

        Raises ServebookError with the server's message and this fix if it accepts none.
        """
        reply, broken = Reply(-1, 0, 0), None
        for option in options:
            reply = await self._answer({**base, **option})
            if _fails(reply):  # a single failure may be chance
                reply = await self._answer({**base, **option})
            if reply.status in _NOT_ABOUT_A_FIELD:
                break
            if _fails(reply):  # the next form shows whether this form is the cause
                broken = option if broken is None else broken
            elif _refuses(reply):
                self.dialect.refused += 1
            else:
                self.dialect.answered += 1
                return option
        if broken is not None and _fails(reply):
            return broken  # every form fails: that failure will be measured
        kind = ServebookError if reply.status in _NOT_ABOUT_A_FIELD else Refused
        raise kind(f"the server refuses the request ({reply.error})", without_secrets(self._client.endpoint), fix)

    async def _answer(self, body: dict[str, Any]) -> Reply:
        """The result of a request, once the server is not busy, after following a redirect."""
        client, wait_s, hops = self._client, 1.0, 0
        while True:
            reply = Reply(-1, 0, int(body["max_tokens"]), stream=ShortStream())
            await client.stream(json.dumps(body).encode(), reply)
            if reply.status in _REDIRECTS and reply.location and hops < 5:
                client.follow(reply.location)
                self.dialect.notes = [f"redirected: requests go to {without_secrets(client.endpoint)}"]
                hops += 1
            elif reply.status in BUSY or reply.stream.error_status in BUSY:
                asked_s = reply.retry_after_s  # a server that says 0 each time is not asked without a pause
                seconds = wait_s if asked_s is None else max(asked_s, min(1.0, (wait_s - 2) / 4))
                if seconds > self._left_s:
                    raise ServerBusy(
                        f"the server is busy ({reply.error})", without_secrets(client.endpoint),
                        "Try again later, or ask for a higher limit",
                    )  # fmt: skip
                if self._tell:
                    self._tell(f"the server is busy ({reply.error}); trying again in {seconds:g} s")
                await asyncio.sleep(seconds)
                self._left_s, wait_s = self._left_s - max(seconds, 0.1), 2 * wait_s
            else:
                return reply


def _refuses(reply: Reply) -> bool:
    """Whether the server refuses a request of this form."""
    if reply.status == 200:
        return bool(reply.stream.error) or bool(reply.stream.fault and not reply.stream.ended)
    return reply.status is not None and not _fails(reply)


def _fails(reply: Reply) -> bool:
    """Whether the server or the connection fails. llama-cpp-python refuses with status 500 and a reason."""
    return reply.status is None or (reply.status >= 500 and not _INVALID.search(reply.error or ""))


async def find_dialect(
    probe: Probe, model: str, vocabs: Sequence[range | Sequence[int]], *, text: bool, chat: bool, ids: bool
) -> Dialect:
    """The first vocabulary that the server accepts, and the further fields that it accepts.

    Done before every load, because another server may have replaced it. ids: the answer's token ids are needed to
    continue a conversation. Raises ServebookError with the server's message if it accepts nothing.
    """
    base, dialect = {"model": model, "max_tokens": 2, "stream": True}, probe.dialect
    if text:
        asked = {"messages": [{"role": "user", "content": "one two"}]} if chat else {"prompt": "one two"}
        dialect.vocab, dialect.fields = vocabs[0], await probe.accepted(OPTIONS, base | asked, _CHECK)
        return dialect
    options = [{**OPTIONS[0], "return_token_ids": True}, *OPTIONS] if ids else OPTIONS
    refused: ServebookError | None = None
    for vocab in vocabs:
        prompt = [int(v) for v in (*vocab[:3], vocab[-1])]  # use the highest id: a smaller vocabulary lacks it
        try:
            fields = await probe.accepted(options, base | {"prompt": prompt}, _REFUSED_IDS)
            dialect.vocab, dialect.fields = vocab, fields
            return dialect
        except Refused as error:
            refused = refused or error
    assert refused is not None
    raise refused


def names(fields: dict[str, Any]) -> str:
    """The further fields of a request on one line: ignore_eos, stream_options.include_usage …"""
    return ", ".join(
        f"{key}.{inner}" if isinstance(value, dict) else key
        for key, value in fields.items()
        for inner in (value if isinstance(value, dict) else [""])
    )
