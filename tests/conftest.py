"""What holds for every test."""

from __future__ import annotations

import signal

import pytest
import slow

# A suite run in the background or under nohup has these ignored, and every process that a test starts would inherit it
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt as slow. Files that start engines or browsers come first, all in one process.

    `make test` runs two processes: two engines side by side would share a GPU, and the longest has to begin first.
    """
    listed = slow.names()
    machines = {i.path for i in items if i.get_closest_marker("engine") or i.get_closest_marker("browser")}
    items.sort(key=lambda item: item.path not in machines)
    for item in items:
        if f"{item.path.stem}::{item.name.partition('[')[0]}" in listed:
            item.add_marker("slow")
        item.add_marker(pytest.mark.xdist_group("machines" if item.path in machines else item.path.stem))
