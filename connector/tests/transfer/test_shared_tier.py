"""The shell around a tier, with the clock in the test's hand and threads awaited, never slept for."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace
from typing_extensions import override

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.limits import BreakerPolicy
from spillway_connector.plan.sessions import SessionHint, SessionUse, session_tag
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import (
    CorruptingTier,
    FailingTier,
    FlakyTier,
    HangingTier,
    RefusingTier,
    SlowTier,
    TierWrapper,
)
from spillway_connector.testing.tier_contract import NAMESPACE, key_of, payload_of
from spillway_connector.tiers.borrow import Borrow, taken_back
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, EvictionReason, StoreOutcome, Tier
from spillway_connector.transfer.announcements import Announcements
from spillway_connector.transfer.breaker import BreakerState
from spillway_connector.transfer.open_jobs import ARRIVALS_REPORTED_SECONDS
from spillway_connector.transfer.shared_tier import (
    JobOutcome,
    Lookup,
    SharedTier,
    TransferLimits,
)
from spillway_connector.transfer.stats import LookupOutcome, MissReason, Operation, SkipReason

PAYLOAD, ROW, ROWS = 1000, 1024, 64
LIMITS = TransferLimits(
    io_threads=2,
    lookup_timeout_seconds=0.25,
    load_timeout_seconds=2.0,
    store_timeout_seconds=10.0,
    breaker=BreakerPolicy(failures_to_open=3, first_rest_seconds=1.0),
)
REAL_SECONDS = 30.0  # bounds a wait for a thread that works; never waited out


@dataclass
class Rig:
    """A SharedTier on a memory medium, whose rows start out as payload_of(row)."""

    clock: SteppedClock = field(default_factory=SteppedClock)
    medium: MemoryStore = field(default_factory=lambda: MemoryStore(1 << 24))
    rows: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, ROW), np.uint8))
    shared: SharedTier = None  # type: ignore[assignment]
    reported: list[JobOutcome] = field(default_factory=list)

    def memory(self) -> MemoryTier:
        return MemoryTier(NAMESPACE, PAYLOAD, self.medium, clock=self.clock)

    def start(
        self,
        tier: Tier | None = None,
        limits: TransferLimits = LIMITS,
        announcements: Announcements | None = None,
    ) -> SharedTier:
        for row in range(ROWS):
            self.rows[row, :PAYLOAD] = payload_of(row, PAYLOAD)
            self.rows[row, PAYLOAD:] = 255
        self.shared = SharedTier(
            tier or self.memory(),
            rows=memoryview(self.rows).cast("B"),
            row_bytes=ROW,
            payload_bytes=PAYLOAD,
            limits=limits,
            clock=self.clock,
            announcements=announcements,
        )
        return self.shared

    def fill(self, rows: Sequence[int]) -> None:
        """Put blocks on the medium without the shell."""
        for row in rows:
            self.memory().store(key_of(row), payload_of(row, PAYLOAD), self.clock() + 1)

    def outcome(self, job_id: int) -> JobOutcome:
        """Poll as the scheduler does until the job is reported."""
        while True:
            self.reported += self.shared.finished()
            for outcome in self.reported:
                if outcome.job_id == job_id:
                    return outcome
            assert self.shared.wait_for_progress(REAL_SECONDS), f"job {job_id} was never reported"

    def answer(self, key: bytes, request_id: str = "r") -> Lookup:
        """Step until the lookup is no longer pending."""
        while (found := self.shared.lookup(key, request_id)) is Lookup.PENDING:
            self.shared.step_end()
            assert self.shared.wait_for_progress(REAL_SECONDS), "the lookup was never answered"
        return found

    def clear_rows(self) -> None:
        self.rows[:, :PAYLOAD] = 0

    def holds(self, row: int, seed: int | None = None) -> bool:
        return bool(self.rows[row, :PAYLOAD].tobytes() == payload_of(row if seed is None else seed, PAYLOAD))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.shared.close(timeout_seconds=1.0)
    assert (rig.rows[:, PAYLOAD:] == 255).all(), "the padding of a row was touched"


@pytest.fixture
def hang(rig: Rig) -> Iterator[Callable[..., HangingTier]]:
    made: list[HangingTier] = []

    def make(*operations: Operation) -> HangingTier:
        made.append(HangingTier(rig.memory(), operations))
        return made[-1]

    yield make
    for tier in made:
        tier.release()


def keys(rows: Sequence[int]) -> list[bytes]:
    return [key_of(row) for row in rows]


# --- the good case ----------------------------------------------------------------------------------------------------


def test_rows_go_out_and_come_back_elsewhere(rig: Rig) -> None:
    shared = rig.start()
    shared.submit_store(1, keys(range(32)), range(32))
    stored = rig.outcome(1)
    assert stored.success and sorted(stored.done) == sorted(keys(range(32)))
    rig.clear_rows()
    shared.submit_load(2, keys(range(32)), range(32, 64))
    loaded = rig.outcome(2)
    assert loaded.success and sorted(loaded.done) == sorted(keys(range(32)))
    assert all(rig.holds(32 + row, row) for row in range(32))
    assert not shared.has_work()
    stats = shared.snapshot()
    assert (stats.written_bytes, stats.read_bytes) == (32 * PAYLOAD, 32 * PAYLOAD)
    assert (stats.queued_load_bytes, stats.queued_store_bytes) == (0, 0)
    assert stats.failures == {}


def test_the_log_says_which_chunks_were_not_moved_and_why(rig: Rig, decisions: list[str]) -> None:
    shared = rig.start(limits=replace(LIMITS, load_queue_bytes_max=2 * PAYLOAD))
    shared.submit_store(1, keys(range(2)), range(2))
    rig.outcome(1)
    shared.submit_store(2, keys(range(2)), range(2))
    shared.submit_load(3, keys([0, 9, 1]), range(32, 35))
    rig.outcome(3)
    without_times = [re.sub(r"[\d.]+ s:", "T s:", line) for line in decisions]
    assert without_times == [
        "memory store job 1 ended after T s: 2 of 2 chunks were moved",
        "memory store job 2: 2 chunks are not stored: present",
        "memory store job 2 ended after T s: 0 of 0 chunks were moved",
        f"memory load job 3: 1 chunks are refused: load_queue_bytes_max: {2 * PAYLOAD} bytes are in hand",
        "memory load job 3 ended after T s: 1 of 2 chunks were moved; 1 failed: miss; 1 failed: queue_full",
    ]


def test_lookups_are_asked_in_one_batch_per_step_and_remembered(rig: Rig) -> None:
    rig.fill(range(3))
    tier = TierWrapper(rig.memory())
    shared = rig.start(tier)
    assert [shared.lookup(key, "r") for key in keys(range(5))] == [Lookup.PENDING] * 5
    assert tier.calls[Operation.LOOKUP] == 0
    shared.step_end()
    assert [rig.answer(key) for key in keys(range(5))] == [Lookup.HIT] * 3 + [Lookup.MISS] * 2
    assert [shared.lookup(key, "other") for key in keys(range(5))] == [Lookup.HIT] * 3 + [Lookup.MISS] * 2
    assert tier.calls[Operation.LOOKUP] == 1
    assert shared.snapshot().lookups == {LookupOutcome.HIT: 6, LookupOutcome.MISS: 4}


def test_what_was_stored_is_a_hit_at_once(rig: Rig) -> None:
    shared = rig.start()
    shared.submit_store(1, keys([3]), [3])
    rig.outcome(1)
    assert shared.lookup(key_of(3), "r") is Lookup.HIT


def test_an_answer_expires(rig: Rig) -> None:
    shared = rig.start()
    assert rig.answer(key_of(1)) is Lookup.MISS
    rig.fill([1])  # by another engine
    assert shared.lookup(key_of(1), "r") is Lookup.MISS
    rig.clock.advance(5.0)
    assert rig.answer(key_of(1)) is Lookup.HIT


def test_a_job_without_keys_is_reported_too(rig: Rig) -> None:
    shared = rig.start()
    shared.submit_store(1, [], [])
    shared.submit_load(2, [], [])
    assert [outcome.job_id for outcome in shared.finished()] == [2, 1]
    assert shared.finished() == []


def test_a_key_that_is_there_or_on_its_way_is_not_written_again(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    tier = hang(Operation.STORE)
    shared = rig.start(tier)
    shared.submit_store(1, keys([1]), [1])
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    shared.submit_store(2, keys([1]), [1])
    assert rig.outcome(2).done == (key_of(1),)
    tier.release()
    assert rig.outcome(1).success
    shared.submit_store(3, keys([1]), [1])
    assert rig.outcome(3).success
    assert tier.calls[Operation.STORE] == 1
    assert sum(shared.snapshot().skipped.values()) == 2


def test_loads_go_before_stores(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    rig.fill([9])
    tier = hang(Operation.STORE)
    shared = rig.start(tier)
    shared.submit_store(1, keys(range(8)), range(8))
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    shared.submit_load(2, keys([9]), [9])
    assert rig.outcome(2).success, "a thread is kept free of stores"
    assert tier.calls[Operation.STORE] == 1


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_missing_key_fails_alone_and_is_known_missing_before_the_report(rig: Rig) -> None:
    rig.fill([0, 2])
    shared = rig.start()
    rig.clear_rows()
    shared.submit_load(1, keys([0, 1, 2]), [0, 1, 2])
    outcome = rig.outcome(1)
    assert sorted(outcome.done) == sorted(keys([0, 2]))
    assert isinstance(outcome.failed[key_of(1)], TierMiss)
    assert rig.holds(0) and rig.holds(2) and not rig.rows[1, :PAYLOAD].any()
    assert shared.lookup(key_of(1), "r") is Lookup.MISS
    assert shared.snapshot().failures == {(Operation.LOAD, "miss"): 1}


def test_corrupt_entries_are_never_served_and_are_removed(rig: Rig) -> None:
    tier = CorruptingTier(NAMESPACE, PAYLOAD, rig.medium, seed=7, corrupt_ratio=0.4, clock=rig.clock)
    shared = rig.start(tier)
    shared.submit_store(1, keys(range(64)), range(64))
    assert rig.outcome(1).success
    rig.clear_rows()
    shared.submit_load(2, keys(range(64)), range(64))
    outcome = rig.outcome(2)
    assert 10 < len(tier.corrupted) < 50
    assert set(outcome.failed) == tier.corrupted
    assert all(isinstance(error, TierCorrupt) for error in outcome.failed.values())
    for row in range(64):
        assert rig.holds(row) if key_of(row) not in tier.corrupted else not rig.rows[row, :PAYLOAD].any()
    assert rig.memory().contains(sorted(tier.corrupted), rig.clock() + 1) == [False] * len(tier.corrupted)
    assert shared.snapshot().breakers[Operation.LOAD] is BreakerState.CLOSED
    assert sum(
        count for (_, reason), count in shared.snapshot().failures.items() if reason in set(CorruptReason)
    ) == len(tier.corrupted)


def test_a_flaky_tier_fails_some_keys_and_serves_no_wrong_byte(rig: Rig) -> None:
    rig.fill(range(64))
    tier = FlakyTier(
        rig.memory(),
        seed=3,
        failure_ratio=0.3,
        make_error=lambda: TierUnreachable(UnreachableReason.DISCONNECTED, "injected"),
    )
    shared = rig.start(tier, replace(LIMITS, breaker=BreakerPolicy(failures_to_open=1000)))
    rig.clear_rows()
    shared.submit_load(1, keys(range(64)), range(64))
    outcome = rig.outcome(1)
    assert len(outcome.done) + len(outcome.failed) == 64
    assert 5 < len(outcome.failed) < 40
    for row in range(64):
        assert rig.holds(row) if key_of(row) in outcome.done else not rig.rows[row, :PAYLOAD].any()


def test_a_tier_that_breaks_its_contract_costs_a_miss_not_a_thread(rig: Rig) -> None:
    tier = FailingTier(rig.memory(), lambda: ZeroDivisionError("defect"))
    shared = rig.start(tier)
    shared.submit_load(1, keys([1]), [1])
    shared.submit_store(2, keys([2]), [2])
    assert rig.outcome(1).failed[key_of(1)].reason == RefusedReason.OTHER
    assert "ZeroDivisionError" in str(rig.outcome(2).failed[key_of(2)])
    assert rig.answer(key_of(3)) is Lookup.MISS
    tier.failing = False
    shared.submit_store(3, keys([2]), [2])
    assert rig.outcome(3).success


class WorkedOn:
    """Stands for an object that a tier holds while it works: a buffer, a file."""


class ClutchingTier(TierWrapper):
    """Fails while it holds something, behind an error of its own."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.held: list[weakref.ref[WorkedOn]] = []

    def before(self, operation: Operation) -> None:
        worked_on = WorkedOn()
        self.held.append(weakref.ref(worked_on))
        try:
            raise OSError("the cause")
        except OSError as error:
            raise TierUnreachable(UnreachableReason.DISCONNECTED, "injected") from error


