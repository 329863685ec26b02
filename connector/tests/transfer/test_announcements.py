from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierMiss, TierRefused
from spillway_connector.limits import BreakerPolicy
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import RefusingTier, TierWrapper
from spillway_connector.testing.tier_contract import NAMESPACE, key_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfer import announcements as rules
from spillway_connector.transfer.announcements import JOIN_SECONDS, REPEAT_SECONDS, Announcement, Announcements
from spillway_connector.transfer.shared_tier import Lookup, SharedTier, TransferLimits
from spillway_connector.transfer.stats import Operation

STORE, OTHER = b"store--1", b"store--2"
ONE, TWO, THREE = b"1", b"2", b"3"
JOINED = Announcement(STORE, False, ())
LEFT = Announcement(STORE, True, ())


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def made(clock: SteppedClock) -> Announcements:
    made = Announcements(clock)
    assert not made.introduced
    assert made.take(STORE, usable=True) == [JOINED]
    assert made.introduced
    return made


def test_a_store_is_announced_once_in_the_order_of_what_happened(made: Announcements) -> None:
    made.storing([ONE, TWO])
    made.found([ONE])
    made.missed(THREE)
    assert made.take(STORE, usable=True) == [
        Announcement(STORE, False, (ONE, TWO)),
        Announcement(STORE, True, (THREE,)),
    ]
    made.found([ONE, TWO])
    made.missed(THREE)
    assert made.take(STORE, usable=True) == []


def test_what_is_found_or_missed_is_announced_again_after_a_while(made: Announcements, clock: SteppedClock) -> None:
    made.found([ONE])
    made.missed(TWO)
    made.take(STORE, usable=True)
    clock.advance(REPEAT_SECONDS)
    made.found([ONE])
    made.missed(TWO)
    assert [each for each in made.take(STORE, usable=True) if each.keys] == [
        Announcement(STORE, False, (ONE,)),
        Announcement(STORE, True, (TWO,)),
    ]


def test_a_failed_store_is_taken_back_if_it_was_announced(made: Announcements) -> None:
    made.storing([ONE])
    made.failed([ONE, TWO])
    assert made.take(STORE, usable=True) == [Announcement(STORE, True, (ONE,))]


def test_membership_follows_the_tier_and_contents_wait_for_it(made: Announcements, clock: SteppedClock) -> None:
    made.storing([ONE])
    assert made.take(STORE, usable=False) == [LEFT]
    assert made.take(STORE, usable=False) == []
    assert made.take(STORE, usable=True) == [JOINED, Announcement(STORE, False, (ONE,))]
    assert made.take(None, usable=True) == [LEFT]
    made.storing([TWO])
    assert made.take(OTHER, usable=True) == [Announcement(OTHER, False, ())], "what was known is of the other store"
    clock.advance(JOIN_SECONDS)
    assert made.take(OTHER, usable=True) == [Announcement(OTHER, False, ())]
    assert made.take(OTHER, usable=True) == []


