"""The index of a node's rows against a dict, with holders of the lock that are killed between any two words."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillway_connector.plan import node_records
from spillway_connector.plan.node_index import (
    DEAD_ROWS_KEPT_MS,
    ENGINES_MAX,
    FREE,
    READY,
    RESERVED,
    WRITING,
    NodeIndex,
)
from spillway_connector.plan.node_records import Entry, RowWords

ROWS, ROW_BYTES = 5, 4096
NAMESPACE = b"n" * 16
ACTIONS = ("reserve", "claim", "publish", "free", "killed in a reserve", "killed in a claim", "killed in a publish")
KILLED_BEHIND = ("killed behind a reserve", "killed behind a claim", "killed behind a publish")
steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS + KILLED_BEHIND), st.sets(st.integers(0, ROWS - 1), min_size=1)), max_size=40
)


def new_index(rows: int = ROWS) -> NodeIndex:
    index = NodeIndex(memoryview(bytearray(NodeIndex.bytes_of(rows))), rows)
    index.format(ROW_BYTES, bytes(16))
    return index


def claim(index: NodeIndex, rows: list[int], keys: list[bytes], place: int) -> list[int]:
    """Returns the stamps."""
    assert claim_with(index, False, rows, list(index.reserve(rows, place)), NAMESPACE, keys, place) is not None
    return [index.stamps[row] for row in rows]


def claim_with(index: NodeIndex, are_many: bool, rows: list[int], stamps: list[int], *others: Any, now_ms: int = 0):
    """Returns the checksums, or None."""
    known = RowWords(index.num_rows)
    known.reserved_array[rows] = stamps
    if not are_many:
        is_claimed = index.claim(rows, known, *others, now_ms=now_ms)
    else:
        is_claimed = index.claim_many(np.array(rows, np.intp), known, *others, now_ms=now_ms)
    if not is_claimed:
        return None
    assert (known.seen_array[rows] == index.stamp_array[rows]).all()
    assert (known.used_array[rows] == now_ms).all()
    return known.check_array[rows].tolist()


def publish_with(index: NodeIndex, are_many: bool, rows: list[int], stamps: list[int], place: int) -> bool:
    known = RowWords(index.num_rows)
    known.seen_array[rows] = stamps
    if not are_many:
        return index.publish(rows, known, place)
    return index.publish_many(np.array(rows, np.intp), known, place)


class _Killed(Exception):
    pass


class _Dying:
    """Array in the place of words that the engine does not live to write."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, *_: object) -> None:
        raise _Killed


class _DyingArray(np.ndarray):
    def __setitem__(self, *_: object) -> None:
        raise _Killed


