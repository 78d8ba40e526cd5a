"""The naive server: one request at a time, first come first served, tokens streamed as they are made.

    python -m servebook.engines.naive_server --model DIR --port N [--dummy] [--device cpu|cuda] [--dtype bfloat16]

/v1/completions (text or token ids, streaming or not), /v1/models, /health, /metrics, /facts. Decoding is greedy
whatever the temperature. What it does not do (several choices, stop strings, logprobs …) it refuses with status 400.
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
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from aiohttp import web

from . import naive_model

# Request keys that would change what is generated, with the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "echo": (None, False), "logprobs": (None, False), "stop": (None, []),
    "stop_token_ids": (None, []), "suffix": (None, ""), "logit_bias": (None, {}), "min_tokens": (None, 0),
    "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "repetition_penalty": (None, 1),
}  # fmt: skip


class BadRequest(Exception):
    """A request that is answered with status 400."""


class Job:
    """One checked request."""

    def __init__(self, body: Any, server: NaiveServer) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        if body.get("model", server.name) != server.name:
            raise BadRequest(f"the model {body['model']!r} does not exist; this server has {server.name!r}")
        for key, harmless in UNSUPPORTED.items():
            if body.get(key) not in harmless:
                raise BadRequest(f"{key} is not supported by the naive server")
        self.prompt = _prompt_ids(body.get("prompt"), server)
        self.max_tokens = body.get("max_tokens", 16)
        if not _is_count(self.max_tokens):
            raise BadRequest("max_tokens must be a whole number of at least 1")
        context = server.facts["max_model_len"]
        if len(self.prompt) + self.max_tokens > context:
            raise BadRequest(
                f"the prompt has {len(self.prompt)} tokens and {self.max_tokens} output tokens are asked for, "
                f"together more than the context of {context} tokens"
            )
        self.eos: list[int] = [] if body.get("ignore_eos", False) else server.facts["eos"]
        self.stream = bool(body.get("stream", False))
        self.usage = bool((body.get("stream_options") or {}).get("include_usage", False))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _prompt_ids(prompt: Any, server: NaiveServer) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if server.tokenizer is None:
            raise BadRequest("the model has no tokenizer here: send token ids")
        prompt = server.tokenizer.encode(prompt).ids
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int for t in prompt):
        raise BadRequest("prompt must be one text or one list of token ids, and not empty")
    if not 0 <= min(prompt) <= max(prompt) < server.facts["vocab"]:
        raise BadRequest(f"token ids must be within 0 and {server.facts['vocab'] - 1}")
    return prompt


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
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class Worker:
    """The process that holds the model (naive_model.py): one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self.process, self.facts = process, facts

    @classmethod
    async def start(cls, arguments: list[str]) -> Worker | None:
        """A worker that has loaded its model, None where it ended instead (it says why on stderr)."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", naive_model.__name__, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
        )  # fmt: skip
        assert process.stdout is not None
        line = await process.stdout.readline()
        return cls(process, json.loads(line)) if line else None

    async def tokens(self, job: Job) -> AsyncGenerator[int]:
        """A request's tokens. Closing it early ends the request with the step at hand, and waits for that."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"prompt": job.prompt, "max_tokens": job.max_tokens, "eos": job.eos}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        ended = False
        try:
            while (line := await self.process.stdout.readline()).rstrip().isdigit():
                yield int(line)
            ended = True
        finally:
            if not ended:  # the reader left, before the first token or between two
                self.process.stdin.write(b"stop\n")
                await asyncio.shield(self._until_end())
        if not line.startswith(b"end"):
            raise RuntimeError(line.decode().removeprefix("error ").strip() or "the model's process ended")

    async def _until_end(self) -> None:
        assert self.process.stdout is not None
        while (line := await self.process.stdout.readline()) and line.rstrip().isdigit():
            pass


