"""Numbers that a server tells of itself."""

from __future__ import annotations

from collections.abc import Callable

from spillway_connector.tiers.redis.client.connection import RedisConnection, refusal
from spillway_connector.tiers.redis.client.resp import ErrorReply, ProtocolError


def figure(section: bytes, field: bytes) -> Callable[[RedisConnection, float], int]:
    """An operation on a connection: the number that ``INFO section`` gives for ``field``.

    It raises TierRefused where the login may not ask, or the server does not tell.
    """

    def ask(connection: RedisConnection, deadline: float) -> int:
        reply = connection.command(b"INFO", section, deadline=deadline)
        if isinstance(reply, ErrorReply):
            raise refusal(connection.endpoint, reply)
        for line in reply.splitlines() if isinstance(reply, bytes) else ():
            name, _, value = line.partition(b":")
            if name == field and value.isdigit():
                return int(value)
        raise ProtocolError(f"{connection.endpoint}: INFO {section.decode()} names no {field.decode()}")

    return ask


used_memory_bytes = figure(b"memory", b"used_memory")
evicted_keys = figure(b"stats", b"evicted_keys")
