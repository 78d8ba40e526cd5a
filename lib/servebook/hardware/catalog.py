"""Datasheet figures of GPUs with their source, detection through NVML, the CPU as a fallback. Knows no model.

Tensor rates are dense, in 1e12 FLOP/s; bandwidth in 1e9 bytes/s; memory in GiB. One module: a card's entry, and how
this machine is matched to it.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, model_validator

from ..common.errors import ServebookError
from ..config import strict_yaml
from ..config.param_types import Generation, Positive, Strict, unfit
from ..config.params import HardwareFigures, HardwareParams
from .processor import copy_gb_per_s, flop_per_cycle, processor, usable_cpus

CATALOG = Path(__file__).with_name("gpus.yaml")
GIB = 2**30
NEAR = 0.66  # minimum similarity of names for a typing error
NOT_AVAILABLE = "not available"
GIVE_FIGURES = "Give hardware.figures (name, tensor_tflops, memory_bandwidth_gb_per_s, memory_gib) or a catalog name"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device: a GPU, or the CPU. None: the device has no such unit, or the figure is unknown."""

    name: str
    fp16_tflops: float
    bf16_tflops: float | None  # None: no bfloat16 tensor cores (T4)
    memory_bandwidth_gb_per_s: float
    memory_gib: float  # total memory as the driver reports it, not the sold size
    fp8_tflops: float | None = None
    int8_tflops: float | None = None
    fp4_tflops: float | None = None
    fp32_tflops: float | None = None
    memory_sold_gb: float | None = None
    nvlink_gb_per_s: float | None = None  # to the other GPUs of its machine, one direction; None: no NVLink
    pcie_gb_per_s: float = 32  # one direction; 4th generation, 16 lanes
    peer_access: bool = True  # without NVLink: whether its peers can read its memory; if not, data go through the host
    board_power_w: float | None = None  # the board's cap, where it holds large GEMMs down (see priors)
    generation: str = "unknown"
    attention_backend: str = "unknown"  # vLLM's default on it: FLASH_ATTN_2, FLASH_ATTN_3, FLASHINFER, TRITON_ATTN, CPU
    source: str = ""
    url: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.generation == "cpu"

    def flops_per_s(self, dtype: str = "bfloat16") -> float:
        """Peak dense FLOP/s of a multiplication in `dtype` (bfloat16, float16, float32, fp8, int8, fp4).

        A card without fp8, int8 or fp4 units unpacks such weights and multiplies in 16 bits, at its 16-bit rate. Raises
        ServebookError for bfloat16 on a card without it.
        """
        if dtype == "bfloat16" and self.bf16_tflops is None:
            raise ServebookError(f"{self.name} has no bfloat16 tensor cores", "model.dtype", "Set model.dtype: float16")
        rates = {
            "bfloat16": self.bf16_tflops,
            "float16": self.fp16_tflops,
            "float32": self.fp32_tflops,
            "fp8": self.fp8_tflops,
            "int8": self.int8_tflops,
            "fp4": self.fp4_tflops,
        }
        if dtype not in rates:
            raise ServebookError(f"unknown dtype {dtype!r}", "model.dtype", f"There are: {', '.join(rates)}")
        return (rates[dtype] or self.fp16_tflops) * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth in bytes/s."""
        return self.memory_bandwidth_gb_per_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes/s to its peers in one direction: NVLink if it has it, otherwise PCIe; on a CPU through memory."""
        if self.is_cpu:
            return self.bytes_per_s / 2
        return (self.nvlink_gb_per_s or self.pcie_gb_per_s) * 1e9

    @property
    def through_host(self) -> bool:
        """Whether data for its peers go through the host's memory."""
        return not (self.nvlink_gb_per_s or self.peer_access or self.is_cpu)

    @property
    def memory_bytes(self) -> int:
        """Memory as the driver reports it."""
        return int(self.memory_gib * GIB)


