"""Chunks that waiting requests keep: bounds, turns, tenants' shares, and that nothing is kept after an end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.waiting import LOOK_SECONDS, SECONDS_MAX, Turn, WaitingChunks, leading_count

Key = tuple[str, int]
TENANTS = ("a", "b", "c")


def keys_of(tenant: str, first: int, count: int) -> list[Key]:
    """Keys of one tenant are never another's: the salt is in them."""
    return [(tenant, number) for number in range(first, first + count)]


@dataclass
class Queue:
    """The planner, and what its requests want."""

    chunks_max: int
    here: set[Key] = field(default_factory=set)
    now: float = 0.0
    wants: dict[str, tuple[str, Turn, list[Key]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan: WaitingChunks[Key] = WaitingChunks(self.chunks_max, self.here)

    def begin(self, name: str, tenant: str, turn: Turn, keys: list[Key]) -> None:
        self.wants.pop(name, None)
        self.wants[name] = (tenant, turn, keys)
        self.plan.begin(name, tenant.encode(), turn, keys, self.now)

    def end(self, name: str) -> None:
        self.wants.pop(name, None)
        self.plan.end(name)

    def counts(self) -> dict[str, int]:
        """Count the chunks that each request keeps."""
        assert len(self.plan.kept) == self.plan.kept_count
        return {name: len(self.held_by(name)) for name in self.plan._waiting}

    def held_by(self, name: str) -> list[Key]:
        waiting = self.plan._waiting[name]
        return [waiting.keys[position] for position in waiting.held]

    def check(self) -> None:
        kept = set(self.plan.kept)
        assert len(kept) <= self.chunks_max
        held = {name: self.held_by(name) for name in self.wants}
        assert kept == {key for keys in held.values() for key in keys}, "kept for no request, or forgotten"
        assert set(self.plan.last_first()) == kept
        waiting_tenants = {tenant for tenant, _, _ in self.wants.values()}
        for tenant in waiting_tenants:
            chunks = {key for key in kept if key[0] == tenant}
            short = [one for one in self.plan._tenants[tenant.encode()].short]
            assert not short or len(chunks) >= self.chunks_max // len(waiting_tenants), "a tenant lacks its share"
            assert not short or len(kept) == self.chunks_max, "room is left although a request would keep more"
            earlier: set[Key] = set()
            somebody_lacks = False
            for waiting in sorted(
                (one for one in self.plan._waiting.values() if one.tenant.name == tenant.encode()),
                key=lambda one: one.turn,
            ):
                own = {waiting.keys[position] for position in waiting.held}
                assert not (somebody_lacks and own - earlier), "a later turn keeps what an earlier one lacks"
                somebody_lacks |= waiting.is_short
                earlier |= own


chunks = st.sets(st.tuples(st.sampled_from(TENANTS), st.integers(0, 13)))
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("begin"),
            st.integers(0, 7),
            st.sampled_from(TENANTS),
            st.sampled_from([0.0, 0.0, 0.0, -1.0]),
            st.integers(0, 6),
            st.integers(0, 8),
        ),
        st.tuples(st.just("end"), st.integers(0, 7)),
        st.tuples(st.just("later"), st.sampled_from([0.0, LOOK_SECONDS, SECONDS_MAX / 2, SECONDS_MAX])),
        st.tuples(st.just("look")),
        st.tuples(st.just("arrive"), st.sampled_from(TENANTS), st.integers(0, 13)),
        st.tuples(st.just("reset")),
    ),
    max_size=40,
)


@given(chunks_max=st.integers(0, 12), there=chunks, do=actions, at_once=st.booleans())
def test_bounds_turns_and_shares_hold_whatever_happens(
    chunks_max: int, there: set[Key], do: list[tuple], at_once: bool
):
    """at_once: each request is looked at when it begins to wait, and not only when somebody asks what is kept."""
    queue = Queue(chunks_max, set(there))
    began: dict[str, float] = {}
    number = 0
    for action, *given_ in do:
        if action == "begin":
            who, tenant, priority, first, count = given_
            number += 1
            queue.begin(str(who), tenant, Turn(priority, number), keys_of(tenant, first, count))
            began[str(who)] = queue.now
        elif action == "end":
            queue.end(str(given_[0]))
        elif action == "later":
            queue.now += given_[0]
            if queue.now >= queue.plan.due_at:
                queue.plan.pass_time(queue.now)
            for name in list(queue.wants):
                if queue.now >= began[name] + SECONDS_MAX:  # as the planner adds: a difference is rounded otherwise
                    del queue.wants[name]
        elif action == "arrive":
            queue.here.add((given_[0], given_[1]))
        elif action == "reset":
            queue.plan.clear()
            queue.here.clear()
            queue.wants.clear()
        assert len(queue.plan) == len(queue.wants)
        assert all(name in queue.plan for name in queue.wants)
        if at_once or action == "look":
            queue.check()
    queue.check()
    for name in list(queue.wants):
        queue.end(name)
    assert not queue.plan.kept and not queue.plan._tenants


