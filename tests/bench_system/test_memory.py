from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from system.design import Design, Storing
from system.memory import KeepingDevice, ProductRows, SystemTiers
from system.rates import H200_QWEN3_8B

from spillway_simulator.model.counters import EngineCounters
from spillway_simulator.model.events import KvEvent

RATES = replace(H200_QWEN3_8B, request_overhead_seconds=0.0)


@contextmanager
def tiers(storing: Storing, rows: int, device: KeepingDevice) -> Iterator[SystemTiers]:
    events: list[KvEvent] = []
    made = SystemTiers(
        Design(storing),
        device,
        ProductRows(rows),
        block_tokens=128,
        shared=None,
        rates=RATES,
        counters=EngineCounters(),
        emit=events.append,
        announce_shared=False,
    )
    yield made
    made.cpu.close()


def computed(device: KeepingDevice, keys: list[int]) -> None:
    """A request computes these blocks and ends."""
    device.reserve(len(keys))
    for key in keys:
        device.publish(key)
    device.release(keys, 0)


def test_blocks_that_are_kept_leave_the_device_after_all_others() -> None:
    device = KeepingDevice(4)
    computed(device, [1, 2])
    computed(device, [3, 4])
    device.keep([1, 2])
    assert device.reserve(2) == (4, 3)
    assert set(device.reserve(1)) <= {1, 2}, "where nothing else is left they leave too"


def test_a_block_that_is_let_go_leaves_in_its_turn() -> None:
    device = KeepingDevice(4)
    computed(device, [1, 2, 3, 4])
    device.keep([4])
    device.let_go([4])
    assert list(device.next_to_leave()) == [3, 2, 1, 4]


def test_a_block_that_is_being_copied_is_not_evicted_and_stays_the_next_to_leave() -> None:
    device = KeepingDevice(3)
    computed(device, [1, 2, 3])
    device.hold([3, 2])
    assert device.available_blocks == 1
    device.end_hold([3, 2], first=True)
    assert list(device.next_to_leave()) == [3, 2, 1]


@given(st.lists(st.tuples(st.sampled_from(["use", "keep", "let_go"]), st.integers(0, 5)), max_size=40))
def test_blocks_of_the_device_are_each_in_one_state(moves: list[tuple[str, int]]) -> None:
    device = KeepingDevice(8)
    kept: list[int] = []
    for move, at in moves:
        keys = [2 * at, 2 * at + 1]
        if move == "use":
            found = [key for key in keys if key in device]
            missing = [key for key in keys if key not in device]
            device.acquire(found)
            device.reserve(len(missing))
            for key in missing:
                device.publish(key)
            device.release(keys, 0)
        elif move == "keep":
            device.keep(keys)
            kept.append(at)
        elif at in kept:
            device.let_go(keys)
            kept.remove(at)
        free = list(device.next_to_leave())
        assert device.used_blocks == 0
        assert len(free) == len(set(free)) == len(device.keys()) <= 8


def test_rows_keep_the_head_of_a_prefix_longest() -> None:
    rows = ProductRows(4)
    rows.put([1, 2, 3, 4])
    rows.use([1, 2, 3, 4])
    assert rows.put([5]) == ([5], [4])
    rows.close()


def test_rows_that_are_pinned_stay() -> None:
    rows = ProductRows(2)
    rows.put([1, 2])
    rows.pin([1])
    assert rows.put([3]) == ([3], [2])
    assert rows.put([4, 5]) == ([], []), "one row cannot take two chunks"
    rows.unpin([1])
    assert 4 in rows.put([4, 5])[0]
    rows.close()


@pytest.mark.parametrize("storing", [Storing.LAZY, Storing.EXCLUSIVE])
def test_what_leaves_the_device_is_stored_first(storing: Storing) -> None:
    device = KeepingDevice(4)
    with tiers(storing, 8, device) as made:
        computed(device, [1, 2, 3, 4])
        made.store([1, 2, 3, 4], 0.0)
        assert made.next_time is None, "nothing is stored when it is computed"
        made.store_leaving(0.0)
        assert device.available_blocks == 0, "held until the copies have ended"
        assert made.next_time is not None
        made.finish_stores(made.next_time)
        assert device.available_blocks == 4
        assert made.cpu.keys() == {1, 2, 3, 4}


def test_exclusive_tiers_hold_the_sum_of_both() -> None:
    device = KeepingDevice(4)
    with tiers(Storing.EXCLUSIVE, 4, device) as made:
        computed(device, [1, 2, 3, 4])
        made.store_leaving(0.0)
        made.finish_stores(10.0)
        device.acquire([1, 2, 3, 4])
        made.on_device([1, 2, 3, 4])
        device.release([1, 2, 3, 4], 0)
        made.cpu.put([5, 6, 7, 8])
        assert made.cpu.keys() == {5, 6, 7, 8}, "what the device holds left first"
        assert device.keys() == {1, 2, 3, 4}
