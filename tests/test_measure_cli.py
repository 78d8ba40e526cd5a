"""servebook measure: a table, a JSON file, an exit status, one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mock_server import Behaviour, serving
from servebook.errors import ServebookError
from servebook.measure_cli import main

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
        assert main(["--url", server.url, *FAST, "--requests", "100000", "--max-seconds", "1"]) == 0  # its deadline
        for bad in (["--ramp"], ["--ramp", "--concurrency", "4,2"], ["--turns", "2", "--rate", "5"]):
            with pytest.raises(ServebookError, match=r"stages that grow|waits for its answers"):
                main(["--url", server.url, *bad])
    assert [p["point"] for p in json.loads(out.read_text())] == ["c0001", "c0002"]
    printed = capsys.readouterr().out
    assert "turn 2: " in printed and "24 prompt tokens" in printed


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
    assert -0.001 < point["client_added_ttft_s"] < 0.03 and abs(point["client_added_tpot_s"]) < 0.005
    assert "at this load the client adds" in capsys.readouterr().out


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:1", "--concurrency", "0"])
    assert "'0' is no positive whole number" in capsys.readouterr().err
    with pytest.raises(ServebookError, match="cannot ask the server for its model"):
        main(["--url", "http://127.0.0.1:1"])
    with pytest.raises(ServebookError, match="NO_SUCH_KEY is not set"):
        main(["--url", "http://127.0.0.1:1", "--api-key-env", "NO_SUCH_KEY"])


def test_nothing_heavy_is_imported() -> None:
    code = "import servebook.measure_cli, sys; print([m for m in sys.modules if m in %r])"
    heavy = {"pandas", "scipy", "matplotlib", "torch", "transformers", "vllm", "papermill"}
    done = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
