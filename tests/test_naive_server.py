"""The naive server over HTTP with a tiny random model: the streamed protocol, its FIFO lock, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from servebook import engines
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.engines import naive_protocol
from servebook.engines.http import http_get
from servebook.engines.naive_server import Worker
from test_engines_process import gone

RUN = {
    "run": "t", "title": "t", "model": {"config": "tiny-qwen2", "weights": "dummy"}, "hardware": {"gpu": "detect"},
    "engines": {"hf": {"kind": "naive", "device": "cpu"}},
}  # fmt: skip
PROMPT = list(range(300, 340))
pytestmark = pytest.mark.engine  # a real server with a tiny model, seconds to start


def start(folder: Path) -> Any:
    return engines.start(params.RunParams.model_validate(RUN), "hf", folder, base=folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start(tmp_path_factory.mktemp("run")) as running:
        yield running


async def events(session: aiohttp.ClientSession, url: str, **body: Any) -> list[Any]:
    """Data of a streamed answer's events, decoded, with "[DONE]" as text."""
    found = []
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "stream": True, **body}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                text = line[6:].strip().decode()
                found.append(text if text == "[DONE]" else json.loads(text))
    return found


def client(work: Any) -> Any:
    async def with_session() -> Any:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            return await work(session)

    return asyncio.run(with_session())


def gauge(url: str, name: str) -> float:
    text = (http_get(f"{url}/metrics") or b"").decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"naive:{name} ")))


def until(condition: Any, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_stream_has_an_event_a_token_then_usage_then_done(engine: Any) -> None:
    found = client(lambda s: events(s, engine.url, stream_options={"include_usage": True}))
    assert found[-1] == "[DONE]"
    tokens, usage = found[:-2], found[-2]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48}
    assert len(tokens) == 8 and all(len(e["choices"]) == 1 and "usage" not in e for e in tokens)
    assert [e["choices"][0]["finish_reason"] for e in tokens] == [None] * 7 + ["length"]
    assert {e["id"] for e in found[:-1]} == {usage["id"]} and usage["object"] == "text_completion"


def test_no_usage_unless_asked_and_whole_answer_says_the_same_text(engine: Any) -> None:
    streamed = client(lambda s: events(s, engine.url))
    assert streamed[-1] == "[DONE]" and all(e["choices"] for e in streamed[:-1])

    async def whole(session: aiohttp.ClientSession) -> Any:
        async with session.post(
            f"{engine.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        ) as a:
            return await a.json()

    answer = client(whole)
    assert answer["choices"][0]["text"] == "".join(e["choices"][0]["text"] for e in streamed[:-1]) != ""
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 8


def test_text_prompt_and_one_list_in_a_list(engine: Any) -> None:
    for prompt, count in (("hello there", None), ([PROMPT], 40)):
        found = client(lambda s, p=prompt: events(s, engine.url, prompt=p, stream_options={"include_usage": True}))
        assert found[-2]["usage"]["prompt_tokens"] == count or (
            count is None and found[-2]["usage"]["prompt_tokens"] > 1
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [5] * 5000}, ["5000", "4096"]),
        ({"prompt": [5] * 10, "max_tokens": 4090}, ["10 tokens", "4090", "4096"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": [[1], [2]]}, ["prompt"]),
        ({"prompt": [1, "a"]}, ["prompt"]),
        ({"prompt": [1, True]}, ["prompt"]),
        ({"prompt": [999_999]}, ["token ids"]),
        ({"prompt": [-1]}, ["token ids"]),
        ({"prompt": [1], "max_tokens": 0}, ["max_tokens"]),
        ({"prompt": [1], "n": 2}, ["n is not supported"]),
        ({"prompt": [1], "stop": ["x"]}, ["stop is not supported"]),
        ({"prompt": [1], "model": "other"}, ["other", "tiny-qwen2"]),
        ([1], ["JSON object"]),
    ],
)
def test_bad_request_is_a_400_that_says_why(engine: Any, body: Any, words: list[str]) -> None:
    async def post(session: aiohttp.ClientSession) -> tuple[int, Any]:
        async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
            return answer.status, await answer.json()

    status, answer = client(post)
    assert status == 400 and answer["error"]["code"] == 400
    assert all(word in answer["error"]["message"] for word in words), answer["error"]["message"]


