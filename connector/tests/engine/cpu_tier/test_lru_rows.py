"""Our rows against upstream's manager: the same operations, the same answers, the same rows, the same evictions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.plan.waiting import KEPT_SHARE_MAX, Turn
from spillway_connector.testing.generation import HIT, MISS, make_cpu_tier
from spillway_connector.testing.memory import unnamed_region

ROWS = 6
CONTEXT = ReqContext(req_id="r")
ACTIONS = ("lookup", "touch", "store", "written", "lost", "read", "let go")
steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=4)), max_size=60
)


def key(number: int) -> bytes:
    return bytes([number]) * 36


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = unnamed_region(ROWS, 4096)
    yield region
    region.cleanup()


class Twin:
    """Both managers, driven as the scheduler may drive them."""

    def __init__(self, region: HostRegion, policy: str) -> None:
        self.ours: CpuTier = make_cpu_tier(ROWS, region, policy, enable_events=True)
        self.theirs = CPUOffloadingManager(ROWS, cache_policy=policy, enable_events=True)
        self.writing: set[bytes] = set()
        self.reading: list[bytes] = []

    def do(self, action: str, keys: list[bytes]) -> None:
        if action == "lookup":
            for key in keys:
                assert self.ours.lookup(key, CONTEXT) is self.theirs.lookup(key, CONTEXT)
        elif action == "touch":
            self.ours.touch(keys, CONTEXT)
            self.theirs.touch(keys, CONTEXT)
        elif action == "store":
            mine, other = self.ours.prepare_store(keys, CONTEXT), self.theirs.prepare_store(keys, CONTEXT)
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert mine.keys_to_store == other.keys_to_store
                assert mine.evicted_keys == other.evicted_keys
                assert mine.store_spec.block_ids.tolist() == other.store_spec.block_ids.tolist()
                self.writing.update(mine.keys_to_store)
        elif action in ("written", "lost"):
            done = [key for key in keys if key in self.writing]
            self.writing.difference_update(done)
            self.ours.complete_store(done, CONTEXT, action == "written")
            self.theirs.complete_store(done, CONTEXT, action == "written")
        elif action == "read":
            ready = [key for key in keys if self.theirs.lookup(key, CONTEXT) is HIT]
            mine, other = self.ours.prepare_load(ready, CONTEXT), self.theirs.prepare_load(ready, CONTEXT)
            assert mine.block_ids.tolist() == other.block_ids.tolist()
            assert mine.block_ids.dtype == other.block_ids.dtype
            self.reading += ready
        else:
            done = [key for key in keys if key in self.reading]
            for key in done:
                self.reading.remove(key)
            self.ours.complete_load(done, CONTEXT)
            self.theirs.complete_load(done, CONTEXT)

    def their_free_rows(self) -> int:
        counted = self.theirs
        return counted._get_num_free_blocks() if generation() is Generation.V023 else counted._get_num_free_chunks()

    def check(self) -> None:
        everyone = [key(number) for number in range(12)]
        answers = [self.theirs.lookup(one, CONTEXT) for one in everyone]
        assert [self.ours.lookup(one, CONTEXT) for one in everyone] == answers
        assert self.ours.ready == {one for one, answer in zip(everyone, answers, strict=True) if answer is HIT}
        resident = {one for one, answer in zip(everyone, answers, strict=True) if answer is not MISS}
        assert set(self.ours.resident) == resident
        assert self.ours.free_rows() == self.their_free_rows()
        assert self.ours.used_rows() == ROWS - self.their_free_rows()
        assert list(self.ours.take_events()) == list(self.theirs.take_events())


@pytest.mark.parametrize("policy", ["lru", "arc"])
@settings(
    max_examples=3 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=steps)
def test_it_decides_as_upstream_does(region: HostRegion, policy: str, steps: list[tuple[str, list[int]]]):
    twin = Twin(region, policy)
    for action, numbers in steps:
        twin.do(action, [key(number) for number in numbers])
    twin.check()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_change_of_an_answer_is_logged(region: HostRegion, policy: str):
    tier = make_cpu_tier(ROWS, region, policy, enable_events=False)

    def changed_by(action) -> set[int]:
        since = tier.changed_chunks.position
        action()
        changed = tier.changed_chunks.since(since)
        return {number for number in range(12) if changed is None or key(number) in changed}

    first = [key(number) for number in range(ROWS)]
    assert changed_by(lambda: tier.prepare_store(first, CONTEXT)) == set(range(ROWS))
    assert changed_by(lambda: tier.complete_store(first, CONTEXT)) == set(range(ROWS))
    assert changed_by(lambda: tier.touch(first, CONTEXT)) == set()
    assert changed_by(lambda: tier.prepare_store([key(9)], CONTEXT)) == {ROWS - 1, 9}  # the tail of the prefix left
    assert changed_by(lambda: tier.complete_store([key(9)], CONTEXT, False)) == {9}
    assert changed_by(tier.reset_cache) == set(range(12))
    assert tier.used_rows() == 0


def test_a_chunk_that_is_not_ready_cannot_be_read(region: HostRegion):
    tier = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    tier.prepare_store([key(1)], CONTEXT)
    with pytest.raises(AssertionError, match="not ready"):
        tier.prepare_load([key(1)], CONTEXT)
    tier.complete_store([key(1)], CONTEXT)
    tier.prepare_load([key(1)], CONTEXT)
    tier.complete_load([key(1)], CONTEXT)
    with pytest.raises(AssertionError, match="more often"):
        tier.complete_load([key(1)], CONTEXT)


class Sessions:
    """An LRU tier that sessions use, on a clock that stands still unless it is set."""

    def __init__(self, region: HostRegion, rows: int = ROWS) -> None:
        self.now = 0.0
        self.tier = make_cpu_tier(rows, region, "lru", enable_events=False)
        self.tier._clock = lambda: self.now

    def turn(self, name: str, numbers: list[int], returns: float | None = None, *, ended: bool = False) -> list[int]:
        """The chunks that the turn's stores evicted."""
        context = TenantContext(name, session=SessionHint(name.encode(), ended, returns))
        self.tier.on_new_request(context)
        stored = self.tier.prepare_store([key(number) for number in numbers], context)
        assert stored is not None
        self.tier.complete_store(stored.keys_to_store, context)
        self.tier.on_request_finished(context)
        self.now += 1.0
        return [one[0] for one in stored.evicted_keys]


