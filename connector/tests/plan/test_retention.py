from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import filterfalse, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan import retention
from spillway_connector.plan.retention import Retention
from spillway_connector.plan.sessions import SessionHint

ALICE, BOB = b"alice", b"bob"


def batches(keys: Iterable[str]) -> Iterator[list[str]]:
    """All of them may leave."""
    each = iter(keys)
    return iter(lambda: list(islice(each, 3)), [])


class LruTier:
    """A tier of `size` chunks in LRU's order, whose evictions Retention plans. Keys name their tenant."""

    def __init__(self, size: int, sessions_max: int = 100) -> None:
        self.size = size
        self.order: OrderedDict[str, None] = OrderedDict()
        self.pinned: set[str] = set()
        self.retention: Retention[str] = Retention(sessions_max)

    def touch(self, tenant: bytes, hint: SessionHint | None, keys: list[str], now: float) -> None:
        here = [key for key in keys if key in self.order]
        for key in reversed(here):
            self.order.move_to_end(key)
        self.use(tenant, hint, here, now)

    def use(self, tenant: bytes, hint: SessionHint | None, keys: list[str], now: float) -> None:
        if hint is None:
            self.retention.use_without_session(keys)
        else:
            self.retention.use(tenant, hint, keys, now)

    def store(self, tenant: bytes, hint: SessionHint | None, keys: list[str], now: float) -> list[str] | None:
        """Store chunks and return those that were evicted; None, with nothing changed, if too few chunks may leave."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self.order]
        count = len(self.order) + len(wanted) - self.size
        evicted: list[str] = []
        if count > 0:
            asking = None if hint is None else (tenant, hint.session)
            kept = set(keys)
            plan = self.retention.plan_eviction(
                count,
                self.order,
                lambda keys, /, *, of_session=False: batches(filterfalse((self.pinned | kept).__contains__, keys)),
                now,
                asking,
            )
            if plan is None:
                return None
            evicted, spared = plan
            for key in spared:
                self.order.move_to_end(key)
            for key in evicted:
                del self.order[key]
            self.retention.forget(evicted)
        self.order.update(dict.fromkeys(wanted))
        self.use(tenant, hint, wanted, now)
        return evicted

    def turn(self, tenant: bytes, hint: SessionHint, keys: list[str], begin: float, end: float) -> list[str] | None:
        self.retention.begin_request(tenant, hint, begin)
        self.touch(tenant, hint, keys, begin)
        evicted = self.store(tenant, hint, keys, begin)
        self.retention.end_request(tenant, hint, end)
        return evicted


def chunks(name: str, count: int, first: int = 0) -> list[str]:
    return [f"{name}{number}" for number in range(first, first + count)]


def hint(name: str, returns: float | None = None, *, ended: bool = False) -> SessionHint:
    return SessionHint(name.encode(), ended, returns)


def test_without_sessions_the_order_is_lrus():
    tier = LruTier(4)
    tier.store(ALICE, None, chunks("a", 4), 0.0)
    tier.touch(ALICE, None, ["a0"], 1.0)

    assert tier.store(ALICE, None, chunks("b", 2), 2.0) == ["a1", "a2"]


def test_the_end_of_the_session_that_comes_back_last_leaves_first():
    tier = LruTier(6)
    tier.turn(ALICE, hint("soon", 10.0), chunks("s", 3), 0.0, 1.0)  # the least recently used
    tier.turn(ALICE, hint("late", 500.0), chunks("l", 3), 2.0, 3.0)

    assert tier.store(ALICE, None, chunks("x", 2), 4.0) == ["l2", "l1"]


def test_what_only_an_ended_session_used_leaves_first_and_from_its_end():
    tier = LruTier(6)
    tier.turn(ALICE, hint("other"), ["common", *chunks("o", 2)], 0.0, 1.0)
    tier.turn(ALICE, hint("over", ended=True), ["common", *chunks("e", 3)], 2.0, 3.0)

    assert tier.store(BOB, None, chunks("x", 2), 4.0) == ["e2", "e1"]
    assert tier.store(BOB, None, ["y"], 5.0) == ["e0"]
    assert tier.retention.sessions_ended == 1


def test_a_chunk_of_an_ended_session_that_is_used_again_is_not_left_over():
    tier = LruTier(4)
    tier.turn(ALICE, hint("over", ended=True), chunks("e", 2), 0.0, 1.0)
    tier.store(ALICE, None, chunks("a", 2), 2.0)
    tier.touch(ALICE, None, chunks("e", 2), 3.0)

    assert tier.store(ALICE, None, ["x"], 4.0) == ["a0"]


def test_chunks_stored_behind_the_end_of_a_session_leave_first():
    tier = LruTier(4)
    tier.turn(ALICE, hint("over", ended=True), chunks("e", 2), 0.0, 1.0)
    tier.store(ALICE, hint("over", ended=True), ["e2"], 1.5)
    tier.store(ALICE, None, ["a"], 2.0)

    assert set(tier.store(ALICE, None, chunks("x", 3), 4.0) or ()) == {"e0", "e1", "e2"}


def test_a_session_that_says_nothing_is_expected_after_its_own_pause():
    tier = LruTier(6)
    tier.turn(ALICE, hint("steady"), chunks("s", 3), 0.0, 1.0)
    tier.turn(ALICE, hint("steady"), chunks("s", 3), 11.0, 12.0)  # expected back at 22
    tier.turn(ALICE, hint("far", 300.0), chunks("f", 3), 13.0, 14.0)

    assert tier.store(BOB, None, ["x"], 15.0) == ["f2"]


def test_a_session_that_never_came_back_is_not_expected():
    tier = LruTier(6)
    tier.turn(ALICE, hint("once"), chunks("o", 3), 0.0, 1.0)
    tier.turn(ALICE, hint("far", 300.0), chunks("f", 3), 2.0, 3.0)

    assert tier.store(BOB, None, ["x"], 4.0) == ["o0"]  # its turn, and it gives none of `far` instead


def agents(tier: LruTier, count: int, requests: int, name: str = "agent") -> float:
    """Sessions, one after the other, that end without a word after so many requests, a second apart; the time now."""
    now = 0.0
    for number in range(count):
        for request in range(requests):
            tier.turn(ALICE, hint(f"{name}{number}"), chunks(f"{name}{number}-", 1 + request), now, now + 1.0)
            now += 2.0
        now += 60.0
    return now


def test_sessions_have_ended_after_as_many_requests_as_their_tenants_others_had():
    tier = LruTier(12)
    now = agents(tier, 6, 3)
    tier.store(BOB, None, chunks("b", 12), now)  # nothing of those is left
    for request in range(3):
        tier.turn(ALICE, hint("done"), chunks("d", 1 + request), now, now + 1.0)
        if request < 2:
            tier.turn(ALICE, hint("goes on"), chunks("g", 1 + request), now + 1.0, now + 1.5)
        now += 2.0
    assert tier.store(ALICE, hint("done"), ["d3"], now) == ["d2"], "given up by the device behind the end"

    assert tier.store(BOB, None, chunks("x", 3), now) == ["d1", "d0", "d3"]


def test_a_session_that_goes_on_all_the_same_is_kept_again():
    tier = LruTier(6)
    now = agents(tier, 6, 1)
    tier.store(BOB, None, chunks("b", 6), now)
    tier.turn(ALICE, hint("more"), chunks("m", 2), now, now + 1.0)
    tier.turn(ALICE, hint("more"), chunks("m", 2), now + 2.0, now + 3.0)
    tier.turn(BOB, hint("far", 300.0), chunks("f", 2), now + 3.0, now + 4.0)

    assert tier.store(BOB, None, ["x"], now + 4.0) == ["b4"]
    assert tier.retention.gone(4, tier.order, batches, now + 4.0) == []


def test_what_a_session_left_over_leaves_in_its_own_turn_once_it_has_another_request():
    tier = LruTier(6)
    now = agents(tier, 6, 1)
    tier.store(BOB, None, chunks("b", 6), now)
    tier.turn(ALICE, hint("more"), chunks("m", 2), now, now + 1.0)
    assert list(tier.retention.left_over) == ["m1", "m0"]
    tier.retention.begin_request(ALICE, hint("more"), now + 2.0)

    assert tier.retention.gone(2, tier.order, batches, now + 2.0) == []
    assert tier.store(BOB, None, ["x"], now + 2.0) == ["b2"]
    assert not tier.retention.left_over, "not looked at again"


def test_turns_that_each_have_another_name_have_not_ended():
    tier, now = LruTier(40), 0.0
    for number in range(8):  # a conversation that is not recognised as one
        for turn in range(3):
            tier.turn(ALICE, hint(f"{number}-{turn}"), chunks(f"c{number}-", 2 + turn), now, now + 1.0)
            now += 2.0
        now += 60.0
    tier.turn(ALICE, hint("new"), chunks("n", 2), now, now + 1.0)

    left = tier.store(BOB, None, chunks("x", 20), now + 2.0)
    assert left is not None and not {*chunks("n", 2)} & {*left}


def test_what_several_sessions_used_in_turn_is_not_left_over_from_the_last_of_them():
    tier = LruTier(40)
    now = agents(tier, 6, 1)
    for name in ("first", "second", "third"):
        tier.turn(ALICE, hint(name), ["common", name], now, now + 1.0)
        now += 60.0

    left = tier.store(BOB, None, chunks("x", 34), now)
    assert left is not None and "common" not in left and {"second", "third"} <= {*left}


def test_a_session_that_is_far_too_late_has_ended():
    tier = LruTier(6)
    tier.turn(ALICE, hint("lost", 1.0), chunks("l", 3), 0.0, 1.0)
    now = 63.0  # more than a minute late
    tier.turn(ALICE, hint("alive", 300.0), chunks("a", 3), now, now)

    assert tier.store(BOB, None, ["x"], now) == ["l0"]  # its turn, unlike `alive`, which comes back last


def test_the_oldest_chunks_of_sessions_that_are_gone_are_found_up_to_the_first_that_is_not():
    tier = LruTier(20)
    tier.turn(ALICE, hint("gone", 1.0), [*chunks("g", 3), "common"], 0.0, 1.0)
    tier.store(ALICE, None, chunks("u", 2), 2.0)  # of no session
    tier.turn(ALICE, hint("also", 1.0), chunks("b", 2), 3.0, 4.0)
    tier.turn(BOB, hint("alive", 60.0), ["common", *chunks("a", 2)], 5.0, 6.0)
    tier.turn(ALICE, hint("gone too", 1.0), chunks("c", 2), 7.0, 8.0)
    find = tier.retention.gone

    assert find(9, tier.order, lambda keys: batches(filter("g1".__ne__, keys)), 30.0) == ["g0", "g2", "b0", "b1"]
    assert find(1, tier.order, batches, 30.0) == ["g0"]
    assert find(9, tier.order, batches, 2.0) == []

    tier.turn(ALICE, hint("alive", ended=True), chunks("e", 2), 31.0, 32.0)
    assert find(3, tier.order, batches, 33.0) == ["e1", "e0", "g0"], "those that have ended leave first"


def found_in_a_closed_loop(size: int, *, named: bool) -> float:
    """The share of chunks found by 16 agents whose sessions end without a word: 8 chunks and one more in each of 12
    turns, answers of 2.5 s, pauses of about 1 s, and then another session begins."""
    rng = random.Random(1)
    tier = LruTier(size)
    place_of_session = {place: (0, rng.randrange(12)) for place in range(16)}  # which session, and its turn
    events = [(8 * rng.random(), place, False) for place in place_of_session]
    heapq.heapify(events)
    asked = found = 0
    while events and (event := heapq.heappop(events))[0] < 150.0:
        now, place, is_end = event
        session, turn = place_of_session[place]
        says = hint(f"{place}-{session}") if named else None
        if is_end:
            if says is not None:
                tier.retention.end_request(ALICE, says, now)
            place_of_session[place] = (session, turn + 1) if turn < 11 else (session + 1, 0)
            heapq.heappush(events, (now + min(4.0, rng.expovariate(1.0)), place, False))
            continue
        if says is not None:
            tier.retention.begin_request(ALICE, says, now)
        keys = chunks(f"{place}-{session}-", 8 + turn)
        asked += len(keys)
        found += next((at for at, key in enumerate(keys) if key not in tier.order), len(keys))
        tier.touch(ALICE, says, keys, now)
        assert tier.store(ALICE, says, keys, now) is not None
        heapq.heappush(events, (now + 2.5, place, True))
    return found / asked


@pytest.mark.parametrize("size", [180, 220, 280])
def test_sessions_that_end_without_a_word_do_not_crowd_out_those_that_go_on(size: int):
    """Each is expected soon when it ends: counted as such until it is surely late, they were kept before all others."""
    assert found_in_a_closed_loop(size, named=True) >= found_in_a_closed_loop(size, named=False) - 0.01


def test_a_session_whose_request_waits_comes_back_before_all_others():
    """The request of such a session has begun: it uses the chunks when it is admitted, not after another pause."""
    tier = LruTier(6)
    tier.turn(ALICE, hint("waits", 60.0), chunks("w", 2), 0.0, 9.0)
    tier.turn(ALICE, hint("idle", 60.0), chunks("i", 2), 10.0, 11.0)
    tier.store(BOB, None, chunks("x", 2), 12.0)
    tier.retention.begin_request(ALICE, hint("waits", 60.0), 20.0)
    assert tier.store(BOB, None, ["y"], 21.0) == ["i1"]
    tier.touch(ALICE, hint("waits", 60.0), chunks("w", 2), 22.0)
    tier.touch(ALICE, hint("idle", 60.0), chunks("i", 1), 23.0)
    tier.touch(BOB, None, ["x0", "x1", "y"], 24.0)
    assert tier.store(BOB, None, ["z"], 25.0) == ["w1"], "admitted, it is used last"


def test_what_is_stored_behind_a_sessions_request_does_not_make_it_come_back_later():
    """The device gives chunks up long after the request has ended, whose session may not come back at all."""
    tier = LruTier(5)
    tier.turn(ALICE, hint("gone", 1.0), chunks("g", 2), 0.0, 1.0)
    tier.turn(ALICE, hint("goes on", 30.0), chunks("o", 2), 20.0, 21.0)
    tier.store(ALICE, hint("gone", 1.0), ["g2"], 22.0)
    assert tier.store(BOB, None, ["x"], 22.0) == ["g2"], "expected 20 s ago, so in 40 s"


def test_a_session_with_regular_pauses_is_soon_late():
    tier = LruTier(6)
    for at in range(12):
        tier.turn(ALICE, hint("regular"), chunks("r", 3), 20.0 * at, 20.0 * at + 1.0)
    tier.turn(ALICE, hint("far", 300.0), chunks("f", 3), 222.0, 223.0)

    assert tier.store(BOB, None, ["x"], 250.0) == ["f2"], "it is 10 s late"
    assert tier.store(BOB, None, ["y"], 260.0) == ["r1"], "it is 20 s late, and r1 is the oldest"


def test_the_last_to_come_back_is_the_one_whose_request_still_runs():
    tier = LruTier(12)
    names = ("idle", "running", "third", "fourth")
    for begin in (0.0, 11.0):
        for name in names:
            tier.turn(ALICE, hint(name), chunks(name, 3), begin, begin + 1.0)
    tier.retention.begin_request(ALICE, hint("running"), 12.0)
    tier.touch(ALICE, hint("running"), chunks("running", 3), 12.0)

    assert tier.store(BOB, None, ["x"], 20.0) == ["running2"], "it pauses for 10 s once it has ended, and `idle` is due"


def test_of_few_sessions_that_announce_nothing_the_oldest_chunk_leaves():
    for count in range(1, 7):
        tier = LruTier(3 * count)
        for begin in (0.0, 11.0):
            for number in range(count):
                tier.turn(ALICE, hint(f"{number}"), chunks(f"{number}-", 3), begin + number, begin + number + 1.0)
        tier.retention.begin_request(ALICE, hint("0"), 18.0)
        tier.touch(ALICE, hint("0"), chunks("0-", 3), 18.0)
        spares = count >= 4
        oldest = "1-2" if count > 1 else "0-2"
        assert tier.store(BOB, None, ["x"], 19.0) == ["0-2" if spares else oldest]


@pytest.mark.parametrize("agents", [4, 6])
def test_sessions_of_which_nothing_is_left_in_the_tier_count_too(agents: int):
    """The tier holds two and a half of them: all would miss everything if the oldest chunks left."""
    tier, found, now = LruTier(100), 0, 0.0
    for turn in range(20 * agents):
        keys = chunks(f"{turn % agents}-", 40)
        found += sum(key in tier.order for key in keys)
        tier.turn(ALICE, hint(f"{turn % agents}"), keys, now, now + 1.0)
        now += 2.0
    assert found > 20 * agents * 40 // 5


def test_a_request_never_pushes_out_the_chunks_before_those_that_it_stores():
    tier = LruTier(6)
    tier.turn(ALICE, hint("soon", 1.0), chunks("s", 3), 0.0, 1.0)
    later = hint("late", 900.0)
    tier.retention.begin_request(ALICE, later, 2.0)
    tier.store(ALICE, later, chunks("l", 3), 2.0)

    assert tier.store(ALICE, later, chunks("l", 1, first=3), 3.0) == ["s2"]


def test_a_shared_chunk_outlives_each_of_its_sessions():
    tier = LruTier(5)
    tier.turn(ALICE, hint("one", 50.0), ["common", "a"], 0.0, 1.0)
    tier.turn(ALICE, hint("two", 90.0), ["common", "b"], 2.0, 3.0)
    tier.turn(ALICE, hint("one", ended=True), ["common"], 4.0, 5.0)
    tier.store(BOB, None, ["x", "y"], 6.0)

    assert tier.store(BOB, None, ["z"], 7.0) == ["a"]
    assert tier.store(BOB, None, ["w"], 8.0) == ["b"]


def test_at_the_bound_the_least_recently_used_session_is_followed_no_longer():
    tier = LruTier(4, sessions_max=1)
    tier.turn(ALICE, hint("one", 10.0), chunks("a", 2), 0.0, 1.0)
    tier.turn(ALICE, hint("two", 500.0), chunks("b", 2), 2.0, 3.0)

    assert tier.retention.retained_chunks == 2
    assert tier.store(BOB, None, ["x"], 4.0) == ["a0"]  # by age: nothing is known of the session any more


def test_a_tenant_with_many_sessions_displaces_none_of_another():
    tier = LruTier(20, sessions_max=4)
    tier.turn(BOB, hint("soon", 5.0), chunks("b", 2), 0.0, 1.0)
    tier.turn(BOB, hint("late", 900.0), chunks("c", 2), 2.0, 3.0)
    for number in range(8):
        tier.turn(ALICE, hint(f"{number}", 5.0), chunks(f"a{number}-", 2), 4.0, 5.0)

    assert tier.store(BOB, None, ["x"], 6.0) == ["c1"]


def test_only_the_tenant_whose_turn_it_is_gives_up_a_chunk():
    tier = LruTier(4)
    tier.turn(ALICE, hint("soon", 5.0), chunks("a", 2), 0.0, 1.0)
    tier.turn(BOB, hint("late", 900.0), chunks("b", 2), 2.0, 3.0)

    assert tier.store(b"carol", None, ["x"], 4.0) == ["a1"]


def test_a_spared_chunk_has_had_its_turn():
    tier = LruTier(6)
    tier.turn(ALICE, hint("soon", 10.0), chunks("s", 2), 0.0, 1.0)
    tier.turn(ALICE, hint("late", 500.0), chunks("l", 2), 2.0, 3.0)
    tier.store(BOB, None, chunks("x", 2), 4.0)

    assert [tier.store(BOB, None, [new], 5.0) for new in ("y0", "y1", "y2")] == [["l1"], ["l0"], ["x0"]]


def test_a_chunk_that_two_sessions_use_leaves_in_its_own_turn_alone():
    tier = LruTier(3)
    tier.turn(ALICE, hint("late", 900.0), ["c", "d"], 0.0, 1.0)
    tier.turn(ALICE, hint("soon", 50.0), ["c", "d", "e"], 2.0, 3.0)

    assert tier.store(BOB, None, ["x"], 4.0) == ["e"]


def test_a_session_that_is_far_too_late_gives_up_its_chunks_for_others():
    tier = LruTier(6)
    tier.turn(ALICE, hint("soon", 500.0), chunks("s", 3), 0.0, 1.0)
    tier.turn(ALICE, hint("lost", 1.0), chunks("l", 3), 2.0, 3.0)

    assert tier.store(BOB, None, ["x"], 100.0) == ["l2"]


def test_a_chunk_of_an_ended_session_that_another_uses_is_not_left_over():
    tier = LruTier(4)
    tier.turn(ALICE, hint("over", ended=True), chunks("e", 2), 0.0, 1.0)
    tier.store(ALICE, None, chunks("a", 2), 2.0)
    tier.turn(ALICE, hint("new", 5.0), chunks("e", 2), 3.0, 4.0)

    assert tier.store(BOB, None, ["x"], 5.0) == ["a0"]


def test_one_question_tells_which_of_many_chunks_may_leave():
    """The questions do not grow with the chunks, because an eviction is planned on the scheduler's thread."""
    retention, asked = Retention[str](), []
    for name in "abcdefgh":
        says = hint(name, 10.0)
        retention.begin_request(ALICE, says, 0.0)
        retention.use(ALICE, says, chunks(name, 500), 0.0)
        retention.end_request(ALICE, says, 1.0)
    oldest_first = [key for name in "abcdefgh" for key in chunks(name, 500)]

    def leavable(keys: Iterable[str], /, *, of_session: bool = False) -> Iterator[list[str]]:
        asked.append(of_session)
        return batches(keys)

    plan = retention.plan_eviction(1000, oldest_first, leavable, 2.0)
    assert plan is not None and len(plan[0]) == 1000
    assert asked == [False, True, True], "of the oldest, and of two sessions whose chunks leave in their place"


