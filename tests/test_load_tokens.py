"""Which events are tokens, in the dialect of every server that is known to differ. A row is a stream and its truth."""

from __future__ import annotations

import json
from typing import Any

import pytest
from servebook.load.stream import TokenStream
from servebook.load.tokens import Usage, count

DONE = b"data: [DONE]\n\n"


def sent(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def text(said: str | None, finish: str | None = None, **beside: Any) -> bytes:
    choice = {"index": 0, "text": said, "finish_reason": finish}
    return sent({"choices": [choice | beside.pop("choice", {})], **beside})


def chat(delta: dict[str, Any] | None, finish: str | None = None, **beside: Any) -> bytes:
    return sent({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **beside})


def used(tokens: Any, prompt: Any = 9, **more: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": tokens, **more}}


def total(tokens: Any, **more: Any) -> bytes:
    return sent({"choices": [], **used(tokens, **more)})


def hidden(tokens: int) -> dict[str, Any]:
    return {"completion_tokens_details": {"reasoning_tokens": tokens}}


SAYS = {"content": "a"}
ROLE = chat({"role": "assistant", "content": ""})

# name: reads, one a second from 0; (times of the token reads, tokens, tokens of the first event)
DIALECTS: dict[str, tuple[list[bytes], tuple[list[float], int | None, int | None]]] = {
    "vllm": ([text("a"), text("b"), text("c", "length"), total(3), DONE], ([0, 1, 2], 3, 1)),
    "vllm, running usage, two tokens in the first event": (
        [text("ab", **used(2)), text("c", **used(3)), text("", "length", **used(4)), total(4), DONE],
        ([0, 1, 2], 4, 2),
    ),
    "vllm chat: a greeting with running usage 0": (
        [chat({"role": "assistant", "content": ""}, **used(0)), chat(SAYS, **used(1)), chat(SAYS, "length", **used(2)),
         total(2), DONE],
        ([1, 2], 2, 1),
    ),
    "openai chat: a finish without text": (
        [ROLE, chat(SAYS), chat(SAYS), chat({}, "length"), total(2), DONE], ([1, 2], 2, 1)
    ),
    "litellm: usage beside an empty choice, after a finish": (
        [ROLE, chat(SAYS), chat(SAYS), chat({}, "length"), chat({}, None, **used(2)), DONE], ([1, 2], 2, 1)
    ),
    "litellm before a vllm that sends several tokens an event": (
        [ROLE, chat(SAYS, **used(2)), chat(SAYS, **used(3)), chat({}, "length", **used(3)), DONE], ([1, 2], 3, 2)
    ),
    "several tokens an event, no running usage, a finish without text": (
        [text("a b"), text("c d"), text("", "length"), total(4), DONE], ([0, 1], 4, None)
    ),
    "sglang: a role with the first running usage": (
        [chat({"role": "assistant", "content": ""}, **used(1)), chat(SAYS, **used(1)), chat(SAYS, **used(2)),
         chat({}, "length", **used(2)), total(2), DONE],
        ([1, 2], 2, 1),
    ),
    "a gateway that repeats the total in every event": (
        [chat(SAYS, **used(3)), chat(SAYS, **used(3)), chat(SAYS, "length", **used(3)), DONE], ([0, 1, 2], 3, 1)
    ),
    "a gateway whose usage is 0 until the end": (
        [chat(SAYS, **used(0)), chat(SAYS, **used(0)), chat({}, "length", **used(2)), DONE], ([0, 1], 2, 1)
    ),
    "usage that ends with zeros": ([text("a"), text("b", "length", **used(2)), total(0), DONE], ([0, 1], 2, 1)),
    "llama.cpp: an empty text with the finish": (
        [text("a"), text("b"), text("", "length"), total(2), DONE], ([0, 1], 2, 1)
    ),
    "transformers serve: no [DONE], usage beside the finish": (
        [ROLE, chat(SAYS), chat(SAYS), chat({}, "length", **used(2))], ([1, 2], 2, 1)
    ),
    "usage as the last event and no end mark": ([text("a"), text("b"), total(2)], ([0, 1], 2, 1)),
    "a last token without text": ([text("a"), text("b"), text("", "length"), total(3), DONE], ([0, 1, 2], 3, 1)),
    "a last token without text, then usage beside a choice": (
        [text("a"), text("", "length"), text("", None, **used(2)), DONE], ([0, 1], 2, 1)
    ),
    "two finishes": ([text("a"), text("b"), text("", "length"), text("", "length"), total(2), DONE], ([0, 1], 2, 1)),
    "a dozen empty events after the finish": (
        [text("a"), text("b", "length"), *[chat({})] * 12, total(2), DONE], ([0, 1], 2, 1)
    ),
    "a ping between, and a price at the end": (
        [text("a"), text("b", "length"), sent({"type": "ping"}), sent({"cost": 0.1}), total(2), DONE], ([0, 1], 2, 1)
    ),
    "first tokens without text": (
        [text("", choice={"token_ids": [1]}), text("é", "length", choice={"token_ids": [2]}), total(2), DONE],
        ([0, 1], 2, 1),
    ),
    "a null delta and a null choice list": (
        [chat(None), sent({"choices": None}), chat(SAYS), chat(SAYS, "length"), total(2), DONE], ([2, 3], 2, 1)
    ),
    "reasoning that is streamed": (
        [chat({"reasoning_content": "h"}), chat(SAYS, "stop"), total(2, **hidden(1)),
         DONE],
        ([0, 1], 2, 1),
    ),
    "reasoning that is not streamed": (
        [chat(SAYS), chat(SAYS, "stop"), total(8, **hidden(6)), DONE],
        ([0, 1], 8, 7),
    ),
    "hidden reasoning in the running usage": (
        [chat(SAYS, **used(7)), chat(SAYS, "stop", **used(8)), total(8, **hidden(6)),
         DONE],
        ([0, 1], 8, 7),
    ),
    "a byte order mark": ([b"\xef\xbb\xbf" + text("a"), text("b", "length"), total(2), DONE], ([0, 1], 2, 1)),
    "a byte order mark in a read of its own": (
        [b"\xef\xbb", b"\xbf" + text("a"), text("b", "length"), total(2), DONE], ([1, 2], 2, 1)
    ),
    "lines that end by CR alone": (
        [part.replace(b"\n", b"\r") for part in (text("a"), text("b"), text("c", "length"), total(3), DONE)],
        ([0, 1, 2], 3, 1),
    ),
    "tokens counted as 16.0": ([text("a"), text("b", "length"), total(2.0, prompt=9.0), DONE], ([0, 1], 2, 1)),
    "a text that says [DONE]": ([text("[DONE]"), text("data: [DONE]", "length"), total(2), DONE], ([0, 1], 2, 1)),
    "moonshot: usage in the choice": (
        [chat(SAYS), chat(SAYS), chat({}, "stop"), sent({"choices": [{"index": 0, "delta": {}, **used(2)}]}), DONE],
        ([0, 1], 2, 1),
    ),
    "azure: filters before the first and after the last": (
        [sent({"choices": [], "prompt_filter_results": [{}]}), ROLE, chat(SAYS), chat(SAYS),
         sent({"choices": [{"index": 0, "content_filter_offsets": {}}]}), chat({}, "length"), total(2), DONE],
        ([2, 3], 2, 1),
    ),
    "text with usage that counts none": ([text("a"), text("b", "length"), total(0), DONE], ([0, 1], None, None)),
    "events after [DONE]": ([text("a"), text("b", "length"), total(2), DONE, text("c"), total(9)], ([0, 1], 2, 1)),
    "events after [DONE] in its read": ([text("a"), text("b", "length"), total(2) + DONE + text("c")], ([0, 1], 2, 1)),
}  # fmt: skip


def read(reads: list[bytes]) -> TokenStream:
    stream = TokenStream()
    for at, data in enumerate(reads):
        stream.feed(data, float(at))
    stream.finish()
    return stream


@pytest.mark.parametrize("name", DIALECTS)
def test_events_that_are_tokens(name: str) -> None:
    reads, (times, tokens, first) = DIALECTS[name]
    s = read(reads)
    assert (s.times, s.tokens, s.first_tokens, s.ended) == (times, tokens, first, True)
    assert (s.error, s.fault) == (None, None)


@pytest.mark.parametrize("name", [n for n in DIALECTS if "CR alone" not in n])
def test_a_stream_in_one_read_or_in_splinters_has_the_same_tokens(name: str) -> None:
    reads, (times, tokens, first) = DIALECTS[name]
    whole = b"".join(reads)
    for size in (len(whole), 7):
        s = read([whole[i : i + size] for i in range(0, len(whole), size)])
        assert (s.events, s.tokens, s.first_tokens) == (len(times), tokens, first)


@pytest.mark.parametrize(("asked", "tokens"), [("one two three", 2), ("another prompt altogether", 3)])
def test_a_prompt_that_comes_back_as_the_first_event_is_no_token(asked: str, tokens: int) -> None:
    s = TokenStream()
    s.asked = json.dumps({"messages": [{"role": "user", "content": asked}]}).encode()
    reads = [chat({"role": "assistant"}), chat({"content": "user: one two three"}), chat(SAYS), chat(SAYS)]
    for at, data in enumerate([*reads, chat({}, "length", **used(2))]):
        s.feed(data, float(at))
    s.finish()
    assert s.events == tokens and (s.times[0], s.first_tokens) == ((2.0, 1) if tokens == 2 else (1.0, None))


def test_hidden_reasoning_is_told() -> None:
    assert read(DIALECTS["reasoning that is not streamed"][0]).hidden_tokens == 6
    assert read(DIALECTS["reasoning that is streamed"][0]).hidden_tokens == 0


def test_a_stream_is_over_at_done() -> None:
    over: list[bool] = []
    s = TokenStream()
    s.on_over = lambda: over.append(True)
    s.feed(text("a", "length") + total(1) + DONE, 1.0)
    s.feed(b": a comment\n\n", 9.0)
    s.finish()
    assert (over, s.over, s.last_read_s) == ([True], True, 1.0)


@pytest.mark.parametrize("tokens", ["2", [2], -1, 2.5, float("nan"), 1e12, True, {"n": 2}])
def test_usage_that_is_no_count_cannot_be_read(tokens: Any) -> None:
    s = read([text("a"), text("b", "length"), total(tokens), DONE])
    assert s.tokens is None and s.fault and s.fault.startswith("usage cannot be read")


@pytest.mark.parametrize("usage", [[1], "x", 3, True])
def test_usage_of_another_kind_cannot_be_read(usage: Any) -> None:
    s = read([text("a", "length"), sent({"choices": [], "usage": usage}), DONE])
    assert s.tokens is None and s.fault and s.fault.startswith("usage cannot be read")


@pytest.mark.parametrize(
    "event",
    [
        {"choices": {}},
        {"choices": "x"},
        {"choices": [None]},
        {"choices": [{"delta": "x", "logprobs": 3}]},
        [],
        "x",
        None,
    ],
)
def test_events_of_no_shape_are_passed_over(event: Any) -> None:
    s = read([sent(event), text("a"), sent(event), text("b", "length"), total(2), DONE])
    assert (s.tokens, s.times[0], s.times[-1]) == (2, 1.0, 3.0)


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 5}}, 5), ({"prompt_cache_hit_tokens": 5}, 5),
        ({"cached_tokens": 5}, 5), ({"prompt_tokens_details": [1]}, None), ({"prompt_tokens_details": None}, None),
    ],
)  # fmt: skip
def test_cached_tokens_under_every_name(details: dict[str, Any], cached: int | None) -> None:
    assert Usage([{"choices": [], **used(2, **details)}]).cached_tokens == cached


