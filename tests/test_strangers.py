"""Servers that nobody here wrote: what they are asked, what becomes of their odd answers, and whose fault it is."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from raw_server import Exchange, RawServer, event, sse
from servebook.cli.command import main
from servebook.common.errors import ServebookError, ServerBusy
from servebook.common.measured_point import MeasuredPoint
from servebook.config.params import Load, Slo
from servebook.config.points import PointSpec
from servebook.load import metrics
from servebook.load.client import Client
from servebook.load.point import measure_point_sync
from servebook.load.window import Rule

OK = "200 OK"


async def ordinary(x: Exchange) -> None:
    await x.stream()


def measure(server: RawServer, *, c: int = 2, n: int = 8, limit_s: float = 20.0, **options: Any) -> MeasuredPoint:
    spec = PointSpec("s", "e", f"c{c:04d}", "concurrency", 16, 8, concurrency=c)
    options = {"vocab": range(256, 8000), "lower_vocabs": [range(100, 2000)], **options}
    return measure_point_sync(
        spec, url=server.url, model="m", load=Load(jitter_s=0.001, max_seconds=limit_s), slo=Slo(), run_dir=None,
        batching=True, rule=Rule(c, n, n, 0.0, limit_s), **options,
    )  # fmt: skip


# --- load that nobody asked for ---------------------------------------------------------------------------------


def test_connections_are_opened_without_a_request() -> None:
    with RawServer(ordinary).running() as server:
        point = measure(server, c=16, n=16)
        paths = {x.path for x in server.asked if x.method == "GET"}
        probes = [x for x in server.asked if x.probe]
        connections = {x.connection for x in server.asked if not x.probe}
    assert paths == {"/metrics"}  # neither /health nor /, whose cost is not known
    assert len(probes) == 1 and len(connections) >= 16
    assert point.probes == "1 of 2 tokens answered" and point.model == "m"
    assert point.endpoint == f"{server.url}/v1/completions" and point.url == server.url
    assert point.request_fields is not None and "ignore_eos" in point.request_fields


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_busy_server_is_waited_for(status: str) -> None:
    async def post(x: Exchange) -> None:
        if server.count("POST") <= 2:
            x.whole(status, {"error": "busy"}, "Retry-After: 0")
        else:
            await x.stream()

    told: list[str] = []
    with RawServer(post).running() as server:
        point = measure(server, on_progress=told.append)
    assert point.requests == 8 and point.failures == 0
    assert any("the server is busy (HTTP" in line and "trying again in 0 s" in line for line in told)


def test_a_busy_server_is_not_waited_for_longer_than_the_point_may_take() -> None:
    async def post(x: Exchange) -> None:
        x.whole("429 Too Many Requests", {"error": {"message": "Rate limit reached"}}, "Retry-After: 3600")

    with RawServer(post).running() as server, pytest.raises(ServerBusy, match="Rate limit reached"):
        measure(server)
    assert server.count("POST") == 1


def test_a_busy_answer_inside_a_stream_is_waited_for() -> None:
    async def post(x: Exchange) -> None:
        if server.count("POST") > 1:
            return await x.stream()
        x.head()
        x.put(sse({"error": {"message": "overloaded", "code": 429}}))
        x.end()

    with RawServer(post).running() as server:
        assert measure(server).requests == 8


def test_ids_that_are_refused_inside_a_stream_fall_back_to_lower_ones() -> None:
    async def post(x: Exchange) -> None:
        if max(x.body["prompt"]) < 2048:
            return await x.stream()
        x.head()
        x.put(sse({"error": {"message": "out of vocabulary", "code": 400}}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.requests == 8 and point.prompts == "token ids 100 to 1999"
    assert point.probes is not None and point.probes.endswith("refused")


def test_a_field_that_breaks_the_server_is_left_out() -> None:
    async def post(x: Exchange) -> None:
        if "ignore_eos" in x.body:
            x.whole("500 Internal Server Error", {"error": "unexpected keyword argument 'ignore_eos'"})
        else:
            await x.stream()

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.requests == 8 and point.request_fields == "stream_options.include_usage"


def test_ids_that_are_refused_by_500_are_refused() -> None:
    async def post(x: Exchange) -> None:
        if isinstance(x.body["prompt"], str):
            return await x.stream()
        x.whole("500 Internal Server Error", {"error": {"message": "3 validation errors: 'string_type'"}})

    with RawServer(post).running() as server:
        with pytest.raises(ServebookError, match=r"validation errors.*--text"):
            measure(server)
        assert measure(server, text=True).requests == 8


def test_a_server_that_fails_at_everything_is_measured_as_it_is() -> None:
    async def post(x: Exchange) -> None:
        x.whole("500 Internal Server Error", {"error": "no GPU"})

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.requests == 0 and point.verdict == "invalid" and "no GPU" in str(point.reasons[0])


def test_a_redirect_is_followed_before_the_load_and_told() -> None:
    async def post(x: Exchange) -> None:
        if x.path == "/v1/completions":
            x.whole("307 Temporary Redirect", {}, "Location: /api/v1/completions")
        else:
            await x.stream()

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.requests == 8 and server.count("POST", "/v1/completions") == 1
    assert point.endpoint == f"{server.url}/api/v1/completions"
    assert point.notes == [f"redirected: requests go to {server.url}/api/v1/completions"]


def test_a_redirect_to_another_host_is_not_followed() -> None:
    async def post(x: Exchange) -> None:
        x.whole("308 Permanent Redirect", {}, "Location: http://example.org/v1/completions")

    with RawServer(post).running() as server, pytest.raises(ServebookError, match=r"redirects to http://example\.org"):
        measure(server, api_key="secret")


# --- streams and connections ------------------------------------------------------------------------------------


def test_a_stream_is_over_at_done_though_its_body_never_ends() -> None:
    async def post(x: Exchange) -> None:
        x.head()
        for i in range(x.tokens):
            x.put(event(i, last=i == x.tokens - 1))
        x.put(sse({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": x.tokens}}) + b"data: [DONE]\n\n")
        await x.writer.drain()
        await asyncio.sleep(30)

    with RawServer(post).running() as server:
        point = measure(server, n=4)
    assert (point.requests, point.failures) == (4, 0)


def test_a_probe_that_never_ends_is_not_listened_to() -> None:
    sent: list[int] = []

    async def post(x: Exchange) -> None:
        x.head()
        sent.append(0)
        while not x.writer.transport.is_closing():
            x.put(event(sent[-1]))
            sent[-1] += 1
            await x.writer.drain()
            await asyncio.sleep(0.001)

    with RawServer(post).running() as server, pytest.raises(ServebookError, match=r"2 tokens goes on after \d+"):
        measure(server)
    assert server.measured == 0


def all_at_once(x: Exchange) -> bytes:
    events = b"".join(event(i, last=i == x.tokens - 1) for i in range(x.tokens))
    used = {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": x.tokens}}
    return events + sse(used) + b"data: [DONE]\n\n"


def in_one_event(x: Exchange) -> bytes:
    used = {"prompt_tokens": 16, "completion_tokens": x.tokens}
    whole = {"choices": [{"index": 0, "text": " t" * x.tokens, "finish_reason": "length"}], "usage": used}
    return sse(whole) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("answer", [all_at_once, in_one_event])
def test_an_answer_that_is_held_back_is_no_valid_time_to_first_token(answer: Any) -> None:
    async def post(x: Exchange) -> None:
        x.whole(OK, answer(x), kind="text/event-stream")

    with RawServer(post).running() as server:
        point = measure(server)
    assert (point.requests, point.bunched, point.verdict) == (8, 8, "suspect")
    assert any("8 answers brought several tokens at once" in str(r) for r in point.reasons)


def test_an_answer_that_stays_open_after_its_last_token_is_told_so() -> None:
    async def post(x: Exchange) -> None:
        x.head()
        for i in range(x.tokens):
            x.put(event(i, last=i == x.tokens - 1))
            await x.writer.drain()
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        x.put(sse({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": x.tokens}}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        point = measure(server, c=1)
    assert point.tail_mean_s is not None and point.tail_mean_s > 0.04
    assert any("answers stay open for" in str(r) for r in point.reasons)


def test_a_request_into_a_connection_that_was_closed_meanwhile_is_sent_again() -> None:
    async def post(x: Exchange) -> bool:
        if x.nth:  # read, and then gone, without a byte of an answer
            return False
        await x.stream()
        return True

    with RawServer(post).running() as server:
        point = measure(server, n=8)
    assert (point.requests, point.failures) == (8, 0)


def test_a_new_connection_that_is_closed_without_an_answer_is_the_servers_failure() -> None:
    async def post(x: Exchange) -> bool | None:
        return await x.stream() if x.probe else False

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.requests == 0 and "closed the connection" in str(point.reasons[0])


def test_a_chunk_whose_size_is_no_number_is_not_waited_for() -> None:
    async def post(x: Exchange) -> None:
        if x.probe:
            return await x.stream()
        x.head()
        x.writer.write(b"zz\r\nhello\r\n")

    with RawServer(post).running() as server:
        point = measure(server, limit_s=60.0)
    why = str(point.reasons[0])  # whether its head came in the same read decides between the two
    assert point.requests == 0 and ("cut mid-stream" in why or "is not valid HTTP" in why)
    assert "requests in a row failed" in (point.stop_reason or "")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"error": {"message": "the GPU is on fire"}}, "the GPU is on fire"),
        (b"<html><title>Log in to the portal</title></html>", "Log in to the portal"),
        (b'error: {"code":400,"message":"exceeds the context"}\n\ndata: [DONE]\n\n', "exceeds the context"),
        (b'event: error\ndata: {"message":"model crashed"}\n\n', "model crashed"),
        ({"choices": [{"text": "all of it"}]}, "answers in one piece"),
    ],
)
def test_a_200_that_is_no_stream_is_told_in_its_own_words(how: Any, words: str) -> None:
    async def post(x: Exchange) -> None:
        x.whole(OK, how)

    with RawServer(post).running() as server, pytest.raises(ServebookError, match=words):
        measure(server)


def test_an_error_that_is_packed_is_unpacked() -> None:
    async def post(x: Exchange) -> None:
        x.whole("400 Bad", gzip.compress(b'{"error":{"message":"no such model"}}'), "Content-Encoding: gzip")

    with RawServer(post).running() as server, pytest.raises(ServebookError, match="no such model"):
        measure(server)


def test_usage_that_cannot_be_read_costs_its_request_only() -> None:
    async def post(x: Exchange) -> None:
        if server.measured != 5:
            return await x.stream()
        x.head()
        x.put(event(0, last=True) + sse({"choices": [], "usage": {"completion_tokens": "16"}}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        point = measure(server, n=30)
    assert point.failures == 1 and any("usage cannot be read" in e for e in point.errors or {})


def test_text_that_is_no_utf8_is_text_all_the_same() -> None:
    async def post(x: Exchange) -> None:
        x.head()
        for _ in range(x.tokens):
            x.put(b'data: {"choices":[{"text":"\xff\xfe\x00\x1b","finish_reason":null}]}\n\n')
            await asyncio.sleep(0.002)
        x.put(sse({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": x.tokens}}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        point = measure(server)
    assert (point.requests, point.tokens_per_event) == (8, 1.0)


def test_what_a_stranger_says_moves_no_cursor() -> None:
    async def post(x: Exchange) -> None:
        x.whole("400 Bad", {"error": {"message": "\x1b[31mred\x07\u202e alert"}})

    with RawServer(post).running() as server, pytest.raises(ServebookError, match=r"\[31mred alert") as told:
        measure(server)
    assert str(told.value).isprintable()


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "304 Not Modified"])
def test_a_status_that_is_no_answer_is_a_refusal(status: str) -> None:
    async def post(x: Exchange) -> None:
        x.writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    with RawServer(post).running() as server, pytest.raises(ServebookError, match=f"HTTP {status[:3]}"):
        measure(server)


@pytest.mark.parametrize(
    "url",
    ["http://h/v1?key=planted", "http://h/v1#planted", "http://h/v1/chat/completions", "http://h/v1/completions/"],
)
def test_a_url_that_holds_more_than_an_address_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ServebookError, match="more than a server's address") as told:
        Client(url)
    assert "planted" not in str(told.value)


def test_a_password_in_a_url_is_in_no_message_and_in_no_point() -> None:
    with RawServer(ordinary).running() as server:
        spec = PointSpec("s", "e", "c0001", "concurrency", 16, 8, concurrency=1)
        point = measure_point_sync(
            spec, url=server.url.replace("//", "//me:planted@"), model="m", load=Load(jitter_s=0.001), slo=Slo(),
            vocab=range(256, 8000), run_dir=None, batching=True, rule=Rule(1, 2, 2, 0.0, 20.0),
        )  # fmt: skip
        assert server.asked[-1].headers["authorization"].startswith("Basic ")
    assert point.requests == 2 and "planted" not in json.dumps(point.to_json())


# --- servers without usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "said"), [("events", "their events"), ("asked", "the requested length")])
def test_a_server_without_usage_is_counted_as_told_and_suspect(how: str, said: str) -> None:
    async def post(x: Exchange) -> None:
        await x.stream(usage=False)

    with RawServer(post).running() as server:
        unknown = measure(server)
        point = measure(server, count_tokens=how)
    assert unknown.requests == 0 and "--count-tokens" in str(unknown.reasons[0])
    assert point.requests == 8 and point.verdict != "valid" and point.output_tokens_off == 0
    assert any(f"reported no usage: the tokens of 8 answers are {said}" in str(r) for r in point.reasons)


def test_the_length_asked_for_is_not_that_of_an_answer_that_ended_by_itself() -> None:
    async def post(x: Exchange) -> None:
        x.head()
        x.put(event(0) + sse({"choices": [{"text": "", "finish_reason": "stop"}]}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        point = measure(server, count_tokens="asked")
    assert point.requests == 0 and "ended before the requested length" in str(point.reasons[0])


def test_cached_tokens_that_only_usage_tells_are_weighed() -> None:
    async def post(x: Exchange) -> None:
        x.head()
        for i in range(x.tokens):
            x.put(event(i, last=i == x.tokens - 1))
            await asyncio.sleep(0.002)
        told = {"prompt_tokens": 16, "completion_tokens": x.tokens, "prompt_tokens_details": {"cached_tokens": 12}}
        x.put(sse({"choices": [], "usage": told}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.cache_hit_share == 0.75
    assert any("75.0 % of prompt tokens came from the prefix cache" in str(r) for r in point.reasons)


# --- what servers say of themselves -----------------------------------------------------------------------------


def test_shares_of_several_engines_are_their_mean_and_counts_their_sum() -> None:
    page = b"".join(
        b'vllm:kv_cache_usage_perc{engine="%d"} 0.5\nvllm:num_requests_running{engine="%d"} 3\n' % (e, e)
        for e in range(4)
    )
    assert metrics.parse(page) == {"kv_cache_usage": 0.5, "running": 12.0}


def test_a_figure_under_its_old_and_its_new_name_counts_once() -> None:
    page = b"vllm:kv_cache_usage_perc 0.4\nvllm:gpu_cache_usage_perc 0.4\n"
    page += b"vllm:prefix_cache_hits_total 8\nvllm:gpu_prefix_cache_hits_total 8\n"
    assert metrics.parse(page) == {"kv_cache_usage": 0.4, "cache_hits": 8.0}


@pytest.mark.parametrize("text", [b"NaN", b"+Inf", b"-Inf", b"nan", b"1e999", b"word", b"0x1"])
def test_a_gauge_that_is_no_number_is_left_out(text: bytes) -> None:
    assert metrics.parse(b"vllm:kv_cache_usage_perc " + text + b"\nvllm:num_requests_running 2\n") == {"running": 2.0}


@pytest.mark.parametrize("text", [b"-1", b"1.5", b"50"])
def test_a_share_below_nothing_or_above_all_is_left_out(text: bytes) -> None:
    assert metrics.parse(b"vllm:kv_cache_usage_perc " + text + b"\nvllm:num_requests_running 2\n") == {"running": 2.0}


def test_a_sample_that_is_there_twice_counts_once() -> None:
    page = b'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
    assert metrics.parse(page + page) == {"running": 5.0}


ONE_GAUGE = b"vllm:num_requests_running 2\n"


async def endless(x: Exchange) -> None:
    x.head("200 OK", "text/plain")
    while not x.writer.transport.is_closing():
        x.put(b"# nothing\n" * 6000)
        await x.writer.drain()


async def asks(server: RawServer, what: str) -> Any:
    async with Client(server.url) as client:
        if what == "models":
            return await client.models()
        scraper = metrics.Scraper(client.session, server.url, 1.0, time.monotonic)
        await scraper.scrape()
        scraper.close()
        return scraper.samples[0].values


@pytest.mark.parametrize("packed", [False, True])
def test_a_metrics_page_is_read_packed_or_not_and_one_without_end_is_none(packed: bool) -> None:
    async def get(x: Exchange) -> bool:
        lines = ["Content-Encoding: gzip"] if packed else []
        x.whole(OK, gzip.compress(ONE_GAUGE) if packed else ONE_GAUGE, *lines, kind="text/plain")
        return True

    with RawServer(ordinary, get=get).running() as server:
        assert asyncio.run(asks(server, "metrics")) == {"running": 2.0}
    with RawServer(ordinary, get=endless).running() as server:
        assert asyncio.run(asks(server, "metrics")) == {}


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\x00\xff", b'"m"', b'{"data": {"id": "m"}}', None])
def test_a_list_of_models_that_is_none_is_one_line(body: bytes | None) -> None:
    async def get(x: Exchange) -> bool:
        if body is None:
            await endless(x)
        else:
            x.whole(OK, body)
        return True

    with (
        RawServer(ordinary, get=get).running() as server,
        pytest.raises(ServebookError, match="no model in the answer"),
    ):
        asyncio.run(asks(server, "models"))


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 OK 200\r\n\r\n"])
def test_an_answer_that_is_no_http_is_told_so(answer: bytes) -> None:
    async def post(x: Exchange) -> bool:
        x.writer.write(answer)
        return False

    with RawServer(post).running() as server:
        point = measure(server)
    assert point.requests == 0 and "the answer is not valid HTTP" in str(point.reasons[0])


def test_a_user_in_the_url_and_a_key_beside_it_are_refused_before_the_first_request() -> None:
    with pytest.raises(ServebookError, match="contains a user name, and an API key is given") as caught:
        Client("http://user:s3cret@127.0.0.1:9", api_key="k3y")
    assert "s3cret" not in str(caught.value) and "k3y" not in str(caught.value)


def test_a_counter_that_fell_in_between_tells_nothing_and_says_so() -> None:
    values = ({"generation_tokens": 100.0}, {"generation_tokens": 5.0}, {"generation_tokens": 150.0})
    samples = [metrics.Sample(float(t), values=v) for t, v in enumerate(values)]
    asked = MeasuredPoint(
        sweep="s",
        engine="e",
        point_id="c0001",
        requests=1,
        failures=0,
        prompt_tokens=16,
        output_tokens=8,
        stop_reason="",
    )
    point = metrics.Account(samples, 0.0, 2.0).fill(asked, lambda a, b: 50.0)
    assert point.server_output_tokens is None and point.server_counters_reset is True


def test_gauges_that_are_no_numbers_leave_the_point() -> None:
    with RawServer(
        ordinary, metrics=b"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc NaN\n"
    ).running() as server:
        point = measure(server)
    assert point.requests == 8 and point.kv_cache_usage_mean is None


# --- the command ------------------------------------------------------------------------------------------------

SMALL = ["--prompt-tokens", "16", "--output-tokens", "8", "--requests", "4", "--warmup", "1", "--jitter", "0.001"]


def command(server: RawServer, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: where what it writes to, or its environment, is what matters."""
    argv = [sys.executable, "-m", "servebook.cli", "measure", "--url", server.url, *SMALL, *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, env={**os.environ, **env}, check=False)