def test_what_failed_operations_worked_on_is_let_go_of_at_once(rig: Rig) -> None:
    """Nothing waits for garbage collection: an engine's files and buffers would pile up until then."""
    tier = ClutchingTier(rig.memory())
    shared = rig.start(tier)
    gc.collect()
    gc.disable()
    try:
        shared.submit_load(1, keys([1]), [1])
        shared.submit_store(2, keys([2]), [2])
        assert rig.answer(key_of(3)) is Lookup.MISS
        assert not rig.outcome(1).success
        assert not rig.outcome(2).success
        rig.reported.clear()
        shared.close()
        left = [one for one in tier.held if one() is not None]
    finally:
        gc.enable()
    assert len(tier.held) >= 3
    assert not left


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_a_lookup_that_hangs_delays_a_request_by_the_timeout_in_total(
    rig: Rig, hang: Callable[..., HangingTier]
) -> None:
    tier = hang(Operation.LOOKUP)
    shared = rig.start(tier)
    assert shared.lookup(key_of(1), "r") is Lookup.PENDING
    shared.step_end()
    rig.clock.advance(0.125)
    assert shared.lookup(key_of(1), "r") is Lookup.PENDING
    assert shared.lookup(key_of(2), "r") is Lookup.PENDING
    rig.clock.advance(0.125)
    assert shared.lookup(key_of(1), "r") is Lookup.MISS
    assert shared.lookup(key_of(2), "r") is Lookup.MISS, "further keys do not start a new wait"
    assert shared.lookup(key_of(3), "r") is Lookup.MISS
    assert shared.snapshot().lookups == {LookupOutcome.EXPIRED: 3}
    assert shared.lookup(key_of(1), "another") is Lookup.PENDING
    shared.request_finished("r")
    assert shared.lookup(key_of(3), "r") is Lookup.PENDING, "a new request of that name waits again"