class Entry(Strict):
    """A card of the catalog; units and meaning as in Gpu. nvml: the names that the driver gives it."""

    nvml: Annotated[list[str], Field(min_length=1)]
    also: list[str] = Field(default_factory=list)
    fp16_tflops: Positive
    bf16_tflops: Positive | None
    fp8_tflops: Positive | None = None
    int8_tflops: Positive | None = None
    fp4_tflops: Positive | None = None
    fp32_tflops: Positive
    memory_bandwidth_gb_per_s: Positive
    memory_sold_gb: Positive
    memory_gib: Positive
    nvlink_gb_per_s: Positive | None = None
    pcie_gb_per_s: Positive = 32
    peer_access: bool = True
    board_power_w: Positive | None = None
    generation: Generation
    attention_backend: Literal["FLASH_ATTN_2", "FLASH_ATTN_3", "FLASHINFER", "TRITON_ATTN", "ROCM_ATTN"]
    source: str
    url: str

    @model_validator(mode="after")
    def _less_than_sold(self) -> Entry:
        if self.memory_gib >= self.memory_sold_gb:
            what = f"memory_gib ({self.memory_gib:g}) is not below memory_sold_gb ({self.memory_sold_gb:g})"
            raise unfit(what, "Give what CUDA reports as total; CONTRIBUTING.md says what to put where it is not known")
        return self


class _Catalog(RootModel[dict[str, Entry]]):
    @model_validator(mode="after")
    def _each_driver_name_once(self) -> _Catalog:
        owner: dict[str, str] = {}
        for name, entry in self.root.items():
            for driver_name in (*entry.nvml, *entry.also):
                if owner.setdefault(driver_name, name) != name:
                    raise unfit(f"{owner[driver_name]} and {name} both have the nvml name {driver_name!r}", "Keep one")
        return self


MAKERS = {"nvidia", "amd", "instinct", "geforce", "tesla", "gpu", "hopper", "blackwell", "generation"}


def read_catalog(text: str, where: str) -> dict[str, tuple[Gpu, tuple[str, ...]]]:
    """{name: (card, its driver's names)} of a catalog's text. Raises ServebookError with line, entry and key."""
    entries = strict_yaml.validate(text, _Catalog, where, example="the entries beside it").root
    return {n: (Gpu(name=n, **e.model_dump(exclude={"nvml", "also"})), (*e.nvml, *e.also)) for n, e in entries.items()}


@cache
def _entries() -> dict[str, tuple[Gpu, tuple[str, ...]]]:
    return read_catalog(CATALOG.read_text(encoding="utf-8"), f"data/{CATALOG.name}")


def catalog() -> dict[str, Gpu]:
    """Every known card, by its name in parameter files."""
    return {name: gpu for name, (gpu, _) in _entries().items()}


def resolve(hardware: HardwareParams) -> Gpu:
    """The device of a run: given figures, a catalog or driver name (case and separators are ignored), or `detect`."""
    if hardware.figures:
        return _of_figures(hardware.figures)
    wanted = str(hardware.gpu)
    if wanted == "detect":
        return detect()
    cards = catalog()
    by_key = {_key(n): gpu for n, gpu in cards.items()}
    by_key |= {_key(n): gpu for gpu, names in _entries().values() for n in names}
    if _key(wanted) in by_key:
        return by_key[_key(wanted)]
    words = _words(wanted)
    having = [n for n, gpu in cards.items() if words <= _words(f"{n} {gpu.memory_sold_gb:g}GB")]
    exactly = [n for n in having if _words(n) <= words]
    if words and len(named := exactly or having) == 1:
        return cards[named[0]]
    near = [n for n in cards if _key(n).startswith(_key(wanted))]
    begun = [
        k for k in {_key(n.split("-")[0]) for n in cards} if _key(wanted).startswith(k) and any(map(str.isdigit, k))
    ]
    near = near or [n for n in cards if begun and _key(n.split("-")[0]) == max(begun, key=len)]
    close = difflib.get_close_matches(_key(wanted), by_key, 2, NEAR)
    near = near or list(dict.fromkeys(by_key[k].name for k in close))
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ServebookError(
        f"unknown GPU {wanted!r}",
        "hardware.gpu",
        f"{hint}There are: {', '.join(cards)}, detect; or give hardware.figures",
    )


