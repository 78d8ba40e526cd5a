"""The published tables are scored from the command line, without a GPU and without a network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servebook.cli import capacity as capacity_cli
from servebook.cli.command import main
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.run_folder import published

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("run", "bars"),
    [
        (
            "a40-qwen2.5-7b",
            {
                ("vllm", "ttft_s"): 0.06,
                ("vllm", "tpot_s"): 0.04,
                ("vllm", "decode_tok_per_s"): 0.04,
                ("hf", "ttft_s"): 0.03,
            },
        ),
        ("a100-qwen3-8b", {("vllm", "output_tok_per_s"): 0.045, ("vllm", "tpot_s"): 0.045}),
    ],
)
def test_published_points_are_predicted_from_c_1_alone(run, bars):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "servebook.cli",
            "predict",
            f"params/{run}.yaml",
            "--json",
            "--calibration",
            f"outputs/published/{run}.csv",
        ],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    errors = {(s["engine"], s["metric"]): s["mean_abs_error"] for s in json.loads(done.stdout)["scored"]}
    for key, bar in bars.items():
        assert errors[key] <= bar, key


def test_a_file_that_is_no_table_of_points_is_one_line(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ServebookError, match="lacks the columns concurrency"):
        published.read(tmp_path / "x.csv")
    with pytest.raises(ServebookError, match="cannot read measured points"):
        published.read(tmp_path / "y.csv")


def test_capacity_says_what_meets_the_service_level():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "servebook.cli",
            "capacity",
            "params/a40-qwen2.5-7b.yaml",
            "--gpu",
            "H200=3.5",
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    carried = {(r["engine"], r["case"]): r["by_rate"] for r in json.loads(done.stdout)}
    assert carried["vllm", "H200"]["rate_per_s"] > 5 * carried["vllm", "as it is"]["rate_per_s"]
    assert carried["vllm", "as it is"]["rate_per_s"] > 10 * carried["hf", "as it is"]["rate_per_s"]


HEAD = "sweep,engine,point,concurrency,prompt_tokens,output_tokens,ttft_mean_s,tpot_mean_s,decode_tok_per_s\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "contains no points"),
        (
            HEAD + "s,vllm,c1,1,512,128,0.1,0.02,30\ns,vllm,c2,2,512,128,fast,0.02,30\n",
            r"point 2: ttft_mean_s is 'fast'",
        ),
        (
            HEAD + "s,vllm,c1,1,512,128,0.1,0.02,-\n",
            r"point 1: decode_tok_per_s is '-'. Write a positive number, or leave",
        ),
        *(
            (
                HEAD + f"s,vllm,c1,1,512,128,{text},0.02,\n",
                rf"ttft_mean_s is '{text}'\. Write a positive number, or leave",
            )
            for text in ("-0.1", "0.0", "inf", "-inf", "nan", "NaN", "NA", "null")
        ),
        (HEAD + "s,vllm,c1,,512,128,0.1,0.02,\n", r"concurrency is empty\. Write a positive whole number$"),
        (HEAD + "s,vllm,c1,1.5,512,128,0.1,0.02,\n", r"concurrency is '1.5'\. Write a positive whole number$"),
        (HEAD + "s,vllm,c1,nan,512,128,0.1,0.02,\n", r"concurrency is 'nan'"),
        (HEAD + "s,vllm,c1,1,512,128,0,1,0,02,\n", r"has more cells than column names"),
        (
            HEAD.replace("\n", ",itl_p99_s\n") + "s,vllm,c1,1,512,128,1,1,1,inf\n",
            r"itl_p99_s is 'inf'\. Write a number",
        ),
        (HEAD.replace("\n", ",cache_hit_share\n") + "s,vllm,c1,1,512,128,1,1,1,1.2\n", r"Write a share from 0 to 1"),
        ('a\n1,2\n1,2,3\n"', "cannot read measured points"),
        ("", "cannot read measured points"),
    ],
)
def test_measured_points_that_are_none_are_one_line(tmp_path, capsys, text, said):
    (tmp_path / "x.csv").write_text(text)
    assert main(["predict", str(ROOT / "params/a40-qwen2.5-7b.yaml"), "--calibration", str(tmp_path / "x.csv")]) == 1
    shown = capsys.readouterr()
    assert re.search(said, shown.err.rstrip("\n")) and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize("gpu", ["H200=-3", "H200=nan", "H200=inf", "H200=abc", "H200=", "=3"])
def test_a_price_is_a_number_from_zero_on(capsys, gpu):
    assert main(["capacity", str(ROOT / "params/a40-qwen2.5-7b.yaml"), "--gpu", gpu]) == 1
    assert capsys.readouterr().err.endswith("Write NAME=PRICE, as in H200=3.50\n")


def test_the_table_of_capacity_names_its_loops_and_its_currency():
    run = params.read_file(ROOT / "params/a40-qwen2.5-7b.yaml")
    head = capacity_cli.text([], 512, 128, run, False).splitlines()
    assert head[1].split() == ["closed", "loop", "open", "loop"] and head[2].endswith("USD/1M tokens")


@pytest.mark.parametrize(
    "command",
    [
        ["capacity", "--prompt-tokens", "-5"],
        ["capacity", "--output-tokens", "0"],
        ["plan", "--budget-minutes", "nan"],
        ["plan", "--budget-cost", "-1"],
    ],
)
def test_figures_that_mean_nothing_are_one_line(capsys, command):
    assert main([command[0], str(ROOT / "params/a40-qwen2.5-7b.yaml"), *command[1:]]) == 1
    err = capsys.readouterr().err
    assert f"servebook: {command[1]}: " in err and err.count("\n") == 1


def test_a_budget_of_money_needs_a_price(tmp_path, capsys):
    text = (ROOT / "params/demo.yaml").read_text().replace("  price_per_hour: 0.10", "  # price_per_hour: 0.10")
    (tmp_path / "p.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "p.yaml"), "--budget-cost", "1"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("servebook: hardware.price_per_hour: --budget-cost needs a price. Set it to")
    assert told.err.count("\n") == 1 and not told.out


def test_predictions_are_a_table_with_a_line_a_point(capsys):
    assert main(["predict", str(ROOT / "params/demo.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["sweep", "engine", "point", "TTFT", "ms"] and lines[0].count("80 % interval") == 3
    assert len({line.split()[0] + line.split()[1] + line.split()[2] for line in lines[1:]}) == len(lines) - 1
    csv = str(ROOT / "outputs/published/a40-qwen2.5-7b.csv")
    assert main(["predict", str(ROOT / "params/a40-qwen2.5-7b.yaml"), "--calibration", csv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "decode tok/s" in lines[0] and lines[0].count("measured") == 3
    assert len(lines[: lines.index("")]) == len(published.points("a40-qwen2.5-7b")) + 1
    assert any(re.match(r"vllm +TTFT ms +5 +\d", line) for line in lines)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("1-128", "[1, 2, 4, 8, 16, 32, 64, 128]"), ("8", "[8]"), ("3..20", "[3, 6, 12, 20]"), ("'1, 2'", "[1, 2]")],
)
def test_a_list_that_is_none_is_told_what_to_write(tmp_path, capsys, given, meant):
    text = re.sub(r"concurrency: \[.*\]", f"concurrency: {given}", (ROOT / "params/demo.yaml").read_text(), count=1)
    (tmp_path / "p.yaml").write_text(text)
    assert main(["check", str(tmp_path / "p.yaml")]) == 1
    assert f"Write {meant}" in capsys.readouterr().err
    (tmp_path / "p.yaml").write_text(text.replace(f"concurrency: {given}", f"concurrency: {meant}"))
    assert main(["check", str(tmp_path / "p.yaml")]) == 0  # what it says works


def test_a_plan_stays_within_its_budget_and_names_the_limit_that_keeps_every_sweep(capsys):
    file = str(ROOT / "params/a40-qwen2.5-7b.yaml")
    for minutes in (1, 5, 20):
        assert main(["plan", file, "--budget-minutes", str(minutes), "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["within_budget"] and plan["kept_s"] <= 60 * minutes
        kept = {r["engine"] for r in plan["rows"] if not r["dropped"] and r["wall_s"]}
        assert all(
            any(r["engine"] == e and r["sweep"] == "start" for r in plan["rows"] if not r["dropped"]) for e in kept
        )
    limit = plan["longest_point_s"] + 1.5
    first = {(r["sweep"], r["engine"]): r["wall_s"] for r in reversed(plan["rows"]) if r["wall_s"]}
    shortened = (v if s in ("start", "calibration") else min(v, limit) for (s, _), v in first.items())
    calibrations = sum(r["wall_s"] for r in plan["rows"] if r["sweep"] == "calibration")
    once = sum(v for (s, _), v in first.items() if s == "calibration")
    assert sum(shortened) - once + calibrations == pytest.approx(20 * 60, abs=10)
    assert main(["plan", file, "--budget-minutes", "20"]) == 0
    assert f"load.max_seconds: {plan['longest_point_s']:g} would keep" in capsys.readouterr().out


def test_capacity_says_why_an_open_loop_carries_more():
    run = params.read_file(ROOT / "params/a40-qwen2.5-7b.yaml")
    closed = {"concurrency": 7, "output_tok_per_s": 220.0}
    rate = {"rate_per_s": 5.0, "output_tok_per_s": 660.0, "cost_per_million_output_tokens": None}
    row = {"engine": "vllm", "case": "as it is", "note": None, "by_concurrency": closed, "by_rate": rate}
    assert "arrivals of an open loop are spread" in capacity_cli.text([row], 512, 128, run, False)
    assert "arrivals of an open loop are spread" not in capacity_cli.text(
        [{**row, "by_rate": {**rate, "output_tok_per_s": 200.0}}], 512, 128, run, False
    )


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_command_that_prints_imports_nothing_that_takes_seconds(command: str) -> None:
    code = (
        f"import sys; from servebook.cli import main; status = main([{command!r}, 'params/demo.yaml']); "
        "print(sorted({'pandas', 'matplotlib', 'aiohttp', 'torch', 'transformers', 'vllm'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr


CAPACITY = """
run: capacity
title: Capacity
model: {config: qwen2.5-7b, weights: dummy}
hardware: {gpu: H200, price_per_hour: 3.5}
engines: {vllm: {kind: vllm, max_model_len: 8192}}
slo: {ttft_s: 0.5, tpot_s: 0.03}
workloads: {talk: {prompt_tokens: 200, output_tokens: 150, turns: 4}}
sweeps: {a: {kind: concurrency, workload: talk, concurrency: [1]}}
"""


def test_capacity_is_of_the_runs_workload(tmp_path, capsys):
    (tmp_path / "p.yaml").write_text(CAPACITY)
    assert main(["capacity", str(tmp_path / "p.yaml"), "--workload", "talk", "--json"]) == 0
    rows = {r["case"]: r for r in json.loads(capsys.readouterr().out)}
    # turns find what was said before in the cache: more clients than of prompts that are all new, and no what-if of it
    assert rows["as it is"]["by_concurrency"]["concurrency"] > 64 and not any("cached" in case for case in rows)
    assert rows["as it is"]["by_rate"] is None


def test_capacity_takes_the_words_of_measure(tmp_path):
    (tmp_path / "p.yaml").write_text(CAPACITY)
    run = params.read_file(tmp_path / "p.yaml")
    assert capacity_cli.requests_of(run, None, None, None) is capacity_cli.requests_of(run, "talk", None, None)
    asked = capacity_cli.requests_of(run, None, "800:1200", "64")
    assert asked.varies and asked.mean_tokens() == (1000, 64)
    assert capacity_cli.requests_of(run, None, "800", None).mean_tokens() == (800, 150)
    for words, what in (
        (("nope", None, None), "no workload 'nope'"), (("talk", "5", None), "would be ignored"),
        ((None, "x", None), "'x' is not a length"), ((None, "-5", None), "--prompt-tokens"),
    ):  # fmt: skip
        with pytest.raises(ServebookError, match=what):
            capacity_cli.requests_of(run, *words)
