"""A leader's connections that are lines of further pods, and the loss of one of them."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from spillway_engine.replica_lines import BEAT_SECONDS, SILENT_SECONDS, STRANGERS_MAX, FurtherLine, LeaderLines

DEADLINE_SECONDS = 60.0
LOOKS = int(SILENT_SECONDS / BEAT_SECONDS)


def hello(index: int) -> bytes:
    return b"spillway pod " + index.to_bytes(2, "big")


class Leader:
    def __init__(self) -> None:
        self.lost: list[tuple[int, str, bool]] = []
        self.selector = selectors.DefaultSelector()
        self.lines = LeaderLines(0, 3, self.selector, lambda *found: self.lost.append(found))

    def connect(self, said: bytes = b"") -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.lines.port))
        line.sendall(said)
        self.run()
        return line

    def run(self, quiet_seconds: float = 0.1) -> None:
        """Run the lines until nothing is ready for so long."""
        while ready := self.selector.select(quiet_seconds):
            for key, _ in ready:
                key.data()


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.lines.close()
    made.selector.close()


def closed(line: socket.socket) -> bool:
    line.settimeout(DEADLINE_SECONDS)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_line_that_ends_is_a_lost_pod_and_others_stay(leader: Leader) -> None:
    with leader.connect(hello(1)), leader.connect(hello(3)) as third:
        assert third.recv(1) == b"+"
        third.sendall(b"...")
        leader.run()
        assert leader.lost == []
        third.close()
        leader.run()
        assert leader.lost == [(3, "is gone", False)]


STRANGE = [b"", b"\x00", b"\x00\x00", b"\x00\x01", b"\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"spillway pod "]
STRANGE += [hello(0), hello(4), hello(2)[:-1], hello(2) + b"."]


@pytest.mark.parametrize("said", [*STRANGE, hello(1)])
def test_whoever_is_no_pod_of_the_replica_means_nothing(leader: Leader, said: bytes) -> None:
    with leader.connect(hello(1)):
        with leader.connect(said) as stranger:
            if said:
                assert closed(stranger)
        leader.run()
        assert leader.lost == []


@pytest.mark.parametrize("said", STRANGE)
def test_nor_does_it_before_the_pods_have_come(leader: Leader, said: bytes) -> None:
    leader.connect(said).close()
    leader.run()
    assert leader.lost == []


def test_strangers_that_stay_silent_are_few_and_keep_no_pod_out(leader: Leader) -> None:
    with ExitStack() as silent:
        strangers = [silent.enter_context(leader.connect()) for _ in range(STRANGERS_MAX + 1)]
        assert closed(strangers[-1])
        for _ in range(LOOKS + 1):
            leader.lines.look()
        assert closed(strangers[0])
        with leader.connect(hello(2)) as line:
            line.close()
            leader.run()
        assert [index for index, *_ in leader.lost] == [2]


@pytest.mark.parametrize("failed", [False, True])
def test_a_pod_that_strangers_keep_out_tries_again_until_its_line_is_accepted(leader: Leader, failed: bool) -> None:
    with ExitStack() as silent:
        for _ in range(STRANGERS_MAX):
            silent.enter_context(leader.connect())
        further = FurtherLine(("127.0.0.1", leader.lines.port), 2)
        leader.run(0.5)  # it is refused
    deadline = time.monotonic() + DEADLINE_SECONDS
    while 2 not in leader.lines._lines.values():
        assert time.monotonic() < deadline
        leader.run()
    further.close(failed=failed)
    while not leader.lost:
        assert time.monotonic() < deadline
        leader.run()
    assert leader.lost == [(2, "has lost its engine, which failed" if failed else "is gone", failed)]


def test_a_pod_that_says_nothing_is_lost_after_the_bound_and_not_before(leader: Leader) -> None:
    with leader.connect(hello(1)) as quiet, leader.connect(hello(2)) as talks:
        for _ in range(LOOKS):
            leader.lines.look()
        talks.sendall(b".")
        leader.run()
        assert leader.lost == []
        leader.lines.look()
        assert leader.lost == [(1, f"said nothing for {SILENT_SECONDS:g} s", False)]
        assert quiet.recv(1) == b"+" and closed(quiet)


def test_a_leader_that_was_held_up_takes_no_pod_for_lost(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's bytes count even if the leader has not read them yet."""
    with leader.connect(hello(1)) as line:
        line.sendall(b".")
        later = time.monotonic() + 10 * SILENT_SECONDS
        monkeypatch.setattr(time, "monotonic", lambda: later)
        leader.lines.look()
        assert leader.lost == []
