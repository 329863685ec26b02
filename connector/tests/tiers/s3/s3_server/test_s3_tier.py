"""The tier on a real server: the contract, and the faults that a real server has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest
from s3_servers import READER_KEYS, s3_server

from spillway_connector.errors import RefusedReason, TierCorrupt, TierMiss, TierUnreachable, UnreachableReason
from spillway_connector.namespace import Namespace
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.retention_contract import MakeRetaining, RenewedTier, RetentionContract
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
from spillway_connector.tiers.s3.client import S3Client
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.s3.tier import S3Tier
from spillway_connector.tiers.sealed import SEAL_BYTES, SealedTier, SealKey, sealed_namespace
from spillway_connector.tiers.tier import StoreOutcome, Tier

TierAt = Callable[..., S3Tier]


class _S3Medium:
    def __init__(self, place: S3Place) -> None:
        self.place = place
        self.bucket = S3Client(place, 1).bucket

    def name(self, namespace: Namespace, key: bytes) -> str:
        return f"{self.place.prefix}spillway1/{namespace.hex}/{key.hex()}"

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
        return bytes(obstore.get(self.bucket, self.name(namespace, key)).bytes())

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
        obstore.put(self.bucket, self.name(namespace, key), frame)

    def write_document(self, namespace: Namespace, document: bytes) -> None:
        obstore.put(self.bucket, f"{self.place.prefix}spillway1/{namespace.hex}/document", document)


@pytest.fixture
def medium(place: S3Place) -> _S3Medium:
    return _S3Medium(place)


@pytest.fixture
def make_tier(place: S3Place, tier_at: TierAt) -> Callable[[Namespace, int], Tier]:
    return lambda namespace, payload_bytes: tier_at(place, namespace, payload_bytes)


@pytest.fixture
def make_retaining(make_tier: Callable[[Namespace, int], Tier]) -> MakeRetaining:
    """Lifecycle rules of the bucket count from the write, and nothing that an engine does holds an object."""
    return lambda chunks: RenewedTier(
        make_tier(NAMESPACE, PAYLOAD_BYTES), chunks, SteppedClock(), time.monotonic, lambda seconds: None
    )


class TestS3Tier(TierContract, RetentionContract):
    pass


def test_a_sealed_block_comes_back_and_lies_there_sealed(place: S3Place, medium: _S3Medium, tier_at: TierAt) -> None:
    key = SealKey.parse("2026-11", "00" * 32, "a test")
    namespace = sealed_namespace(NAMESPACE, key)
    tier = SealedTier.of(tier_at(place, namespace, PAYLOAD_BYTES + SEAL_BYTES), namespace, PAYLOAD_BYTES, key)
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == payload_of(1)
    assert bytes(payload_of(1))[:64] not in medium.read_frame(namespace, key_of(1))


def test_a_reader_loads_and_its_stores_are_refused_by_name_of_the_right(
    place: S3Place, tier_at: TierAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier_at(place, NAMESPACE, PAYLOAD_BYTES).store(key_of(1), payload_of(1), soon())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_KEYS[1])
    reader = tier_at(place, NAMESPACE, PAYLOAD_BYTES)
    assert load(reader, key_of(1)) == payload_of(1)
    refused = error_of(lambda: reader.store(key_of(2), payload_of(2), soon()))
    assert refused.reason == RefusedReason.PERMISSION
    assert "s3:PutObject" in str(refused)
    # Without a document, too: nothing contradicts the reader.
    empty = tier_at(place, NAMESPACE, PAYLOAD_BYTES, prefix=f"{place.prefix}other/")
    assert empty.contains([key_of(1)], soon()) == [False]


@pytest.mark.parametrize(("key_id", "secret"), [("unknown-id", "x"), (READER_KEYS[0], "wrong")])
def test_wrong_credentials_are_named_at_lookups_loads_and_stores(
    place: S3Place, tier_at: TierAt, monkeypatch: pytest.MonkeyPatch, key_id: str, secret: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    tier = tier_at(place, NAMESPACE, PAYLOAD_BYTES)
    for call in (
        lambda: tier.contains([key_of(1)], soon()),
        lambda: load(tier, key_of(1)),
        lambda: tier.store(key_of(1), payload_of(1), soon()),
    ):
        refused = error_of(call)
        assert refused.reason == RefusedReason.AUTHENTICATION
        assert "does not accept these credentials" in str(refused)
        assert secret not in str(refused) or secret == "x"


def test_a_missing_bucket_is_not_an_empty_one(place: S3Place, tier_at: TierAt) -> None:
    tier = tier_at(place, NAMESPACE, PAYLOAD_BYTES, bucket="never-made")
    for call in (lambda: tier.prepare(soon()), lambda: tier.contains([key_of(1)], soon())):
        error = error_of(call)
        assert isinstance(error, TierUnreachable)
        assert error.reason == UnreachableReason.BUCKET_MISSING
        assert "no such bucket" in str(error)


def test_a_huge_object_under_a_blocks_name_is_not_read(medium: _S3Medium, place: S3Place, tier_at: TierAt) -> None:
    tier = tier_at(place, NAMESPACE, PAYLOAD_BYTES)
    tier.prepare(soon())
    medium.write_frame(NAMESPACE, key_of(1), bytes(8 << 20))
    error = error_of(lambda: load(tier, key_of(1)))
    assert isinstance(error, TierCorrupt)
    assert f"{8 << 20} bytes" in str(error)


def test_a_purge_under_running_engines_costs_misses_and_the_document_comes_back(
    place: S3Place, medium: _S3Medium, tier_at: TierAt
) -> None:
    tier = tier_at(place, NAMESPACE, PAYLOAD_BYTES)
    tier.store(key_of(1), payload_of(1), soon())
    names = [each["path"] for page in obstore.list(medium.bucket, place.prefix) for each in page]
    assert len(names) == 2
    obstore.delete(medium.bucket, names)
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)
    tier.resident_bytes(soon())  # as the lookup thread asks every ten seconds
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert len([each for page in obstore.list(medium.bucket, place.prefix) for each in page]) == 2


def test_a_server_that_is_killed_is_unreachable_and_no_call_hangs(tmp_path: Path, tier_at: TierAt) -> None:
    with s3_server(tmp_path) as own:
        own.make_bucket("spillway-own")
        tier = tier_at(S3Place("spillway-own", endpoint=own.endpoint), NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        own.kill()
        for call in (
            lambda: tier.contains([key_of(1)], soon()),
            lambda: tier.store(key_of(2), payload_of(2), soon()),
        ):
            assert isinstance(error_of(call), TierUnreachable)


def test_requests_are_counted_by_kind_and_those_beyond_the_bound_are_not_made(place: S3Place) -> None:
    tier = S3Tier(NAMESPACE, PAYLOAD_BYTES, place, puts_per_second_max=0.001, gets_per_second_max=1000)
    try:
        tier.prepare(soon())  # the document is the one put of this second
        before = dict(tier.requests)
        refused = error_of(lambda: tier.store(key_of(1), payload_of(1), soon()))
        assert refused.reason == RefusedReason.QUEUE_AGE and "putsPerSecondMax" in str(refused)
        assert tier.contains([key_of(1), key_of(2)], soon()) == [False, False]
        assert dict(tier.requests) == {**before, "head": 2} and before == {"get": 1, "put": 1}
    finally:
        tier.close()
