"""Figures that a server reports by INFO, parsed by redis-py."""

from __future__ import annotations

from typing import Any

from redis._parsers.helpers import parse_info

from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.errors import ProtocolError, shown


def read_info(connection: RedisConnection, section: bytes, deadline: float) -> dict[str, Any]:
    """The fields of one section. Raises TierRefused, for example if the login may not ask."""
    reply = connection.command(b"INFO", section, deadline=deadline)
    if not isinstance(reply, bytes):
        raise ProtocolError(f"{connection.endpoint}: INFO was answered with {shown(reply)}")
    try:
        return dict(parse_info(reply.decode("utf-8", "replace")))
    except Exception as error:  # whatever redis-py makes of lines that no server sends
        raise ProtocolError(f"{connection.endpoint}: INFO cannot be read: {type(error).__name__}") from error


def used_memory_bytes(connection: RedisConnection, deadline: float) -> int:
    return _figure(connection, b"memory", "used_memory", deadline)


def evicted_keys(connection: RedisConnection, deadline: float) -> int:
    return _figure(connection, b"stats", "evicted_keys", deadline)


def _figure(connection: RedisConnection, section: bytes, field: str, deadline: float) -> int:
    figure = read_info(connection, section, deadline).get(field)
    if not isinstance(figure, int) or not 0 <= figure < 1 << 63:
        raise ProtocolError(f"{connection.endpoint}: INFO {section.decode()} names no {field}")
    return figure