def test_the_session_that_comes_back_last_gives_up_its_end(region: HostRegion):
    sessions = Sessions(region)
    sessions.turn("soon", [0, 1, 2], 5.0)
    sessions.turn("late", [3, 4, 5], 500.0)

    assert sessions.turn("new", [6, 7]) == [5, 4]
    assert sessions.tier.retained_rows() == ROWS


def test_what_an_ended_session_used_leaves_first(region: HostRegion):
    sessions = Sessions(region)
    sessions.turn("soon", [0, 1, 2], 5.0)
    sessions.turn("over", [3, 4, 5], ended=True)

    assert sessions.tier.retained_rows() == 3
    assert sessions.tier.take_ended_sessions() == 1
    assert sessions.tier.take_ended_sessions() == 0
    assert sessions.turn("new", [6, 7]) == [5, 4]


def test_what_an_ended_session_used_and_a_client_retains_is_passed_over_once(region: HostRegion):
    sessions = Sessions(region)
    sessions.turn("over", [0, 1, 2], ended=True)
    sessions.turn("soon", [3, 4, 5], 500.0)
    sessions.tier.hold(b"", 1.0, 10.0, [key(1), key(2)])

    assert sessions.turn("new", [6], ended=True) == [0]
    assert not sessions.tier._retention.left_over & {key(1), key(2)}, "the next eviction would look at both again"
    sessions.now += 10.0
    assert sessions.turn("next", [7, 8]) == [6, 5], "those two count as used when they were passed over"


def test_a_chunk_that_is_read_is_never_given_up_in_place_of_another(region: HostRegion):
    sessions = Sessions(region)
    sessions.turn("soon", [0, 1, 2], 5.0)
    sessions.turn("late", [3, 4, 5], 500.0)
    sessions.tier.prepare_load([key(5)], CONTEXT)

    assert sessions.turn("new", [6]) == [4]


def test_a_store_that_failed_and_a_reset_leave_nothing_retained(region: HostRegion):
    sessions = Sessions(region)
    context = TenantContext("r", session=SessionHint(b"one", return_seconds=5.0))
    sessions.tier.prepare_store([key(0), key(1)], context)
    assert sessions.tier.retained_rows() == 2

    sessions.tier.complete_store([key(0)], context, False)
    assert sessions.tier.retained_rows() == 1
    sessions.tier.reset_cache()
    assert sessions.tier.retained_rows() == 0


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def filled(region: HostRegion, order: list[int]) -> CpuTier:
    """A tier that holds these chunks, the first of them the oldest."""
    tier = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    for number in order:
        tier.prepare_store([key(number)], CONTEXT)
        tier.complete_store([key(number)], CONTEXT)
    return tier