def test_everything_is_bounded(made: Announcements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PENDING_KEYS_MAX", 10)
    monkeypatch.setattr(rules, "KNOWN_KEYS_MAX", 6)
    monkeypatch.setattr(rules, "TAKEN_KEYS_MAX", 4)
    keys = [b"%d" % number for number in range(25)]
    made.storing(keys)
    for key in keys:
        made.missed(b"absent" + key)
    assert made.dropped == 40
    taken = [made.take(STORE, usable=True) for _ in range(4)]
    assert [sum(len(each.keys) for each in step) for step in taken] == [4, 4, 2, 0]
    assert len(made._present._at) <= 6 and len(made._absent._at) <= 6


@given(
    st.lists(
        st.tuples(st.sampled_from(["storing", "found", "missed", "failed", "wait", "take"]), st.integers(0, 3)),
        max_size=60,
    )
)
def test_a_listener_knows_the_last_word_about_every_chunk(steps: list[tuple[str, int]]) -> None:
    clock = SteppedClock()
    made = Announcements(clock)
    truth: dict[bytes, bool] = {}
    heard: dict[bytes, bool] = {}

    def take() -> None:
        for each in made.take(STORE, usable=True):
            heard.update(dict.fromkeys(each.keys, not each.removed))

    for name, number in steps:
        key = b"%d" % number
        if name == "take":
            take()
        elif name == "wait":
            clock.advance(REPEAT_SECONDS / 2)
        elif name == "missed":
            made.missed(key)
            truth[key] = False
        elif name == "failed":
            made.failed([key])
            if key in truth:
                truth[key] = False
        else:
            made.storing([key]) if name == "storing" else made.found([key])
            truth[key] = True
    take()
    assert heard == truth


# --- by a tier that is used -------------------------------------------------------------------------------------------

PAYLOAD, ROWS = 1000, 8
LIMITS = TransferLimits(io_threads=2, breaker=BreakerPolicy(failures_to_open=2, first_rest_seconds=1000.0))
REAL_SECONDS = 30.0  # bounds a wait for a thread that works; never waited out


class Used:
    """A tier in use, and what a listener has made of its announcements."""

    def __init__(self, medium: MemoryStore, tier: Callable[[Tier], Tier] = lambda tier: tier) -> None:
        clock = SteppedClock()  # no deadline passes, however slow the machine
        self.tier = tier(MemoryTier(NAMESPACE, PAYLOAD, medium, clock=clock))
        self.rows = np.zeros((ROWS, PAYLOAD), np.uint8)
        self.shared = SharedTier(
            self.tier,
            rows=memoryview(self.rows).cast("B"),
            row_bytes=PAYLOAD,
            payload_bytes=PAYLOAD,
            limits=LIMITS,
            clock=clock,
            announcements=Announcements(clock),
        )
        self.present: set[int] = set()
        self.loads_from: bytes | None = None
        self.jobs = 0

    def hear(self) -> None:
        names = {key_of(row): row for row in range(ROWS)}
        for _, each in self.shared.take_announcements():
            if not each.keys:
                self.loads_from = None if each.removed else each.store_id
            elif each.removed:
                self.present -= {names[key] for key in each.keys}
            else:
                self.present |= {names[key] for key in each.keys}

    def until(self, held: Callable[[], bool]) -> None:
        """Step as the scheduler does."""
        while True:
            self.shared.finished()
            self.hear()
            if held():
                return
            self.shared.step_end()  # sends what held() has asked
            assert self.shared.wait_for_progress(REAL_SECONDS), "the tier never answered"

    def store(self, rows: list[int], *, hand_over: bool = False) -> None:
        self.jobs += 1
        self.shared.submit_store(self.jobs, [key_of(row) for row in rows], rows, hand_over=hand_over)
        self.hear()

    def load(self, rows: list[int]) -> None:
        self.jobs += 1
        self.shared.submit_load(self.jobs, [key_of(row) for row in rows], rows)
        self.until(lambda: not self.shared.has_work())

    def look_up(self, rows: list[int]) -> None:
        def answered() -> bool:
            found = self.shared.lookup_prefix([key_of(row) for row in rows], "request").found
            return Lookup.PENDING not in found

        self.until(answered)
        self.hear()


@pytest.fixture
def use() -> Iterator[Callable[..., Used]]:
    medium = MemoryStore(1 << 24)
    made: list[Used] = []

    def start(tier: Callable[[Tier], Tier] = lambda tier: tier) -> Used:
        used = Used(medium, tier)
        made.append(used)
        used.until(lambda: used.loads_from is not None)
        return used

    yield start
    for used in made:
        used.shared.close(timeout_seconds=1.0)


def test_a_store_is_announced_before_it_ends_and_by_one_engine(use: Callable[..., Used]) -> None:
    one, two = use(), use()
    assert one.loads_from == two.loads_from
    one.store([0, 1])
    assert one.present == {0, 1}
    one.until(lambda: not one.shared.has_work())
    assert (one.present, two.present) == ({0, 1}, set())


def test_what_another_engine_is_to_load_is_announced_when_it_can(use: Callable[..., Used]) -> None:
    one, two = use(), use()
    one.store([0, 1], hand_over=True)
    assert one.present == set(), "a load would find nothing yet"
    one.until(lambda: not one.shared.has_work())
    assert one.present == {0, 1}
    two.load([0, 1])
    one.store([0, 1, 2], hand_over=True)
    one.until(lambda: not one.shared.has_work())
    assert one.present == {0, 1, 2}


def test_a_store_that_fails_before_it_was_announced_is_never_announced(use: Callable[..., Used]) -> None:
    one = use(lambda tier: RefusingTier(tier, RefusedReason.OTHER, [Operation.STORE]))
    one.store([0], hand_over=True)
    one.until(lambda: not one.shared.has_work())
    assert one.present == set()


def test_lookups_announce_what_is_there_and_the_first_that_is_not(use: Callable[..., Used]) -> None:
    one, two = use(), use()
    one.store([0, 1, 3])
    one.until(lambda: not one.shared.has_work())
    two.present = {2, 3}  # from another engine, or long ago
    two.look_up([0, 1, 2, 3])
    assert two.present == {0, 1, 3}, "3 lies behind the end of the prefix: nothing is known about it"


def test_a_chunk_that_is_gone_when_it_is_loaded_is_announced(use: Callable[..., Used]) -> None:
    one = use()
    one.store([0, 1])
    one.until(lambda: not one.shared.has_work())
    one.tier.discard(key_of(1), float("inf"))  # evicted behind this engine's back
    one.load([0, 1])
    assert one.present == {0}


class Failing(TierWrapper):
    """Loads fail with ``error``."""

    error: Exception

    def before(self, operation: Operation) -> None:
        if operation is Operation.LOAD:
            raise self.error


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (TierMiss(), set()),
        (TierCorrupt(CorruptReason.PAYLOAD, "damaged"), set()),
        (TierRefused(RefusedReason.OTHER, "busy"), {0}),
    ],
)
def test_only_a_load_that_proves_it_gone_takes_a_chunk_back(
    use: Callable[..., Used], error: Exception, left: set[int]
) -> None:
    one = use(Failing)
    one.tier.error = error  # type: ignore[attr-defined]
    one.store([0])
    one.until(lambda: not one.shared.has_work())
    one.load([0])
    assert one.present == left


