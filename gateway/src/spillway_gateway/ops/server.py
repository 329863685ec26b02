"""The operations listener: a thread and an event loop of its own.

A main loop with a thousand streams may take longer to answer than a probe's timeout of a second. On this thread probes
wait for the GIL alone. They read a few attributes and copies of dicts, which is safe while other threads change them.
All other routes read more state than that, which belongs to the main loop, so they run there.

A separate thread would report a process alive whose main loop is stuck. The main loop therefore sets a heartbeat every
second; without one for STALLED_SECONDS, /health fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spillway_gateway.background import supervised
from spillway_gateway.client.bounded_connection import BoundedConnection, BoundedState
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.settings import ConnectionsConfig
from spillway_gateway.ops.operations import Answer, Operations

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
STALLED_SECONDS = 30.0  # longer than any pause of a working loop
MAIN_LOOP_SECONDS_MAX = 10.0  # for an answer from the main loop; scrapers wait no longer either
JOIN_SECONDS_MAX = 5.0
CONNECTIONS_MAX = 48  # of descriptors.RESERVED; probes and scrapes need a few


class OperationsServer:
    """Runs from start() to stop(), both called on the main loop."""

    def __init__(
        self, app: ASGIApp, operations: Operations, listener: socket.socket, bounds: ConnectionsConfig
    ) -> None:
        self._app = app
        self._operations = operations
        self._listener = listener
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._beat_at = 0.0
        self._server = _Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http=BoundedConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._server.server_state = BoundedState(OpenConnections(bounds, CONNECTIONS_MAX))
        self._thread = threading.Thread(target=self._serve, name="operations", daemon=True)

    def start(self) -> None:
        self._main_loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()
        self._beating = asyncio.create_task(supervised(self._beat, "heartbeat"))
        self._thread.start()

    async def stop(self) -> None:
        self._server.should_exit = True
        # In a thread: the main loop has to finish the answers that it was asked for.
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS_MAX)
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._server.serve(sockets=[self._listener]))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application on the thread's loop."""
        if scope["type"] != "http":
            return
        probe = self._probe(scope["path"]) if scope["method"] in ("GET", "HEAD") else None
        messages = _messages(probe) if probe is not None else await self._from_main_loop(scope)
        for message in messages:
            await send(message)

    def _probe(self, path: str) -> Answer | None:
        if path == "/ready":
            return self._operations.readiness()
        if path != "/health":
            return None
        silent = time.monotonic() - self._beat_at
        if silent > STALLED_SECONDS:
            return Answer(503, {"status": "stalled", "silentSeconds": round(silent, 1)})
        return self._operations.health()

    async def _from_main_loop(self, scope: Scope) -> list[Message]:
        messages: list[Message] = []

        async def nothing_to_receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def collect(message: Message) -> None:
            messages.append(message)

        async def run() -> None:
            await self._app(scope, nothing_to_receive, collect)

        assert self._main_loop is not None
        work = run()
        try:
            asked = asyncio.run_coroutine_threadsafe(work, self._main_loop)
        except RuntimeError:  # the loop is closed
            work.close()
            return _messages(Answer(503, {"reason": "the gateway has ended"}))
        try:
            async with asyncio.timeout(MAIN_LOOP_SECONDS_MAX):
                await asyncio.wrap_future(asked)
        except (TimeoutError, CancelledError) as error:
            logger.warning("operations: no answer to %s (%s)", scope["path"], error.__class__.__name__)
            return _messages(Answer(503, {"reason": "the gateway's main loop did not answer"}))
        return messages


class _Server(uvicorn.Server):
    server_state: BoundedState

    async def on_tick(self, counter: int) -> bool:
        self.server_state.open_connections.tick(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The main server handles signals."""
        yield


def _messages(answer: Answer) -> list[Message]:
    body = msgspec.json.encode(answer.document)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return [
        {"type": "http.response.start", "status": answer.status, "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]
