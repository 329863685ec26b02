"""A connected socket to a server, within a deadline, whichever of its name's addresses answer.

redis-py tries the addresses of a name one after the other, each for the whole timeout. Here they are staggered, as RFC
8305 ("Happy Eyeballs") describes: the next attempt begins while the one before it is still waiting, and the first to
connect wins. An address whose host is gone does not refuse, it is silent, and the whole deadline of a lookup is shorter
than one retransmission of a SYN.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Sequence

from spillway_connector.errors import TierTimeout, TierUnreachable, UnreachableReason
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint
from spillway_connector.tiers.redis.client.resolve import SYSTEM, SocketAddress
from spillway_connector.tiers.tier import Clock

# Between two attempts. RFC 8305 (section 5) recommends 250 ms for the Internet. Within a data center a connection takes
# less than a millisecond, and a lookup has 200 ms in all.
STAGGER_SECONDS = 0.025
_POLL_SECONDS_MAX = 1_000_000.0  # poll() takes milliseconds in 32 bits


def dial(endpoint: RedisEndpoint, clock: Clock, deadline: float) -> tuple[socket.socket, SocketAddress | None]:
    """A socket and the address of its name that it leads to, None for a Unix socket.

    Raises TierUnreachable (CONNECT), TierTimeout.
    """
    try:
        if endpoint.unix_path is not None:
            return _connect_unix(endpoint.unix_path, clock, deadline), None
        addresses = SYSTEM.resolve(Address(endpoint.host, endpoint.port), clock, deadline)
        plain, address = connect_first(addresses, clock, deadline)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # SO_RCVBUF is left alone: setting it ends the kernel's own tuning and gained nothing (3.0 GB/s).
        return plain, address
    except TimeoutError as error:
        raise TierTimeout(f"{endpoint}: no connection before the deadline") from error
    except OSError as error:
        raise TierUnreachable(UnreachableReason.CONNECT, f"{endpoint}: {error.strerror or error}") from error


def connect_first(
    addresses: Sequence[SocketAddress], clock: Clock, deadline: float
) -> tuple[socket.socket, SocketAddress]:
    """Connect to the first of ``addresses`` that answers, tried in order and staggered.

    The socket does not block until it is given a timeout. Raises TimeoutError, or OSError once all have refused.
    """
    with selectors.PollSelector() as attempts:
        try:
            return _race(attempts, list(addresses), clock, deadline)
        finally:
            for key in list(attempts.get_map().values()):
                _socket_of(key).close()


def _race(
    attempts: selectors.BaseSelector, untried: list[SocketAddress], clock: Clock, deadline: float
) -> tuple[socket.socket, SocketAddress]:
    """``attempts`` holds the sockets that have not connected."""
    refusal = 0
    # However many addresses there are, half of the time is left when the last one is tried.
    stagger = min(STAGGER_SECONDS, _remaining(clock, deadline) / (2 * len(untried)))
    while untried or attempts.get_map():
        remaining = _remaining(clock, deadline)
        if untried:
            refusal = _begin(attempts, untried.pop(0)) or refusal
            if not attempts.get_map():
                continue
        settled = attempts.select(min(stagger if untried else _POLL_SECONDS_MAX, remaining))
        if not settled and not untried:
            raise TimeoutError
        for key, _ in settled:
            plain = _socket_of(key)
            attempts.unregister(plain)
            error = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not error:
                return plain, key.data
            plain.close()
            refusal = error
    raise OSError(refusal, os.strerror(refusal))


def _begin(attempts: selectors.BaseSelector, address: SocketAddress) -> int:
    """Begin to connect. Returns the error number if that fails at once, else 0."""
    family, kind, protocol, where = address
    try:
        plain = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except OSError as error:
        return error.errno or errno.EIO  # for one, a family that this host does not have
    error_number = plain.connect_ex(where)
    if error_number not in (0, errno.EINPROGRESS):
        plain.close()
        return error_number
    attempts.register(plain, selectors.EVENT_WRITE, address)
    return 0


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _connect_unix(path: str, clock: Clock, deadline: float) -> socket.socket:
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        plain.settimeout(_remaining(clock, deadline))
        plain.connect(path)
    except BaseException:
        plain.close()
        raise
    return plain


def _remaining(clock: Clock, deadline: float) -> float:
    remaining = deadline - clock()
    if remaining <= 0:
        raise TimeoutError  # settimeout(0) would mean "do not block" and surface as another error
    return remaining
