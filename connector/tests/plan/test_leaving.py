from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.leaving import LeavingWindow


@given(least=st.integers(1, 20), steps=st.lists(st.lists(st.integers(0, 20), max_size=3), max_size=80))
def test_what_a_usual_step_takes_was_looked_at_before(least: int, steps: list[list[int]]):
    """The queue is long, nothing leaves it but at its head, and no step takes more than one computes."""
    window = LeavingWindow(least)
    seen = 0  # blocks from the head on that were looked at
    for wanted in steps:
        window.end_step()
        if window.look_is_due(10**6, freed=True):
            window.looked()
            seen = window.blocks
        taken = min(sum(wanted), least)
        assert seen >= taken
        window.took(taken)
        seen -= taken


def test_the_window_follows_the_most_that_a_step_takes_and_forgets_it_by_later_ones():
    window = LeavingWindow(4)
    assert window.next_step_blocks == 4

    window.took(100)
    window.end_step()
    assert window.next_step_blocks == 100
    for _ in range(1000):  # of decoding within blocks: nothing is known of the next admission
        window.end_step()
    assert window.next_step_blocks == 100
    for _ in range(34):
        window.took(1)
        window.end_step()
    assert 45 <= window.next_step_blocks <= 55
    for _ in range(500):
        window.took(1)
        window.end_step()
    assert window.next_step_blocks == 4


def test_decoding_does_not_narrow_the_window():
    """Steps in which each of many requests takes a block say nothing about the next admission."""
    window = LeavingWindow(64)
    window.took(150)
    window.end_step()
    before = window.blocks
    for _ in range(1000):
        window.took(15)
        window.end_step()
    assert window.blocks == before


def test_the_window_is_three_steps_long_if_that_is_a_small_part_of_the_cpu_tier():
    for blocks_max, blocks in ((100, 30), (20, 20), (3, 15)):
        window = LeavingWindow(10, blocks_max)
        assert window.blocks == blocks


def test_blocks_that_were_lost_widen_the_window_for_a_while():
    window = LeavingWindow(4)
    before = window.blocks
    window.took(20)
    window.lost(12)
    window.end_step()
    assert window.blocks >= 20 + 10 + 11
    for _ in range(500):
        window.took(1)
        window.end_step()
    assert window.blocks == before


def test_a_short_queue_is_looked_at_when_blocks_came_back_and_a_long_one_now_and_then():
    window = LeavingWindow(4)
    looks = 0
    for _ in range(32):
        window.end_step()
        if window.look_is_due(1000, freed=True):
            window.looked()
            looks += 1
    assert looks == 2
    assert window.look_is_due(window.blocks - 1, freed=True)
    assert not window.look_is_due(window.blocks - 1, freed=False), "all of it was looked at before"
