"""Measured points that somebody published: a CSV such as points.csv, and beside it what is known of their engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from . import files
from .errors import ServebookError

NEEDED = {"sweep", "engine", "point", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s"}
SIZES, HIT_SHARE = {"concurrency", "prompt_tokens", "output_tokens"}, "cache_hit_share"
NUMBERS = SIZES | {HIT_SHARE, "ttft_mean_s", "tpot_mean_s", "decode_tok_per_s", "output_tok_per_s"}


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the points of NAME.csv, columns as in points.csv; the content of NAME.facts.json beside it, {} without one).

    Raises ServebookError for a file that cannot be read or lacks a column that is NEEDED.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path)
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
    if frame.empty:
        raise ServebookError("holds no points", str(path), "Add a line for every measured point below the names")
    for column in frame.columns.intersection(NUMBERS):
        numbers = pd.to_numeric(frame[column], errors="coerce")
        wrong = frame[column].notna() & ~(numbers.gt(0) & numbers.lt(math.inf) | numbers.eq(0) & (column == HIT_SHARE))
        wrong |= frame[column].isna() & (column in SIZES)
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            fix = "Write a positive number" + ("" if column in SIZES else ", or leave the cell empty")
            raise ServebookError(f"{column} is {frame[column][row]!r}", f"{path}, point {row + 1}", fix)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows, files.read_json(path.parent / f"{path.stem}.facts.json") or {}
