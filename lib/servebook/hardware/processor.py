"""This machine's processor: its properties, its peak rate, and its measured copy bandwidth."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Processor:
    """The processor as in /proc/cpuinfo. hertz: 0 if no clock is given; flags: instruction sets; family: 0 if
    unknown."""

    name: str
    hertz: float
    flags: frozenset[str]
    vendor: str
    family: int


@cache
def processor() -> Processor:
    """This machine's processor. Without /proc/cpuinfo, only a name."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    mhz = float(fields.get("cpu MHz") or 0)
    with contextlib.suppress(OSError, ValueError):
        mhz = int(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) / 1000
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    name, family = fields.get("model name") or platform.processor() or platform.machine(), fields.get("cpu family", "")
    return Processor(name, mhz * 1e6, flags, fields.get("vendor_id", ""), int(family) if family.isdecimal() else 0)


def usable_cpus() -> int:
    """CPUs this process may use: its affinity, limited by the cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(int(quota) // int(period), 1))
    return cpus


def flop_per_cycle(flags: frozenset[str] | set[str], vendor: str, family: int) -> tuple[int, int, str]:
    """(fp32, bf16, their derivation) per core and cycle; a fused multiply-add is 2 FLOPs.

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


COPIES_S = 0.2  # at least three copies, and more until this has passed


def copy_gb_per_s(threads: int) -> float:
    """Best of several copies by `threads` threads at once, bytes read and written, in 1e9 bytes/s.

    The buffers (32 MiB per side and thread) are larger than a core's share of the caches.
    """
    import numpy as np

    size = 32 * 2**20
    sources = [np.ones(size // 8) for _ in range(threads)]
    targets = [np.ones_like(s) for s in sources]  # touched, so that no page faults are measured
    best, passes, deadline = 0.0, 0, time.monotonic() + COPIES_S
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
