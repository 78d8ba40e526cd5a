"""Soak the load client: 200,000 requests at C = 128 against the mock server, memory and Little's law watched.

    python benchmarks/soak.py [--requests 200000] [--concurrency 128]

The mock server is a process of its own; the client is `measure_point_sync` in this one, as a run has it, with rows
appended to a file. Prints this process's memory at every tenth, its growth after the first tenth, the most it had in
between or while it made the figures, and Little's error. Bars: growth < 5 %, Little's law within 2 %, no failure.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from servebook.config.params import Load, Slo
from servebook.load import PointSpec, measure_point_sync
from servebook.load.window import Rule
from servebook.run_folder import results

ROOT = Path(__file__).parents[1]
PROMPT, OUTPUT = 16, 4


def watch(path: Path, requests: int, memory: list[float], over: threading.Event) -> None:
    """Note this process's resident memory, MiB, whenever another tenth of the rows is there."""
    me, row_bytes = psutil.Process(), 0.0
    while not over.wait(0.2):
        size = path.stat().st_size if path.exists() else 0
        if not row_bytes and size > 100_000:
            row_bytes = size / path.read_bytes().count(b"\n")
        if row_bytes and size / row_bytes >= requests * (len(memory) + 1) / 10:
            memory.append(me.memory_info().rss / 2**20)
            print(f"{len(memory)}/10: {memory[-1]:.1f} MiB, load average {os.getloadavg()[0]:.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--concurrency", type=int, default=128)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "tests/mock_server.py"), "--port", str(port), "ttft_s=0.02", "itl_s=0.005"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory: list[float] = []
    over = threading.Event()
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        with tempfile.TemporaryDirectory() as folder:
            n, c = options.requests, options.concurrency
            spec = PointSpec("soak", "mock", f"c{c:04d}", "concurrency", PROMPT, OUTPUT, concurrency=c)
            rows = results.rows_path(Path(folder), "soak", "mock", spec.point)
            watcher = threading.Thread(target=watch, args=(rows, n, memory, over), daemon=True)
            watcher.start()
            point = measure_point_sync(
                spec, url=f"http://127.0.0.1:{port}", model="mock", vocab=range(100, 30000), load=Load(jitter_s=0.001),
                slo=Slo(), run_dir=Path(folder), batching=True, rule=Rule(c, n, n, 0.0, 3600.0, exactly=n),
            )  # fmt: skip
    finally:
        over.set()
        server.kill()
        server.wait()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    growth = memory[-1] / memory[0] - 1 if len(memory) > 1 else float("nan")
    print(
        f"{point['requests']} requests, {point['failures']} failures, {point['seconds']:.0f} s, "
        f"{point['request_rate_per_s']:.0f} requests/s; memory {growth:+.1%} after the first tenth, "
        f"most {peak:.1f} MiB; Little's law {point['little_error']:+.2%}"
    )
    return 0 if growth < 0.05 and abs(point.little_error) < 0.02 and not point.failures else 1


if __name__ == "__main__":
    sys.exit(main())
