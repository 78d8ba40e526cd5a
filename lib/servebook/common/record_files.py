"""Files that other tools wrote, as text, table rows and JSON values: packed or not, with any line ends and delimiter.

What cannot be read is one line. A value that would be taken for another (a column named twice, a row with more cells
than the header) is refused, not guessed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ServebookError

LONGEST_FILE = 1 << 31  # bytes, unpacked
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # what Excel and PowerShell write
DELIMITERS = (",", "\t", ";")


def read_text(path: Path, what: str, fix: str) -> tuple[bytes, str]:
    """A file's bytes as they are, and its text: unpacked, with plain line feeds. what: such as "the trace". Raises
    ServebookError."""
    try:
        raw = path.read_bytes()
        unpacked = _unpacked(raw) if raw.startswith(_GZIP) else raw
        text = unpacked.decode("utf-16" if unpacked.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError:
        raise ServebookError(f"cannot read {what} (not UTF-8 text)", str(path), fix) from None
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or f"its gzip is broken: {error}"
        raise ServebookError(f"cannot read {what} ({reason})", str(path), fix) from None
    return raw, text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _unpacked(raw: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
        text = packed.read(LONGEST_FILE + 1)
    if len(text) > LONGEST_FILE:
        raise OSError(0, f"more than {LONGEST_FILE >> 30} GiB unpacked")
    return text


def lines(text: str) -> Iterator[str]:
    """Lines with their line feeds. Only these end one: JSON may hold what Unicode calls a line's end."""
    start = 0
    while (end := text.find("\n", start) + 1) > 0:
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def json_value(text: str, where: str, fix: str) -> Any:
    """A JSON text's value. Raises ServebookError."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except ValueError as error:
        reason = str(error)
    except RecursionError:
        reason = "nested too deep"
    raise ServebookError(f"is not valid JSON ({reason})", where, fix)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)[:60]!r} is there twice")
    return value


def table(text: str, where: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, its cells by column) of a table with a header, delimited by comma, tab or semicolon. Raises
    ServebookError."""
    skipped, header = 0, ""
    for header in lines(text):
        if header.strip() and not header.startswith("#"):
            break
        skipped, header = skipped + 1, ""
    delimiter = max(DELIMITERS, key=header.count)
    cells = csv.reader((line for i, line in enumerate(lines(text)) if i >= skipped), delimiter=delimiter)
    try:
        names = [name.strip() for name in next(cells, [])]
        if twice := next((n for n in names if n and names.count(n) > 1), None):
            raise ServebookError(f"has the column {twice} twice", where, "Leave one of them")
        for row in cells:
            line = skipped + cells.line_num
            if len(row) > len(names) and any(cell.strip() for cell in row[len(names) :]):
                what = f"has {len(row)} cells, and the header {len(names)}"
                raise ServebookError(what, f"{where}, line {line}", "Give every cell a column")
            if any(row):
                yield line, {n: cell.strip() for n, cell in zip(names, row, strict=False)}
    except csv.Error as error:
        raise ServebookError(
            f"is not a table ({error})", f"{where}, line {skipped + cells.line_num}", "Correct it"
        ) from None
