"""Files of transformers as text whose classes are executed, statement by statement, without what they import.

Decorators, docstrings and the bodies of what runs only when a model is used are left out; what a file imports is
another such file, a stand-in, or unknown.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from .stand_ins import NotReadable, Unknown
from .torch_stand_ins import TORCH, stand_in

KNOWN: dict[str, Any] = {}  # what stands in for names of transformers beside those of torch_stand_ins
KEPT_DECORATORS = {"property", "staticmethod", "classmethod", "cached_property"}
SKIPPED = {"forward", "_init_weights", "to_dict", "generate", "prepare_inputs_for_generation"}
REAL = {
    "inspect",
    "math",
    "typing",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "enum",
    "copy",
    "collections.abc",
}


@cache
def home() -> Path:
    """transformers' folder. Raises NotReadable where it is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        raise NotReadable("transformers is not installed")
    return Path(spec.origin).parent


class Source:
    """One file of a library, executed without what it imports. Names are resolved when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, Any] = {"__name__": path.stem, "__builtins__": __builtins__}
        tree = ast.fix_missing_locations(_Plain().visit(ast.parse(path.read_text(encoding="utf-8"))))
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif not _docstring(node):
                self._run(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            if isinstance(node, ast.Import):
                self.names[name] = _library(alias.name if alias.asname else name)
            elif node.level:
                self.names[name] = self._relative(node.module or "", node.level, alias.name)
            else:
                self.names[name] = _from_library(node.module or "", alias.name)

    def _relative(self, module: str, level: int, name: str) -> Any:
        known = stand_in(name)
        if known is not None:
            return known
        folder = self.path.parent
        for _ in range(level - 1):
            folder = folder.parent
        if name in KNOWN:
            return KNOWN[name]
        parts = [p for p in module.split(".") if p]
        target = folder.joinpath(*parts) if parts else folder
        file = target.with_name(target.name + ".py")
        if (
            file.is_file()
            and file.stem.startswith(("configuration_", "modeling_"))
            and file.parents[1].name == "models"
        ):
            return source(file).get(name)
        if target.is_dir() and target.parent.name == "models":
            for kind in ("configuration", "modeling"):
                for file in sorted(target.glob(f"{kind}_*.py")):
                    if name in defined(file):
                        return source(file).get(name)
        return Unknown(name)

    def _run(self, node: ast.stmt) -> None:
        code = compile(
            ast.Module([node], []), str(self.path), "exec", __future__.annotations.compiler_flag, dont_inherit=True
        )
        try:
            exec(code, self.names)
        except Exception as e:
            for name in _targets(node):
                self.names[name] = Unknown(f"{name}: {e}")

    def get(self, name: str) -> Any:
        return self.names.get(name, Unknown(name))


@cache
def source(path: Path) -> Source:
    return Source(path)


@cache
def defined(path: Path) -> frozenset[str]:
    return frozenset(n for node in ast.parse(path.read_text(encoding="utf-8")).body for n in _targets(node))


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    return []


def _docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Plain(ast.NodeTransformer):
    """Without decorators, docstrings, type-checking blocks, and the bodies of what runs only when a model is used."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        node.body = [n for n in node.body if not _docstring(n)] or [ast.Pass()]
        if node.name.endswith("RotaryEmbedding"):  # buffers only
            node.body = [ast.Pass()]
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if _kept(d)]
        if node.name in SKIPPED:
            node.body = [ast.Pass()]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def _kept(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Attribute):
        return decorator.attr in ("setter", "getter")
    return isinstance(decorator, ast.Name) and decorator.id in KEPT_DECORATORS


def _library(name: str) -> Any:
    if name.split(".")[0] in REAL or name in REAL:
        return __import__(name, fromlist=["_"])
    if name.split(".")[0] == "torch":
        found: Any = TORCH
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        return found
    return Unknown(name)


def _from_library(module: str, name: str) -> Any:
    if (known := stand_in(name)) is not None and not module.startswith("torch"):
        return known
    return getattr(_library(module), name, Unknown(name)) if module else Unknown(name)
