"""How a question is put: settings by name, on top of a Setting, a model's name or a stored run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from ..common.errors import ServebookError
from ..hardware.catalog import Gpu
from . import runs
from .setting import Setting, engine_of, of_run

F = TypeVar("F", bound=Callable[..., Any])


def shows_settings(function: F) -> F:
    """Give a function that takes **settings the signature that names each of them, for Tab and Shift-Tab."""
    own = inspect.signature(function)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in kept}
    kept = [p for p in kept if p.kind is not p.KEYWORD_ONLY] + [p for p in kept if p.kind is p.KEYWORD_ONLY]
    named = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Setting) if f.name not in taken
    ]  # fmt: skip
    function.__signature__ = own.replace(parameters=[*kept, *named])  # type: ignore[attr-defined]
    return function


def setting_from(base: str | Setting | None, changes: Mapping[str, Any]) -> Setting:
    """The setting for a function call: a Setting or a model's name, with changes by keyword."""
    if isinstance(base, str):
        base, changes = None, {"model": base, **changes}
    if base is not None and not isinstance(base, Setting):
        raise ServebookError(
            f"the first argument is {base!r}", "explore", "Give a model's name or a Setting, all else by name"
        )
    if base is None and changes.get("run"):
        base = run_setting(changes["run"], changes.get("engine"))
    return changed(base or Setting(), changes)


def run_setting(name: str, engine: str | None = None) -> Setting:
    """What a run's engine served, at the largest load of its first sweep."""
    run = runs.read_run(name)
    known = run.params.engines
    asked = engine or "vllm"
    own = asked if asked in known else engine_of(run, asked) or next(iter(known))
    return of_run(run, own, next(iter(run.sweeps(own)), None))


def changed(s: Setting, changes: Mapping[str, Any]) -> Setting:
    """A setting with changes; another GPU's price is not known until it is given."""
    new = s.but(**changes)
    if "price_per_hour" not in changes and s.price_per_hour and new.card.name != s.card.name:
        new = replace(new, price_per_hour=0.0)
    return new


def code(s: Setting) -> str:
    """The call of `explore.predict` that gives a setting."""
    base = run_setting(s.run, s.engine) if s.run else Setting()
    given = s.changed(base) | ({"run": s.run} if s.run else {})
    shown = [f"{k}={v!r}" for k, v in given.items() if not isinstance(v, Gpu)]
    return f"explore.predict({', '.join(shown)})"


__all__ = ["changed", "code", "run_setting", "setting_from", "shows_settings"]