def test_a_slow_but_timely_tier_uses_up_a_requests_patience_only_while_it_waits(rig: Rig) -> None:
    tier = SlowTier(rig.memory(), rig.clock, 0.125, [Operation.LOOKUP])
    shared = rig.start(tier)
    assert rig.answer(key_of(1)) is Lookup.MISS
    rig.clock.advance(100.0)
    assert rig.answer(key_of(2)) is Lookup.MISS
    assert shared.lookup(key_of(3), "r") is Lookup.MISS
    assert shared.snapshot().lookups == {LookupOutcome.MISS: 2, LookupOutcome.EXPIRED: 1}


def test_a_load_that_hangs_is_reported_at_its_deadline_and_its_late_end_touches_nothing(
    rig: Rig, hang: Callable[..., HangingTier]
) -> None:
    rig.fill(range(4))
    tier = hang(Operation.LOAD)
    shared = rig.start(tier)
    rig.clear_rows()
    shared.submit_load(1, keys(range(4)), range(4))
    for _ in range(2):
        assert tier.entered.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(1.999)
    assert shared.finished() == []
    rig.clock.advance(0.001)
    (outcome,) = shared.finished()
    assert set(outcome.failed) == set(keys(range(4)))
    assert all(isinstance(error, TierTimeout) for error in outcome.failed.values())
    assert shared.lookup(key_of(0), "r") is Lookup.MISS
    assert not shared.has_work()

    rig.rows[:, :PAYLOAD] = 77  # the rows now belong to someone else
    tier.release()
    assert shared.wait_for_progress(REAL_SECONDS)
    while shared.snapshot().late_completions < 2:
        assert shared.finished() == []
        if shared.snapshot().late_completions < 2:
            assert shared.wait_for_progress(REAL_SECONDS)
    assert (rig.rows[:, :PAYLOAD] == 77).all()


class BlocksInMemory(TierWrapper):
    """A tier that has all its blocks in memory. ``copying`` is called within each copy, with the target."""

    def __init__(self, tier: Tier, copying: Callable[[memoryview], object] = lambda target: None) -> None:
        super().__init__(tier)
        self.copying = copying
        self.verifies = True

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory:
        outer = self

        class Block:
            def copy_to(self, target: memoryview) -> bool:
                outer.copying(target)
                outer.tier.load(key, target, deadline)
                if not outer.verifies:
                    target[0] ^= 1
                return outer.verifies

        return Block()


def test_blocks_in_memory_go_straight_to_their_rows(rig: Rig) -> None:
    rig.fill(range(8))
    targets: list[int] = []
    tier = BlocksInMemory(rig.memory(), lambda target: targets.append(np.frombuffer(target, np.uint8).ctypes.data))
    shared = rig.start(tier)
    rig.clear_rows()
    shared.submit_load(1, [key_of(row) for row in range(8)], range(8, 16))
    assert rig.outcome(1).success
    assert all(rig.holds(8 + row, row) for row in range(8))
    assert tier.calls[Operation.LOAD] == 0
    assert sorted(targets) == [rig.rows[row].ctypes.data for row in range(8, 16)]


def test_a_block_in_memory_that_does_not_verify_is_loaded_instead(rig: Rig) -> None:
    rig.fill([1])
    tier = BlocksInMemory(rig.memory())
    tier.verifies = False
    shared = rig.start(tier)
    rig.clear_rows()
    shared.submit_load(1, [key_of(1)], [5])
    assert rig.outcome(1).success
    assert rig.holds(5, 1)
    assert tier.calls[Operation.LOAD] == 1


def test_damage_found_in_memory_counts_as_damage_and_the_row_is_not_published(rig: Rig) -> None:
    rig.fill([1, 2])
    frame = rig.medium.frames[NAMESPACE.digest16, key_of(1)]
    frame[-1] ^= 1

    class Damaged(BlocksInMemory):
        def in_memory(self, key: bytes, deadline: float) -> BlockInMemory:
            self.verifies = key != key_of(1)
            self.tier = rig.memory() if self.verifies else UncheckedTier(rig.memory())
            return super().in_memory(key, deadline)

        def load(self, key: bytes, target: memoryview, deadline: float) -> None:
            rig.memory().load(key, target, deadline)

    class UncheckedTier(TierWrapper):
        def load(self, key: bytes, target: memoryview, deadline: float) -> None:
            target[:] = frame[-PAYLOAD:]

    shared = rig.start(Damaged(rig.memory()), replace(LIMITS, io_threads=1))
    rig.clear_rows()
    shared.submit_load(1, [key_of(1), key_of(2)], [5, 6])
    outcome = rig.outcome(1)
    assert outcome.done == (key_of(2),)
    assert outcome.failed[key_of(1)].reason == CorruptReason.PAYLOAD
    assert rig.holds(6, 2)
    assert (NAMESPACE.digest16, key_of(1)) not in rig.medium.frames  # discarded
    assert shared.snapshot().failures[Operation.LOAD, CorruptReason.PAYLOAD] == 1


