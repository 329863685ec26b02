from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spillway_connector.plan.retention import Retention
from spillway_connector.plan.sessions import SessionHint, expected_at
from spillway_connector.tiers.disk.slab.layout import SESSION_COLUMNS, SizeClassShape
from spillway_connector.tiers.disk.slab.policy import FREE, LIVE, MAIN, SMALL, WRITING, QueueArrays, S3Fifo
from spillway_connector.tiers.disk.slab.session_order import (
    REPLAN_SECONDS,
    SEVERAL,
    EntryArrays,
    SessionArrays,
    SessionOrder,
)
from spillway_connector.tiers.frame import PAGE_BYTES
from spillway_connector.tiers.tier import NO_TENANT

ANN, BOB = 1, 2
SLOTS, ROWS = 24, 64


class SizeClass:
    """A size class of `SLOTS` entries, evicted as SlotClaims does it. Keys are numbers; `orders` are processes."""

    def __init__(self, processes: int = 1) -> None:
        shape = SizeClassShape(2 * PAGE_BYTES, SLOTS, 1)
        self.queues = QueueArrays.zeros(SLOTS)
        self.policy = S3Fifo(self.queues, self.put)
        self.sessions = SessionArrays(**{c.name: np.zeros(shape.rows(c), c.dtype) for c in SESSION_COLUMNS})
        self.tenant = np.zeros(SLOTS, np.uint64)
        self.generation = np.zeros(SLOTS, np.uint32)
        self.entries = EntryArrays(self.queues.state, self.tenant, self.generation, self.queues.order)
        self.orders = [SessionOrder(self.sessions, self.entries, self.put) for _ in range(processes)]
        self.slots: dict[int, int] = {}
        self.now_s = 1000

    def put(self, name: str, position: int, value: int) -> None:
        arrays = self.sessions if hasattr(self.sessions, name) else self.queues
        getattr(arrays, name)[position] = value

    def uses(self, tenant: int, tag: int, keys: list[int], due: int | None, *, ended: bool = False) -> int:
        """A request of the session ends now: it used these keys, and says when the next comes."""
        order = self.orders[0]
        due_s = None if due is None else self.now_s + due
        late_s = None if due is None else self.now_s + due + 60
        row = order.use(tenant, tag, ended=ended, due_s=due_s, late_s=late_s, now_s=self.now_s)
        slots = np.array([self.slots.get(key, -1) for key in keys], np.int64)
        places = np.flatnonzero(slots >= 0)
        order.own(row, slots[places], places)
        return row

    def enter(self, key: int, tenant: int) -> None:
        slot = self.queues.state.tolist().index(FREE)
        self.generation[slot] += 1
        self.tenant[slot] = tenant
        self.policy.enter(slot, SMALL)
        self.queues.state[slot] = LIVE
        self.slots[key] = slot

    def turn(self, tenant: int, tag: int, keys: list[int], due: int | None, *, ended: bool = False) -> int:
        for key in keys:
            if key not in self.slots:
                self.enter(key, tenant)
        return self.uses(tenant, tag, keys, due, ended=ended)

    def victim(self, row: int | None = None, process: int = 0) -> int | None:
        """The key that leaves for another."""
        order = self.orders[process]
        slot = order.ended_entry(self.now_s)
        if slot is None:
            victim = self.policy.victim(len(self.slots))
            if victim is None:
                return None
            slot = order.in_place_of(victim, self.now_s, row)
            if slot != victim:
                self.policy.spare(victim)
        return self.leave(slot)

    def leave(self, slot: int) -> int:
        assert self.queues.state[slot] == LIVE
        self.queues.state[slot] = FREE
        self.policy.remove(slot)
        key = next(key for key, at in self.slots.items() if at == slot)
        del self.slots[key]
        return key


def test_the_end_of_the_session_that_comes_back_last_leaves_in_place_of_the_oldest():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1, 2], 30)
    size_class.turn(ANN, 11, [3, 4, 5], 300)
    size_class.turn(ANN, 12, [6, 7, 8], 60)
    assert [size_class.victim() for _ in range(5)] == [5, 4, 3, 8, 7]
    assert set(size_class.slots) == {0, 1, 2, 6}


