from __future__ import annotations

from collections.abc import Callable

import pytest

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.namespace import Namespace
from spillway_connector.testing.retention_contract import MakeRetaining, RenewedTier, RetentionContract
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    PAYLOAD_BYTES,
    BoundedTierContract,
    key_of,
    payload_of,
    soon,
)
from spillway_connector.tiers.frame import HEADER_BYTES
from spillway_connector.tiers.memory import MemoryStore, MemoryTier


class _MemoryMedium:
    def __init__(self) -> None:
        self.store = MemoryStore(max_bytes=1 << 30)

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
        return bytes(self.store.frames[namespace.digest16, key])

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
        self.store.frames[namespace.digest16, key] = bytearray(frame)

    def write_document(self, namespace: Namespace, document: bytes) -> None:
        self.store.documents[namespace.digest16] = document


@pytest.fixture
def medium() -> _MemoryMedium:
    return _MemoryMedium()


@pytest.fixture
def make_tier(medium: _MemoryMedium) -> Callable[[Namespace, int], MemoryTier]:
    return lambda namespace, payload_bytes: MemoryTier(namespace, payload_bytes, medium.store)


@pytest.fixture
def make_small_tier() -> Callable[[int], MemoryTier]:
    frame_bytes = HEADER_BYTES + PAYLOAD_BYTES
    return lambda frames: MemoryTier(NAMESPACE, PAYLOAD_BYTES, MemoryStore(frames * frame_bytes))


@pytest.fixture
def make_retaining() -> MakeRetaining:
    def make(chunks: int) -> RenewedTier:
        store = MemoryStore(chunks * (HEADER_BYTES + PAYLOAD_BYTES))
        return RenewedTier.stepped(lambda clock, _: MemoryTier(NAMESPACE, PAYLOAD_BYTES, store, clock=clock), chunks)

    return make


class TestMemoryTier(BoundedTierContract, RetentionContract):
    pass


def test_the_least_recently_used_frame_is_evicted() -> None:
    store = MemoryStore(max_bytes=3 * 1192)
    tier = MemoryTier(NAMESPACE, 1000, store)
    for seed in range(3):
        tier.store(key_of(seed), payload_of(seed, 1000), soon())
    tier.load(key_of(0), memoryview(bytearray(1000)), soon())
    tier.store(key_of(3), payload_of(3, 1000), soon())
    assert tier.contains([key_of(seed) for seed in range(4)], soon()) == [True, False, True, True]


def test_a_frame_that_can_never_fit_is_refused() -> None:
    tier = MemoryTier(NAMESPACE, 1000, MemoryStore(max_bytes=1000))
    with pytest.raises(TierRefused, match="1000 holds no frame of 1192") as caught:
        tier.store(key_of(0), payload_of(0, 1000), soon())
    assert caught.value.reason == RefusedReason.NO_SPACE
