"""Two shared tiers behind each other: which of them a chunk is found in and stored in, and what faults cost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from spillway_connector.errors import RefusedReason, TierPartlyAsked, TierRefused
from spillway_connector.limits import BreakerPolicy
from spillway_connector.plan.load_cost import JointGate, LoadGate, LoadPolicy, RateMeter
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import CorruptingTier, FailingTier, FlakyTier, RefusingTier, SlowTier
from spillway_connector.testing.retention_contract import MakeRetaining, RetentionContract
from spillway_connector.testing.tier_contract import NAMESPACE, key_of, payload_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import NO_TENANT, StoreOutcome, Tier
from spillway_connector.transfer.announcements import Announcements
from spillway_connector.transfer.calling_thread import Call
from spillway_connector.transfer.chain import TierChain
from spillway_connector.transfer.demotions import PRESSED_SHARE, DemotionOutcome, Demotions
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.renewals import RENEW_SECONDS
from spillway_connector.transfer.shared_tier import Lookup, SharedTier, TransferLimits
from spillway_connector.transfer.stats import LookupOutcome, Operation

PAYLOAD, ROW, ROWS = 1000, 1024, 64
FRAME = 1192
IDLE_SECONDS = 60.0
REAL_SECONDS = 30.0  # bounds a wait for a thread that works; never waited out
LIMITS = TransferLimits(io_threads=2, breaker=BreakerPolicy(failures_to_open=2))
HIT, MISS = Lookup.HIT, Lookup.MISS


@dataclass
class Rig:
    """A chain over two memory media, whose rows start out as payload_of(row). The tier above has room for 8 frames."""

    clock: SteppedClock = field(default_factory=SteppedClock)
    above: MemoryStore = field(default_factory=lambda: MemoryStore(8 * FRAME))
    below: MemoryStore = field(default_factory=lambda: MemoryStore(1 << 24))
    rows: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, ROW), np.uint8))
    chain: TierChain = None  # type: ignore[assignment]
    jobs: int = 0

    def memory(self, store: MemoryStore) -> MemoryTier:
        return MemoryTier(NAMESPACE, PAYLOAD, store, clock=self.clock)

    def start(
        self,
        above: Tier | None = None,
        below: Tier | None = None,
        announced: tuple[Announcements | None, Announcements | None] = (None, None),
        room_bytes: int = 0,
    ) -> TierChain:
        for row in range(ROWS):
            self.rows[row, :PAYLOAD] = payload_of(row, PAYLOAD)
        answered: ChangeLog[str] = ChangeLog()
        progress = threading.Event()
        tiers = above or self.memory(self.above), below or self.memory(self.below)
        driven = [
            SharedTier(
                tier,
                rows=memoryview(self.rows).cast("B"),
                row_bytes=ROW,
                payload_bytes=PAYLOAD,
                limits=LIMITS,
                clock=self.clock,
                announcements=announcements,
                answered_requests=answered,
                progress=progress,
                room_bytes=room_bytes,
                admits_all=admits_all,
            )
            for tier, announcements, admits_all in zip(tiers, announced, (True, False), strict=True)
        ]
        demotions = Demotions(
            *tiers,
            idle_seconds=IDLE_SECONDS,
            threads=0,
            lookup_seconds=1.0,
            store_seconds=1.0,
            breaker=driven[1].breaker_of(Operation.STORE),
            counters=(driven[0].counters, driven[1].counters),
            clock=self.clock,
        )
        self.chain = TierChain(*driven, demotions, clock=self.clock)
        return self.chain

    def fill(self, store: MemoryStore, rows: Sequence[int]) -> None:
        for row in rows:
            self.memory(store).store(key_of(row), payload_of(row, PAYLOAD), self.clock() + 1)

    def look(self, rows: Sequence[int], request_id: str = "r") -> list[Lookup]:
        """Step until nothing is pending."""
        keys = [key_of(row) for row in rows]
        while Lookup.PENDING in (found := self.chain.lookup_prefix(keys, request_id).found):
            self.chain.step_end()
            assert self.chain.wait_for_progress(REAL_SECONDS), "the lookup was never answered"
        return found

    def ended(self, submit: Callable[[int, list[bytes], list[int]], None], rows: Sequence[int]) -> JobOutcome:
        self.jobs += 1
        submit(self.jobs, [key_of(row) for row in rows], list(rows))
        while not (outcomes := self.chain.finished()):
            assert self.chain.wait_for_progress(REAL_SECONDS), "the job was never reported"
        (outcome,) = outcomes
        assert outcome.job_id == self.jobs
        return outcome

    def load(self, rows: Sequence[int]) -> JobOutcome:
        self.rows[:, :PAYLOAD] = 0
        return self.ended(self.chain.submit_load, rows)

    def store(self, rows: Sequence[int]) -> JobOutcome:
        for row in rows:
            self.rows[row, :PAYLOAD] = payload_of(row, PAYLOAD)
        return self.ended(self.chain.submit_store, rows)

    def right(self, rows: Sequence[int]) -> bool:
        return all(self.rows[row, :PAYLOAD].tobytes() == payload_of(row, PAYLOAD) for row in rows)

    def demote(self) -> dict[DemotionOutcome, int]:
        """Copy what is due now; how many chunks had which end since the start."""
        while self.chain.demotions.demote_due(memoryview(bytearray(PAYLOAD)), Call()):
            pass
        return {outcome: count for outcome, count in self.chain.demotions.outcomes().items() if count}

    def held(self, store: MemoryStore) -> list[int]:
        there = self.memory(store).contains([key_of(row) for row in range(ROWS)], self.clock() + 1)
        return [row for row in range(ROWS) if there[row]]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.chain.close(timeout_seconds=2.0)


@pytest.mark.parametrize(
    ("above", "below", "found"),
    [
        ([0, 1, 2], [], [HIT, HIT, HIT, MISS]),
        ([], [0, 1], [HIT, HIT, MISS]),
        ([0, 1], [2, 3], [HIT] * 4),
        ([0, 2], [1, 3], [HIT] * 4),
        ([1, 2, 3], [1, 2, 3], [MISS]),
        ([0, 1, 2], [0, 1, 2, 3], [HIT] * 4),
        ([], [], [MISS]),
    ],
)
def test_a_prefix_is_found_across_both_tiers_and_loaded_from_where_it_lies(
    rig: Rig, above: list[int], below: list[int], found: list[Lookup]
) -> None:
    rig.fill(rig.above, above)
    rig.fill(rig.below, below)
    rig.start()

    assert rig.look(range(4)) == found
    if hits := list(range(found.count(HIT))):
        outcome = rig.load(hits)
        assert outcome.success and rig.right(hits) and outcome.moved == len(hits)
        promoted = rig.chain.take_promoted(outcome.job_id)
        assert list(promoted) == [key_of(row) for row in hits if row not in above]
        assert rig.chain.take_promoted(outcome.job_id) == ()


def test_the_tier_below_is_not_asked_for_what_lies_above(rig: Rig) -> None:
    rig.fill(rig.above, range(3))
    chain = rig.start()
    rig.look(range(3))

    assert not chain.members[1].counters.lookups


def test_what_is_idle_above_goes_below_and_is_found_after_its_eviction(rig: Rig) -> None:
    chain = rig.start()
    rig.store(range(4))
    assert rig.demote() == {} and rig.held(rig.below) == []
    rig.clock.advance(IDLE_SECONDS - 1)
    chain.count_request([key_of(0), key_of(1)])  # used again
    rig.clock.advance(1)
    assert rig.demote() == {DemotionOutcome.STORED: 2} and rig.held(rig.below) == [2, 3]
    rig.clock.advance(IDLE_SECONDS)
    rig.demote()
    rig.above.frames.clear()
    for tier in chain.members:
        tier.reset()

    assert rig.look(range(5)) == [HIT] * 4 + [MISS]
    assert rig.load(range(4)).success and rig.right(range(4))


def test_a_demotion_leaves_the_order_of_eviction_as_it_was(rig: Rig) -> None:
    rig.start()
    rig.store([0, 1])
    rig.clock.advance(IDLE_SECONDS)
    rig.store(range(2, 8))
    assert rig.demote() == {DemotionOutcome.STORED: 2}
    rig.fill(rig.above, [8])

    assert rig.held(rig.above) == list(range(1, 9))  # the oldest has left, though it was read last


def test_while_the_tier_above_evicts_chunks_go_below_sooner(rig: Rig) -> None:
    pressed = rig.memory(rig.above)
    rig.start(above=pressed)
    rig.store(range(8))
    rig.clock.advance(IDLE_SECONDS * PRESSED_SHARE)
    assert rig.demote() == {}
    pressed.store(key_of(20), payload_of(20, PAYLOAD), rig.clock() + 1)

    assert rig.demote() == {DemotionOutcome.LOST: 1, DemotionOutcome.STORED: 7}


def test_a_store_under_way_is_not_idle_however_long_it_takes(rig: Rig) -> None:
    """Read above before it is written it would count as lost, and never go below."""
    begun, written = threading.Barrier(2), threading.Event()

    class WaitingTier(MemoryTier):
        under_pressure = True  # type: ignore[assignment]

        def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
            begun.wait(REAL_SECONDS)
            assert written.wait(REAL_SECONDS)
            return super().store(key, source, deadline, tenant)

    chain = rig.start(above=WaitingTier(NAMESPACE, PAYLOAD, rig.above, clock=rig.clock))
    chain.submit_store(1, [key_of(0)], [0])
    begun.wait(REAL_SECONDS)
    rig.clock.advance(IDLE_SECONDS * PRESSED_SHARE)
    assert rig.demote() == {}
    written.set()
    while not (outcomes := chain.finished()):
        assert chain.wait_for_progress(REAL_SECONDS)
    assert outcomes[0].success
    rig.clock.advance(IDLE_SECONDS * PRESSED_SHARE)

    assert rig.demote() == {DemotionOutcome.STORED: 1}


def test_what_another_engine_stored_above_goes_below_once_this_one_has_loaded_it(rig: Rig) -> None:
    rig.fill(rig.above, range(3))
    chain = rig.start()
    rig.look(range(2))
    chain.submit_load(1, [key_of(0), key_of(1)], [0, 1], b"tenant-1")
    while not chain.finished():
        assert chain.wait_for_progress(REAL_SECONDS)
    rig.clock.advance(IDLE_SECONDS)

    assert rig.demote() == {DemotionOutcome.STORED: 2} and rig.held(rig.below) == [0, 1]


def test_what_came_from_below_is_not_demoted_again(rig: Rig) -> None:
    rig.fill(rig.below, range(3))
    chain = rig.start()
    rig.look(range(3))
    outcome = rig.load(range(3))
    rig.store(range(3))
    assert chain.take_promoted(outcome.job_id) and rig.held(rig.above) == [0, 1, 2]
    rig.clock.advance(IDLE_SECONDS)

    assert rig.demote() == {}


@pytest.mark.parametrize("noticed", ["by a lookup", "by a load"])
def test_what_the_tier_below_has_lost_since_it_was_found_there_goes_below_again(rig: Rig, noticed: str) -> None:
    """A lookup ends at the first chunk that is gone, as after a lifecycle rule, and says nothing of those behind it."""
    rig.fill(rig.below, range(3))
    chain = rig.start()
    assert rig.look(range(3)) == [HIT] * 3
    rig.below.frames.clear()
    if noticed == "by a load":
        assert rig.load(range(3)).failed.keys() == {key_of(row) for row in range(3)}
    else:
        for tier in chain.members:
            tier.reset()
        assert rig.look(range(3), "again") == [MISS]
    rig.store(range(3))
    rig.clock.advance(IDLE_SECONDS)

    assert rig.demote() == {DemotionOutcome.STORED: 3} and rig.held(rig.below) == [0, 1, 2]


def test_what_lies_below_already_is_asked_for_and_not_copied(rig: Rig) -> None:
    rig.start()
    rig.store(range(3))
    rig.fill(rig.below, [0, 2])
    rig.clock.advance(IDLE_SECONDS)

    assert rig.demote() == {DemotionOutcome.PRESENT: 2, DemotionOutcome.STORED: 1}


def test_a_tier_below_that_refuses_costs_nothing_above_and_is_tried_again(rig: Rig) -> None:
    refusing = RefusingTier(rig.memory(rig.below), RefusedReason.NO_SPACE, {Operation.STORE})
    chain = rig.start(below=refusing)
    rig.store(range(3))
    assert rig.look(range(4)) == [HIT, HIT, HIT, MISS]
    rig.clock.advance(IDLE_SECONDS)
    assert rig.demote()[DemotionOutcome.FAILED] == 3
    assert rig.look(range(3), "again") == [HIT] * 3 and chain.open
    refusing.failing = False
    rig.clock.advance(2 * IDLE_SECONDS)

    assert rig.demote()[DemotionOutcome.STORED] == 3


def test_a_tier_above_that_fails_leaves_the_one_below_in_use(rig: Rig) -> None:
    rig.fill(rig.below, range(3))
    chain = rig.start(above=RefusingTier(rig.memory(rig.above), RefusedReason.PERMISSION))
    for attempt in range(3):
        assert rig.look(range(3), f"request {attempt}") == [HIT] * 3
        chain.members[0].reset()
    outcome = rig.load(range(3))

    assert outcome.success and rig.right(range(3)) and chain.open
    assert chain.members[0].counters.lookups[LookupOutcome.REFUSED]  # its breaker is open


@pytest.mark.parametrize("place", ["above", "below"])
def test_damaged_bytes_of_either_tier_are_lost_and_never_loaded(rig: Rig, place: str) -> None:
    store = rig.above if place == "above" else rig.below
    corrupting = CorruptingTier(NAMESPACE, PAYLOAD, store, seed=1, corrupt_ratio=0.5, clock=rig.clock)
    for row in range(6):
        corrupting.store(key_of(row), payload_of(row, PAYLOAD), rig.clock() + 1)
    assert 0 < len(corrupting.corrupted) < 6
    rig.start(**{place: corrupting})
    assert rig.look(range(6)) == [HIT] * 6
    outcome = rig.load(range(6))

    assert outcome.failed.keys() == corrupting.corrupted
    assert rig.right([row for row in range(6) if key_of(row) in outcome.done])


def test_damaged_bytes_are_not_demoted(rig: Rig) -> None:
    corrupting = CorruptingTier(NAMESPACE, PAYLOAD, rig.above, seed=1, corrupt_ratio=1.0, clock=rig.clock)
    rig.start(above=corrupting)
    rig.store(range(3))
    rig.clock.advance(IDLE_SECONDS)

    assert rig.demote() == {DemotionOutcome.LOST: 3} and rig.held(rig.below) == []


def test_each_tier_has_a_gate_of_its_own_and_the_slow_one_is_probed(rig: Rig) -> None:
    rig.fill(rig.above, [0])
    rig.fill(rig.below, [1])
    chain = rig.start(above=SlowTier(rig.memory(rig.above), rig.clock, 0.1, {Operation.LOAD}))
    policy = LoadPolicy()
    members = [LoadGate(policy, 128, PAYLOAD, RateMeter(10.0)) for _ in range(2)]
    gate = JointGate(["nvme", "s3"], members, RateMeter(10.0))
    computing = RateMeter(10.0, pinned=1000.0)
    chain.use_gate(gate, computing, PAYLOAD)
    gate.members[0].load_rate.add(1e9, 1.0, rig.clock())
    gate.members[1].load_rate.add(1.0, 1.0, rig.clock())  # slower than computing

    assert gate.pays(computing)
    assert rig.look([0, 1], "probe") == [HIT, HIT]
    assert rig.look([0, 1], "another") == [HIT, MISS] and chain.not_worth == 1
    rig.clock.advance(policy.probe_seconds)
    assert rig.look([0, 1], "next probe") == [HIT, HIT]
    rig.clock.advance(1.0)
    assert rig.load([0]).success
    assert gate.members[0].load_rate.updated_at == rig.clock()
    assert gate.members[1].load_rate.updated_at != rig.clock()
    above, below = gate.readings("nvme", computing)
    assert (above.tier, above.pays) == ("nvme", True) and (below.tier, below.pays) == ("s3", False)
    assert above.load_rate is not None and below.load_rate is not None and above.load_rate > below.load_rate


def test_each_tier_announces_what_it_holds_under_its_own_name(rig: Rig) -> None:
    chain = rig.start(announced=(Announcements(rig.clock), Announcements(rig.clock)))
    rig.store([0, 1])
    rig.clock.advance(IDLE_SECONDS)
    rig.demote()
    announced: dict[bytes, set[bytes]] = {}
    while len(announced) < 2:
        for name, announcement in chain.take_announcements():
            assert name == "memory"
            announced.setdefault(announcement.store_id, set()).update(announcement.keys)

    assert list(announced.values()) == [{key_of(0), key_of(1)}] * 2


def test_after_a_change_of_weights_nothing_is_found_stored_or_demoted(rig: Rig) -> None:
    chain = rig.start()
    rig.store([0, 1])
    chain.weights_changed()
    rig.clock.advance(IDLE_SECONDS)

    assert rig.demote() == {} and rig.look([0]) == [MISS] and not chain.open
    assert rig.store([2]).success and rig.held(rig.above) == [0, 1]


def test_a_flaky_pair_of_tiers_never_gives_wrong_bytes(rig: Rig) -> None:
    def refused() -> TierRefused:
        return TierRefused(RefusedReason.NO_SPACE, "injected")

    chain = rig.start(
        above=FlakyTier(rig.memory(rig.above), seed=1, failure_ratio=0.2, make_error=refused),
        below=FlakyTier(rig.memory(rig.below), seed=2, failure_ratio=0.2, make_error=refused),
    )
    loaded = 0
    for number in range(40):
        rig.store([(number * 3 + step) % 20 for step in range(4)])
        rig.clock.advance(IDLE_SECONDS)
        rig.demote()
        asked = [(number * 5 + step) % 20 for step in range(6)]
        found = rig.look(asked, f"request {number}")
        if hits := asked[: found.index(MISS) if MISS in found else len(found)]:
            outcome = rig.load(hits)
            done = [row for row in hits if key_of(row) in outcome.done]
            assert rig.right(done)
            loaded += len(done)
            chain.take_promoted(outcome.job_id)
    assert loaded


class ListedTier(MemoryTier):
    """A bucket: nothing that an engine does keeps an entry there."""

    renews = False


class RetainingChain:
    """The chain's own threads renew, between two lookups; another engine stores in the tier above."""

    honours_holds = True

    def __init__(self, rig: Rig, chunks: int) -> None:
        self.rig = rig
        rig.above.max_bytes = chunks * FRAME
        below = ListedTier(NAMESPACE, PAYLOAD, rig.below, clock=rig.clock)
        rig.start(below=below, room_bytes=chunks * PAYLOAD)
        self.other = rig.memory(rig.above)
        self._unknown = itertools.count(1_000_000)  # keys whose answer no earlier look has left behind

    def store(self, chunks: Iterable[int], tenant: bytes = NO_TENANT) -> None:
        for chunk in chunks:
            self.other.store(key_of(chunk), payload_of(chunk, PAYLOAD), self.rig.clock() + 1, tenant)

    def hold(self, tenant: bytes, share: float, seconds: float, chunks: range) -> None:
        self.rig.chain.retain(tenant, share, seconds, [key_of(chunk) for chunk in chunks])
        self._renew()

    def held(self) -> int:
        above, below = (member.snapshot().held_blocks for member in self.rig.chain.members)
        assert below == 0, "what nothing keeps is not reported as held"
        return above

    def pass_time(self, seconds: float) -> None:
        while seconds > 0:
            self.rig.clock.advance(min(seconds, RENEW_SECONDS))
            seconds -= RENEW_SECONDS
            self._renew()

    def there(self, chunks: range) -> set[int]:
        present = self.other.contains([key_of(chunk) for chunk in chunks], self.rig.clock() + 1)
        return {chunk for chunk, is_there in zip(chunks, present, strict=True) if is_there}

    def _renew(self) -> None:
        above = self.rig.chain.members[0]
        while above._renewals.waiting:
            self.rig.look([next(self._unknown)])  # it wakes the thread, which renews a page after it
        self.rig.look([next(self._unknown)])  # answered after that page


