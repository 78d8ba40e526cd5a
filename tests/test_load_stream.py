"""Server-sent events as bytes: every way of cutting them gives the same tokens."""

from __future__ import annotations

import json

import pytest
from servebook.load.stream import AT_LEAST_ONE, TokenStream, error_message, tokens_in


def event(text: str, finish: str | None = None, usage: dict | None = None, **choice: object) -> bytes:
    body: dict = {"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}]}
    if usage:
        body["usage"] = usage
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def used(tokens: int, prompt: int = 9) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(*reads: bytes) -> TokenStream:
    """Read k arrives at time k."""
    stream = TokenStream()
    for at, data in enumerate(reads):
        stream.feed(data, float(at))
    stream.finish()
    return stream


def test_one_token_an_event_one_event_a_read() -> None:
    s = read(event("a"), event("b"), event("c", "length"), used(3), DONE)
    assert (s.times, s.counts) == ([0.0, 1.0, 2.0], [1, 1, 1])
    assert (s.tokens, s.prompt_tokens, s.first_tokens, s.ended, s.error) == (3, 9, 1, True, None)


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_any_cut_gives_the_same_events(size: int, newline: bytes) -> None:
    whole = b": keep-alive\n\n".join([event("a"), event("b\\n"), event("c", "length"), used(3) + DONE])
    whole = whole.replace(b"\n", newline)
    s = read(*(whole[i : i + size] for i in range(0, len(whole), size)))
    assert (s.events, s.tokens, s.ended) == (3, 3, True)


def test_an_event_is_stamped_when_it_is_complete() -> None:
    first, second = event("a"), event("b", "length")
    s = read(first[:20], first[20:] + second[:3], second[3:], used(2) + DONE)
    assert s.times == [1.0, 2.0]


def test_several_events_in_one_read_with_the_end() -> None:
    s = read(event("a"), event("b") + event("c") + event("d", "length") + used(4) + DONE)
    assert (s.times, s.counts, s.tokens) == ([0.0, 1.0], [1, 3], 4)


def test_no_line_feed_after_the_last_event() -> None:
    assert read(event("a"), event("b", "length"), used(2), b"data: [DONE]").ended


def test_a_greeting_without_a_token_is_not_the_first_token() -> None:
    s = read(event(""), event("a"), event("b", "length"), used(2), DONE)
    assert (s.times, s.first_tokens) == ([1.0, 2.0], 1)


def test_a_chat_role_event_is_not_the_first_token() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    tokens = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % i for i in range(2)]
    s = read(role, *tokens, used(2), DONE)
    assert s.times == [1.0, 2.0]


def test_a_first_token_of_incomplete_utf8_is_the_first_token() -> None:
    s = read(event(""), event("é"), event("b", "length"), used(3), DONE)
    assert (s.times, s.first_tokens) == ([0.0, 1.0, 2.0], 1)


def test_token_ids_decide_on_empty_text() -> None:
    assert read(event("", token_ids=[5]), event("é", "length", token_ids=[6, 7]), used(3), DONE).times == [0.0, 1.0]
    assert read(event("", token_ids=[]), event("é", "length", token_ids=[6, 7]), used(2), DONE).times == [1.0]


def test_running_usage_tells_the_first_events_tokens() -> None:
    running = [event("x", None, {"completion_tokens": n}) for n in (3, 4)]
    s = read(*running, event("x", "length", {"completion_tokens": 8}), used(8), DONE)
    assert (s.first_tokens, s.tokens, s.events) == (3, 8, 3)


def test_several_tokens_an_event_without_counts_leave_the_first_unknown() -> None:
    s = read(event("a b"), event("c d", "length"), used(4), DONE)
    assert (s.first_tokens, s.events, s.tokens) == (None, 2, 4)


def test_a_finish_event_without_a_token_does_not_count() -> None:
    s = read(event("a"), event("b"), event("", "length"), used(2), DONE)
    assert s.times == [0.0, 1.0]


def test_an_empty_last_token_counts() -> None:
    s = read(event("a"), event("b"), event("", "length"), used(3), DONE)
    assert s.times == [0.0, 1.0, 2.0]


def test_no_usage_leaves_the_tokens_unknown() -> None:
    s = read(event("a"), event("b", "length"), DONE)
    assert (s.tokens, s.events) == (None, 2)


def test_an_error_inside_the_stream_is_found() -> None:
    s = read(event("a"), b'data: {"error": {"message": "engine died"}}\n\n', DONE)
    assert (s.error, s.events) == ("engine died", 1)


def test_an_error_as_the_only_event_is_found() -> None:
    assert read(b'data: {"object":"error","message":"no memory"}\n\n', DONE).error == "no memory"


def test_a_stream_that_just_stops_has_not_ended() -> None:
    assert not read(event("a"), event("b")).ended


def test_tokens_in() -> None:
    assert tokens_in({"choices": []}) == 0
    assert tokens_in({"choices": [{"text": "x"}]}) == AT_LEAST_ONE
    assert tokens_in({"choices": [{"text": ""}]}) is None
    assert tokens_in({"choices": [{"text": "x", "logprobs": {"tokens": ["a", "b"]}}]}) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "m", "object": "error"}', "m"),
        (b"<html>\n bad gateway</html>", "<html> bad gateway</html>"),
    ],
)
def test_error_message(body: bytes, message: str) -> None:
    assert error_message(body) == message


def spread(event_: bytes) -> bytes:
    """The same event with its JSON over several data lines."""
    text = json.dumps(json.loads(event_[6:]), indent=1)
    return b"".join(b"data: " + line.encode() + b"\n" for line in text.split("\n")) + b"\n"


@pytest.mark.parametrize("size", [*range(1, 60), 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_json_over_several_data_lines_is_one_event(size: int, newline: bytes) -> None:
    parts = (event("a"), event("b"), event("c", "length"), used(3))
    whole = b": hi\n\n" + b"".join(map(spread, parts)) + b"event: end\n" + DONE
    whole = whole.replace(b"\n", newline)
    s = read(*(whole[i : i + size] for i in range(0, len(whole), size)))
    assert (s.events, s.tokens, s.first_tokens, s.ended, s.over) == (3, 3, 1, True, True)


def test_several_data_lines_are_stamped_when_their_event_is_complete() -> None:
    first, second = spread(event("a")), spread(event("b", "length"))
    s = read(first[:20], first[20:] + second[:9], second[9:], spread(used(2))[:-1])
    assert (s.times, s.tokens) == ([1.0, 2.0], 2)


def test_two_events_without_a_blank_line_between_are_two() -> None:
    s = read(event("a")[:-1] + event("b")[:-1], event("c", "length"), used(3), DONE)
    assert (s.counts, s.tokens) == ([2, 1], 3)
