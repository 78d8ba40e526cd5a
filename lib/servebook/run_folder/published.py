"""Published measured points: a CSV like points.csv, and a JSON file with facts about the engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import files
from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..config.params import ModelParams
from ..model.reader import ModelShape, read_shape

if TYPE_CHECKING:
    import pandas as pd

FOLDER = files.ROOT / "outputs" / "published"  # the three posts' tables

NEEDED = {"sweep", "engine", "point", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s"}
SIZES, HIT_SHARE = {"concurrency", "prompt_tokens", "output_tokens"}, "cache_hit_share"
FIGURES = {"ttft_mean_s", "tpot_mean_s", "decode_tok_per_s", "output_tok_per_s"}


def read(path: Path) -> tuple[list[MeasuredPoint], dict[str, Any]]:
    """(the points of NAME.csv, columns as in points.csv; the content of NAME.facts.json, {} without one).

    Raises ServebookError for an unreadable file, a missing column of NEEDED, or an impossible value. Only an empty cell
    means that a figure was not published.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ServebookError(
            f"cannot read measured points ({reason})",
            str(path),
            "Give a CSV such as outputs/published/a40-qwen2.5-7b.csv",
        ) from None
    if missing := NEEDED - set(frame.columns):
        raise ServebookError(
            f"lacks the columns {', '.join(sorted(missing))}", str(path), "outputs/published/README.md lists them"
        )
    if not isinstance(frame.index, pd.RangeIndex):  # pandas would take extra cells at the front as row names
        raise ServebookError("has more cells than column names", str(path), "Quote text that contains a comma")
    if frame.empty:
        raise ServebookError("contains no points", str(path), "Add one line per measured point below the header")
    for column in (c for c in frame.columns if c in SIZES or c.endswith("_s") or c.startswith(HIT_SHARE)):
        given, numbers = frame[column], pd.to_numeric(frame[column], errors="coerce")
        fits, meant = numbers.abs().lt(math.inf), "a number"
        if column in SIZES:
            fits, meant = fits & numbers.gt(0) & numbers.mod(1).eq(0), "a positive whole number"
        elif column.startswith(HIT_SHARE):
            fits, meant = numbers.between(0, 1), "a share from 0 to 1"
        elif column in FIGURES:
            fits, meant = fits & numbers.gt(0), "a positive number"
        wrong = ~fits if column in SIZES else ~fits & given.notna()
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            shown = "empty" if pd.isna(given.iloc[row]) else repr(str(given.iloc[row]))
            fix = f"Write {meant}" + ("" if column in SIZES else ", or leave the cell empty")
            raise ServebookError(f"{column} is {shown}", f"{path}, point {row + 1}", fix)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    measured = [MeasuredPoint.from_json(row | {k: int(row[k]) for k in SIZES}) for row in rows]
    return measured, files.read_object(path.parent / f"{path.stem}.facts.json")


def points(name: str) -> pd.DataFrame:
    """The measured points of the posts' run `name`, such as a40-qwen2.5-7b, one per row; NaN: not published."""
    import pandas as pd

    return pd.read_csv(FOLDER / f"{name}.csv")


def shape(name: str) -> ModelShape:
    """The model shape of the posts' run `name`: the packaged config named after the GPU in the name."""
    return read_shape(ModelParams(config=name.partition("-")[2], weights="dummy"), FOLDER)
