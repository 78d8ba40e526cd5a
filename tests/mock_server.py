"""An OpenAI-style streaming server with a fixed token schedule, its own ground truth, and faults to inject.

It writes its bytes itself, so that every way of cutting a stream into writes can be made. Times are CLOCK_MONOTONIC
seconds, comparable with a client's on the same machine. Token i of a request is due at arrival + ttft_s + i * itl_s.

As a program (its own process, for benchmarks): python tests/mock_server.py --port 9100 ttft_s=0.05 itl_s=0.01
GET /truth?reset=1 is the ground truth so far, /set?ttft_s=0&itl_s=0 changes the schedule or the faults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

now = time.monotonic
Writer = asyncio.StreamWriter
_USAGE = b', "usage": {"prompt_tokens": %d, "completion_tokens": %d}}\n\n'


@dataclass
class Behaviour:
    ttft_s: float = 0.005
    itl_s: float = 0.001
    one_at_a_time: bool = False  # a FIFO lock, as the naive engine
    gauge_every: int = 1  # the gauge of running requests shows them at every n-th look only, 0 at the others
    tokens_per_event: int = 1
    first_event_tokens: int = 0  # another count for the first event
    events_per_write: int = 1
    split_bytes: int = 0  # write every event in pieces of so many bytes
    crlf: bool = False
    comments: bool = False  # a keep-alive comment before every event
    leading_events: int = 0  # events with empty text before the first token
    empty_text: bool = False  # tokens whose text is empty (incomplete UTF-8)
    empty_finish: bool = False  # a finish event that carries no token
    running_usage: bool = True  # honour continuous_usage_stats
    token_ids: bool = False
    usage: bool = True
    usage_off_by: int = 0  # usage that disagrees with the tokens sent
    prompt_off_by: int = 0
    no_tokens: bool = False
    short_by: int = 0  # so many tokens less than asked
    fail_every: int = 0  # every n-th request gets `status`
    status: int = 500
    refuse_fields: tuple[str, ...] = ()  # 400 when the body has one of them
    vocab: int = 0  # 400 for token ids from here on
    text_only: bool = False  # 400 for token ids
    cut_after: int = -1  # the connection is cut after so many tokens
    silent_close_after: int = -1  # a clean end without finish, usage or [DONE]
    error_after: int = -1  # an error object in the stream after so many tokens
    stall_after: int = -1  # nothing more after so many tokens
    hang_from: int = 0  # requests from the n-th on are never answered
    refuse_from: int = 0  # from the n-th request on the server is gone: connections are cut, new ones refused
    slow_headers_s: float = 0.0
    preemptions: int = 0  # that /metrics reports a request
    cached_share: float = 0.0  # prefix-cache hits that /metrics reports
    metrics: bool = True
    counter_off: float = 1.0  # the generation counter is off by this factor
    key: str = ""  # 401, quoting what was sent, for whatever comes without this bearer token
    echo_key: bool = False  # the answers that fail_every makes quote it too


@dataclass
class Record:
    arrived: float
    prompt: tuple[int, ...]
    sent: list[float] = field(default_factory=list)  # one per event, just before its write
    tokens: int = 0
    whole: bool = False  # all that was asked for has been sent
    ended: float = 0.0


class MockServer:
    def __init__(self, behaviour: Behaviour | None = None, *, keep_prompts: bool = True) -> None:
        self.b = behaviour or Behaviour()
        self.keep_prompts = keep_prompts
        self.port, self.chat = 0, False
        self.on_request: Callable[[dict[str, Any]], None] = lambda _: None
        self.reset()
        self._lock = asyncio.Lock()
        self._events: dict[tuple[int, bool, bool], bytes] = {}

    def reset(self) -> None:
        self.records: list[Record] = []
        self.count = self.live = self.max_live = 0
        self.area, self.since = 0.0, now()  # integral of live over time
        self.looks = 0
        self.generated = self.prompted = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096, limit=1 << 26)
        self.port, self._listening = server.sockets[0].getsockname()[1], server
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                arrived = now()
                method, target, _ = head[0].decode().split(" ")
                length = next((int(h.split(b":")[1]) for h in head if h.lower().startswith(b"content-length:")), 0)
                body = await reader.readexactly(length) if length else b""
                given = next((h[14:].strip() for h in head if h.lower().startswith(b"authorization:")), b"")
                if self.b.key and given != b"Bearer " + self.b.key.encode():
                    told = {"error": {"message": f"Incorrect API key provided: {given.decode()}"}}
                    writer.write(_answer(401, json.dumps(told).encode()))
                elif method == "GET":
                    self._get(target, writer)
                elif not await self._complete(json.loads(body), arrived, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _get(self, target: str, writer: Writer) -> None:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        if url.path == "/v1/models":
            text = json.dumps({"data": [{"id": "mock", "max_model_len": 32768}]})
        elif url.path == "/metrics" and self.b.metrics:
            text = self._metrics()
        elif url.path == "/truth":
            text = json.dumps(self.truth())
        elif url.path == "/set":
            self._events.clear()
            for key, value in query.items():
                set_field(self.b, key, value)
            text = json.dumps(dataclasses.asdict(self.b))
        else:
            text = "" if url.path == "/health" else None  # type: ignore[assignment]
        if query.pop("reset", None) or url.path == "/set":
            self.reset()
        writer.write(_answer(200 if text is not None else 404, (text or "").encode()))

    def _metrics(self) -> str:
        self.looks += 1
        values = {
            "num_requests_running": self.live if self.looks % self.b.gauge_every == 0 else 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.25,
            "prompt_tokens_total": self.prompted,
            "generation_tokens_total": self.generated * self.b.counter_off,
            "prefix_cache_queries_total": self.prompted,
            "prefix_cache_hits_total": self.prompted * self.b.cached_share,
            "num_preemptions_total": self.count * self.b.preemptions,
            "request_prefill_time_seconds_sum": 0.02 * self.count,
            "request_prefill_time_seconds_count": self.count,
            'request_prefill_time_seconds_bucket{le="1.0"}': self.count,
        }
        lines = []
        for name, value in values.items():
            labelled = name if "{" in name else name + '{engine="0",model_name="mock"}'
            lines.append(f"vllm:{labelled} {float(value)}")
        lines.append('vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 0.0')
        return "\n".join(lines) + "\n"

    async def _complete(self, request: dict[str, Any], arrived: float, writer: Writer) -> bool:
        """Answer one completion; False when the connection must not be used again."""
        b = self.b
        self.count += 1
        self.on_request(request)
        options = {**request, **(request.get("stream_options") or {})}
        refused = [name for name in b.refuse_fields if name in options]
        if refused:
            writer.write(_answer(400, json.dumps({"error": {"message": f"unknown field {refused[0]}"}}).encode()))
            return True
        ids = request["prompt"] if isinstance(request.get("prompt"), list) else []
        if ids and (b.text_only or (b.vocab and max(ids) >= b.vocab)):
            what = "prompt must be a string" if b.text_only else f"token ids must be within 0 and {b.vocab - 1}"
            writer.write(_answer(400, json.dumps({"error": {"message": what}}).encode()))
            return True
        if b.fail_every and self.count % b.fail_every == 0:
            message = "out of order" + (f" for {b.key}" if b.echo_key else "")
            writer.write(_answer(b.status, json.dumps({"error": {"message": message}}).encode()))
            return True
        if b.refuse_from and self.count >= b.refuse_from:
            self._listening.close()
            writer.transport.abort()
            return False
        if b.hang_from and self.count >= b.hang_from:
            await asyncio.sleep(3600)
        if "messages" in request:  # words stand for tokens
            request["prompt"] = " ".join(m["content"] for m in request["messages"]).split()
        record = Record(arrived, tuple(request["prompt"]) if self.keep_prompts else ())
        self.records.append(record)
        self.prompted += len(request["prompt"])
        self._live(+1)
        try:
            if b.slow_headers_s:
                await asyncio.sleep(b.slow_headers_s)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            if not b.one_at_a_time:
                return await self._stream(request, options, record, arrived, writer)
            async with self._lock:
                return await self._stream(request, options, record, now(), writer)
        finally:
            record.ended = now()
            self._live(-1)

    def _live(self, change: int) -> None:
        at = now()
        self.area, self.since = self.area + self.live * (at - self.since), at
        self.live += change
        self.max_live = max(self.max_live, self.live)

    async def _stream(
        self, request: dict[str, Any], options: dict[str, Any], record: Record, start: float, writer: Writer
    ) -> bool:
        b = self.b
        total = 0 if b.no_tokens else request.get("max_tokens", 16) - b.short_by
        running = b.running_usage and options.get("continuous_usage_stats")
        put = self._put
        self.chat = "messages" in request
        if self.chat:
            await put(writer, b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n')
        for _ in range(b.leading_events):
            await put(writer, self._event(0, None, None))
        sent, pending = 0, b""
        while sent < total:
            due = start + b.ttft_s + sent * b.itl_s
            if (wait := due - now()) > 0:
                await asyncio.sleep(wait)
            elif len(record.sent) % 8 == 7:
                await asyncio.sleep(0)
            if writer.transport.is_closing():
                return False
            count = b.first_event_tokens if not sent and b.first_event_tokens else b.tokens_per_event
            count = min(count, total - sent)
            sent += count
            last = sent == total and not b.empty_finish
            usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": sent} if running else None
            event = self._event(count, "length" if last else None, usage)
            record.sent.append(now())
            record.tokens = sent
            self.generated += count
            pending += event
            if len(record.sent) % b.events_per_write == 0 or sent == total:
                await put(writer, pending)
                pending = b""
            for limit, what in ((b.cut_after, "cut"), (b.silent_close_after, "end"), (b.error_after, "error")):
                if 0 <= limit <= sent:
                    if what == "cut":
                        writer.transport.abort()
                        return False
                    if what == "error":
                        await put(writer, b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
                        await put(writer, b"data: [DONE]\n\n")
                    writer.write(b"0\r\n\r\n")
                    return True
            if 0 <= b.stall_after <= sent:
                await asyncio.sleep(3600)
        tail = self._event(0, "length", None) if b.empty_finish else b""
        if b.usage and options.get("include_usage"):
            prompt, output = len(request["prompt"]) + b.prompt_off_by, total + b.usage_off_by
            told = {"prompt_tokens": prompt, "completion_tokens": output}
            tail += b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n"
        record.whole = True
        await put(writer, tail + b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _event(self, tokens: int, finish: str | None, usage: dict[str, int] | None) -> bytes:
        key = (tokens, finish == "length", self.chat)
        event = self._events.get(key)
        if event is None:
            text = "" if self.b.empty_text else " tok" * tokens
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
            choice |= {"delta": {"content": text}} if self.chat else {"text": text}
            if self.b.token_ids:
                choice["token_ids"] = [7] * tokens
            body = {"id": "cmpl-mock", "object": "text_completion", "model": "mock", "choices": [choice]}
            event = self._events[key] = b"data: " + json.dumps(body).encode() + b"\n\n"
        if usage:
            event = event[:-3] + _USAGE % (usage["prompt_tokens"], usage["completion_tokens"])
        return event

    async def _put(self, writer: Writer, data: bytes) -> None:
        """Each write is its own HTTP chunk."""
        b = self.b
        if b.comments:
            data = b": keep-alive\n\n" + data
        if b.crlf:
            data = data.replace(b"\n", b"\r\n")
        size = b.split_bytes or len(data)
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if b.split_bytes:
                await asyncio.sleep(0.0003)
        if writer.transport.get_write_buffer_size() > 1 << 18:
            await writer.drain()

    def truth(self) -> dict[str, Any]:
        """What really happened: latencies in seconds, arrivals, requests in flight."""
        whole = [r for r in self.records if r.ended and r.sent and r.whole]
        arrived = sorted(r.arrived for r in self.records)
        self._live(0)
        return {
            "requests": len(self.records),
            "tokens": self.generated,
            "max_live": self.max_live,
            "live_seconds": self.area,
            "ttft_s": [r.sent[0] - r.arrived for r in whole],
            "tpot_s": [(r.sent[-1] - r.sent[0]) / (r.tokens - 1) for r in whole if r.tokens > 1],
            "arrived_s": arrived,
            "ended_s": sorted(r.ended for r in whole),
            "left_s": sorted(r.ended for r in self.records if r.ended),  # the cut ones too
        }


def set_field(behaviour: Behaviour, name: str, text: str) -> None:
    old = getattr(behaviour, name)
    setattr(behaviour, name, type(old)(float(text)) if isinstance(old, int | float) else text)


def _answer(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


@contextlib.contextmanager
def serving(behaviour: Behaviour | None = None) -> Iterator[MockServer]:
    """The server in a thread of its own for the length of a `with` block."""
    server = MockServer(behaviour)
    loop = asyncio.new_event_loop()
    listening: asyncio.Server = loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def close() -> None:
        listening.close()
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("settings", nargs="*", metavar="name=value")
    options = parser.parse_args()
    behaviour = Behaviour(ttft_s=0.05, itl_s=0.01)
    for setting in options.settings:
        set_field(behaviour, *setting.split("=", 1))
    listening = await MockServer(behaviour, keep_prompts=False).start(options.port)
    await listening.serve_forever()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(_main())
    except (ImportError, KeyboardInterrupt):
        asyncio.run(_main())
