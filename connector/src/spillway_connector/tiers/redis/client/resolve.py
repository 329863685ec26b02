"""Resolving a host name within a deadline.

``getaddrinfo``, which redis-py calls, takes no deadline: with a dead name server it returns after 5 to 30 seconds. Here
it runs in a daemon thread, one per name at most. A result that comes too late serves the next caller.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from spillway_connector.errors import without_frames
from spillway_connector.tiers.redis.client.endpoint import Address
from spillway_connector.tiers.tier import Clock

NAMES_MAX = 1024  # kept at once; a cluster has as many nodes
PATIENCE_SECONDS = 0.05  # for a fresh result if an older one is at hand

SocketAddress = tuple[int, int, int, Any]
"""Family, kind, protocol and address, as ``socket.socket`` and ``connect`` take them."""

Lookup = Callable[[str, int], list[SocketAddress]]


@dataclass(slots=True)
class _Known:
    """The last result for one name, and which of its addresses served or failed."""

    addresses: list[SocketAddress]
    preferred: SocketAddress | None = None  # served a connection last
    avoided: SocketAddress | None = None  # failed to, after it had been reached

    def in_order(self, addresses: list[SocketAddress]) -> list[SocketAddress]:
        return sorted(addresses, key=lambda one: (one == self.avoided, one != self.preferred))


class Resolver:
    """Resolves again for every connection, so that a service that moved is found; else the last result is used.

    Addresses come in the name server's order, except that the one that served last is first and one that failed since
    is last. Used by several threads at once.
    """

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = _system_lookup if lookup is None else lookup
        self._lock = threading.Lock()
        self._good: OrderedDict[Address, _Known] = OrderedDict()
        self._asking: dict[Address, Future[list[SocketAddress]]] = {}

    def resolve(self, address: Address, clock: Clock, deadline: float) -> list[SocketAddress]:
        """Return at least one address. Raises OSError if there is none, TimeoutError if none is known in time."""
        numeric = _numeric(address)
        if numeric:
            return numeric
        with self._lock:
            known = self._good.get(address)
        answer = self._ask(address)
        remaining = min(max(0.0, deadline - clock()), threading.TIMEOUT_MAX)
        try:
            addresses = answer.result(remaining if known is None else min(remaining / 2, PATIENCE_SECONDS))
        except OSError as error:
            if known is not None:
                addresses = known.addresses
            elif isinstance(error, TimeoutError):
                raise TimeoutError(f"{address.host}: no answer from the name servers") from None
            else:
                raise
        finally:
            del answer  # the traceback of its error holds this frame
        return addresses if known is None else known.in_order(addresses)

    def prefer(self, name: Address, address: SocketAddress) -> None:
        """A connection to this address of ``name`` has served."""
        with self._lock:
            known = self._good.get(name)
            if known is not None:
                known.preferred = address
                if known.avoided == address:
                    known.avoided = None

    def avoid(self, name: Address, address: SocketAddress) -> None:
        """Note that this address of ``name`` could be reached, but did not serve."""
        with self._lock:
            known = self._good.get(name)
            if known is not None:
                known.avoided = address
                if known.preferred == address:
                    known.preferred = None

    def _ask(self, address: Address) -> Future[list[SocketAddress]]:
        with self._lock:
            answer = self._asking.get(address)
            if answer is None:
                answer = self._asking[address] = Future()
                threading.Thread(
                    target=self._answer, args=(address, answer), name="spillway-resolve", daemon=True
                ).start()
            return answer

    def _answer(self, address: Address, answer: Future[list[SocketAddress]]) -> None:
        error: OSError | None = None
        addresses: list[SocketAddress] = []
        try:
            addresses = self._lookup(address.host, address.port)
        except OSError as failure:
            error = without_frames(failure)
        except Exception as failure:  # an invalid name: too long, an empty label
            error = OSError(f"{address.host}: {failure}")
        if not addresses and error is None:
            error = OSError(f"{address.host} has no address")
        with self._lock:
            del self._asking[address]
            if error is None:
                self._good.setdefault(address, _Known([])).addresses = addresses
                self._good.move_to_end(address)
                if len(self._good) > NAMES_MAX:
                    self._good.popitem(last=False)
        if error is None:
            answer.set_result(addresses)
        else:
            answer.set_exception(error)


def _system_lookup(host: str, port: int, flags: int = 0) -> list[SocketAddress]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, kind, protocol, where) for family, kind, protocol, _, where in found]


def _numeric(address: Address) -> list[SocketAddress]:
    """The address itself, if ``host`` is one; no name server is asked."""
    try:
        return _system_lookup(address.host, address.port, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    except (OSError, UnicodeError):
        return []


SYSTEM = Resolver()
"""Shared by all tiers of the process: what one has found serves the others."""
