"""When a run was worked on: one record a session in provenance.json, and the line that says what it does just now."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from . import files, hardware, provenance

ROOT = Path(__file__).parents[2]  # the checkout: the package is installed editable


class Sessions:
    """The sessions of one run. One process at a time, the pipeline, has a session; a notebook run by hand has none."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._dir = run, run_dir

    def begin(self, command: list[str] | None) -> None:
        """Open this session's record in provenance.json."""
        record = self.provenance()
        record["sessions"].append(
            {**provenance.collect(ROOT, command), "gpu": hardware.snapshot(), "seconds": None, "faults": []}
        )
        files.write_json(self._dir / "provenance.json", record)
        self._began = time.monotonic()

    def note(self, faults: list[str]) -> None:
        """Write how long this session has run so far: the analysis tells it, and a killed session leaves it."""
        record = self.provenance()
        record["sessions"][-1].update(seconds=round(time.monotonic() - self._began, 1), faults=faults)
        files.write_json(self._dir / "provenance.json", record)

    def end(self, faults: list[str]) -> None:
        self.note(faults)
        self._status_file.unlink(missing_ok=True)

    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json."""
        return files.read_json(self._dir / "provenance.json") or {"run": self._run, "sessions": []}

    # --- the status line ----------------------------------------------------------------------------------------

    @property
    def _status_file(self) -> Path:
        return self._dir / ".status"

    def set_status(self, text: str) -> None:
        """Say what is being done now, for whoever watches from another process."""
        with contextlib.suppress(OSError):  # a status line is never worth a run, nor a wait for the disk
            self._status_file.write_text(text)

    def status(self) -> str:
        """What the kernel is doing, one line, for the terminal."""
        try:
            return self._status_file.read_text()
        except OSError:
            return ""