def test_what_an_ended_session_alone_used_leaves_first_from_its_end():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1, 2, 3], 10)
    size_class.turn(ANN, 11, [0, 4, 5], 300)
    size_class.turn(BOB, 10, [6], None)
    size_class.uses(ANN, 10, [], None, ended=True)
    assert [size_class.victim() for _ in range(3)] == [3, 2, 1], "not what another session uses"
    size_class.turn(BOB, 10, [6], None, ended=True)  # the same name, of another tenant
    size_class.now_s += 1
    assert size_class.victim() == 6


def test_an_ended_session_that_goes_on_has_not_ended():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], 10, ended=True)
    size_class.turn(ANN, 11, [2, 3], 100)
    size_class.uses(ANN, 10, [0], 10)
    assert size_class.victim() == 3


def test_who_loads_what_an_ended_session_left_keeps_it():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], None, ended=True)
    size_class.turn(BOB, 10, [2], None)
    size_class.orders[0].use_without_session(size_class.slots[1])
    size_class.orders[0].use_without_session(size_class.slots[2])
    assert [size_class.victim() for _ in range(2)] == [0, 1], "1 in its own turn"


def test_what_a_session_takes_over_from_an_ended_one_leaves_in_its_own_turn_alone():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], None, ended=True)
    size_class.turn(ANN, 11, [0, 1], 300)
    size_class.turn(ANN, 12, [2], 10)
    size_class.now_s += 1
    assert size_class.victim() == 0, "not 1, the end of the session that comes back last"
    size_class.turn(ANN, 11, [], None, ended=True)
    assert size_class.victim() == 1, "nor is it left over from that one"


def test_a_tenant_gives_up_no_more_than_its_turn_whatever_others_announce():
    size_class = SizeClass()
    size_class.turn(BOB, 10, [0, 1], None)
    size_class.turn(ANN, 10, [2, 3], 1)
    size_class.turn(ANN, 11, [4], 2)
    assert [size_class.victim() for _ in range(3)] == [0, 1, 4]


def test_the_session_that_asks_gives_up_none_of_its_own_in_place_of_others():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], 10)
    row = size_class.turn(ANN, 11, [2, 3], 300)
    assert size_class.victim(row) == 1


def test_sessions_that_ended_without_a_word_give_before_those_that_go_on():
    """Each is expected soon when it ends: counted as such until it is surely late, it was kept before all others."""
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], 1)
    size_class.turn(ANN, 11, [2, 3], 1)
    size_class.now_s += 7
    size_class.turn(ANN, 12, [4, 5], 1)
    size_class.turn(ANN, 13, [6, 7], 13)
    assert [size_class.victim() for _ in range(3)] == [7, 6, 1], "6 s overdue, so expected in 12 s: before 13, after 1"
    size_class.now_s += 1
    size_class.uses(ANN, 12, [4, 5], 13)
    assert [size_class.victim() for _ in range(3)] == [0, 3, 2], "7 s overdue, so expected in 14 s"


idle_sessions = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=2, max_size=8, unique_by=lambda one: one[0]
)


@given(sessions=idle_sessions, at=st.integers(41, 130))
@settings(deadline=None)
def test_slabs_and_the_cpu_tier_choose_the_same_session(sessions, at):
    """Each session uses a chunk and announces its pause of at most 12 s, after which it is late in a minute; then
    each chunk has its turn to leave."""
    size_class, rows = SizeClass(), Retention[int]()
    for key, (end, pause) in enumerate(sorted(sessions)):
        hint = SessionHint(bytes([key]), return_seconds=pause)
        rows.begin_request(NO_TENANT, hint, end)
        rows.use(NO_TENANT, hint, [key], end)
        rows.end_request(NO_TENANT, hint, end)
        size_class.now_s = end
        size_class.turn(ANN, key, [key], pause)
    returns = [expected_at(end + pause, end + pause + 60, at) for end, pause in sessions]
    assume(len(set(returns)) == len(returns))
    size_class.now_s = at
    keys = {slot: key for key, slot in size_class.slots.items()}
    for slot, key in keys.items():
        plan = rows.plan_eviction(1, [key], lambda keys, /, *, of_session=False: iter([list(keys)]), at)
        order = SessionOrder(
            size_class.sessions, size_class.entries, size_class.put
        )  # without what others have planned
        assert plan is not None and plan[0] == [keys[order.in_place_of(slot, at, None)]]


