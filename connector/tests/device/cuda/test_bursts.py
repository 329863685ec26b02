from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.device.cuda.bursts import BurstPlan, DescriptorRing, fits_words
from spillway_connector.plan.copies import CopyPlan


def plan_of(spans: list[tuple[int, int, int]]) -> CopyPlan:
    """spans: (device, host, bytes)"""
    return CopyPlan(*(np.array(column, dtype=np.int64) for column in zip(*spans)))


@st.composite
def plans(draw: st.DrawFn) -> CopyPlan:
    """Spans of whole words that overlap on neither side; many run on at the host side."""
    sizes = draw(st.lists(st.integers(1, 40).map(lambda words: 8 * words), min_size=1, max_size=60))
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(sizes))))
        gaps = draw(st.lists(st.sampled_from([0, 0, 8, 80]), min_size=len(sizes), max_size=len(sizes)))
        at, starts = 8 * draw(st.integers(0, 5)), [0] * len(sizes)
        for index, gap in zip(order, gaps):
            at += gap
            starts[index] = at
            at += sizes[index]
        sides.append(starts)
    return plan_of(list(zip(*sides, sizes)))


@given(plans(), st.integers(1, 60).map(lambda words: 8 * words))
def test_bursts_pair_the_same_bytes_as_the_plan(plan: CopyPlan, slot_bytes: int) -> None:
    expected = {}
    for device, host, size in zip(plan.device_addresses, plan.host_addresses, plan.sizes_bytes):
        for word in range(0, int(size), 8):
            expected[int(host) + word] = int(device) + word
    found: dict[int, int] = {}
    pieces = 0
    bursts = BurstPlan(plan, slot_bytes)
    for burst in bursts:
        device_of = {}
        for device, offset, size in zip(burst.device_addresses, burst.piece_offsets, burst.piece_bytes):
            for word in range(0, int(size), 8):
                assert 0 <= offset + word < slot_bytes
                assert int(offset) + word not in device_of  # each word of a slot is one piece's
                device_of[int(offset) + word] = int(device) + word
        for host, offset, size in zip(burst.host_addresses, burst.run_offsets, burst.run_bytes):
            for word in range(0, int(size), 8):
                found[int(host) + word] = device_of.pop(int(offset) + word)
        assert not device_of  # every gathered word crosses
        pieces += len(burst.piece_bytes)
    assert found == expected
    assert pieces == len(bursts)


def test_neighbours_on_the_host_side_cross_as_one_run() -> None:
    spans = [(1000 - 100 * k, 4096 + 64 * k, 64) for k in range(8)]
    (burst,) = BurstPlan(plan_of(spans), 4096)
    assert (burst.host_addresses.tolist(), burst.run_bytes.tolist()) == ([4096], [512])


def test_addresses_that_are_no_whole_words_are_not_for_the_kernel() -> None:
    assert fits_words(plan_of([(8, 16, 24)]))
    for odd in ((9, 16, 24), (8, 17, 24), (8, 16, 23)):
        assert not fits_words(plan_of([(800, 1600, 8), odd]))


@given(st.integers(1, 30), st.lists(st.integers(0, 12), max_size=80))
def test_the_ring_hands_out_free_rows(capacity: int, wishes: list[int]) -> None:
    """The wishes are: 0, the oldest taker gives back; n, a new taker takes n rows."""
    ring = DescriptorRing(capacity)
    held: list[tuple[int, int]] = []
    for wish in wishes:
        if wish == 0:
            if held:
                ring.give_back(held.pop(0)[0])
            continue
        first = ring.take(wish)
        if first is None:
            assert held or wish > capacity  # an empty ring has all its room
            continue
        assert first >= 0 and first + wish <= capacity
        assert all(first + wish <= begin or begin + rows <= first for begin, rows in held)
        held.append((first, wish))
