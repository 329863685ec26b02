"""Reads an engine's reply from its connection: by events, whole, or to its end."""

from __future__ import annotations

import asyncio

from spillway_gateway.errors import UpstreamError
from spillway_gateway.upstream.connections import Connection
from spillway_gateway.upstream.outbound import Client
from spillway_gateway.upstream.sse import EventFramer

ROOM_BYTES_MIN = 64 * 1024  # of a body that are collected in any case: errors are read whole
ERROR_REPLY_BYTES_MAX = 64 * 1024  # of an error reply that is kept while another engine is tried
END_OF_REPLY_SECONDS_MAX = 1.0  # from [DONE] to the end of the engine's reply; only then can its connection be reused


async def next_events(connection: Connection, framer: EventFramer) -> bytes:
    """Whole events, or the beginning of one if nothing follows that is not passed on first; empty at the end of the
    stream."""
    while True:
        if framer.holds_part and connection.passes_on_seconds is not None:
            try:
                async with asyncio.timeout(connection.passes_on_seconds):
                    chunk = await connection.chunk()
            except TimeoutError:
                return framer.part()
        else:
            chunk = await connection.chunk()
        if not chunk:
            return framer.rest()
        if events := framer.feed(chunk):
            return events


async def read_to_end(connection: Connection) -> None:
    """The client has the whole reply. Read the engine's end of it, so that the connection can be reused."""
    try:
        async with asyncio.timeout(END_OF_REPLY_SECONDS_MAX):
            while await connection.chunk():
                pass
    except (TimeoutError, UpstreamError):
        pass  # the connection is closed instead


async def collect(connection: Connection, bytes_max: int, held: HeldBytes | None = None) -> bytes:
    """The whole body, or its start once it is longer than bytes_max, or there is no room for more of it."""
    body = await connection.chunk()
    if connection.complete:
        return body
    parts = [body]
    size = len(body)
    while size <= bytes_max and (held is None or held.has_room_for(size)) and (part := await connection.chunk()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


class HeldBytes:
    """The bytes that a collected reply takes of the budget for replies."""

    __slots__ = ("_client", "_taken")

    def __init__(self, client: Client) -> None:
        self._client = client
        self._taken = 0

    def has_room_for(self, size: int) -> bool:
        """Whether a body that has this number of bytes by now may become longer."""
        more = size - self._taken
        if not self._client.take_reply_bytes(more):
            return size < ROOM_BYTES_MIN
        self._taken = size
        return True

    def give_back(self) -> None:
        self._client.give_reply_bytes(self._taken)
        self._taken = 0
