"""Points as classes: read from every kept file, written as they were, with codes for reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servebook.common.measured_point import FURTHER_COLUMNS, POINT_COLUMNS, MeasuredPoint
from servebook.common.reasons import Reason, ReasonCode

ROOT = Path(__file__).parents[1]
KEPT = sorted(p for p in (ROOT / "outputs" / "reference").glob("*/requests/*/*/*.json"))


def test_kept_points_are_read_and_written_as_they_were() -> None:
    assert KEPT
    for path in KEPT:
        stored = json.loads(path.read_text())
        point = MeasuredPoint.from_json(stored)
        written = point.to_json()
        assert not point.other, path
        assert {k: written.get(k) for k in stored} == stored
        assert MeasuredPoint.from_json(written) == point


def test_reasons_stored_without_a_code_get_one() -> None:
    codes = {r.code for p in KEPT for r in MeasuredPoint.from_json(json.loads(p.read_text())).reasons}
    assert {ReasonCode.FEW_ROUNDS, ReasonCode.WIDE_INTERVAL, ReasonCode.DRIFT, ReasonCode.REPEATED_PROMPTS} == codes


def test_a_reason_keeps_its_code_whatever_its_sentence_says() -> None:
    reason = Reason(ReasonCode.FEW_ROUNDS, "only 1.6 rounds per client")
    point = MeasuredPoint(sweep="s", engine="e", point_id="c0001", prompt_tokens=1, output_tokens=1, reasons=(reason,))
    assert MeasuredPoint.from_json(json.loads(json.dumps(point.to_json()))).reasons == (reason,)


def test_what_a_later_version_wrote_is_kept() -> None:
    named = {"sweep": "s", "engine": "e", "point": "c0001", "prompt_tokens": 1, "output_tokens": 1}
    stored = named | {"reasons": ["x"], "reason_codes": ["from later"], "new": 3}
    point = MeasuredPoint.from_json(stored)
    assert point.reasons[0].code is ReasonCode.OTHER
    assert point.to_json()["new"] == 3


def test_no_point_without_a_name() -> None:
    with pytest.raises(KeyError):
        MeasuredPoint.from_json({"sweep": "s", "engine": "e"})


def test_columns_are_named_once() -> None:
    columns = [*POINT_COLUMNS, *FURTHER_COLUMNS]
    assert len(set(columns)) == len(columns) and "point" in columns and "point_id" not in columns
    assert list(FURTHER_COLUMNS) == sorted(FURTHER_COLUMNS, key=lambda c: (c != "reason_codes", c))