def test_none_where_too_few_may_leave():
    tier = LruTier(3)
    tier.turn(ALICE, hint("one", 10.0), chunks("a", 3), 0.0, 1.0)
    tier.pinned = {"a0", "a2"}

    assert tier.store(ALICE, None, chunks("x", 2), 2.0) is None
    assert tier.store(ALICE, None, ["x"], 2.0) == ["a1"]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_seconds_that_are_no_time_announce_nothing(seconds: float):
    tier = LruTier(4)
    tier.turn(ALICE, hint("one", seconds), chunks("a", 2), 0.0, 1.0)
    tier.turn(ALICE, hint("two", 500.0), chunks("b", 2), 2.0, 3.0)

    assert tier.store(BOB, None, ["x"], 4.0) == ["a0"]


def test_what_is_stored_end_first_leaves_end_first():
    """The device gives up the end of a prompt first, so that is stored first; without its head a prefix is useless."""
    tier = LruTier(6)
    later = hint("later", 500.0)
    tier.retention.begin_request(ALICE, later, 0.0)
    tier.retention.will_store(ALICE, later, chunks("l", 4))
    tier.retention.end_request(ALICE, later, 1.0)
    for late in (["l3", "l2"], ["l1", "l0"]):
        tier.store(ALICE, later, late, 2.0)
    tier.turn(ALICE, hint("soon", 10.0), chunks("s", 2), 3.0, 4.0)

    assert tier.store(BOB, None, ["x"], 5.0) == ["l3"]
    assert tier.store(ALICE, later, ["l3"], 6.0) == ["s1"], "it has been stored once more"
    assert tier.store(BOB, None, ["y", "z"], 7.0) == ["l3", "l2"], "and has its place again"


