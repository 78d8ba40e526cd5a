"""servebook measure: a table, a JSON file, an exit status, one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mock_server import Behaviour, serving
from servebook.cli import measure as measure_cli
from servebook.cli.measure import main
from servebook.common.errors import ServebookError

FAST = ["--prompt-tokens", "8", "--output-tokens", "8", "--requests", "6", "--warmup", "2", "--jitter", "0.001"]


def test_several_concurrencies_make_a_table_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.json"
    with serving() as server:
        assert main(["--url", server.url, "--concurrency", "1,3", *FAST, "--json", str(out)]) == 0
        prompts = [r.prompt for r in server.records if len(r.prompt) == 8]
        assert main(["--url", server.url + "/v1", "--model", "mock", *FAST]) == 0
        assert len({r.prompt for r in server.records}) >= len(prompts) + 6  # another command, other prompts
    assert [p["point"] for p in json.loads(out.read_text())] == ["c0001", "c0003"]
    printed = capsys.readouterr().out
    assert "TTFT p50 ms" in printed and "c0003" in printed


def test_a_ramp_conversations_and_lengths_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, lengths = tmp_path / "m.json", tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n10,4\n20,6\n")
    with serving() as server:
        ramp = ["--ramp", "--concurrency", "1,2", "--requests", "6", "--warmup", "2", "--jitter", "0.001"]
        assert main(["--url", server.url, *ramp, "--lengths", str(lengths), "--json", str(out)]) == 0
        assert {len(r.prompt) for r in server.records[1:]} == {10, 20}
        assert main(["--url", server.url, "--turns", "2", *FAST]) == 0
        assert main(["--url", server.url, *FAST, "--requests", "100000", "--max-seconds", "3"]) == 0  # its deadline
        for bad in (["--ramp"], ["--ramp", "--concurrency", "4,2"], ["--turns", "2", "--rate", "5"]):
            with pytest.raises(ServebookError, match=r"grow from stage to stage|need a closed loop"):
                main(["--url", server.url, *bad])
    assert [p["point"] for p in json.loads(out.read_text())] == ["c0001", "c0002"]
    printed = capsys.readouterr().out
    assert "turn 2: " in printed and "24 prompt tokens" in printed


@pytest.mark.parametrize(("vocab", "highest"), [(0, 8000), (2048, 2000), (256, 256)])
def test_token_ids_are_such_as_the_server_has(vocab: int, highest: int, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Behaviour(vocab=vocab)) as server:
        assert main(["--url", server.url, *FAST, "--prompt-tokens", "200"]) == 0
        asked = {i for r in server.records for i in r.prompt}
    assert highest / 2 < max(asked) < highest
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "256:8000, 100:2000, 64:256" in " ".join(capsys.readouterr().out.split())


def test_a_server_that_has_no_such_ids_is_told_what_to_send_instead() -> None:
    with serving(Behaviour(text_only=True)) as server:
        with pytest.raises(ServebookError, match=r"must be a string.*--vocab LOW:HIGH.*--text"):
            main(["--url", server.url, *FAST])
        assert main(["--url", server.url, *FAST, "--text"]) == 0
    with serving(Behaviour(vocab=500)) as server, pytest.raises(ServebookError, match=r"within 0 and 499.*--vocab"):
        main(["--url", server.url, *FAST, "--vocab", "100:800"])


def test_an_invalid_point_is_a_non_zero_exit(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Behaviour(usage=False, running_usage=False)) as server:
        assert main(["--url", server.url, *FAST]) == 1
    assert "no usage" in capsys.readouterr().out


def test_open_loop_with_rows(tmp_path: Path) -> None:
    with serving() as server:
        assert main(["--url", server.url, "--rate", "50", "--arrivals", "constant", *FAST, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "requests/measure/server/r50.000.jsonl").exists() and (tmp_path / "points.csv").exists()


def test_the_client_knows_what_it_adds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = Behaviour(ttft_s=0.03, itl_s=0.01)
    with serving(slow) as server:
        main(["--url", server.url, "--concurrency", "2", *FAST, "--self-check", "--json", str(tmp_path / "m.json")])
    point = json.loads((tmp_path / "m.json").read_text())
    assert isinstance(point["client_added_ttft_s"], float) and isinstance(point["client_added_tpot_s"], float)
    assert "at C = 2 the client adds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--concurrency", "0", "not a positive whole number"), ("--rate", "-1", "not a positive number"),
        ("--rate", "nan", "not a positive number"), ("--rate", "1,inf", "not a positive number"),
        ("--gamma-shape", "0", "not a positive number"), ("--max-seconds", "-3", "not a positive number"),
        ("--jitter", "-1", "not a number from 0 on"), ("--warmup", "-1", "not a whole number"),
        ("--temperature", "-7", "not a number from 0 on"), ("--top-p", "7", "a share"), ("--top-k", "x", "a positive"),
        ("--prompt-tokens", "normal:inf,1", "is not a length"),
        ("--shared-prefix", "-6", "not a whole number"), ("--shared-prefix", "100%", "not a percentage"),
        ("--prompt-tokens", "0", "is not a length"), ("--vocab", "5:5", "a range"), ("--seed", "-1", "a whole number"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_one_line(
    option: str, value: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--url", "http://127.0.0.1:1", option, value])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and what in told and option in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["", "foo", "127.0.0.1:8000", "localhost:8000", "ftp://127.0.0.1:1", "http://127.0.0.1:99999", "http://[::1"]
)
def test_what_is_no_url_is_said_at_once(url: str) -> None:
    with pytest.raises(ServebookError, match="not a server's URL"):
        main(["--url", url, "--model", "m"])


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--concurrency", "2,4,2"], "names the same load twice"),
        (["--rate", "0.10001,0.1"], "names the same load twice"),
        (["--shared-prefix", "512"], "is not shorter than the prompt"),
        (["--arrivals", "gamma"], "--arrivals: would be ignored. Give --rate, or leave it out"),
        (["--replay", "f", "--arrivals", "constant"], "--arrivals: would be ignored"),
        (["--rate", "1", "--gamma-shape", "0.5"], "--gamma-shape: would be ignored. Give --arrivals gamma"),
        (["--lengths", "f", "--prompt-tokens", "9"], "would be ignored. Leave it out: --lengths gives the lengths"),
        (["--chat", "--vocab", "5:9"], "--vocab: would be ignored. Leave it out: --text and --chat send words"),
        (["--lengths", "no/such/file"], "no/such/file: cannot be read"),
        ([], "cannot ask the server for its model"),
        (["--model", "m"], "no server answers"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(options: list[str], fault: str) -> None:
    with pytest.raises(ServebookError, match=fault):
        main(["--url", "http://127.0.0.1:1", *options])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "No such file"), ("", "no arrival"), ("\n \n", "no arrival"), ("0\nx\n", "not a list of"),
        ("0\nnan\n1\n", "not a number"), ("0\ninf\n", "not a number"), ("\x00\xff", "not a list of"),
    ],
)  # fmt: skip
def test_a_replay_that_holds_no_arrivals_is_one_line(tmp_path: Path, text: str | None, fault: str) -> None:
    path = tmp_path / "arrivals"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ServebookError, match=fault):
        main(["--url", "http://127.0.0.1:1", "--replay", str(path)])


def test_a_replay_is_measured_whole_and_counts_from_its_first_arrival(tmp_path: Path) -> None:
    path, out = tmp_path / "arrivals", tmp_path / "m.json"
    path.write_text("\n".join(str(1.7e9 + 0.01 * k) for k in range(120)[::-1]))  # times of day, in any order
    with serving() as server:
        main(["--url", server.url, "--replay", str(path), *FAST[:4], "--json", str(out)])
        assert len(server.records) == 1 + 120
    point = json.loads(out.read_text())
    assert point["requests"] + point["warmup_failures"] >= 105 and point["failures"] == 0
    assert point["stop_reason"] == "end of the replayed arrivals reached"


def test_arrivals_that_outrun_the_client_end_at_the_deadline() -> None:
    with serving(Behaviour(ttft_s=0.5)) as server:
        assert main(["--url", server.url, "--rate", "10000", *FAST[:4], "--max-seconds", "1", "--timeout", "5"]) == 1


def test_a_prefix_may_be_shared_at_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        prompts = ["--prompt-tokens", "40", "--output-tokens", "4", "--requests", "8", "--warmup", "2"]
        slo = ["--slo-ttft", "10", "--slo-e2e", "0.000001"]
        main(["--url", server.url, *prompts, "--jitter", "0", "--shared-prefix", "50%", *slo])
        sent = [r.prompt for r in server.records if len(r.prompt) == 40]
    assert len({p[:20] for p in sent}) == 1 and len({p[20:] for p in sent}) == len(sent)
    printed = capsys.readouterr().out
    assert "measured for" in printed and "max_requests (8) reached" in printed
    assert "goodput 0.00/s: 0.0% of attempted requests" in printed and "by the clock" in printed
    assert "client: " in printed and "of a core" in printed


@pytest.mark.parametrize("fault", [ServebookError("no server answers", "there"), KeyboardInterrupt()])
def test_what_a_point_came_to_is_there_when_the_next_ends_early(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, measure = tmp_path / "m.json", measure_cli.measure_ramp_sync

    def second_fails(specs: Any, **options: Any) -> Any:
        if specs[0].concurrency == 2:
            raise fault
        return measure(specs, **options)

    monkeypatch.setattr(measure_cli, "measure_ramp_sync", second_fails)
    with serving() as server:
        command = ["--url", server.url, "--concurrency", "1,2", *FAST, "--json", str(out), "--out", str(tmp_path)]
        if isinstance(fault, ServebookError):
            with pytest.raises(ServebookError, match="no server answers"):
                main(command)
        else:
            assert main(command) == 130
            assert "interrupted; points kept: 1" in capsys.readouterr().err
    assert [p["point"] for p in json.loads(out.read_text())] == ["c0001"]
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 2


def test_nothing_heavy_is_imported() -> None:
    code = "import servebook.cli.measure, sys; print([m for m in sys.modules if m in %r])"
    heavy = {"pandas", "scipy", "matplotlib", "torch", "transformers", "vllm", "papermill"}
    done = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
