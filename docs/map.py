"""Writes docs/map.md, the one-page map of the code, from the modules' own docstrings: `python docs/map.py`.

A package may import from itself and from those before it. Every import counts: at the top of a module, inside
functions, and those for type checkers alone. Modules may not import each other in a circle.
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

DOCS = Path(__file__).resolve().parent
LIB = DOCS.parent / "lib" / "servebook"

# The packages of lib/servebook in the order that data walks. A package imports only from itself and from those above it
PACKAGES = (
    "common",
    "config",
    "model",
    "hardware",
    "predictor",
    "scoring",
    "run_folder",
    "engines",
    "load",
    "charts",
    "report",
    "run",
    "lab",
    "cli",
)


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `servebook`, in alphabetical order."""
    found = {}
    for path in sorted(LIB.rglob("*.py")):
        name = ".".join(path.relative_to(LIB).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name:
            found[name] = path
    return found


def package_of(name: str) -> int | None:
    """The place in PACKAGES of the package that a module belongs to; None where it belongs to none."""
    first = name.partition(".")[0]
    return PACKAGES.index(first) if first in PACKAGES else None


def purpose(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports, wherever the import stands: also in functions and for types."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = (node.module or "").split(".") if node.module else []
        if node.level:
            base = package[: len(package) - node.level + 1] + base
        elif base[:1] == ["servebook"]:
            base = base[1:]
        else:
            continue
        for alias in node.names:
            target = ".".join([*base, alias.name])
            found.add(target if target in known else ".".join(base))
    return (found & set(known)) - {name}


def wrong_imports() -> list[str]:
    """Imports of a later package, modules that are in no package, and circles of modules, a line each."""
    known, wrong = modules(), []
    targets = {name: imports(name, path, known) for name, path in known.items()}
    for name in known:
        own = package_of(name)
        if own is None:
            if name != "__main__":
                wrong.append(f"{name} is in no package of docs/map.py")
            continue
        for target in sorted(targets[name]):
            theirs = package_of(target)
            if theirs is not None and theirs > own:
                wrong.append(f"{name} imports {target}, and {PACKAGES[theirs]} comes after {PACKAGES[own]}")
    return wrong + [f"circle of imports: {' -> '.join(circle)}" for circle in _circles(targets)]


def _circles(targets: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    try:
        list(TopologicalSorter(targets).static_order())
    except CycleError as error:
        found = error.args[1]
        broken = {name: own - {found[1]} if name == found[0] else own for name, own in targets.items()}
        broken = {name: own - ({found[0]} if name == found[1] else set()) for name, own in broken.items()}
        return [found, *_circles(broken)]
    return []


def text() -> str:
    """The map."""
    lines = [
        "# Map of the code",
        "",
        "Every module of `lib/servebook` with the first line of its docstring, in the order that data walks. A package "
        "imports only from itself and from those above it; a test checks both. `python docs/map.py` writes this page.",
    ]
    known = modules()
    for i, package in enumerate(PACKAGES):
        lines += ["", f"## {package}", "", purpose(known[package]), ""]
        lines += [f"- `{name}`: {purpose(known[name])}" for name in known if package_of(name) == i and name != package]
    return "\n".join(lines) + "\n"


def main() -> int:
    (DOCS / "map.md").write_text(text(), encoding="utf-8")
    wrong = wrong_imports()
    print("\n".join(wrong) if wrong else "docs/map.md is written", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