def test_a_long_prompt_that_is_stored_end_first_leaves_end_first():
    """The order holds for a prompt of any length: a step announces what it computes, and the device gives up some
    blocks at a time."""
    tier = LruTier(5_000)
    later, prompt = hint("later", 500.0), chunks("l", 5_000)
    tier.retention.begin_request(ALICE, later, 0.0)
    for computed in range(0, 5_000, 500):
        tier.retention.will_store(ALICE, later, prompt[computed : computed + 500])
    tier.retention.end_request(ALICE, later, 1.0)
    for end in range(5_000, 0, -25):
        tier.store(ALICE, later, prompt[end - 25 : end], 2.0)

    assert tier.store(BOB, None, chunks("x", 4_000), 3.0) == prompt[:-4_001:-1]


class CountedKey(str):
    """Counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        CountedKey.lookups += 1
        return super().__hash__()

    __eq__ = str.__eq__


def test_a_session_whose_end_has_left_is_not_searched_for_it():
    tier = LruTier(10_000)
    soon, late = hint("soon", 5.0), hint("late", 500.0)
    tier.turn(ALICE, soon, [CountedKey(key) for key in chunks("s", 5_000)], 0.0, 1.0)
    tier.turn(ALICE, late, [CountedKey(key) for key in chunks("l", 5_000)], 0.0, 1.0)
    tier.store(BOB, None, chunks("x", 4_000), 2.0)
    CountedKey.lookups = 0

    assert tier.store(BOB, None, ["y"], 3.0) == ["l999"]
    assert CountedKey.lookups < 500


def test_places_of_chunks_that_are_gone_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "_ABSENT_MAX", 100)
    tier = LruTier(4)
    long_ago, now = hint("long ago", 5.0), hint("now", 5.0)
    tier.turn(ALICE, long_ago, ["l"], 0.0, 0.0)
    tier.retention.will_store(ALICE, long_ago, chunks("m", 50))
    tier.retention.begin_request(ALICE, now, 0.0)
    tier.retention.will_store(ALICE, now, chunks("n", 40))
    places = {name: tier.retention._sessions.get((ALICE, name)).places for name in (b"long ago", b"now")}
    assert [len(each) for each in places.values()] == [51, 40]
    tier.retention.will_store(ALICE, now, chunks("o", 10))
    places = {name: tier.retention._sessions.get((ALICE, name)).places for name in (b"long ago", b"now")}
    assert [*places[b"long ago"]] == ["l"]
    assert [*places[b"now"]] == chunks("n", 40) + chunks("o", 10), "those of the session used longest ago went first"

    session = tier.retention._sessions.get((ALICE, b"now"))
    for number in range(1_000):
        tier.store(ALICE, now, [f"a{number}"], 0.0)
        assert len(session.places) <= 150 + 4
        assert session.keys.keys() <= session.places.keys()
    tier.retention.clear()
    assert not session.places


def test_an_emptied_tier_retains_nothing():
    tier = LruTier(4)
    tier.turn(ALICE, hint("one", 5.0), chunks("a", 2), 0.0, 1.0)
    tier.turn(ALICE, hint("two", ended=True), chunks("b", 2), 0.0, 1.0)
    tier.retention.clear()

    assert tier.retention.is_idle


# Keys begin with their tenant's letter: no chunk belongs to two tenants, whose salts are in its hash.
tenants = st.sampled_from([ALICE, BOB])
hints = st.one_of(
    st.none(),
    st.builds(
        SessionHint,
        st.sampled_from([b"1", b"2", b"3"]),
        st.booleans(),
        st.one_of(st.none(), st.floats(0, 1e6), st.just(float("inf"))),
    ),
)
actions = st.lists(
    st.tuples(
        st.sampled_from(["begin", "touch", "store", "end", "pin", "unpin"]),
        tenants,
        hints,
        st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=4),
        st.floats(0, 100),
    ),
    max_size=60,
)


@given(actions)
def test_a_tenant_gives_up_a_chunk_only_in_its_own_turn(
    steps: list[tuple[str, bytes, SessionHint | None, list[int], float]],
):
    tier, now = LruTier(8, sessions_max=4), 0.0
    for action, tenant, session, numbers, seconds in steps:
        now += seconds
        keys = [f"{tenant.decode()[0]}{number}" for number in numbers]
        if action == "pin":
            tier.pinned.update(keys)
        elif action == "unpin":
            tier.pinned.difference_update(keys)
        elif action == "touch":
            tier.touch(tenant, session, keys, now)
        elif action == "store":
            before = list(tier.order)
            ended = tier.retention._ended.items()
            left_over = {key for key, before_it in ended if before_it is None or not before_it.running}
            evicted = tier.store(tenant, session, keys, now)
            free = [key for key in before if key not in tier.pinned and key not in keys]
            wanted = [key for key in keys if key not in before]
            needed = max(0, len(before) + len(wanted) - tier.size)
            if evicted is None:
                assert len(free) < needed
                assert list(tier.order) == before
                continue
            assert len(evicted) == len(set(evicted)) == needed
            assert set(evicted) <= set(free)
            # Beyond what ended sessions left, each tenant gives up as many as LRU takes of it.
            taken = [key for key in evicted if key not in left_over]
            by_age = [key for key in free if key not in left_over][: len(taken)]
            assert Counter(key[0] for key in taken) == Counter(key[0] for key in by_age)
        elif session is not None and action == "begin":
            tier.retention.begin_request(tenant, session, now)
        elif session is not None:
            tier.retention.end_request(tenant, session, now)
        assert len(tier.order) <= tier.size
        assert tier.retention.retained_chunks <= len(tier.order)


@given(actions)
def test_what_it_follows_is_in_the_tier(steps: list[tuple[str, bytes, SessionHint | None, list[int], float]]):
    tier, now = LruTier(8, sessions_max=2), 0.0
    for action, tenant, session, numbers, seconds in steps:
        now += seconds
        keys = [f"{tenant.decode()[0]}{number}" for number in numbers]
        if action == "touch":
            tier.touch(tenant, session, keys, now)
        elif action == "store":
            tier.store(tenant, session, keys, now)
        elif session is not None and action == "pin":
            tier.retention.will_store(tenant, session, keys)
        elif session is not None and action == "begin":
            tier.retention.begin_request(tenant, session, now)
        elif session is not None and action == "end":
            tier.retention.end_request(tenant, session, now)
        retention = tier.retention
        users: dict[str, set[object]] = {}
        for followed in retention._sessions.values():
            assert followed.keys.keys() <= followed.places.keys()
            assert list(followed.ordered()) == [key for key in followed.places if key in followed.keys]
            for key in followed.keys:
                users.setdefault(key, set()).add(followed)
        assert users == {key: set(kept) if isinstance(kept, dict) else {kept} for key, kept in retention._users.items()}
        assert all(retention._users.values()), "a chunk that no session uses is not followed"
        assert retention._ended.keys().isdisjoint(users)
        assert {*users, *retention._ended} <= tier.order.keys()
        assert len(retention._sessions) <= 2
        assert retention._sessions._tenant_sessions == Counter(name[0] for name in retention._sessions._sessions)
