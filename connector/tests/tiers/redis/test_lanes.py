"""Stripes in several threads at once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from spillway_connector.errors import TierUnreachable, UnreachableReason
from spillway_connector.tiers.redis.lanes import Lanes


class WorkedOn:
    """Stands for an object that a thread holds while it moves a stripe."""


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(4, 4)
    yield lanes
    lanes.close()


def test_every_index_is_done_once(lanes: Lanes) -> None:
    done: list[int] = []
    lanes.run(range(64), done.append)
    assert sorted(done) == list(range(64))


def test_the_first_error_is_raised_after_all_threads_have_finished(lanes: Lanes) -> None:
    lock, busy = threading.Lock(), [0]

    def act(index: int) -> None:
        with lock:
            busy[0] += 1
        try:
            if index >= 2:
                raise TierUnreachable(UnreachableReason.DISCONNECTED, f"stripe {index}")
        finally:
            with lock:
                busy[0] -= 1

    with pytest.raises(TierUnreachable, match="stripe"):
        lanes.run(range(64), act)
    assert busy == [0]


def test_an_error_keeps_nothing_alive_that_a_thread_worked_on(lanes: Lanes) -> None:
    held: list[weakref.ref[WorkedOn]] = []

    def act(index: int) -> None:
        worked_on = WorkedOn()
        held.append(weakref.ref(worked_on))
        raise TierUnreachable(UnreachableReason.DISCONNECTED, f"stripe {index}")

    gc.collect()
    gc.disable()
    try:
        try:
            lanes.run(range(8), act)
        except TierUnreachable:
            pass
        left = [one for one in held if one() is not None]
    finally:
        gc.enable()
    assert held
    assert not left
