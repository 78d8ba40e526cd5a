"""Checks of the toolchain: driver, nvcc, its host compiler, C++, Python headers, ninja. Each is run, not only found."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from .machine import NO_GPU, Finding, Machine, Status, first_line

KERNEL = "__global__ void k(int *x) { *x = 1; }\nint main() { return 0; }"
PROGRAM = "#include <string>\nint main() { return std::string().size(); }"
# cuInit finds faults that NVML does not: a mismatched library, a device that may not be opened
CUDA = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""


def driver(m: Machine) -> Finding:
    if m.silent_driver:
        fix = (
            "Load the installed driver's module or reboot; in a container, start it with the host's driver (--gpus all)"
        )
        return "fail", f"there is an NVIDIA device, but its driver does not answer: {m.silent_driver}", fix
    if m.gpu is None:
        return NO_GPU
    version, offered, needed = m.gpu["driver"], m.gpu["cuda_driver"], m.torch_cuda
    if needed is None:
        return "fail", f"driver {version}, but the installed torch is built for the CPU", "Run `make KIND=cuda …`"
    if not isinstance(offered, int | float):
        return "warn", f"driver {version} does not report its CUDA version", "Check with nvidia-smi"
    have, want = int(offered), f"{needed[0]}.{needed[1]}"
    detail = f"driver {version} offers CUDA {offered:g}, torch is built for {want}"
    if have < needed[0]:
        return "fail", detail, f"Update the driver to one for CUDA {want}, or install a vLLM built for CUDA {have}"
    status, output = m.output(sys.executable, "-I", "-c", CUDA)
    if status or not re.match(r"0 0 [1-9]", output.strip()):
        fix = "Reboot, or start the container with the host's driver; CUDA_VISIBLE_DEVICES may name no device"
        return "fail", f"{detail}, but CUDA does not start ({first_line(output)})", fix
    if round(offered * 10) < needed[0] * 10 + needed[1]:
        within = " (works within one major version, but not for kernels compiled at start)"
        return "warn", detail + within, "Update the driver"
    return "ok", f"{detail}, and CUDA starts"


def nvcc(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    want = m.torch_cuda[0] if m.torch_cuda else "the driver's"
    if m.nvcc is None:
        detail = "nvcc is not found: kernels that are compiled at start (FlashInfer's) will fail"
        return "warn", detail, f"Install CUDA toolkit {want} or set CUDA_HOME"
    _, output = m.output(str(m.nvcc), "--version")
    found = re.search(r"release (\d+)\.(\d+)", output)
    if not found:
        return "fail", f"{m.nvcc} does not run ({first_line(output)})", "Install the CUDA toolkit again"
    detail = f"nvcc {found[1]}.{found[2]}, torch is built for CUDA {'.'.join(map(str, m.torch_cuda or ()))}"
    if m.torch_cuda and int(found[1]) != m.torch_cuda[0]:
        return "fail", detail, f"Set CUDA_HOME to a CUDA {want} toolkit: kernels compiled by another do not load"
    return "ok", detail


def host_compiler(m: Machine) -> Finding:
    if m.gpu is None or m.nvcc is None:
        return NO_GPU if m.gpu is None else ("skipped", "not applicable: no nvcc")
    gcc = m.host_compiler
    home = m.nvcc.resolve().parent.parent
    headers = (home.glob(f"{place}include/crt/host_config.h") for place in ("", "targets/*/"))
    header = next(itertools.chain(*headers), None)
    limit = re.search(r"__GNUC__ > (\d+)", header.read_text(errors="replace")) if header else None
    status, version = m.output(gcc, "-dumpversion")
    if status:
        fix = "Install gcc and g++ (Debian, Ubuntu: apt install build-essential)"
        return "fail", f"{gcc} is not found", fix if gcc == "gcc" else "Correct NVCC_PREPEND_FLAGS or NVCC_CCBIN"
    detail = f"{gcc} {version.strip()}" + (f", nvcc accepts up to gcc {limit[1]}" if limit else "")
    if limit and int(version.split(".")[0]) > int(limit[1]):
        return "fail", detail, f"Install g++-{limit[1]} and set NVCC_PREPEND_FLAGS='-ccbin g++-{limit[1]}'"
    with tempfile.TemporaryDirectory() as folder:
        status, output = m.output(str(m.nvcc), "-x", "cu", "-", "-c", "-o", f"{folder}/k.o", stdin=KERNEL)
    if status == 124:
        return (
            "warn",
            f"{detail}; compiling a kernel took longer than a few seconds",
            "Check what else is running on this machine",
        )
    if status:
        fix = f"Install g++ of {gcc}'s version, or name another compiler: NVCC_PREPEND_FLAGS='-ccbin g++-12'"
        return "fail", f"{detail}, but a kernel does not compile ({first_line(output)})", fix
    return "ok", f"{detail}, and a kernel compiles"


def cxx(m: Machine) -> Finding:
    bad: Status = "fail" if m.compiles_kernels else "warn"
    fix = "Install g++ of the same version as gcc (Debian, Ubuntu: apt install build-essential)"
    status, output = m.output(m.cc, "-print-prog-name=cc1plus")
    if status:
        return bad, f"{m.cc} is not found: kernels are compiled at start", fix
    # gcc passes C++ to cc1plus, which belongs to the g++ of the same version; its bare name means "not found"
    if "clang" not in m.cc and not os.path.isabs(output.strip()):
        status, version = m.output(m.cc, "-dumpversion")
        return bad, f"{m.cc} {version.strip()} has no cc1plus: g++ of that version is not installed", fix
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), "g++")
    with tempfile.TemporaryDirectory() as folder:
        for with_what in dict.fromkeys((compiler, m.cc)):
            last = ["-lstdc++"] if with_what == m.cc else []
            build = [with_what, "-x", "c++", "-", "-o", f"{folder}/a.out", *last]
            status, output = m.output(*build, stdin=PROGRAM)
            if status:
                return bad, f"{with_what} cannot build a program ({first_line(output)})", fix
        status, output = m.output(f"{folder}/a.out")
    if status:
        return (
            bad,
            f"a program built by {compiler} does not run ({first_line(output)})",
            "See the check of the temporary folder",
        )
    return "ok", f"{compiler} and {m.cc} compile and link, and the program runs"


def headers(m: Machine) -> Finding:
    folder, python = sysconfig.get_paths()["include"], f"python{sys.version_info.major}.{sys.version_info.minor}"
    bad: Status = "fail" if m.compiles_kernels else "warn"
    fix = f"Install Python's headers (Debian, Ubuntu: apt install {python}-dev)"
    if not (Path(folder) / "Python.h").exists():
        return bad, f"{Path(folder) / 'Python.h'} is missing", fix
    status, output = m.output(m.cc, "-fsyntax-only", "-x", "c", f"-I{folder}", "-", stdin="#include <Python.h>\n")
    if status == 127:
        return "warn", "Python.h is there, but no C compiler to try it with", "Install gcc"
    if status:
        return bad, f"Python.h does not compile ({first_line(output)})", fix
    return "ok", f"Python.h of {sys.version_info.major}.{sys.version_info.minor} compiles"


def ninja(m: Machine) -> Finding:
    # searched as the engines' processes do: beside the interpreter, then on PATH
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("ninja", path=path)
    if found is None:
        return ("fail" if m.compiles_kernels else "warn"), "ninja is not found", "pip install ninja"
    status, output = m.output(found, "--version")
    if status:
        return "fail", f"{found} does not run ({first_line(output)})", "pip install --force-reinstall ninja"
    return "ok", f"ninja {output.split()[0]}"