def test_a_row_is_not_given_up_while_it_is_copied_to_and_never_touched_afterwards(rig: Rig) -> None:
    rig.fill([1, 2])
    copying, go_on = threading.Semaphore(0), threading.Event()

    def hold(target: memoryview) -> None:
        copying.release()
        assert go_on.wait(REAL_SECONDS)

    tier = BlocksInMemory(rig.memory(), hold)
    shared = rig.start(tier, replace(LIMITS, io_threads=1))
    rig.clear_rows()
    shared.submit_load(1, [key_of(1), key_of(2)], [5, 6])
    assert copying.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(LIMITS.load_timeout_seconds)
    assert shared.finished() == []  # the second has been given up; the first is being copied
    tier.verifies = False  # so that a copy after the deadline would show
    go_on.set()
    outcome = rig.outcome(1)
    assert set(outcome.failed) == {key_of(1), key_of(2)}
    assert all(isinstance(error, TierTimeout) for error in outcome.failed.values())
    tier.verifies = True
    before = rig.rows.copy()
    assert shared.drain(1.0)
    assert not copying.acquire(blocking=False)
    assert (rig.rows == before).all()
    assert not rig.rows[6, :PAYLOAD].any()


class PieceByPiece(TierWrapper):
    """A tier that moves blocks in pieces; ``receiving`` does what its test is about."""

    transfers_at_once = None

    def __init__(self, tier: Tier, receiving: Callable[[Borrow, bytes], object]) -> None:
        super().__init__(tier)
        self._receiving = receiving

    def receive(self, key: bytes, borrow: Borrow, deadline: float) -> None:
        payload = memoryview(bytearray(PAYLOAD))
        self.tier.load(key, payload, deadline)
        self._receiving(borrow, bytes(payload))

    def send(self, key: bytes, borrow: Borrow, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        row = borrow.begin()
        if row is None:
            raise taken_back()
        payload = bytes(row)
        del row
        borrow.end()
        return self.tier.store(key, memoryview(payload), deadline, tenant)


def test_a_row_is_not_given_up_while_one_of_two_threads_fills_it_and_is_gone_for_both_afterwards(rig: Rig) -> None:
    rig.fill([1])
    filling, one_ended, polled = threading.Event(), threading.Event(), threading.Event()
    after: list[memoryview | None] = []

    def receive(borrow: Borrow, payload: bytes) -> None:
        one, other = borrow.begin(), borrow.begin()
        assert one is not None and other is not None
        borrow.end()
        filling.set()
        assert polled.wait(REAL_SECONDS)
        other[:PAYLOAD] = payload
        borrow.end()
        one_ended.set()
        while (row := borrow.begin()) is not None:  # until the scheduler has polled again
            del row
            borrow.end()
        after.extend((borrow.begin(), borrow.begin()))

    shared = rig.start(PieceByPiece(rig.memory(), receive))
    rig.clear_rows()
    shared.submit_load(1, [key_of(1)], [5])
    assert filling.wait(REAL_SECONDS)
    rig.clock.advance(LIMITS.load_timeout_seconds)
    assert shared.finished() == []
    polled.set()
    assert one_ended.wait(REAL_SECONDS)
    while not (finished := shared.finished()):
        pass
    assert isinstance(finished[0].failed[key_of(1)], TierTimeout)
    rig.rows[5, :PAYLOAD] = 77
    while not shared.snapshot().late_completions:
        assert shared.finished() == []
        shared.wait_for_progress(0.01)
    assert after == [None, None]
    assert (rig.rows[5, :PAYLOAD] == 77).all()


def test_what_arrives_in_pieces_goes_straight_to_its_row(rig: Rig) -> None:
    rig.fill(range(8))

    def receive(borrow: Borrow, payload: bytes) -> None:
        for start in range(0, PAYLOAD, 300):
            row = borrow.begin()
            assert row is not None and row.nbytes == PAYLOAD
            row[start : start + 300] = payload[start : start + 300]
            del row
            borrow.end()

    tier = PieceByPiece(rig.memory(), receive)
    shared = rig.start(tier)
    rig.clear_rows()
    shared.submit_load(1, keys(range(8)), range(8, 16))
    assert rig.outcome(1).success
    assert all(rig.holds(8 + row, row) for row in range(8))
    assert tier.calls[Operation.LOAD] == 0


def test_a_store_that_hangs_has_let_go_of_its_row_when_it_is_reported(
    rig: Rig, hang: Callable[..., HangingTier]
) -> None:
    tier = hang(Operation.STORE)
    shared = rig.start(tier)
    shared.submit_store(1, keys([5]), [5])
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(10.0)
    (outcome,) = shared.finished()
    assert isinstance(outcome.failed[key_of(5)], TierTimeout)
    rig.rows[5, :PAYLOAD] = 77  # reused while the write still hangs
    tier.release()
    while not shared.snapshot().late_completions:
        assert shared.wait_for_progress(REAL_SECONDS)
        assert shared.finished() == []
    # The hung write began in time by the tier's own clock check or not at all: never the new bytes.
    target = memoryview(bytearray(PAYLOAD))
    try:
        rig.memory().load(key_of(5), target, rig.clock() + 1)
        assert target == payload_of(5, PAYLOAD)
    except TierMiss:
        pass


def test_every_job_is_reported_once_when_all_threads_hang(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    tier = hang(*Operation)
    shared = rig.start(tier)
    for job_id in range(10):
        (shared.submit_load if job_id % 2 else shared.submit_store)(job_id, keys([job_id]), [job_id])
    rig.clock.advance(10.0)
    assert sorted(outcome.job_id for outcome in shared.finished()) == list(range(10))
    tier.release()
    shared.drain(1.0)
    assert shared.finished() == []


def test_chunks_of_a_slow_load_are_reported_before_its_end(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    rig.fill([1, 2])
    tier = hang(Operation.LOAD)
    passing = threading.Event()
    load = tier.load

    def second_hangs(key: bytes, target: memoryview, deadline: float) -> None:
        if key == key_of(2):
            load(key, target, deadline)
        else:
            rig.memory().load(key, target, deadline)
            passing.set()

    tier.load = second_hangs  # type: ignore[method-assign]
    shared = rig.start(tier)
    rig.rows[:, :PAYLOAD] = 0
    shared.submit_load(1, keys([1, 2]), [1, 2])
    assert tier.entered.acquire(timeout=REAL_SECONDS) and passing.wait(REAL_SECONDS)
    assert shared.arrived() == [], "it may still end at once"
    rig.clock.advance(ARRIVALS_REPORTED_SECONDS)
    while not (arrived := shared.arrived()):
        assert shared.wait_for_progress(REAL_SECONDS)
    assert arrived == [(1, keys([1]))]
    assert rig.holds(1)
    assert shared.arrived() == shared.finished() == []
    tier.release()
    outcome = rig.outcome(1)
    assert outcome.success and sorted(outcome.done) == sorted(keys([1, 2]))
    assert shared.arrived() == []


def test_a_store_that_waited_too_long_is_dropped(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    tier = hang(Operation.STORE)
    shared = rig.start(tier)
    shared.submit_store(1, keys([1]), [1])
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    shared.submit_store(2, keys([2]), [2])
    rig.clock.advance(6.0)
    tier.release()
    assert rig.outcome(2).failed[key_of(2)].reason == RefusedReason.QUEUE_AGE
    assert shared.snapshot().breakers[Operation.STORE] is BreakerState.CLOSED


def test_stores_beyond_the_queue_are_dropped_and_counted(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    tier = hang(Operation.STORE)
    shared = rig.start(tier, replace(LIMITS, store_queue_bytes_max=5 * PAYLOAD))
    shared.submit_store(1, keys(range(8)), range(8))
    assert shared.snapshot().queued_store_bytes == 5 * PAYLOAD
    tier.release()
    outcome = rig.outcome(1)
    assert set(outcome.failed) == set(keys([5, 6, 7]))
    assert shared.snapshot().shed == {(Operation.STORE, RefusedReason.QUEUE_FULL): 3}
    assert shared.snapshot().failures == {}
    assert shared.snapshot().queued_store_bytes == 0


def test_loads_beyond_the_queue_are_refused_and_known_missing(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    rig.fill(range(4))
    tier = hang(Operation.LOAD)
    shared = rig.start(tier, replace(LIMITS, load_queue_bytes_max=2 * PAYLOAD))
    shared.submit_load(1, keys(range(4)), range(4))
    tier.release()
    assert set(rig.outcome(1).failed) == set(keys([2, 3]))
    assert shared.lookup(key_of(3), "r") is Lookup.MISS


class BusyElsewhere(MemoryTier):
    """Another engine is writing the odd blocks."""

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        if key in keys(range(1, ROWS, 2)):
            return StoreOutcome.PENDING
        return super().store(key, source, deadline, tenant)


def test_what_another_engine_is_writing_is_no_failure_and_does_not_count_as_present(rig: Rig) -> None:
    shared = rig.start(BusyElsewhere(NAMESPACE, PAYLOAD, rig.medium, clock=rig.clock))
    shared.submit_store(1, keys(range(4)), range(4))
    outcome = rig.outcome(1)
    assert outcome.success
    assert set(outcome.done) == set(keys(range(4))), "their rows are free"
    assert shared.lookup(key_of(0), "r") is Lookup.HIT
    assert rig.answer(key_of(1)) is Lookup.MISS
    stats = shared.snapshot()
    assert stats.skipped == {SkipReason.PENDING: 2}
    assert stats.written_bytes == 2 * PAYLOAD
    shared.submit_store(2, keys([1]), [1])  # asked again, not taken for present
    rig.outcome(2)
    assert shared.snapshot().skipped == {SkipReason.PENDING: 3}


def test_a_tier_that_cannot_be_used_is_logged_at_start_and_when_it_can_be(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    tier = MemoryTier(NAMESPACE, PAYLOAD, rig.medium, clock=rig.clock)
    tried, usable = threading.Semaphore(0), threading.Event()

    def prepare(deadline: float) -> None:
        tried.release()
        if not usable.is_set():
            raise TierUnreachable(UnreachableReason.ROOT_MISSING, "path: /mnt/nmve: /mnt/nmve does not exist")

    tier.prepare = prepare  # type: ignore[method-assign]
    shared = rig.start(tier)
    for _ in range(2):
        assert tried.acquire(timeout=REAL_SECONDS)
        rig.clock.advance(11.0)
        shared.lookup(key_of(50), str(rig.clock()))
        shared.step_end()
    assert tried.acquire(timeout=REAL_SECONDS)
    assert not shared.snapshot().ready
    usable.set()
    while not shared.snapshot().ready:
        rig.clock.advance(11.0)
        rig.answer(key_of(50), str(rig.clock()))
    logged = [record.getMessage() for record in caplog.records if "Shared tier memory" in record.getMessage()]
    assert len(logged) == 2, "once, however often it is tried"
    assert "path: /mnt/nmve: /mnt/nmve does not exist" in logged[0]
    assert "can be used again" in logged[1]


class PacedTier(MemoryTier):
    """Takes a tenth of a second for each chunk, and looks at the deadline when it begins and when it ends."""

    clock: SteppedClock

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._pace(deadline)
        super().load(key, target, deadline)

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self._pace(deadline)
        return super().store(key, source, deadline, tenant)

    def _pace(self, deadline: float) -> None:
        if self.clock() < deadline:
            self.clock.advance(0.1)
        if self.clock() >= deadline:
            raise TierTimeout("late")


@pytest.mark.parametrize("operation", [Operation.LOAD, Operation.STORE])
def test_more_at_once_than_a_healthy_tier_can_move_is_shed_and_opens_no_breaker(rig: Rig, operation: Operation) -> None:
    if operation is Operation.LOAD:
        rig.fill(range(60))
    tier = PacedTier(NAMESPACE, PAYLOAD, rig.medium, clock=rig.clock)
    tier.clock = rig.clock
    limits = replace(LIMITS, io_threads=1, store_timeout_seconds=2.0)
    shared = rig.start(tier, limits)
    submit = shared.submit_load if operation is Operation.LOAD else shared.submit_store
    for job_id in range(10):
        rows = range(6 * job_id, 6 * job_id + 6)
        submit(job_id, keys(rows), list(rows))
    outcomes = [rig.outcome(job_id) for job_id in range(10)]
    done = sum(len(outcome.done) for outcome in outcomes)
    stats = shared.snapshot()
    assert done >= 12  # 20 fit into two seconds, if the last is taken in before its deadline
    assert stats.failures == {}
    assert stats.shed == {(operation, RefusedReason.QUEUE_AGE): 60 - done}
    assert stats.expiries == {}
    assert stats.misses == ({MissReason.SHED: 60 - done} if operation is Operation.LOAD else {})
    assert stats.breakers[operation] is BreakerState.CLOSED


def test_loads_that_hang_open_the_breaker_though_others_were_served_a_moment_before(
    rig: Rig, hang: Callable[..., HangingTier]
) -> None:
    rig.fill(range(8))
    tier = hang(Operation.LOAD)
    tier.release()
    shared = rig.start(tier)
    shared.submit_load(0, keys([0]), [0])
    assert rig.outcome(0).success
    tier.hold()
    rig.clock.advance(0.1)
    for job_id in range(1, 4):
        shared.submit_load(job_id, keys([job_id]), [job_id])
        rig.clock.advance(2.0)
        assert not rig.outcome(job_id).success
    assert shared.snapshot().failures == {(Operation.LOAD, UnreachableReason.TIMEOUT): 3}
    assert shared.snapshot().breakers[Operation.LOAD] is BreakerState.OPEN
    tier.release()


# --- the breaker --------------------------------------------------------------------------------------------------


def test_an_unreachable_tier_is_left_alone_and_found_again(rig: Rig) -> None:
    rig.fill(range(64))
    tier = FailingTier(rig.memory(), lambda: TierUnreachable(UnreachableReason.CONNECT, "injected"))
    shared = rig.start(tier, replace(LIMITS, io_threads=1))
    for job_id in range(3):
        shared.submit_load(job_id, keys([job_id]), [job_id])
        assert not rig.outcome(job_id).success
    assert shared.snapshot().breakers[Operation.LOAD] is BreakerState.OPEN
    assert shared.lookup(key_of(9), "r") is Lookup.MISS
    assert shared.snapshot().lookups == {LookupOutcome.REFUSED: 1}
    shared.submit_load(3, keys([9]), [9])
    assert rig.outcome(3).failed[key_of(9)].reason == RefusedReason.BREAKER_OPEN
    assert tier.calls[Operation.LOAD] == 3

    rig.clock.advance(1.0)
    shared.submit_load(4, keys(range(10, 20)), range(10, 20))
    rig.outcome(4)
    assert tier.calls[Operation.LOAD] == 4, "one probe"
    tier.failing = False
    rig.clock.advance(2.0)
    shared.submit_load(5, keys(range(20, 30)), range(20, 30))
    assert rig.outcome(5).success
    assert shared.snapshot().breakers[Operation.LOAD] is BreakerState.CLOSED
    assert rig.answer(key_of(40)) is Lookup.HIT


def test_a_tier_that_refuses_stores_still_serves_loads(rig: Rig) -> None:
    rig.fill(range(4))
    tier = RefusingTier(rig.memory(), RefusedReason.READ_ONLY, [Operation.STORE])
    shared = rig.start(tier, replace(LIMITS, io_threads=1))
    shared.submit_store(1, keys(range(10, 20)), range(10, 20))
    assert len(rig.outcome(1).failed) == 10
    assert tier.calls[Operation.STORE] == 3
    shared.submit_store(2, keys([30]), [30])
    assert rig.outcome(2).failed[key_of(30)].reason == RefusedReason.BREAKER_OPEN
    assert rig.answer(key_of(2)) is Lookup.HIT
    shared.submit_load(3, keys([2]), [2])
    assert rig.outcome(3).success
    states = shared.snapshot().breakers
    assert (states[Operation.STORE], states[Operation.LOAD]) == (BreakerState.OPEN, BreakerState.CLOSED)


def test_lookups_that_hang_open_the_breaker(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    shared = rig.start(hang(Operation.LOOKUP))
    for number in range(3):
        assert shared.lookup(key_of(number), f"r{number}") is Lookup.PENDING
        shared.step_end()
        rig.clock.advance(0.25)
        shared.finished()
    assert shared.lookup(key_of(9), "new") is Lookup.MISS
    assert shared.snapshot().lookups == {LookupOutcome.REFUSED: 1}
    assert shared.snapshot().failures == {(Operation.LOOKUP, UnreachableReason.TIMEOUT): 3}


def test_a_failed_lookup_is_a_miss_for_all_waiting_requests(rig: Rig) -> None:
    shared = rig.start(FailingTier(rig.memory(), lambda: TierRefused(RefusedReason.LOADING, "injected")))
    assert [rig.answer(key_of(1), "a"), rig.answer(key_of(1), "b")] == [Lookup.MISS, Lookup.MISS]
    assert shared.snapshot().failures == {(Operation.LOOKUP, RefusedReason.LOADING): 1}


# --- the end ------------------------------------------------------------------------------------------------------


def test_a_drain_waits_for_work_and_reports_all(rig: Rig) -> None:
    rig.fill(range(16))
    shared = rig.start()
    shared.submit_store(1, keys(range(20, 40)), range(20, 40))
    shared.submit_load(2, keys(range(16)), range(16))
    assert shared.drain(REAL_SECONDS)
    assert sorted(outcome.job_id for outcome in shared.finished()) == [1, 2]
    assert not shared.has_work()


def test_a_drain_gives_up_on_what_hangs(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    rig.fill(range(4))
    tier = hang(Operation.LOAD)
    shared = rig.start(tier)
    rig.clear_rows()
    shared.submit_load(1, keys(range(4)), range(4))
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    assert shared.drain(0.01)
    (outcome,) = shared.finished()
    assert len(outcome.failed) == 4
    tier.release()
    shared.drain(1.0)
    assert not rig.rows[:, :PAYLOAD].any()


def test_closing_is_bounded_releases_the_rows_and_refuses_later_jobs(
    rig: Rig, hang: Callable[..., HangingTier]
) -> None:
    shared = rig.start(hang(*Operation))
    shared.submit_load(1, keys([1]), [1])
    shared.submit_store(2, keys([2]), [2])
    shared.close(timeout_seconds=0.2)
    shared.close()
    shared.submit_store(3, keys([3]), [3])
    shared.submit_load(4, keys([4]), [4])
    assert sorted(outcome.job_id for outcome in shared.finished()) == [1, 2, 3, 4]


def test_the_region_can_be_unmapped_after_closing() -> None:
    import mmap

    region = mmap.mmap(-1, 4 * ROW)
    view = memoryview(region)
    rig = Rig()
    rig.fill([1])
    shared = SharedTier(rig.memory(), rows=view, row_bytes=ROW, payload_bytes=PAYLOAD, clock=rig.clock)
    rig.shared = shared
    shared.submit_load(1, keys([1]), [0])
    assert rig.outcome(1).success
    shared.close()
    view.release()
    region.close()  # raises BufferError while any slice lives


def test_threads_end_when_the_tier_is_closed(rig: Rig) -> None:
    before = set(threading.enumerate())
    shared = rig.start()
    assert len(set(threading.enumerate()) - before) == LIMITS.io_threads + 1
    shared.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("job_keys", "rows"), [([b"k"], []), ([b"k"], [ROWS]), ([b"k"], [-1])])
def test_jobs_that_make_no_sense_are_refused_at_once(rig: Rig, job_keys: list[bytes], rows: list[int]) -> None:
    shared = rig.start()
    with pytest.raises(ValueError, match="row"):
        shared.submit_load(1, job_keys, rows)
    assert shared.finished() == []


# --- admission, tenants, weights, figures --------------------------------------------------------------------------


class PressedTier(TierWrapper):
    """A tier that is short of room."""

    under_pressure = True


def test_a_tier_short_of_room_takes_only_what_was_asked_for_before(rig: Rig) -> None:
    tier = PressedTier(rig.memory())
    shared = rig.start(tier)
    shared.count_request(keys(range(8)))
    shared.count_request(keys(range(4)))
    shared.submit_store(1, keys(range(8)), range(8))
    outcome = rig.outcome(1)
    assert outcome.success
    assert rig.memory().contains(keys(range(8)), rig.clock() + 1) == [True] * 4 + [False] * 4
    assert shared.snapshot().skipped == {SkipReason.ADMISSION: 4}
    assert rig.answer(key_of(7)) is Lookup.MISS, "what was not admitted is not taken for stored"
    tier.under_pressure = False
    shared.submit_store(2, keys(range(8)), range(8))
    assert rig.outcome(2).success
    assert all(rig.memory().contains(keys(range(8)), rig.clock() + 1))


def test_a_tier_short_of_room_takes_what_another_engine_is_about_to_load(rig: Rig) -> None:
    shared = rig.start(PressedTier(rig.memory()))
    shared.count_request(keys(range(4)))
    shared.submit_store(1, keys(range(4)), range(4), hand_over=True)
    assert rig.outcome(1).success
    assert all(rig.memory().contains(keys(range(4)), rig.clock() + 1))


class PressedSessionTier(PressedTier):
    """One that follows sessions, and has room of the tenant's own for even seeds alone."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.uses: list[SessionUse] = []
        self.stores: dict[bytes, tuple[bytes, bool]] = {}

    def use_session(self, use: SessionUse) -> None:
        self.uses.append(use)

    def store_of_session(
        self, key: bytes, source: memoryview, deadline: float, tenant: bytes, session: bytes, *, own_room: bool
    ) -> StoreOutcome:
        self.stores[key] = session, own_room
        if own_room and key in keys(range(1, ROWS, 2)):
            return StoreOutcome.NOT_ADMITTED
        return super().store(key, source, deadline, tenant)


@pytest.mark.parametrize("expected", [True, False])
def test_what_an_expected_session_computes_asks_its_tenant_for_room(rig: Rig, expected: bool) -> None:
    tier = PressedSessionTier(rig.memory())
    announcements = Announcements(rig.clock)
    shared = rig.start(tier, announcements=announcements)
    hint = SessionHint(b"agent", return_seconds=30.0 if expected else None)
    shared.begin_request_of_session(b"tenant-1", hint)
    growing = keys(range(4))
    shared.use_session(b"tenant-1", hint, growing)
    growing.append(key_of(9))
    assert [use.keys for use in tier.uses] == [tuple(keys(range(4)))]
    shared.count_request(keys(range(4)))
    shared.count_request(keys([0]))
    shared.submit_store(1, keys(range(4)), range(4), b"tenant-1", hint)
    assert rig.outcome(1).success
    tag = session_tag(hint)
    if expected:
        assert tier.stores == {key_of(seed): (tag, seed != 0) for seed in range(4)}
    else:
        assert tier.stores == {key_of(0): (tag, False)}, "the others were asked for once"
    stored = [0, 2] if expected else [0]
    assert shared.snapshot().skipped == {SkipReason.ADMISSION: 4 - len(stored)}
    assert rig.memory().contains(keys(range(4)), rig.clock() + 1) == [seed in stored for seed in range(4)]
    assert rig.answer(key_of(1)) is Lookup.MISS, "what was not admitted is not taken for stored"
    said = announcements.take(b"store", True)
    assert {key for one in said if not one.removed for key in one.keys} == set(keys(stored))


def test_a_session_that_ends_is_not_expected_and_another_tenants_of_its_name_is_another(rig: Rig) -> None:
    tier = PressedSessionTier(rig.memory())
    shared = rig.start(tier)
    going, ending = SessionHint(b"agent", return_seconds=30.0), SessionHint(b"agent", ended=True)
    shared.begin_request_of_session(b"tenant-1", going)
    shared.end_request_of_session(b"tenant-1", going)
    shared.submit_store(1, keys([2]), [2], b"tenant-2", going)
    shared.begin_request_of_session(b"tenant-1", ending)
    shared.submit_store(2, keys([4]), [4], b"tenant-1", ending)
    shared.end_request_of_session(b"tenant-1", ending)
    assert rig.outcome(1).success and rig.outcome(2).success
    assert tier.stores == {}
    assert [(use.tenant, use.ended, use.due_seconds) for use in tier.uses] == [
        (b"tenant-1", False, 30.0),
        (b"tenant-1", True, 0.0),  # its usual pause so far
    ]


def test_a_tier_that_follows_no_sessions_stores_as_ever(rig: Rig) -> None:
    shared = rig.start(PressedTier(rig.memory()))
    hint = SessionHint(b"agent", return_seconds=30.0)
    shared.begin_request_of_session(NO_TENANT, hint)
    shared.use_session(NO_TENANT, hint, keys(range(2)))
    shared.submit_store(1, keys(range(2)), range(2), session=hint)
    assert rig.outcome(1).success
    shared.end_request_of_session(NO_TENANT, hint)
    assert shared.snapshot().skipped == {SkipReason.ADMISSION: 2}


class TenantTier(TierWrapper):
    """Writes down what it stored for which tenant."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.tenants: dict[bytes, bytes] = {}

    def store(self, key, source, deadline, tenant=bytes(8)):
        self.tenants[key] = tenant
        return super().store(key, source, deadline, tenant)


def test_a_store_carries_its_tenant(rig: Rig) -> None:
    tier = TenantTier(rig.memory())
    shared = rig.start(tier)
    shared.submit_store(1, keys([1]), [1], tenant=b"tenant-1")
    shared.submit_store(2, keys([2]), [2])
    rig.outcome(1)
    rig.outcome(2)
    assert tier.tenants == {key_of(1): b"tenant-1", key_of(2): bytes(8)}


def test_when_the_weights_change_nothing_is_served_or_stored_any_more(
    rig: Rig, hang: Callable[..., HangingTier]
) -> None:
    rig.fill(range(4))
    tier = hang(Operation.LOAD)
    shared = rig.start(tier)
    rig.clear_rows()
    assert rig.answer(key_of(0)) is Lookup.HIT
    shared.submit_load(1, keys([0]), [0])
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    since = shared.answered_requests.position
    shared.weights_changed()
    assert shared.answered_requests.since(since) is None  # all may have changed
    assert not shared.open
    assert not rig.outcome(1).success
    tier.release()
    while not shared.snapshot().late_completions:
        assert shared.wait_for_progress(REAL_SECONDS)
        shared.finished()
    assert not rig.rows[0, :PAYLOAD].any()
    assert shared.lookup(key_of(0), "r") is Lookup.MISS
    shared.submit_load(2, keys([1]), [1])
    assert not rig.outcome(2).success
    shared.submit_store(3, keys([9]), [9])
    assert rig.outcome(3).success
    assert rig.memory().contains(keys([9]), rig.clock() + 1) == [False]
    stats = shared.snapshot()
    assert stats.skipped == {SkipReason.WEIGHTS_CHANGED: 1}
    assert stats.misses[MissReason.WEIGHTS_CHANGED] == 1
    assert stats.weights_changed


def test_what_expired_and_what_waits_is_counted(rig: Rig, hang: Callable[..., HangingTier]) -> None:
    rig.fill(range(2))
    tier = hang(*Operation)
    shared = rig.start(tier)
    shared.submit_store(1, keys([8]), [8])
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    shared.submit_store(2, keys([9, 10]), [9, 10])
    shared.submit_load(3, keys([0, 1]), [0, 1])
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    shared.lookup(key_of(5), "r")
    shared.step_end()
    assert tier.entered.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(3.0)
    assert shared.snapshot().oldest_store_seconds == 3.0
    shared.finished()
    stats = shared.snapshot()
    assert stats.expiries == {Operation.LOOKUP: 1, Operation.LOAD: 1}
    assert stats.misses == {MissReason.LOAD_DEADLINE: 2}
    assert shared.lookup(key_of(6), "r") is Lookup.MISS
    assert shared.snapshot().misses[MissReason.LOOKUP_DEADLINE] == 1
    rig.clock.advance(7.0)
    shared.finished()
    assert shared.snapshot().expiries == {Operation.LOOKUP: 1, Operation.LOAD: 1, Operation.STORE: 2}
    tier.release()
    assert shared.drain(REAL_SECONDS)
    while shared.snapshot().oldest_store_seconds:
        shared.submit_store(4, keys([11]), [11])
        rig.outcome(4)
        rig.reported.clear()


def test_the_chunks_that_are_there_are_loaded_when_others_are_corrupt_or_gone_and_each_is_counted(rig: Rig) -> None:
    tier = CorruptingTier(NAMESPACE, PAYLOAD, rig.medium, seed=7, corrupt_ratio=0.5, clock=rig.clock)
    shared = rig.start(tier)
    shared.submit_store(1, keys(range(16)), range(16))
    assert rig.outcome(1).success
    shared.submit_load(2, keys(range(18)), range(18))
    rig.outcome(2)
    assert shared.snapshot().misses == {MissReason.CORRUPT: len(tier.corrupted), MissReason.GONE: 2}


def test_evictions_are_reported_by_reason(rig: Rig) -> None:
    tier = rig.memory()
    shared = rig.start(tier)
    assert shared.snapshot().evictions == {}
    tier._evictions.update({EvictionReason.ROOM: 3, EvictionReason.TTL: 1})
    assert shared.snapshot().evictions == {"room": 3, "ttl": 1}


class HoldingTier(TierWrapper):
    """Stores everything at once but ``held``, which waits for ``released``."""

    def __init__(self, tier: Tier, held: bytes) -> None:
        super().__init__(tier)
        self.held, self.reached, self.released = held, threading.Event(), threading.Event()

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        if key == self.held:
            self.reached.set()
            assert self.released.wait(REAL_SECONDS)
        return super().store(key, source, deadline, tenant)


def test_what_workers_have_settled_makes_room_before_its_job_ends(rig: Rig) -> None:
    tier = HoldingTier(rig.memory(), key_of(2))
    shared = rig.start(tier, replace(LIMITS, store_queue_bytes_max=4 * PAYLOAD))
    try:
        shared.submit_store(1, keys(range(3)), range(3))
        assert tier.reached.wait(REAL_SECONDS)  # the one thread for stores has ended the two before
        shared.submit_store(2, keys(range(3, 7)), range(3, 7))
    finally:
        tier.released.set()
    assert set(rig.outcome(2).failed) == {key_of(6)}, "three of four beside the one in hand"
    assert rig.outcome(1).success


class WithoutUpkeep(TierWrapper):
    """Serves lookups; its blocks are damaged, and once it fails it refuses what no request needs."""

    def __init__(self, tier: Tier, error: Exception) -> None:
        super().__init__(tier)
        self.failing = False
        self._error = error

    def _fail(self) -> None:
        if self.failing:
            raise self._error

    @override
    def resident_bytes(self, deadline: float) -> int:
        self._fail()
        return super().resident_bytes(deadline)

    @override
    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        self._fail()

    @override
    def discard(self, key: bytes, deadline: float) -> None:
        self._fail()

    @override
    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        raise TierCorrupt(CorruptReason.PAYLOAD, "injected")


def failures_of(shared: SharedTier) -> dict[tuple[str, str], int]:
    return {(of.value, str(reason)): count for (of, reason), count in shared.snapshot().failures.items()}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TierRefused(RefusedReason.PERMISSION, "injected"), "permission"), (ZeroDivisionError(), "other")],
)
def test_what_no_request_needs_is_counted_by_reason_and_opens_no_breaker(
    rig: Rig, error: Exception, reason: str
) -> None:
    rig.fill(range(8))
    tier = WithoutUpkeep(rig.memory(), error)
    shared = rig.start(tier)
    assert rig.answer(key_of(0)) is Lookup.HIT  # the first check comes before the first lookup
    assert shared.snapshot().ready and not failures_of(shared)
    tier.failing = True
    shared.retain(NO_TENANT, 0.5, 60.0, [key_of(0)])
    shared.submit_load(1, [key_of(0)], [0])
    rig.outcome(1)
    for number in range(2):  # the second answer comes after the check and the renewal behind the first
        rig.clock.advance(11.0)
        assert rig.answer(key_of(50 + number), str(number)) is Lookup.MISS
    assert {*failures_of(shared)} == {("check", reason), ("renew", reason), ("discard", reason), ("load", "payload")}
    assert not shared.snapshot().ready
    assert set(shared.snapshot().breakers.values()) == {BreakerState.CLOSED}


def test_a_tier_that_cannot_be_used_says_why_before_any_request(rig: Rig) -> None:
    tier = WithoutUpkeep(rig.memory(), TierRefused(RefusedReason.PERMISSION, "injected"))
    tier.failing = True
    shared = rig.start(tier)
    shared.close(REAL_SECONDS)
    assert failures_of(shared) == {("check", "permission"): 1}


class OpenedUntilClosed(TierWrapper):
    """A tier that is still being opened when it is closed, as a store far away is if the weights are named twice."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._is_closed = threading.Event()

    @override
    def prepare(self, deadline: float) -> None:
        assert self._is_closed.wait(REAL_SECONDS)
        raise TierRefused(RefusedReason.CLOSED, "the tier is closed")

    @override
    def close(self) -> None:
        self._is_closed.set()
        super().close()


def test_a_tier_that_is_closed_before_it_was_opened_has_not_failed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    shared = rig.start(OpenedUntilClosed(rig.memory()))
    shared.close(REAL_SECONDS)
    assert not failures_of(shared) and "cannot be used" not in caplog.text