def _of_figures(f: HardwareFigures) -> Gpu:
    """A card from given figures: attention kernels of its generation, and the 16-bit rate where another rate is
    missing. float32 uses the given rate, or is not available."""
    backend = {"hopper": "FLASH_ATTN_3", "ampere": "FLASH_ATTN_2", "ada": "FLASH_ATTN_2", "turing": "TRITON_ATTN",
               "volta": "TRITON_ATTN", "blackwell": "FLASHINFER",
               "blackwell_rtx": "FLASH_ATTN_2", "cdna3": "ROCM_ATTN", "cdna4": "ROCM_ATTN"}  # fmt: skip
    bf16 = None if f.generation in ("turing", "volta") else f.bf16_tflops or f.tensor_tflops
    return Gpu(
        name=f.name,
        fp16_tflops=f.fp16_tflops or f.tensor_tflops,
        bf16_tflops=bf16,
        fp8_tflops=f.fp8_tflops,
        int8_tflops=f.int8_tflops,
        fp4_tflops=f.fp4_tflops,
        fp32_tflops=f.fp32_tflops,
        memory_bandwidth_gb_per_s=f.memory_bandwidth_gb_per_s,
        memory_gib=f.memory_gib,
        nvlink_gb_per_s=f.link_gb_per_s,
        generation=f.generation or "unknown",
        attention_backend=f.attention_backend or backend.get(str(f.generation), "unknown"),
        source=f.source,
    )


