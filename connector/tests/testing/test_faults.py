from __future__ import annotations

import threading

import pytest

from spillway_connector.errors import RefusedReason, TierMiss, TierRefused, TierTimeout
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import (
    CorruptingTier,
    FlakyTier,
    HangingTier,
    RefusingTier,
    SlowTier,
    Throttle,
    ThrottledTier,
)
from spillway_connector.testing.tier_contract import NAMESPACE, error_of, key_of, payload_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.transfer.stats import Operation

SIZE = 100


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def memory(clock: SteppedClock) -> MemoryTier:
    return MemoryTier(NAMESPACE, SIZE, MemoryStore(1 << 20), clock=clock)


def test_a_slow_tier_passes_the_deadline_without_waiting(memory: MemoryTier, clock: SteppedClock) -> None:
    tier = SlowTier(memory, clock, 2.0, [Operation.STORE])
    assert isinstance(error_of(lambda: tier.store(key_of(1), payload_of(1, SIZE), clock() + 2.0)), TierTimeout)
    tier.store(key_of(1), payload_of(1, SIZE), clock() + 2.1)
    assert tier.contains([key_of(1)], clock() + 0.1) == [True]


def test_a_throttled_tier_moves_its_bytes_one_payload_after_the_other(memory: MemoryTier, clock: SteppedClock) -> None:
    waits: list[float] = []
    tier = ThrottledTier(memory, Throttle(10 * SIZE, clock=clock, sleep=waits.append), [Operation.LOAD])
    tier.store(key_of(1), payload_of(1, SIZE), clock() + 1)
    for _ in range(3):
        tier.load(key_of(1), memoryview(bytearray(SIZE)), clock() + 1)
    clock.advance(10.0)
    tier.load(key_of(1), memoryview(bytearray(SIZE)), clock() + 1)
    assert waits == pytest.approx([0.1, 0.2, 0.3, 0.1])


def test_a_flaky_tier_draws_the_same_lots_for_the_same_seed(memory: MemoryTier, clock: SteppedClock) -> None:
    def failures(seed: int) -> list[bool]:
        tier = FlakyTier(memory, seed=seed, failure_ratio=0.5, make_error=lambda: TierMiss("lot"))
        found = []
        for _ in range(50):
            try:
                tier.contains([], clock() + 1)
                found.append(False)
            except TierMiss:
                found.append(True)
        return found

    assert failures(1) == failures(1) != failures(2)
    assert 10 < sum(failures(1)) < 40


def test_a_hanging_tier_goes_on_when_released(memory: MemoryTier, clock: SteppedClock) -> None:
    tier = HangingTier(memory, [Operation.STORE])
    thread = threading.Thread(target=lambda: tier.store(key_of(1), payload_of(1, SIZE), clock() + 1))
    thread.start()
    assert tier.entered.acquire(timeout=120)
    assert tier.contains([key_of(1)], clock() + 1) == [False]
    tier.release()
    thread.join(120)
    assert tier.contains([key_of(1)], clock() + 1) == [True]


def test_a_refusing_tier_refuses_what_was_chosen(memory: MemoryTier, clock: SteppedClock) -> None:
    tier = RefusingTier(memory, RefusedReason.NO_SPACE, [Operation.STORE])
    error = error_of(lambda: tier.store(key_of(1), payload_of(1, SIZE), clock() + 1))
    assert isinstance(error, TierRefused) and error.reason == RefusedReason.NO_SPACE
    assert tier.contains([key_of(1)], clock() + 1) == [False]


def test_a_corrupting_tier_lists_what_it_damaged(clock: SteppedClock) -> None:
    tier = CorruptingTier(NAMESPACE, SIZE, MemoryStore(1 << 20), seed=1, corrupt_ratio=0.5, clock=clock)
    honest = MemoryTier(NAMESPACE, SIZE, MemoryStore(1 << 20), clock=clock, wall_clock=lambda: 1.0)
    for seed in range(50):
        for one in (tier, honest):
            one.store(key_of(seed), payload_of(seed, SIZE), clock() + 1)
    target = memoryview(bytearray(SIZE))
    for seed in range(50):
        if key_of(seed) in tier.corrupted:
            error_of(lambda seed=seed: tier.load(key_of(seed), target, clock() + 1))
        else:
            tier.load(key_of(seed), target, clock() + 1)
    assert 10 < len(tier.corrupted) < 40
