"""All engines of one process, and its admin port."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import zmq.asyncio

from spillway_simulator.model.tiers import SharedTier
from spillway_simulator.server.admin_routes import AdminRoutes, engine_entry
from spillway_simulator.server.engine_host import EngineHost, VirtualClock
from spillway_simulator.server.engine_routes import EngineRoutes
from spillway_simulator.server.http_connection import HttpConnection
from spillway_simulator.settings import Settings
from spillway_simulator.wire.tokens import BuiltInTokens, Tokens


class Simulator:
    """Serves between start() and close(), on the running event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hosts: list[EngineHost] = []
        self.admin_port = settings.admin_port
        self._admin: asyncio.Server | None = None
        self._admin_connections: set[HttpConnection] = set()
        self._context: zmq.asyncio.Context | None = None

    @property
    def admin_url(self) -> str:
        return f"http://{self.settings.host}:{self.admin_port}"

    async def start(self) -> None:
        """Raises OSError or zmq.ZMQError when a port is taken; then everything opened so far is closed again."""
        settings = self.settings
        tokens = _tokens(settings.tokenizer)
        loop = asyncio.get_running_loop()
        clock = VirtualClock(loop, settings.speed)
        shared = SharedTier(settings.shared_blocks) if settings.shared_blocks else None
        self._context = zmq.asyncio.Context()

        def connect(host: EngineHost) -> asyncio.Protocol:
            return HttpConnection(EngineRoutes(host, tokens), host.connections)

        try:
            for position in range(settings.engines):
                host = EngineHost(
                    position, settings, shared=shared, clock=clock, context=self._context, connect=connect
                )
                self.hosts.append(host)
                await host.start()
            routes = AdminRoutes(self.hosts)
            self._admin = await loop.create_server(
                lambda: HttpConnection(routes, self._admin_connections), settings.host, self.admin_port
            )
            self.admin_port = self._admin.sockets[0].getsockname()[1]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        if self._admin is not None:
            self._admin.close()
        for connection in list(self._admin_connections):
            connection.kill()
        if self._context is not None:
            self._context.destroy(linger=0)

    def addresses(self) -> dict[str, Any]:
        """Return the addresses of the engines, for a client or a gateway's configuration."""
        return {
            "simulated": True,
            "admin": self.admin_url,
            "models": [{"name": self.settings.model, "engines": [engine_entry(host) for host in self.hosts]}],
        }


def _tokens(folder: str | None) -> Tokens:
    if folder is None:
        return BuiltInTokens()
    from spillway_simulator.wire.model_tokens import ModelTokens  # noqa: PLC0415 - an extra that need not be installed

    return ModelTokens(Path(folder))
