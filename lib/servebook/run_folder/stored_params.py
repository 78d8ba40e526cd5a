"""A run's parameters as they are written in its folder, for pages: also those of an earlier version, or of half a run.

Nothing is validated and what is missing is empty; what works on a run reads them with params.load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .layout import RunFiles


def read(run_dir: Path) -> dict[str, Any]:
    """The content of params.yaml, {} where there is none."""
    path = RunFiles(run_dir).params
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}
