"""The way of an inference request through the gateway: read, parse, route, relay.

A raw ASGI endpoint: the body is read once and goes to the engine as the bytes it came in; what is parsed serves routing
alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import Tenant
from spillway_gateway.config import LimitsConfig, TimeoutsConfig
from spillway_gateway.error_bodies import body_of, headers_of
from spillway_gateway.errors import (
    ClientBadRequest,
    GatewayDraining,
    GatewayError,
    ModelNotFound,
    RequestBodyTimeout,
    RequestTooLarge,
)
from spillway_gateway.fleet.engines import ModelFleet
from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt, PromptReader
from spillway_gateway.upstream.forward import header
from spillway_gateway.upstream.splice import insert_text, replace_text
from spillway_gateway.upstream.stream import OutboundRequest, Relay, UpstreamServices

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
REQUEST_ID_BYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What routing needs of a body. model: None when the body names none. names_salt: cache_salt is there, whatever
    its value."""

    model: str | None
    names_salt: bool
    stream: bool
    prompt: ChatPrompt | CompletionPrompt


@dataclass(frozen=True, slots=True)
class ServedModel:
    fleet: ModelFleet
    reader: PromptReader


class Lifecycle:
    """Whether new work is taken. One object per gateway process."""

    def __init__(self) -> None:
        self.draining = False
        self.closed = False  # the drain is over: what still comes on open connections is refused


class InferenceEndpoint:
    """POST of one OpenAI route. parse raises ClientBadRequest."""

    def __init__(
        self,
        path: str,
        parse: Callable[[bytes], ParsedBody],
        models: Mapping[str, ServedModel],
        *,
        services: UpstreamServices,
        lifecycle: Lifecycle,
        gatekeeper: Gatekeeper,
    ) -> None:
        self._gatekeeper = gatekeeper
        self._path = path.encode()
        self._parse = parse
        self._models = models  # by name and by alias
        self._services = services
        self._lifecycle = lifecycle

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = (header(headers, b"x-request-id") or b"")[:REQUEST_ID_BYTES_MAX] or os.urandom(16).hex().encode()
        try:
            tenant = self._gatekeeper.tenant_of(headers)
            outbound, served = await self._prepare(tenant, headers, receive, request_id)
            usage = self._gatekeeper.begin(tenant, outbound.prompt.prompt_tokens)
        except _ClientLeft:
            return
        except GatewayError as error:
            await send_error(send, error, request_id)
            return
        try:
            await Relay(outbound, served.fleet, self._services, receive, send).run()
        finally:
            usage.end()

    async def _prepare(
        self, tenant: Tenant, headers: list[tuple[bytes, bytes]], receive: Receive, request_id: bytes
    ) -> tuple[OutboundRequest, ServedModel]:
        if self._lifecycle.closed:
            raise GatewayDraining("This gateway is shutting down; send the request again.")
        body = await read_body(headers, receive, self._services.limits, self._services.timeouts)
        received_at = perf_counter()
        parsed = self._parse(body)
        served = self._served(parsed.model)
        if parsed.model is not None and parsed.model != served.fleet.name:
            body = replace_text(body, "model", served.fleet.name)
        gatekeeper = self._gatekeeper
        gatekeeper.allow_model(tenant, served.fleet.name)
        said = parsed.prompt
        salt = gatekeeper.salt(tenant, said.cache_salt)
        if salt is not None:
            body = (replace_text if parsed.names_salt else insert_text)(body, "cache_salt", salt)
            said = replace(said, cache_salt=salt)  # the engine hashes it into the first block, and so does routing
        prompt = await served.reader.read(said)
        outbound = OutboundRequest(
            self._path,
            gatekeeper.engine_headers(headers),
            body,
            request_id,
            parsed.stream,
            prompt,
            received_at,
            tenant.name,
            tenant.priority,
        )
        return outbound, served

    def _served(self, model: str | None) -> ServedModel:
        if model is None:
            distinct = {id(served): served for served in self._models.values()}
            if len(distinct) == 1:
                return next(iter(distinct.values()))  # as an engine does: its only model is meant
            raise ClientBadRequest("'model' is missing; name one of: " + ", ".join(sorted(self._models)), "model")
        served = self._models.get(model)
        if served is None:
            shown = model if len(model) <= 200 else model[:200] + "..."
            raise ModelNotFound(f"The model {shown!r} does not exist; served here: {', '.join(sorted(self._models))}")
        return served


class _ClientLeft(Exception):
    """The client went away while its body was read."""


async def read_body(
    headers: list[tuple[bytes, bytes]], receive: Receive, limits: LimitsConfig, timeouts: TimeoutsConfig
) -> bytes:
    """The whole request body. Raises RequestTooLarge before reading more than the limit."""
    bytes_max = limits.body_bytes_max
    declared = header(headers, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > bytes_max:
        raise RequestTooLarge(_too_large(bytes_max))
    message = await _next_part(receive, timeouts)
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > bytes_max:
            raise RequestTooLarge(_too_large(bytes_max))
        return body
    parts = [body]
    size = len(body)
    while message.get("more_body", False):
        message = await _next_part(receive, timeouts)
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise RequestTooLarge(_too_large(bytes_max))
        parts.append(part)
    return b"".join(parts)


async def _next_part(receive: Receive, timeouts: TimeoutsConfig) -> Message:
    try:
        async with asyncio.timeout(timeouts.body_read_seconds):
            message = await receive()
    except TimeoutError as error:
        raise RequestBodyTimeout(f"no part of the body came for {timeouts.body_read_seconds:g} s") from error
    if message["type"] == "http.disconnect":
        raise _ClientLeft
    return message


def _too_large(bytes_max: int) -> str:
    return f"The request body is larger than {bytes_max} bytes, the gateway's limits.bodyBytesMax"


async def send_error(send: Send, error: GatewayError, request_id: bytes) -> None:
    body = body_of(error)
    headers = [*headers_of(error), (b"content-length", str(len(body)).encode()), (b"x-request-id", request_id)]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
