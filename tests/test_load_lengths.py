"""Lengths of prompts and answers: what is typed is what is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from servebook.common.errors import ServebookError
from servebook.config.lengths import Length, Listed, Spread, length_at, parse, read_csv, typical


def draw(length: Length, n: int = 4000) -> np.ndarray:
    return np.array([length_at(length, [1, 2], i) for i in range(n)])


@pytest.mark.parametrize("law", ["normal", "lognormal"])
def test_a_law_has_its_mean_and_deviation(law: str) -> None:
    drawn = draw(parse(f"{law}:1000,300"))
    assert drawn.mean() == pytest.approx(1000, rel=0.02) and drawn.std() == pytest.approx(300, rel=0.06)
    skew = ((drawn - drawn.mean()) ** 3).mean() / drawn.std() ** 3
    assert (skew > 0.5) == (law == "lognormal")


def test_bounds_hold_without_piling_up_at_them() -> None:
    drawn = draw(parse("normal:1000,500,800,1200"))
    assert drawn.min() >= 800 and drawn.max() <= 1200
    assert (drawn == 800).mean() < 0.02  # cut off, not clipped
    assert draw(Spread("normal", 100, 1, 500, 600), 3).tolist() == [500, 500, 500]  # no law reaches there


def test_other_lengths() -> None:
    assert parse("512") == 512 and parse("100:300") == (100, 300) and parse("7:7") == 7
    assert set(draw((3, 5))) == {3, 4, 5} and set(draw(9)) == {9}
    assert draw(Listed((4, 8)), 5).tolist() == [4, 8, 4, 8, 4]
    assert [typical(x) for x in (9, (100, 300), Spread("normal", 50, 9), Listed((4, 8)))] == [9, 200, 50, 6]


def test_a_requests_length_depends_on_seed_and_index_alone() -> None:
    law = parse("lognormal:500,200")
    assert draw(law, 50).tolist() == draw(law, 50).tolist()
    assert length_at(law, [1], 3) != length_at(law, [2], 3)


NOT_FINITE = ["normal:inf,1", "normal:5,inf", "lognormal:nan,1", "normal:5,1,1,inf", "normal:5,1,nan,9"]


@pytest.mark.parametrize(
    "text", ["0", "x", "5:4", "normal:5", "normal:0,1", "normal:5,1,3", "zipf:3,1", "1:2:3", "", *NOT_FINITE]
)
def test_what_is_no_length_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        parse(text)


def test_lengths_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens,note\n100,5,a\n200,7,b\n")
    assert read_csv(path) == (Listed((100, 200)), Listed((5, 7)))
    for text, fault in (
        ("prompt,output\n1,2\n", "has no column prompt_tokens, output_tokens"),
        ("prompt_tokens,output_tokens\n", "contains no lengths"),
        ("prompt_tokens,output_tokens\n1,2\n\n1,nan\n", "line 4: output_tokens is 'nan'"),
        ("prompt_tokens,output_tokens\n-1,2\n", "line 2: prompt_tokens is '-1'"),
        ("prompt_tokens,output_tokens\n1\n", "line 2: output_tokens is ''"),
    ):
        path.write_text(text)
        with pytest.raises(ServebookError, match=fault):
            read_csv(path)
    with pytest.raises(ServebookError, match=r"none\.csv: cannot be read \(No such file"):
        read_csv(tmp_path / "none.csv")
