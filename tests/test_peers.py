"""Other predictors beside this one: read from the run's folder, scored on the same points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.report import tables
from servebook.run_folder import results
from servebook.scoring import peers

REFERENCE = Path(__file__).parents[1] / "outputs" / "reference" / "h200-qwen2.5-7b"
HEADER = "peer,sweep,engine,point,ttft_s,tpot_s\n"


def test_a_run_without_peers_says_nothing(tmp_path):
    assert peers.read(tmp_path / "peers.csv") == []


def test_one_stage_a_peer_with_the_metrics_it_gives(tmp_path):
    (tmp_path / "peers.csv").write_text(HEADER + "a 1,s,e,c0002,0.5,\nb 2,s,e,c0002,,0.02\na 1,s,e,c0004,0.75,0.03\n")
    first, second = peers.read(tmp_path / "peers.csv")
    assert first["stage"] == "a 1" and [p["metrics"] for p in first["points"]] == [
        {"ttft_s": {"value": 0.5}}, {"ttft_s": {"value": 0.75}, "tpot_s": {"value": 0.03}},
    ]  # fmt: skip
    assert second["points"] == [{"sweep": "s", "engine": "e", "point": "c0002", "metrics": {"tpot_s": {"value": 0.02}}}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep,engine,point\n", r"peers.csv: has no column peer"),
        ("", r"peers.csv: has no column peer, sweep, engine, point"),
        (HEADER + "a,s,e,,0.5,\n", r"line 2: point is empty"),
        (HEADER + "a,s,e\n", r"line 2: point is empty"),
        (HEADER + "a,s,e,c0002,5,\n\na,s,e,c0004,0,5,0.02\n", r"line 4: has more cells than column names"),
        *(
            (HEADER + f"a,s,e,c0001,,0.02\n\na,s,e,c0002,{text},\n", rf"peers.csv, line 4: ttft_s is '{text}'\. Write")
            for text in ("fast", "nan", "NaN", "inf", "-inf", "-0.5", "0", "1e999")
        ),
    ],
)
def test_a_faulty_file_is_one_line(tmp_path, text, said):
    (tmp_path / "peers.csv").write_text(text)
    with pytest.raises(ServebookError, match=said) as fault:
        peers.read(tmp_path / "peers.csv")
    assert "\n" not in str(fault.value)


def test_a_file_from_a_spreadsheet_and_blanks_around_cells_are_read(tmp_path):
    (tmp_path / "peers.csv").write_text("\ufeff" + HEADER.replace("\n", "\r\n") + "a 1, s ,e,c0002, 0.5 ,\r\n")
    (peer,) = peers.read(tmp_path / "peers.csv")
    assert peer["points"] == [{"sweep": "s", "engine": "e", "point": "c0002", "metrics": {"ttft_s": {"value": 0.5}}}]


def test_only_held_out_points_that_both_speak_of_are_compared():
    def point(name, c, ttft):
        return {"sweep": "s", "engine": "e", "point": name, "concurrency": c, "prompt_tokens": 8, "output_tokens": 8,
                "requests": 9, "ttft_mean_s": ttft, "verdict": "valid"}  # fmt: skip

    def said(name, value):
        return {"sweep": "s", "engine": "e", "point": name, "metrics": {"ttft_s": {"value": value}}}

    measured = [point("c1", 1, 1.0), point("c2", 2, 1.0), point("c4", 4, 2.0), point("c8", 8, 4.0)]
    own = {"stage": "datasheet", "points": [
        {**said(n, v), "concurrency": c, "prompt_tokens": 8, "output_tokens": 8}
        for n, c, v in (("c1", 1, 9.0), ("c2", 2, 1.1), ("c4", 4, 2.2), ("c8", 8, 40.0))
    ]}  # fmt: skip
    peer = {"stage": "p", "points": [said("c1", 1.0), said("c2", 1.5), said("c4", 3.0)]}
    (row,) = peers.beside(measured, [own], [peer], {(8, 8)}).to_dict("records")
    assert row["points"] == 2 and row["peer_error"] == pytest.approx(0.5) and row["own_error"] == pytest.approx(0.1)


def test_the_kept_h200_run_beats_its_peer_on_each_figure():
    frozen = json.loads((REFERENCE / "predictions.json").read_text())["frozen"]
    found = peers.beside(
        results.points_frame(REFERENCE), frozen, peers.read(REFERENCE / "peers.csv"), {(512, 128), (8192, 128)}
    )
    assert len(found) == 6 and set(found["points"]) == {13}
    assert (found["own_error"] < found["peer_error"]).all()
    assert tables.peers(found).count("<td>TTFT</td>") == 2
