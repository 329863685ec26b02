from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import ConfigError
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.redis.client.errors import ProtocolError
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.quota import (
    EXPIRED_GRACE_MS,
    USES_MAX,
    USES_PER_COMMAND,
    USES_SECONDS,
    VICTIMS_MAX,
    WRITING_MS,
    TenantQuotas,
)
from spillway_connector.tiers.tier import NO_TENANT

NAMES = RedisNames("00" * 16)
TENANT = b"tenant-1"
OTHER = b"tenant-2"
INDEX = NAMES.tenant(TENANT)


def quotas(clock: SteppedClock, max_bytes: int = 1000, ttl_ms: int | None = 60_000) -> TenantQuotas:
    return TenantQuotas(NAMES, 100, max_bytes, ttl_ms, clock=clock, wall_clock=clock)


def members_of(command: tuple[bytes, ...]) -> dict[bytes, int]:
    assert command[0] == b"ZADD"
    return {key: int(score) for score, key in zip(command[2::2], command[3::2], strict=True)}


def test_a_store_counts_its_block_before_it_asks_how_many_there_are() -> None:
    clock = SteppedClock(500.0)
    assert quotas(clock).count(b"k", TENANT) == [
        (b"ZADD", INDEX, b"%d" % (500_000 + WRITING_MS), b"k"),
        (b"ZREMRANGEBYSCORE", INDEX, b"-inf", b"%d" % (500_000 - 60_000 - EXPIRED_GRACE_MS)),
        (b"ZCARD", INDEX),
        (b"ZRANGE", INDEX, b"0", b"%d" % VICTIMS_MAX),
        (b"PEXPIRE", INDEX, b"%d" % (60_000 + EXPIRED_GRACE_MS)),
    ]
    assert [words[0] for words in quotas(clock, ttl_ms=None).count(b"k", TENANT)] == [b"ZADD", b"ZCARD", b"ZRANGE"]


@given(st.integers(0, 40), st.booleans(), st.booleans())
def test_the_oldest_are_evicted_until_the_new_one_fits_a_few_at_once(held: int, ttl: bool, again: bool) -> None:
    quota = quotas(SteppedClock(), ttl_ms=60_000 if ttl else None)
    members = [b"m%02d" % number for number in range(held)]
    key = members[0] if again and members else b"new"
    oldest = members[: VICTIMS_MAX + 1]
    replies = [1, 0, held, oldest, 1] if ttl else [1, held, oldest]
    victims = quota.victims(key, replies)
    assert len(victims) == max(0, min(held - 10, VICTIMS_MAX))
    assert key not in victims
    assert victims == [member for member in oldest if member != key][: len(victims)]


def test_answers_of_another_kind_are_refused() -> None:
    for replies in ([1, 0, None, [], 1], [1, 0, 3, b"x", 1]):
        with pytest.raises(ProtocolError):
            quotas(SteppedClock()).victims(b"k", replies)


def test_a_quota_that_holds_no_block_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="tenant_max_bytes: 99 holds no block of 100 bytes"):
        quotas(SteppedClock(), max_bytes=99)
    quotas(SteppedClock(), max_bytes=100)


def test_uses_are_sent_with_the_next_store_of_their_tenant() -> None:
    clock = SteppedClock(500.0)
    quota = quotas(clock)
    quota.use(b"a", TENANT)
    quota.use(b"x", OTHER)
    quota.use(b"n", NO_TENANT)
    clock.advance(1)
    quota.use(b"b", TENANT)
    clock.advance(1)
    writing = 502_000 + WRITING_MS
    assert members_of(quota.count(b"k", TENANT)[0]) == {b"a": 500_000, b"b": 501_000, b"k": writing}
    assert members_of(quota.count(b"k", TENANT)[0]) == {b"k": writing}
    assert members_of(quota.count(b"k", OTHER)[0]) == {b"x": 500_000, b"k": writing}


def test_what_was_written_is_sent_before_any_use() -> None:
    clock = SteppedClock(500.0)
    quota = quotas(clock)
    for number in range(USES_PER_COMMAND):
        quota.use(b"%d" % number, TENANT)
    quota.count(b"k", TENANT)
    for number in range(USES_PER_COMMAND):
        quota.use(b"%d" % number, TENANT)
    clock.advance(1)
    quota.written(b"k", TENANT)
    sent = members_of(quota.count(b"next", TENANT)[0])
    assert len(sent) == USES_PER_COMMAND
    assert (sent[b"k"], sent[b"next"]) == (501_000, 501_000 + WRITING_MS)


def test_a_use_of_the_block_that_is_stored_is_sent_once() -> None:
    clock = SteppedClock(500.0)
    quota = quotas(clock)
    quota.use(b"k", TENANT)
    clock.advance(1)
    assert members_of(quota.count(b"k", TENANT)[0]) == {b"k": 501_000 + WRITING_MS}


def test_uses_without_stores_are_sent_each_minute_and_once() -> None:
    clock = SteppedClock(500.0)
    quota = quotas(clock)
    assert quota.uses_due() == []
    for number in range(USES_PER_COMMAND + 1):
        quota.use(b"%d" % number, TENANT)
    quota.use(b"x", OTHER)
    assert quota.uses_due() == []
    clock.advance(USES_SECONDS)
    sent = quota.uses_due()
    assert [(words[1], len(members_of(words))) for words in sent] == [
        (INDEX, USES_PER_COMMAND),
        (INDEX, 1),
        (NAMES.tenant(OTHER), 1),
    ]
    assert quota.uses_due() == []


def test_of_too_many_uses_the_oldest_are_dropped() -> None:
    clock = SteppedClock(500.0)
    quota = quotas(clock)
    for number in range(USES_MAX + 5):
        quota.use(b"%d" % number, TENANT)
    quota.use(b"5", TENANT)  # the oldest that is left, now the youngest
    quota.use(b"one more", TENANT)
    clock.advance(USES_SECONDS)
    sent = {key for words in quota.uses_due() for key in members_of(words)}
    assert len(sent) == USES_MAX
    assert b"5" in sent
    assert b"6" not in sent


def test_threads_send_each_use_once() -> None:
    clock = SteppedClock(500.0)
    quota = quotas(clock)
    sent: list[bytes] = []

    def work(number: int) -> None:
        for turn in range(300):
            quota.use(b"%d-%d" % (number, turn), TENANT)
            sent.extend(members_of(quota.count(b"k", TENANT)[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key for key in sent if key != b"k") == sorted(
        b"%d-%d" % (number, turn) for number in range(4) for turn in range(300)
    )
