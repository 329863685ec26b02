from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.request_frequency import ADDS_MAX, COUNT_MAX, NOTED_MAX, FrequencySketch


def block_key(number: int, group: int = 0) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + group.to_bytes(4, "big")


any_keys = st.binary(min_size=1, max_size=40)
batches = st.lists(st.lists(any_keys, unique=True, max_size=8), max_size=12)


@given(batches)
def test_an_estimate_is_never_too_low(added):
    sketch = FrequencySketch(counters_per_row=64, adds_max=10_000)
    true: Counter[bytes] = Counter()
    for batch in added:
        sketch.add(batch)
        true.update(batch)
    keys = list(true)
    for key, estimate in zip(keys, sketch.estimate(keys).tolist(), strict=True):
        assert estimate >= min(true[key], COUNT_MAX)


@given(batches)
def test_a_batch_counts_as_its_keys_one_by_one_where_they_share_no_counter(added):
    together, apart = FrequencySketch(), FrequencySketch()
    for batch in added:
        together.add(batch)
        for key in batch:
            apart.add([key])
    keys = sorted({key for batch in added for key in batch})
    assert together.estimate(keys).tolist() == apart.estimate(keys).tolist()


@given(batches)
def test_what_is_noted_counts_as_what_is_added_where_keys_share_no_counter(added):
    noted, counted = FrequencySketch(), FrequencySketch()
    for batch in added:
        noted.note(batch)
        counted.add(batch)
    keys = sorted({key for batch in added for key in batch})
    assert noted.estimate(keys).tolist() == counted.estimate(keys).tolist()
    assert noted.estimate(keys).tolist() == counted.estimate(keys).tolist(), "once, not at every estimate"


def test_a_noted_list_that_grows_afterwards_is_counted_as_it_was():
    sketch = FrequencySketch()
    keys = [block_key(1), block_key(1)]
    sketch.note(keys)
    keys.append(block_key(2))
    assert sketch.estimate([block_key(1), block_key(2)]).tolist() == [1, 0]


def test_only_the_latest_requests_are_kept_until_someone_asks():
    sketch = FrequencySketch()
    requests = [[block_key(1000 * request + number) for number in range(1000)] for request in range(6)]
    for keys in requests:
        sketch.note(keys)
    kept = NOTED_MAX // 1000
    counted = [bool(sketch.estimate(keys).any()) for keys in requests]
    assert counted == [False] * (len(requests) - kept) + [True] * kept
    sketch.note([block_key(number) for number in range(2 * NOTED_MAX)])
    assert sketch.estimate([block_key(2 * NOTED_MAX - 1)]).tolist() == [1], "the last, however long it is"


def test_keys_of_one_block_in_two_groups_are_two_keys():
    sketch = FrequencySketch()
    sketch.add([block_key(1, group=0)])
    assert sketch.estimate([block_key(1, 0), block_key(1, 1)]).tolist() == [1, 0]


def test_a_key_requested_once_ages_out():
    sketch = FrequencySketch()
    for _ in range(3):
        sketch.add([block_key(0)])
    others = [block_key(number) for number in range(1, ADDS_MAX + 1)]
    for start in range(0, len(others), 1000):
        sketch.add(others[start : start + 1000])
    assert sketch.estimate([block_key(0)]).tolist() == [1]
    assert np.count_nonzero(sketch.estimate(others)) < 1500  # those added since the halving


def test_new_keys_are_taken_for_known_ones_less_than_once_in_a_thousand():
    sketch = FrequencySketch()
    sketch.add([block_key(number) for number in range(ADDS_MAX - 1)])
    strangers = sketch.estimate([block_key(1_000_000 + number) for number in range(100_000)])
    assert np.count_nonzero(strangers) < 400
    assert np.count_nonzero(strangers >= 2) < 10


def test_counts_saturate():
    sketch = FrequencySketch()
    for _ in range(40):
        sketch.add([block_key(5)])
    assert sketch.estimate([block_key(5)]).tolist() == [COUNT_MAX]


def test_it_is_small():
    assert FrequencySketch().size_bytes <= 1_000_000


def test_no_keys():
    sketch = FrequencySketch()
    sketch.add([])
    assert sketch.estimate([]).shape == (0,)


def test_a_row_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="1000"):
        FrequencySketch(counters_per_row=1000)
