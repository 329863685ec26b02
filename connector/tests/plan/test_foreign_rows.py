"""The rows that an engine may take from others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.foreign_rows import FLOOR_KEPT_MS, ForeignRows

NAMESPACES = [bytes([number]) * 16 for number in range(4)]
OWN = NAMESPACES[0]
ROWS = 40
NOW_MS = 2 * FLOOR_KEPT_MS


@given(
    st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from(NAMESPACES)),
    st.lists(st.integers(0, NOW_MS), min_size=ROWS, max_size=ROWS),
    st.floats(0, 1),
)
def test_each_namespace_keeps_its_floor_and_the_rest_goes_by_the_last_use(
    held: dict[int, bytes], used: list[int], floor_share: float
):
    foreign = ForeignRows(OWN, ROWS, floor_share)
    for row, namespace in held.items():
        foreign.add(row, OWN)
        foreign.add(row, namespace)  # what it holds now
    assert len(foreign) == len(held)
    used_ms = np.array(used, np.uint64)
    taken = foreign.oldest_first(used_ms, NOW_MS)
    assert taken == sorted(taken, key=used.__getitem__)
    assert len(set(taken)) == len(taken) and held.keys() >= set(taken)
    assert foreign.floor_rows * len({OWN, *held.values()}) <= ROWS
    for namespace in set(held.values()):
        rows = [row for row in held if held[row] == namespace]
        left = [row for row in rows if row not in taken]
        is_kept = namespace != OWN and NOW_MS - max(used[row] for row in rows) < FLOOR_KEPT_MS
        assert len(left) == (min(len(rows), foreign.floor_rows) if is_kept else 0)
        assert sorted(used[row] for row in left) == sorted(used[row] for row in rows)[len(rows) - len(left) :]
    for row in held:
        foreign.discard(row)
        foreign.discard(row)
    assert not foreign


@pytest.mark.parametrize(("share", "namespaces", "floor"), [(0.1, 2, 4), (0.5, 2, 20), (0.5, 4, 10), (1.0, 1, 40)])
def test_floors_that_exceed_the_whole_are_equal_parts_of_it(share: float, namespaces: int, floor: int):
    foreign = ForeignRows(OWN, ROWS, share)
    for row, namespace in enumerate(NAMESPACES[1:namespaces]):
        foreign.add(row, namespace)
    assert foreign.floor_rows == floor


def test_after_a_clear_no_row_is_known():
    foreign = ForeignRows(OWN, ROWS, 0.5)
    foreign.add(1, NAMESPACES[1])
    foreign.clear()
    assert len(foreign) == 0 and foreign.floor_rows == ROWS // 2
    assert foreign.oldest_first(np.zeros(ROWS, np.uint64), NOW_MS) == []
