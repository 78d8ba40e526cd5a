"""Sessions of a run and where their time went: provenance.json, time.jsonl, and the current status line.

A session is one `servebook run`. Its length is written every few seconds, so a killed session has one, too. Every
point, engine start and engine end is a line of time.jsonl, also when a notebook is run by hand.
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
# categories of time (time.jsonl's "what"); a point's time is LOST until the point is stored
MEASURING, STARTING, ENDING, LOST = "measuring", "starting", "ending", "lost"


class Sessions:
    """The sessions of one run. Only the pipeline has a session, one at a time; a notebook run by hand has none."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._dir = run, run_dir
        self._faults: list[str] = []
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._read_up_to = 0

    def begin(self, command: list[str] | None) -> None:
        """Start this session's record in provenance.json and keep its length up to date until `end`."""
        record = self.provenance()
        record["sessions"].append(
            {**provenance.collect(files.ROOT, command), "gpu": hardware.snapshot(), "seconds": None, "faults": []}
        )
        files.write_json(RunFiles(self._dir).provenance, record)
        self._began, self._read_up_to = time.monotonic(), 0
        self._lines_file.write_text("")
        self._ended.clear()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(ServebookError):  # a full disk is reported where figures would be lost
                self.note(self._faults)

    def note(self, faults: list[str]) -> None:
        """Write the session's length and its faults so far."""
        with self._writing:
            self._faults, record = faults, self.provenance()
            record["sessions"][-1].update(seconds=round(time.monotonic() - self._began, 1), faults=list(faults))
            files.write_json(RunFiles(self._dir).provenance, record)

    def end(self, faults: list[str]) -> None:
        """Close this session's record with its length and faults."""
        self._ended.set()
        for file in (self._status_file, self._lines_file):
            file.unlink(missing_ok=True)
        self.note(faults)

    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json."""
        return files.read_object(RunFiles(self._dir).provenance) or {"run": self._run, "sessions": []}

    # --- where the time went ------------------------------------------------------------------------------------

    @property
    def _time_file(self) -> Path:
        return RunFiles(self._dir).time

    @contextlib.contextmanager
    def spending(self, what: str, **of: str) -> Iterator[dict[str, Any]]:
        """Record how long the block took, with the category (MEASURING, STARTING, ENDING, LOST), engine and point.

        The block may change the note that it gets, such as "what"; the note is written however the block ends.
        """
        note: dict[str, Any] = {"what": what, **of}
        began_utc, began = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic()
        try:
            yield note
        finally:
            note |= {"began_utc": began_utc, "seconds": round(time.monotonic() - began, 3)}
            with (
                contextlib.suppress(OSError),
                self._time_file.open("a") as out,
            ):  # failing to record time must not fail the run
                out.write(json.dumps(note) + "\n")

    def spent(self) -> list[dict[str, Any]]:
        """The notes of time.jsonl, oldest first; [] if there are none (a run of an earlier version)."""
        return results.read_rows(self._time_file) if self._time_file.exists() else []

    # --- what is being done -------------------------------------------------------------------------------------

    @property
    def _lines_file(self) -> Path:
        return self._dir / ".lines"

    def send_line(self, text: str) -> None:
        """Send a line to the terminal of the running session; nothing happens without one."""
        with contextlib.suppress(OSError):
            if self._lines_file.exists():
                with self._lines_file.open("a") as out:
                    out.write(text + "\n")

    def lines_sent(self) -> list[str]:
        """The lines sent since the last call."""
        with contextlib.suppress(OSError), self._lines_file.open() as lines:
            lines.seek(self._read_up_to)
            found = lines.read()
            self._read_up_to += len(found[: found.rfind("\n") + 1].encode())
            return found[: found.rfind("\n") + 1].splitlines()
        return []

    @property
    def _status_file(self) -> Path:
        return self._dir / ".status"

    def set_status(self, text: str) -> None:
        """Set the current activity, for other processes that show it."""
        with contextlib.suppress(OSError):  # a status line must neither fail the run nor wait for the disk
            self._status_file.write_text(text)

    def status(self) -> str:
        """The current activity of the kernel, one line, for the terminal."""
        try:
            return self._status_file.read_text()
        except OSError:
            return ""
