"""servebook: predict how fast an LLM serves, freeze the prediction, measure it, explain every miss."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing itself, and importlib's modules, take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
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


class _MovedModules:
    """Imports a module by the name that it had until 0.1, and says in one line where it is now."""

    def __init__(self) -> None:
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        old = fullname.removeprefix("servebook.")
        if old not in _MOVED or old == fullname:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        import importlib
        import warnings

        new = f"servebook.{_MOVED[spec.name.removeprefix('servebook.')]}"
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own_specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_specs[module.__name__]  # importlib has put the old name's there


sys.meta_path.append(_MovedModules())
