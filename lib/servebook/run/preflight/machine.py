"""The input of the checks (Machine) and their results (Check)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...common.errors import ServebookError
from ...config import params
from ...hardware import catalog as hardware
from ...hardware.catalog import NOT_AVAILABLE

Status = Literal["ok", "warn", "fail", "skipped"]
Finding = tuple[Any, ...]  # (status, detail) or (status, detail, fix)
NO_GPU: Finding = ("skipped", "not applicable: no NVIDIA GPU")
NO_PARAMS: Finding = ("skipped", "not applicable: no parameter file given")
COMMAND_TIMEOUT_S = 7.0


@dataclass(frozen=True)
class Check:
    """One check: `detail` is what was found, `fix` how to fix it if the status is warn or fail."""

    name: str
    status: Status
    detail: str
    fix: str = ""


class Machine:
    """The machine and the run, read once for all checks."""

    def __init__(self, run_params: params.RunParams | None, base: Path | None, run_dir: Path | None) -> None:
        self.params, self.base = run_params, base or Path.cwd()
        self.run_dir = run_dir or Path.cwd()
        self._unseen: str | None = None
        try:
            found = hardware.snapshot()
        except ServebookError as error:
            found, self._unseen = {}, f"{error.where} {error.what}"
        self.gpu: dict[str, Any] | None = None if found.get("gpu", NOT_AVAILABLE) == NOT_AVAILABLE else found

    @cached_property
    def silent_driver(self) -> str | None:
        """The driver's message if there is an NVIDIA device whose driver does not answer; None if all is well."""
        if self._unseen:
            return self._unseen
        if self.gpu is not None or not (os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/nvidia0")):
            return None
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip().startswith((*"0123456789", "GPU-", "MIG-")):
            return None  # hidden on purpose
        _, output = self.output("nvidia-smi")
        return next((line.strip() for line in output.splitlines() if line.strip()), "nvidia-smi prints nothing")

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
    def cpu_flags(self) -> set[str]:
        """The processor's features, as /proc/cpuinfo names them; empty where it lists none."""
        try:
            found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        except OSError:
            return set()
        return set(found[1].split()) if found else set()

    @cached_property
    def nvcc(self) -> Path | None:
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
        found = [Path(h) / "bin/nvcc" for h in homes if h and (Path(h) / "bin/nvcc").exists()]
        on_path = shutil.which("nvcc") or (shutil.which("nvcc", path="/usr/local/cuda/bin"))
        return found[0] if found else Path(on_path) if on_path else None

    @cached_property
    def cc(self) -> str:
        """The C compiler that builds of kernels call: CC, else the first that is installed."""
        return os.environ.get("CC") or next((c for c in ("gcc", "cc", "clang") if shutil.which(c)), "gcc")

    @cached_property
    def host_compiler(self) -> str:
        """The compiler that nvcc calls: the last -ccbin in NVCC_PREPEND_FLAGS and NVCC_APPEND_FLAGS, else NVCC_CCBIN,
        else gcc."""
        flags = " ".join(os.environ.get(v, "") for v in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))
        given = re.findall(r"(?:-ccbin|--compiler-bindir)[ =]+['\"]?([^\s'\"]+)", flags)
        found = (given or [os.environ.get("NVCC_CCBIN") or "gcc"])[-1]
        return os.path.join(found, "gcc") if os.path.isdir(found) else found

    def output(self, *command: str, stdin: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> tuple[int, str]:
        """Exit status and output of a command; status 127 if it cannot be run, 124 after a timeout."""
        try:
            done = subprocess.run(
                command,
                input=stdin,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return 124, "took too long"
        except OSError as error:
            return 127, error.strerror or "cannot be run"
        return done.returncode, done.stdout

    @property
    def compiles_kernels(self) -> bool:
        """Whether code may be compiled at start: always on a GPU, on a CPU by vLLM unless enforce_eager is set."""
        engines = self.params.engines.values() if self.params else []
        compiled = any(isinstance(e, params.VllmEngine) and not e.enforce_eager for e in engines)
        return self.gpu is not None or compiled


def first_line(output: str) -> str:
    """The first non-empty line of a program's output, cut to a terminal's width."""
    return next((line.strip() for line in output.splitlines() if line.strip()), "?")[:100]
