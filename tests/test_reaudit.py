"""A stored run audited again: today's intervals and verdicts from its own rows, its figures untouched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from servebook.cli import command as cli
from servebook.run.audit_again import audit_run
from servebook.run_folder import results
from servebook.run_folder.lock_and_signals import single_run

REFERENCE = Path(__file__).parents[1] / "outputs/reference/h200-qwen2.5-7b-fp8"


def test_intervals_and_verdicts_follow_from_the_rows(tmp_path: Path) -> None:
    run = shutil.copytree(REFERENCE, tmp_path / "run")
    path = results.point_path(run, "long_prompts", "vllm", "c0064")
    kept = json.loads(path.read_text())
    # as if audited by an older rule: not three rounds had made a narrow interval
    old = kept | {"ttft_ci_low_s": kept["ttft_mean_s"] * 0.999, "ttft_ci_high_s": kept["ttft_mean_s"] * 1.001}
    path.write_text(json.dumps(old | {"verdict": "valid", "reasons": [], "converged": True}))
    judged, (line,) = audit_run(run)
    assert judged == len(results.read_points(run))
    assert line.startswith("long_prompts vllm c0064: valid → suspect (few rounds: 2.6 of the 64 clients")
    for found, was in zip(results.read_points(run), results.read_points(REFERENCE), strict=True):
        # a kept run's rows have their times to a few microseconds
        figures = {k: pytest.approx(v, rel=1e-3) if isinstance(v, float) else v for k, v in was.to_json().items()}
        assert found.to_json() == figures
    assert kept["ttft_ci_low_s"] is None and kept["ttft_mean_s"] > 4
    assert audit_run(run) == (judged, [])


def test_the_command_says_what_it_did_and_keeps_out_of_a_run_that_is_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(REFERENCE, tmp_path / "run")
    path = results.point_path(run, "long_prompts", "vllm", "c0064")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": "invalid"}))
    assert cli.main(["audit", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "18 points, 1 verdict changed"
    assert cli.main(["audit", str(run)]) == 0
    assert capsys.readouterr().out == "18 points, no verdict changed\n"
    with single_run(run):
        before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
        for command in (["audit"], ["report"], ["report", "--again"], ["post"]):
            assert cli.main([*command, str(run)]) == 1
        assert cli.main(["pack", str(run), str(tmp_path / "kept")]) == 1
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 5 and all("another run is writing here" in line for line in told)
        assert {
            p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"
        } == before and not (tmp_path / "kept").exists()