def evicted_by(tier: CpuTier, wanted: list[bytes], context: ReqContext = CONTEXT) -> list[int] | None:
    output = tier.prepare_store(wanted, context)
    if output is None:
        return None
    tier.complete_store(output.keys_to_store, context)
    return [one[0] for one in output.evicted_keys]


def test_what_a_waiting_request_needs_leaves_last_until_its_end(region: HostRegion):
    tier = filled(region, [0, 1, 2, 3, 4, 5])
    tier.waiting.begin("waits", b"", Turn(0, 1), keys(2, 1, 0), 0.0)
    assert [evicted_by(tier, keys(number)) for number in (6, 7, 8)] == [[3], [4], [5]]
    assert tier.ready >= set(keys(0, 1, 2))

    tier.waiting.end("waits")
    assert {0, 1, 2} <= set(evicted_by(tier, keys(9, 10, 11, 12, 13, 14)) or ())


def test_at_most_a_share_of_the_tier_is_kept(region: HostRegion):
    tier = filled(region, [5, 4, 3, 2, 1, 0])
    tier.waiting.begin("waits", b"", Turn(0, 1), keys(0, 1, 2, 3, 4, 5), 0.0)
    assert len(tier.waiting.kept) == ROWS * KEPT_SHARE_MAX == 3
    assert evicted_by(tier, keys(6, 7, 8)) == [5, 4, 3]


def test_where_nothing_else_can_leave_the_last_turn_gives_way(region: HostRegion):
    tier = filled(region, [0, 1, 2, 3, 4, 5])
    tier.waiting.begin("first", b"", Turn(0, 1), keys(0), 0.0)
    tier.waiting.begin("last", b"", Turn(0, 2), keys(1, 2), 0.0)
    tier.prepare_load(keys(3, 4, 5), CONTEXT)
    assert evicted_by(tier, keys(6)) == [2]
    tier.prepare_load(keys(6), CONTEXT)
    assert evicted_by(tier, keys(7, 8)) == [1, 0]


def test_what_a_client_asked_to_retain_leaves_last_until_its_time_has_passed(region: HostRegion):
    tier = filled(region, [0, 1, 2, 3, 4, 5])
    now = 100.0
    tier._clock = lambda: now
    tier.hold(b"ann", 0.5, 60.0, keys(0, 1, 2))
    assert evicted_by(tier, keys(6, 7, 8)) == [3, 4, 5]
    assert evicted_by(tier, keys(9, 10, 11, 12)) == [6, 7, 8, 0], "held chunks leave only after all others"
    assert tier.held_rows() == 3, "the one that left is held again if it is stored again"

    now = 161.0
    assert {1, 2} <= set(evicted_by(tier, keys(13, 14, 15, 16, 17)) or ())
    assert tier.held_rows() == 0


@pytest.mark.parametrize("used_twice", [False, True])
def test_arc_retains_too(region: HostRegion, used_twice: bool):
    tier = make_cpu_tier(ROWS, region, "arc", enable_events=False)
    now = 100.0
    tier._clock = lambda: now
    assert evicted_by(tier, keys(0, 1, 2, 3, 4, 5)) == []
    if used_twice:  # then ARC wants to evict from what was used twice
        tier.touch(keys(0, 1, 2), CONTEXT)
        tier._policy.target_t1_size = float(ROWS)
    tier.hold(b"ann", 0.5, 60.0, keys(0, 1, 2))
    assert evicted_by(tier, keys(6, 7, 8)) == [3, 4, 5]
    assert {6, 7, 8} < set(evicted_by(tier, keys(9, 10, 11, 12)) or ()), "held chunks leave only after all others"
    assert tier.held_rows() == 3
    now = 161.0
    assert tier.held_rows() == 0
    assert set(evicted_by(tier, keys(13)) or ()) < {0, 1, 2}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_reset_ends_every_hold(region: HostRegion, policy: str):
    tier = make_cpu_tier(ROWS, region, policy, enable_events=False)
    assert evicted_by(tier, keys(0, 1, 2)) == []
    tier.hold(b"ann", 0.5, 60.0, keys(0, 1, 2))
    tier.reset_cache()
    assert tier.held_rows() == 0


def test_sessions_give_up_nothing_that_a_waiting_request_needs(region: HostRegion):
    sessions = Sessions(region)
    sessions.turn("soon", [0, 1, 2], 5.0)
    sessions.turn("late", [3, 4, 5], 500.0)
    sessions.tier.waiting.begin("waits", b"", Turn(0, 1), keys(3, 4, 5), 0.0)
    assert sessions.turn("new", [6]) == [2]

    sessions.tier.prepare_load(keys(0, 1, 6), CONTEXT)
    assert sessions.turn("other", [7]) == [5], "the tier must evict where only these can leave"