@dataclass
class Told:
    returncode: int
    stdout: str
    stderr: str


def here(server: RawServer, *options: str) -> Told:
    """In this process, which has imported everything."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["measure", "--url", server.url, *SMALL, *options])
    return Told(status, out.getvalue(), err.getvalue())


def test_json_is_written_into_what_stands_there(tmp_path: Path) -> None:
    fifo, link, store, read = tmp_path / "fifo", tmp_path / "link", tmp_path / "store", []
    os.mkfifo(fifo)
    store.write_text("old")
    link.symlink_to(store)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    with RawServer(ordinary).running() as server:
        for path in (fifo, link, Path("/dev/null")):
            assert "requests" in here(server, "--json", str(path)).stdout
        piped = command(server, "--json", "-")
    reader.join(60)
    assert stat.S_ISFIFO(fifo.stat().st_mode) and json.loads(read[0])["requests"] == 4
    assert link.is_symlink() and json.loads(store.read_text())["requests"] == 4
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert json.loads(piped.stdout)["model"] == "m" and "TTFT" in piped.stderr


def test_json_that_cannot_be_written_is_refused_before_the_first_request(tmp_path: Path) -> None:
    with RawServer(ordinary).running() as server:
        folder = here(server, "--json", str(tmp_path))
        below = here(server, "--json", "/dev/null/m.json")
    assert server.asked == []
    assert folder.returncode == below.returncode == 1
    assert "cannot be written (it is a folder)" in folder.stderr and "is kept" not in folder.stderr + below.stderr


def test_a_closed_pipe_costs_no_point(tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    with RawServer(ordinary).running() as server:
        argv = [sys.executable, "-m", "servebook.cli", "measure", "--url", server.url, *SMALL]
        argv += ["--concurrency", "1,2", "--json", str(out)]
        run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        said = run.stderr.read()
        run.wait(60)
    assert len(json.loads(out.read_text())) == 2 and "Traceback" not in said and "BrokenPipe" not in said


def test_a_key_with_a_line_feed_is_sent_without_it_and_one_that_cannot_be_sent_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RawServer(ordinary).running() as server:
        monkeypatch.setenv("KEY", "secret\n")
        good = here(server, "--api-key-env", "KEY")
        monkeypatch.setenv("KEY", "sec\nret")
        bad = here(server, "--api-key-env", "KEY")
    assert "Traceback" not in good.stderr and server.asked[-1].headers["authorization"] == "Bearer secret"
    assert bad.returncode == 1 and "that no header can hold" in bad.stderr and len(bad.stderr.splitlines()) == 1


def test_what_was_measured_is_named() -> None:
    with RawServer(ordinary, models=[{"id": "embedding"}, {"id": "b"}, {"no": "id"}, 3]).running() as server:
        told = command(server, "--json", "-", "--seed", "7")
    point = json.loads(told.stdout)
    assert (point["model"], point["seed"]) == ("embedding", 7)
    assert "measured embedding, the first of 2 models" in told.stderr and server.url in told.stderr


@pytest.mark.parametrize("models", [[], None, "x", [{"id": None}], {"a": 1}])
def test_a_server_that_lists_no_model_is_measured_where_one_is_named(models: Any) -> None:
    with RawServer(ordinary, models=models).running() as server:
        unnamed, named = here(server), here(server, "--model", "m")
    assert unnamed.returncode == 1 and unnamed.stderr.count("\n") == 1 and "Name the model" in unnamed.stderr
    assert "measured m at" in named.stdout


def test_a_terminal_that_lacks_a_character_shows_another() -> None:
    async def post(x: Exchange) -> None:
        x.whole("400 Bad", {"error": {"message": "Läufer – 50 %"}})

    with RawServer(post).running() as server:
        told = command(server, PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0")
    assert told.returncode == 1 and "Traceback" not in told.stderr and "ufer" in told.stderr
