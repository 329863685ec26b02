"""Which of a leader's connections are lines of further pods, and when one of them is lost."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from spillway_engine import replica_lines
from spillway_engine.replica_lines import STRANGERS_MAX, LeaderLines

DEADLINE_SECONDS = 60.0


class Leader:
    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []
        self.selector = selectors.DefaultSelector()
        self.lines = LeaderLines(0, 3, self.selector, lambda *found: self.lost.append(found))

    def connect(self, said: bytes = b"") -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.lines.port))
        line.sendall(said)
        self.run()
        return line

    def run(self) -> None:
        """Until nothing is ready."""
        while ready := self.selector.select(0.1):
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
    with leader.connect(b"\x00\x01"), leader.connect(b"\x00\x03...") as third:
        assert leader.lost == []
        third.close()
        leader.run()
        assert leader.lost == [(3, "is gone")]


@pytest.mark.parametrize(
    "said", [b"", b"\x00", b"\x00\x00", b"\x00\x04", b"\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x01"]
)
def test_whoever_is_no_pod_of_the_replica_means_nothing(leader: Leader, said: bytes) -> None:
    with leader.connect(b"\x00\x01"):
        with leader.connect(said) as stranger:
            if said:
                assert closed(stranger)
        leader.run()
        assert leader.lost == []


def test_strangers_that_stay_silent_are_few_and_keep_no_pod_out(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [leader.connect() for _ in range(STRANGERS_MAX + 1)]
    assert closed(silent[-1])
    now = time.monotonic()
    monkeypatch.setattr(replica_lines.time, "monotonic", lambda: now + replica_lines.SILENT_SECONDS + 1)
    leader.lines.look()
    assert closed(silent[0])
    with leader.connect(b"\x00\x02") as line:
        line.close()
        leader.run()
    assert leader.lost == [(2, "is gone")]
    for each in silent:
        each.close()


def test_a_pod_that_says_nothing_is_lost_after_the_bound_and_not_before(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(replica_lines.time, "monotonic", lambda: now[0])
    with leader.connect(b"\x00\x01") as quiet, leader.connect(b"\x00\x02") as talks:
        now[0] += replica_lines.SILENT_SECONDS - 1
        talks.sendall(b".")
        leader.run()
        leader.lines.look()
        assert leader.lost == []
        now[0] += 2
        leader.lines.look()
        assert leader.lost == [(1, f"said nothing for {replica_lines.SILENT_SECONDS:g} s")] and closed(quiet)
