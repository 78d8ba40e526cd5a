"""Measured points that somebody published: a CSV such as points.csv, and beside it what is known of their engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import files
from .errors import ServebookError

NEEDED = {"sweep", "engine", "point", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s"}


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the points of NAME.csv, columns as in points.csv; the content of NAME.facts.json beside it, {} without one).

    Raises ServebookError for a file that cannot be read or lacks a column that is NEEDED.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ServebookError(
            f"cannot read measured points ({error})",
            str(path),
            "Give a CSV such as outputs/published/a40-qwen2.5-7b.csv",
        ) from None
    if missing := NEEDED - set(frame.columns):
        raise ServebookError(
            f"lacks the columns {', '.join(sorted(missing))}", str(path), "outputs/published/README.md lists them"
        )
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows, files.read_json(path.parent / f"{path.stem}.facts.json") or {}