def test_a_late_session_is_not_expected_and_gives_first():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], 10)
    size_class.turn(ANN, 11, [2, 3], 3000)
    size_class.now_s += 10 + 60 + 1
    size_class.turn(ANN, 12, [4], 5000)
    assert [size_class.victim() for _ in range(3)] == [0, 1, 4], "in its own turn; and then those that are expected"


def test_a_session_without_a_known_return_is_the_policys():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1], None)
    size_class.turn(ANN, 11, [2, 3], 300)
    assert [size_class.victim() for _ in range(2)] == [0, 1]


def test_room_of_its_own_comes_from_what_the_tenant_uses_later():
    size_class = SizeClass()
    size_class.turn(BOB, 10, [0], 10_000)
    size_class.turn(ANN, 10, [1, 2], 300)
    soon = size_class.turn(ANN, 11, [3], 60)
    last = size_class.turn(ANN, 12, [4], 301)
    order = size_class.orders[0]
    assert size_class.leave(order.own_room(soon, size_class.now_s)) == 4
    assert size_class.leave(order.own_room(soon, size_class.now_s)) == 2
    assert order.own_room(last, size_class.now_s) is None, "nothing of the tenant is used later"
    size_class.turn(BOB, 11, [5], None, ended=True)
    size_class.now_s += 1
    assert order.own_room(last, size_class.now_s) is None, "what ended is another tenant's"
    size_class.turn(ANN, 13, [6], None, ended=True)
    size_class.now_s += 1
    assert size_class.leave(order.own_room(last, size_class.now_s)) == 6


def test_sessions_of_one_process_count_in_another_that_planned_before():
    size_class = SizeClass(processes=2)
    size_class.turn(ANN, 10, [0, 1], 100)
    size_class.turn(ANN, 11, [2, 3], 50)
    assert size_class.victim(process=1) == 1
    size_class.now_s += 1
    size_class.uses(ANN, 11, [2, 3], 500)
    assert size_class.victim(process=1) == 3


def test_a_session_that_came_back_since_the_plan_gives_nothing():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0, 1, 2], 300)
    size_class.turn(ANN, 11, [3, 4], 200)
    assert size_class.victim() == 2
    size_class.uses(ANN, 10, [0, 1], 5)  # within the second of the plan
    assert size_class.victim() == 4


def test_an_entry_that_replaced_a_sessions_is_not_the_sessions():
    size_class = SizeClass()
    size_class.turn(ANN, 10, [0], 300)
    size_class.turn(ANN, 11, [1, 2], 200)
    assert size_class.victim() == 0
    size_class.enter(3, ANN)
    size_class.now_s += REPLAN_SECONDS
    assert size_class.victim() == 2


def test_at_the_bound_the_tenant_with_the_most_sessions_loses_its_least_recently_used():
    size_class = SizeClass()
    rows = {}
    for number in range(ROWS - 1):
        rows[number] = size_class.uses(ANN, number, [], 10)
        size_class.now_s += 1
    assert size_class.uses(BOB, 0, [], 10) not in rows.values()
    assert size_class.uses(BOB, 1, [], 10) == rows[0]
    assert size_class.orders[0].find(ANN, 0) is None
    assert size_class.orders[0].find(ANN, 1) == rows[1]
    ended = size_class.uses(BOB, 0, [], None, ended=True)
    assert size_class.uses(BOB, 2, [], 10) == ended, "what has ended before what has not"
    assert len(set(size_class.sessions.row_number.tolist())) == ROWS


def test_what_a_forgotten_session_used_is_nobodys():
    size_class = SizeClass()
    size_class.turn(ANN, 1, [0, 1], 500)
    for number in range(2, ROWS + 2):
        size_class.now_s += 1
        size_class.uses(ANN, number, [], 10)
    assert size_class.orders[0].find(ANN, 1) is None
    assert [size_class.victim() for _ in range(2)] == [0, 1]


