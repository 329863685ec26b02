"""Frames to and from files: how many at once. What the bytes are is the tiers' tests' to say."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spillway_connector.errors import TierTimeout
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import PAYLOAD_BYTES, payload_of, soon
from spillway_connector.tiers.disk import io as disk_io
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.io import FrameFiles

AT_ONCE, THREADS = 2, 6
HEADER = bytes(FramePlaces.of(PAYLOAD_BYTES).header_bytes)


class SlowDisk:
    """Stands in for the system calls: a transfer waits until it is let go, and all that are under way are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = {"preadv": 0, "pwritev": 0}
        self.most = dict(self.under_way)
        self.let_go = {name: threading.Event() for name in self.under_way}
        self.changed = threading.Condition()
        for name in self.under_way:
            monkeypatch.setattr(disk_io.os, name, self._slow(name, getattr(os, name)))

    def _slow(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def transfer(*given: object) -> int:
            with self.changed:
                self.under_way[name] += 1
                self.most[name] = max(self.most[name], self.under_way[name])
                self.changed.notify_all()
            try:
                assert self.let_go[name].wait(30.0)
                return call(*given)
            finally:
                with self.changed:
                    self.under_way[name] -= 1

        return transfer

    def wait_for(self, name: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.under_way[name] == count, 30.0)


@pytest.fixture
def frame(tmp_path: Path) -> Iterator[int]:
    """A descriptor of one frame."""
    files = FrameFiles(PAYLOAD_BYTES, clock=time.monotonic, wall_clock=time.time)
    descriptor = os.open(tmp_path / "frame", os.O_CREAT | os.O_RDWR)
    files.write_at(descriptor, 0, HEADER, memoryview(payload_of(1)), soon())
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, frame: int) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    for event in disk.let_go.values():
        event.set()


def make_files() -> FrameFiles:
    return FrameFiles(PAYLOAD_BYTES, AT_ONCE, clock=time.monotonic, wall_clock=time.time)


def start(*moves: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=move) for move in moves]
    for thread in threads:
        thread.start()
    return threads


def test_no_more_transfers_are_under_way_than_asked_for(disk: SlowDisk, frame: int) -> None:
    files, targets = make_files(), [memoryview(bytearray(PAYLOAD_BYTES)) for _ in range(THREADS)]
    threads = start(*[lambda target=target: files.read_at(frame, 0, target, soon()) for target in targets])  # type: ignore[misc]
    disk.wait_for("preadv", AT_ONCE)
    disk.let_go["preadv"].set()
    for thread in threads:
        thread.join(30.0)
    assert disk.most["preadv"] == AT_ONCE
    assert all(target == payload_of(1) for target in targets)


def test_reads_do_not_queue_behind_writes(disk: SlowDisk, frame: int) -> None:
    files, target = make_files(), memoryview(bytearray(PAYLOAD_BYTES))
    source = memoryview(payload_of(1))
    writers = start(*[lambda: files.write_at(frame, 0, HEADER, source, soon())] * THREADS)
    disk.wait_for("pwritev", AT_ONCE)
    disk.let_go["preadv"].set()
    files.read_at(frame, 0, target, soon())
    assert target == payload_of(1)
    disk.let_go["pwritev"].set()
    for writer in writers:
        writer.join(30.0)


def test_a_transfer_without_a_turn_by_the_deadline_fails_and_blocks_no_other(disk: SlowDisk, frame: int) -> None:
    files, target = make_files(), memoryview(bytearray(PAYLOAD_BYTES))
    stuck = start(*[lambda: files.read_at(frame, 0, memoryview(bytearray(PAYLOAD_BYTES)), soon())] * AT_ONCE)
    disk.wait_for("preadv", AT_ONCE)
    with pytest.raises(TierTimeout, match="still running"):
        files.read_at(frame, 0, target, time.monotonic() + 0.01)
    disk.let_go["preadv"].set()
    for thread in stuck:
        thread.join(30.0)
    files.read_at(frame, 0, target, soon())
    assert target == payload_of(1)


def test_a_transfer_that_is_stuck_long_after_its_deadline_loses_its_turn() -> None:
    clock = SteppedClock()
    turns = disk_io._Turns(2, clock)
    with ExitStack() as stuck:
        for _ in range(2):
            stuck.enter_context(turns.turn(clock() + 1.0))
        with pytest.raises(TierTimeout), turns.turn(clock()):
            pass
        clock.advance(1.0 + disk_io.STUCK_SECONDS)
        with turns.turn(clock() + 1.0), turns.turn(clock() + 1.0), pytest.raises(TierTimeout), turns.turn(clock()):
            pass
        for _ in range(2):
            stuck.enter_context(turns.turn(clock() + 1.0))
        clock.advance(1.0 + disk_io.STUCK_SECONDS)
        with pytest.raises(TierTimeout), turns.turn(clock()):
            pass  # no more than that are given up
    with turns.turn(clock() + 1.0), turns.turn(clock() + 1.0), pytest.raises(TierTimeout), turns.turn(clock()):
        pass
