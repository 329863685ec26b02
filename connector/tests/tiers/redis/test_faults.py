"""Servers that are sick rather than down. Deadlines are short where nothing else would end the wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.sick_server import RECEIVE_BYTES, Gesture, Piece, SickServer
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.frame import HEADER_BYTES, Part, build_header, digest_of_parts, digest_of_payload
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.stripes import StripePlan
from spillway_connector.tiers.redis.tier import RedisTier

PONG = [b"+PONG\r\n"]
WRITTEN = [b"+OK\r\n"]  # the answer to writing the namespace document
READY: list[list[bytes | None]] = [PONG, WRITTEN]  # a connection, and a tier, that begin well
FRAME = build_header(NAMESPACE.digest16, key_of(1), payload_of(1), created_ms=1) + payload_of(1)
VALUE = b"$%d\r\n%b\r\n" % (len(FRAME), FRAME)
MakeTier = Callable[[SickServer], RedisTier]


@pytest.fixture
def tier_on() -> Iterator[MakeTier]:
    tiers: list[RedisTier] = []

    def make(server: SickServer) -> RedisTier:
        tiers.append(RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=server.port), connections=1))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def shortly() -> float:
    return time.monotonic() + 0.2


def _load(tier: RedisTier, deadline: float) -> None:
    tier.load(key_of(1), memoryview(bytearray(PAYLOAD_BYTES)), deadline)


def store_one(tier: RedisTier, deadline: float) -> None:
    tier.store(key_of(1), payload_of(1), deadline)


def test_silence_after_connecting_is_a_timeout(tier_on: MakeTier) -> None:
    with SickServer([[]]) as server:
        tier = tier_on(server)
        assert isinstance(error_of(lambda: _load(tier, shortly())), TierTimeout)
        assert isinstance(error_of(lambda: tier.contains([key_of(1)], shortly())), TierTimeout)
        assert isinstance(error_of(lambda: tier.store(key_of(1), payload_of(1), shortly())), TierTimeout)


def test_a_document_that_is_removed_between_two_commands_is_written_again(tier_on: MakeTier) -> None:
    there, gone = [b"$-1\r\n"], [b"$-1\r\n"]  # not set, because there is one; and then there is none
    with SickServer([PONG, there, gone, WRITTEN, [b":0\r\n"]]) as server:
        assert tier_on(server).contains([key_of(1)], soon()) == [False]


@pytest.mark.parametrize("sent", [0, 1, 5, 11, 12, HEADER_BYTES, 5000, len(VALUE) - 2, len(VALUE) - 1])
def test_silence_within_a_value_is_a_timeout_and_the_connection_is_not_used_again(tier_on: MakeTier, sent: int) -> None:
    with SickServer([*READY, [VALUE[:sent]] if sent else []]) as server:
        tier = tier_on(server)
        tier.prepare(soon())
        assert isinstance(error_of(lambda: _load(tier, shortly())), TierTimeout)
        assert server.accepted == 1
        deadline = soon()  # a load may end before it dials, or before the server has taken its connection
        while server.accepted == 1 and time.monotonic() < deadline:
            error_of(lambda: _load(tier, shortly()))
        assert server.accepted >= 2


@pytest.mark.parametrize("close", [False, True])
def test_a_peer_that_stops_reading_within_a_value(close: bool) -> None:
    # The value is larger than all socket buffers together; after its first piece the peer reads no more.
    answers = [*READY, [b":0\r\n"], [None] if close else []]
    with SickServer(answers, later_answers=[PONG, [None]], commands_max=None if close else 4) as server:
        endpoint = RedisEndpoint(port=server.port)
        big = RedisTier(NAMESPACE, 64 << 20, endpoint, connections=1, stripe_bytes_max=64 << 20)
        try:
            big.prepare(soon())
            source = memoryview(bytearray(64 << 20))
            error = error_of(lambda: big.store(key_of(1), source, soon() if close else shortly()))
            assert error.reason == (UnreachableReason.DISCONNECTED if close else UnreachableReason.TIMEOUT)
        finally:
            big.close()


ENDLESS = b"$%d\r\n" % len(FRAME) + b"x" * (len(FRAME) - 1)


@pytest.mark.parametrize(
    ("answers", "call"),
    [
        ([[b"+" + b"x" * 5000]], lambda tier, deadline: tier.prepare(deadline)),  # within the login
        ([*READY, [ENDLESS]], _load),  # within a value
        ([*READY, [b"$" + b"0" * 5000]], _load),  # within the length of a value
        ([*READY, [b":" + b"0" * 5000]], lambda tier, deadline: tier.contains([key_of(1)], deadline)),
        ([*READY, [b"*5000\r\n" + b"+a\r\n" * 5000]], lambda tier, deadline: tier.contains([key_of(1)], deadline)),
        ([*READY, [b":0\r\n"], [b"+" + b"x" * 5000]], store_one),
    ],
)
def test_an_answer_that_trickles_does_not_move_the_deadline(
    answers: list[list[bytes | None]], call: Callable[[RedisTier, float], object]
) -> None:
    # Each byte is on time, the server's clock moves by 10 ms for each; together they take far longer than 3 s.
    clock = SteppedClock()
    deadline = clock() + 3.0

    def after_each_byte() -> None:
        clock.advance(0.01)
        if clock() > deadline:
            time.sleep(0.001)  # else a thread that waits for its turn could find the whole answer in one read

    with SickServer(answers, trickle=after_each_byte) as server:
        tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=server.port), connections=1, clock=clock)
        try:
            assert isinstance(error_of(lambda: call(tier, deadline)), TierTimeout)
        finally:
            tier.close()


def test_a_server_that_reads_slowly_does_not_move_the_deadline() -> None:
    clock = SteppedClock()
    size = 64 << 20  # the deadline has passed when the server has read a twentieth
    answers = [*READY, [b":0\r\n"], []]
    with SickServer(answers, before_each_receive=lambda: clock.advance(0.1)) as server:
        tier = RedisTier(
            NAMESPACE, size, RedisEndpoint(port=server.port), connections=1, stripe_bytes_max=size, clock=clock
        )
        try:
            source = memoryview(bytearray(size))
            error = error_of(lambda: tier.store(key_of(1), source, clock() + 5.0))
            assert isinstance(error, TierTimeout)
            assert "while sending" in str(error)
            assert len(server.commands) * RECEIVE_BYTES < size
        finally:
            tier.close()


@pytest.mark.parametrize("sent", [0, 1, 12, 5000, len(VALUE) - 1])
def test_a_server_that_will_send_no_more_is_unreachable_at_once(tier_on: MakeTier, sent: int) -> None:
    broken: list[Piece] = [VALUE[:sent], Gesture.HALF_CLOSE]
    with SickServer([*READY, broken], later_answers=[PONG, broken]) as server:
        tier = tier_on(server)
        tier.prepare(soon())
        assert error_of(lambda: _load(tier, soon())).reason == UnreachableReason.DISCONNECTED


def test_a_server_that_closes_half_while_we_send_is_unreachable_at_once() -> None:
    # It goes on reading, so that sending succeeds; the answer is what never comes.
    size = 8 << 20
    broken: list[Piece] = [Gesture.HALF_CLOSE]
    with SickServer([*READY, [b":0\r\n"], broken, []], later_answers=[PONG, broken, []]) as server:
        tier = RedisTier(NAMESPACE, size, RedisEndpoint(port=server.port), connections=1, stripe_bytes_max=size)
        try:
            source = memoryview(bytearray(size))
            error = error_of(lambda: tier.store(key_of(1), source, soon()))
            assert error.reason == UnreachableReason.DISCONNECTED
        finally:
            tier.close()


def test_a_backlog_that_is_full_is_a_timeout_at_connecting() -> None:
    # Linux drops what does not fit into the backlog: for the client a host that is silent from the first packet on.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        try:
            for _ in range(4):
                one = socket.socket()
                one.setblocking(False)
                waiting.append(one)
                one.connect_ex(listener.getsockname())
            tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=listener.getsockname()[1]))
            assert isinstance(error_of(lambda: tier.prepare(shortly())), TierTimeout)
            tier.close()
        finally:
            for one in waiting:
                one.close()


@pytest.mark.parametrize("sent", [0, 1, 12, 5000, len(VALUE) - 1])
def test_a_connection_closed_within_a_reply_is_unreachable(tier_on: MakeTier, sent: int) -> None:
    # With nothing sent the connection may just have been stale, so the tier tries a fresh one, which fares no better.
    broken = [VALUE[:sent], None] if sent else [None]
    with SickServer([*READY, broken], later_answers=[PONG, broken]) as server:
        tier = tier_on(server)
        tier.prepare(soon())
        error = error_of(lambda: _load(tier, soon()))
        assert isinstance(error, TierUnreachable)
        assert error.reason == UnreachableReason.DISCONNECTED


def test_a_value_in_many_pieces_is_put_together(tier_on: MakeTier) -> None:
    pieces: list[bytes | None] = [VALUE[at : at + 7] for at in range(0, len(VALUE), 7)]
    with SickServer([*READY, pieces]) as server:
        assert load(tier_on(server), key_of(1)) == payload_of(1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.", RefusedReason.OUT_OF_MEMORY),
        (b"-READONLY You can't write against a read only replica.", RefusedReason.READ_ONLY),
        (b"-MISCONF Errors writing to the AOF file", RefusedReason.READ_ONLY),
        (b"-LOADING Valkey is loading the dataset in memory", RefusedReason.LOADING),
        (b"-MASTERDOWN Link with MASTER is down", RefusedReason.LOADING),
        (b"-MOVED 3999 127.0.0.1:6381", RefusedReason.MOVED),
        (b"-CLUSTERDOWN The cluster is down", RefusedReason.MOVED),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot", RefusedReason.LOADING),
        (b"-BUSY Valkey is busy running a script", RefusedReason.LOADING),
        (b"-NOREPLICAS Not enough good replicas to write.", RefusedReason.READ_ONLY),
        (b"-NOAUTH Authentication required.", RefusedReason.AUTHENTICATION),
        (b"-WRONGPASS invalid username-password pair", RefusedReason.AUTHENTICATION),
        (b"-NOPERM this user has no permissions", RefusedReason.PERMISSION),
        (b"-ERR unknown command", RefusedReason.OTHER),
        (b"HTTP/1.1 400 Bad Request", RefusedReason.PROTOCOL),
        (b":7", RefusedReason.PROTOCOL),
    ],
)
def test_an_error_reply_is_a_refusal_with_its_reason(tier_on: MakeTier, line: bytes, reason: RefusedReason) -> None:
    later = [PONG, [line + b"\r\n"]]
    with SickServer([*READY, [line + b"\r\n"]], later_answers=later) as server:
        tier = tier_on(server)
        error = error_of(lambda: _load(tier, soon()))
        assert isinstance(error, TierRefused)
        assert error.reason == reason
    with SickServer([*READY, [b":0\r\n"], [line + b"\r\n"]], later_answers=later) as server:
        tier = tier_on(server)
        assert error_of(lambda: tier.store(key_of(1), payload_of(1), soon())).reason == reason


def test_an_invalidated_login_is_made_again(tier_on: MakeTier) -> None:
    refused: list[list[bytes | None]] = [[b"-NOAUTH Authentication required.\r\n"]]
    with SickServer([*READY, *refused], later_answers=[PONG, [VALUE]]) as server:
        tier = tier_on(server)
        assert load(tier, key_of(1)) == payload_of(1)
        assert server.accepted == 2


def test_after_a_refusal_the_connection_is_used_again(tier_on: MakeTier) -> None:
    with SickServer([*READY, [b"-LOADING wait\r\n"], [VALUE]]) as server:
        tier = tier_on(server)
        error_of(lambda: _load(tier, soon()))
        assert load(tier, key_of(1)) == payload_of(1)
        assert server.accepted == 1


@pytest.mark.parametrize("null", [b"$-1\r\n", b"*-1\r\n"])
def test_null_is_a_miss(tier_on: MakeTier, null: bytes) -> None:
    with SickServer([*READY, [null]]) as server:
        assert isinstance(error_of(lambda: load(tier_on(server), key_of(1))), TierMiss)


@pytest.mark.parametrize(
    ("length", "reason"),
    [(5, CorruptReason.SHORT), (len(FRAME) + 1, CorruptReason.LENGTH), (1 << 28, CorruptReason.LENGTH)],
)
def test_a_value_of_another_size_is_corrupt_and_not_read_through(
    tier_on: MakeTier, length: int, reason: CorruptReason
) -> None:
    with SickServer([*READY, [b"$%d\r\n" % length]]) as server:
        error = error_of(lambda: load(tier_on(server), key_of(1)))
        assert isinstance(error, TierCorrupt)
        assert error.reason == reason


def test_an_unsolicited_reply_is_never_taken_for_the_next_one(tier_on: MakeTier) -> None:
    with SickServer([*READY, [b":1\r\n:1\r\n"]], later_answers=[PONG, [b":0\r\n"]]) as server:
        tier = tier_on(server)
        assert tier.contains([key_of(1)], soon()) == [True]
        assert tier.contains([key_of(2)], soon()) == [False]
        assert server.accepted == 2


def test_a_thread_waits_for_a_free_connection_only_until_its_deadline(tier_on: MakeTier) -> None:
    with SickServer([*READY, []]) as server:
        tier = tier_on(server)
        tier.prepare(soon())
        holder = threading.Thread(target=lambda: error_of(lambda: _load(tier, soon())))
        holder.start()
        while len(server.commands) < 3:
            server.received.wait(60)
            server.received.clear()
        assert "busy" in str(error_of(lambda: _load(tier, shortly())))
        tier.close()  # ends the holder's wait at once
        holder.join(60)
        assert not holder.is_alive()


def test_a_server_that_is_not_there_is_unreachable(tier_on: MakeTier) -> None:
    with SickServer([[]]) as server:
        tier = tier_on(server)
    assert error_of(lambda: load(tier, key_of(1))).reason == UnreachableReason.CONNECT


def test_tls_towards_a_plain_server_is_reported_as_that() -> None:
    with SickServer([[b"-ERR what is this\r\n"]]) as server:
        tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=server.port, tls=True))
        assert error_of(lambda: load(tier, key_of(1))).reason == UnreachableReason.TLS
        tier.close()


def _stripes(size: int) -> list[bytes]:
    """The values of one block in two stripes, the commit record first, as a load asks for them."""
    block = payload_of(1)
    payloads = [block[:size], block[size:]]
    digests = [digest_of_payload(payload) for payload in payloads]
    frames = [
        build_header(
            NAMESPACE.digest16,
            key_of(1),
            payload,
            created_ms=1,
            part=Part(index, 2, digest_of_parts(digests)),
        )
        + payload
        for index, payload in enumerate(payloads)
    ]
    return [b"$%d\r\n%b\r\n" % (len(frame), frame) for frame in reversed(frames)]


def test_the_next_stripe_is_asked_for_while_one_arrives() -> None:
    plan = StripePlan.of(PAYLOAD_BYTES, 8192)
    commit, first = _stripes(plan.ranges[0][1])
    announced = commit.index(b"\r\n") + 2
    # The rest of the first value is sent only when the second was asked for.
    with SickServer([*READY, [commit[:announced]], [commit[announced:] + first]]) as server:
        tier = RedisTier(
            NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=server.port), connections=1, stripe_bytes_max=8192
        )
        try:
            assert load(tier, key_of(1)) == payload_of(1)
            assert len(server.commands) == len(READY) + 2
        finally:
            tier.close()


@pytest.mark.parametrize("damaged_at", [150, 5000])
def test_a_reply_under_way_when_damage_is_found_is_never_taken_for_another(damaged_at: int) -> None:
    plan = StripePlan.of(PAYLOAD_BYTES, 8192)
    commit, first = _stripes(plan.ranges[0][1])
    damaged = bytearray(commit)
    damaged[damaged_at % len(commit)] ^= 1
    answers: list[list[bytes | None]] = [*READY, [bytes(damaged)], [first]]
    with SickServer(answers, later_answers=[PONG, [commit], [first]]) as server:
        tier = RedisTier(
            NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=server.port), connections=1, stripe_bytes_max=8192
        )
        try:
            assert isinstance(error_of(lambda: load(tier, key_of(1))), TierCorrupt)
            assert load(tier, key_of(1)) == payload_of(1)
            assert server.accepted == 2
        finally:
            tier.close()
