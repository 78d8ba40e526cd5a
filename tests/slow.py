"""Which tests are slow: `python tests/slow.py JUNIT_XML` rewrites slow.txt from a whole run (`pytest --junitxml FILE`).

A test function is slow where all its cases together take longer than SECONDS on two idle cores. `make test-fast` leaves
slow ones out. A test that is not in the list yet is run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

SECONDS = 0.5
LIST = Path(__file__).with_name("slow.txt")


def names() -> set[str]:
    """The slow test functions, as module::function."""
    return set(LIST.read_text().split()) if LIST.exists() else set()


def measured(report: Path) -> dict[str, float]:
    """Seconds of every test function of a junit report, over all its cases, set-up included."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name'].partition('[')[0]}"
        seconds[name] += float(case.attrib["time"])
    return seconds


def main() -> int:
    slow = sorted(name for name, seconds in measured(Path(sys.argv[1])).items() if seconds > SECONDS)
    LIST.write_text("\n".join(slow) + "\n")
    print(f"{LIST.name}: {len(slow)} tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
