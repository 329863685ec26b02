"""The router process and its fronts inside the test's own event loop, each front on a port of its own, so that a test
chooses the one that it asks."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from spillway_gateway.app import Gateway
from spillway_gateway.config.settings import parse_config
from spillway_gateway.listeners.server import bind, reserve
from spillway_gateway.processes.front import Front
from spillway_gateway.processes.server import RouterServer
from spillway_gateway.testing.running import until

_pids = itertools.count(1)


class FrontInLoop(Front):
    """A front, and what fronts.Process says of it. kill(): as kill -9 looks to the router."""

    def __init__(self, router: socket.socket) -> None:
        super().__init__(end=self._die)
        self.pid = next(_pids)
        self.url = ""
        self.picker_port: int | None = None
        self._socket = router.dup()
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        status = await self.run(self._socket)
        if not self._status.done():
            self._status.set_result(status)

    @override
    def _listen(self, host: str, port: int, setting: str) -> socket.socket:
        listener = bind("127.0.0.1", 0)
        if setting == "listen.pickerPort":
            self.picker_port = listener.getsockname()[1]
        else:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return listener

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        self._die(-9)

    def _die(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)
        self._client.abort()
        if self._server is not None:
            self._server.should_exit = True

    def reported_sizes(self) -> tuple[int, ...]:
        """The block sizes of its first model."""
        assert self._engines is not None and self._gateway is not None
        return self._engines.block_sizes(self._gateway.fleets[0]).block_sizes

    def reported_full(self) -> bool:
        """Whether requests for its first model wait."""
        assert self._engines is not None and self._gateway is not None
        return self._engines.is_full(self._gateway.fleets[0].name)

    async def stopped(self) -> None:
        with suppress(asyncio.CancelledError):
            await self.serving


@dataclass(slots=True)
class RunningFronts:
    """started: every front since the start, those that ended included."""

    gateway: Gateway
    server: RouterServer
    ops_url: str
    started: list[FrontInLoop] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        return [front.url for front in self.started]


@asynccontextmanager
async def running_fronts(
    document: dict[str, Any], *, count: int = 2, config_path: Path | None = None
) -> AsyncIterator[RunningFronts]:
    """Serve until the block ends; every front listens and every engine is ready first."""
    config = parse_config({**document, "processes": count})
    started: list[FrontInLoop] = []

    async def spawn(router: socket.socket) -> FrontInLoop:
        started.append(FrontInLoop(router))
        return started[-1]

    ops_listener = bind("127.0.0.1", 0)
    ops_url = f"http://127.0.0.1:{ops_listener.getsockname()[1]}"
    with reserve("127.0.0.1", 0) as listener, reserve("127.0.0.1", 0) as picker_listener:
        picker = picker_listener if config.listen.picker_port is not None else None
        server = RouterServer(config, config_path, listener, ops_listener, picker, spawn=spawn)
        gateway = server.gateway
        serving = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.fronts.listening == count)
            engines = [engine for fleet in gateway.fleets for engine in fleet.engines.values()]
            await until(lambda: all(engine.routable for engine in engines))
            await until(lambda: all(_sees_all(front, len(engines)) for front in started))
            yield RunningFronts(gateway, server, ops_url, started)
        finally:
            server.begin_shutdown()
            server.begin_shutdown()
            await serving
            for front in started:
                await front.stopped()


def _sees_all(front: FrontInLoop, engines: int) -> bool:
    gateway = front._gateway
    assert gateway is not None
    return sum(engine.routable for fleet in gateway.fleets for engine in fleet.engines.values()) == engines
