"""What names this machine's folders, out of what is published.

A path inside the project or the run keeps its short name, any other keeps its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.files import ROOT

# no letter, digit or slash before it: a longer path, a URL or base64 is not the beginning of one
_BEFORE = r"(?<![\w.~:/+=$-])"
_WORD = r"[^\s\"'<>|:;,()\[\]{}]"
_HOME = re.compile(rf"{_BEFORE}(?:/(?:home|Users)/[\w.-]+|/root)(?=/|\b)")
_TEMPORARY = re.compile(rf"{_BEFORE}(?:/private)?/(?:var/folders|(?:var/)?tmp)/(?:{_WORD}+/)?({_WORD}+)")


def _from_here(match: re.Match[str]) -> str:
    return "" if match[1] else "."


class Scrub:
    """Replaces folders in text: the run's becomes outputs/<run>, the checkout's the path from there, a home ~, and of
    a temporary folder's path its last part stays."""

    def __init__(self, run_dir: Path | str) -> None:
        run = Path(run_dir).resolve()
        known = {str(run): f"outputs/{run.name}", str(run_dir): f"outputs/{run.name}", str(run.parent): "outputs",
                 str(ROOT): ".", str(Path.home()): "~"}  # fmt: skip
        known = {folder: name for folder, name in known.items() if folder.startswith("/") and folder.count("/") > 1}
        # the longest first: the run may lie inside the checkout, and that inside a home
        self._known = [
            (re.compile(rf"{_BEFORE}{re.escape(folder)}(/?)(?![\w-])" if name != "." else
                        rf"{_BEFORE}{re.escape(folder)}(/|(?![\w.-]))"), name)
            for folder, name in sorted(known.items(), key=lambda k: -len(k[0]))
        ]  # fmt: skip

    def __call__(self, text: str) -> str:
        for pattern, name in self._known:
            text = pattern.sub(_from_here if name == "." else rf"{name}\1", text)
        return _TEMPORARY.sub(r"…/\1", _HOME.sub("~", text))

    def notebook(self, notebook: Any) -> None:
        """Scrub a notebook's sources and outputs in place; images are left alone."""
        for cell in notebook.cells:
            cell.source = self(cell.source)
            for output in cell.get("outputs", []):
                for key in ("text", "evalue", "traceback"):
                    if key in output:
                        output[key] = self._any(output[key])
                data = output.get("data", {})
                for kind in data:
                    if kind.startswith("text/"):
                        data[kind] = self._any(data[kind])

    def _any(self, value: Any) -> Any:
        if isinstance(value, str):
            return self(value)
        return [self._any(v) for v in value] if isinstance(value, list) else value

    def record(self, value: Any) -> Any:
        """Every text of a JSON-like value scrubbed."""
        if isinstance(value, Mapping):
            return {k: self.record(v) for k, v in value.items()}
        return [self.record(v) for v in value] if isinstance(value, list) else self._any(value)
