"""Finding the addresses of a host name without waiting longer than there is time.

``getaddrinfo`` takes no deadline: with a dead name server it comes back after 5 to 30 seconds. So it runs in a thread
of its own, one per name at most, that nobody needs to wait for; its answer, however late, serves whoever asks next.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spillway_connector.errors import without_frames
from spillway_connector.tiers.redis.client.endpoint import Address
from spillway_connector.tiers.tier import Clock

NAMES_MAX = 1024  # remembered at once; a cluster has as many nodes
PATIENCE_SECONDS = 0.05  # for a fresh answer where an older one is at hand

SocketAddress = tuple[int, int, int, Any]
"""Family, kind, protocol and address, as ``socket.socket`` and ``connect`` take them."""

Lookup = Callable[[str, int], list[SocketAddress]]


@dataclass(slots=True)
class _Question:
    """One call of ``getaddrinfo`` on its way."""

    done: threading.Event = field(default_factory=threading.Event)
    addresses: list[SocketAddress] = field(default_factory=list)
    error: OSError | None = None


@dataclass(slots=True)
class _Known:
    """What was true last of one name, and how its addresses fared."""

    addresses: list[SocketAddress]
    preferred: SocketAddress | None = None  # served a connection last
    avoided: SocketAddress | None = None  # failed to, after it had been reached

    def in_order(self, addresses: list[SocketAddress]) -> list[SocketAddress]:
        return sorted(addresses, key=lambda one: (one == self.avoided, one != self.preferred))


class Resolver:
    """Asks anew for every connection, so that a service that moved is found, and falls back on what was true last.

    Addresses come in the name servers' order but for the one that served last, which is first, and one that failed
    since, which is last.
    """

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = _system_lookup if lookup is None else lookup
        self._lock = threading.Lock()
        self._good: OrderedDict[Address, _Known] = OrderedDict()
        self._asking: dict[Address, _Question] = {}

    def resolve(self, address: Address, clock: Clock, deadline: float) -> list[SocketAddress]:
        """At least one address. Raises OSError where there is none, TimeoutError where none is known in time."""
        numeric = _numeric(address)
        if numeric:
            return numeric
        with self._lock:
            known = self._good.get(address)
        question = self._ask(address)
        remaining = max(0.0, deadline - clock())
        if question.done.wait(remaining if known is None else min(remaining / 2, PATIENCE_SECONDS)):
            if question.error is None:
                return question.addresses if known is None else known.in_order(question.addresses)
            if known is None:
                try:
                    raise question.error
                finally:
                    del question  # whose error's traceback holds this frame
        if known is None:
            raise TimeoutError(f"{address.host}: no answer from the name servers")
        return known.in_order(known.addresses)

    def prefer(self, name: Address, address: SocketAddress) -> None:
        """A connection to this address of ``name`` has served."""
        with self._lock:
            known = self._good.get(name)
            if known is not None:
                known.preferred = address
                if known.avoided == address:
                    known.avoided = None

    def avoid(self, name: Address, address: SocketAddress) -> None:
        """This address of ``name`` could be reached, but nothing useful came of it."""
        with self._lock:
            known = self._good.get(name)
            if known is not None:
                known.avoided = address
                if known.preferred == address:
                    known.preferred = None

    def _ask(self, address: Address) -> _Question:
        with self._lock:
            question = self._asking.get(address)
            if question is None:
                question = self._asking[address] = _Question()
                thread = threading.Thread(
                    target=self._answer, args=(address, question), name="spillway-resolve", daemon=True
                )
                thread.start()
            return question

    def _answer(self, address: Address, question: _Question) -> None:
        try:
            question.addresses = self._lookup(address.host, address.port)
            if not question.addresses:
                question.error = OSError(f"{address.host} has no address")
        except OSError as error:
            question.error = without_frames(error)
        except Exception as error:  # a name that is none (too long, an empty label): nobody may wait for ever
            question.error = OSError(f"{address.host}: {error}")
        with self._lock:
            del self._asking[address]
            if question.error is None:
                self._good.setdefault(address, _Known([])).addresses = question.addresses
                self._good.move_to_end(address)
                if len(self._good) > NAMES_MAX:
                    self._good.popitem(last=False)
        question.done.set()


def _system_lookup(host: str, port: int) -> list[SocketAddress]:
    return [
        (family, kind, protocol, address)
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ]


def _numeric(address: Address) -> list[SocketAddress]:
    """The address where ``host`` is one already; asks nobody."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError):
        return []
    return [(family, kind, protocol, where) for family, kind, protocol, _, where in found]


SYSTEM = Resolver()
"""Shared by all tiers of the process: what one has found serves the others."""
