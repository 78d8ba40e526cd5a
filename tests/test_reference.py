"""The kept H200 runs: what was frozen stays what it was, and today's predictor says no worse of them than it did."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from servebook import results

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("bench_predictor", ROOT / "benchmarks" / "bench_predictor.py")
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_predictor"] = bench
_spec.loader.exec_module(bench)

# mean absolute error and points inside the 80 % interval of the first run: as frozen, and of the predictor of
# 2026-11-29, which has learned from this very run and its repeat. Its open loops stand worse than they did before it
# knew how fast an H200 reads KV (TTFT 0.172, TPOT 0.063): a faster step hid launches that are too short there
FROZEN = {
    ("vllm", "C > 1", "ttft_s"): (0.083, 11), ("vllm", "C > 1", "tpot_s"): (0.038, 11),
    ("vllm", "C > 1", "output_tok_per_s"): (0.020, 13), ("vllm", "open", "ttft_s"): (0.492, 0),
    ("vllm", "open", "tpot_s"): (0.283, 0), ("vllm", "open", "output_tok_per_s"): (0.172, 1),
    ("vllm", "C = 1", "ttft_s"): (0.096, 6), ("vllm", "C = 1", "tpot_s"): (0.046, 7),
    ("hf", "C > 1", "ttft_s"): (0.143, 1), ("hf", "C > 1", "tpot_s"): (0.128, 1), ("hf", "C = 1", "tpot_s"): (0.110, 3),
}  # fmt: skip
TODAY = {
    ("vllm", "C > 1", "ttft_s"): (0.078, 12), ("vllm", "C > 1", "tpot_s"): (0.019, 13),
    ("vllm", "C > 1", "output_tok_per_s"): (0.017, 13), ("vllm", "open", "ttft_s"): (0.243, 2),
    ("vllm", "open", "tpot_s"): (0.136, 3), ("vllm", "open", "output_tok_per_s"): (0.008, 3),
    ("vllm", "C = 1", "ttft_s"): (0.039, 9), ("vllm", "C = 1", "tpot_s"): (0.010, 9),
    ("hf", "C > 1", "ttft_s"): (0.140, 6), ("hf", "C > 1", "tpot_s"): (0.124, 6), ("hf", "C = 1", "tpot_s"): (0.107, 9),
}  # fmt: skip
# vLLM at C > 1, TTFT, TPOT, output tokens/s: as frozen, blind; and today's. Constants come from the first run
# and its repeat; fp8 and qwen3 were looked at too when two forms did as well there, so no figure of today's is blind
OTHERS = {
    "h200-qwen2.5-7b-repeat": (((0.085, 5), (0.027, 5), (0.016, 5)), ((0.067, 5), (0.019, 5), (0.006, 5))),
    "h200-qwen2.5-7b-fp8": (((0.143, 10), (0.032, 10), (0.031, 11)), ((0.094, 11), (0.039, 11), (0.032, 11))),
    "h200-qwen3-8b": (((0.234, 7), (0.034, 6), (0.035, 6)), ((0.192, 7), (0.017, 7), (0.027, 7))),
}
BARS = (0.12, 0.06, 0.06)  # of the mean absolute errors; and each below the peer's
ABOVE = {("h200-qwen3-8b", "ttft_s")}  # one point there took 0.39 and 1.11 s to a first token in two measurements
SLACK = 0.01  # the order of a simulated queue's own noise


@pytest.fixture(scope="module")
def run():
    return bench.Reference()


def test_the_frozen_predictions_are_those_of_the_run(run):
    ink = json.loads((run.dir / "predictions.json").read_text())
    as_written = json.dumps(ink, indent=1, ensure_ascii=False) + "\n"  # before it was packed
    assert hashlib.sha256(as_written.encode()).hexdigest().startswith("9618748d34d5dd16")
    entries = ink["frozen"]
    assert [e["stage"] for e in entries] == ["datasheet", "calibrated:vllm", "calibrated:hf"]
    assert not any(e["late"] for e in entries)
    for e in entries:  # ink before measuring
        engine = e["stage"].partition(":")[2]
        own = [p for p in run.points if engine in ("", p["engine"])]
        held_out = [p for p in own if not engine or p["sweep"] != "calibration"]
        assert held_out and all(e["time_utc"].removesuffix("Z") <= p["started_at"][:19] for p in held_out)


def test_errors_of_what_was_frozen(run):
    found = run.scores(run.frozen)
    for key, (error, inside) in FROZEN.items():
        assert found[key][0] == pytest.approx(error, abs=0.0006)
        assert found[key][1] == inside


def test_todays_predictor_is_no_worse_on_it(run):
    found = run.scores(run.now())
    for key, (error, inside) in TODAY.items():
        assert found[key][0] <= error + SLACK, key
        assert found[key][1] >= inside - 1, key


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_runs_as_frozen_and_today(name):
    other = bench.Reference(name)
    frozen, now = other.scores(other.frozen), other.scores(other.now())
    said = [other.scores([p]) for p in other.peers()]
    assert len(said) == 2
    for metric, before, after, bar in zip(other.METRICS, *OTHERS[name], BARS, strict=True):
        key = ("vllm", "C > 1", metric)
        assert frozen[key][0] == pytest.approx(before[0], abs=0.0006) and frozen[key][1] == before[1], key
        assert now[key][0] <= after[0] + SLACK and now[key][1] >= after[1] - 1, key
        assert now[key][0] <= bar or (name, metric) in ABOVE, key
        assert all(now[key][0] < peer[key][0] for peer in said), key


def test_rows_are_all_there_and_name_no_machine(run):
    total = 0
    for p in run.points:
        rows = results.rows_frame(run.dir, p["sweep"], p["engine"], p["point"])
        measured = rows[(rows["phase"] == "measured") & rows["ok"]]
        assert len(measured) == p["requests"]
        total += len(rows)
        assert measured["ttft_s"].mean() == pytest.approx(p["ttft_mean_s"], rel=1e-4)
    assert total > 5000
    kept = [f for f in run.dir.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in kept) < 2.5e6
    for f in kept:
        if f.suffix != ".parquet":
            assert not re.search(r"(?<![\w/:.)])/\w+/", f.read_text()), f  # no absolute path
