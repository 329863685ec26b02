"""The interface of connections to engines for the relay: the gateway's own (pool.py), or those of a proxy that it
picks engines for (picker/)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.upstream.forward import Body, Headers


class Connection(Protocol):
    """One exchange with an engine: send(), head(), then chunk() until it returns b""."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def got_bytes(self) -> bool:
        """Any byte of the reply to the current request has arrived."""

    @property
    def complete(self) -> bool:
        """The whole reply has arrived and been taken."""

    @property
    def passes_on_seconds(self) -> float | None:
        """Silence after which what has arrived is to be passed on, as no more may come before; None: more comes."""

    def send(self, parts: Sequence[Body]) -> None:
        """Begin the exchange. parts: the request's head and body. Does not wait."""

    async def head(self) -> None:
        """Wait for status and headers. Raises EngineDisconnected or EngineBadReply."""

    async def chunk(self) -> bytes:
        """All body bytes that have arrived; b"" at the end. Raises EngineDisconnected and EngineBadReply."""


class Connections(Protocol):
    """Each connection taken or opened has to be released."""

    @property
    def reach_another(self) -> bool:
        """Whether a request that one engine has failed can be sent to another one."""

    def unreachable(self, engines: Mapping[str, Engine]) -> frozenset[str]:
        """Names of engines that this request cannot reach."""

    def take_idle(self, engine: Engine) -> Any:
        """A Connection that is open already, or None. Does not wait."""

    async def open(self, engine: Engine) -> Any:
        """A new Connection. Raises UpstreamError."""

    def release(self, engine: Engine, connection: Any) -> None:
        """The exchange has ended."""
