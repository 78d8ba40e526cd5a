"""What holds for every test."""

from __future__ import annotations

import signal

import pytest
import slow

# A suite run in the background or under nohup has these ignored, and every process that a test starts would inherit it
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt as slow."""
    listed = slow.names()
    for item in items:
        if f"{item.path.stem}::{item.name.partition('[')[0]}" in listed:
            item.add_marker("slow")
