"""A run's folder as the page is made from it: parameters and predictions as they are written there.

Nothing is validated and what is missing is empty, so that a run of an earlier version, or half of one, is told too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..common import files


def params(run_dir: Path) -> dict[str, Any]:
    """The content of params.yaml, {} where there is none."""
    path = run_dir / "params.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}


def predictions(run_dir: Path) -> dict[str, Any]:
    """The content of predictions.json, {"frozen": []} where there is none. Raises ServebookError for broken JSON."""
    return files.read_json(run_dir / "predictions.json") or {"frozen": []}
