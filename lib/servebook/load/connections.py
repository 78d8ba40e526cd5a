"""Connections to a server: opened in advance, read in the socket's callback, marked when reused."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.streams import StreamReader
from yarl import URL

now = time.monotonic  # never jumps, unlike time.time
IDLE_S = 2.5  # idle connections are closed before a server's usual 5 s limit closes them during a request
_ERROR_BYTES = 65536
LONGEST_PAGE = 1 << 23  # bytes; vLLM's metrics of sixteen engines are a megabyte

# whether this task's request used a connection that was already open
reused: ContextVar[bool] = ContextVar("reused", default=False)


class Poured(StreamReader):
    """A body that is passed on within the read it arrived in, without the bookkeeping of a buffered one."""

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        self._buffer.append(data)
        return False

    def begin_http_chunk_receiving(self) -> None:
        pass

    def end_http_chunk_receiving(self) -> None:
        pass


class Tapped(ResponseHandler):
    """Passes a streamed body on where the socket is read: no task is woken per token, which saves a quarter of the
    cost, and time stamps of hundreds of streams do not wait for each other."""

    arrived = 0.0
    lost = False
    tap: tuple[StreamReader, Callable[[bytes, float], None]] | None = None

    def data_received(self, data: bytes) -> None:
        self.arrived = now()
        super().data_received(data)
        if self.tap is not None:
            self.pour()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        if self.tap is not None:
            _cut_short(self.tap[0])

    def pour(self) -> None:
        """Pass on what the body contains, with the time of the read that it arrived in."""
        if self.tap is None:
            return
        content, feed = self.tap
        parts = content._buffer
        if parts and content._exception is None:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            feed(body, self.arrived)

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp resumes after every read, through data_received, even if it was never paused
        if self._reading_paused:
            super().resume_reading(resume_parser)


def _cut_short(content: StreamReader) -> None:
    """Tell the waiting reader that the body has ended: aiohttp does not if chunks could not be read."""
    if not content.is_eof() and content.exception() is None:
        content.set_exception(aiohttp.ClientPayloadError("the connection was lost"))


async def read_tapped(content: StreamReader, protocol: Tapped, feed: Callable[[bytes, float], None]) -> None:
    """Pass on what came with the headers, then let the protocol pass on the rest until the body's end."""
    protocol.tap = tap = content, feed
    if protocol.lost:
        _cut_short(content)
    try:
        if content.exception() is None:
            content.__class__ = Poured
            protocol.pour()
            content._size = 0
            protocol.resume_reading()  # a long first read may have paused it
            await content.wait_eof()
    finally:
        if protocol.tap is tap:
            protocol.tap = None


class Connector(aiohttp.TCPConnector):
    """Keeps connections open between requests; `reused`: whether a request used one of them."""

    def __init__(self, *, keep: bool = True) -> None:
        if keep:
            super().__init__(limit=0, keepalive_timeout=IDLE_S)
        else:
            super().__init__(limit=0, force_close=True)
        if hasattr(self, "_factory"):  # no public hook; without it bodies are read in the ordinary way
            self._factory = partial(Tapped, loop=asyncio.get_running_loop())  # type: ignore[assignment]

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        reused.set(getattr(protocol, "was_open", False))
        protocol.was_open = True  # type: ignore[union-attr]
        return connection

    async def open(self, url: str, count: int, timeout_s: float) -> list[BaseException]:
        """Open this many connections to a server without a request; returns the faults.

        Nothing is sent: even a harmless page may cost the server's owner a completion (LiteLLM's /health).
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s)

        async def one() -> Connection:
            request = aiohttp.ClientRequest("HEAD", URL(url), loop=asyncio.get_running_loop())
            async with asyncio.timeout(timeout_s):  # including the TLS handshake
                return await self.connect(request, [], timeout)

        opened = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
        for connection in opened:
            if isinstance(connection, Connection):
                connection.release()
        return [fault for fault in opened if isinstance(fault, BaseException)]


async def error_body(response: aiohttp.ClientResponse) -> bytes:
    """The body of an error answer: its first 64 KiB, decompressed if necessary; less if the rest does not arrive."""
    body = await _first(response, _ERROR_BYTES, 5.0)
    unpacked = _unpacked(response, body, _ERROR_BYTES)
    return f"(an answer that is compressed with {packed(response)})".encode() if unpacked is None else unpacked


async def page(response: aiohttp.ClientResponse) -> bytes:
    """A status page of the server, decompressed; empty if it is too long or cannot be decompressed. Raises
    aiohttp's exceptions."""
    body = await _first(response, LONGEST_PAGE + 1, None)
    unpacked = None if len(body) > LONGEST_PAGE else _unpacked(response, body, LONGEST_PAGE + 1)
    if len(body) > LONGEST_PAGE:
        response.close()
    return unpacked if unpacked is not None and len(unpacked) <= LONGEST_PAGE else b""


async def _first(response: aiohttp.ClientResponse, most: int, timeout_s: float | None) -> bytes:
    """The first bytes of a body; with a timeout, those that arrived within it."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while len(body) < most and (part := await response.content.readany()):
                body += part
    except (TimeoutError, aiohttp.ClientPayloadError):
        if timeout_s is None:
            raise
    return bytes(body)


def _unpacked(response: aiohttp.ClientResponse, body: bytes, most: int) -> bytes | None:
    encoding = packed(response)
    try:
        return zlib.decompressobj(47 if "gzip" in encoding else 15).decompress(body, most) if encoding else body
    except zlib.error:
        return None


def packed(response: aiohttp.ClientResponse) -> str:
    """The content encoding of an answer's body, "" if there is none."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding
