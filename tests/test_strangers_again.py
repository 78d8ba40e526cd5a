"""Servers and hands that a second reader thought of: exemplars in metrics, dropped requests, empty arguments."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from raw_server import Exchange, RawServer, event, sse
from servebook.cli import json_file, measure_options
from servebook.cli import measure as measure_command
from servebook.cli.command import main
from servebook.common.errors import ServebookError, ServerBusy
from servebook.common.measured_point import MeasuredPoint
from servebook.config.params import Load, OpenAIEngine, Slo
from servebook.config.points import PointSpec
from servebook.engines import facts, http, openai
from servebook.load import client as load_client
from servebook.load import metrics
from servebook.load.client import Reply, _retry_after_s, _was_stale, now
from servebook.load.point import measure_point_sync
from servebook.load.window import Rule
from servebook.run_folder.lock_and_signals import single_run
from test_strangers import here, measure, ordinary

# --- a wrong figure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_running{engine="0"} 2 # {trace_id="x"} 7.0 1690000000.0',
        b'vllm:num_requests_running 2 # {trace_id="x"} 7.0',
        b'vllm:num_requests_running{model_name="a\\"} 9 b",engine="0"} 2',
        b'vllm:num_requests_running{model_name="{x} 9 # {"} 2 1690000000000',
        b"vllm:num_requests_running\t2",
        b'vllm:num_requests_running {e="}" , f="0"}  2\r',
    ],
)
def test_the_value_of_a_sample_is_what_follows_its_labels(line: bytes) -> None:
    assert metrics.parse(b"\n".join(metrics._WANTED.findall(b"# HELP x\n" + line + b"\n"))) == {"running": 2.0}


def test_an_engine_that_was_restarted_is_seen_though_the_sum_grew() -> None:
    def page(first: int, second: int) -> bytes:
        return b'vllm:generation_tokens_total{engine="0"} %d\nvllm:generation_tokens_total{engine="1"} %d\n' % (
            first, second,
        )  # fmt: skip

    for pages, fell in (((page(100, 1000), page(10, 1200)), True), ((page(100, 1000), page(110, 1200)), False)):
        scraper = metrics.Scraper(None, "http://h", 1.0, now)  # type: ignore[arg-type]
        scraper.samples = [metrics.Sample(float(i), lines=lines) for i, lines in enumerate(pages)]
        scraper.close()
        point = metrics.Account(scraper.samples, 0.0, 1.0).fill(EMPTY, lambda a, b: 50.0)
        assert point.server_counters_reset is fell and (point.server_output_tokens is None) is fell


EMPTY = MeasuredPoint(
    sweep="s", engine="e", point_id="c0001", requests=1, failures=0, prompt_tokens=16, output_tokens=8, stop_reason=""
)


def test_a_page_of_labels_without_end_is_read_in_time() -> None:
    page = b'vllm:num_requests_running{a="' + b"\\\\" * 200_000 + b"\nvllm:num_requests_running 2\n"
    assert metrics.parse(page) == {"running": 2.0}


@pytest.mark.parametrize(("status", "seen"), [(500, 2), (429, 2), (404, 1)])
def test_metrics_that_fail_once_are_asked_for_again(status: int, seen: int) -> None:
    async def get(x: Exchange) -> bool:
        if server.count("GET") == 1:
            x.whole(f"{status} Odd", b"")
        else:
            x.whole("200 OK", b"vllm:num_requests_running 2\n", kind="text/plain")
        return True

    async def twice() -> list[metrics.Sample]:
        async with load_client.Client(server.url) as client:
            scraper = metrics.Scraper(client.session, server.url, 1.0, now)
            await scraper.scrape()
            await scraper.scrape()
            return scraper.samples

    with RawServer(ordinary, get=get).running() as server:
        samples = asyncio.run(twice())
    assert [bool(s.lines) for s in samples] == [False, seen == 2] and server.count("GET") == seen


def test_a_request_that_the_server_had_and_dropped_is_a_failure_and_not_sent_again() -> None:
    """Sent again, its first wait would be in no figure, and the server would have worked twice."""
    reply, token = Reply(0, 1, 1), load_client.reused.set(True)
    try:
        reply.sent = now()
        assert _was_stale(reply)
        reply.sent -= 1.5
        assert not _was_stale(reply)
    finally:
        load_client.reused.reset(token)


# --- servers that are busy, and words that are no answer -----------------------------------------------------------


def test_a_date_to_try_again_at_is_by_the_servers_own_clock() -> None:
    ahead = time.time() + 7200  # the server's clock is two hours ahead
    clock, later = formatdate(ahead, usegmt=True), formatdate(ahead + 30, usegmt=True)
    assert _retry_after_s({"Retry-After": later, "Date": clock}) == 30.0
    assert _retry_after_s({"Retry-After": clock, "Date": later}) == 0.0
    assert 7200 <= (_retry_after_s({"Retry-After": later}) or 0) < 7240
    assert _retry_after_s({"Retry-After": "1.5"}) == 1.5
    for odd in ("soon", "-1", "²", "1e9", "", "9" * 400, "Wed, 99 Foo 2026 00:00:00 GMT"):
        assert _retry_after_s({"Retry-After": odd}) is None


def test_a_server_that_is_busy_until_tomorrow_is_asked_once() -> None:
    async def post(x: Exchange) -> None:
        x.whole("429 Too Many", {"error": "slow"}, "Retry-After: " + formatdate(time.time() + 86400, usegmt=True))

    with RawServer(post).running() as server, pytest.raises(ServerBusy, match="slow"):
        measure(server)
    assert server.count("POST") == 1


def test_a_server_that_says_retry_at_once_for_ever_is_not_asked_without_a_pause() -> None:
    async def post(x: Exchange) -> None:
        x.whole("503 Loading", {"error": "Loading model"}, "Retry-After: 0")

    told: list[str] = []
    with RawServer(post).running() as server, pytest.raises(ServebookError):
        measure(server, limit_s=0.6, on_progress=told.append)
    assert server.count("POST") < 8


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"detail": "Model not loaded"}, "Model not loaded"),
        ({"type": "response.output_text.delta", "delta": "hi"}, "response.output_text.delta"),
    ],
)
def test_a_stream_without_a_choice_is_refused_in_its_own_words(said: Any, words: str) -> None:
    async def post(x: Exchange) -> None:
        x.head()
        x.put(sse({"type": "ping"}) + sse(said) + b"data: [DONE]\n\n" if "detail" in said else sse(said))
        x.end()

    with RawServer(post).running() as server, pytest.raises(ServebookError, match=words):
        measure(server)
    assert server.measured == 0


@pytest.mark.parametrize("code", ["²", "٤٢٩", "4294", 1e9, None])
def test_an_error_of_an_odd_code_is_an_error(code: Any) -> None:
    async def post(x: Exchange) -> None:
        x.head()
        x.put(sse({"error": {"message": "boom", "code": code}}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server, pytest.raises(ServebookError, match="boom"):
        measure(server)


def test_text_whose_usage_counts_no_token_is_counted_as_told() -> None:
    async def post(x: Exchange) -> None:
        x.head()
        for i in range(x.tokens):
            x.put(event(i, last=i == x.tokens - 1))
        x.put(sse({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 0}}) + b"data: [DONE]\n\n")
        x.end()

    with RawServer(post).running() as server:
        counted = measure(server, count_tokens="events")
    assert counted.requests == 8 and counted.verdict != "valid"


# --- what a server says of itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "1.5"])
def test_a_label_that_is_no_count_is_not_reported(number: str) -> None:
    page = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{number}"}} 1.0\n'
    assert facts.from_metrics(page)["block_size"] == 16 and facts.from_metrics(page)["kv_cache_tokens"] is None


@pytest.mark.parametrize("top", [True, False])
def test_models_that_are_listed_at_the_top_are_listed(top: bool) -> None:
    async def get(x: Exchange) -> bool:
        x.whole("200 OK", [{"id": "m"}, {"id": 3}, "x"] if top else {"data": [{"id": "m"}, None]})
        return True

    with RawServer(ordinary, get=get).running() as server:
        assert http.served_models(server.url) == [{"id": "m"}]


@pytest.mark.parametrize("told", [0, -1, 10**30, True, "4,096", 4096.5, None])
def test_a_limit_that_no_server_has_is_not_reported(told: Any, tmp_path: Path) -> None:
    """Predictions would divide by a block of 0 tokens."""

    async def get(x: Exchange) -> bool:
        if x.path == "/get_server_info":
            x.whole("200 OK", {"max_total_num_tokens": told, "page_size": told, "context_length": told})
        elif x.path == "/metrics":
            x.whole("200 OK", f'vllm:cache_config_info{{block_size="{told}"}} 1.0\n'.encode(), kind="text/plain")
        return x.path in ("/get_server_info", "/metrics")

    engine = OpenAIEngine(kind="openai", url="http://h")
    with RawServer(ordinary, models=[{"id": "m", "max_model_len": told}] * 2, get=get).running() as server:
        reported = openai.connect("e", engine.model_copy(update={"url": server.url}), tmp_path).facts
    assert [reported[key] for key in ("max_model_len", "block_size", "kv_cache_tokens")] == [None] * 3
    assert "note" not in reported  # one model, listed twice


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("503 Loading", r"busy or still starting \(HTTP 503"), ("429 Many", r"busy or still starting \(HTTP 429"),
        ("502 Gone", r"no OpenAI-compatible server answers at .* \(HTTP 502\)"),
    ],
)  # fmt: skip
def test_a_server_that_is_not_there_yet_is_told_so(status: str, said: str, tmp_path: Path) -> None:
    async def get(x: Exchange) -> bool:
        x.whole(status, {"error": "Loading model"})
        return True

    engine = OpenAIEngine(kind="openai", url="http://h")
    with RawServer(ordinary, get=get).running() as server, pytest.raises(ServebookError, match=said):
        openai.connect("e", engine.model_copy(update={"url": server.url}), tmp_path)


@pytest.mark.parametrize("models", [[{"id": 5}], [{"id": ["a"]}], [{"id": True}]])
def test_a_name_that_is_no_text_is_none(models: Any) -> None:
    with RawServer(ordinary, models=models).running() as server:
        told = here(server)
    assert told.returncode == 1 and "Name the model" in told.stderr


def test_a_page_that_comes_in_drops_ends_in_time() -> None:
    async def get(x: Exchange) -> bool:
        x.head("200 OK", "text/plain")
        while not x.writer.transport.is_closing():
            x.put(b"# a drop\n")
            await asyncio.sleep(0.01)
        return True

    with RawServer(ordinary, get=get).running() as server:
        assert http.http_get(f"{server.url}/metrics", timeout_s=0.2) is None


# --- a clumsy hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--seed", str(2**63)], "--seed: '9223372036854775808' is not a whole number"),
        (["--seed", "9" * 4000], "--seed: "),
        (["--vocab", "0:99999999999999"], "--vocab: "),
        (["--vocab", "²:9"], "--vocab: "),
        (["--concurrency", "٣"], "--concurrency: "),
        (["--concurrency", "1_0"], "--concurrency: "),
        (["--rate", "1e9"], "--rate: '1e9' is not a positive number up to 10000"),
        (["--rate", "1", "--arrivals", "gamma", "--gamma-shape", "1e-300"], "--gamma-shape: "),
    ],
)
def test_what_no_command_can_mean_is_one_line(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        measure_options.read(["--url", "http://127.0.0.1:9", *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and what in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["measure", "--url", "http://127.0.0.1:9", "--model", ""], "--model"),
        (["measure", "--url", "http://127.0.0.1:9", "--out", " "], " "),
        (["measure", "--url", "http://127.0.0.1:9", "--api-key-env="], "--api-key-env="),
        (["check", ""], "check"),
        (["model", "qwen2.5-7b", "--gpu", ""], "--gpu"),
    ],
)
def test_an_argument_that_is_empty_is_refused(
    arguments: list[str], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As "$MODEL" of a variable that is not set: the first model listed would be measured as the one meant."""
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"servebook: {where}: an argument is empty")


@pytest.mark.parametrize("arguments", [[], ["check"], ["nope"], ["model", "m", "--gpus", "x"], ["model"]])
def test_a_command_that_cannot_be_read_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and said.endswith("see --help\n")


def test_a_point_that_must_last_longer_than_it_may_is_refused() -> None:
    options = ["--url", "http://127.0.0.1:9", "--min-seconds", "9", "--max-seconds", "1"]
    with pytest.raises(ServebookError, match="--min-seconds: 9 is more than --max-seconds 1"):
        measure_options.read(options)


def test_a_file_of_the_folders_name_is_refused_before_the_first_request(tmp_path: Path) -> None:
    with RawServer(ordinary).running() as server:
        told = here(server, "--out", str(tmp_path / "o"), "--json", str(tmp_path / "o"))
    assert told.returncode == 1 and "it is a folder" in told.stderr and server.asked == []


def test_an_open_loop_whose_next_request_is_due_next_year_ends_at_its_limit() -> None:
    """In warm-up nothing is waited for: neither the request's timeout nor the next arrival."""
    spec = PointSpec("s", "e", "r", "arrival_rate", 16, 8, rate_per_s=1e-8)
    with RawServer(ordinary).running() as server:
        began = time.monotonic()
        point = measure_point_sync(
            spec, url=server.url, model="m", load=Load(), slo=Slo(), run_dir=None, batching=True,
            vocab=range(256, 8000), rule=Rule(2, 4, 4, 0.0, 0.3),
        )  # fmt: skip
    assert point.requests == 0 and "in warm-up" in str(point.stop_reason)
    assert time.monotonic() - began < 300  # the timeout of a request is 600 s