class TestRetention(RetentionContract):
    @pytest.fixture
    def make_retaining(self, rig: Rig) -> MakeRetaining:
        return lambda chunks: RetainingChain(rig, chunks)


def failures_of(shared: SharedTier) -> dict[tuple[str, str], int]:
    return {(of.value, str(reason)): count for (of, reason), count in shared.snapshot().failures.items()}


@pytest.mark.parametrize("operation", [Operation.LOOKUP, Operation.STORE])
def test_a_demotion_that_the_tier_below_refuses_is_counted_there(rig: Rig, operation: Operation) -> None:
    rig.start(below=RefusingTier(rig.memory(rig.below), RefusedReason.PERMISSION, {operation}))
    rig.store([0])
    rig.clock.advance(IDLE_SECONDS)
    rig.demote()
    above, below = rig.chain.members
    assert failures_of(below) == {(operation.value, "permission"): 1} and not failures_of(above)


def test_lookups_below_that_a_bound_of_requests_cuts_end_no_demotion(rig: Rig) -> None:
    """Such lookups are counted, and are no failures of the tier below: two failures would open its breaker."""
    partly = FailingTier(
        rig.memory(rig.below), lambda: TierPartlyAsked([False], "one was not asked for"), {Operation.LOOKUP}
    )
    rig.start(below=partly)
    rig.store([0])
    below, failures = rig.chain.members[1], LIMITS.breaker.failures_to_open
    for _ in range(failures):
        rig.clock.advance(2 * IDLE_SECONDS)
        rig.demote()
    assert dict(below.counters.shed) == {(Operation.LOOKUP, RefusedReason.QUEUE_AGE): failures}
    assert below.breaker_of(Operation.STORE).would_allow()
    partly.failing = False
    rig.clock.advance(2 * IDLE_SECONDS)

    assert rig.demote()[DemotionOutcome.STORED] == 1


def test_a_demotion_that_the_tier_above_does_not_give_is_counted_there_unless_it_has_gone(rig: Rig) -> None:
    refusing = FailingTier(
        rig.memory(rig.above), lambda: TierRefused(RefusedReason.RESOURCES, "injected"), {Operation.LOAD}
    )
    rig.start(above=refusing)
    rig.store([0, 1])
    rig.memory(rig.above).discard(key_of(1), rig.clock() + 1)
    rig.clock.advance(IDLE_SECONDS)
    rig.demote()
    above, below = rig.chain.members
    assert failures_of(above) == {("load", "resources"): 2}
    refusing.failing = False
    rig.store([2])
    rig.memory(rig.above).discard(key_of(2), rig.clock() + 1)
    rig.clock.advance(IDLE_SECONDS)
    rig.demote()
    assert failures_of(above) == {("load", "resources"): 2} and not failures_of(below)
