"""Resolve NAME.in into NAME.lock: the whole tree with exact versions, ready for `pip install --no-deps`.

    python requirements/lock.py cpu|cuda

Uses pip's own resolver (nothing is installed), then leaves out what `# without:` in the .in file names and what only
those need.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["cpu", "cuda"])
    options = parser.parse_args()
    source = HERE / f"{options.name}.in"
    report = resolve(source)
    kept = reachable(report, without(source))
    lines = sorted(f"{name}=={version}" for name, version in kept.items())
    head = (
        f"# Written by requirements/lock.py {options.name} from {source.name}; install with --no-deps. Do not edit.\n"
    )
    (HERE / f"{options.name}.lock").write_text(head + "\n".join(lines) + "\n")
    print(f"{options.name}.lock: {len(lines)} packages", file=sys.stderr)
    return 0


def resolve(source: Path) -> dict:
    """pip's installation report for the .in file on Linux x86-64."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
            "--only-binary", ":all:", "--target", folder,
            *(f"--platform=manylinux_2_{n}_x86_64" for n in range(39, 4, -1)),
            "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "-r", str(source),
        ]  # fmt: skip
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def without(source: Path) -> set[str]:
    lines = [
        line.removeprefix("# without:") for line in source.read_text().splitlines() if line.startswith("# without:")
    ]
    return {canonical(name) for line in lines for name in line.split()}


def reachable(report: dict, dropped: set[str]) -> dict[str, str]:
    """name → version of what the requested packages need once the dropped ones are gone."""
    from pip._vendor.packaging.requirements import Requirement

    packages = {canonical(p["metadata"]["name"]): p for p in report["install"]}
    queue = [(name, tuple(p.get("requested_extras", []))) for name, p in packages.items() if p["requested"]]
    seen = set()
    while queue:
        name, extras = queue.pop()
        if name in dropped or (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in packages[name]["metadata"].get("requires_dist", []):
            need = Requirement(text)
            environment = report["environment"]
            if need.marker and not any(need.marker.evaluate({**environment, "extra": e}) for e in (*extras, "")):
                continue
            queue.append((canonical(need.name), tuple(sorted(need.extras))))
    return {name: packages[name]["metadata"]["version"] for name, _ in seen}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
