"""TCP ports of this machine: finding free ones and checking given ones."""

from __future__ import annotations

import socket

from ..common.errors import ServebookError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on. Another process may take it before it is bound: be ready to try again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on the port (old connections in TIME_WAIT do not matter)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def require_free(port: int, where: str) -> int:
    """The port if it is free; otherwise a ServebookError that names its key."""
    if port > 65535:
        raise ServebookError(
            f"port {port} does not exist", where, "Ports end at 65535; leave the key out for a free one"
        )
    if not is_free(port):
        raise ServebookError(
            f"port {port} is in use", where, "Choose another, or leave the key out: a free one is found"
        )
    return port
