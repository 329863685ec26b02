"""The index of a node's rows against a dict, with holders of the lock that are killed between any two words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.node_index import (
    DEAD_ROWS_KEPT_MS,
    ENGINES_MAX,
    FREE,
    READY,
    WRITING,
    Claimed,
    Entry,
    NodeIndex,
)

ROWS, ROW_BYTES = 5, 4096
NAMESPACE = b"n" * 16
ACTIONS = ("claim", "publish", "free", "killed in a claim", "killed behind a claim", "killed behind a publish")
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sets(st.integers(0, ROWS - 1), min_size=1)), max_size=40)


def new_index(rows: int = ROWS) -> NodeIndex:
    index = NodeIndex(memoryview(bytearray(NodeIndex.bytes_of(rows))), rows)
    index.format(ROW_BYTES, bytes(16))
    return index


def claimed(index: NodeIndex, rows: list[int]) -> list[Claimed]:
    return [(row, index.stamps[row]) for row in rows]


class _Killed(Exception):
    pass


def _die(*_: object) -> None:
    raise _Killed


@given(steps)
def test_what_each_row_holds_is_as_claimed_and_published_wherever_holders_of_the_lock_were_killed(taken):
    index = new_index()
    model: dict[int, tuple[int, bytes]] = {}
    generations: set[int] = set()
    seen, segments = np.zeros(ROWS, np.uint64), index.new_segments()
    for number, (action, chosen) in enumerate(taken):
        index.begin()
        free = [row for row in sorted(chosen) if row not in model]
        writing = [row for row in sorted(chosen) if row in model and model[row][0] == WRITING]
        keys = {row: b"%d of %d" % (row, number) for row in free}
        if action.startswith("killed"):
            written = index.stamps
            if action == "killed in a claim":
                index.stamps = None  # type: ignore[assignment]  # whoever writes them has died
            else:
                index._note = _die  # type: ignore[method-assign]
            touched = writing if action == "killed behind a publish" else free
            with pytest.raises((_Killed, TypeError)) if touched or index._note is _die else nullcontext():
                if action == "killed behind a publish":
                    index.publish(claimed(index, writing), 0)
                else:
                    index.claim(free, NAMESPACE, list(keys.values()), 0, number)
            index.stamps = written
            index.__dict__.pop("_note", None)
        elif action == "claim":
            index.claim(free, NAMESPACE, list(keys.values()), 0, number)
        elif action == "publish":
            index.publish(claimed(index, writing), 0)
        else:
            index.free([row for row in chosen if row in model])
        if action in ("claim", "killed behind a claim"):
            model |= {row: (WRITING, key) for row, key in keys.items()}
        elif action in ("publish", "killed behind a publish"):
            model |= {row: (READY, model[row][1]) for row in writing}
        elif action == "free":
            model = {row: held for row, held in model.items() if row not in chosen}
        if not action.startswith("killed"):
            index.end()
        index.begin()  # the next holder
        index.end()
        for row in range(ROWS):
            entry = index.entry(row)
            assert isinstance(entry, Entry)
            state, key = model.get(row, (FREE, b""))
            assert (entry.state, entry.key) == (state, key)
        new = [index.stamps[row] >> 2 for row in keys if row in model and model[row][1] == keys[row]]
        assert generations.isdisjoint(new)
        generations.update(new)
        assert index.free_rows == ROWS - len(model)
        changed = index.changed_rows(seen, segments)
        assert changed == [row for row in range(ROWS) if seen[row] != index.stamps[row]]
        seen[changed] = index.stamp_array[changed]


@given(st.integers(1, 3000), st.data())
def test_free_rows_are_found_wherever_the_last_search_ended(rows: int, data: st.DataObject):
    index = new_index(rows)
    index.begin()
    for number in range(3):
        count = data.draw(st.integers(0, rows))
        found = index.take_free(count)
        assert len(found) == min(count, index.free_rows)
        assert len(set(found)) == len(found)
        index.claim(found, NAMESPACE, [b"%d %d" % (number, row) for row in found], 0, 0)
        index.free(list(data.draw(st.sets(st.sampled_from(found)))) if found else [])
    assert index.free_rows == index.count()[FREE]


def test_a_row_may_leave_that_holds_a_chunk_which_no_engine_reads():
    index = new_index()
    index.begin()
    index.claim([0, 1, 2], NAMESPACE, [b"a", b"b", b"c"], 0, 0)
    index.publish(claimed(index, [0, 1]), 0)
    index.pin([1], 3)
    assert list(map(index.may_leave, range(4))) == [True, False, False, False]
    assert [index.all_may_leave(rows) for rows in ([0], [0, 1], [0, 2], [0, 3])] == [True, False, False, False]


def test_a_killed_engine_keeps_what_it_wrote_for_a_moment_and_its_place_as_long():
    index = new_index()
    index.begin()
    dead, alive = index.join(11), index.join(13)
    assert (dead, alive) == (0, 1)
    index.claim([0, 1], NAMESPACE, [b"a", b"b"], 0, 0)
    index.claim([2], NAMESPACE, [b"c"], 1, 0)
    index.publish(claimed(index, [0]), 0)
    index.pin([0], 0)
    assert [index.is_pinned(row) for row in (0, 1)] == [True, False]
    running = {13}.__contains__
    assert index.sweep(running, 1, 1000) == 0
    assert not index.is_pinned(0)
    assert index.sweep(running, 1, 999 + DEAD_ROWS_KEPT_MS) == 0
    assert index.engines() == 2
    assert index.sweep(running, 1, 1000 + DEAD_ROWS_KEPT_MS) == 1
    assert index.count() == {FREE: ROWS - 2, WRITING: 1, READY: 1}
    assert index.engines() == 1
    places = [index.join(number) for number in range(100, 100 + ENGINES_MAX)]
    assert places[-1] is None
    assert None not in places[:-1]


def test_a_place_is_given_again_as_late_as_possible():
    index = new_index()
    index.begin()
    assert [index.join(number) for number in (11, 13)] == [0, 1]
    assert index.has_place(13, 1) and not index.has_place(13, 0)
    for now_ms in (1000, 1000 + DEAD_ROWS_KEPT_MS):
        index.sweep({11}.__contains__, 0, now_ms)
        assert not index.has_place(13, 1)
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
