"""The processes that accept clients, as probes, metrics and the live page ask for them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from spillway_gateway.metrics import GatewayMetrics


class Processes(NamedTuple):
    """The processes that accept clients now, and how often one was started again."""

    serving: int
    restarts_total: int


class Serving(Protocol):
    """The state of this process, or of those that it routes for (processes/)."""

    def processes(self) -> Processes: ...

    def not_serving(self) -> str | None:
        """Return why no process accepts clients yet; None if at least one does. Any thread may call this."""

    async def exposition(self) -> bytes:
        """The metrics of all of them."""


class ThisProcess:
    """Serving, if one process does it all."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def processes(self) -> Processes:
        return Processes(1, 0)

    def not_serving(self) -> str | None:
        return None

    async def exposition(self) -> bytes:
        return self._metrics.exposition()
