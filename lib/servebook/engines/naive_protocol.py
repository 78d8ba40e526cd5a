"""The OpenAI completions API of the naive server: requests checked, tokens turned into answers.

Unsupported features (several choices, stop strings, logprobs …) are refused with status 400.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

# Request keys that would change the output, with the values that have no effect
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "echo": (None, False), "logprobs": (None, False), "stop": (None, []),
    "stop_token_ids": (None, []), "suffix": (None, ""), "logit_bias": (None, {}), "min_tokens": (None, 0),
    "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "repetition_penalty": (None, 1),
}  # fmt: skip


class BadRequest(Exception):
    """A request that is answered with status 400."""


@dataclass(frozen=True)
class Served:
    """What requests are validated against. facts: the worker's, with max_model_len (tokens), vocab and eos (ids).
    tokenizer: of the tokenizers library, None if only token ids are accepted."""

    name: str
    facts: dict[str, Any]
    tokenizer: Any


class Job:
    """One validated request: prompt (token ids), max_tokens, eos (ids that end it), stream, usage. Raises
    BadRequest."""

    def __init__(self, body: Any, served: Served) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        if body.get("model", served.name) != served.name:
            raise BadRequest(f"the model {body['model']!r} does not exist; this server has {served.name!r}")
        for key, harmless in UNSUPPORTED.items():
            if body.get(key) not in harmless:
                raise BadRequest(f"{key} is not supported by the naive server")
        self.prompt = _prompt_ids(body.get("prompt"), served)
        self.max_tokens = body.get("max_tokens", 16)
        if not _is_count(self.max_tokens):
            raise BadRequest("max_tokens must be a whole number of at least 1")
        context = served.facts["max_model_len"]
        if len(self.prompt) + self.max_tokens > context:
            raise BadRequest(
                f"the prompt has {len(self.prompt)} tokens and {self.max_tokens} output tokens are asked for, "
                f"together more than the context of {context} tokens"
            )
        self.eos: list[int] = [] if body.get("ignore_eos", False) else served.facts["eos"]
        self.stream = bool(body.get("stream", False))
        self.usage = bool((body.get("stream_options") or {}).get("include_usage", False))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _prompt_ids(prompt: Any, served: Served) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if served.tokenizer is None:
            raise BadRequest("the model has no tokenizer here: send token ids")
        prompt = served.tokenizer.encode(prompt).ids
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int for t in prompt):
        raise BadRequest("prompt must be one text or one list of token ids, and not empty")
    if not 0 <= min(prompt) <= max(prompt) < served.facts["vocab"]:
        raise BadRequest(f"token ids must be within 0 and {served.facts['vocab'] - 1}")
    return prompt


class Detokenizer:
    """Token ids to text, incrementally: '' while bytes of a character are missing, or without a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = self._new()

    def _new(self) -> Any:
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """The text that a token adds."""
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # random ids can form text that the stream's prefix check rejects: continue from here
            self._stream = self._new()
            return ""


def load_tokenizer(path: str, revision: str | None) -> Any:
    """The model's tokenizer.json, None if it has none; then only token ids are accepted."""
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


class Completion:
    """Turns a job's tokens into an OpenAI-style answer, whole or streamed."""

    def __init__(self, job: Job, served: Served) -> None:
        self.job, self.served = job, served
        self.detokenizer = Detokenizer(served.tokenizer)
        self.id = f"cmpl-{uuid.uuid4().hex[:16]}"
        self.created = int(time.time())
        self.count = 0
        self.finish: str | None = None

    def take(self, token: int) -> str:
        """The text that a token adds; sets `finish` with the last token."""
        self.count += 1
        if token in self.job.eos:
            self.finish = "stop"
            return ""
        if self.count == self.job.max_tokens:
            self.finish = "length"
        return self.detokenizer.step(token)

    def usage(self) -> dict[str, int]:
        """Token counts under the names of OpenAI's API."""
        prompt = len(self.job.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self.count, "total_tokens": prompt + self.count}

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The JSON object of an answer or event around its choices."""
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.served.name}
        return {**head, "choices": choices, **more}

    def choice(self, text: str) -> dict[str, Any]:
        """The single choice, with the finish reason once known."""
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": self.finish}

    async def whole(self, _: web.Request, tokens: AsyncGenerator[int]) -> web.StreamResponse:
        """The answer as one JSON object; status 500 if the model fails."""
        texts = []
        try:
            async with contextlib.aclosing(tokens) as made:
                async for token in made:
                    texts.append(self.take(token))
        except Exception as error:
            return refusal(500, _what(error))
        return web.json_response(self.body([self.choice("".join(texts))], usage=self.usage()))

    async def stream(self, request: web.Request, tokens: AsyncGenerator[int]) -> web.StreamResponse:
        """One event per token, written as soon as it is generated; a later failure of the model is reported in an
        event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # everything in an event except text and finish reason is constant: format it once
        head, tail = json.dumps(self.body([])).split("[]")
        async with contextlib.aclosing(tokens) as made:
            try:
                async for token in made:
                    if not response.prepared:
                        await response.prepare(request)
                    event = f"data: {head}[{json.dumps(self.choice(self.take(token)))}]{tail}\n\n"
                    await response.write(event.encode())
            except ConnectionError:  # the client disconnected
                return response
            except Exception as error:
                if not response.prepared:
                    return refusal(500, _what(error))
                await response.write(f"data: {json.dumps(_error_body(500, _what(error)))}\n\n".encode())
                return response
        if self.job.usage:
            await response.write(f"data: {json.dumps(self.body([], usage=self.usage()))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _what(error: Exception) -> str:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return f"the model failed: {type(error).__name__}: {str(error)[:300]}"


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def refusal(status: int, message: str) -> web.Response:
    """An error in the format of OpenAI's API."""
    return web.json_response(_error_body(status, message), status=status)
