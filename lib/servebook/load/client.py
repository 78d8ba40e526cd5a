"""One streaming client for every OpenAI-compatible server: aiohttp, raw reads, stamped when they arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.streams import StreamReader

from ..common.errors import ServebookError
from .stream import TokenStream, error_message

now = time.monotonic  # never steps, unlike time.time
_SOON = aiohttp.ClientTimeout(total=10, sock_connect=5)


@dataclass(slots=True, eq=False)
class Reply:
    """One request and what came back. Times are `now()` seconds, None until they happen."""

    index: int
    prompt_tokens_asked: int
    output_tokens_asked: int
    scheduled: float | None = None  # when it was meant to be sent (open loop)
    sent: float | None = None
    end: float | None = None
    error: str | None = None
    status: int | None = None
    phase: str = "drain"
    turn: int = 0  # of its conversation
    stream: TokenStream = field(default_factory=TokenStream)

    @property
    def ok(self) -> bool:
        """Whether it was answered whole and without a fault."""
        return self.end is not None and self.error is None

    @property
    def begun(self) -> float | None:
        """What latency counts from: the scheduled time in an open loop, sending in a closed one."""
        return self.scheduled if self.scheduled is not None else self.sent

    @property
    def first(self) -> float | None:
        """When the first token's event came."""
        return self.stream.times[0] if self.stream.times else None

    @property
    def last(self) -> float | None:
        """When the last token's event came."""
        return self.stream.times[-1] if self.stream.times else None

    @property
    def ttft_s(self) -> float | None:
        """First token since `begun`."""
        return self.first - self.begun if self.first is not None and self.begun is not None else None

    @property
    def e2e_s(self) -> float | None:
        """Last token since `begun`."""
        return self.last - self.begun if self.last is not None and self.begun is not None else None

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - tokens in the first event); a first event that did not tell its
        count is taken to carry one token."""
        if self.first is None or self.last is None or not self.stream.tokens:
            return None
        rest = self.stream.tokens - (self.stream.first_tokens or 1)
        return (self.last - self.first) / rest if rest > 0 and len(self.stream.times) > 1 else None

    def gaps_s(self) -> list[float]:
        """Times between consecutive arrivals of token events; events of one read are one arrival."""
        t = self.stream.times
        return [b - a for a, b in pairwise(t)]


class _Poured(StreamReader):
    """A body that is handed on with the read it came in: none of the bookkeeping of one that is kept for a reader."""

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        self._buffer.append(data)
        return False

    def begin_http_chunk_receiving(self) -> None:
        pass

    def end_http_chunk_receiving(self) -> None:
        pass


class _Tapped(ResponseHandler):
    """Hands a streamed body on where the socket is read: no reader is woken for a token, which costs a quarter less,
    and hundreds of streams do not wait their turn for a time stamp."""

    arrived = 0.0
    tap: tuple[StreamReader, Callable[[bytes, float], None]] | None = None

    def data_received(self, data: bytes) -> None:
        self.arrived = now()
        super().data_received(data)
        if self.tap is not None:
            self.pour()

    def pour(self) -> None:
        """Feed what the body holds, stamped with the read that it came in."""
        if self.tap is None:
            return
        content, feed = self.tap
        parts = content._buffer
        if parts and content._exception is None:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            feed(body, self.arrived)

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp resumes after every read, through data_received, also what was never paused
        if self._reading_paused:
            super().resume_reading(resume_parser)


class Client:
    """Sends bodies to `url`'s endpoint over kept-open connections. Use as `async with`."""

    def __init__(
        self, url: str, *, endpoint: str = "/v1/completions", api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        _check_url(url)
        self.url, self.endpoint, self.timeout_s = url.rstrip("/"), endpoint_url(url, endpoint), timeout_s
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._key = api_key
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Client:
        # idle connections are dropped before a server's usual 5 s would close them under a request
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.5)
        if hasattr(connector, "_factory"):  # no public hook; without it bodies are read the ordinary way
            connector._factory = partial(_Tapped, loop=asyncio.get_running_loop())  # type: ignore[assignment]
        self.session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            auto_decompress=False,
            read_bufsize=1 << 18,
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()

    async def open_connections(self, count: int) -> None:
        """Have so many connections open before the first wave. Raises ServebookError if nothing answers there."""

        async def touch() -> None:
            async with self.session.get(f"{self.url}/health", timeout=_SOON) as r:
                await r.read()

        faults = await asyncio.gather(*(touch() for _ in range(count)), return_exceptions=True)
        if all(isinstance(f, aiohttp.ClientConnectionError) for f in faults):
            raise ServebookError(f"no server answers ({faults[0]})", self.url, _way_out(faults[0], "correct the URL"))

    async def stream(self, body: bytes, reply: Reply) -> None:
        """Send one request and fill in its reply; faults become `reply.error`, only cancellation is raised."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._exchange(body, reply)
        except TimeoutError:
            reply.error = f"timed out after {self.timeout_s:g} s"
        except aiohttp.ClientPayloadError:
            reply.error = "connection cut mid-stream"
        except aiohttp.ServerDisconnectedError:
            reply.error = "server closed the connection without an answer"
        except (aiohttp.ClientError, OSError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:300]
        # when the stream's end came: that this task was woken later is the client's doing, not the server's
        reply.end = now() if reply.error else reply.stream.heard or now()
        self._settle(reply)
        if self._key and reply.error:  # servers quote the key that they refuse; errors are stored
            reply.error = reply.error.replace(self._key, "[key]")

    async def _exchange(self, body: bytes, reply: Reply) -> None:
        feed = reply.stream.feed
        reply.sent = now()
        async with self.session.post(self.endpoint, data=body) as response:
            reply.status = response.status
            if response.status != 200:
                text = await response.content.read(65536)
                reply.error = f"HTTP {response.status}: {error_message(text)}"
                return
            content, protocol = response.content, response.connection and response.connection.protocol
            if isinstance(protocol, _Tapped) and type(content) is StreamReader:
                await self._tapped(content, protocol, feed)
            while data := await content.readany():
                feed(data, now())

    @staticmethod
    async def _tapped(content: StreamReader, protocol: _Tapped, feed: Callable[[bytes, float], None]) -> None:
        """Feed what came with the headers, then let the protocol feed until the body's end."""
        protocol.tap = tap = content, feed
        try:
            if content.exception() is None:
                content.__class__ = _Poured
                protocol.pour()
                content._size = 0
                protocol.resume_reading()  # a long first read may have paused it
                await content.wait_eof()
        finally:
            if protocol.tap is tap:
                protocol.tap = None

    def _settle(self, reply: Reply) -> None:
        stream = reply.stream
        stream.finish()
        if reply.error:
            return
        if stream.error:
            reply.error = f"error in the stream: {stream.error}"
        elif not stream.ended:
            reply.error = "stream ended without its end mark"
        elif stream.tokens is None:
            reply.error = "no usage in the stream, so its tokens are unknown"
        elif not stream.tokens or not stream.times:
            reply.error = "answered with no token"

    async def models(self) -> list[str]:
        """The server's model ids. Raises ServebookError if it does not tell any."""
        where, reason = endpoint_url(self.url, "/v1/models"), "no model in its answer"
        fix = "Start it, or name the model"
        try:
            async with self.session.get(where, timeout=_SOON) as response:
                listed = json.loads(await response.read())
            if ids := [str(m["id"]) for m in listed["data"]]:
                return ids
        except TimeoutError:
            reason = f"no answer within {_SOON.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            reason, fix = str(error) or type(error).__name__, _way_out(error, "name the model")
        except (ValueError, KeyError, TypeError):
            pass
        raise ServebookError(f"cannot ask the server for its model ({reason})", where, fix)

    async def accepted(
        self,
        options: list[dict[str, Any]],
        base: dict[str, Any],
        *,
        fix: str = "Check the model's name and whether the server has this endpoint",
    ) -> dict[str, Any]:
        """The richest of `options` (best first) that the server does not refuse, tried with a tiny request each.

        Raises ServebookError with the server's own message, and this fix, when it takes none of them.
        """
        reply = Reply(-1, 0, 0)
        for option in options:
            reply = Reply(-1, 0, 0)
            await self.stream(json.dumps({**base, **option}).encode(), reply)
            if reply.status in (401, 403, 404):
                break  # not about a field
            if reply.status not in (400, 422):
                return option
        raise ServebookError(f"the server refuses the request ({reply.error})", self.endpoint, fix)


def _way_out(fault: BaseException | None, otherwise: str) -> str:
    untrusted = isinstance(fault, aiohttp.ClientConnectorCertificateError)
    return "Name a file of certificates to trust in SSL_CERT_FILE" if untrusted else f"Start it, or {otherwise}"


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        good = False
    if not good:
        raise ServebookError("not a server's URL", url or "--url", "Give it as http://HOST:PORT")


def endpoint_url(url: str, endpoint: str) -> str:
    """URL of an endpoint; a base URL that already ends in /v1 is not given it twice."""
    base = url.rstrip("/")
    return base + endpoint.removeprefix("/v1") if base.endswith("/v1") else base + endpoint
