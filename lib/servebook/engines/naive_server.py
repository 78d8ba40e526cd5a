"""The naive server: one request at a time, first come first served, tokens streamed as they are generated.

python -m servebook.engines.naive_server --model DIR --port N [--dummy] [--device cpu|cuda] [--dtype bfloat16]

/v1/completions (text or token ids, streaming or not; see naive_protocol), /v1/models, /health, /metrics, /facts.
Decoding is greedy whatever the temperature.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from . import naive_model
from .naive_protocol import BadRequest, Completion, Job, Served, load_tokenizer, refusal


class Metrics:
    """Prometheus metrics, named after vLLM's with another prefix."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        seconds = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"naive:{name}", text, registry=self.registry, buckets=seconds)

        self.running = Gauge("naive:num_requests_running", "Requests that hold the lock", registry=self.registry)
        self.waiting = Gauge("naive:num_requests_waiting", "Requests that wait for the lock", registry=self.registry)
        self.prompt = Counter("naive:prompt_tokens", "Prompt tokens computed", registry=self.registry)
        self.generated = Counter("naive:generation_tokens", "Tokens generated", registry=self.registry)
        self.finished = Counter("naive:request_success", "Requests ended", ["finished_reason"], registry=self.registry)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token")
        self.queue = histogram("request_queue_time_seconds", "Arrival to the lock")
        self.prefill = histogram("request_prefill_time_seconds", "The lock to the first token")
        self.decode = histogram("request_decode_time_seconds", "First to last token")
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token")

    def text(self) -> bytes:
        """The page of /metrics."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class Worker:
    """The process that holds the model (naive_model.py): one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self.process, self.facts = process, facts
        self._ending: asyncio.Task[None] | None = None  # reads the remaining output of an abandoned request

    @classmethod
    async def start(cls, arguments: list[str]) -> Worker | None:
        """A worker that has loaded its model, None if it ended instead (its stderr says why)."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", naive_model.__name__, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
        )  # fmt: skip
        assert process.stdout is not None
        line = await process.stdout.readline()
        return cls(process, json.loads(line)) if line else None

    async def tokens(self, job: Job) -> AsyncGenerator[int]:
        """A request's tokens. Closing the iterator early ends the request after the current step, and waits for
        that."""
        assert self.process.stdout is not None
        request = {"prompt": job.prompt, "max_tokens": job.max_tokens, "eos": job.eos}
        if self._ending is not None:  # the client's cancellation may come again while it waits for that
            await asyncio.shield(self._ending)
        self._tell(json.dumps(request).encode())
        ended = False
        try:
            while (line := await self.process.stdout.readline()).rstrip().isdigit():
                yield int(line)
            ended = True
        finally:
            if not ended:  # the reader stopped, before the first token or between two
                self._tell(b"stop")
                self._ending = asyncio.ensure_future(self._until_end())
                await asyncio.shield(self._ending)
        if not line.startswith(b"end"):
            raise RuntimeError(line.decode().removeprefix("error ").strip() or "the model's process ended")

    def _tell(self, line: bytes) -> None:
        """Write a line to the process. If the process has ended, whoever reads its output notices."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(line + b"\n")

    async def _until_end(self) -> None:
        assert self.process.stdout is not None
        while (line := await self.process.stdout.readline()) and line.rstrip().isdigit():
            pass


