"""The kept H200 run: what was frozen stays what it was, and today's predictor says no worse of it than it did."""

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

# mean absolute error and points inside the 80 % interval: as frozen, and of the predictor of 2026-11-29, which had
# learned launches and what prepares them, host noise, the power cap, open loops and event loop from this very run
FROZEN = {
    ("vllm", "C > 1", "ttft_s"): (0.083, 11), ("vllm", "C > 1", "tpot_s"): (0.038, 11),
    ("vllm", "C > 1", "output_tok_per_s"): (0.020, 13), ("vllm", "open", "ttft_s"): (0.492, 0),
    ("vllm", "open", "tpot_s"): (0.283, 0), ("vllm", "open", "output_tok_per_s"): (0.172, 1),
    ("vllm", "C = 1", "ttft_s"): (0.096, 6), ("vllm", "C = 1", "tpot_s"): (0.046, 7),
    ("hf", "C > 1", "ttft_s"): (0.143, 1), ("hf", "C > 1", "tpot_s"): (0.128, 1), ("hf", "C = 1", "tpot_s"): (0.110, 3),
}  # fmt: skip
TODAY = {
    ("vllm", "C > 1", "ttft_s"): (0.102, 11), ("vllm", "C > 1", "tpot_s"): (0.012, 13),
    ("vllm", "C > 1", "output_tok_per_s"): (0.018, 13), ("vllm", "open", "ttft_s"): (0.172, 2),
    ("vllm", "open", "tpot_s"): (0.063, 3), ("vllm", "open", "output_tok_per_s"): (0.005, 3),
    ("vllm", "C = 1", "ttft_s"): (0.052, 9), ("vllm", "C = 1", "tpot_s"): (0.010, 9),
    ("hf", "C > 1", "ttft_s"): (0.130, 6), ("hf", "C > 1", "tpot_s"): (0.116, 6), ("hf", "C = 1", "tpot_s"): (0.102, 9),
}  # fmt: skip
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
