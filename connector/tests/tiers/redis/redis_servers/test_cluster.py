from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stack_driver.deadlines import eventually

from spillway_connector.errors import RefusedReason, TierError, TierUnreachable
from spillway_connector.namespace import Namespace
from spillway_connector.testing.sick_server import SickServer
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    TierContract,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.router import REDIRECTS_MAX
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome

STRIPED_BYTES = 5 * 65536
SMALL = {"stripe_bytes_max": 65536}


def name_of(key: bytes, namespace: Namespace = NAMESPACE) -> bytes:
    return f"spillway1:{namespace.hex}:{key.hex()}".encode()


class _ClusterMedium:
    def __init__(self, cluster) -> None:
        self.cluster = cluster

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
        name = name_of(key, namespace)
        return bytes(self.cluster.owner(name).client.get(name))

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
        name = name_of(key, namespace)
        self.cluster.owner(name).client.set(name, frame)

    def write_document(self, namespace: Namespace, document: bytes) -> None:
        name = f"spillway1:{namespace.hex}:document".encode()
        self.cluster.owner(name).client.set(name, document)


@pytest.fixture
def medium(cluster) -> _ClusterMedium:
    return _ClusterMedium(cluster)


@pytest.fixture
def make_tier(cluster) -> Iterator[Callable[[Namespace, int], RedisTier]]:
    tiers: list[RedisTier] = []

    def make(namespace: Namespace, payload_bytes: int) -> RedisTier:
        tiers.append(RedisTier(namespace, payload_bytes, cluster.endpoint))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


class TestRedisTierOnACluster(TierContract):
    pass


