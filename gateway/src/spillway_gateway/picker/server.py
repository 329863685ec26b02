"""The endpoint picker's listener: external processing, and the health service that proxies ask."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from spillway_gateway.background import supervised
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.certificate import Certificate
from spillway_gateway.config.settings import ListenConfig
from spillway_gateway.errors import ConfigError
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.picker.grpc_call import Call, CallFailed, Status
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
from spillway_gateway.picker.processed_request import ProcessedRequest

logger = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
END_SECONDS = 5.0  # for the last messages of calls whose requests have ended
WATCH_SECONDS = 1.0


class Application(Protocol):
    """ASGI."""

    def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Coroutine[Any, Any, None]: ...


class _Proxy:
    """The messages of one request.

    Attributes:
        failure: of a message that cannot be read, or None. To the request it is as if the client had left.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.write = call.write
        self.failure: CallFailed | None = None

    async def read(self) -> Any:
        try:
            message = None if self.failure is not None else await self._call.read()
        except CallFailed as failure:
            self.failure, message = failure, None
        return self._request(message)

    def take(self) -> Any:
        return self._request(None if self.failure is not None else self._call.take())

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

    def __init__(self, application: Application, open_connections: OpenConnections) -> None:
        self._application = application
        self._open_connections = open_connections

    async def process(self, call: Call) -> None:
        proxy = _Proxy(call)
        opening = await proxy.read()
        if proxy.failure is not None:
            raise proxy.failure
        if opening is None or opening.WhichOneof("kind") != "request_headers":
            raise CallFailed(
                Status.INVALID_ARGUMENT,
                "the first message has to hold the request's headers: set request_header_mode: SEND",
            )
        await self._open_connections.request_turns.wait()  # one packet may open thousands of calls
        if call.ended:
            return
        request = ProcessedRequest(proxy, opening, self._open_connections)
        call.on_end = request.disconnect  # the client left, or the engine broke off
        try:
            await self._application(request.scope(), request.receive, request.send)
        finally:
            request.release_body_bytes()
        if proxy.failure is not None:
            raise proxy.failure


class _Health:
    """Whether the gateway takes requests, by the standard protocol; `liveness`: whether it runs.

    The names of the services are those of the Inference Extension's protocol (proposal 004, "Health Checking").
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def check(self, call: Call) -> None:
        await call.write(self._answer(await _service(call)))

    async def watch(self, call: Call) -> None:
        service, last = await _service(call), b""
        while not call.ended:
            answer = self._answer(service)
            if answer != last:
                last = answer
                await call.write(answer)
            await asyncio.sleep(WATCH_SECONDS)

    def _answer(self, service: str) -> bytes:
        if service not in ("", SERVICE, READINESS, LIVENESS):
            raise CallFailed(Status.NOT_FOUND, f"the services are {SERVICE}, {READINESS} and {LIVENESS}")
        closed = self._lifecycle.draining and service != LIVENESS
        answer: bytes = HealthCheckResponse(status=NOT_SERVING if closed else SERVING).SerializeToString()
        return answer


async def _service(call: Call) -> str:
    service: str = _parsed(HealthCheckRequest, await call.read() or b"").service
    return service


@asynccontextmanager
async def picking(
    listen: ListenConfig, application: Application, open_connections: OpenConnections, lifecycle: Lifecycle
) -> AsyncIterator[int]:
    """Serve proxies on listen.picker_port; yields the port. Raises ConfigError if it cannot listen, or for an unusable
    certificate."""
    health = _Health(lifecycle)
    methods = {
        f"/{SERVICE}/Process".encode(): EndpointPicker(application, open_connections).process,
        f"/{HEALTH_SERVICE}/Check".encode(): health.check,
        f"/{HEALTH_SERVICE}/Watch".encode(): health.watch,
    }
    connections: set[GrpcConnection] = set()
    certificate = Certificate(listen.tls, "h2") if listen.tls is not None else None
    is_v6 = ":" in listen.host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        listener = socket.create_server((listen.host, listen.picker_port or 0), family=family, dualstack_ipv6=is_v6)
    except OSError as error:
        raise ConfigError(
            f"listen.pickerPort: cannot listen on {listen.host}:{listen.picker_port}; stop what uses it or change it "
            f"({error})"
        ) from error
    server = await asyncio.get_running_loop().create_server(
        lambda: GrpcConnection(methods, connections),
        sock=listener,
        ssl=certificate.context if certificate is not None else None,
    )
    following: asyncio.Task[None] | None = None
    if certificate is not None:
        following = asyncio.create_task(supervised(certificate.follow, "endpoint picker's certificate"))
    port: int = listener.getsockname()[1]
    logger.info("endpoint picker on %s://%s:%d", "grpcs" if listen.tls else "grpc", listen.host, port)
    try:
        yield port
    finally:
        server.close()
        if following is not None:
            following.cancel()
        await asyncio.gather(*(connection.close(END_SECONDS) for connection in list(connections)))