class NaiveServer:
    """The application: a decoding worker behind one FIFO lock."""

    def __init__(self, worker: Worker, served: Served) -> None:
        self.worker, self.served, self.facts = worker, served, served.facts
        self.metrics = Metrics()
        self.lock = asyncio.Lock()  # wakes its waiters in order of arrival

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=256 * 2**20)
        app.add_routes(
            [
                web.get("/health", lambda _: _answer(web.Response())),
                web.get("/version", lambda _: _answer(web.json_response({"version": self.facts["version"]}))),
                web.get("/facts", lambda _: _answer(web.json_response(self.facts))),
                web.get("/v1/models", lambda _: _answer(web.json_response(self.models()))),
                web.get("/metrics", self.scrape),
                web.post("/v1/completions", self.complete),
            ]
        )
        return app

    def models(self) -> dict[str, Any]:
        """The content of /v1/models."""
        entry = {
            "id": self.served.name,
            "object": "model",
            "owned_by": "servebook",
            "max_model_len": self.facts["max_model_len"],
        }
        return {"object": "list", "data": [entry]}

    async def scrape(self, _: web.Request) -> web.Response:
        """/metrics."""
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """/v1/completions: status 400 for a request that is not served, 500 where the model fails."""
        arrived = time.perf_counter()
        try:
            job = Job(json.loads(await request.read()), self.served)
        except (BadRequest, ValueError, RecursionError) as error:
            what = str(error) if isinstance(error, BadRequest) else "the body is not JSON"
            return refusal(400, what)
        answer = Completion(job, self.served)
        return await (answer.stream if job.stream else answer.whole)(request, self.tokens(job, arrived))

    async def tokens(self, job: Job, arrived: float) -> AsyncGenerator[int]:
        """The job's tokens as they are generated, once the job has the lock; closing it releases the lock."""
        metrics = self.metrics
        metrics.waiting.inc()
        try:
            await self.lock.acquire()
        finally:
            metrics.waiting.dec()
        metrics.running.inc()
        started = first = last = time.perf_counter()
        count, reason = 0, "abort"
        try:
            async with contextlib.aclosing(self.worker.tokens(job)) as made:
                async for token in made:
                    last = time.perf_counter()
                    count += 1
                    metrics.generated.inc()  # counted as generated, so that the counter matches what a client has seen
                    if count == 1:
                        first = last
                        metrics.prompt.inc(len(job.prompt))
                        metrics.queue.observe(started - arrived)
                        metrics.prefill.observe(first - started)
                        metrics.ttft.observe(first - arrived)
                    yield token
            reason = "length" if count == job.max_tokens else "stop"
        finally:
            self.lock.release()
            metrics.running.dec()
            metrics.finished.labels(reason).inc()
            if count:
                metrics.decode.observe(last - first)
                metrics.e2e.observe(last - arrived)


async def _answer(response: web.Response) -> web.Response:
    return response


async def serve(options: argparse.Namespace, sock: socket.socket) -> int:
    """Load the model, then serve on a bound socket until SIGTERM or SIGINT; both cut off running requests."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    arguments = ["--model", options.model, "--device", options.device, "--dtype", options.dtype]
    arguments += ["--dummy"] * options.dummy + ["--trust-remote-code"] * options.trust_remote_code
    arguments += ["--revision", options.revision] if options.revision else []
    worker = await Worker.start(arguments)
    if worker is None:
        return 1
    if worker.facts["device"] == "cpu":
        naive_model.use_cores(decoding=False)
    name = options.served_model_name or options.model.rstrip("/").rpartition("/")[2]
    server = NaiveServer(worker, Served(name, worker.facts, load_tokenizer(options.model, options.revision)))
    # handler_cancellation: cancel the handler of a disconnected client, also while it waits for the lock
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=4096).start()
    print(f"ready on port {sock.getsockname()[1]}", flush=True)
    stopping = asyncio.ensure_future(ended.wait())
    died = asyncio.ensure_future(worker.process.wait())
    await asyncio.wait([stopping, died], return_when=asyncio.FIRST_COMPLETED)
    if not died.done():
        worker.process.terminate()
    await runner.cleanup()
    status = await died
    stopping.cancel()
    if ended.is_set():
        return 0
    print(f"RuntimeError: the model's process ended with status {status}", file=sys.stderr)
    return 1


def main(argv: list[str] | None = None) -> int:
    """The program; 1 if the port is taken, the model cannot be loaded or its process ends."""
    parser = argparse.ArgumentParser(prog="naive_server", description="A model behind one lock, one request at a time.")
    naive_model.add_arguments(parser)
    parser.add_argument("--served-model-name", help="the name that requests use (default: the last part of --model)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    try:
        sock = socket.create_server((options.host, options.port), backlog=4096)
    except OSError as error:
        print(f"OSError: cannot listen on port {options.port}: {error.strerror}", file=sys.stderr)
        return 1
    import uvloop

    return uvloop.run(serve(options, sock))


if __name__ == "__main__":
    sys.exit(main())
