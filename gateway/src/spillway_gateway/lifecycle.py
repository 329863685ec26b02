"""The state of a gateway process: serving, draining, closed. Holds the requests that run, so that a shutdown can wait
for them and end those that remain.

Runs on the main event loop; `draining` may be read from any thread.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from spillway_gateway.errors import GatewayDraining

_POLL_SECONDS = 0.05


class RunningRequest(Protocol):
    def abort(self, cause: Exception) -> None:
        """End the request's current wait with `cause`."""


class Lifecycle:
    """One per gateway process.

    draining: shutdown has begun; /ready is 503 and new requests are still served.
    closed: the drain timeout has passed; requests that still arrive on open connections are refused.
    running: requests in progress; each adds and removes itself.
    """

    def __init__(self) -> None:
        self.draining = False
        self.closed = False
        self.running: set[RunningRequest] = set()

    def drain(self) -> None:
        self.draining = True

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request runs. False when the timeout passes first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while self.running:
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            await asyncio.sleep(min(_POLL_SECONDS, remaining))
        return True

    def close(self) -> None:
        """End every running request: a stream gets an error event, a request that still waits gets a 503."""
        self.closed = True
        for request in list(self.running):
            request.abort(
                GatewayDraining("The gateway is shutting down and the time for running requests is over; try again.")
            )
