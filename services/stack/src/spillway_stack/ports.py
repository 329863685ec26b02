"""Finds which TCP ports are in use, and by which process."""

from __future__ import annotations

import socket

import psutil

from spillway_stack.processes import command_line


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether this port can be bound now; a socket in TIME_WAIT does not count as in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str | None:
    """Return `pid 4711 (python -m http.server)` for a listening process with readable descriptors, else None."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
            return f"pid {found.pid} ({command_line(found.pid)[:120]})"
    return None