@pytest.fixture(params=[False, True], ids=["few", "many"])
def are_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether words are read and written as arrays."""
    if request.param:
        monkeypatch.setattr(node_records, "FEW_ROWS", 0)
    return bool(request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(taken=steps)
def test_what_each_row_holds_is_as_reserved_claimed_and_published_wherever_an_engine_was_killed(are_many: bool, taken):
    index = new_index()
    model: dict[int, tuple[int, bytes]] = {}
    stamps_of: dict[int, int] = {}  # that the engine at place 0 has of its rows
    generations: set[int] = set()
    seen, segments = np.zeros(ROWS, np.uint64), index.new_segments()
    for number, (action, chosen) in enumerate(taken):
        index.begin()
        state = {"reserve": FREE, "claim": RESERVED, "publish": WRITING}.get(action.rpartition(" ")[2])
        rows = [row for row in sorted(chosen) if model.get(row, (FREE, b""))[0] == state]
        keys = {row: b"%d of %d" % (row, number) for row in rows}
        stamps, stamp_array, counts = index.stamps, index.stamp_array, index.counts
        given_stamps = [stamps_of[row] for row in rows if state in (RESERVED, WRITING)]
        if action.startswith("killed in"):
            index.stamps = _Dying(stamps)  # type: ignore[assignment]
            index.stamp_array = stamp_array.view(_DyingArray)
        elif action.startswith("killed behind"):
            index.counts = _Dying(counts)  # type: ignore[assignment]
        has_died = False
        try:
            if action == "free":
                index.free([row for row in chosen if row in model])
                model = {row: held for row, held in model.items() if row not in chosen}
            elif action.endswith("reserve"):
                index.reserve(rows, 0)
            elif action.endswith("claim"):
                claim_with(index, are_many, rows, given_stamps, NAMESPACE, list(keys.values()), 0, now_ms=number)
            else:
                publish_with(index, are_many, rows, given_stamps, 0)
        except _Killed:
            has_died = True
        index.stamps, index.stamp_array, index.counts = stamps, stamp_array, counts
        assert has_died or not rows or not action.startswith("killed")
        if not action.startswith(("killed in", "free")):
            for row in rows:
                if action.endswith("reserve"):
                    model[row] = RESERVED, b""
                elif action.endswith("claim"):
                    model[row] = WRITING, keys[row]
                else:
                    model[row] = READY, model[row][1]
                stamps_of[row] = index.stamps[row]
        if not has_died:
            index.end()
        index.begin()  # the next holder
        index.end()
        for row in range(ROWS):
            entry = index.entry(row)
            assert isinstance(entry, Entry)
            assert (entry.state, entry.key) == model.get(row, (FREE, b""))
        given = rows if action.endswith("reserve") else ()
        new = [index.stamps[row] >> 2 for row in given if row in model]
        assert generations.isdisjoint(new)
        generations.update(new)
        assert index.free_rows == ROWS - len(model)
        changed = index.changed_rows(seen, segments)
        assert changed == [row for row in range(ROWS) if seen[row] != index.stamps[row]]
        seen[changed] = index.stamp_array[changed]


@given(st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=ROWS), st.randoms())
def test_many_rows_are_changed_as_few_are(keys: list[bytes], chosen: Random):
    memory = [bytearray(NodeIndex.bytes_of(ROWS)) for _ in range(2)]
    rows, used_ms = chosen.sample(range(ROWS), len(keys)), chosen.randrange(1 << 40)
    for each, are_many in zip(memory, (False, True), strict=True):
        index = NodeIndex(memoryview(each), ROWS)
        index.format(ROW_BYTES, bytes(16))
        reserved = list(index.reserve(rows if not are_many else np.array(rows), 3))
        checks = claim_with(index, are_many, rows, reserved, NAMESPACE, keys, 3, now_ms=used_ms)
        claimed = [index.stamps[row] for row in rows]
        assert publish_with(index, are_many, rows, claimed, 3)
        assert [index.entry(row) for row in rows] == [
            Entry(index.stamps[row], NAMESPACE, key, check) for row, key, check in zip(rows, keys, checks, strict=True)
        ]
        index.pin(rows if not are_many else np.array(rows), 4)
        assert all(map(index.is_pinned, rows))
        index._segments[:] = 0  # however often a change was counted
    assert memory[0] == memory[1]


def test_rows_that_are_not_as_an_engine_reserved_or_claimed_them_are_left_alone(are_many: bool):
    index = new_index()
    index.begin()
    reserved = list(index.reserve([0, 1], 0))
    assert claim_with(index, are_many, [0, 1], reserved, NAMESPACE, [b"a", b"b"], 0) is not None
    assert claim_with(index, are_many, [0, 1], reserved, NAMESPACE, [b"c", b"d"], 0) is None
    claimed = [index.stamps[row] for row in (0, 1)]
    index.free([0])  # the engine was taken for dead
    again = claim(index, [0], [b"e"], 0)
    assert not publish_with(index, are_many, [0, 1], claimed, 0)
    assert publish_with(index, are_many, [0], again, 0)
    assert [index.entry(row).key for row in (0, 1)] == [b"e", b"b"]


def test_a_claim_writes_no_owner(are_many: bool):
    """A sweep reads the owners meanwhile, and releases the rows of those that have ended."""
    index = new_index()
    reserved = list(index.reserve([2], 3))
    index._owners[2] = 5
    assert claim_with(index, are_many, [2], reserved, NAMESPACE, [b"a"], 3) is not None
    assert index.owned_by(5) == [2]


@given(st.integers(1, 3000), st.data())
def test_free_rows_are_found_wherever_the_last_search_ended(rows: int, data: st.DataObject):
    index = new_index(rows)
    index.begin()
    for number in range(3):
        count = data.draw(st.integers(0, rows))
        found = index.take_free(count)
        assert len(found) == min(count, index.free_rows)
        assert len(set(found)) == len(found)
        claim(index, found, [b"%d %d" % (number, row) for row in found], 0)
        index.free(list(data.draw(st.sets(st.sampled_from(found)))) if found else [])
    assert index.free_rows == index.count()[FREE]


def test_a_row_may_leave_that_holds_a_chunk_which_no_engine_reads():
    index = new_index()
    index.begin()
    claims = claim(index, [0, 1, 2], [b"a", b"b", b"c"], 0)
    publish_with(index, False, [0, 1], claims[:2], 0)
    index.pin([1], 3)
    index.reserve([4], 0)
    assert list(map(index.may_leave, range(5))) == [True, False, False, False, False]
    for many in (1, 100):
        may = [index.all_may_leave(many * rows) for rows in ([0], [0, 1], [0, 2], [0, 3], [0, 4])]
        assert may == [True, False, False, False, False]


def test_a_killed_engine_keeps_what_it_wrote_for_a_moment_and_its_place_as_long():
    index = new_index()
    index.begin()
    dead, alive = index.join(11), index.join(13)
    assert (dead, alive) == (0, 1)
    claims = claim(index, [0, 1], [b"a", b"b"], 0)
    claim(index, [2], [b"c"], 1)
    index.reserve([3], 0)
    publish_with(index, False, [0], claims[:1], 0)
    index.pin([0], 0)
    assert [index.is_pinned(row) for row in (0, 1)] == [True, False]
    running = {13}.__contains__
    assert index.sweep(running, 1, 1000) == 0
    assert not index.is_pinned(0)
    assert index.sweep(running, 1, 999 + DEAD_ROWS_KEPT_MS) == 0
    assert index.engines() == 2
    assert index.sweep(running, 1, 1000 + DEAD_ROWS_KEPT_MS) == 2
    assert index.count() == {FREE: ROWS - 2, WRITING: 1, READY: 1, RESERVED: 0}
    assert index.engines() == 1
    places = [index.join(number) for number in range(100, 100 + ENGINES_MAX)]
    assert places[-1] is None
    assert None not in places[:-1]


def test_a_place_is_given_again_as_late_as_possible():
    index = new_index()
    index.begin()
    assert [index.join(number) for number in (11, 13)] == [0, 1]
    assert index.place_words(1).tolist() == [13, 0] != index.place_words(0).tolist()
    for now_ms in (1000, 1000 + DEAD_ROWS_KEPT_MS):
        index.sweep({11}.__contains__, 0, now_ms)
        assert index.place_words(1).tolist() != [13, 0]
    places = [index.join(number) for number in range(100, 100 + ENGINES_MAX)]
    assert places == [*range(2, ENGINES_MAX), 1, None]


@pytest.mark.parametrize(("rows", "row_bytes", "why"), [(6, 4096, "it has 5 rows"), (5, 8192, "of 4096 bytes")])
def test_an_index_of_other_rows_is_explained(rows: int, row_bytes: int, why: str):
    memory = memoryview(bytearray(NodeIndex.bytes_of(ROWS)))
    NodeIndex(memory, ROWS).format(ROW_BYTES, bytes(16))
    assert NodeIndex.explain_header(bytes(memory[:64]), ROWS, ROW_BYTES) is None
    assert why in (NodeIndex.explain_header(bytes(memory[:64]), rows, row_bytes) or "")
    assert NodeIndex.explain_header(b"", ROWS, ROW_BYTES) == "it was never finished"


def test_an_engine_that_is_killed_while_it_holds_rows_leaves_no_hold() -> None:
    index = new_index()
    place = index.join(7)
    assert place is not None

    def rows() -> Iterator[int]:
        yield 1
        raise _Killed

    with pytest.raises(_Killed):
        index.hold(rows(), place, 100)  # type: ignore[arg-type]
    assert index.is_held(1, 50.0)
    index.sweep(lambda _: False, None, 1)
    assert not index.is_held(1, 50.0)