@pytest.mark.parametrize("need", ["waiting", "read"])
def test_a_session_whose_end_is_needed_is_not_searched_for_what_may_leave(need: str):
    """A request that needs the end needs the beginning: an eviction would look at every chunk of each request under
    way."""
    rows = 40
    region = unnamed_region(rows, 4096)
    sessions = Sessions(region, rows)
    sessions.turn("soon", list(range(10)), 5.0)
    sessions.turn("late", list(range(10, 40)), 500.0)
    end = keys(*range(36, 40))
    if need == "waiting":
        sessions.tier.waiting.begin("waits", b"", Turn(0, 1), end, 0.0)
    else:
        sessions.tier.prepare_load(end, CONTEXT)
    try:
        evicted = sessions.turn("new", list(range(40, 46)))
        assert evicted[:4] == [35, 34, 33, 32], "what was looked at together with the end"
        assert set(evicted[4:]) < set(range(10)), "in their own turn"
    finally:
        region.cleanup()


def test_if_all_other_rows_are_read_a_prefix_is_refused_without_a_search(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
):
    """A request whose other chunks wait for rows asks in every step, several times."""
    tier = filled(region, list(range(ROWS)))
    tier.prepare_load(keys(0, 1, 2, 3), CONTEXT)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_evict_unique", None)
        assert tier.prepare_store(keys(3, 4, 5, 6), CONTEXT) is None
    output = tier.prepare_store(keys(3, 4, 6), CONTEXT)
    assert output is not None and output.evicted_keys == keys(5)


def test_a_reset_keeps_nothing(region: HostRegion):
    tier = filled(region, [0, 1, 2])
    tier.waiting.begin("waits", b"", Turn(0, 1), keys(0, 1, 2), 0.0)
    tier.reset_cache()
    assert not tier.waiting.kept


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(["touch", "store", "written", "lost", "read", "let go", "retire"]),
                st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=4),
            ),
            st.tuples(st.sampled_from(["wait 1", "wait 2"]), st.lists(st.integers(0, 11), unique=True, max_size=6)),
            st.tuples(st.sampled_from(["end 1", "end 2"]), st.just([])),
            st.tuples(st.just("hold"), st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=4)),
        ),
        max_size=60,
    ),
    named=st.booleans(),
)
def test_a_store_finds_room_exactly_where_it_would_if_nobody_waited(
    region: HostRegion, steps: list[tuple[str, list[int]]], named: bool
):
    """`named`: the stores are of sessions, whose order of eviction is another."""
    tier = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    context = TenantContext("r", session=SessionHint(b"one", return_seconds=5.0)) if named else CONTEXT
    writing: set[bytes] = set()
    reading: list[bytes] = []
    for number, (action, numbers) in enumerate(steps):
        chosen = keys(*numbers)
        if action == "store":
            wanted = [one for one in chosen if one not in tier.resident]
            free_rows = tier.free_rows()
            may_leave = tier.ready - set(reading) - set(chosen)
            kept = set(tier.waiting.kept)
            late = kept | {one for one in may_leave if tier._holds.is_held(one, time.monotonic())}
            stored = tier.prepare_store(chosen, context)
            assert (stored is not None) == (len(wanted) <= free_rows + len(may_leave))
            if stored is not None:
                evicted = set(stored.evicted_keys)
                assert evicted <= may_leave
                assert not evicted & kept or may_leave - kept <= evicted, "kept chunks left before others"
                assert not evicted & late or may_leave - late <= evicted, "held chunks left before others"
                writing.update(stored.keys_to_store)
        elif action in ("written", "lost"):
            done = [one for one in chosen if one in writing]
            writing.difference_update(done)
            tier.complete_store(done, context, action == "written")
        elif action == "read":
            ready = [one for one in chosen if one in tier.ready]
            tier.prepare_load(ready, context)
            reading += ready
        elif action == "let go":
            done = [one for one in chosen if one in reading]
            for one in done:
                reading.remove(one)
            tier.complete_load(done, context)
        elif action == "touch":
            tier.touch(chosen, context)
        elif action == "retire":
            tier.retire(chosen)
        elif action == "hold":
            tier.hold(b"tenant", 0.5, 60.0, chosen)
        elif action.startswith("wait"):
            tier.waiting.begin(action[-1], b"", Turn(0, number), chosen, 0.0)
        else:
            tier.waiting.end(action[-1])