def test_a_link_that_names_itself_is_one_line(tmp_path: Path) -> None:
    os.symlink("b", tmp_path / "a")
    os.symlink("a", tmp_path / "b")
    with RawServer(ordinary).running() as server:
        for option in ("--json", "--out", "--replay", "--lengths"):
            told = here(server, option, str(tmp_path / "a"))
            assert told.returncode == 1 and told.stderr.count("\n") == 1
    assert server.asked == []


def test_a_model_of_a_billion_layers_is_refused_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 10**9, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 512, "intermediate_size": 128}))
    assert main(["model", str(tmp_path)]) == 1
    assert "num_hidden_layers is 1e+09, more than any model has" in capsys.readouterr().err


# --- where results go ---------------------------------------------------------------------------------------------


def test_closed_standard_streams_are_opened() -> None:
    """As under cron, or after `<&-`: libuv ends a process whose event loop has one of their numbers."""
    code = "import os; from servebook import cli; cli._open_standard_streams(); "
    code += "assert all(os.fstat(n) for n in (0, 1, 2)); print('said to nobody', flush=True)"
    argv = ["bash", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "x", sys.executable, "-c", code]
    assert subprocess.run(argv, timeout=60, check=False).returncode == 0


def test_json_to_a_closed_stream_is_refused_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stdout__", None)
    with RawServer(ordinary).running() as server:
        told = here(server, "--json", "-")
    assert told.returncode == 1 and "it is closed" in told.stderr and server.asked == []


