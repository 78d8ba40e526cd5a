"""Runs the class definitions in transformers' source files without importing transformers or torch.

A file is executed statement by statement, without decorators, docstrings and the bodies of methods that run only when a
model is used. Each import resolves to another such file, to a stub, or to Unknown.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from .stand_ins import NotReadable, Unknown
from .torch_stand_ins import TORCH, stand_in

# other libraries whose files are read in the same way: {library: (its folder, {name: stub})}
LIBRARIES: dict[str, tuple[Path, dict[str, Any]]] = {}
FINDERS: list[Callable[[str], Any]] = []  # functions that resolve a name of transformers, or return None
KNOWN: dict[str, Any] = {}  # {name in transformers: stub}, in addition to those of torch_stand_ins
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
    """transformers' folder. Raises NotReadable if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        raise NotReadable("transformers is not installed")
    return Path(spec.origin).parent


class Source:
    """One source file of a library, executed without its imports. `names` holds its globals."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, Any] = {"__name__": path.stem, "__builtins__": BUILTINS}
        tree = ast.fix_missing_locations(_Plain().visit(ast.parse(path.read_text(encoding="utf-8"))))
        self._walk(tree.body)

    def _walk(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.If):
                self._walk(node.body if self._holds(node.test) else node.orelse)
            elif not _docstring(node):
                self._run(node)

    def _holds(self, test: ast.expr) -> bool:
        try:
            return bool(eval(compile(ast.Expression(test), str(self.path), "eval"), self.names))
        except Exception:
            return False

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            if isinstance(node, ast.Import):
                self.names[name] = _library(alias.name if alias.asname else name)
            elif node.level:
                self.names[name] = self._relative(node.module or "", node.level, alias.name)
            elif (node.module or "").split(".")[0] in LIBRARIES:
                self.names[name] = _of_library(node.module or "", alias.name)
            else:
                self.names[name] = _from_library(node.module or "", alias.name)

    def _relative(self, module: str, level: int, name: str) -> Any:
        known = stand_in(name)
        if known is not None:
            return known
        folder = self._folder(level)
        if name in KNOWN:
            return KNOWN[name]
        for home_of, names in LIBRARIES.values():
            if self.path.is_relative_to(home_of):
                return _in_file(self._folder(level).joinpath(*module.split(".")), name, names)
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

    def _folder(self, level: int) -> Path:
        folder = self.path.parent
        for _ in range(level - 1):
            folder = folder.parent
        return folder

    def _run(self, node: ast.stmt) -> None:
        code = compile(
            ast.Module([node], []), str(self.path), "exec", __future__.annotations.compiler_flag, dont_inherit=True
        )
        if isinstance(node, ast.FunctionDef) and node.name.startswith("select_"):
            self.names[node.name] = Unknown(node.name)  # chooses kernels for a device
            return
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
    """Removes decorators, docstrings, type-checking blocks, and bodies of methods that only a model in use runs."""

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
        self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()  # of what only an engine has

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


class _Imported:
    """The module object of an import inside a function. Its names resolve like those of imports at the top."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.module.split(".")[0] in LIBRARIES:
            return _of_library(self.module, name)
        return _from_library(self.module, name)


def _import_inside(name: str, *more: Any, **_: Any) -> Any:
    return __import__(name, *more) if name.split(".")[0] in REAL else _Imported(name)


def _is_instance(value: Any, kinds: Any) -> bool:
    """Like isinstance, but False for an Unknown class."""
    known = tuple(k for k in (kinds if isinstance(kinds, tuple) else (kinds,)) if not isinstance(k, Unknown))
    return isinstance(value, known)


BUILTINS = {**vars(builtins), "__import__": _import_inside, "isinstance": _is_instance}


def _of_library(module: str, name: str) -> Any:
    """The object for a name imported from a library in LIBRARIES; Unknown unless it is a model or a configuration."""
    folder, names = LIBRARIES[module.split(".")[0]]
    if name in names:
        return names[name]
    parts = module.split(".")[1:]
    read = {"models", "configs", "resampler"} & set(parts) and parts[-1] not in NO_MODELS
    return _in_file(folder.joinpath(*parts), name, names) if read else Unknown(name)


NO_MODELS = ("interfaces", "interfaces_base", "utils", "registry", "adapters", "vision")


def _in_file(target: Path, name: str, names: dict[str, Any]) -> Any:
    if name in names:
        return names[name]
    if target.name in NO_MODELS:
        return Unknown(name)
    file = target.with_name(target.name + ".py")
    return source(file).get(name) if file.is_file() else Unknown(name)


def _from_library(module: str, name: str) -> Any:
    if (known := stand_in(name)) is not None and not module.startswith("torch"):
        return known
    if module.startswith("transformers"):
        if name in KNOWN:
            return KNOWN[name]
        return next((found for find in FINDERS if (found := find(name)) is not None), Unknown(name))
    return getattr(_library(module), name, Unknown(name)) if module else Unknown(name)
