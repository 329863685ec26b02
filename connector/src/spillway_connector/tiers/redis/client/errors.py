"""Redis errors as tier errors: the error replies that redis-py parsed, and what its connections raise."""

from __future__ import annotations

import ssl
from typing import Any

from redis import exceptions

from spillway_connector.errors import (
    RefusedReason,
    TierError,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint

Reply = Any
"""The value that redis-py makes of one reply: bytes, int, float, bool, None, or a list or dict of these."""

_TEXT_MAX = 200  # characters of an error's text that are kept, the server's or the parser's
_REFUSALS = {
    "OOM": RefusedReason.OUT_OF_MEMORY,
    "READONLY": RefusedReason.READ_ONLY,
    "NOREPLICAS": RefusedReason.READ_ONLY,
    "MISCONF": RefusedReason.READ_ONLY,
    "NOPERM": RefusedReason.PERMISSION,
    "NOAUTH": RefusedReason.AUTHENTICATION,
    "WRONGPASS": RefusedReason.AUTHENTICATION,
    "LOADING": RefusedReason.LOADING,
    "MASTERDOWN": RefusedReason.LOADING,
    "TRYAGAIN": RefusedReason.LOADING,
    "BUSY": RefusedReason.LOADING,
    "MOVED": RefusedReason.MOVED,
    "ASK": RefusedReason.MOVED,
    "CLUSTERDOWN": RefusedReason.MOVED,
    "CROSSSLOT": RefusedReason.MOVED,
}


def shown(reply: Reply) -> str:
    """A reply for a message: its beginning, or its type. The repr of a nested one would recurse, of a huge one grow."""
    if isinstance(reply, bytes | str):
        return repr(reply[:64])
    if isinstance(reply, int) and reply.bit_length() > 64:
        return f"an integer of {reply.bit_length()} bits"
    if reply is None or isinstance(reply, int | float):
        return repr(reply)
    return type(reply).__name__


class ProtocolError(TierRefused):
    """The peer does not speak RESP, answered out of turn, or exceeds our bounds."""

    def __init__(self, message: str) -> None:
        super().__init__(RefusedReason.PROTOCOL, message)


class Redirected(TierRefused):
    """The key is on ``address``: from now on (MOVED), or for this command only (``ask``: its slot is migrating)."""

    def __init__(self, slot: int, address: Address, *, ask: bool, message: str) -> None:
        super().__init__(RefusedReason.MOVED, message)
        self.slot = slot
        self.address = address
        self.ask = ask


class WrongType(TierRefused):
    """The key holds something other than a string: a list, a hash, a sorted set."""

    def __init__(self, message: str) -> None:
        super().__init__(RefusedReason.OTHER, message)


def accepted(reply: Reply | TierError) -> Reply:
    """Return ``reply``, or raise it if it is an error. A caller that holds the error makes a reference cycle."""
    if isinstance(reply, TierError):
        try:
            raise reply
        finally:
            del reply
    return reply


def refusal(endpoint: RedisEndpoint, error: exceptions.ResponseError) -> TierRefused:
    """Return the tier error for an error reply of the server at ``endpoint``."""
    code = error.status_code  # redis-py takes a code that it has a class for out of the message
    text = (str(error) if code is None else f"{code} {error}")[:_TEXT_MAX]
    code = text.partition(" ")[0] if code is None else code
    message = f"{endpoint}: {text}"
    if isinstance(error, exceptions.AskError) and 0 < error.port < 1 << 16 and error.slot_id >= 0:
        ask = not isinstance(error, exceptions.MovedError)
        # An empty host is the host of the server that was asked.
        return Redirected(error.slot_id, Address(error.host or endpoint.host, error.port), ask=ask, message=message)
    if code == "WRONGTYPE":
        return WrongType(message)
    return TierRefused(_REFUSALS.get(code, RefusedReason.OTHER), message)


def tier_error(endpoint: RedisEndpoint, error: Exception) -> TierError:
    """The tier error for what redis-py, a socket or the parser raised. Whatever else a reply makes them raise is the
    peer's, too: one type of error leaves a tier."""
    if isinstance(error, exceptions.ResponseError):
        return refusal(endpoint, error)
    text = str(error)[:_TEXT_MAX]  # the parser repeats what it could not read
    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return TierTimeout(f"{endpoint}: {text}")
    if isinstance(error, exceptions.ConnectionError):
        return TierUnreachable(UnreachableReason.DISCONNECTED, f"{endpoint}: {text}")
    if isinstance(error, exceptions.RedisError):
        return ProtocolError(f"{endpoint}: {text}")
    if isinstance(error, OSError):
        reason = UnreachableReason.TLS if isinstance(error, ssl.SSLError) else UnreachableReason.DISCONNECTED
        return TierUnreachable(reason, f"{endpoint}: {error.strerror or text}")
    return ProtocolError(f"{endpoint}: a reply that cannot be used: {type(error).__name__}: {text}")
