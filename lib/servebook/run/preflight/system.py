"""Checks of the machine around the GPU: disks, folders, limits, the clock."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
from pathlib import Path

from ...common.errors import ServebookError
from . import needs
from .machine import Finding, Machine

RESULTS_GB = 1.0  # rows, metrics, notebooks and figures of a large run
SHARED_MIB = 256
TRIAL = 'printf "#!/bin/sh\\nexit 0\\n" > "$0" && chmod 755 "$0" && "$0"'
GOOD_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}


def disk(m: Machine) -> Finding:
    wanted = [("results", existing(m.run_dir), RESULTS_GB)]
    if (asked := m.params and m.params.model) and asked.hub and asked.weights == "real" and needs.to_fetch(asked):
        from ... import model

        with contextlib.suppress(ServebookError):
            weights_gb = 1.1 * model.read_shape(asked, m.base).weight_bytes / 1e9
            wanted.append(("weights", existing(needs.hub_folder(asked.hub)), weights_gb))
    by_disk: dict[int, list[tuple[str, Path, float]]] = {}
    for need in wanted:  # add up the needs on the same disk
        by_disk.setdefault(os.stat(need[1]).st_dev, []).append(need)
    short = []
    for on_it in by_disk.values():
        free, needed = shutil.disk_usage(on_it[0][1]).free / 1e9, sum(gb for _, _, gb in on_it)
        if free < needed:
            short.append(f"{free:.1f} GB free for the {' and '.join(w for w, _, _ in on_it)}, {needed:.1f} GB needed")
    if short:
        return "fail", "; ".join(short), "Free space, or set SERVEBOOK_OUTPUTS or HF_HOME to a larger disk"
    return "ok", f"{shutil.disk_usage(wanted[0][1]).free / 1e9:.0f} GB free for the results"


def output_folder(m: Machine) -> Finding:
    folder = existing(m.run_dir)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "Change its permissions, or set SERVEBOOK_OUTPUTS to another folder"
        return "fail", f"{folder} is not writable ({error.strerror})", fix
    return "ok", "a file can be written there"


def shared_memory(m: Machine) -> Finding:
    if not os.path.isdir("/dev/shm"):
        return "skipped", "not applicable: no /dev/shm"
    free = shutil.disk_usage("/dev/shm").free / 2**20
    if free < SHARED_MIB:
        fix = "Start the container with --shm-size=2g or --ipc=host: vLLM's processes communicate through it"
        return "warn", f"/dev/shm has {free:.0f} MiB free", fix
    return "ok", f"/dev/shm has {free:.0f} MiB free"


def temporary_folder(m: Machine) -> Finding:
    """Kernels compiled at start are loaded from the temporary folder and from caches in the home folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tried = []
    for folder, variable in ((Path(tempfile.gettempdir()), "TMPDIR"), (existing(caches), "XDG_CACHE_HOME")):
        fix = f"Set {variable} to a folder where programs may run"
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".preflight-") as inside:
                # written by the shell: a child process of another check would otherwise keep the file busy
                status, output = m.output("sh", "-c", TRIAL, f"{inside}/true")
        except OSError as error:
            return "fail", f"{folder} is not writable ({error.strerror})", fix
        if status:
            noexec = os.statvfs(folder).f_flag & os.ST_NOEXEC
            why = "it is mounted noexec" if noexec else output.strip()
            return "fail", f"programs do not run from {folder} ({why}): compiled kernels cannot be loaded", fix
        tried.append(str(folder))
    return "ok", f"programs run from {' and '.join(dict.fromkeys(tried))}"


def open_files(m: Machine) -> Finding:
    """Client and servers raise their own limit to the hard limit (load/runtime.py, engines/guard.py)."""
    largest = 1
    for sweep in m.params.sweeps.values() if m.params else ():
        given = getattr(sweep, "concurrency", None) or 1  # an open loop may have no cap
        largest = max(largest, *([given] if isinstance(given, int) else given))
    needed = 4 * largest + 512
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return "ok", f"the number of open files is not limited, C = {largest} needs {needed}"
    detail = f"at most {hard} files may be open, C = {largest} needs {needed}"
    return ("fail", detail, f"Raise the hard limit (ulimit -Hn) to {needed}") if hard < needed else ("ok", detail)


def clock(m: Machine) -> Finding:
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return "skipped", "not applicable: the system names no clock source"
    if source not in GOOD_CLOCKS:
        fix = "Boot with clocksource=tsc: each time stamp costs microseconds"
        return "warn", f"clock source {source} is slow to read", fix
    return "ok", f"clock source {source}"


def existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
