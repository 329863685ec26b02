"""Which TCP ports are in use, and by which process."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from spillway_stack.processes import PROC, command_line

_LISTEN = "0A"


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
    """`pid 4711 (python -m http.server)` for a listening process whose descriptors are readable, else None."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        if inodes & _open_targets(entry):
            return f"pid {entry.name} ({command_line(int(entry.name))[:120]})"
    return None


def _open_targets(process: Path) -> set[str]:
    """Targets of a process's descriptors; each may close meanwhile, and those of other users are not readable."""
    targets: set[str] = set()
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return targets
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            targets.add(os.readlink(descriptor))
    return targets


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = fields = line.split()
            if state == _LISTEN and int(local.rsplit(":", 1)[1], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
