"""A kept run says of every point what the run itself said, in less space."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.run_folder import results
from servebook.run_folder.pack import pack


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "engines").mkdir(parents=True)
    (folder / "params.yaml").write_text("run: run\n")
    (folder / "predictions.json").write_text('{"frozen": [ ]}')
    (folder / "engines" / "e.json").write_text("{}")
    (folder / "engines" / "e.log").write_text("a log")
    for k, point in enumerate(("c0001", "c0002")):
        writer = results.RowWriter(results.rows_path(folder, "s", "e", point))
        for i in range(3):
            writer.write({"i": i, "phase": "measured", "ok": i < 2, "error": None if i < 2 else "HTTP 500",
                          "scheduled_s": None, "sent_s": 40.123456 + i, "first_s": 40.223457 + i if i < 2 else None,
                          "last_s": 40.733333 + i if i < 2 else None, "prompt_tokens": 512 + k,
                          "output_tokens": 128, "first_event_tokens": 1, "ttft_s": 0.100001 if i < 2 else None,
                          "tpot_s": 0.004015 if i < 2 else None, "e2e_s": 0.609877 if i < 2 else None,
                          "gaps_ms": [5.01, 5.02]})  # fmt: skip
        writer.close()
        asked = {"prompt_tokens": 512, "output_tokens": 128}
        results.write_point(folder, MeasuredPoint(sweep="s", engine="e", point_id=point, requests=2, **asked))
    series = results.series_path(folder, "s", "e", "c0001")
    series.parent.mkdir(parents=True)
    series.write_text(
        "t_s,running,generation_tokens,gpu_memory_bytes\n0.1,2.0,877064.0,137929555968\n1.1,,877065.0,1\n"
    )
    results.write_points_csv(folder)
    return folder


def test_rows_series_and_points_are_the_same(run, tmp_path):
    kept = pack(run, tmp_path / "kept")
    assert results.read_points(kept) == results.read_points(run)
    for point in ("c0001", "c0002"):
        before, after = (results.rows_frame(d, "s", "e", point) for d in (run, kept))
        assert len(before) == 3
        pd.testing.assert_frame_equal(
            after[list(after)], before[list(after)], check_dtype=False, atol=4e-6, rtol=0, check_like=True
        )
        assert "gaps_ms" in before and set(before) - set(after) <= {"gaps_ms"}
    before, after = (results.series_frame(d, "s", "e", "c0001") for d in (run, kept))
    pd.testing.assert_frame_equal(after, before, check_dtype=False, atol=1e-6, rtol=0)
    assert results.series_frame(kept, "s", "e", "c0002").empty
    assert json.loads((kept / "predictions.json").read_text()) == json.loads((run / "predictions.json").read_text())
    assert sorted(p.name for p in kept.rglob("*") if p.is_file()) == [
        "c0001.json", "c0002.json", "e.json", "params.yaml", "points.csv", "predictions.json", "rows.parquet",
        "series.parquet",
    ]  # fmt: skip


def test_a_packed_run_can_be_packed_again(run, tmp_path):
    once = pack(run, tmp_path / "once")
    twice = pack(once, tmp_path / "twice")
    pd.testing.assert_frame_equal(*(results.rows_frame(d, "s", "e", "c0002") for d in (once, twice)))


def test_what_cannot_be_packed_is_one_line(run, tmp_path):
    with pytest.raises(ServebookError, match="no run is stored here"):
        pack(tmp_path, tmp_path / "x")
    with pytest.raises(ServebookError, match="already exists and is not empty"):
        pack(run, run)
    with pytest.raises(ServebookError, match="is inside the run's folder"):
        pack(run, run / "kept")
    for p in run.rglob("c000*.json"):
        p.unlink()
    with pytest.raises(ServebookError, match="nothing is measured yet"):
        pack(run, tmp_path / "y")
    assert json.loads((run / "predictions.json").read_text())
