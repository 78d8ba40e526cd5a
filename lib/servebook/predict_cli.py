"""`servebook predict`: predictions of a run on the terminal, scored where measured points are given. Needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import predict
from .book import Book, find_params
from .errors import ServebookError


def main(params_path: str, calibration: str | None, *, as_json: bool) -> int:
    """Print every predicted point; with measured points, calibrate on those at C = 1 and score the others."""
    book = Book.open(params_path)
    if calibration is None:
        _show(predict.predict_run(book.params, book.shape, book.gpu), [], as_json)
        return 0
    measured, facts = read_published(find_params(calibration))
    _show(predict.predict_published(book.params, book.shape, book.gpu, measured, facts), measured, as_json)
    return 0


def read_published(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measured points of a CSV (schema of points.csv) and the facts JSON beside it, {} where there is none."""
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ServebookError(f"cannot read measured points ({error})", str(path), "Give a CSV such as outputs/published/a40-qwen2.5-7b.csv") from None
    needed = {"engine", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_s", "tpot_mean_s"}
    if needed - set(frame.columns):
        raise ServebookError(f"lacks the columns {', '.join(sorted(needed - set(frame.columns)))}", str(path), "See outputs/published/README.md for the columns")
    facts = path.with_suffix("").with_suffix(".facts.json") if path.name.count(".") == 1 else path.with_name(path.stem + ".facts.json")
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows, json.loads(facts.read_text()) if facts.exists() else {}
