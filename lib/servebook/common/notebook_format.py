"""Imports nbformat, which reads notebooks, without a parser that it never uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

UNUSED = "rfc3987_syntax"  # jsonschema, below nbformat, checks internationalized addresses (IRIs) with it


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Import nbformat (or what imports it) in this block, for the first time in the process.

    UNUSED builds its parser at import, which takes 2.5 s of processor time. jsonschema does without it where it is not
    installed, and no notebook's schema has an IRI.
    """
    if UNUSED in sys.modules:
        yield
        return
    sys.modules[UNUSED] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        yield
    finally:
        del sys.modules[UNUSED]