def _words(name: str) -> frozenset[str]:
    """Words of a card's name that tell it from others: `A100 80GB SXM4` and `a100-sxm-80g` have the same."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<![a-z])(rtx|gtx)(?=\d)", r"\1 ", name.lower()))
    plain = (re.sub(r"^(\d+)g$", r"\1gb", re.sub(r"^sxm\d$", "sxm", w)) for w in words)
    return frozenset(w for w in plain if w not in MAKERS and not re.fullmatch(r"hbm\d\w?|\d+ai", w))


def _key(name: str) -> str:
    return "".join(c for c in name.lower().replace("nvidia", "").replace("geforce", "") if c.isalnum())


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """pynvml, initialized for the block; None without a driver or the library."""
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


def visible_handles(nvml: Any) -> list[Any]:
    """NVML handles of the GPUs this process may use, each once: CUDA_VISIBLE_DEVICES applies (indices or UUIDs), up to
    the first entry that is neither (-1, Slurm's NoDevFiles), as in CUDA.

    Raises ServebookError if it names a GPU that the machine does not have.
    """
    count = nvml.nvmlDeviceGetCount()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    handles = []
    for name in dict.fromkeys(part.strip() for part in given.split(",")):
        unique = name.startswith(("GPU-", "MIG-"))
        if not unique and not name.isdigit():
            break
        try:
            if unique:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        except nvml.NVMLError as error:
            what, where = f"names no GPU of this machine ({error})", f"CUDA_VISIBLE_DEVICES={name}"
            raise ServebookError(what, where, f"It has {count}, from 0 on") from None
    return handles


def match(driver_name: str, total_bytes: int) -> Gpu:
    """The catalog card for the name and memory that the driver reports.

    Raises ServebookError for a card that is not in the catalog, and for a slice of one (MIG, vGPU).
    """
    for gpu, names in _entries().values():
        if driver_name in names:
            if total_bytes < 0.9 * gpu.memory_bytes:
                what = f"{driver_name} offers {total_bytes / GIB:.1f} GiB of {gpu.memory_gib:.1f}: a slice of the card"
                raise ServebookError(what, "hardware.gpu: detect", GIVE_FIGURES)
            return gpu
    raise ServebookError(f"the card {driver_name!r} is not in the catalog", "hardware.gpu: detect", GIVE_FIGURES)


def detect() -> Gpu:
    """The first visible NVIDIA GPU, by its catalog name; without one, the CPU (see cpu())."""
    with nvml() as n:
        if n is not None and (handles := visible_handles(n)):
            handle = handles[0]
            with contextlib.suppress(n.NVMLError):  # not every card supports MIG
                if n.nvmlDeviceGetMigMode(handle)[0]:
                    raise ServebookError("the GPU is split into MIG slices", "hardware.gpu: detect", GIVE_FIGURES)
            return match(n.nvmlDeviceGetName(handle), n.nvmlDeviceGetMemoryInfo(handle).total)
    return cpu()


def snapshot() -> dict[str, Any]:
    """Driver, clocks, power, memory, ECC and processes of the first GPU this process may use; "not available" where
    NVML has no value."""
    with nvml() as n:
        handles = visible_handles(n) if n is not None else []
        if not handles:
            return {"gpu": NOT_AVAILABLE, "cpu": processor().name, "cpus": usable_cpus(), "load_1m": os.getloadavg()[0]}
        handle = handles[0]

        def ask(function: str, *args: Any) -> Any:
            try:
                return getattr(n, function)(*args)
            except n.NVMLError:
                return NOT_AVAILABLE

        def scaled(value: Any, by: float) -> Any:
            return value if value == NOT_AVAILABLE else value / by

        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        ecc = ask("nvmlDeviceGetEccMode", handle)
        return {
            "gpu": ask("nvmlDeviceGetName", handle),
            "gpus": len(handles),
            "driver": ask("nvmlSystemGetDriverVersion"),
            "cuda_driver": scaled(ask("nvmlSystemGetCudaDriverVersion"), 1000),
            "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, n.NVML_CLOCK_SM),
            "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, n.NVML_CLOCK_SM),
            "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, n.NVML_CLOCK_MEM),
            "power_w": scaled(ask("nvmlDeviceGetPowerUsage", handle), 1000),
            "power_limit_w": scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1000),
            "temperature_c": ask("nvmlDeviceGetTemperature", handle, n.NVML_TEMPERATURE_GPU),
            "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
            "memory_total_bytes": getattr(memory, "total", NOT_AVAILABLE),
            "memory_used_bytes": getattr(memory, "used", NOT_AVAILABLE),
            "utilization_percent": getattr(ask("nvmlDeviceGetUtilizationRates", handle), "gpu", NOT_AVAILABLE),
            "ecc": ecc if ecc == NOT_AVAILABLE else bool(ecc[0]),
            "processes": processes if processes == NOT_AVAILABLE else [p.pid for p in processes],
        }


@cache
def cpu() -> Gpu:
    """This machine's CPU: peak from cores × clock × FLOP per cycle, bandwidth from a copy measured once per process."""
    here, cores = processor(), usable_cpus()
    if not here.hertz:
        raise ServebookError(
            "neither an NVIDIA GPU nor the CPU's clock was found", "hardware.gpu: detect", GIVE_FIGURES
        )
    fp32, bf16, unit = flop_per_cycle(here.flags, here.vendor, here.family)
    bandwidth = copy_gb_per_s(min(cores, 8))
    return Gpu(
        name=f"CPU: {cores} × {here.name}",
        fp16_tflops=cores * here.hertz * fp32 / 1e12,
        bf16_tflops=cores * here.hertz * bf16 / 1e12,
        fp32_tflops=cores * here.hertz * fp32 / 1e12,
        memory_bandwidth_gb_per_s=round(bandwidth, 1),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        generation="cpu",
        attention_backend="CPU",
        source=(
            f"cpuinfo: {cores} cores × {here.hertz / 1e9:.2f} GHz × {bf16} bf16 FLOP per cycle ({unit}); "
            f"bandwidth: a copy with {min(cores, 8)} threads, read plus write, measured here"
        ),
    )