@pytest.mark.parametrize(
    ("body", "error", "fault", "status"),
    [
        (b'data: {"error": {"message": "no room", "code": 429}}\n\n' + DONE, "no room", None, 429),
        (b'event: error\ndata: {"message": "crashed", "code": 500}\n\n', "crashed", None, 500),
        (b'error: {"code": 400, "message": "too long"}\n\n' + DONE, "too long", None, 400),
        (text("a") + b'error: {"message": "gone"}\n\n', "gone", None, None),
        (text("a", "error") + DONE, "finish_reason is error", None, None),
        (b'{"error": {"message": "on fire"}}', None, "answered without a stream: on fire", None),
        (b"<html><title>Log in</title>", None, "answered without a stream: <html><title>Log in</title>", None),
        (b'{"choices": [{"text": "all of it"}]}', None, "the server answers in one piece, not as a stream", None),
        (b"x" * (1 << 23) + b"y", None, "a line of more than 8 MiB in its answer", None),
    ],
)
def test_the_servers_words(body: bytes, error: str | None, fault: str | None, status: int | None) -> None:
    s = read([body])
    assert (s.error, s.fault, s.error_status) == (error, fault, status)


def test_counts() -> None:
    assert [count(v) for v in (0, 7, 7.0, True, "7", None, -1, 2**31, 1.5)] == [0, 7, 7, *[None] * 6]
