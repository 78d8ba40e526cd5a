"""Datasheet figures of GPUs with their source, detection through NVML, and the CPU as a fallback. Knows no model.

Tensor rates are dense, in 1e12 FLOP/s; bandwidth in 1e9 bytes/s; memory in GiB.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import platform
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import ServebookError
from .params import HardwareParams

CATALOG = Path(__file__).parent / "data" / "gpus.yaml"
GIB = 2**30
NOT_AVAILABLE = "not available"
GIVE_FIGURES = "Give hardware.figures (name, tensor_tflops, memory_bandwidth_gb_per_s, memory_gib) or a catalog name"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device that serves: a GPU, or the CPU. None means that the device has no such unit, or that it is not known."""

    name: str
    fp16_tflops: float
    bf16_tflops: float | None  # None: no bfloat16 tensor cores (T4)
    memory_bandwidth_gb_per_s: float
    memory_gib: float  # what the driver reports as total, not what is sold
    fp8_tflops: float | None = None
    int8_tflops: float | None = None
    fp32_tflops: float | None = None
    memory_sold_gb: float | None = None
    nvlink_gb_per_s: float | None = None  # to the other GPUs of its machine, one direction; None: no NVLink of its own
    pcie_gb_per_s: float = 32  # one direction; 4th generation, 16 lanes
    generation: str = "unknown"
    attention_backend: str = "unknown"  # vLLM's default on it: FLASH_ATTN_2, FLASH_ATTN_3, FLASHINFER, TRITON_ATTN, CPU
    source: str = ""
    url: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.generation == "cpu"

    def flops_per_s(self, dtype: str = "bfloat16") -> float:
        """Peak dense FLOP/s of a multiplication in `dtype` (bfloat16, float16, float32, fp8, int8).

        A card without fp8 or int8 units multiplies such weights in 16 bits, after unpacking them: its 16-bit rate.
        Raises ServebookError for bfloat16 on a card that has none.
        """
        if dtype == "bfloat16" and self.bf16_tflops is None:
            raise ServebookError(f"{self.name} has no bfloat16 tensor cores", "model.dtype", "Set model.dtype: float16")
        rates = {
            "bfloat16": self.bf16_tflops,
            "float16": self.fp16_tflops,
            "float32": self.fp32_tflops,
            "fp8": self.fp8_tflops,
            "int8": self.int8_tflops,
        }
        if dtype not in rates:
            raise ServebookError(f"unknown dtype {dtype!r}", "model.dtype", f"There are: {', '.join(rates)}")
        return (rates[dtype] or self.fp16_tflops) * 1e12

    @property
    def bytes_per_s(self) -> float:
        return self.memory_bandwidth_gb_per_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes/s to its peers in one direction: NVLink where there is one, else PCIe; on a CPU through its memory."""
        if self.is_cpu:
            return self.bytes_per_s / 2
        return (self.nvlink_gb_per_s or self.pcie_gb_per_s) * 1e9

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def ridge_flop_per_byte(self) -> float:
        """Peak 16-bit FLOP/s over bytes/s: work with fewer FLOPs a byte is memory-bound (post 1, value 3)."""
        return self.flops_per_s("bfloat16" if self.bf16_tflops else "float16") / self.bytes_per_s


@cache
def _entries() -> dict[str, tuple[Gpu, tuple[str, ...]]]:
    raw = yaml.safe_load(CATALOG.read_text(encoding="utf-8"))
    out = {}
    for name, figures in raw.items():
        nvml = tuple(figures.pop("nvml"))
        out[name] = Gpu(name=name, **figures), nvml
    return out


def catalog() -> dict[str, Gpu]:
    """Every known card by the name that params use."""
    return {name: gpu for name, (gpu, _) in _entries().items()}


def resolve(hardware: HardwareParams) -> Gpu:
    """The device of a run: given figures, a catalog or driver name (case and separators do not matter), or `detect`."""
    if hardware.figures:
        f = hardware.figures
        return Gpu(
            name=f.name,
            fp16_tflops=f.tensor_tflops,
            bf16_tflops=f.tensor_tflops,
            memory_bandwidth_gb_per_s=f.memory_bandwidth_gb_per_s,
            memory_gib=f.memory_gib,
            nvlink_gb_per_s=f.link_gb_per_s,
            source=f.source,
        )
    wanted = str(hardware.gpu)
    if wanted == "detect":
        return detect()
    cards = catalog()
    by_key = {_key(n): gpu for n, gpu in cards.items()}
    by_key |= {_key(n): gpu for gpu, names in _entries().values() for n in names}
    if _key(wanted) in by_key:
        return by_key[_key(wanted)]
    near = [n for n in cards if _key(n).startswith(_key(wanted))]
    near = near or [by_key[k].name for k in difflib.get_close_matches(_key(wanted), by_key, 1, 0.3)]
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ServebookError(
        f"unknown GPU {wanted!r}",
        "hardware.gpu",
        f"{hint}There are: {', '.join(cards)}, detect; or give hardware.figures",
    )


def _key(name: str) -> str:
    return "".join(c for c in name.lower().replace("nvidia", "").replace("geforce", "") if c.isalnum())


@contextlib.contextmanager
def _nvml():
    """pynvml, initialized; None without a driver or without the library."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or NVMLError of any kind: no driver, no device file, a driver mismatch
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _first_handle(nvml: Any) -> Any:
    """The first GPU this process may use: CUDA_VISIBLE_DEVICES counts where it holds indices or UUIDs."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        if first.startswith(("GPU-", "MIG-")):
            return nvml.nvmlDeviceGetHandleByUUID(first)
        return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
    except nvml.NVMLError as error:
        count = nvml.nvmlDeviceGetCount()
        where = f"CUDA_VISIBLE_DEVICES={first}"
        raise ServebookError(f"names no GPU of this machine ({error})", where, f"It has {count}, from 0 on") from None


def match(driver_name: str, total_bytes: int) -> Gpu:
    """The catalog's card for the name and the memory that the driver reports.

    Raises ServebookError for a card the catalog does not hold, and for a slice of one (MIG, vGPU).
    """
    for gpu, names in _entries().values():
        if driver_name in names:
            if total_bytes < 0.9 * gpu.memory_bytes:
                what = f"{driver_name} offers {total_bytes / GIB:.1f} GiB of {gpu.memory_gib:.1f}: a slice of the card"
                raise ServebookError(what, "hardware.gpu: detect", GIVE_FIGURES)
            return gpu
    raise ServebookError(f"the card {driver_name!r} is not in the catalog", "hardware.gpu: detect", GIVE_FIGURES)


def detect() -> Gpu:
    """The first visible NVIDIA GPU, by its name in the catalog; without one, the CPU (see cpu())."""
    with _nvml() as nvml:
        if nvml is not None and nvml.nvmlDeviceGetCount() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            handle = _first_handle(nvml)
            with contextlib.suppress(nvml.NVMLError):  # not every card knows MIG
                if nvml.nvmlDeviceGetMigMode(handle)[0]:
                    raise ServebookError("the GPU is split into MIG slices", "hardware.gpu: detect", GIVE_FIGURES)
            return match(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return cpu()


def snapshot() -> dict[str, Any]:
    """Driver, clocks, power, memory, ECC and processes of the first GPU; "not available" where NVML does not say."""
    with _nvml() as nvml:
        if nvml is None or not nvml.nvmlDeviceGetCount():
            return {"gpu": NOT_AVAILABLE, "cpu": _cpu_info()[0], "cpus": _cpu_count(), "load_1m": os.getloadavg()[0]}
        handle = _first_handle(nvml)

        def ask(function: str, *args: Any) -> Any:
            try:
                return getattr(nvml, function)(*args)
            except nvml.NVMLError:
                return NOT_AVAILABLE

        def scaled(value: Any, by: float) -> Any:
            return value if value == NOT_AVAILABLE else value / by

        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        ecc = ask("nvmlDeviceGetEccMode", handle)
        return {
            "gpu": ask("nvmlDeviceGetName", handle),
            "gpus": nvml.nvmlDeviceGetCount(),
            "driver": ask("nvmlSystemGetDriverVersion"),
            "cuda_driver": scaled(ask("nvmlSystemGetCudaDriverVersion"), 1000),
            "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "power_w": scaled(ask("nvmlDeviceGetPowerUsage", handle), 1000),
            "power_limit_w": scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1000),
            "temperature_c": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
            "memory_total_bytes": getattr(memory, "total", NOT_AVAILABLE),
            "memory_used_bytes": getattr(memory, "used", NOT_AVAILABLE),
            "utilization_percent": getattr(ask("nvmlDeviceGetUtilizationRates", handle), "gpu", NOT_AVAILABLE),
            "ecc": ecc if ecc == NOT_AVAILABLE else bool(ecc[0]),
            "processes": processes if processes == NOT_AVAILABLE else [p.pid for p in processes],
        }


def _cpu_count() -> int:
    """CPUs this process may use: its affinity, cut by the cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(int(quota) // int(period), 1))
    return cpus


def _cpu_info() -> tuple[str, float, set[str], str, int]:
    """(model name, clock in Hz, instruction-set flags, vendor, family) from /proc/cpuinfo"""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    mhz = float(fields.get("cpu MHz") or 0)
    with contextlib.suppress(OSError, ValueError):
        mhz = int(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) / 1000
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = fields.get("cpu family", "")
    return name, mhz * 1e6, flags, fields.get("vendor_id", ""), int(family) if family.isdigit() else 0


def _flop_per_cycle(flags: set[str], vendor: str, family: int) -> tuple[int, int, str]:
    """(fp32, bf16, what they follow from) per core and cycle; a fused multiply-add is 2 FLOPs.

    Two 512-bit FMA units give 64 in fp32 (Intel's servers, AMD from Zen 5); Zen 4 runs a 512-bit FMA in two halves: 32.
    AVX512_BF16 doubles the rate, AMX multiplies 16×16×32 bf16 tiles in 16 cycles: 1024.
    """
    if "avx512f" in flags:
        fp32 = 32 if vendor == "AuthenticAMD" and family <= 25 else 64
        if "amx_bf16" in flags:
            return fp32, 1024, "AMX"
        return (fp32, 2 * fp32, "AVX512_BF16") if "avx512_bf16" in flags else (fp32, fp32, "AVX-512")
    if "avx2" in flags:
        return 32, 32, "AVX2"
    if "asimd" in flags:
        return 16, 32 if "bf16" in flags else 16, "NEON"
    return 2, 2, "no vector unit known"


def _copy_gb_per_s(threads: int, budget_s: float = 0.2) -> float:
    """Best of several passes of a copy by `threads` threads at once, bytes read and written, in 1e9 bytes/s.

    The buffers (32 MiB a side and thread) are larger than a core's share of the caches.
    """
    import numpy as np

    size = 32 * 2**20
    sources = [np.ones(size // 8) for _ in range(threads)]
    targets = [np.ones_like(s) for s in sources]  # touched: no page faults inside the measurement
    best, passes, deadline = 0.0, 0, time.monotonic() + budget_s
    while passes < 3 or time.monotonic() < deadline:
        passes += 1
        workers = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources, strict=True)]
        start = time.perf_counter()
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        best = max(best, 2 * size * threads / (time.perf_counter() - start) / 1e9)
    return best


@cache
def cpu() -> Gpu:
    """This machine's CPU: peak from cores × clock × FLOP per cycle, bandwidth from a copy measured once a process."""
    name, hertz, flags, vendor, family = _cpu_info()
    if not hertz:
        raise ServebookError(
            "neither an NVIDIA GPU nor the CPU's clock was found", "hardware.gpu: detect", GIVE_FIGURES
        )
    cores = _cpu_count()
    fp32, bf16, unit = _flop_per_cycle(flags, vendor, family)
    bandwidth = _copy_gb_per_s(min(cores, 8))
    return Gpu(
        name=f"CPU: {cores} × {name}",
        fp16_tflops=cores * hertz * fp32 / 1e12,
        bf16_tflops=cores * hertz * bf16 / 1e12,
        fp32_tflops=cores * hertz * fp32 / 1e12,
        memory_bandwidth_gb_per_s=round(bandwidth, 1),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        generation="cpu",
        attention_backend="CPU",
        source=(
            f"cpuinfo: {cores} cores × {hertz / 1e9:.2f} GHz × {bf16} bf16 FLOP per cycle ({unit}); "
            f"bandwidth: a copy with {min(cores, 8)} threads, read plus write, measured here"
        ),
    )
