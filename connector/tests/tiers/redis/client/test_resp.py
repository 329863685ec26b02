from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import RefusedReason
from spillway_connector.tiers.redis.client.resp import (
    BULK_BYTES_MAX,
    ErrorReply,
    Incomplete,
    ProtocolError,
    Push,
    encode_command,
    encode_set,
    parse_reply,
)

_line = st.binary(max_size=20).filter(lambda text: b"\r" not in text and b"\n" not in text)


@st.composite
def _replies(draw: st.DrawFn, depth: int = 0) -> tuple[bytes, object]:
    """A reply on the wire and what it means."""
    kind = draw(st.sampled_from("+-:$_#,(=!" if depth > 2 else "+-:$_#,(=!*~>%|"))
    if kind == "+":
        text = draw(_line)
        return b"+%b\r\n" % text, text
    if kind == "-":
        return b"-OOM full\r\n", ErrorReply("OOM", "OOM full")
    if kind in ":(":
        number = draw(st.integers(-(2**63), 2**63))
        return b"%b%d\r\n" % (kind.encode(), number), number
    if kind == "$":
        body = draw(st.none() | st.binary(max_size=50))
        return (b"$-1\r\n", None) if body is None else (b"$%d\r\n%b\r\n" % (len(body), body), body)
    if kind == "_":
        return b"_\r\n", None
    if kind == "#":
        value = draw(st.booleans())
        return (b"#t\r\n" if value else b"#f\r\n"), value
    if kind == ",":
        real = draw(st.floats(allow_nan=False))
        return b",%b\r\n" % repr(real).encode(), real
    if kind == "=":
        body = draw(st.binary(max_size=20))
        return b"=%d\r\ntxt:%b\r\n" % (len(body) + 4, body), body
    if kind == "!":
        return b"!8\r\nERR oops\r\n", ErrorReply("ERR", "ERR oops")
    if kind == "|":
        wire, meaning = draw(_replies(depth + 1))
        return b"|1\r\n+ttl\r\n:5\r\n" + wire, meaning
    if kind == "%":
        wire, meaning = draw(_replies(depth + 1))
        return b"%%1\r\n+name\r\n%b" % wire, {b"name": meaning}
    items = draw(st.lists(_replies(depth + 1), max_size=3))
    wire = b"%b%d\r\n" % (kind.encode(), len(items)) + b"".join(item for item, _ in items)
    meanings = [meaning for _, meaning in items]
    return wire, Push(tuple(meanings)) if kind == ">" else meanings


@given(_replies(), st.binary(max_size=10))
def test_every_reply_is_understood_and_what_follows_is_left(reply: tuple[bytes, object], rest: bytes) -> None:
    wire, meaning = reply
    assert parse_reply(wire + rest) == (meaning, len(wire))


@given(_replies())
def test_fed_byte_by_byte_it_waits_and_then_understands(reply: tuple[bytes, object]) -> None:
    wire, meaning = reply
    received = bytearray()
    for byte in wire[:-1]:
        received.append(byte)
        with pytest.raises(Incomplete):
            parse_reply(received)
    received.append(wire[-1])
    assert parse_reply(received) == (meaning, len(wire))


@given(st.binary(max_size=200) | st.text("+-:$_#,(=!*~>%|0123456789\r\nt", max_size=60).map(str.encode))
def test_noise_is_a_reply_incomplete_or_refused(noise: bytes) -> None:
    try:
        _, end = parse_reply(noise)
        assert 0 < end <= len(noise)
    except Incomplete:
        pass
    except ProtocolError as error:
        assert error.reason == RefusedReason.PROTOCOL


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"$abc\r\n",
        b"$-2\r\n",
        b"$%d\r\n" % (BULK_BYTES_MAX + 1),
        b"*99999999999999999999\r\n",
        b":\r\n",
        b":1 2\r\n",
        b"$3\r\nabcXX",
        b"#x\r\n",
        b"_x\r\n",
        b",one\r\n",
        b"=3\r\nabc\r\n",
        b"%1\r\n*0\r\n:1\r\n",
        b"*1\r\n" * 20,
        b"+" + b"a" * 70_000,
    ],
)
def test_what_is_not_the_protocol_is_refused_within_bounds(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_reply(wire)


def test_not_a_number_is_a_double() -> None:
    value, _ = parse_reply(b",nan\r\n")
    assert isinstance(value, float) and math.isnan(value)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5))
def test_a_command_is_an_array_of_its_words(words: list[bytes]) -> None:
    assert parse_reply(encode_command(*words))[0] == words


@given(st.binary(max_size=80), st.binary(max_size=100), st.none() | st.integers(1, 10**12))
def test_a_set_around_its_value_is_one_command(key: bytes, value: bytes, ttl_ms: int | None) -> None:
    head, tail = encode_set(key, len(value), ttl_ms)
    options = [b"NX"] if ttl_ms is None else [b"PX", b"%d" % ttl_ms, b"NX"]
    assert parse_reply(head + value + tail) == ([b"SET", key, value, *options], len(head + value + tail))
