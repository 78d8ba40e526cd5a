"""The kept H200 runs: what was frozen stays what it was, and today's predictor says no worse of them than it did."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servebook.run_folder import results

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("bench_predictor", ROOT / "benchmarks" / "bench_predictor.py")
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_predictor"] = bench
_spec.loader.exec_module(bench)

# Rows as `python benchmarks/bench_predictor.py --quick` prints them: run, engine, group, points, and of TTFT, TPOT and
# output tokens/s the mean absolute error (%) and the points inside the 80 % interval, as frozen and of the predictor of
# 2026-12-01. That one has learned from all of them; what the latest runs were told in ink is blind.
TABLE = """
earlier/h200-qwen2.5-7b               vllm  C=1     9   9.6   6   5.6   9   4.6   7   1.0   8   2.9   7   1.6   8
earlier/h200-qwen2.5-7b               vllm  C>1    13   8.3  11   9.1  10   3.8  11   1.7  10   2.0  13   1.6   9
earlier/h200-qwen2.5-7b               vllm  open    3  49.2   0  19.7   2  28.3   0  13.5   2  17.2   1   1.1   2
earlier/h200-qwen2.5-7b               hf    C=1     9  12.3   4  12.5   4  11.0   3  10.7   9  10.4   3  10.1   9
earlier/h200-qwen2.5-7b               hf    C>1     6  14.3   1  14.0   6  12.8   1  12.4   6  13.5   1  12.9   6
earlier/h200-qwen2.5-7b-fp8           vllm  C=1     2   1.5   2   3.7   2   1.1   2   1.2   1   1.0   2   1.2   2
earlier/h200-qwen2.5-7b-fp8           vllm  C>1    13  14.3  10   7.4  12   3.2  10   2.0   9   3.1  11   1.7  11
earlier/h200-qwen2.5-7b-repeat        vllm  C>1     5   8.5   5   8.2   5   2.7   5   2.1   4   1.6   5   1.1   4
earlier/h200-qwen3-8b                 vllm  C=1     2   3.9   2   0.2   2   0.3   2   0.3   2   0.1   2   0.0   2
earlier/h200-qwen3-8b                 vllm  C>1     8  23.4   7  17.4   6   3.4   6   1.2   7   3.5   6   2.1   7
earlier/h200-qwen3-8b                 vllm  again   5  26.4   3  25.4   2   2.4   5   1.4   4   3.7   4   0.5   5
latest/h200-qwen2.5-7b                vllm  C=1     9   4.9   9   4.3   9   0.6   9   0.6   9   1.5   9   1.4   9
latest/h200-qwen2.5-7b                vllm  C>1    13   6.6  13   6.9  12   1.6  13   1.1  11   1.4  13   1.4  12
latest/h200-qwen2.5-7b                vllm  open    3  29.0   1  14.7   1   7.4   3   8.9   2   4.0   2   5.4   1
latest/h200-qwen2.5-7b                hf    C=1     9   6.3   7   6.3   9  23.0   9  23.0   9  14.3   9  14.1   9
latest/h200-qwen2.5-7b                hf    C>1     6  13.7   6  15.7   6  14.3   6  16.6   6   7.0   6  12.8   6
latest/h200-qwen2.5-7b-fp8            vllm  C=1     2   1.5   2   1.7   2   1.5   1   1.5   1   1.0   2   1.1   2
latest/h200-qwen2.5-7b-fp8            vllm  C>1    13   7.7  12   6.8  12   3.4  12   1.3  11   3.3  12   1.5  13
latest/h200-qwen3-8b                  vllm  C=1     2  26.3   1  25.5   1   0.6   2   0.6   2   0.4   2   0.4   2
latest/h200-qwen3-8b                  vllm  C>1     8  20.4   4   7.0   8   2.0   8   0.9   8   1.8   8   0.8   8
latest/h200-qwen3-8b                  vllm  again   5  35.3   1  19.8   4   2.3   4   0.6   5   1.6   5   0.8   4
"""
# sha256 of predictions.json as it was written before it was packed, and of the datasheet's entry in it, which stands in
# commit f34ed35, older than any point of these runs
INK = {
    "h200-qwen2.5-7b": ("243a65769ba5a154", "897f3dd6f7e9f21a", ["datasheet", "calibrated:vllm", "calibrated:hf"]),
    "h200-qwen2.5-7b-fp8": ("21acbb4d9572b12d", "ac5eb4254fac3139", ["datasheet", "calibrated:vllm"]),
    "h200-qwen3-8b": ("155169e0dc5bdfb5", "fb7fff815135c2d7", ["datasheet", "calibrated:vllm"]),
}
LATEST = list(INK)
EARLIER = ["h200-qwen2.5-7b", "h200-qwen2.5-7b-fp8", "h200-qwen2.5-7b-repeat", "h200-qwen3-8b"]
RUNS = [f"earlier/{name}" for name in EARLIER] + [f"latest/{name}" for name in LATEST]
HELD_OUT = [(*bench.HELD_OUT, metric) for metric in bench.METRICS]
BARS = (0.12, 0.06, 0.06)  # of the pooled errors over HELD_OUT
SLACK = 0.01  # the order of a simulated queue's own noise


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, list[Any]]]:
    with bench.kept_runs() as found:
        yield found


@pytest.fixture(scope="module")
def runs(kinds: dict[str, list[Any]]) -> dict[str, Any]:
    found = {f"{kind}/{run.dir.name}": run for kind, members in kinds.items() for run in members}
    assert list(found) == RUNS
    return found


def sha256(value: Any) -> str:
    as_written = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    return hashlib.sha256(as_written.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", LATEST)
def test_the_frozen_predictions_are_those_of_the_run(runs, name):
    run = runs[f"latest/{name}"]
    ink = json.loads((run.dir / "predictions.json").read_text())
    written, datasheet, stages = INK[name]
    entries = ink["frozen"]
    assert sha256(ink) == written and sha256(entries[0]) == datasheet
    assert [e["stage"] for e in entries] == stages
    assert not any(e["late"] or e["additional"] for e in entries)
    for e in entries:  # ink before measuring
        engine = e["stage"].partition(":")[2]
        own = [p for p in run.points if engine in ("", p.engine)]
        held_out = [p for p in own if not engine or p.sweep != "calibration"]
        assert held_out and all(e["time_utc"].removesuffix("Z") <= p.started_at[:19] for p in held_out)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_as_frozen_and_today(runs, name):
    run = runs[name]
    frozen, now = bench.scores([run.frozen]), bench.scores([run.now])
    rows = [row.split() for row in TABLE.strip().splitlines() if row.split()[0] == name]
    assert {tuple(row[1:3]) for row in rows} == {key[:2] for key in frozen} == {key[:2] for key in now}
    for _, engine, group, points, *figures in rows:
        for i, metric in enumerate(bench.METRICS):
            key = engine, group, metric
            before, inside, after, inside_now = (float(x) for x in figures[4 * i : 4 * i + 4])
            assert frozen[key] == (pytest.approx(before / 100, abs=0.0006), inside, int(points)), key
            assert now[key][0] <= after / 100 + SLACK and now[key][1] >= inside_now - 1, key


@pytest.mark.parametrize("name", RUNS)
def test_each_error_is_below_each_peers_on_the_same_points(runs, name):
    run = runs[name]
    told = [run.now] if name.startswith("earlier/") else [run.frozen, run.now]  # those before were no better at Qwen3
    assert len(run.peers) == 2
    for own in map(bench.scores, ([cells] for cells in told)):
        for peer in (bench.scores([cells]) for cells in run.peers.values()):
            assert all(own[key][0] < peer[key][0] and own[key][2] == peer[key][2] for key in HELD_OUT)


def test_pooled_errors_stay_below_their_bars(kinds, runs):
    blind = bench.scores(run.frozen for run in kinds["latest"])
    now = bench.scores(run.now for run in runs.values())
    for key, bar in zip(HELD_OUT, BARS, strict=True):
        assert blind[key][0] <= bar and now[key][0] <= bar, key
    assert sum(now[key][2] for key in HELD_OUT) == 219
    assert 0.70 <= sum(now[key][1] for key in HELD_OUT) / 219 <= 0.90  # of intervals that say 80 %


@pytest.mark.parametrize("name", LATEST)
def test_rows_are_all_there_and_name_no_machine(runs, name):
    run = runs[f"latest/{name}"]
    total = 0
    for p in run.points:
        rows = results.rows_frame(run.dir, p.sweep, p.engine, p.point_id)
        measured = rows[(rows["phase"] == "measured") & rows["ok"]]
        assert len(measured) == p.requests
        total += len(rows)
        assert measured["ttft_s"].mean() == pytest.approx(p.ttft_mean_s, rel=1e-4)
    assert total > 2000
    kept = [f for f in run.dir.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in kept) < 1.6e6
    for f in kept:
        if f.suffix != ".parquet":
            assert not re.search(r"(?<![\w/:.)])/\w+/", f.read_text()), f  # no absolute path