def test_stripes_spread_over_the_nodes_and_come_back(cluster, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(cluster.endpoint, STRIPED_BYTES, payload_connections=3, **SMALL)
    for seed in range(8):
        tier.store(key_of(seed), payload_of(seed, STRIPED_BYTES), soon())
    for seed in range(8):
        assert load(tier, key_of(seed)) == payload_of(seed, STRIPED_BYTES)
    assert all(node.client.dbsize() > 0 for node in cluster.nodes)
    for seed in range(8):
        tier.discard(key_of(seed), soon())
    assert sum(node.client.dbsize() for node in cluster.nodes) == 1  # the document


def test_a_moved_slot_is_followed(cluster, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(cluster.endpoint)
    tier.store(key_of(1), payload_of(1), soon())
    name = name_of(key_of(1))
    home = cluster.owner(name)
    away = next(node for node in cluster.nodes if node is not home)
    cluster.move(name, home, away)
    try:
        assert load(tier, key_of(1)) == payload_of(1)
        assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
        tier.discard(key_of(1), soon())
        assert tier.store(key_of(1), payload_of(2), soon()) is StoreOutcome.STORED
        assert away.client.exists(name) == 1
    finally:
        cluster.move(name, away, home)


def test_a_migrating_slot_is_served_by_both_nodes(cluster, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(cluster.endpoint)
    tier.store(key_of(1), payload_of(1), soon())
    name = name_of(key_of(1))
    home = cluster.owner(name)
    away = next(node for node in cluster.nodes if node is not home)
    cluster.begin_move(name, home, away)
    try:
        assert load(tier, key_of(1)) == payload_of(1)  # still at home
        cluster.migrate(name, home, away)
        assert load(tier, key_of(1)) == payload_of(1)  # ASK
        assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
        assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.PRESENT
        tier.discard(key_of(1), soon())
        assert tier.contains([key_of(1)], soon()) == [False]
        assert tier.store(key_of(1), payload_of(3), soon()) is StoreOutcome.STORED
        assert load(tier, key_of(1)) == payload_of(3)
    finally:
        cluster.migrate(name, home, away)
        cluster.end_move(name, away)
        cluster.move(name, away, home)


def test_a_slot_that_moves_back_and_forth_is_followed_at_every_stage(
    cluster, tier_on: Callable[..., RedisTier]
) -> None:
    tier = tier_on(cluster.endpoint)
    tier.store(key_of(1), payload_of(1), soon())
    name = name_of(key_of(1))
    home = cluster.owner(name)
    away = next(node for node in cluster.nodes if node is not home)
    for source, target in [(home, away), (away, home)] * 3:
        for step in (
            lambda: cluster.begin_move(name, source, target),  # noqa: B023 - called at once
            lambda: cluster.migrate(name, source, target),  # noqa: B023
            lambda: cluster.end_move(name, target),  # noqa: B023
        ):
            step()
            assert load(tier, key_of(1)) == payload_of(1)
            assert tier.contains([key_of(1)], soon()) == [True]
            assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.PRESENT


def test_nodes_that_redirect_to_each_other_are_followed_three_times(
    tier_on: Callable[..., RedisTier],
) -> None:
    # No healthy cluster answers this; the client has the bound.
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"
    with SickServer([[]]) as one, SickServer([[]]) as other:
        for server, next_server in ((one, other), (other, one)):
            moved = b"-MOVED 5 127.0.0.1:%d\r\n" % next_server.port

            def answer(command: bytes, port: int = server.port, moved: bytes = moved) -> list[bytes | None]:
                return [slots % port if b"SLOTS" in command else b"+PONG\r\n" if b"PING" in command else moved]

            server.answer_by(answer)
        tier = tier_on(RedisEndpoint.from_url(f"redis-cluster://127.0.0.1:{one.port}"))
        error = error_of(lambda: tier.prepare(soon()))
        assert error.reason == RefusedReason.MOVED
        asked = [command for server in (one, other) for command in server.commands if b"document" in command]
        assert len(asked) == 1 + REDIRECTS_MAX
        assert sum(b"SLOTS" in command for server in (one, other) for command in server.commands) <= 2


def test_a_plain_url_to_a_cluster_is_refused_with_the_remedy(cluster, tier_on: Callable[..., RedisTier]) -> None:
    tiers = [tier_on(RedisEndpoint(port=node.port), namespace=Namespace.of({"n": 1})) for node in cluster.nodes]
    errors: list[TierError] = []
    for tier in tiers:
        try:
            tier.prepare(soon())
        except TierError as error:
            errors.append(error)
    assert len(errors) == 2
    assert all(error.reason == RefusedReason.MOVED and "redis-cluster://" in str(error) for error in errors)


def test_a_seed_that_is_away_is_passed_over(cluster, tier_on: Callable[..., RedisTier]) -> None:
    port = cluster.nodes[2].port
    tier = tier_on(RedisEndpoint.from_url(f"redis-cluster://127.0.0.1:1,127.0.0.1:{port}"))
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    gone = tier_on(RedisEndpoint.from_url("redis-cluster://127.0.0.1:1,127.0.0.1:2"))
    assert error_of(lambda: gone.prepare(soon())).reason == "connect"


def test_a_batch_larger_than_a_pipeline_keeps_its_order(cluster, tier_on: Callable[..., RedisTier]) -> None:
    tier = tier_on(cluster.endpoint, 64)
    for seed in range(0, 60, 3):
        tier.store(key_of(seed), payload_of(seed, 64), soon())
    answers = tier.contains([key_of(seed) for seed in range(5000)], soon())
    assert answers == [seed < 60 and seed % 3 == 0 for seed in range(5000)]


def test_a_killed_node_costs_clean_errors_until_its_replica_has_taken_over(
    own_cluster, tmp_path: Path, tier_on: Callable[..., RedisTier]
) -> None:
    name = name_of(key_of(1))
    primary = own_cluster.owner(name)
    replica = own_cluster.add_replica(tmp_path / "replica", primary)
    own_cluster.nodes.append(replica)
    seeds = ",".join(f"127.0.0.1:{node.port}" for node in own_cluster.nodes)
    tier = tier_on(RedisEndpoint.from_url(f"redis-cluster://{seeds}"))
    tier.store(key_of(1), payload_of(1), soon())
    assert primary.client.wait(1, 30_000) == 1
    own_cluster.kill(primary)
    errors: list[TierError] = []

    def loaded() -> bytes | None:
        try:
            return load(tier, key_of(1))
        except TierError as error:
            errors.append(error)
            return None

    assert eventually("the replica has taken over", loaded) == payload_of(1)
    assert errors
    assert all(
        isinstance(error, TierUnreachable) or error.reason in (RefusedReason.MOVED, RefusedReason.LOADING)
        for error in errors
    )
    assert tier.store(key_of(2), payload_of(2), soon()) is StoreOutcome.STORED
