"""Files of a run: rows survive a killed writer and a full disk, points are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.common.measured_point import POINT_COLUMNS, MeasuredPoint
from servebook.common.reasons import Reason, ReasonCode
from servebook.run_folder import results


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    path = results.rows_path(tmp_path, "s", "e", "c0001")
    writer = results.RowWriter(path)
    for i in range(3):
        writer.write({"i": i, "ok": True, "gaps_ms": [0.1]})
    assert [r["i"] for r in results.read_rows(path)] == [0, 1, 2]  # readable while it is being written
    writer.close()
    assert path == tmp_path / "requests/s/e/c0001.jsonl"


def test_a_torn_last_line_is_cut_off_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "c0001.jsonl"
    path.write_bytes(b'{"i":0}\n{"i":1}\n{"i":2,"ph')
    rows = results.read_rows(path)
    assert [r["i"] for r in rows] == [0, 1] and "torn last line of 10 bytes" in rows.notes[0]
    assert path.read_bytes() == b'{"i":0}\n{"i":1}\n'
    assert results.read_rows(path).notes == []


def test_garbage_in_the_middle_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c0001.jsonl"
    path.write_bytes(b'{"i":0}\nnot json\n{"i":2}\n')
    with pytest.raises(ServebookError, match=r"c0001.jsonl:2: not a request row"):
        results.read_rows(path)


def test_a_full_disk_takes_back_the_half_written_row_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c0001.jsonl"
    writer = results.RowWriter(path)
    writer.write({"i": 0})
    real, calls = os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data[:4])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ServebookError, match="No space left on device"):
        writer.write({"i": 1})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"i":0}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_full_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "c0001.jsonl").symlink_to("/dev/full")
    writer = results.RowWriter(tmp_path / "c0001.jsonl")
    with pytest.raises(ServebookError, match=r"c0001.jsonl: cannot write: No space left on device"):
        writer.write({"i": 0})


def test_an_unfinished_attempt_is_set_aside_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "c0001.jsonl"
    for attempt in range(3):
        assert results.earlier_attempts(path) == attempt
        writer = results.RowWriter(path)
        writer.write({"attempt": attempt})
        writer.close()
    assert results.read_rows(path) == [{"attempt": 2}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c0001.jsonl", "c0001.jsonl.old1", "c0001.jsonl.old2"]


def test_points_are_read_in_order_and_become_a_table(tmp_path: Path) -> None:
    for point in ("c0128", "c0002", "c0016"):
        results.write_point(
            tmp_path,
            MeasuredPoint(
                sweep="s",
                engine="e",
                point_id=point,
                prompt_tokens=1,
                output_tokens=2,
                requests=3,
                reasons=(Reason(ReasonCode.DRIFT, "a"), Reason(ReasonCode.OTHER, "b")),
                other={"extra": 1.5},
            ),
        )
    (tmp_path / "requests/s/e/stopped.json").write_text('{"points": ["c0256"]}')
    assert [p.point_id for p in results.read_points(tmp_path)] == ["c0002", "c0016", "c0128"]
    lines = results.write_points_csv(tmp_path).read_text().splitlines()
    assert lines[0] == ",".join([*POINT_COLUMNS, "extra", "reason_codes"])
    assert len(lines) == 4 and "a; b" in lines[1] and lines[1].endswith(",1.5,drift; other")
    frame = results.points_frame(tmp_path)
    assert list(frame["point"]) == ["c0002", "c0016", "c0128"] and frame["ttft_mean_s"].isna().all()


def test_a_point_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert results.read_point(tmp_path, "s", "e", "c0001") is None
    assert results.points_frame(tmp_path).empty
