"""Is this machine fit to run the book? Each check says what it found and, where that is not well, what to do.

The first six are the seams at which a rented GPU machine breaks (driver, nvcc, host compiler, C++, headers, ninja);
the rest is what else has cost a run. Nothing is started or changed; without a GPU its checks are "skipped".
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from . import hardware, params
from .errors import ServebookError

Status = Literal["ok", "warn", "fail", "skipped"]
PROJECT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 4.0
RESULTS_GB = 1.0  # rows, metrics, notebooks and figures of a large run
BUSY_PERCENT, FOREIGN_GPU_GIB = 10, 1.0
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
GOOD_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}


@dataclass(frozen=True)
class Check:
    """One check: `detail` is what was found, `fix` what to do where the status is warn or fail."""

    name: str
    status: Status
    detail: str
    fix: str = ""


class Machine:
    """What the checks look at, so that each finding has one place where it comes from."""

    def __init__(self, run_params: params.RunParams | None, base: Path | None, run_dir: Path | None) -> None:
        self.params, self.base = run_params, base or Path.cwd()
        self.run_dir = run_dir or Path.cwd()

    @cached_property
    def gpu(self) -> dict[str, Any] | None:
        """hardware.snapshot of the GPU, None where there is none."""
        found = hardware.snapshot()
        return None if found.get("gpu") == hardware.NOT_AVAILABLE else found

    @cached_property
    def torch_cuda(self) -> tuple[int, int] | None:
        """The CUDA version that the installed torch was built for, None for a CPU build; torch is not imported."""
        spec = importlib.util.find_spec("torch")
        folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
        with contextlib.suppress(OSError, TypeError):
            found = re.search(r"^cuda[^=\n]*= *['\"](\d+)\.(\d+)", (Path(str(folder)) / "version.py").read_text(), re.M)
            return (int(found[1]), int(found[2])) if found else None
        return None

    @cached_property
    def nvcc(self) -> Path | None:
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
        found = [Path(h) / "bin/nvcc" for h in homes if h and (Path(h) / "bin/nvcc").exists()]
        on_path = shutil.which("nvcc") or (shutil.which("nvcc", path="/usr/local/cuda/bin"))
        return found[0] if found else Path(on_path) if on_path else None

    def output(self, *command: str, stdin: str = "") -> tuple[int, str]:
        """Exit status and output of a command; status 127 where it cannot be run, 124 where it took too long."""
        try:
            done = subprocess.run(
                command,
                input=stdin,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return 124, "took too long"
        except OSError as error:
            return 127, error.strerror or "cannot be run"
        return done.returncode, done.stdout

    @property
    def compiles_kernels(self) -> bool:
        """Whether the run's vLLM compiles code when it starts."""
        engines = self.params.engines.values() if self.params else []
        compiled = any(isinstance(e, params.VllmEngine) and not e.enforce_eager for e in engines)
        return self.gpu is not None or compiled


def run(run_params: params.RunParams | None, base: Path | None, run_dir: Path | None) -> list[Check]:
    """All checks, in the order they are shown. Without params only the machine itself is looked at."""
    return list(checks_of(Machine(run_params, base, run_dir)))


def checks_of(machine: Machine) -> Iterable[Check]:
    for name, check in CHECKS.items():
        try:
            found = check(machine)
        except Exception as error:  # a check that breaks must not hide the others
            found = ("warn", f"could not be checked ({type(error).__name__}: {error})", "Report this")
        status, detail, *fix = found
        yield Check(name, status, detail, fix[0] if fix else "")


def text(checks: list[Check]) -> str:
    """The checks as lines for a terminal, each fault with its fix below it."""
    marks = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skipped": "–   "}
    lines = []
    for c in checks:
        lines.append(f"{marks[c.status]}  {c.name}: {c.detail}")
        if c.fix and c.status in ("warn", "fail"):
            lines.append(f"      → {c.fix}")
    failed, warned = (sum(c.status == s for c in checks) for s in ("fail", "warn"))
    lines.append(f"{failed} to mend, {warned} to look at, of {len(checks)} checks")
    return "\n".join(lines)


