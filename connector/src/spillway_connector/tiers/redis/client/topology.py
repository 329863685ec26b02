"""The server that has a key: the only one, the primary that sentinels name, or the owner of the key's slot.

redis-py's SentinelConnectionPool follows the primary and asks here which one it is. Its Sentinel has no deadline, so
that one silent sentinel uses up the time of those after it, and sends SENTINEL MASTERS, which the documented users may
not. redis-py computes slots and parses redirections. Its NodesManager is not used: it holds the GIL for 4 ms to begin
with and 1.4 ms for each further map of three nodes (27 and 2.3 ms with 100), this one for 0.05 ms (0.34); it takes 1.4
us for each key; and it raises TypeError if a node gives no host (``cluster-preferred-endpoint-type
unknown-endpoint``).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from typing_extensions import override

from spillway_connector.errors import RefusedReason, TierError, TierRefused, TierUnreachable
from spillway_connector.tiers.redis.client.deadline_socket import connect_by, connect_deadline
from spillway_connector.tiers.redis.client.discovery import Discovery, first_answer
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.errors import ProtocolError, Redirected, Reply, shown
from spillway_connector.tiers.redis.client.pool import RedisPool, SentinelPool, closed
from spillway_connector.tiers.tier import Clock

SLOTS: int = REDIS_CLUSTER_HASH_SLOTS

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Route:
    """The server to send a command to. ``ask``: precede it by ASKING, for this command only."""

    address: Address
    ask: bool = False


class ServerMap(ABC):
    """The servers of one deployment and the connections to them. Used by several threads at once.

    pool_options: what each RedisPool takes beside its endpoint and the clock.
    """

    def __init__(self, endpoint: RedisEndpoint, clock: Clock, **pool_options: Any) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._pool_options = pool_options
        self._lock = threading.Lock()
        self._pools: dict[Address, RedisPool] = {}
        self._closed = False

    @abstractmethod
    def locate(self, name: bytes, deadline: float) -> Route:
        """The server that is believed to have the key ``name``; discovers first if nothing is known."""

    @abstractmethod
    def reroute(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        """The server to which a command is sent again after ``error``; None: ``error`` is final. It makes at most one
        discovery."""

    @abstractmethod
    def servers(self, deadline: float) -> list[Address]:
        """All servers that hold keys."""

    def pool(self, server: Address) -> RedisPool:
        """The connections to ``server``. Raises TierRefused(CLOSED)."""
        with self._lock:
            if self._closed:
                raise closed(self._endpoint)
            if server not in self._pools:
                self._pools[server] = RedisPool(self._endpoint.at(server), clock=self._clock, **self._pool_options)
            return self._pools[server]

    def close(self) -> None:
        """Close, which ends the waits of other threads at once. Twice is harmless."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()


def server_map(endpoint: RedisEndpoint, clock: Clock, **pool_options: Any) -> ServerMap:
    """The map for ``endpoint.topology``."""
    match endpoint.topology:
        case Topology.SERVER:
            return SingleServer(endpoint, clock, **pool_options)
        case Topology.SENTINEL:
            return SentinelMap(endpoint, clock, **pool_options)
        case Topology.CLUSTER:
            return ClusterMap(endpoint, clock, **pool_options)