def test_body_that_is_no_json(engine: Any) -> None:
    async def post(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.post(f"{engine.url}/v1/completions", data=b"{") as answer:
            return answer.status, (await answer.json())["error"]["message"]

    assert client(post) == (400, "the body is not JSON")


def test_models_health_and_facts(engine: Any) -> None:
    assert http_get(f"{engine.url}/health") == b""
    models = json.loads(http_get(f"{engine.url}/v1/models") or b"")
    assert models["data"][0]["id"] == "tiny-qwen2" and models["data"][0]["max_model_len"] == 4096
    assert (
        engine.facts["kind"] == "naive"
        and engine.facts["max_num_seqs"] == 1
        and engine.facts["prefix_caching"] is False
    )
    assert engine.facts["version"].startswith("transformers ")


def test_one_at_a_time_in_order_of_arrival(engine: Any) -> None:
    async def five(session: aiohttp.ClientSession) -> list[int]:
        order: list[int] = []

        async def one(i: int) -> None:
            await asyncio.sleep(0.05 * i)
            await events(session, engine.url, max_tokens=40)
            order.append(i)

        await asyncio.gather(*(one(i) for i in range(5)))
        return order

    assert client(five) == [0, 1, 2, 3, 4]


def test_client_that_leaves_frees_the_lock(engine: Any) -> None:
    """One leaves while it decodes, one while it waits; the third is served although neither has ended."""
    before = gauge(engine.url, "generation_tokens_total")

    async def comes(name: str) -> None:
        while await asyncio.to_thread(gauge, engine.url, name) < 1:
            await asyncio.sleep(0.02)

    async def leave(session: aiohttp.ClientSession) -> None:
        first = asyncio.ensure_future(events(session, engine.url, max_tokens=4000))
        await asyncio.wait_for(comes("num_requests_running"), 60)
        queued = asyncio.ensure_future(events(session, engine.url, max_tokens=4000))
        await asyncio.wait_for(comes("num_requests_waiting"), 60)
        assert not first.done()
        queued.cancel()
        first.cancel()
        assert len(await events(session, engine.url, max_tokens=4)) == 5

    client(leave)
    # neither of the two was decoded to its end
    assert gauge(engine.url, "generation_tokens_total") - before < 4000
    assert until(
        lambda: gauge(engine.url, "num_requests_running") == 0 and gauge(engine.url, "num_requests_waiting") == 0
    )


SLOW_TO_STOP = """
import sys, time, select
for line in sys.stdin.buffer.raw:
    if line.strip() == b"stop":
        continue
    for token in range(1000):
        print(len(line), flush=True)
        if select.select([sys.stdin], [], [], 0.02)[0]:
            time.sleep(0.3)
            break
    print("end", flush=True)
"""


def test_a_request_waits_for_the_end_of_one_that_was_cut_off_twice() -> None:
    """A write to a closing connection ends a request, and losing the connection cancels it while it ends."""

    async def run() -> tuple[int, int]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-uc", SLOW_TO_STOP, stdin=pipe, stdout=pipe)
        worker = Worker(process, {})
        try:
            left = worker.tokens(SimpleNamespace(prompt=[1], max_tokens=9, eos=[]))
            old = await anext(left)
            closing = asyncio.ensure_future(left.aclose())
            await asyncio.sleep(0.1)
            closing.cancel()
            await asyncio.wait([closing])
            async with contextlib.aclosing(
                worker.tokens(SimpleNamespace(prompt=[1] * 50, max_tokens=9, eos=[]))
            ) as made:
                return old, await anext(made)
        finally:
            process.kill()
            await process.wait()

    old, new = asyncio.run(run())
    assert new > old + 50  # its own


def test_client_that_leaves_during_prefill(engine: Any) -> None:
    async def leave(session: aiohttp.ClientSession) -> list[Any]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(events(session, engine.url, prompt=[7] * 3000, max_tokens=1000), 0.05)
        return await events(session, engine.url, max_tokens=3, stream_options={"include_usage": True})

    found = client(leave)
    assert found[-2]["usage"]["completion_tokens"] == 3


def test_counters_add_up(engine: Any) -> None:
    def count(name: str) -> float:
        return gauge(engine.url, name)

    before = count("prompt_tokens_total"), count("generation_tokens_total"), count("time_to_first_token_seconds_count")
    client(lambda s: events(s, engine.url))
    assert until(lambda: count("generation_tokens_total") == before[1] + 8)
    assert (
        count("prompt_tokens_total") == before[0] + 40 and count("time_to_first_token_seconds_count") == before[2] + 1
    )


def test_tokens_are_counted_as_they_are_made(engine: Any) -> None:
    """A scrape in the middle of a long answer finds the tokens that a client has seen by then."""
    before = gauge(engine.url, "generation_tokens_total")

    async def half(session: aiohttp.ClientSession) -> float:
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
        async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
            seen = 0
            async for line in answer.content:
                seen += line.startswith(b"data: ")
                if seen == 100:
                    break
            async with session.get(f"{engine.url}/metrics") as page:
                told = next(
                    x for x in (await page.text()).splitlines() if x.startswith("naive:generation_tokens_total")
                )
            return float(told.split()[-1])

    assert 100 <= client(half) - before < 300


@pytest.mark.parametrize("config", ["tiny-qwen2", "tiny-qwen3-moe"])
def test_decoding_is_that_of_a_plain_forward_pass(config: str, tmp_path: Path) -> None:
    """The growing cache changes nothing: the same tokens as recomputing the whole sequence every step."""
    import torch
    from servebook.engines.naive_model import NaiveModel
    from servebook.model import reader as model

    tiny = params.ModelParams(**RUN["model"] | {"config": config})  # type: ignore[arg-type, operator]
    folder = model.materialize(tiny, tmp_path, tmp_path)
    naive = NaiveModel(str(folder), dummy=True, device="cpu", dtype="float32")
    ids = PROMPT[:]
    with torch.inference_mode():
        for _ in range(6):
            ids.append(int(naive.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert list(naive.generate(PROMPT, 6)) == ids[len(PROMPT) :]


def test_incomplete_characters_are_events_without_text() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = naive_protocol.Detokenizer(tokenizer)
    texts = [detokenizer.step(token) for token in tokenizer.encode("é→a").ids]
    assert texts == ["", "é", "", "", "→", "a"]
    assert naive_protocol.Detokenizer(None).step(5) == ""


def test_eos_ends_a_request_unless_ignored(engine: Any) -> None:
    served = naive_protocol.Served("tiny-qwen2", engine.facts, None)
    assert naive_protocol.Job({"prompt": [1]}, served).eos == engine.facts["eos"]
    assert naive_protocol.Job({"prompt": [1], "ignore_eos": True}, served).eos == []


def test_end_of_the_models_process_ends_the_server(tmp_path: Path) -> None:
    import psutil

    running = start(tmp_path)
    worker = psutil.Process(running.pid).children()[0].pid
    os.kill(worker, signal.SIGKILL)
    running.wait(10)
    assert not running.alive() and "the model's process ended" in running.log_tail(3)
    running.stop()
    assert gone(worker)


def test_who_waits_when_the_server_is_stopped_is_told_so(tmp_path: Path) -> None:
    running = start(tmp_path)

    async def ask(session: aiohttp.ClientSession) -> str:
        try:
            body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
            async with session.post(f"{running.url}/v1/completions", json=body) as answer:
                return f"{answer.status} {await answer.text()}"
        except aiohttp.ClientError:
            return "cut off"

    async def crowd(session: aiohttp.ClientSession) -> list[str]:
        asked = [asyncio.create_task(ask(session)) for _ in range(30)]
        while await asyncio.to_thread(gauge, running.url, "num_requests_waiting") < 29:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(running.stop)
        return list(await asyncio.gather(*asked))

    told = client(crowd)
    assert all(t == "cut off" or (t.startswith("500") and "the model's process ended" in t) for t in told), set(told)
    assert any(t != "cut off" for t in told) and "Transport" not in running.log_tail(100)


def test_unusable_model_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
        })
    )  # fmt: skip
    run = params.RunParams.model_validate({**RUN, "model": {"path": str(folder), "weights": "real"}})
    with pytest.raises(ServebookError) as caught:
        engines.start(run, "hf", tmp_path, base=tmp_path)
    assert "OSError" in caught.value.what and "\n" not in str(caught.value)


def test_the_server_imports_no_model_library() -> None:
    import subprocess
    import sys

    program = (
        "import servebook.engines.naive_server, sys\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