class NaiveServer:
    """The application: a worker that decodes, behind one FIFO lock."""

    def __init__(self, worker: Worker, tokenizer: Any, name: str) -> None:
        self.worker, self.tokenizer, self.name = worker, tokenizer, name
        self.facts = worker.facts
        self.metrics = Metrics()
        self.lock = asyncio.Lock()  # wakes its waiters in the order they came

    def app(self) -> web.Application:
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
        entry = {
            "id": self.name,
            "object": "model",
            "owned_by": "servebook",
            "max_model_len": self.facts["max_model_len"],
        }
        return {"object": "list", "data": [entry]}

    async def scrape(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        arrived = time.perf_counter()
        try:
            job = Job(json.loads(await request.read()), self)
        except (BadRequest, ValueError, RecursionError) as error:
            what = str(error) if isinstance(error, BadRequest) else "the body is not JSON"
            return _error(400, what)
        answer = Answer(job, self)
        return await (answer.stream if job.stream else answer.whole)(request, self.tokens(job, arrived))

    async def tokens(self, job: Job, arrived: float) -> AsyncGenerator[int]:
        """The job's tokens as they are made, once the lock is its own; closing it frees the lock."""
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
                    metrics.generated.inc()  # as it is made: a client that counts what it sees must find the same
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


class Detokenizer:
    """Token ids to text as it grows: '' while bytes of a character are missing, or where there is no tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = self._new()

    def _new(self) -> Any:
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # random ids can form text that the stream's prefix check refuses: go on from here
            self._stream = self._new()
            return ""


def load_tokenizer(path: str, revision: str | None) -> Any:
    """The model's tokenizer.json, None where it has none: only token ids are taken then."""
    from tokenizers import Tokenizer

    file = Path(path) / "tokenizer.json"
    try:
        if not Path(path).is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "tokenizer.json", revision=revision))
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        print(f"no tokenizer, token ids only: {error}", file=sys.stderr)
        return None


class Answer:
    """Turns tokens into an OpenAI-style answer."""

    def __init__(self, job: Job, server: NaiveServer) -> None:
        self.job, self.server = job, server
        self.detokenizer = Detokenizer(server.tokenizer)
        self.id = f"cmpl-{uuid.uuid4().hex[:16]}"
        self.created = int(time.time())
        self.count = 0
        self.finish: str | None = None

    def take(self, token: int) -> str:
        """The text that a token adds; sets `finish` with the last one."""
        self.count += 1
        if token in self.job.eos:
            self.finish = "stop"
            return ""
        if self.count == self.job.max_tokens:
            self.finish = "length"
        return self.detokenizer.step(token)

    def usage(self) -> dict[str, int]:
        prompt = len(self.job.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self.count, "total_tokens": prompt + self.count}

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.server.name}
        return {**head, "choices": choices, **more}

    def choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": self.finish}

    async def whole(self, _: web.Request, tokens: AsyncGenerator[int]) -> web.StreamResponse:
        texts = []
        try:
            async with contextlib.aclosing(tokens) as made:
                async for token in made:
                    texts.append(self.take(token))
        except Exception as error:
            return _error(500, _what(error))
        return web.json_response(self.body([self.choice("".join(texts))], usage=self.usage()))

    async def stream(self, request: web.Request, tokens: AsyncGenerator[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # Everything of an event but its text and finish reason stays the same: format it once
        head, tail = json.dumps(self.body([])).split("[]")
        async with contextlib.aclosing(tokens) as made:
            try:
                async for token in made:
                    if not response.prepared:
                        await response.prepare(request)
                    event = f"data: {head}[{json.dumps(self.choice(self.take(token)))}]{tail}\n\n"
                    await response.write(event.encode())
            except ConnectionError:  # the client went away
                return response
            except Exception as error:
                if not response.prepared:
                    return _error(500, _what(error))
                await response.write(f"data: {json.dumps(_error_body(500, _what(error)))}\n\n".encode())
                return response
        if self.job.usage:
            await response.write(f"data: {json.dumps(self.body([], usage=self.usage()))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def _answer(response: web.Response) -> web.Response:
    return response


def _what(error: Exception) -> str:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return f"the model failed: {type(error).__name__}: {str(error)[:300]}"


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_error_body(status, message), status=status)


async def serve(options: argparse.Namespace, sock: socket.socket) -> int:
    """Load the model, then answer on a bound socket until SIGTERM or SIGINT; requests under way are cut off then."""
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
    server = NaiveServer(worker, load_tokenizer(options.model, options.revision), name)
    # handler_cancellation: a handler whose client went away is cancelled, in the queue too
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