class SingleServer(ServerMap):
    def __init__(self, endpoint: RedisEndpoint, clock: Clock, **pool_options: Any) -> None:
        super().__init__(endpoint, clock, **pool_options)
        self._route = Route(Address(endpoint.host, endpoint.port))

    @override
    def locate(self, name: bytes, deadline: float) -> Route:
        return self._route

    @override
    def reroute(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        if isinstance(error, Redirected):
            raise TierRefused(
                RefusedReason.MOVED, f"{error}; this is a cluster: write redis.url as redis-cluster://HOST:PORT"
            ) from error
        return None

    @override
    def servers(self, deadline: float) -> list[Address]:
        return [self._route.address]


class _DiscoveredMap(ServerMap, Generic[_Found]):
    def __init__(self, endpoint: RedisEndpoint, clock: Clock, **pool_options: Any) -> None:
        super().__init__(endpoint, clock, **pool_options)
        self._discovery = Discovery(self._discover, clock)

    @override
    def reroute(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        if self._closed or not _may_be_elsewhere(error):
            return None
        self._discovery.suspect()
        if self._clock() >= deadline:
            return None
        try:
            route = self.locate(name, deadline)
        except TierError:
            return None  # the first error says more
        return None if route.address == asked.address else route

    @abstractmethod
    def _discover(self, deadline: float) -> _Found:
        """Find the servers now."""

    def _command(self, endpoint: RedisEndpoint, words: tuple[bytes, ...], deadline: float) -> Reply:
        pool = RedisPool(endpoint, 1, self._clock)
        try:
            return pool.run(lambda connection, deadline: connection.command(*words, deadline=deadline), deadline)
        finally:
            pool.close()


class SentinelMap(_DiscoveredMap[Address]):
    """The primary, as sentinels name it. They are asked again when it fails or reports that it is a replica."""

    def __init__(self, endpoint: RedisEndpoint, clock: Clock, **pool_options: Any) -> None:
        super().__init__(endpoint, clock, **pool_options)
        self._primary = SentinelPool(
            endpoint, clock=clock, service_name=endpoint.service, sentinel_manager=self, **pool_options
        )
        self._route: Route | None = None

    @override
    def locate(self, name: bytes, deadline: float) -> Route:
        address = self._discovery.get(deadline)
        if self._route is None or self._route.address != address:
            with connect_by(deadline):
                self._primary.get_master_address()  # closes the idle connections to the former primary
            self._route = Route(address)
        return self._route

    @override
    def servers(self, deadline: float) -> list[Address]:
        return [self._discovery.get(deadline)]

    @override
    def pool(self, server: Address) -> RedisPool:
        return self._primary

    @override
    def close(self) -> None:
        self._closed = True
        self._primary.close()

    def discover_master(self, service_name: str) -> Address:
        """The method that redis-py's pool calls."""
        return self._discovery.get(connect_deadline())

    @override
    def _discover(self, deadline: float) -> Address:
        return first_answer(self._endpoint.seeds, self._ask, self._clock, deadline)

    def _ask(self, address: Address, deadline: float) -> Address:
        sentinel = self._endpoint.at(address)
        service = (self._endpoint.service or "").encode()
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service)
        try:
            reply = self._command(sentinel.without_login(), question, deadline)
        except TierRefused as refused:
            # Sentinels seldom have a login. If they do, it is that of the servers that they watch.
            if refused.reason != RefusedReason.AUTHENTICATION:
                raise
            reply = self._command(sentinel, question, deadline)
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit():
                return Address(host.decode("utf-8", "replace"), int(port))
            case None:
                raise TierRefused(
                    RefusedReason.OTHER,
                    f"{self._endpoint}: the sentinel {address} watches no service {self._endpoint.service!r}",
                )
        raise ProtocolError(f"{self._endpoint}: the sentinel {address} answered {shown(reply)}")


class ClusterMap(_DiscoveredMap[list[Address | None]]):
    """The owner of each slot: read from any node at first, corrected by each redirection, read again after failures."""

    def __init__(self, endpoint: RedisEndpoint, clock: Clock, **pool_options: Any) -> None:
        super().__init__(endpoint, clock, **pool_options)
        self._nodes = endpoint.seeds

    @override
    def locate(self, name: bytes, deadline: float) -> Route:
        slot = key_slot(name)
        address = self._discovery.get(deadline)[slot]
        if address is None:
            self._discovery.suspect()
            raise TierRefused(RefusedReason.MOVED, f"{self._endpoint}: no node serves slot {slot}")
        return Route(address)

    @override
    def reroute(self, name: bytes, asked: Route, error: TierError, deadline: float) -> Route | None:
        if self._closed or not isinstance(error, Redirected):
            return super().reroute(name, asked, error, deadline)
        if not error.ask and error.slot < SLOTS:
            # One moved slot is seldom alone. During a rebalance the map is still read at most once per RENEWAL_SECONDS.
            self._discovery.suspect()
            try:
                self._discovery.get(deadline)[error.slot] = error.address  # newer than the map
            except TierError:
                pass  # the redirection alone is enough for this key
        return Route(error.address, ask=error.ask)

    @override
    def servers(self, deadline: float) -> list[Address]:
        return sorted({address for address in self._discovery.get(deadline) if address is not None})

    @override
    def _discover(self, deadline: float) -> list[Address | None]:
        slots = first_answer(self._nodes, self._ask, self._clock, deadline)
        found = dict.fromkeys(address for address in slots if address is not None)
        self._nodes = tuple(dict.fromkeys((*found, *self._endpoint.seeds)))
        with self._lock:
            gone = [self._pools.pop(node) for node in list(self._pools) if node not in found]
        for pool in gone:
            pool.retire()
        return slots

    def _ask(self, address: Address, deadline: float) -> list[Address | None]:
        return parse_slots(self._command(self._endpoint.at(address), (b"CLUSTER", b"SLOTS"), deadline), address)


def parse_slots(reply: Reply, asked: Address) -> list[Address | None]:
    """The owner of each of the 16384 slots from the reply to CLUSTER SLOTS. Raises ProtocolError, TierRefused."""
    slots: list[Address | None] = [None] * SLOTS
    if not isinstance(reply, list):
        raise ProtocolError(f"{asked}: CLUSTER SLOTS was answered with {type(reply).__name__}")
    for entry in reply:
        match entry:
            case [int(first), int(last), [(bytes() | None) as host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16
            ):
                # No host, or "?": a node that does not know its own address. It is reached at the address asked.
                name = "" if host in (None, b"?") else host.decode("utf-8", "replace")
                slots[first : last + 1] = [Address(name or asked.host, port)] * (last - first + 1)
            case _:
                raise ProtocolError(f"{asked}: CLUSTER SLOTS has an entry {shown(entry)}")
    if not any(slots):
        raise TierRefused(RefusedReason.MOVED, f"{asked}: the cluster has no slots assigned")
    return slots


def _may_be_elsewhere(error: TierError) -> bool:
    """Whether a server other than the one that failed may carry out the command."""
    if isinstance(error, TierRefused):
        return error.reason in (RefusedReason.READ_ONLY, RefusedReason.MOVED, RefusedReason.LOADING)
    return isinstance(error, TierUnreachable)
