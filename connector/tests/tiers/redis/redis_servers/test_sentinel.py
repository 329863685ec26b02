from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from stack_driver.deadlines import eventually

from spillway_connector.errors import TierError, TierRefused, TierUnreachable
from spillway_connector.testing.tier_contract import error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome


def _until_stored(tier: RedisTier, key: bytes) -> None:
    """Each attempt is short and ends cleanly; one of them finds the new primary."""

    def stored() -> StoreOutcome | None:
        try:
            return tier.store(key, payload_of(1), time.monotonic() + 1.0)
        except (TierUnreachable, TierRefused):
            return None

    eventually("the tier finds the new primary", stored)


def test_the_primary_is_found_through_the_sentinel(watched, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(watched.endpoint)
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == payload_of(1)
    assert watched.primary.client.dbsize() == 2
    assert tier.resident_bytes(soon()) > 0


def test_a_service_that_no_sentinel_watches_is_refused(watched, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(RedisEndpoint.from_url(f"redis-sentinel://127.0.0.1:{watched.sentinel.port}/other"))
    error = error_of(lambda: tier.prepare(soon()))
    assert isinstance(error, TierRefused)
    assert "watches no service 'other'" in str(error)


@pytest.mark.parametrize("killed", [True, False])
def test_a_failover_is_followed(watched, tier_on: Callable[..., RedisTier], killed: bool) -> None:
    tier = tier_on(watched.endpoint)
    tier.store(key_of(1), payload_of(1), soon())
    assert watched.primary.client.wait(1, 30_000) == 1  # the replica has it
    if killed:
        watched.kill_primary()
    else:
        sentinel = watched.sentinel
        sentinel.until(lambda: sentinel.client.execute_command("SENTINEL", "FAILOVER", "kv"))
    _until_stored(tier, key_of(2))
    watched.replica.until(lambda: watched.replica.client.role()[0] == b"master")
    _until_stored(tier, key_of(3))
    assert watched.replica.client.dbsize() >= 2  # block 2 may have reached the former primary alone
    assert load(tier, key_of(1)) == payload_of(1)
    assert load(tier, key_of(3)) == payload_of(1)


def test_with_sentinel_and_primary_gone_it_fails_cleanly(watched, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(watched.endpoint)
    tier.store(key_of(1), payload_of(1), soon())
    for process in (watched.sentinel, watched.primary):
        process.kill()
    for _ in range(3):
        assert isinstance(error_of(lambda: load(tier, key_of(1))), TierUnreachable)
    fresh = tier_on(watched.endpoint)
    assert isinstance(error_of(lambda: fresh.prepare(soon())), TierError)
