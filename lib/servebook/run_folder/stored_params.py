"""A run's parameters as stored in its folder, for pages: also of an earlier version or an incomplete run.

Nothing is validated, and missing parts are empty; code that works on a run uses params.load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .layout import RunFiles


def read(run_dir: Path) -> dict[str, Any]:
    """The content of params.yaml, {} if there is no file."""
    path = RunFiles(run_dir).params
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}
