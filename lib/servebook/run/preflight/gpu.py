"""Checks of the GPU: it is the one in the parameters, idle, not throttled, and used by nobody else."""

from __future__ import annotations

from ...common.errors import ServebookError
from ...hardware import catalog as hardware
from .machine import NO_GPU, Finding, Machine

BUSY_PERCENT, FOREIGN_GPU_GIB = 10, 1.0
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def as_asked(m: Machine) -> Finding:
    """Predictions are made for hardware.gpu; on another card they are useless."""
    if m.params is None or m.params.hardware.gpu in (None, "detect"):
        return "skipped", "not applicable: the parameters name no card of the catalog"
    asked = hardware.resolve(m.params.hardware).name
    if m.gpu is None:
        return (
            "warn",
            f"the parameters are for {asked}, this machine has no GPU",
            "Run it on such a machine, or set hardware.gpu: detect",
        )
    fix = f"Set hardware.gpu to this card, or use a machine with {asked}"
    needed = max(gpus_needed(e) for e in m.params.engines.values())
    if m.gpu["gpus"] < needed:
        return (
            "fail",
            f"{needed} GPUs are needed, this machine has {m.gpu['gpus']}",
            "Lower the engine's parallel sizes",
        )
    try:
        here = hardware.match(m.gpu["gpu"], m.gpu["memory_total_bytes"]).name
    except (ServebookError, TypeError) as error:
        return "warn", f"the parameters are for {asked}, this machine has {m.gpu['gpu']} ({error})", fix
    if here != asked:
        return "fail", f"the parameters are for {asked}, this machine has {here}", fix
    return "ok", here


def gpus_needed(engine: object) -> int:
    """Number of GPUs that one engine needs."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    product = 1
    for size in sizes:
        product *= getattr(engine, size, 1)
    return 1 if getattr(engine, "url", None) else product


def state(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    busy, reasons = m.gpu["utilization_percent"], m.gpu["throttle_reasons"]
    detail = f"{m.gpu['gpu']}, {busy} % busy, {m.gpu['temperature_c']} °C, power limit {m.gpu['power_limit_w']} W"
    slow = [name for bit, name in SLOWDOWNS.items() if isinstance(reasons, int) and reasons & bit]
    if slow:
        fix = "Let it cool, or use another machine: measured rates would be too low"
        return "fail", f"{detail}; throttled: {', '.join(slow)}", fix
    if isinstance(busy, int) and busy > BUSY_PERCENT:
        return "fail", detail, "End the processes that use the GPU (see nvidia-smi): they would slow the measurement"
    return "ok", detail


def processes(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    pids, used = m.gpu["processes"], m.gpu["memory_used_bytes"]
    gib = used / 2**30 if isinstance(used, int) else None
    detail = "memory in use " + (f"{gib:.1f} GiB" if gib is not None else hardware.NOT_AVAILABLE)
    if isinstance(pids, list) and pids:
        return "fail", f"{detail}, by process {', '.join(map(str, pids))}", "End those processes, or wait for them"
    if gib is not None and gib > FOREIGN_GPU_GIB:
        return "warn", f"{detail}, by no visible process", "Look outside this container, or reboot the machine"
    return "ok", f"{detail}, no other process"


def ecc(m: Machine) -> Finding:
    if m.gpu is None:
        return NO_GPU
    on = m.gpu["ecc"]
    if not isinstance(on, bool):
        return "ok", "ECC: not reported by this GPU"
    costs = " (costs memory bandwidth on GDDR6 cards such as the A40)" if on else ""
    return "ok", f"ECC {'on' if on else 'off'}{costs}"
