"""What holds for every test."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import slow

# A suite run in the background or under nohup has these ignored, and every process that a test starts would inherit it
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def starts_machines(file: Path) -> bool:
    """Whether a test file starts engines or browsers."""
    return bool(re.search(r"pytest\.mark\.(engine|browser)\b", file.read_text(encoding="utf-8")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt as slow, and let the files that start engines or browsers come first.

    They take longest, and so have to begin first where two processes share the tests (`make test`).
    """
    listed, machines = slow.names(), {p for p in {i.path for i in items} if starts_machines(p)}
    items.sort(key=lambda item: item.path not in machines)
    for item in items:
        if f"{item.path.stem}::{item.name.partition('[')[0]}" in listed:
            item.add_marker("slow")
