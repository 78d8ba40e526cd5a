"""The target of `--json`: a file that is replaced atomically, or a pipe or device that is written to.

It is opened before anything is measured, so that an unwritable name costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import IO, Any

from ..common import files
from ..common.errors import ServebookError

_DESCRIPTOR = re.compile(r"(?:/dev/fd|/proc/self/fd)/(\d+)")
_STANDARD = {"-": 1, "/dev/stdout": 1, "/dev/stderr": 2}


class JsonFile:
    """The target of --json. Raises ServebookError at once if it is not writable.

    A plain file, or a link's target, contains all results after every `write`; a pipe or a device gets the final value
    once, at `close`. on_stdout: the JSON goes to standard output, so nothing else may be printed there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._value: Any = None
        self._pipe: IO[str] | None = None
        descriptor = _descriptor(str(path))
        self.on_stdout = descriptor == 1
        try:
            if descriptor in (1, 2) and (sys.__stdout__, sys.__stderr__)[descriptor - 1] is None:
                raise OSError(errno.EBADF, "it is closed")
            if descriptor is not None:
                self._pipe = os.fdopen(os.dup(descriptor), "w", encoding="utf-8")
            elif path.exists() and not path.is_file():
                self._pipe = self._open_special()
            else:
                self._path = path.resolve()  # a link stays, its target is replaced
                self._try()
        except OSError as error:
            raise ServebookError(
                f"cannot be written ({error.strerror or error})", f"--json {path}", "Give another file"
            ) from None

    def _open_special(self) -> IO[str]:
        mode = self._path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if stat.S_ISSOCK(mode):
            raise OSError(errno.ENXIO, "it is a socket")
        if stat.S_ISFIFO(mode):
            with contextlib.suppress(OSError):
                return os.fdopen(_blocking(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)), "w", encoding="utf-8")
            print(f"servebook: waiting until somebody reads {self._path}", file=sys.stderr)
        return self._path.open("w", encoding="utf-8")

    def _try(self) -> None:
        """Check that a file can be created beside it and renamed to it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        scratch.write_bytes(b"")
        scratch.unlink()

    def write(self, value: Any) -> None:
        """Store a value. Raises ServebookError if that fails."""
        self._value = value
        if self._pipe is None:
            try:
                files.write_json(self._path, files.finite(value))
            except ServebookError as error:
                raise ServebookError(error.what, str(self._path), "The figures above are all that is kept") from None

    def close(self) -> None:
        """Write the final value to a pipe or a device."""
        if self._pipe is None:
            return
        try:
            with self._pipe as pipe:
                if self._value is not None:
                    pipe.write(json.dumps(files.finite(self._value), indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            reason = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror
            raise ServebookError(f"cannot be written ({reason})", f"--json {self._path}") from None


def _descriptor(name: str) -> int | None:
    """The file descriptor of a name: opening /dev/stdout anew would overwrite earlier output."""
    match = _DESCRIPTOR.fullmatch(name)
    return int(match[1]) if match else _STANDARD.get(name)


def _blocking(descriptor: int) -> int:
    os.set_blocking(descriptor, True)
    return descriptor
