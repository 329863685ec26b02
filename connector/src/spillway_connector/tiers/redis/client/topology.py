"""Which server to ask for a key: always the same one, the primary that sentinels name, or the owner of its slot.

Discovery uses our own connection rather than a client library's: its every wait has a deadline, nothing is retried
behind our back, and login and TLS are the ones of the data.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import Protocol

from spillway_connector.errors import RefusedReason, TierError, TierRefused, TierUnreachable
from spillway_connector.tiers.redis.client.connection import Redirected, RedisConnection, refusal
from spillway_connector.tiers.redis.client.discovery import Discovery, first_answer
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.resp import ErrorReply, ProtocolError, Reply
from spillway_connector.tiers.tier import Clock

SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Route:
    """Where to send a command. ``ask``: precede it by ASKING, for this once."""

    address: Address
    ask: bool = False


class Guide(Protocol):
    """Knows the servers of one deployment. Used by several threads at once."""

    def locate(self, name: bytes, deadline: float) -> Route:
        """The server that holds the key ``name``, as far as known; discovers first where nothing is known."""
        ...

    def reconsider(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        """Where else to ask after ``error``, or None: then the error stands. At most one discovery."""
        ...

    def servers(self, deadline: float) -> list[Address]:
        """All servers that hold keys."""
        ...

    @property
    def discoveries(self) -> int:
        """How often the servers were looked for; the answer of :meth:`servers` changes with it."""
        ...


def guide_to(endpoint: RedisEndpoint, clock: Clock) -> Guide:
    """The guide that ``endpoint.topology`` asks for."""
    match endpoint.topology:
        case Topology.SERVER:
            return OneServer(endpoint)
        case Topology.SENTINEL:
            return SentinelGuide(endpoint, clock)
        case Topology.CLUSTER:
            return ClusterGuide(endpoint, clock)


def slot_of(name: bytes) -> int:
    """The cluster slot of a key without a hash tag (ours have none): CRC-16/XMODEM modulo 16384."""
    return binascii.crc_hqx(name, 0) % SLOTS


class OneServer:
    """A server that is where it is said to be."""

    discoveries = 0

    def __init__(self, endpoint: RedisEndpoint) -> None:
        self._route = Route(Address(endpoint.host, endpoint.port))

    def locate(self, name: bytes, deadline: float) -> Route:
        return self._route

    def reconsider(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        if isinstance(error, Redirected):
            raise TierRefused(
                RefusedReason.MOVED, f"{error}; this is a cluster: write redis.url as redis-cluster://HOST:PORT"
            ) from error
        return None

    def servers(self, deadline: float) -> list[Address]:
        return [self._route.address]


class SentinelGuide:
    """Asks the sentinels who the primary is: at first, and whenever it fails or says it is none."""

    def __init__(self, endpoint: RedisEndpoint, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._primary = Discovery(self._ask, clock)

    def locate(self, name: bytes, deadline: float) -> Route:
        return Route(self._primary.get(deadline))

    def reconsider(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        if not _may_be_elsewhere(error):
            return None
        self._primary.suspect()
        if self._clock() >= deadline:
            return None
        try:
            primary = self._primary.get(deadline)
        except TierError:
            return None  # the first error says more
        return None if primary == asked.address else Route(primary)

    def servers(self, deadline: float) -> list[Address]:
        return [self._primary.get(deadline)]

    @property
    def discoveries(self) -> int:
        return self._primary.count

    def _ask(self, deadline: float) -> Address:
        return first_answer(self._endpoint.seeds, self._ask_one, self._clock, deadline)

    def _ask_one(self, address: Address, deadline: float) -> Address:
        sentinel = self._endpoint.at(address)
        service = (self._endpoint.service or "").encode()
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service)
        try:
            reply = _command(sentinel.without_login(), question, self._clock, deadline)
        except TierRefused as refused:
            # Sentinels seldom have a login. Where they do, it is the one of the servers they watch.
            if refused.reason != RefusedReason.AUTHENTICATION:
                raise
            reply = _command(sentinel, question, self._clock, deadline)
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit():
                return Address(host.decode("utf-8", "replace"), int(port))
            case None:
                raise TierRefused(
                    RefusedReason.OTHER,
                    f"{self._endpoint}: the sentinel {address} watches no service {self._endpoint.service!r}",
                )
        raise ProtocolError(f"{self._endpoint}: the sentinel {address} answered {reply!r:.64}")


class ClusterGuide:
    """Keeps the map of slots: read from any node at first, corrected by each redirection, read anew after failures."""

    def __init__(self, endpoint: RedisEndpoint, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._known = endpoint.seeds
        self._map = Discovery(self._ask, clock)

    def locate(self, name: bytes, deadline: float) -> Route:
        slot = slot_of(name)
        address = self._map.get(deadline)[slot]
        if address is None:
            self._map.suspect()
            raise TierRefused(RefusedReason.MOVED, f"{self._endpoint}: no node serves slot {slot}")
        return Route(address)

    def reconsider(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        if isinstance(error, Redirected):
            return self._follow(error, deadline)
        if not _may_be_elsewhere(error):
            return None
        self._map.suspect()
        if self._clock() >= deadline:
            return None
        try:
            route = self.locate(name, deadline)
        except TierError:
            return None
        return None if route.address == asked.address else route

    def servers(self, deadline: float) -> list[Address]:
        return sorted({address for address in self._map.get(deadline) if address is not None})

    @property
    def discoveries(self) -> int:
        return self._map.count

    def _follow(self, error: Redirected, deadline: float) -> Route:
        if error.ask or error.slot >= SLOTS:
            return Route(error.address, ask=error.ask)
        # One moved slot is seldom alone. In a storm of moves the map is still read at most once per RENEWAL_SECONDS.
        self._map.suspect()
        try:
            slots = self._map.get(deadline)
            slots[error.slot] = error.address  # newer than the map
        except TierError:
            pass  # the redirection alone is enough for this key
        return Route(error.address)

    def _ask(self, deadline: float) -> list[Address | None]:
        slots = first_answer(self._known, self._ask_one, self._clock, deadline)
        found = dict.fromkeys(address for address in slots if address is not None)
        self._known = tuple(dict.fromkeys((*found, *self._endpoint.seeds)))
        return slots

    def _ask_one(self, address: Address, deadline: float) -> list[Address | None]:
        reply = _command(self._endpoint.at(address), (b"CLUSTER", b"SLOTS"), self._clock, deadline)
        return parse_slots(reply, address)


def parse_slots(reply: Reply, asked: Address) -> list[Address | None]:
    """The owner of each of the 16384 slots from the answer to CLUSTER SLOTS. Raises ProtocolError, TierRefused."""
    slots: list[Address | None] = [None] * SLOTS
    if not isinstance(reply, list):
        raise ProtocolError(f"{asked}: CLUSTER SLOTS was answered with {type(reply).__name__}")
    for entry in reply:
        match entry:
            case [int(first), int(last), [(bytes() | None) as host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16
            ):
                # No host, or "?": a node that does not know its own address; it is where we reached it.
                name = "" if host in (None, b"?") else host.decode("utf-8", "replace")
                slots[first : last + 1] = [Address(name or asked.host, port)] * (last - first + 1)
            case _:
                raise ProtocolError(f"{asked}: CLUSTER SLOTS has an entry {entry!r:.100}")
    if not any(slots):
        raise TierRefused(RefusedReason.MOVED, f"{asked}: the cluster has no slots assigned")
    return slots


def _may_be_elsewhere(error: TierError) -> bool:
    """Whether another server than the one that failed may do what it did not."""
    if isinstance(error, TierRefused):
        return error.reason in (RefusedReason.READ_ONLY, RefusedReason.MOVED, RefusedReason.LOADING)
    return isinstance(error, TierUnreachable)


def _command(endpoint: RedisEndpoint, words: tuple[bytes, ...], clock: Clock, deadline: float) -> Reply:
    connection = RedisConnection(endpoint, clock, deadline)
    try:
        reply = connection.command(*words, deadline=deadline)
    finally:
        connection.close()
    if isinstance(reply, ErrorReply):
        raise refusal(endpoint, reply)
    return reply
