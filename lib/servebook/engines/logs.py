"""Reading of server logs: the last lines, and the line that explains why a server ended."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)*((INFO|WARNING|ERROR|CRITICAL|DEBUG)\s+)?"
    r"(\d{2}-\d{2} \d{2}:\d{2}:\d{2}\s+)?(\[[\w./]+:\d+\]\s*)?"
)
CAUSE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]*(?:Error|Exception|Interrupt|NotFound|Missing)\b(?:: .*)?$")
# vLLM's last message after every failed start; the cause is further up
GENERIC = (
    "Engine core initialization failed",
    "EngineCore failed to start",
    "WorkerProc initialization failed",
    "EngineDeadError",
)
ENDED = re.compile(r"^\[servebook\] the server ended: (.*)$", re.M)  # guard.py's own message
NOISE = re.compile(
    r"^(\s|$|[\^~]+$|\[servebook\]|Traceback|File \"|During handling|The above exception|warnings\.warn)"
)

# text in a log → how to fix it
FIXES = (
    ("torchvision::nms does not exist", "Uninstall torchvision: it does not match this torch"),
    ("No space left on device", "Free disk space (also /dev/shm) and run again"),
    ("out of memory", "Free the GPU (nvidia-smi), lower gpu_memory_utilization or max_model_len"),
    ("Free memory on device", "Free the GPU (nvidia-smi shows who holds it) or lower gpu_memory_utilization"),
    ("less than requested memory for kv", "Lower cpu_kv_cache_gib, or free memory"),
    ("KV cache is needed", "Lower max_model_len or raise gpu_memory_utilization (on the CPU cpu_kv_cache_gib)"),
    ("is greater than the derived max_model_len", "Lower max_model_len to the model's own context"),
    ("allowed NUMA nodes", "Give the engine env: {VLLM_CPU_OMP_THREADS_BIND: '0|1'}, each worker's cores"),
    ("address already in use", "Leave the engine's port out: a free one is found"),
    ("unrecognized arguments", "Remove the flag from the engine's extra_args or command: this version lacks it"),
    ("offline mode is enabled", "Download the model first, or unset HF_HUB_OFFLINE"),
    ("401 Client Error", "The model is gated: accept its terms on the Hub and log in with `hf auth login`"),
    ("not a valid model identifier", "Check the model's name, or log in for a gated one"),
    ("No module named", "Install it, or give the full path of the python that has it as the command's first word"),
    ("cannot find -lcuda", "Install the driver's development files or add its folder to LIBRARY_PATH"),
    ("Fatal Python error: Illegal instruction", "Set model.dtype: float32 where the CPU has AMX"),
    ("Python.h", "Install the Python headers (python3-dev): a kernel is compiled at start"),
)  # fmt: skip


TAIL_BYTES = 262_144  # read from the end of a log


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log file, [] if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def clean(line: str) -> str:
    """A log line without vLLM's process, level, time and source prefix."""
    return PREFIX.sub("", line).rstrip()


def cause(lines: list[str]) -> str:
    """The line that explains why the server ended: its last own exception, else its last informative line.

    vLLM's API server repeats "Engine core initialization failed" after the engine's real exception; that line is
    skipped.
    """
    texts = [clean(line) for line in lines]
    exceptions = [t for t in texts if CAUSE.match(t) and not any(g in t for g in GENERIC)]
    generic = [t for t in texts if CAUSE.match(t)]
    speaking = [t for t in texts if not NOISE.match(t)]
    errors = [t for t in speaking if "error:" in t]  # argparse
    found = (exceptions or errors or generic or speaking or [""])[-1]
    return found if len(found) <= 400 else found[:399] + "…"


def fix(lines: list[str], log: Path) -> str:
    """How to fix it, from the log's text; otherwise the log's path."""
    text = "\n".join(lines).lower()
    return next((advice for sign, advice in FIXES if sign.lower() in text), f"The whole log is {log}")
