"""Reads an engine's reply from its connection: by events, whole, or to its end."""

from __future__ import annotations

import asyncio

from spillway_gateway.errors import UpstreamError
from spillway_gateway.upstream.connection import EngineConnection
from spillway_gateway.upstream.sse import EventFramer

END_OF_REPLY_SECONDS_MAX = 1.0  # from [DONE] to the end of the engine's reply; only then can its connection be reused


async def next_events(connection: EngineConnection, framer: EventFramer) -> bytes:
    """Whole events; empty at the end of the stream."""
    while chunk := await connection.chunk():
        if events := framer.feed(chunk):
            return events
    return framer.rest()


async def read_to_end(connection: EngineConnection) -> None:
    """The client has the whole reply. Read the engine's end of it, so that the connection can be reused."""
    try:
        async with asyncio.timeout(END_OF_REPLY_SECONDS_MAX):
            while await connection.chunk():
                pass
    except (TimeoutError, UpstreamError):
        pass  # the connection is closed instead


async def collect(connection: EngineConnection, bytes_max: int) -> bytes:
    """The whole body, or its start once it is longer than bytes_max."""
    body = await connection.chunk()
    if connection.complete:
        return body
    parts = [body]
    size = len(body)
    while size <= bytes_max and (part := await connection.chunk()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
