"""A process that has imported what the notebooks import, and forks a kernel for each: `python -m … SOCKET`.

The imports take 5 s of processor time, a fork some milliseconds. It reads one request per line (the kernel's arguments,
environment and working folder), and the forked kernel answers with its process id. It ends when the other end of the
socket is closed, also by the death of that process; kernels end when this process does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from importlib import import_module

# what the notebooks and their functions import
IMPORTED = (
    "numpy", "pandas", "scipy.optimize", "seaborn", "matplotlib.figure", "matplotlib.backends.backend_svg",
    "IPython.display", "matplotlib_inline.backend_inline", "ipykernel.kernelapp", "ipykernel.ipkernel",
    "servebook.charts.choice", "servebook.charts.decode_model", "servebook.charts.explain", "servebook.charts.inside",
    "servebook.charts.mechanism", "servebook.charts.svg", "servebook.charts.sweeps", "servebook.charts.tradeoffs",
    "servebook.charts.traffic", "servebook.load.client", "servebook.predictor.predict", "servebook.report.tables",
    "servebook.run.book", "servebook.run_folder.published", "servebook.scoring.percentiles",
    "servebook.scoring.score",
)  # fmt: skip


def main() -> None:
    """Import, then fork a kernel for each request until the socket is closed. In a forked kernel: be that kernel."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    if sys.path[0] in ("", os.getcwd()):  # as ipykernel_launcher does
        del sys.path[0]
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # ipykernel reads it at import: kernels end with this process
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as a kernel sets it
    for name in IMPORTED:
        with contextlib.suppress(Exception):  # the notebook that needs it says what is wrong
            import_module(name)
    gc.collect()
    gc.freeze()  # kernels share this memory as long as the collector leaves it alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended kernels need no wait
    with channel.makefile("rb") as requests:
        asked = next((line for line in requests if os.fork() == 0), None)
    if asked is not None:
        _become_kernel(json.loads(asked), channel)


def _become_kernel(asked: dict[str, object], channel: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["env"] or {})  # type: ignore[call-overload]
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    os.chdir(str(asked["cwd"]))
    channel.sendall(f"{os.getpid()}\n".encode())
    channel.close()
    sys.argv[:] = ["ipykernel_launcher", *asked["arguments"]]  # type: ignore[misc]
    import numpy
    from ipykernel import kernelapp

    numpy.random.seed()  # otherwise the same in every kernel
    kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