def refuse(checks: list[Check]) -> None:
    """Raise ServebookError with the first failed check and its fix; nothing where all may go on."""
    failed = [c for c in checks if c.status == "fail"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise ServebookError(f"preflight failed{more}: {failed[0].detail}", failed[0].name, failed[0].fix)


def warnings(run_params: params.RunParams, base: Path) -> list[str]:
    """What a parameter file is free to ask for and had better be known before a run; one line each."""
    from .model import local_folder

    found, m = [], run_params.model
    paths = [("model.path", m.path)] if m.path else []
    for name, engine in run_params.engines.items():
        values = (a.rpartition("=")[2] for a in getattr(engine, "extra_args", ()))
        paths += [(f"engines.{name}.extra_args", a) for a in values if a.startswith(("/", "~", "../"))]
    for key, path in paths:
        folder = local_folder(path, base)
        if not any(folder.is_relative_to(p) for p in (PROJECT, base.resolve())):
            found.append(f"{key} is outside the project: {folder}")
    if m.hub and not m.revision:
        commit = _cached_commit(m.hub)
        pin = f"model.revision: {commit}" if commit else "model.revision, a commit from the model's page on the Hub"
        found.append(f"model.hub {m.hub} may be another model tomorrow; pin it with {pin}")
    if m.trust_remote_code:
        found.append("model.trust_remote_code is on: code that comes with the model is run")
    return found


def _cached_commit(hub: str) -> str | None:
    """The commit of the Hub's main branch when it was last downloaded here."""
    from huggingface_hub import constants

    with contextlib.suppress(OSError):
        return (Path(constants.HF_HUB_CACHE) / f"models--{hub.replace('/', '--')}" / "refs/main").read_text().strip()
    return None


Finding = tuple[Any, ...]  # (status, detail) or (status, detail, fix)
NO_GPU: Finding = ("skipped", "not applicable: no NVIDIA GPU")
NO_PARAMS: Finding = ("skipped", "not applicable: no parameter file given")


# --- the six seams ------------------------------------------------------------------------------------------------


def _driver(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    driver, offered, needed = m.gpu["driver"], m.gpu["cuda_driver"], m.torch_cuda
    if needed is None:
        return "fail", f"driver {driver}, but the installed torch is built for the CPU", "Run `make KIND=cuda …`"
    if not isinstance(offered, int | float):
        return "warn", f"driver {driver} does not say which CUDA it offers", "Check with nvidia-smi"
    have, want = int(offered), f"{needed[0]}.{needed[1]}"
    detail = f"driver {driver} offers CUDA {offered:g}, torch is built for {want}"
    if have < needed[0]:
        return "fail", detail, f"Update the driver to one for CUDA {want}, or install a vLLM built for CUDA {have}"
    if round(offered * 10) < needed[0] * 10 + needed[1]:
        return (
            "warn",
            detail + " (works within one major version, but not for kernels compiled at start)",
            "Update the driver",
        )
    return "ok", detail


def _nvcc(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    if m.nvcc is None:
        want = m.torch_cuda[0] if m.torch_cuda else "the driver's"
        return (
            "warn",
            "nvcc is not found: kernels that are compiled at start will fail",
            f"Install CUDA toolkit {want} or set CUDA_HOME",
        )
    _, said = m.output(str(m.nvcc), "--version")
    found = re.search(r"release (\d+)\.(\d+)", said)
    if not found:
        return "fail", f"{m.nvcc} does not run ({said.strip()[:80]})", "Install the CUDA toolkit again"
    detail = f"nvcc {found[1]}.{found[2]}, torch is built for CUDA {'.'.join(map(str, m.torch_cuda or ()))}"
    if m.torch_cuda and int(found[1]) != m.torch_cuda[0]:
        return (
            "fail",
            detail,
            f"Set CUDA_HOME to a CUDA {m.torch_cuda[0]} toolkit: kernels compiled by another do not load",
        )
    return "ok", detail


def _host_compiler(m: Machine) -> Finding:
    if m.gpu is None or m.nvcc is None:
        return NO_GPU if m.gpu is None else ("skipped", "not applicable: no nvcc")
    header = next(m.nvcc.resolve().parent.parent.glob("**/crt/host_config.h"), None)
    limit = re.search(r"__GNUC__ > (\d+)", header.read_text(errors="replace")) if header else None
    status, version = m.output("gcc", "-dumpversion")
    if status:
        return "fail", "gcc is not found", "Install gcc and g++ (Debian, Ubuntu: apt install build-essential)"
    have = int(version.split(".")[0])
    if limit is None:
        return (
            "warn",
            f"gcc {have}; nvcc does not say which it takes",
            "If nvcc complains, set NVCC_PREPEND_FLAGS=-ccbin=…",
        )
    detail = f"gcc {have}, nvcc takes up to {limit[1]}"
    if have > int(limit[1]):
        return "fail", detail, f"Install gcc-{limit[1]} and set NVCC_PREPEND_FLAGS='-ccbin g++-{limit[1]}'"
    return "ok", detail


def _cxx(m: Machine) -> Finding:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"
    fix = "Install g++ of the same version as gcc (Debian, Ubuntu: apt install build-essential)"
    bad: Status = "fail" if m.compiles_kernels else "warn"
    with tempfile.TemporaryDirectory() as folder:
        # Compiles and links: gcc without cc1plus, or without libstdc++'s headers, is found only by doing it
        status, said = m.output(
            compiler,
            "-x",
            "c++",
            "-",
            "-o",
            f"{folder}/a.out",
            stdin="#include <string>\nint main() { return std::string().size(); }",
        )
    if status:
        return bad, f"{compiler} cannot build a program ({(said.strip().splitlines() or ['?'])[0][:100]})", fix
    return "ok", f"{compiler} builds and links"


def _headers(m: Machine) -> Finding:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.exists():
        return "ok", f"Python.h of {sys.version_info.major}.{sys.version_info.minor}"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    fix = f"Install Python's headers (Debian, Ubuntu: apt install {python}-dev)"
    return ("fail" if m.compiles_kernels else "warn"), f"{header} is missing", fix


def _ninja(m: Machine) -> Finding:
    # Found as the engines' own processes would find it: on PATH or in the venv
    ninja = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if ninja is None:
        return ("fail" if m.compiles_kernels else "warn"), "ninja is not found", "pip install ninja"
    status, said = m.output(ninja, "--version")
    if status:
        return "fail", f"{ninja} does not run ({said.strip()[:80]})", "pip install --force-reinstall ninja"
    return "ok", f"ninja {said.split()[0]}"


# --- the GPU ------------------------------------------------------------------------------------------------------


def _gpu_state(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    busy, reasons = m.gpu["utilization_percent"], m.gpu["throttle_reasons"]
    detail = f"{m.gpu['gpu']}, {busy} % busy, {m.gpu['temperature_c']} °C, power limit {m.gpu['power_limit_w']} W"
    slow = [name for bit, name in SLOWDOWNS.items() if isinstance(reasons, int) and reasons & bit]
    if slow:
        return (
            "fail",
            f"{detail}; throttled: {', '.join(slow)}",
            "Let it cool, or take another machine: figures would be too low",
        )
    if isinstance(busy, int) and busy > BUSY_PERCENT:
        return (
            "fail",
            detail,
            "End what uses the GPU (nvidia-smi shows it): it would share the GPU with the measurement",
        )
    return "ok", detail


def _gpu_processes(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    pids, used = m.gpu["processes"], m.gpu["memory_used_bytes"]
    gib = used / 2**30 if isinstance(used, int) else None
    detail = "memory in use " + (f"{gib:.1f} GiB" if gib is not None else hardware.NOT_AVAILABLE)
    if isinstance(pids, list) and pids:
        return "fail", f"{detail}, by process {', '.join(map(str, pids))}", "End those processes, or wait for them"
    if gib is not None and gib > FOREIGN_GPU_GIB:
        return "warn", f"{detail}, by no process that can be seen", "Look outside this container, or reboot the machine"
    return "ok", f"{detail}, no other process"


def _ecc(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    ecc = m.gpu["ecc"]
    if not isinstance(ecc, bool):
        return "ok", "ECC: not reported by this GPU"
    return "ok", f"ECC {'on' if ecc else 'off'}" + (
        " (costs memory bandwidth on GDDR6 cards such as the A40)" if ecc else ""
    )


# --- the machine --------------------------------------------------------------------------------------------------


def _disk(m: Machine) -> Finding:
    needs = [("results", _existing(m.run_dir), RESULTS_GB)]
    if m.params and m.params.model.hub and m.params.model.weights == "real":
        from . import model

        cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
        with contextlib.suppress(ServebookError):
            if not _cached(m.params.model):
                needs.append(
                    ("weights", _existing(cache), 1.1 * model.load_shape(m.params.model, m.base).weight_bytes / 1e9)
                )
    short = []
    for what, folder, needed in needs:
        free = shutil.disk_usage(folder).free / 1e9
        if free < needed:
            short.append(f"{free:.1f} GB free for the {what}, {needed:.1f} GB needed")
    free = shutil.disk_usage(needs[0][1]).free / 1e9
    if short:
        return "fail", "; ".join(short), "Free space, or set SERVEBOOK_OUTPUTS or HF_HOME to a larger disk"
    return "ok", f"{free:.0f} GB free for the results"


def _writable(m: Machine) -> Finding:
    folder = _existing(m.run_dir)
    if not os.access(folder, os.W_OK | os.X_OK):
        return "fail", f"{folder} is not writable", "Change its permissions, or set SERVEBOOK_OUTPUTS to another folder"
    return "ok", "the run's folder can be written"


def _shared_memory(m: Machine) -> Finding:
    if not os.path.isdir("/dev/shm"):
        return "skipped", "not applicable: no /dev/shm"
    free = shutil.disk_usage("/dev/shm").free / 2**20
    if free < 256:
        return (
            "warn",
            f"/dev/shm has {free:.0f} MiB free",
            "Start the container with --shm-size=2g or --ipc=host: vLLM's processes talk there",
        )
    return "ok", f"/dev/shm has {free:.0f} MiB free"


def _tmp(m: Machine) -> Finding:
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 8):
        return (
            "fail",
            f"{folder} is mounted noexec: compiled kernels cannot be loaded from it",
            "Set TMPDIR to a folder on another mount",
        )
    return "ok", f"programs may run from {folder}"


def _file_descriptors(m: Machine) -> Finding:
    most = max(
        (
            c
            for s in (m.params.sweeps.values() if m.params else [])
            if isinstance(s, params.ConcurrencySweep)
            for c in s.concurrency
        ),
        default=1,
    )
    needed, (soft, hard) = 4 * most + 512, resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} files may be open, {needed} are enough for C = {most}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        return "fail", detail, f"Raise the hard limit (ulimit -Hn) to {needed}"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return "fail", detail, f"Raise it for this shell: ulimit -n {needed}"
    return "ok", detail


def _clock(m: Machine) -> Finding:
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return "skipped", "not applicable: the system does not say"
    if source not in GOOD_CLOCKS:
        return (
            "warn",
            f"clock source {source} is slow to read",
            "Boot with clocksource=tsc: each time stamp costs microseconds",
        )
    return "ok", f"clock source {source}"


# --- the run ------------------------------------------------------------------------------------------------------


def _ports(m: Machine) -> Finding:
    if m.params is None:
        return NO_PARAMS
    from .engines import ports

    asked = {name: getattr(e, "port", None) for name, e in m.params.engines.items()}
    given = {name: int(port) for name, port in asked.items() if port}
    taken = [f"{port} ({name})" for name, port in given.items() if not ports.is_free(port)]
    if taken:
        return "fail", f"in use: {', '.join(taken)}", "Give another port, or leave port out: a free one is found"
    return "ok", f"{', '.join(map(str, given.values()))} free" if given else "none given, free ones are found"


def _model(m: Machine) -> Finding:
    if m.params is None:
        return NO_PARAMS
    from . import model

    wanted = m.params.model
    name = model.model_name(wanted)
    if wanted.hub and not _cached(wanted):
        status = _hub_status()
        if status:
            return (
                "fail",
                f"{name} is not in the cache, and the Hub does not answer ({status})",
                "Check the network, or download it first: hf download " + name,
            )
        return "ok", f"{name}: the Hub answers"
    try:
        model.load_shape(wanted, m.base)
    except ServebookError as error:
        return "fail", f"{error.where}: {error.what}", error.fix
    if wanted.path and wanted.weights == "real" and not _has_weights(model.local_folder(wanted.path, m.base)):
        return "fail", f"{name} has no weight files", "Put the *.safetensors there, or set model.weights: dummy"
    if wanted.path:
        folder = model.local_folder(wanted.path, m.base)
        outside = not folder.is_relative_to(m.base.resolve().parent)
        return "ok", f"{name} is there" + (f", outside the project: {folder}" if outside else "")
    return "ok", f"{name}, {wanted.weights} weights"


def _engines(m: Machine) -> Finding:
    if m.params is None:
        return NO_PARAMS
    from . import engines

    cannot = {name: why for name in m.params.engines if (why := engines.check(m.params, name))}
    if cannot:
        status: Status = "fail" if len(cannot) == len(m.params.engines) else "warn"
        return (
            status,
            "; ".join(f"{name}: {why}" for name, why in cannot.items()),
            "The run goes on with the other engines",
        )
    return "ok", ", ".join(m.params.engines)


def _existing(folder: Path) -> Path:
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "*.pt"))


def _cached(wanted: params.ModelParams) -> bool:
    """Whether the Hub's cache holds what the run needs of the model: weights, or config.json for dummy ones."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{str(wanted.hub).replace('/', '--')}" / "snapshots"
    snapshots = [p for p in folder.glob("*") if (p / "config.json").exists()]
    return any(wanted.weights == "dummy" or _has_weights(p) for p in snapshots)


def _hub_status() -> str | None:
    """Why the Hub cannot be reached, None where it can."""
    import urllib.request

    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=COMMAND_TIMEOUT_S):
            return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "driver and CUDA runtime": _driver,
    "nvcc": _nvcc,
    "host compiler for nvcc": _host_compiler,
    "C++ toolchain": _cxx,
    "Python headers": _headers,
    "ninja": _ninja,
    "GPU idle, not throttled": _gpu_state,
    "GPU memory": _gpu_processes,
    "GPU ECC": _ecc,
    "disk": _disk,
    "output folder": _writable,
    "shared memory": _shared_memory,
    "temporary folder": _tmp,
    "open files": _file_descriptors,
    "clock": _clock,
    "ports": _ports,
    "model": _model,
    "engines": _engines,
}
