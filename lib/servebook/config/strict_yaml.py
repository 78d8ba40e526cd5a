"""YAML text into a pydantic model, or one error line with the key, its line and the likely intention."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, RootModel, ValidationError

from ..common.errors import ServebookError
from . import yaml_nodes

M = TypeVar("M", bound=BaseModel)


def validate(text: str, model: type[M], where: str, example: str = "params/demo.yaml") -> M:
    """The model described by the text; `where` names the text in messages, `example` a file to compare with.

    Raises ServebookError with line and key for invalid YAML, unknown or duplicate keys, and invalid values; it reports
    the first fault, unknown keys first, and the number of further ones.
    """
    root, data = yaml_nodes.parse(text, where, example)
    if not isinstance(data, dict):
        raise ServebookError("expected a mapping of keys", where, f"Start from {example}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        unknown = [f for f in faults if f["type"] == "extra_forbidden"]
        what, line, fix = _explain((unknown or faults)[0], root, model)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ServebookError(what + more, f"{where}, line {line}", fix) from None


def _explain(fault: Any, root: yaml.Node | None, model: type[BaseModel]) -> tuple[str, int, str]:
    """(what, line, fix) of one pydantic fault, located in the YAML text."""
    node, line, keys = root, 1, []
    tagged: set[int] = set()  # mappings whose kind is part of the location: a field may have the same name
    for part in fault["loc"]:
        if isinstance(node, yaml.MappingNode):
            kind_of = next((v.value for k, v in node.value if k.value == "kind"), None)
            if part == kind_of and id(node) not in tagged:
                tagged.add(id(node))
                continue
            hit = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if hit:
                line, node = hit[0].start_mark.line + 1, hit[1]
                keys.append(str(part))
            elif fault["type"] == "missing" and part == fault["loc"][-1]:
                keys.append(str(part))
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
            keys[-1] += f"[{part}]"
    key = ".".join(keys) or "(whole file)"
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        valid = sorted(_fields_at(fault["loc"][:-1], model))
        near = difflib.get_close_matches(str(fault["loc"][-1]), valid, n=1, cutoff=0.5)
        fix = f"Did you mean {near[0]}?" if near else f"Valid here: {', '.join(valid)}"
        return f"unknown key {key}", line, fix
    if kind == "missing":
        return f"key {key} is missing", line, "Add it"
    if kind == "union_tag_invalid":
        near = difflib.get_close_matches(
            str(context["tag"]), [t.strip(" '") for t in context["expected_tags"].split(",")], n=1
        )
        hint = f"Did you mean {near[0]}?" if near else f"Valid: {context['expected_tags']}"
        return f"{key}.kind is {context['tag']!r}, which does not exist", line, hint
    if kind == "union_tag_not_found":
        return f"{key} has no kind", line, "Add kind:, as in params/demo.yaml"
    message = fault["msg"].removeprefix("Value error, ")
    if kind == "unfit":  # param_types.unfit
        return f"{key}: {message}", line, context["fix"]
    given = fault.get("input")
    if isinstance(given, str) and kind in ("float_type", "int_type", "float_parsing"):
        hint = (
            "YAML reads 1e9 as text: write 1.0e+9"
            if "e" in given.lower() and given[:1].isdigit()
            else "Write a number without quotes"
        )
        return f"{key} is the text {given!r}, not a number", line, hint
    if kind == "list_type" and not isinstance(given, dict):
        return f"{key} is {given!r}, not a list", line, f"Write [{_listed(given)}]"
    if kind.endswith(("_type", "literal_error")) and not isinstance(given, dict | list):
        return f"{key} is {given!r}: {message[0].lower()}{message[1:]}", line, "Correct the value"
    return f"{key}: {message[0].lower()}{message[1:]}", line, "Correct the value"


def _listed(given: Any) -> str:
    """The likely intention of a value where a list belongs: a range such as 1-128 means its powers of two."""
    ends = re.fullmatch(r"\s*(\d+)\s*(?:-|–|\.\.|:|to)\s*(\d+)\s*", str(given))
    if ends is None:
        return str(given).strip("()[] ")
    low, high = sorted(int(e) for e in ends.groups())
    steps, value = [], max(low, 1)
    while value < high:
        steps.append(value)
        value *= 2
    return ", ".join(map(str, [*steps, high]))


def _fields_at(loc: tuple[Any, ...], model: type[BaseModel]) -> set[str]:
    """Valid names at a place in the model, following the types like pydantic."""
    here: Any = model.model_fields["root"].annotation if issubclass(model, RootModel) else model
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[part].annotation if part in here.model_fields else here
        else:
            args = getattr(here, "__args__", ())
            members = [a for a in _flatten(args) if isinstance(a, type) and issubclass(a, BaseModel)]
            tagged = [
                m for m in members if "kind" in m.model_fields and part in _literals(m.model_fields["kind"].annotation)
            ]
            if tagged:
                here = tagged[0]
            elif members and not isinstance(part, int) and len(members) > 1:
                continue  # the dict's own key, before the union's tag
            elif members:
                here = members[0]
    here = next((a for a in _flatten((here,)) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return set(here.model_fields) if here else set()


def _flatten(args: Any) -> list[Any]:
    flat: list[Any] = []
    for arg in args:
        inner = getattr(arg, "__args__", None)
        flat += _flatten(inner) if inner and not (isinstance(arg, type) and issubclass(arg, BaseModel)) else [arg]
    return flat


def _literals(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ())
