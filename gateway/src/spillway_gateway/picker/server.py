"""The services of the endpoint picker: external processing, and the health service that proxies ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from spillway_gateway.client.open_connections import Connection, OpenConnections
from spillway_gateway.client.reply_budget import ReplyBudget
from spillway_gateway.error_bodies import body_of, headers_of
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.picker.body_modes import UnusableModes, body_modes
from spillway_gateway.picker.grpc_call import Call, CallFailed, Status, nothing
from spillway_gateway.picker.grpc_connection import GrpcConnection
from spillway_gateway.picker.messages import (
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
)
from spillway_gateway.picker.mutations import immediate
from spillway_gateway.picker.processed_request import ProcessedRequest

logger = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
END_SECONDS = 5.0  # for the last messages of calls whose requests have ended
WATCH_SECONDS = 1.0
BESIDE_BODY_BYTES = 64 * 1024  # of the message with a whole body


class Application(Protocol):
    """An ASGI application."""

    def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Coroutine[Any, Any, None]: ...


class _Proxy:
    """The messages of one request. replies: the budget for what is not read of its reply."""

    def __init__(self, call: Call, replies: ReplyBudget) -> None:
        self._call = call
        self._replies = replies
        self.write = call.write
        self.failure: Exception | None = None

    async def read(self) -> Any:
        try:
            message = None if self.failure is not None else await self._call.read()
        except CallFailed as failure:
            self.failure, message = failure, None
        return self._request(message)

    def take(self) -> Any:
        return self._request(None if self.failure is not None else self._call.take())

    def begin_reply(self) -> None:
        self._call.begin_reply(self._replies)

    def refuse(self, kind: str) -> None:
        self.failure = CallFailed(Status.INVALID_ARGUMENT, f"a message of the kind {kind} is not due")

    def _request(self, message: bytes | None) -> Any:
        try:
            return None if message is None else _parsed(ProcessingRequest, message)
        except CallFailed as failure:
            self.failure = failure
            return None


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise CallFailed(Status.INVALID_ARGUMENT, f"a message cannot be parsed: {error}") from error


class EndpointPicker:
    """Serves each call as a request of the gateway's application."""

    def __init__(
        self,
        application: Application,
        open_connections: OpenConnections,
        was_ready: Callable[[], bool],
        body_bytes_max: Callable[[], int],
    ) -> None:
        self._application = application
        self._open_connections = open_connections
        self._was_ready = was_ready
        self._body_bytes_max = body_bytes_max

    async def process(self, call: Call) -> None:
        message = await call.read()
        if not self._was_ready():  # a proxy that has not asked the health service yet
            raise CallFailed(Status.UNAVAILABLE, "the gateway knows of no engine yet")
        opening = _parsed(ProcessingRequest, message or b"")
        if opening.WhichOneof("kind") != "request_headers":
            raise CallFailed(
                Status.INVALID_ARGUMENT,
                "the first message has to hold the request's headers: set request_header_mode: SEND",
            )
        try:
            modes = body_modes(opening)
        except UnusableModes as error:
            logger.error("no request of this proxy can be answered: %s", error.message)
            await call.write(immediate(error.status, headers_of(error), body_of(error)))
            return
        body_bytes_max = self._body_bytes_max()
        if modes.keeps_request:
            call.message_bytes_max = body_bytes_max + BESIDE_BODY_BYTES
        proxy = _Proxy(call, self._open_connections.reply_budget)
        request = ProcessedRequest(proxy, opening, modes, self._open_connections, body_bytes_max)
        call.on_end = request.disconnect  # the client left, or the engine broke off
        try:
            await self._application(request.scope(), request.receive, request.send)
        finally:
            request.release_body_bytes()
            call.on_end = nothing  # request and call would keep each other
        if proxy.failure is not None:
            raise proxy.failure


class _Health:
    """Whether the gateway takes requests, by the standard protocol; `liveness`: whether it runs.

    It takes them from when it was first ready until it drains: before, it knows of no engine, and a proxy that fails
    open has a better answer. Without engines later it answers each request itself, with the reason.

    The names of the services are those of the Inference Extension's protocol (proposal 004, "Health Checking").
    """

    def __init__(self, lifecycle: Lifecycle, was_ready: Callable[[], bool]) -> None:
        self._lifecycle = lifecycle
        self._was_ready = was_ready
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End all calls of Watch."""
        self._ended.set()

    async def check(self, call: Call) -> None:
        await call.write(self._answer(await _service(call)))

    async def watch(self, call: Call) -> None:
        service, last = await _service(call), b""
        while not call.ended and not self._ended.is_set():
            answer = self._answer(service)
            if answer != last:
                last = answer
                await call.write(answer)
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._ended.wait()

    def _answer(self, service: str) -> bytes:
        if service not in ("", SERVICE, READINESS, LIVENESS):
            raise CallFailed(Status.NOT_FOUND, f"the services are {SERVICE}, {READINESS} and {LIVENESS}")
        closed = service != LIVENESS and (self._lifecycle.draining or not self._was_ready())
        answer: bytes = HealthCheckResponse(status=NOT_SERVING if closed else SERVING).SerializeToString()
        return answer


async def _service(call: Call) -> str:
    service: str = _parsed(HealthCheckRequest, await call.read() or b"").service
    return service


class Picker:
    """Serves the connections of proxies, from the first one to close().

    Args:
        application: the gateway's.
        open_connections: the listener's open connections and budgets.
        lifecycle: the state of this process.
        was_ready: whether the gateway has been ready since its start.
        body_bytes_max: reads limits.bodyBytesMax.
    """

    def __init__(
        self,
        application: Application,
        open_connections: OpenConnections,
        lifecycle: Lifecycle,
        was_ready: Callable[[], bool],
        body_bytes_max: Callable[[], int],
    ) -> None:
        self._open_connections = open_connections
        self._health = health = _Health(lifecycle, was_ready)
        self._methods = {
            f"/{SERVICE}/Process".encode(): EndpointPicker(
                application, open_connections, was_ready, body_bytes_max
            ).process,
            f"/{HEALTH_SERVICE}/Check".encode(): health.check,
            f"/{HEALTH_SERVICE}/Watch".encode(): health.watch,
        }
        self._connections: set[GrpcConnection] = set()

    def connection(self, admitted_as: Connection | None) -> GrpcConnection:
        """Make a new connection. admitted_as: the TLS handshake that was admitted in its place."""
        return GrpcConnection(self._methods, self._connections, self._open_connections, admitted_as)

    async def close(self) -> None:
        """Close, after the calls whose requests have ended."""
        self._health.end()
        await asyncio.gather(*(connection.close(END_SECONDS) for connection in list(self._connections)))
