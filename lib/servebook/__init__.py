"""servebook: predict how fast an LLM serves, freeze the prediction, measure it, explain every miss."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.1.0"

# Where the modules went that notebooks of kept runs and users' scripts import
_MOVED = {
    "analysis": "scoring.analysis",
    "book": "run.book",
    "capacity": "predictor.capacity",
    "closed_forms": "predictor.closed_forms",
    "errors": "common.errors",
    "files": "common.files",
    "freezing": "run_folder.frozen_predictions",
    "params": "config.params",
    "plan": "predictor.plan",
    "points": "config.points",
    "predict": "predictor.predict",
    "preflight": "run.preflight",
    "published": "run_folder.published",
    "results": "run_folder.results",
    "roofline": "predictor.roofline",
    "score": "scoring.score",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module by the name that it had until 0.1, and says in one line where it is now."""

    def __init__(self) -> None:
        self._own_specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        old = fullname.removeprefix("servebook.")
        return importlib.util.spec_from_loader(fullname, self) if old in _MOVED and old != fullname else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = f"servebook.{_MOVED[spec.name.removeprefix('servebook.')]}"
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own_specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_specs[module.__name__]  # importlib has put the old name's there


sys.meta_path.append(_MovedModules())
