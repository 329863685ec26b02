"""The contract suite of tiers finds what it is there to find: each broken tier fails the test of its promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from spillway_connector.testing.retention_contract import RenewedTier, RetentionContract
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, BoundedTierContract
from spillway_connector.tiers.frame import HEADER_BYTES
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import NO_TENANT, EvictionReason, StoreOutcome


class Uncounted(MemoryTier):
    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return {}


class CountsRemovals(MemoryTier):
    def discard(self, key: bytes, deadline: float) -> None:
        super().discard(key, deadline)
        self._evictions[EvictionReason.ROOM] += 1


class NeverPressed(MemoryTier):
    under_pressure = False  # type: ignore[assignment]


class AlwaysPressed(MemoryTier):
    under_pressure = True  # type: ignore[assignment]


class StaleIndex(MemoryTier):
    """Answers by what was ever stored."""

    has_local_index = True

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self.__dict__.setdefault("stored", set()).add(key)
        return super().store(key, source, deadline, tenant)

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        stored = self.__dict__.get("stored")
        return None if stored is None else [key in stored for key in keys]


class UnannouncedIndex(MemoryTier):
    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        return [False] * len(keys)


class QuarantinesNothing(MemoryTier):
    """Counts a document that it did not replace."""

    @property
    def quarantined(self) -> Mapping[str, int]:
        return {"changed": 1}


class RenewsNothing(MemoryTier):
    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        pass


def run(kind: type[MemoryTier], promise: str) -> None:
    store = MemoryStore(64 << 20)

    class Medium:
        def read_frame(self, namespace: Any, key: bytes) -> bytes:
            return bytes(store.frames[namespace.digest16, key])

        def write_frame(self, namespace: Any, key: bytes, frame: bytes) -> None:
            store.frames[namespace.digest16, key] = bytearray(frame)

    given: dict[str, object] = {
        "make_tier": lambda namespace, payload_bytes: kind(namespace, payload_bytes, store),
        "make_small_tier": lambda frames: kind(
            NAMESPACE, PAYLOAD_BYTES, MemoryStore(frames * (HEADER_BYTES + PAYLOAD_BYTES))
        ),
        "medium": Medium(),
    }
    test: Callable[..., None] = getattr(BoundedTierContract(), promise)
    wanted = test.__code__.co_varnames[1 : test.__code__.co_argcount]
    test(**{name: given[name] for name in wanted})


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Uncounted, "test_every_eviction_is_counted_by_its_reason"),
        (NeverPressed, "test_every_eviction_is_counted_by_its_reason"),
        (CountsRemovals, "test_a_tier_within_its_bound_evicts_nothing"),
        (AlwaysPressed, "test_a_tier_within_its_bound_evicts_nothing"),
        (AlwaysPressed, "test_the_state_can_be_read_before_use_and_after_the_end"),
        (QuarantinesNothing, "test_the_state_can_be_read_before_use_and_after_the_end"),
        (StaleIndex, "test_a_local_index_answers_as_contains_does"),
        (UnannouncedIndex, "test_a_local_index_answers_as_contains_does"),
    ],
)
def test_a_broken_promise_is_found(kind: type[MemoryTier], promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway_connector.testing.tier_contract.PATIENCE_SECONDS", 0.0)
    run(MemoryTier, promise)
    with pytest.raises(AssertionError):
        run(kind, promise)


@pytest.mark.parametrize("promise", [promise for promise in vars(RetentionContract) if promise.startswith("test_")])
def test_a_tier_that_renews_nothing_is_found(promise: str) -> None:
    def make(chunks: int) -> RenewedTier:
        store = MemoryStore(chunks * (HEADER_BYTES + PAYLOAD_BYTES))
        return RenewedTier.stepped(lambda clock, _: RenewsNothing(NAMESPACE, PAYLOAD_BYTES, store, clock=clock), chunks)

    with pytest.raises(AssertionError):
        getattr(RetentionContract(), promise)(make)