def test_a_store_that_fails_is_taken_back_and_a_failing_tier_is_left(use: Callable[..., Used]) -> None:
    def refusing(tier: Tier) -> Tier:
        return RefusingTier(tier, RefusedReason.OTHER, [Operation.STORE, Operation.LOAD])

    one = use(refusing)
    one.store([0, 1])
    assert one.present == {0, 1}
    one.until(lambda: not one.shared.has_work())
    assert one.present == set()
    for _ in range(LIMITS.breaker.failures_to_open):
        one.load([0])
    one.until(lambda: one.loads_from is None)


def test_after_a_change_of_weights_the_engine_loads_from_no_store(use: Callable[..., Used]) -> None:
    one = use()
    one.shared.weights_changed()
    one.hear()
    assert one.loads_from is None


def test_the_successor_of_an_object_leaves_its_store_and_joins_its_own():
    clock = SteppedClock()
    former = Announcements(clock)
    former.storing([b"old"])
    assert former.take(b"a" * 8, True) == [Announcement(b"a" * 8, False, ()), Announcement(b"a" * 8, False, (b"old",))]
    former.storing([b"late"])
    successor = former.successor()
    assert not successor.introduced
    assert former.successor().take(None, False) == [], "a store is left once"
    assert successor.take(None, False) == [Announcement(b"a" * 8, True, ())]
    successor.storing([b"new"])
    assert successor.take(b"b" * 8, True) == [
        Announcement(b"b" * 8, False, ()),
        Announcement(b"b" * 8, False, (b"new",)),
    ]