class Asked(set[Key]):
    """The chunks in the tier, with a count of how often one was asked for."""

    times = 0

    def __contains__(self, key: object) -> bool:
        self.times += 1
        return super().__contains__(key)


def test_a_request_that_ends_before_a_chunk_could_leave_is_never_looked_at():
    queue = Queue(9, here := Asked(keys_of("a", 0, 9)))
    queue.begin("short", "a", Turn(0, 1), keys_of("a", 0, 4))
    queue.plan.pass_time(queue.now)
    queue.end("short")
    queue.begin("longer", "a", Turn(0, 2), keys_of("a", 4, 5))
    queue.plan.pass_time(queue.now + 0.9 * LOOK_SECONDS)
    assert not here.times and not queue.plan.kept_count

    queue.plan.pass_time(queue.now + LOOK_SECONDS)
    assert here.times == queue.plan.kept_count == 5
    assert queue.plan.kept == set(keys_of("a", 4, 5))


def test_those_whose_turn_comes_first_keep_theirs_and_the_next_follow_when_they_leave():
    queue = Queue(4, set(keys_of("a", 0, 9)))
    for number in range(3):
        queue.begin(str(number), "a", Turn(0, number), keys_of("a", 3 * number, 3))
    assert queue.counts() == {"0": 3, "1": 1, "2": 0}

    queue.end("0")
    assert queue.counts() == {"1": 3, "2": 1}
    assert list(queue.plan.last_first()) == [("a", 6), ("a", 5), ("a", 4), ("a", 3)]


def test_a_request_whose_turn_is_earlier_takes_from_those_behind_it():
    queue = Queue(4, set(keys_of("a", 0, 8)))
    queue.begin("usual", "a", Turn(0, 1), keys_of("a", 0, 4))
    queue.begin("preempted", "a", Turn(0, -1), keys_of("a", 4, 3))
    assert queue.counts() == {"usual": 1, "preempted": 3}


def test_a_tenant_that_floods_the_queue_leaves_another_its_share():
    queue = Queue(6, set(keys_of("a", 0, 9) + keys_of("b", 0, 9)))
    for number in range(3):
        queue.begin(f"a{number}", "a", Turn(0, number), keys_of("a", 3 * number, 3))
    queue.begin("b", "b", Turn(0, 9), keys_of("b", 0, 9))
    assert queue.counts() == {"a0": 3, "a1": 0, "a2": 0, "b": 3}

    queue.end("b")
    assert queue.counts() == {"a0": 3, "a1": 3, "a2": 0}


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_prefix_without_holes_is_counted_by_few_questions(chunks: int, held: int):
    asked: list[int] = []

    def is_held(chunk: int) -> bool:
        asked.append(chunk)
        return chunk < held

    assert leading_count(chunks, is_held) == min(chunks, held)
    assert len(asked) <= 9 and all(0 <= chunk < chunks for chunk in asked)


def test_time_changes_nothing_before_it_is_said_to():
    queue = Queue(4, {("a", 0)})
    assert queue.plan.due_at == math.inf
    queue.begin("first", "a", Turn(0.0, 1), [("a", 0)])
    assert queue.plan.due_at == LOOK_SECONDS
    queue.plan.pass_time(LOOK_SECONDS)
    assert queue.plan.kept_count == 1 and queue.plan.due_at == SECONDS_MAX
    queue.now = 1.0
    queue.begin("second", "a", Turn(0.0, 2), [("a", 0)])
    assert queue.plan.due_at == 1.0 + LOOK_SECONDS
    queue.plan.pass_time(SECONDS_MAX)
    assert "first" not in queue.plan and queue.plan.due_at == 1.0 + SECONDS_MAX
    queue.plan.pass_time(1.0 + SECONDS_MAX)
    assert not queue.plan.kept_count and queue.plan.due_at == math.inf
