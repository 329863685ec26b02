"""The gRPC server of the endpoint picker: external processing, and the health service that proxies ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.settings import ListenConfig
from spillway_gateway.errors import ConfigError
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.picker.messages import SERVICE, ProcessingRequest, ProcessingResponse
from spillway_gateway.picker.processed_request import ProcessedRequest

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
LIVENESS, READINESS = "liveness", "readiness"
END_SECONDS = 5.0  # for the last messages of streams whose requests have ended


class Application(Protocol):
    """ASGI."""

    def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Coroutine[Any, Any, None]: ...


class _Stream:
    """The stream of one request, over gRPC."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> Any:
        message = await self._context.read()
        return None if message is aio.EOF else message

    async def write(self, message: Any) -> None:
        await self._context.write(message)


class EndpointPicker:
    """Serves each stream as a request of the gateway's application."""

    def __init__(self, application: Application, open_connections: OpenConnections) -> None:
        self._application = application
        self._open_connections = open_connections

    async def process(self, request_iterator: object, context: Any) -> None:
        stream = _Stream(context)
        opening = await stream.read()
        if opening is None or opening.WhichOneof("kind") != "request_headers":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first message has to hold the request's headers: set request_header_mode: SEND",
            )
            return
        request = ProcessedRequest(stream, opening, self._open_connections)
        serving = asyncio.create_task(self._application(request.scope(), request.receive, request.send))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:  # the proxy ended the stream: the client left, or the engine broke off
            request.disconnect()
            await asyncio.wait([serving], timeout=END_SECONDS)
            serving.cancel()
            raise
        finally:
            request.release_body_bytes()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Whether the gateway takes requests, by the standard protocol; `liveness`: whether it runs.

    The names of the services are those of the Inference Extension's protocol (proposal 004, "Health Checking").
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE, READINESS, LIVENESS):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the services are {SERVICE}, {READINESS} and {LIVENESS}")
        states = health_pb2.HealthCheckResponse
        closed = self._lifecycle.draining and request.service != LIVENESS
        return states(status=states.NOT_SERVING if closed else states.SERVING)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            answer = await self.Check(request, context)
            if answer != last:
                last = answer
                yield answer
            await asyncio.sleep(1.0)


@asynccontextmanager
async def picking(
    listen: ListenConfig, application: Application, open_connections: OpenConnections, lifecycle: Lifecycle
) -> AsyncIterator[int]:
    """Serve proxies on listen.picker_port; yields the port. Raises ConfigError if it cannot listen, or for an unusable
    certificate."""
    server = aio.server(options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)])
    process = grpc.stream_stream_rpc_method_handler(
        EndpointPicker(application, open_connections).process,
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Process": process})])
    health_pb2_grpc.add_HealthServicer_to_server(_Health(lifecycle), server)
    address = f"[{listen.host}]" if ":" in listen.host else listen.host
    address = f"{address}:{listen.picker_port}"
    try:
        if listen.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(listen))
    except RuntimeError as error:
        raise ConfigError(
            f"listen.pickerPort: cannot listen on {address}; stop what uses it or change it ({error})"
        ) from error
    await server.start()
    logger.info("endpoint picker on %s://%s", "grpcs" if listen.tls else "grpc", address)
    try:
        yield port
    finally:
        await server.stop(END_SECONDS)


def _credentials(listen: ListenConfig) -> grpc.ServerCredentials:
    """The main listener's certificate, which is read again for each handshake after its files changed."""
    tls = listen.tls
    assert tls is not None
    files = Path(tls.key_file), Path(tls.cert_file)
    seen = read = _pair(*files)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        try:
            found = _pair(*files)
        except OSError:
            return None  # the one before stays in use
        if found == seen:
            return None
        seen = found
        return grpc.ssl_server_certificate_configuration([found])

    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([read]), newer, require_client_authentication=False
    )


def _pair(key_file: Path, cert_file: Path) -> tuple[bytes, bytes]:
    return key_file.read_bytes(), cert_file.read_bytes()
