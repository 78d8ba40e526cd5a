"""How long explore's panel takes to redraw: from a widget's change to its figures' update, inside a real kernel.

    python benchmarks/bench_explore.py

Each control is turned through its values in turn, several rounds; the figures of the load count, not what follows when
the hand rests (that is timed apart). The bar is 200 ms.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from queue import Empty

from jupyter_client.manager import start_new_kernel

BAR_S = 0.2
PROGRAM = """
import json, time
from servebook.lab import explore
panel = explore.panel(run="h200-qwen2.5-7b")
display(panel)
took = {}
def turn(name, values, rounds=3):
    panel.redraws_s.clear()
    for _ in range(rounds):
        for value in values:
            panel._controls[name].value = value
    took.setdefault(name, []).extend(panel.redraws_s)
turn("concurrency", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
turn("concurrency", [16])
turn("prompt_tokens", [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384])
turn("prompt_tokens", [512])
turn("output_tokens", [16, 64, 128, 512, 1024])
turn("output_tokens", [128])
turn("quantization", ["fp8", "int4", None])
turn("max_num_batched_tokens", [1024, 2048, 8192])
turn("gpu", ["A40", "L40S", "H200"])
turn("rate_per_s", [1.0, 5.0, 20.0, 40.0])
turn("rate_per_s", [0.0])
for name in ("whole", "cases", "curves"):
    began = time.perf_counter()
    getattr(panel, f"_draw_{name}")()
    took[f"({name})"] = [time.perf_counter() - began]
print(json.dumps(took))
"""


def main() -> int:
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    manager, client = start_new_kernel(extra_arguments=["--IPKernelApp.log_level=CRITICAL"])
    try:
        asked = client.execute(PROGRAM)
        text, until = "", time.monotonic() + 300
        while time.monotonic() < until:
            try:
                message = client.get_iopub_msg(timeout=5)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "error":
                print("\n".join(message["content"]["traceback"]), file=sys.stderr)
                return 1
            text += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        took = json.loads(text.strip().splitlines()[-1])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'control':<24} {'redraws':>7} {'median ms':>10} {'slowest ms':>11}")
    for name, seconds in took.items():
        print(f"{name:<24} {len(seconds):>7} {1e3 * statistics.median(seconds):>10.0f} {1e3 * max(seconds):>11.0f}")
    turned = [s for name, seconds in took.items() if not name.startswith("(") for s in seconds]
    print(f"all redraws: median {1e3 * statistics.median(turned):.0f} ms, slowest {1e3 * max(turned):.0f} ms")
    return int(statistics.median(turned) > BAR_S)


if __name__ == "__main__":
    sys.exit(main())
