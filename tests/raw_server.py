"""A server whose every byte a test writes: a handler is called for each request and may do anything to the socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request, and the writer of its connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    connection: int  # which one, from 0
    nth: int  # request of its connection, from 0

    @property
    def tokens(self) -> int:
        return int(self.body.get("max_tokens", 16))

    @property
    def probe(self) -> bool:
        return self.tokens == 2

    def head(self, status: str = "200 OK", kind: str = "text/event-stream", *lines: str, chunked: bool = True) -> None:
        more = ["Transfer-Encoding: chunked"] if chunked else []
        self.writer.write("\r\n".join([f"HTTP/1.1 {status}", f"Content-Type: {kind}", *more, *lines, "", ""]).encode())

    def put(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def whole(self, status: str, body: Any, *lines: str, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.head(status, kind, f"Content-Length: {len(data)}", *lines, chunked=False)
        self.writer.write(data)

    async def stream(self, *, ttft_s: float = 0.005, itl_s: float = 0.002, usage: bool = True) -> None:
        """The ordinary answer."""
        self.head()
        await asyncio.sleep(ttft_s)
        for i in range(self.tokens):
            self.put(event(i, last=i == self.tokens - 1))
            await self.writer.drain()
            await asyncio.sleep(itl_s)
        prompt = self.body.get("prompt")
        told = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 7, "completion_tokens": self.tokens}
        self.put((sse({"choices": [], "usage": told}) if usage else b"") + b"data: [DONE]\n\n")
        self.end()


def sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def event(i: int, *, last: bool = False) -> bytes:
    return sse({"choices": [{"index": 0, "text": f" t{i}", "finish_reason": "length" if last else None}]})


Handler = Callable[[Exchange], Awaitable[bool | None]]  # False: close the connection


@dataclass
class RawServer:
    """post answers POSTs; get answers a GET that it knows by True. What was asked is in `asked`."""

    post: Handler
    models: Any = field(default_factory=lambda: [{"id": "m"}])
    get: Handler | None = None
    metrics: bytes | None = None
    asked: list[Exchange] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, method: str, path: str = "") -> int:
        return sum(x.method == method and x.path.startswith(path) for x in self.asked)

    @property
    def measured(self) -> int:
        return sum(x.method == "POST" and not x.probe for x in self.asked)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, nth, goes_on = self._connections, 0, True
        self._connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while goes_on:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                x = Exchange(method, path, headers, json.loads(body) if body else {}, writer, connection, nth)
                self.asked.append(x)
                goes_on, nth = await self._answer(x), nth + 1
                await writer.drain()
        writer.close()

    async def _answer(self, x: Exchange) -> bool:
        if x.method == "POST":
            return await self.post(x) is not False
        if self.get is not None and await self.get(x):
            return True
        if x.path.endswith("/models"):
            x.whole("200 OK", {"object": "list", "data": self.models})
        elif x.path == "/metrics" and self.metrics is not None:
            x.whole("200 OK", self.metrics, kind="text/plain")
        else:
            x.whole("404 Not Found", {"detail": "Not Found"})
        return True

    @contextlib.contextmanager
    def running(self) -> Iterator[RawServer]:
        loop, started, self._connections = asyncio.new_event_loop(), threading.Event(), 0

        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()

        def work() -> None:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(main())
            loop.run_forever()

        def stop() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_later(0.02, loop.stop)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        started.wait(5)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop)
            thread.join(5)
