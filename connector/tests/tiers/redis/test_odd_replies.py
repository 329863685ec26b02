"""Replies that no server sends: whatever they are and wherever they come, a TierError leaves the tier, soon."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import exceptions as redis_exceptions
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from spillway_connector.errors import TierError, TierUnreachable
from spillway_connector.testing.sick_server import Piece, SickServer
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, payload_of
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.errors import shown, tier_error
from spillway_connector.tiers.redis.tier import RedisTier

ODD = {
    "nested arrays": b"*1\r\n" * 5000 + b":1\r\n",
    "nested a little": b"*1\r\n" * 9 + b":1\r\n",
    "nested in width": b"*2\r\n:1\r\n" * 900 + b":1\r\n",
    "an integer of 4,000 digits": b":" + b"9" * 4000 + b"\r\n",
    "an integer of 5,000 digits": b":" + b"9" * 5000 + b"\r\n",
    "an integer of 6,000 digits": b":" + b"9" * 6000 + b"\r\n",
    "an integer below zero": b":-1\r\n",
    "no integer": b":one\r\n",
    "a length of 20 digits": b"$" + b"9" * 20 + b"\r\n",
    "a length below zero": b"$-2\r\n",
    "a length that is no number": b"$\xff\xfe\r\n",
    "an array below zero": b"*-5\r\n",
    "an empty array": b"*0\r\n",
    "a null array": b"*-1\r\n",
    "null": b"$-1\r\n",
    "a string": b"+\xff\xfe\xfd\r\n",
    "an empty line": b"\r\n",
    "a redirection to nowhere": b"-MOVED\r\n",
    "a redirection without a port": b"-MOVED 1 host\r\n",
    "a redirection to a wrong port": b"-MOVED x host:port:more\r\n",
    "an ask of a huge slot": b"-ASK 99999999999999999999 h:1\r\n",
    "an error that is no text": b"-\xff\xfe\xff\r\n",
    "an error of 20,000 characters": b"-ERR " + b"x" * 20_000 + b"\r\n",
    "an empty error": b"-\r\n",
    "RESP3 push": b">2\r\n+invalidate\r\n*1\r\n+key\r\n",
    "RESP3 attribute": b"|1\r\n+ttl\r\n:1\r\n:1\r\n",
    "RESP3 map": b"%1\r\n+a\r\n:1\r\n",
    "RESP3 set": b"~1\r\n+a\r\n",
    "RESP3 null": b"_\r\n",
    "RESP3 boolean": b"#t\r\n",
    "RESP3 double": b",inf\r\n",
    "RESP3 big number": b"(" + b"9" * 400 + b"\r\n",
    "RESP3 big number of 6,000 digits": b"(" + b"9" * 6000 + b"\r\n",
    "RESP3 double of 6,000 digits": b"," + b"9" * 6000 + b"\r\n",
    "RESP3 verbatim": b"=7\r\ntxt:abc\r\n",
    "RESP3 error": b"!5\r\nERR x\r\n",
    "RESP3 streamed": b"$?\r\n;1\r\na\r\n;0\r\n",
    "a TLS alert": b"\x15\x03\x01\x00\x02\x02\x0a",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n",
    "zeros": bytes(100) + b"\r\n",
}


class OddServer:
    """A server that begins well and answers ``reply`` from the command on that contains ``odd_at``; then it closes."""

    def __init__(self) -> None:
        self.reply = b""
        self.odd_at = b""
        self.server = SickServer([])
        self.server.answer_by(self._answer)

    def _answer(self, command: bytes) -> list[Piece]:
        if self.odd_at in command:
            return [self.reply, None]
        if b"PING" in command:
            return [b"+PONG\r\n"]
        if b"SET" in command and NAMESPACE.document in command:
            return [b"+OK\r\n"]
        return [b":0\r\n" * command.count(b"$6\r\nEXISTS") or b":0\r\n" * max(1, command.count(b"PEXPIRE"))]


OPERATIONS: dict[str, tuple[bytes, Callable[[RedisTier, float], object]]] = {
    "login": (b"PING", lambda tier, deadline: tier.contains([key_of(1)], deadline)),
    "document": (b"SET", lambda tier, deadline: tier.contains([key_of(1)], deadline)),
    "contains": (b"EXISTS", lambda tier, deadline: tier.contains([key_of(1)], deadline)),
    "load": (b"GETEX", lambda tier, deadline: tier.load(key_of(1), memoryview(bytearray(PAYLOAD_BYTES)), deadline)),
    "renewal": (b"PEXPIRE", lambda tier, deadline: tier.store(key_of(1), payload_of(1), deadline, b"tenant!!")),
    "store": (b"$1\r\n", lambda tier, deadline: tier.store(key_of(1), payload_of(1), deadline)),
    "quota": (b"ZCARD", lambda tier, deadline: tier.store(key_of(1), payload_of(1), deadline, b"tenant!!")),
    "discard": (b"UNLINK", lambda tier, deadline: tier.discard(key_of(1), deadline)),
    "size": (b"INFO", lambda tier, deadline: tier.resident_bytes(deadline)),
}


@pytest.fixture(scope="module")
def odd() -> Iterator[OddServer]:
    server = OddServer()
    with server.server:
        yield server


def run(odd: OddServer, operation: str, reply: bytes) -> None:
    odd.odd_at, call = OPERATIONS[operation]
    odd.reply = reply
    endpoint = RedisEndpoint(port=odd.server.port)
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, endpoint, connections=1, tenant_max_bytes=1 << 20)
    try:
        call(tier, time.monotonic() + 10.0)
    except TierError as error:
        assert len(str(error)) < 300
    finally:
        tier.close()


@pytest.mark.parametrize("reply", ODD.values(), ids=ODD)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_type_of_error_leaves_a_tier(odd: OddServer, operation: str, reply: bytes) -> None:
    run(odd, operation, reply)


def replies() -> st.SearchStrategy[bytes]:
    line = st.binary(max_size=12).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b""))
    single = st.tuples(st.sampled_from([bytes([byte]) for byte in b"+-:$*_#,(=!~>%|;."]), line).map(
        lambda pair: pair[0] + pair[1] + b"\r\n"
    )
    bulk = st.binary(max_size=40).map(lambda raw: b"$%d\r\n%b\r\n" % (len(raw), raw))
    number = st.integers(-(10**30), 10**30).map(lambda value: b":%d\r\n" % value)
    return st.recursive(
        single | bulk | number,
        lambda inner: st.tuples(st.sampled_from([b"*", b"~", b">", b"%"]), st.lists(inner, max_size=4)).map(
            lambda pair: pair[0] + b"%d\r\n" % len(pair[1]) + b"".join(pair[1])
        ),
        max_leaves=12,
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(OPERATIONS)), st.lists(replies(), min_size=1, max_size=3).map(b"".join))
def test_one_type_of_error_leaves_a_tier_whatever_is_generated(odd: OddServer, operation: str, reply: bytes) -> None:
    run(odd, operation, reply)


@pytest.mark.parametrize(
    "raised",
    [
        *(RedisError, InvalidResponse, ResponseError, redis_exceptions.TimeoutError, redis_exceptions.ConnectionError),
        *(TimeoutError, ConnectionError, OSError, ValueError),
    ],
)
def test_no_error_repeats_the_whole_of_what_was_read(raised: type[Exception]) -> None:
    assert len(str(tier_error(RedisEndpoint(), raised("9" * 6000)))) < 300


def test_a_reply_is_shown_short_whatever_it_is() -> None:
    nested: object = []
    for _ in range(100_000):
        nested = [nested]
    for reply in (nested, b"x" * 10**6, 10**5000, -1, None, 1.5, True, {"a": nested}, "x" * 1000):
        assert len(shown(reply)) < 100
    while isinstance(nested, list) and nested:  # freed without recursion
        nested = nested.pop()


# --- the scheme of the URL --------------------------------------------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[Callable[[bytes | None], int]]:
    """A listener that answers the first bytes with ``reply`` and closes; None: it reads and stays silent."""
    listeners: list[socket.socket] = []
    ended = threading.Event()

    def listen(reply: bytes | None) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    if reply is None:
                        ended.wait(30.0)
                    else:
                        connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    yield listen
    ended.set()
    for listener in listeners:
        listener.close()


def message_of(port: int, seconds: float, *, tls: bool) -> str:
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=port, tls=tls), connections=1)
    try:
        error = error_of(lambda: tier.contains([key_of(1)], time.monotonic() + seconds))
    finally:
        tier.close()
    assert isinstance(error, TierError)
    return str(error)


@pytest.mark.parametrize("reply", [b"", b"\x15\x03\x01\x00\x02\x02\x0a", b"\x15\x03\x03\x00\x02\x02\x46\r\n"])
def test_a_plain_connection_to_a_port_of_tls_names_the_scheme(
    peer: Callable[[bytes | None], int], reply: bytes
) -> None:
    assert "if the server speaks TLS here, the URL begins with rediss://" in message_of(peer(reply), 10.0, tls=False)


@pytest.mark.parametrize(
    ("reply", "seconds"), [(None, 0.3), (b"", 10.0), (b"-ERR Protocol error: too big inline request\r\n", 10.0)]
)
def test_tls_to_a_plain_port_names_the_scheme(
    peer: Callable[[bytes | None], int], reply: bytes | None, seconds: float
) -> None:
    assert "if the server speaks no TLS here, the URL begins with redis://" in message_of(
        peer(reply), seconds, tls=True
    )


def test_a_server_that_is_not_there_names_no_scheme() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint(port=port, tls=True), connections=1)
    error = error_of(lambda: tier.contains([key_of(1)], time.monotonic() + 10.0))
    tier.close()
    assert isinstance(error, TierUnreachable)
    assert "redis://" not in str(error).replace("rediss://", "") or "speaks" not in str(error)
