"""`servebook grid`: one parameter file per point of a grid, for machines that each run one (skypilot/launch.py)."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..common import files
from ..common.errors import ServebookError
from ..config import params, yaml_nodes
from ..hardware import catalog as hardware

MOST_FILES = 512  # each is validated in a hundredth of a second, and measured in an hour


def write_grid(base: Path, settings: Sequence[str], into: Path) -> list[Path]:
    """Write `base` once for every combination of the settings and return the files, in order.

    settings: "KEY=A,B", KEY being a path of keys ("engines.vllm.max_num_seqs") and the values YAML. All files are
    validated before the first is written. A file's run is named base's run and the values (if a setting names the run,
    that name and the values that vary). Raises ServebookError for an unknown key, an invalid value, or two combinations
    with the same name.
    """
    params.read_file(base)
    text = base.read_text(encoding="utf-8")
    axes = [_axis(s) for s in settings]
    if (count := math.prod(len(choices) for _, choices in axes)) > MOST_FILES:
        raise ServebookError(f"{count:,} combinations", "--set", f"At most {MOST_FILES}: give fewer values")
    made: dict[str, str] = {}
    for values in itertools.product(*(choices for _, choices in axes)):
        data = _unshared(yaml.safe_load(text))
        notes = _left_out(data, axes, values)
        for (key, _), value in zip(axes, values, strict=True):
            _set(data, key, value)
        if ("title",) not in [tuple(key) for key, _ in axes]:
            data["title"] = ": ".join([str(data["title"]), *filter(None, [", ".join(_told(axes, values))])])
        data["run"] = "-".join([str(data["run"]), *_suffix(axes, values)])
        if data["run"] in made:
            raise ServebookError(f"two combinations are both {data['run']!r}", "--set", "Give values that differ")
        _keep_path(data, base, into)
        changes = ", ".join(f"{'.'.join(key)} {value}" for (key, _), value in zip(axes, values, strict=True))
        body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
        made[data["run"]] = f"# {base.name} with {changes}: made by servebook grid\n{notes}{body}"
        try:
            one = params.read_text(body, base=into)
            if one.hardware.gpu != "detect":
                hardware.resolve(one.hardware)  # a name that no catalog entry has
        except ServebookError as error:  # a line number of a file that is not written would not help
            raise ServebookError(error.what, f"{base} with {changes}", error.fix) from None
    for run, content in made.items():
        files.write_text(into / f"{run}.yaml", content)
    return [into / f"{run}.yaml" for run in made]


def _axis(setting: str) -> tuple[list[str], list[Any]]:
    key, equals, values = setting.partition("=")
    # as strict as a parameter file: 010 is not 8
    choices = yaml_nodes.parse(f"[{values}]", f"--set {key}", "hardware.gpu=A100-80GB-SXM,H200")[1] if equals else []
    if not key or not choices:
        raise ServebookError(
            f"{setting!r} is not a setting", "--set", "Write KEY=A,B as in hardware.gpu=A100-80GB-SXM,H200"
        )
    return key.split("."), choices


def _unshared(value: Any) -> Any:
    """A copy in which what an alias repeats is written out: a setting changes the place that it names, and no other."""
    if isinstance(value, dict):
        return {k: _unshared(v) for k, v in value.items()}
    return [_unshared(v) for v in value] if isinstance(value, list) else value


def _set(data: dict[str, Any], key: list[str], value: Any) -> None:
    here: Any = data
    for part in key[:-1]:
        if not isinstance(here, dict) or part not in here:
            known = f"In the place of {part} there is {', '.join(here)}" if isinstance(here, dict) else ""
            raise ServebookError(f"{'.'.join(key)} does not exist", "--set", known or f"{part} is at the top level")
        here = here[part]
    if not isinstance(here, dict):
        raise ServebookError(f"{'.'.join(key)} does not exist", "--set", f"{key[-2]} holds no keys")
    if key in (["hardware", "gpu"], ["hardware", "figures"]):
        here.pop("figures" if key[-1] == "gpu" else "gpu", None)
    if key == ["model", "config"] or key == ["model", "hub"]:  # a new source of the model replaces the old one
        for other in ("hub", "path", "config"):
            here.pop(other, None)
    here[key[-1]] = value


def _keep_path(data: dict[str, Any], base: Path, into: Path) -> None:
    """Relative paths of the model and of traces start at the parameter file, which is in another folder now."""
    workloads = [w for w in (data.get("workloads") or {}).values() if "trace" in w]
    for holder, key in [(data["model"], "path"), *((w, "trace") for w in workloads)]:
        path = holder.get(key)
        if path and not Path(path).is_absolute():
            holder[key] = os.path.relpath(base.parent / path, into)


def _left_out(data: dict[str, Any], axes: list[tuple[list[str], list[Any]]], values: Sequence[Any]) -> str:
    """Remove the base's price and its comment for another GPU, unless a setting gives a price."""
    given = {".".join(key): value for (key, _), value in zip(axes, values, strict=True)}
    gpu, old = given.get("hardware.gpu"), data.get("hardware")
    if not isinstance(old, dict) or gpu in (None, old.get("gpu")) or "hardware.price_per_hour" in given:
        return ""
    return f"# price_per_hour of {gpu} left out: set it\n" if old.pop("price_per_hour", 0) else ""


def _suffix(axes: list[tuple[list[str], list[Any]]], values: Sequence[Any]) -> list[str]:
    return [_word(value) for _, value in _telling(axes, values)]


def _told(axes: list[tuple[list[str], list[Any]]], values: Sequence[Any]) -> list[str]:
    return [f"{'.'.join(key)} {value}" for key, value in _telling(axes, values)]


def _telling(axes: list[tuple[list[str], list[Any]]], values: Sequence[Any]) -> list[tuple[list[str], Any]]:
    """The settings that vary between the combinations; all if none names the run."""
    named = any(key == ["run"] for key, _ in axes)
    pairs = zip(axes, values, strict=True)
    return [(key, value) for (key, of), value in pairs if key != ["run"] and (len(of) > 1 or not named)]


def _word(value: Any) -> str:
    """A value as part of a run's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-.")
