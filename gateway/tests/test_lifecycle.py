"""The requests of a process: waiting for them, and ending those that remain."""

from __future__ import annotations

import asyncio

from spillway_gateway.errors import GatewayDraining
from spillway_gateway.lifecycle import Lifecycle


class Request:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._running = lifecycle.running
        self._running.add(self)
        self.cause: Exception | None = None

    def abort(self, cause: Exception) -> None:
        self.cause = cause
        self._running.discard(self)


async def test_it_is_idle_once_the_last_request_has_ended() -> None:
    lifecycle = Lifecycle()
    assert await lifecycle.wait_idle(0.0)
    request = Request(lifecycle)
    assert not await lifecycle.wait_idle(0.0)

    waiting = asyncio.create_task(lifecycle.wait_idle(30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    lifecycle.running.discard(request)
    assert await waiting


def test_close_aborts_every_request_and_refuses_later_ones() -> None:
    lifecycle = Lifecycle()
    requests = [Request(lifecycle) for _ in range(3)]
    lifecycle.close()

    assert lifecycle.closed and not lifecycle.running
    assert all(isinstance(request.cause, GatewayDraining) for request in requests)
