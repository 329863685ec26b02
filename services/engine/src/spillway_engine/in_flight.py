"""Requests in flight: counted, awaited, and cancelled when a drain reaches its timeout.

vLLM 0.23 can hang forever when it is stopped with requests running (8 trials: 2 hung; with a drain deadline that
expired: 3 of 3), so the pod ends them itself first. Cancelling the task of a request makes vLLM abort it in the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from spillway_settings.wire import ENDING_ERROR

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

CLOSING_SEND_SECONDS = 2.0  # a client that does not read must not hold up the drain


class InFlightRequests:
    """Bound by the server's own connection limit; touched from the event loop alone."""

    def __init__(self) -> None:
        self._running: set[_Request] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.begun = 0

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request through `app`; when cancelled by `cancel_all`, close its answer properly instead."""
        request = _Request(send)
        self._running.add(request)
        self.begun += 1
        self._idle.clear()
        try:
            await request.answer(app, scope, receive)
        finally:
            self._running.discard(request)
            if not self._running:
                self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing runs any more, and return True; return False when the time is over."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    def cancel_all(self) -> int:
        """End every running request with a clear error; returns how many there were."""
        for request in self._running:
            request.cancel()
        return len(self._running)


class _Request:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._task: asyncio.Task[Any] | None = None
        self._started = False
        self._event_stream = False
        self._finished = False
        self._cancelled_by_drain = False

    async def answer(self, app: AsgiApp, scope: Scope, receive: Receive) -> None:
        self._task = asyncio.current_task()
        try:
            await app(scope, receive, self._forward)
        except asyncio.CancelledError:
            if not self._cancelled_by_drain:
                raise
            if self._task is not None:
                self._task.uncancel()
            await self._close()

    def cancel(self) -> None:
        if self._task is not None and not self._cancelled_by_drain:
            self._cancelled_by_drain = True
            self._task.cancel()

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", [])}
            self._event_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._finished = True
        await self._send(message)

    async def _close(self) -> None:
        """Tell the client why: a status and body, or a last event; an answer cut inside a body is left broken."""
        if self._finished:
            return
        body = error_body("the engine is shutting down and had no time left to finish this request", 503, ENDING_ERROR)
        try:
            async with asyncio.timeout(CLOSING_SEND_SECONDS):
                if not self._started:
                    await send_json(self._send, 503, body)
                elif self._event_stream:
                    event = b"data: %s\n\n" % json.dumps(body).encode()
                    await self._send({"type": "http.response.body", "body": event, "more_body": False})
        except (OSError, TimeoutError):
            return


def error_body(message: str, status: int, kind: str = "service_unavailable") -> dict[str, Any]:
    """Return an error body in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def send_json(send: Send, status: int, document: Mapping[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def body_of(receive: Receive, bytes_max: int) -> bytes | None:
    """The body of a request; empty if its caller is gone, None if it is too long."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(bytes(message.get("body", b"")))
        size += len(parts[-1])
        if size > bytes_max:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)