names = st.integers(0, 3)
tenants = st.sampled_from([ANN, BOB])
dues = st.one_of(st.none(), st.integers(0, 200))
steps = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "evict", "own", "hit", "write", "wait", "end"]),
        tenants,
        names,
        dues,
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(steps=steps, hints=st.booleans())
@settings(deadline=None)
def test_only_entries_that_may_leave_do_and_only_of_the_tenant_whose_turn_it_is(steps, hints):
    size_class, plain = SizeClass(processes=2), SizeClass()
    writing: set[int] = set()
    for number, (action, tenant, name, due, amount) in enumerate(steps):
        order = size_class.orders[number % 2]
        keys = [1000 * tenant + 100 * name + at for at in range(amount)]
        if action in ("turn", "end"):
            for key in keys:
                if key not in size_class.slots and len(size_class.slots) < SLOTS:
                    size_class.enter(key, tenant)
                    if not hints:
                        plain.enter(key, tenant)
            if hints:
                size_class.uses(tenant, name, keys, due, ended=action == "end")
        elif action == "hit" and keys and keys[-1] in size_class.slots:
            for each in (size_class, plain) if not hints else (size_class,):
                slot = each.slots[keys[-1]]
                each.queues.frequency[slot] = min(3, each.queues.frequency[slot] + 1)
        elif action == "write" and keys and keys[-1] in size_class.slots:
            for each in (size_class, plain) if not hints else (size_class,):
                each.queues.state[each.slots[keys[-1]]] = WRITING
            writing.add(size_class.slots[keys[-1]])
        elif action == "wait":
            size_class.now_s += amount * 20
        elif action == "own" and (row := order.find(tenant, name)) is not None:
            slot = order.own_room(row, size_class.now_s)
            if slot is not None:
                assert size_class.tenant[slot] == tenant
                other = order._row_of(slot)
                assert other is not None
                later = order._due_of(other, size_class.now_s) > order._due_of(row, size_class.now_s)
                assert later or size_class.sessions.row_ended[other]
                size_class.leave(slot)
        elif action == "evict":
            before = size_class.queues.state.tolist().count(LIVE)
            has_ended = order.ended_entry(size_class.now_s)
            if has_ended is not None:
                size_class.leave(has_ended)
                continue
            turn = size_class.policy.victim(len(size_class.slots))
            assert (turn is None) == (not before), "as many as without sessions"
            if turn is None:
                if not hints:
                    assert plain.victim() is None
                continue
            slot = order.in_place_of(turn, size_class.now_s, None)
            assert slot not in writing
            assert size_class.tenant[slot] == size_class.tenant[turn]
            if slot != turn:
                size_class.policy.spare(turn)
                assert size_class.queues.queue[turn] == MAIN
            key = size_class.leave(slot)
            if not hints:
                assert key == plain.victim(), "without hints the order is the policy's"


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_damage_in_the_sessions_changes_the_order_and_nothing_else(data):
    size_class = SizeClass()
    for key in range(12):
        size_class.enter(key, ANN if key % 2 else BOB)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size_class.turn(ANN, 10, [1, 3, 5], 100)
    for name in ("row_number", "row_due_s", "row_late_s", "row_ended", "slot_generation", "slot_session", "slot_place"):
        array = getattr(size_class.sessions, name)
        if data.draw(st.booleans()):
            high = int(np.iinfo(array.dtype).max)
            array[:] = rng.integers(0, data.draw(st.sampled_from([2, 80, high])), len(array), dtype=array.dtype)
    left = set()
    while (key := size_class.victim()) is not None:
        left.add(key)
        size_class.now_s += 1
    assert left == set(range(12))


@pytest.mark.parametrize("life", [0, 1, (1 << 20) - 2])
def test_a_sessions_number_is_neither_nobodys_nor_severals(life: int):
    size_class = SizeClass()
    for row in range(ROWS):
        size_class.sessions.row_number[row] = life << 12 | row
        size_class.sessions.row_tenant[row] = ANN
    row = size_class.turn(BOB, 7, [0], 10)
    number = int(size_class.sessions.row_number[row])
    assert 0 < number != SEVERAL and number != life << 12 | row
    assert size_class.orders[0].is_expected(size_class.slots[0], size_class.now_s)
