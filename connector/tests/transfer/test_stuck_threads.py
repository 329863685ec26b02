"""Threads in calls that never end are replaced, within a bound, and the tier is used again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from spillway_connector.limits import BreakerPolicy
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import StuckKeysTier
from spillway_connector.testing.tier_contract import NAMESPACE, key_of, payload_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.transfer import calling_thread, movers
from spillway_connector.transfer.breaker import BreakerState
from spillway_connector.transfer.calling_thread import STUCK_SECONDS
from spillway_connector.transfer.shared_tier import JobOutcome, Lookup, SharedTier, TransferLimits
from spillway_connector.transfer.stats import Operation

PAYLOAD, ROWS, THREADS = 1000, 64, 2
LIMITS = TransferLimits(
    io_threads=THREADS,
    lookup_timeout_seconds=0.25,
    load_timeout_seconds=2.0,
    store_timeout_seconds=10.0,
    breaker=BreakerPolicy(failures_to_open=3, first_rest_seconds=1.0),
)
REAL_SECONDS = 30.0  # bounds a wait for a thread that works; never waited out


class Rig:
    def __init__(self, stuck: list[int]) -> None:
        self.clock = SteppedClock()
        memory = MemoryTier(NAMESPACE, PAYLOAD, MemoryStore(1 << 24), clock=self.clock)
        for seed in range(ROWS):
            memory.store(key_of(seed), payload_of(seed, PAYLOAD), self.clock() + 1)
        self.rows = np.zeros((ROWS, PAYLOAD), np.uint8)
        self.tier = StuckKeysTier(memory, [key_of(seed) for seed in stuck])
        self.shared = SharedTier(
            self.tier,
            rows=memoryview(self.rows).cast("B"),
            row_bytes=PAYLOAD,
            payload_bytes=PAYLOAD,
            limits=LIMITS,
            clock=self.clock,
            announcements=None,
        )
        self.jobs = 0

    def load(self, seed: int) -> int:
        self.jobs += 1
        self.shared.submit_load(self.jobs, [key_of(seed)], [seed])
        return self.jobs

    def outcome(self, job_id: int) -> JobOutcome:
        while True:
            for outcome in self.shared.finished():
                if outcome.job_id == job_id:
                    return outcome
            assert self.shared.wait_for_progress(REAL_SECONDS), f"job {job_id} was never reported"

    def threads(self, kind: str = "") -> int:
        return sum(thread.name.startswith(f"spillway-memory-{kind}") for thread in threading.enumerate())


@pytest.fixture
def make_rig() -> Iterator[Callable[[list[int]], Rig]]:
    rigs: list[Rig] = []

    def make(stuck: list[int]) -> Rig:
        rigs.append(Rig(stuck))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.tier.release()
        rig.shared.close(timeout_seconds=REAL_SECONDS)


def stick(rig: Rig, seed: int) -> None:
    """A load that a thread has taken, and that has been reported at its deadline."""
    job = rig.load(seed)
    assert rig.tier.entered.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(2.0)
    assert not rig.outcome(job).success


def test_healthy_loads_go_on_after_every_thread_was_lost(make_rig: Callable[[list[int]], Rig]) -> None:
    rig = make_rig([0, 1])
    for seed in (0, 1):
        stick(rig, seed)
    rig.clock.advance(STUCK_SECONDS)
    for seed in range(2, 12):
        assert rig.outcome(rig.load(seed)).success
        assert rig.rows[seed].tobytes() == payload_of(seed, PAYLOAD)
    assert not rig.rows[:2].any()


def test_a_job_finds_the_threads_that_are_late_by_then_however_short_ago_the_last_look_was(
    make_rig: Callable[[list[int]], Rig],
) -> None:
    rig = make_rig([0, 1])
    for seed in (0, 1):
        stick(rig, seed)  # the first one's deadline was 2 s ago, the second one's is now
    rig.clock.advance(STUCK_SECONDS - 2.1)
    waiting = rig.load(2)  # neither is late
    rig.clock.advance(0.2)
    rig.load(3)
    assert rig.outcome(waiting).success
    assert sum(worker.lost for worker in rig.shared._movers._workers) == 1


def test_the_breaker_closes_again_after_threads_were_lost(make_rig: Callable[[list[int]], Rig]) -> None:
    rig = make_rig([0, 1])
    for seed in (0, 1):
        stick(rig, seed)
    late = rig.load(2)  # before the threads count as lost: no thread takes it
    rig.clock.advance(2.0)
    assert not rig.outcome(late).success
    rig.clock.advance(STUCK_SECONDS + 60.0)
    assert rig.outcome(rig.load(3)).success
    assert rig.outcome(rig.load(4)).success
    assert rig.shared.snapshot().breakers[Operation.LOAD] is BreakerState.CLOSED


def test_no_more_threads_are_lost_than_the_bound_and_those_that_come_back_end(
    make_rig: Callable[[list[int]], Rig],
) -> None:
    lost_max = movers.LOST_THREADS_MAX * THREADS
    stuck = list(range(lost_max + THREADS))
    rig = make_rig(stuck)
    for seed in stuck:
        rig.clock.advance(60.0)  # the breaker's rest
        stick(rig, seed)
    rig.clock.advance(60.0)
    job = rig.load(60)
    rig.clock.advance(2.0)
    assert not rig.outcome(job).success, "all threads and those in their place are stuck"
    workers = rig.threads() - rig.threads("lookup")
    assert workers == lost_max + THREADS
    rig.tier.release()
    rig.clock.advance(60.0)
    assert rig.outcome(rig.load(61)).success
    deadline = threading.Event()
    while rig.threads() - rig.threads("lookup") > THREADS:
        rig.outcome(rig.load(62))
        deadline.wait(0.01)


def test_a_slot_of_a_lost_store_is_given_to_another(make_rig: Callable[[list[int]], Rig]) -> None:
    rig = make_rig([40, 41])
    for job, seed in ((101, 40), (102, 41)):
        rig.tier.tier.discard(key_of(seed), rig.clock() + 1)
        rig.shared.submit_store(job, [key_of(seed)], [seed])
    assert rig.tier.entered.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(10.0 + STUCK_SECONDS)
    assert not rig.outcome(101).success
    rig.tier.stuck.clear()
    rig.tier.tier.discard(key_of(42), rig.clock() + 1)
    rig.shared.submit_store(103, [key_of(42)], [42])
    assert rig.outcome(103).success


def test_lookups_are_answered_again_after_the_thread_was_lost(make_rig: Callable[[list[int]], Rig]) -> None:
    rig = make_rig([0])
    for _ in range(calling_thread.LOST_MAX - 1):
        assert rig.shared.lookup(key_of(0), "stuck") is Lookup.PENDING
        rig.shared.step_end()
        assert rig.tier.entered.acquire(timeout=REAL_SECONDS)
        rig.clock.advance(0.25)
        assert rig.shared.lookup(key_of(0), "stuck") is Lookup.MISS
        rig.shared.request_finished("stuck")
        rig.clock.advance(STUCK_SECONDS + 60.0)
        while (found := rig.shared.lookup(key_of(7), "healthy")) is Lookup.PENDING:
            rig.shared.step_end()
            assert rig.shared.wait_for_progress(REAL_SECONDS)
        assert found is Lookup.HIT
        rig.shared.request_finished("healthy")
        rig.clock.advance(60.0)