def test_a_point_that_cannot_be_stored_in_one_place_is_in_the_other_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the message says that the figures above are all that is kept."""

    def full(path: Path, *_: Any) -> Any:
        raise ServebookError("cannot write (No space left on device)", str(path))

    for broken, kept in ((["--json", "j"], "requests/measure/server/c0001.json"), (["--out", "o"], "j")):
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        if "--json" in broken:
            monkeypatch.setattr(json_file.JsonFile, "write", full)
        else:
            monkeypatch.setattr(measure_command.results, "write_point", full)
        with RawServer(ordinary).running() as server:
            told = here(server, "--json", "j", "--out", "o")
        assert told.returncode == 1 and "No space left" in told.stderr and "TTFT p50 ms" in told.stdout
        assert json.loads(((tmp_path / "o" / kept) if "/" in kept else tmp_path / kept).read_text())["requests"] == 4


def test_a_point_that_was_measured_into_the_folder_before_is_kept(tmp_path: Path) -> None:
    with RawServer(ordinary).running() as server:
        first = here(server, "--out", str(tmp_path), "--seed", "1")
        second = here(server, "--out", str(tmp_path), "--seed", "2")
    now_there, before = tmp_path / "requests/measure/server/c0001.json", "c0001.json.old1"
    assert "was measured here before" not in first.stdout
    assert f"c0001 was measured here before: kept as {now_there.with_name(before)}" in second.stdout
    assert [json.loads(p.read_text())["seed"] for p in (now_there, now_there.with_name(before))] == [2, 1]


def test_two_measurements_into_one_folder_are_one_after_the_other(tmp_path: Path) -> None:
    with RawServer(ordinary).running() as server, single_run(tmp_path):
        told = here(server, "--out", str(tmp_path))
    assert told.returncode == 1 and "another run is writing here" in told.stderr and server.asked == []
