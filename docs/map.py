"""Writes docs/map.md, the one-page map of the code, from the modules' own docstrings: `python docs/map.py`.

A layer may import from itself and from those before it, wherever in a module the import stands; imports for type
checkers alone do not count. A new module takes its package's layer, or a line of its own below.
"""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatch
from pathlib import Path

DOCS = Path(__file__).resolve().parent
LIB = DOCS.parent / "lib" / "servebook"

# title, what it knows, modules (a pattern where a whole package belongs there; the first layer that names one has it)
LAYERS: list[tuple[str, str, list[str]]] = [
    ("Ground", "Words and files that everything shares; a run's parameters.",
     ["errors", "files", "param_types", "points", "sweeps", "strict_yaml", "params", "stats", "freezing", "processor",
      "provenance"]),
    ("Model and hardware", "What is to be served and on what, each without the other.",
     ["shape", "tokenizer", "model", "hardware"]),
    ("Prediction", "From parameters, shape and card to every point with its interval. Knows no server.",
     ["parallel", "roofline", "closed_forms", "kv_blocks", "scheduler", "simulated_clients", "power", "priors",
      "steptime", "simulation", "server_limits", "scenario", "explain", "calibrate", "predict", "plan", "capacity"]),
    ("Engines", "Servers as processes: started, asked about themselves, ended whole.", ["engines", "engines.*"]),
    ("Load and results", "Requests sent and timed, rows and points stored and audited. Knows a server by its URL.",
     ["results", "published", "audit", "load", "load.*"]),
    ("Judging", "Predictions against measurements, as tables of numbers.", ["score", "peers", "analysis"]),
    ("Figures", "Numbers as figures with words.",
     ["charts", "charts.*", "lab", "lab.look", "lab.live_view", "lab.live"]),
    ("Report", "Executed notebooks and stored results as one page.", ["report", "report.*"]),
    ("The run", "One object that binds the stages to a run's folder, and what walks through it.",
     ["preflight", "preflight.*", "sessions", "ledger", "stored", "measuring", "book", "execute_notebook",
      "lock_and_signals",
      "pipeline", "retell", "reaudit"]),
    ("What people start", "The command, its parts, and the explorer.",
     ["pack", "grid", "predict_cli", "capacity_cli", "measure_*", "lab.*", "cli"]),
]  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `servebook`, in alphabetical order."""
    found = {}
    for path in sorted(LIB.rglob("*.py")):
        name = ".".join(path.relative_to(LIB).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name:
            found[name] = path
    return found


def layer_of(name: str) -> int | None:
    """The layer that names a module itself, else the one whose pattern it fits; None where none does."""
    named = next((i for i, (_, _, own) in enumerate(LAYERS) if name in own), None)
    fits = next((i for i, (_, _, own) in enumerate(LAYERS) if any(fnmatch(name, p) for p in own)), None)
    return fits if named is None else named


def purpose(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports when it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
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


def against_the_layers() -> list[str]:
    """Imports of a later layer, and modules that no layer names, a line each."""
    known, said = modules(), []
    for name, path in known.items():
        own = layer_of(name)
        if own is None:
            said.append(f"{name} is in no layer of docs/map.py")
            continue
        for target in sorted(imports(name, path, known)):
            theirs = layer_of(target)
            if theirs is not None and theirs > own:
                said.append(f"{name} ({LAYERS[own][0]}) imports {target} ({LAYERS[theirs][0]})")
    return said


def text() -> str:
    """The map."""
    lines = [
        "# Map of the code",
        "",
        "Every module of `lib/servebook` with the first line of its docstring, in the order that data walks. A layer "
        "imports only from itself and from those above it; a test keeps both true. `python docs/map.py` writes it.",
    ]
    known = modules()
    for i, (title, knows, order) in enumerate(LAYERS):
        own = [name for name in known if layer_of(name) == i]
        own.sort(key=lambda name: (next(k for k, p in enumerate(order) if fnmatch(name, p)), name))
        lines += ["", f"## {title}", "", knows, ""]
        lines += [f"- `{name}`: {purpose(known[name])}" for name in own]
    return "\n".join(lines) + "\n"


def main() -> int:
    (DOCS / "map.md").write_text(text(), encoding="utf-8")
    wrong = against_the_layers()
    print("\n".join(wrong) if wrong else "docs/map.md is written", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
