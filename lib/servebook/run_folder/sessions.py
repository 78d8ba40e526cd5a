"""When a run was worked on and what the time went into: provenance.json, time.jsonl, and the line of the moment.

A session is one `servebook run`. Its length is written every few seconds, so that a killed one leaves it. What took
long (a point, an engine's start or end) is a line of time.jsonl, also where a notebook run by hand did it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..hardware import catalog as hardware
from . import provenance, results
from .layout import RunFiles

HEARTBEAT_S = 10.0
# What time is spent on (time.jsonl's "what"); a point's is lost until the point is kept
MEASURING, STARTING, ENDING, LOST = "measuring", "starting", "ending", "lost"


class Sessions:
    """The sessions of one run. One process at a time, the pipeline, has a session; a notebook run by hand has none."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._dir = run, run_dir
        self._faults: list[str] = []
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._read_up_to = 0

    def begin(self, command: list[str] | None) -> None:
        """Open this session's record in provenance.json and keep its length up to date until `end`."""
        record = self.provenance()
        record["sessions"].append(
            {**provenance.collect(files.ROOT, command), "gpu": hardware.snapshot(), "seconds": None, "faults": []}
        )
        files.write_json(RunFiles(self._dir).provenance, record)
        self._began, self._read_up_to = time.monotonic(), 0
        self._told_file.write_text("")
        self._ended.clear()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(ServebookError):  # a full disk shows where figures are lost
                self.note(self._faults)

    def note(self, faults: list[str]) -> None:
        """Write how long this session has run so far, and what has failed in it."""
        with self._writing:
            self._faults, record = faults, self.provenance()
            record["sessions"][-1].update(seconds=round(time.monotonic() - self._began, 1), faults=list(faults))
            files.write_json(RunFiles(self._dir).provenance, record)

    def end(self, faults: list[str]) -> None:
        """Close this session's record with its length and faults."""
        self._ended.set()
        for file in (self._status_file, self._told_file):
            file.unlink(missing_ok=True)
        self.note(faults)

    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json."""
        return files.read_json(RunFiles(self._dir).provenance) or {"run": self._run, "sessions": []}

    # --- where the time went ------------------------------------------------------------------------------------

    @property
    def _time_file(self) -> Path:
        return RunFiles(self._dir).time

    @contextlib.contextmanager
    def spending(self, what: str, **of: str) -> Iterator[dict[str, Any]]:
        """Note how long the block took: what (MEASURING, STARTING, ENDING, LOST) of which engine and point.

        The block may change the note that it is given, "what" above all; it is written however the block ends.
        """
        note: dict[str, Any] = {"what": what, **of}
        began_utc, began = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic()
        try:
            yield note
        finally:
            note |= {"began_utc": began_utc, "seconds": round(time.monotonic() - began, 3)}
            with contextlib.suppress(OSError), self._time_file.open("a") as out:  # the account is never worth a run
                out.write(json.dumps(note) + "\n")

    def spent(self) -> list[dict[str, Any]]:
        """The notes of time.jsonl, oldest first; [] where there are none (a run of an earlier version)."""
        return results.read_rows(self._time_file) if self._time_file.exists() else []

    # --- what is being done -------------------------------------------------------------------------------------

    @property
    def _told_file(self) -> Path:
        return self._dir / ".told"

    def tell(self, text: str) -> None:
        """A line for the terminal of the session that runs; nothing where none does."""
        with contextlib.suppress(OSError):
            if self._told_file.exists():
                with self._told_file.open("a") as out:
                    out.write(text + "\n")

    def told(self) -> list[str]:
        """The lines that were told since this was asked last."""
        with contextlib.suppress(OSError), self._told_file.open() as lines:
            lines.seek(self._read_up_to)
            found = lines.read()
            self._read_up_to += len(found[: found.rfind("\n") + 1].encode())
            return found[: found.rfind("\n") + 1].splitlines()
        return []

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
