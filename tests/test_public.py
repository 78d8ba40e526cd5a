"""The bench over published points: its form, and rows that it cannot take."""

from __future__ import annotations

import csv
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from servebook.predictor.simulated_clients import Prompt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import public_points  # noqa: E402

KEPT = ROOT / "outputs" / "published" / "public"


def test_every_row_is_scored_or_named(tmp_path):
    with (KEPT / "points.csv").open(encoding="utf-8") as f:
        some = [r for r in csv.DictReader(f) if r["model"].startswith("cfg:qwen2.5-0.5b")]
    some = [r for r in some if r["concurrency"] in ("1", "2", "8")]
    unknown = some[0] | {"gpu": "TPU-v9"}
    bad = [
        some[0] | change
        for change in (
            {"tp": "two"}, {"quant": "q5_k"}, {"dtype": "fp128"}, {"model": ""}, {"model": "nowhere"},
            {"ttft_ms": "27 ms"}, {"concurrency": ""}, {"concurrency": "-4"}, {"load": "tidal", "concurrency": "3"},
            {"tp": "3"}, {"ttft_ms": "", "tpot_ms": "", "output_tok_s": ""},
        )
    ]  # fmt: skip
    too_fast = some[0] | {"concurrency": "4", "tpot_ms": "0.5"}  # its weights alone need 3 ms
    # 32 clients' contexts alone need 10 ms a token of an L4: their requests cannot all take 1 s
    too_many = some[0] | {
        "concurrency": "32", "prompt_tokens": "8000", "ttft_ms": "500", "tpot_ms": "4", "output_tok_s": ""
    }  # fmt: skip
    (tmp_path / "models").mkdir()
    with (tmp_path / "points.csv").open("w", encoding="utf-8", newline="") as f:
        table = csv.DictWriter(f, list(some[0]))
        table.writeheader()
        table.writerows([*some, unknown, too_fast, too_many, *bad])
    bench = [sys.executable, str(ROOT / "benchmarks" / "bench_public.py")]
    asked = [*bench, "--data", str(tmp_path), "--json", "--jobs", "1"]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True, env=env).stdout)
    assert found["datasheet"]["tpot"]["n"] == 3 and found["datasheet"]["ttft"]["n"] == 4
    assert found["calibrated"]["tpot"]["n"] == 2  # C = 1 was learned from
    assert set(found["datasheet"]["ttft"]) == {"error", "median", "bias", "inside", "n"}
    assert all(0 <= found["datasheet"][m]["error"] < 1 for m in ("ttft", "tpot", "output"))
    assert list(found["by"]["gpu"]) == ["L4"] and set(found["by"]["source"]["wmx-l4"]) == {"datasheet", "calibrated"}
    named = "\n".join(found["failed"])
    assert len(found["failed"]) == 1 + len(bad) and "\n".join(map(str.strip, found["failed"])) == named
    whys = "TPU-v9", "tp is 'two'", "q5_k", "fp128", "names no model", "nowhere", "'27 ms'", "tells no load", "tidal"
    assert all(why in named for why in (*whys, "cannot be split", "no figure"))
    ruled_out = "\n".join(found["ruled_out"])
    assert len(found["ruled_out"]) == 3 and "weights alone" in ruled_out and ruled_out.count("32 at once") == 2


def test_a_folder_without_a_table_is_one_line(tmp_path):
    bench = [sys.executable, str(ROOT / "benchmarks" / "bench_public.py"), "--data", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(bench, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "there is no points.csv" in done.stderr and done.stderr.count("\n") == 1


def test_what_a_source_tells_beside_its_table_is_taken(tmp_path):
    told = {
        "where": {"gpu": "L4"}, "why": "its script",
        "cells": {"lengths": "equal", "max_num_batched_tokens": "prompt_tokens + concurrency + 1500", "hit_share": "1"},
    }  # fmt: skip
    (tmp_path / "sources.json").write_text(json.dumps({"one": {"tool": "not told", "told": [told]}}))
    cells = {"source": "one", "gpu": "L4", "concurrency": "8", "prompt_tokens": "512", "output_tokens": "16"}
    with (tmp_path / "points.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, [*cells, "lengths", "hit_share"])
        table.writeheader()
        table.writerows([cells, cells | {"gpu": "T4"}, cells | {"source": "another"}])
    known = public_points.sources(tmp_path, KEPT)
    row, *others = public_points.read(tmp_path, known)
    assert row.whole("max_num_batched_tokens") == 2020
    assert public_points.prompts_of(row, 2, True) == [Prompt(512, 16, 512)] * 2  # known to be equal
    for other in others:
        assert other.whole("max_num_batched_tokens") is None and other.cells["hit_share"] == ""
    assert known["wmx-l4"]["tool"] == "vllm bench serve"  # those kept here are known too


def test_a_row_that_is_the_mean_of_runs_is_predicted_as_such():
    row = public_points.Row({"hit_share": "0.667", "run_hit_shares": "0 1 1", "prompt_tokens": "48"})
    runs = public_points.runs_of(row)
    assert [(run.number("hit_share"), round(weight, 3)) for run, weight in runs] == [(0.0, 0.333), (1.0, 0.667)]
    assert public_points.runs_of(public_points.Row({"hit_share": "0.5"}))[0][1] == 1.0


def test_the_first_prompts_of_a_run_may_be_cached():
    cells = {"lengths": "fixed", "prompt_tokens": "64", "output_tokens": "8", "hit_share": "0.5", "cached_prompts": "1"}
    assert public_points.prompts_of(public_points.Row(cells), 2, False) == [Prompt(64, 8, 64), Prompt(64, 8, 0)]
    del cells["cached_prompts"]
    assert public_points.prompts_of(public_points.Row(cells), 2, False) == [Prompt(64, 8, 32)] * 2


def test_pairs_of_set_ups_are_counted(tmp_path):
    """Two cards at one load, by every figure that the rows have."""
    with (KEPT / "points.csv").open(encoding="utf-8") as f:
        one = next(r for r in csv.DictReader(f) if r["model"] == "cfg:qwen2.5-0.5b" and r["concurrency"] == "2")
    slow = one | {"gpu": "A40", "tpot_ms": "2.2", "output_tok_s": ""}
    fast = one | {"gpu": "H100-SXM", "tpot_ms": "1.0", "output_tok_s": ""}
    (tmp_path / "models").mkdir()
    with (tmp_path / "points.csv").open("w", encoding="utf-8", newline="") as f:
        table = csv.DictWriter(f, list(one))
        table.writeheader()
        table.writerows([slow, fast])
    bench = [sys.executable, str(ROOT / "benchmarks" / "bench_choose.py"), "--public", "--data", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(bench, capture_output=True, text=True, env=env)
    counts = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts == {"cost": 1, "output": 0, "tpot": 1, "ttft": 0, "all": 2}, "cost by Little's law from the latencies"


def test_answers_that_are_cut_keep_the_mean_that_was_measured():
    rng = random.Random(1)
    for mean in (60, 100, 120):
        lengths = [public_points._answer(mean, 128, rng) for _ in range(4000)]
        assert max(lengths) == 128 and statistics.fmean(lengths) == pytest.approx(mean, rel=0.02)
