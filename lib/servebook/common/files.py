"""Atomic file writing, reading of JSON and CSV, and the checkout's location."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import ServebookError

_ABOVE = Path(__file__).parents[3]
# The checkout, if the package is an editable install; otherwise (`pip install .`) the working directory
ROOT = _ABOVE if (_ABOVE / "notebooks").is_dir() and (_ABOVE / "pyproject.toml").is_file() else Path.cwd()


def write_text(path: Path, text: str) -> Path:
    """Replace a file's content atomically; on failure the old content is kept. Raises ServebookError."""
    with writing(path) as scratch, scratch.open("w", encoding="utf-8") as f:
        f.write(text)
    return path


def check_folder(folder: Path) -> None:
    """Make a folder. Raises ServebookError where files cannot be written into it: before the work, not after."""
    try:
        write_text(folder / ".servebook", "").unlink(missing_ok=True)
    except ServebookError as error:
        fix = "Free space or permissions there, or give another folder"
        raise ServebookError(error.what, str(folder), fix) from None


def check_file(path: Path) -> None:
    """Raises ServebookError where a file cannot be written: before the work, not after. Its folder is made."""
    with contextlib.suppress(_Unwritten), writing(path):
        raise _Unwritten


class _Unwritten(Exception):
    """Leaves `writing` before anything is written."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary file to write in the block; it replaces `path` when the block ends. The folder is created. A link
    stays, and its target is replaced; a folder, a device and a pipe are not.

    On failure the old content is kept. Raises ServebookError if the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.exists() and not target.is_file():
            raise OSError(errno.EISDIR, "it is a folder" if target.is_dir() else "it is a device or a pipe")
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.touch()
        yield scratch
        with scratch.open("rb") as f:
            os.fsync(f.fileno())
        scratch.replace(target)
    except OSError as error:
        raise ServebookError(
            f"cannot write ({error.strerror or error})",
            str(path),
            "Free space or permissions there, or write to another folder, then run again: what is measured is kept",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the fault that prevented writing may also prevent removing
            scratch.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> Path:
    """Replace a file's content with a JSON value, atomically. Raises ValueError for NaN and infinity."""
    return write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The JSON value with NaN and infinity replaced by null, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


_REMOVE = "Remove the file; what depends on it is made again"


def read_json(path: Path) -> Any:
    """The file's JSON content, None if there is no file. Raises ServebookError for invalid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ServebookError(f"cannot be read ({error})", str(path), _REMOVE) from error


def read_object(path: Path, *needed: str) -> dict[str, Any]:
    """As read_json, of a JSON object that has these keys; {} if there is no file, or none but null in it."""
    value = read_json(path)
    if value is not None and not (isinstance(value, dict) and all(key in value for key in needed)):
        what = f"is no JSON object with {', '.join(needed)}" if needed else "is no JSON object"
        raise ServebookError(what, str(path), _REMOVE)
    return value or {}


def read_csv(path: Path, needed: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Rows of a user's CSV file, each with its location ("FILE, line N") and its cells by column, stripped; '' for
    empty cells.

    Raises ServebookError for an unreadable file, a missing column, and a row with more cells than columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:  # spreadsheets write a byte order mark
            table = csv.DictReader(f, restval="")
            rows = [(f"{path}, line {table.line_num}", row) for row in table]
            columns = table.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServebookError(f"cannot be read ({reason})", str(path), "Give a CSV file, in UTF-8") from None
    if absent := [c for c in needed if c not in columns]:
        raise ServebookError(f"has no column {', '.join(absent)}", str(path), f"Needed: {', '.join(needed)}")
    if torn := next((where for where, row in rows if None in row), None):
        raise ServebookError("has more cells than column names", torn, "Quote text that contains a comma")
    return [(where, {column: text.strip() for column, text in row.items()}) for where, row in rows]


def differences(before: Any, after: Any, key: str = "") -> list[str]:
    """The differences between two JSON values, as "key was 8, is 10"."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(k for k in after if k not in before)]
        return [
            d
            for k in keys
            for d in differences(before.get(k), after.get(k), f"{key}.{k}" if key else k)
            if before.get(k) != after.get(k)
        ]
    return [] if before == after else [f"{key} was {json.dumps(before)}, is {json.dumps(after)}"]
