"""The answers that are kept between two lookups, compared with models that keep nothing or everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_connector.plan.prefix_memo import ChangeLog, PrefixAnswer, PrefixMemo, PresenceIndex, Step

# --- ChangeLog ------------------------------------------------------------------------------------------------------

one_byte = st.binary(min_size=1, max_size=1)
keys = st.lists(one_byte, max_size=6)


def may_have_changed(log: ChangeLog, since: int, wanted: frozenset[bytes]) -> bool:
    changed = log.since(since)
    return changed is None or not wanted.isdisjoint(changed)


@given(st.lists(keys, max_size=30), st.integers(0, 29), st.frozensets(one_byte), st.integers(2, 9))
def test_a_change_is_never_overlooked(batches, at, wanted, keys_max):
    log = ChangeLog(keys_max)
    since = log.position
    after: set[bytes] = set()
    for number, batch in enumerate(batches):
        if number == at:
            since, after = log.position, set()
        log.add(batch)
        after.update(batch)
    assert may_have_changed(log, since, wanted) or after.isdisjoint(wanted)
    assert len(log._keys) <= keys_max


@given(keys, st.frozensets(one_byte))
def test_other_keys_are_no_reason_to_ask_again(batch, wanted):
    log = ChangeLog()
    since = log.position
    log.add(batch)
    assert may_have_changed(log, since, wanted) == (not wanted.isdisjoint(batch))
    assert not may_have_changed(log, log.position, wanted)


def test_everything_may_have_changed():
    log = ChangeLog()
    log.add([b"a"])
    since = log.position
    log.add_all()
    assert may_have_changed(log, since, frozenset([b"z"]))
    assert not may_have_changed(log, log.position, frozenset([b"z"]))


def test_changes_are_listed_in_order_while_they_are_in_the_log():
    log = ChangeLog(keys_max=4)
    since = log.position
    log.add([b"a", b"b"])
    middle = log.position
    log.add([b"c"])
    assert log.since(since) == [b"a", b"b", b"c"]
    assert log.since(middle) == [b"c"]
    log.add([b"d", b"e", b"f"])
    assert log.since(since) is None
    assert log.since(log.position) == []


# --- PresenceIndex --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.lists(one_byte, min_size=1, max_size=5), st.booleans(), st.floats(0.0, 4.0)), max_size=25),
    st.integers(1, 6),
)
def test_presence_is_the_last_answer_of_the_latest_keys(answers, keys_max):
    index = PresenceIndex(keys_max=keys_max, present_seconds=6.0, absent_seconds=2.0)
    model: dict[bytes, tuple[bool, float]] = {}  # in the order of the first answer
    now = 0.0
    for batch, present, seconds in answers:
        now += seconds
        index.put_many(batch, present, now)
        for key in batch:
            model[key] = present, now + (6.0 if present else 2.0)
        for key in list(model)[:-keys_max]:
            del model[key]
        everything = [bytes([number]) for number in range(256)]
        expected = {key: present for key, (present, expiry) in model.items() if now < expiry}
        assert {key: index.get(key, now) for key in everything if index.get(key, now) is not None} == expected
        assert index.present_of(everything, now) == {key for key, present in expected.items() if present}
        assert len(index) == len(model)


def test_an_answer_expires_at_its_time() -> None:
    index = PresenceIndex(present_seconds=30, absent_seconds=5)
    index.put(b"there", True, 100.0)
    index.put(b"not", False, 100.0)
    assert (index.get(b"there", 104.9), index.get(b"not", 104.9)) == (True, False)
    assert (index.get(b"there", 105.0), index.get(b"not", 105.0)) == (True, None)
    assert index.get(b"there", 130.0) is None
    assert index.absent_until(b"not") == 105.0


def test_the_oldest_key_is_evicted_first() -> None:
    index = PresenceIndex(keys_max=3)
    for key in (b"a", b"b", b"c"):
        index.put(key, True, 0.0)
    index.put(b"b", False, 0.0)  # another answer, not another key
    assert len(index) == 3
    index.put(b"d", True, 0.0)
    assert [index.get(key, 0.0) for key in (b"a", b"b", b"c", b"d")] == [None, False, True, True]
    index.put_many([b"a", b"e", b"f"], True, 0.0)
    assert index.get_many([b"c", b"d"]) == [None, None]
    assert index.present_of([b"a", b"b", b"e", b"f"], 0.0) == {b"a", b"e", b"f"}
    assert len(index) == 3


def test_no_dict_grows_large_enough_to_hold_up_a_step() -> None:
    index = PresenceIndex(keys_max=20_000)
    for begin in range(0, 60_000, 1000):  # evicting all the time from the twentieth batch on
        batch = [number.to_bytes(36, "big") for number in range(begin, begin + 1000)]
        index.put_many(batch, begin % 2000 == 0, 0.0)
    assert len(index) == 20_000
    assert sum(map(len, index._shards)) == 20_000
    assert max(map(len, index._shards)) < 2 * 20_000 / len(index._shards), "spread evenly"
    assert index.get_many([(39_999).to_bytes(36, "big")]) == [None]
    assert index.get((59_999).to_bytes(36, "big"), 0.0) is False
    index.clear()
    assert len(index) == 0
    assert index.get((59_999).to_bytes(36, "big"), 0.0) is None


# --- PrefixMemo -----------------------------------------------------------------------------------------------------

REQUESTS = ("r0", "r1", "r2")
CHUNKS = 6


class Condition(NamedTuple):
    """Compared by value; the general one is one object while it stays the same, as TierState is."""

    passes: bool


@dataclass
class World:
    """A cache whose answers can be computed again at any time, and the memo in front of it.

    An answer is the number of leading chunks that are ready, or None while the tier has not answered the request. While
    the general condition does not pass, it holds for the requests in `probing` only; the others get 0.
    """

    memo: PrefixMemo[int, Condition] = field(init=False)
    step: Step[Condition] = field(init=False)
    chunk_log: ChangeLog[int] = field(default_factory=lambda: ChangeLog(4))
    request_log: ChangeLog[str] = field(default_factory=lambda: ChangeLog(4))
    ready: set[int] = field(default_factory=set)
    pending: set[str] = field(default_factory=lambda: {REQUESTS[0]})
    general: Condition = field(default_factory=lambda: Condition(True))
    probing: set[str] = field(default_factory=set)
    now: float = 0.0
    valid_until: float = 1e9  # of the answers made from here on; at that time they turn into 0
    expired_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memo = PrefixMemo(self.chunk_log, self.request_log, self.condition_of)

    def condition_of(self, request_id: str, step: Step[Condition] | None = None) -> Condition:
        return self.general if self.general.passes else Condition(request_id in self.probing)

    def compute(self, request_id: str, keys: list[int]) -> int | None:
        if not self.condition_of(request_id).passes or self.now >= self.expired_at.get(request_id, 1e9):
            return 0
        if request_id in self.pending:
            return None
        return next((at for at, key in enumerate(keys) if key not in self.ready), len(keys))

    def answer(self, request_id: str, keys: list[int]) -> PrefixAnswer[int, Condition]:
        expires = self.expired_at.setdefault(request_id, self.valid_until)
        valid_until = expires if self.now < expires else 1e9
        chunks = self.compute(request_id, keys)
        return self.memo.record(keys, chunks, valid_until, self.condition_of(request_id), self.step)

    def begin_step(self) -> None:
        self.step = self.memo.begin_step(self.now, self.general)

    def apply(self, action: str, number: int) -> None:
        if action == "chunk":
            self.ready ^= {number}
            self.chunk_log.add([number])
        elif action == "chunks":
            self.ready = set(range(number))
            self.chunk_log.add_all()
        elif action == "other":
            self.chunk_log.add([100 + number])
        elif action == "request":
            request_id = REQUESTS[number % 3]
            self.pending ^= {request_id}
            self.request_log.add([request_id])
        elif action == "requests":
            self.pending = set(REQUESTS[: number % 3])
            self.request_log.add_all()
        elif action == "general":
            self.general = Condition(not self.general.passes)
        elif action == "probe":
            self.probing ^= {REQUESTS[number % 3]}
        elif action == "wait":
            self.now += number
        elif action == "expire":
            self.valid_until = self.now + number


prefixes = st.lists(st.integers(0, CHUNKS - 1), min_size=1, max_size=CHUNKS, unique=True)
actions = st.sampled_from(
    (
        "chunk",
        "chunk",
        "chunk",
        "chunks",
        "other",
        "request",
        "requests",
        "general",
        "probe",
        "wait",
        "expire",
        "nothing",
    )
)
steps = st.lists(st.lists(st.tuples(actions, st.integers(0, CHUNKS - 1)), max_size=3), max_size=20)


@settings(max_examples=3 * settings.default.max_examples)
@given(st.lists(prefixes, min_size=3, max_size=3), steps, st.data())
def test_a_current_answer_is_what_a_new_lookup_would_return(prompts, schedule, data):
    world = World()
    answers: dict[str, PrefixAnswer[int, Condition]] = {}
    for changes_of_step in schedule:
        for action, number in changes_of_step:
            world.apply(action, number)
        world.begin_step()
        for request_id, keys in zip(REQUESTS, prompts, strict=True):
            if data.draw(st.integers(0, 3)) == 0:
                continue  # not asked in this step
            answer = answers.get(request_id)
            quick = answer is not None and answer.stamp == world.memo.stamp and world.now < answer.valid_until
            current = answer is not None and world.memo.is_current(answer, request_id, world.step)
            assert current or not quick, "the comparison alone never accepts more than the check"
            if answer is None or not current:
                answer = answers[request_id] = world.answer(request_id, keys)
            assert answer.chunks == world.compute(request_id, keys)


@given(
    prefixes, st.lists(st.tuples(st.sampled_from(("other", "r", "wait", "nothing")), st.integers(0, 5)), max_size=12)
)
def test_an_answer_outlives_what_does_not_concern_it(keys, schedule):
    """An answer outlives any number of changes, if the request asks in time: here the logs hold four."""
    world = World()
    world.begin_step()
    answer = world.answer("r0", keys)
    for action, number in schedule:
        world.apply(action, number)
        if action == "r":
            world.request_log.add(["r1", "r2"][number % 2 :][:1])
        world.begin_step()
        assert world.memo.is_current(answer, "r0", world.step)
        assert answer.stamp == world.memo.stamp, "from here on one comparison suffices"


def test_changes_that_a_lookup_makes_itself_do_not_outdate_its_answer():
    """A lookup that promotes chunks puts them into the log."""
    world = World()
    world.begin_step()
    world.chunk_log.add([1])
    answer = world.answer("r0", [1])
    world.begin_step()
    assert world.memo.is_current(answer, "r0", world.step)


@pytest.mark.parametrize("condition", [True, None])
def test_without_a_change_the_stamp_stays(condition):
    memo: PrefixMemo[int, bool] = PrefixMemo(ChangeLog(), ChangeLog(), lambda *_: True)
    step = memo.begin_step(0.0, True)
    answer = memo.record([1, 2], 2, 10.0, condition, step)
    for second in range(1, 10):
        step = memo.begin_step(float(second), True)
        assert answer.stamp == memo.stamp
        assert memo.is_current(answer, "r", step)
    step = memo.begin_step(10.0, True)
    assert not memo.is_current(answer, "r", step), "valid_until has come"


def test_another_general_condition_outdates_an_answer_that_rests_on_it():
    general = [True]
    memo: PrefixMemo[int, bool] = PrefixMemo(ChangeLog(), ChangeLog(), lambda *_: general[0])
    step = memo.begin_step(0.0, True)
    resting, free = memo.record([1], 1, 10.0, True, step), memo.record([1], 1, 10.0, None, step)
    general[0] = False
    step = memo.begin_step(0.0, False)
    assert resting.stamp != memo.stamp
    assert not memo.is_current(resting, "r", step)
    assert memo.is_current(free, "r", step)


def test_a_condition_of_its_own_is_asked_for_at_every_step():
    """A request that probes a slow tier: whether it still may is not in any log."""
    asked = []
    own = [True]

    def condition_of(request_id: str, step: Step[bool]) -> bool:
        asked.append(request_id)
        return own[0]

    memo: PrefixMemo[int, bool] = PrefixMemo(ChangeLog(), ChangeLog(), condition_of)
    step = memo.begin_step(0.0, False)
    answer = memo.record([1], None, 10.0, True, step)
    for _ in range(3):
        step = memo.begin_step(1.0, False)
        assert memo.is_current(answer, "probe", step)
    assert asked == ["probe"] * 3
    own[0] = False
    assert not memo.is_current(answer, "probe", step)


def test_requests_that_wait_since_the_same_step_share_what_has_changed():
    chunk_log: ChangeLog[int] = ChangeLog()
    memo: PrefixMemo[int, bool] = PrefixMemo(chunk_log, ChangeLog(), lambda *_: True)
    step = memo.begin_step(0.0, True)
    answers = [memo.record([number], 0, 10.0, True, step) for number in range(50)]
    chunk_log.add([1000])
    step = memo.begin_step(0.0, True)
    read = []
    since = chunk_log.since
    chunk_log.since = lambda position: read.append(position) or since(position)  # type: ignore[method-assign]
    assert all(memo.is_current(answer, f"r{number}", step) for number, answer in enumerate(answers))
    assert len(read) == 1
