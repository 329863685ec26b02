"""Ports for servers that a test starts a moment later."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A free port of loopback, outside the range that the kernel gives connections: one of these could take it until
    the server binds it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
