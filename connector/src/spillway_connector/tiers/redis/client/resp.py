"""The Redis protocol (RESP2 and RESP3), as far as a store of large values needs it: encoding and parsing without I/O.

Specification: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from dataclasses import dataclass

from spillway_connector.errors import RefusedReason, TierRefused

LINE_BYTES_MAX = 64 * 1024
BULK_BYTES_MAX = 4 * 1024 * 1024  # of replies parsed here; large values are received in place and never pass through
ITEMS_MAX = 64 * 1024
DEPTH_MAX = 8

_CRLF = b"\r\n"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """``code`` is the first word (OOM, READONLY, MOVED, ERR, ...), ``message`` the whole line."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Push:
    """An out-of-band message (RESP3): not the answer to any command."""

    items: tuple[object, ...]


Reply = bytes | int | float | bool | None | ErrorReply | Push | list["Reply"] | dict[object, "Reply"]


class Incomplete(Exception):
    """More bytes are needed."""


class ProtocolError(TierRefused):
    """The peer sent something that is not RESP, or exceeds our bounds. The connection is of no further use."""

    def __init__(self, message: str) -> None:
        super().__init__(RefusedReason.PROTOCOL, message)


def encode_command(*words: bytes) -> bytes:
    """One command as an array of bulk strings."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(parts)


def encode_set(key: bytes, value_bytes: int, ttl_ms: int | None, *, only_if_absent: bool = True) -> tuple[bytes, bytes]:
    """What surrounds the value of ``SET key value [PX ttl_ms] [NX]``; the value itself is sent from where it lies."""
    options = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    if only_if_absent:
        options.append(b"NX")
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(key), key, value_bytes)
    tail = _CRLF + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return head, tail


def read_line(data: bytes | bytearray, start: int) -> tuple[bytes, int]:
    """The line at ``start`` without its end, and the position after it. Raises Incomplete, ProtocolError."""
    end = data.find(_CRLF, start, start + LINE_BYTES_MAX + 2)
    if end < 0:
        if len(data) - start > LINE_BYTES_MAX + 1:
            raise ProtocolError(f"a line of more than {LINE_BYTES_MAX} bytes")
        raise Incomplete
    return bytes(data[start:end]), end + 2


def parse_reply(data: bytes | bytearray, start: int = 0, depth: int = 0) -> tuple[Reply, int]:
    """The reply at ``start`` and the position after it. Attributes (RESP3) are skipped.

    Bounded in depth, items and bytes whatever the peer claims. Raises Incomplete, ProtocolError.
    """
    if depth > DEPTH_MAX:
        raise ProtocolError(f"replies nested deeper than {DEPTH_MAX}")
    line, position = read_line(data, start)
    if not line:
        raise ProtocolError("an empty line where a reply should begin")
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest, position
    if kind == b"-":
        return _error(rest), position
    if kind == b":":
        return _integer(rest), position
    if kind == b"(":
        return _integer(rest), position
    if kind == b"_":
        if rest:
            raise ProtocolError(f"a null with a value: {rest[:32]!r}")
        return None, position
    if kind == b"#":
        if rest not in (b"t", b"f"):
            raise ProtocolError(f"a boolean that is neither t nor f: {rest[:32]!r}")
        return rest == b"t", position
    if kind == b",":
        try:
            return float(rest), position
        except ValueError:
            raise ProtocolError(f"not a number: {rest[:32]!r}") from None
    if kind in b"$=!":
        return _bulk(kind, rest, data, position)
    if kind in b"*~>%|":
        return _aggregate(kind, rest, data, position, depth)
    raise ProtocolError(f"unknown reply type {kind!r}")


def parse_length(rest: bytes, maximum: int) -> int:
    """A length announcement: -1 (null) to ``maximum``. Raises ProtocolError."""
    length = _integer(rest)
    if not -1 <= length <= maximum:
        raise ProtocolError(f"a length of {length}, at most {maximum} is acceptable")
    return length


def _bulk(kind: bytes, rest: bytes, data: bytes | bytearray, position: int) -> tuple[Reply, int]:
    length = parse_length(rest, BULK_BYTES_MAX)
    if length < 0:
        return None, position
    end = position + length
    if len(data) < end + 2:
        raise Incomplete
    if data[end : end + 2] != _CRLF:
        raise ProtocolError("a bulk string without its end")
    body = bytes(data[position:end])
    if kind == b"!":
        return _error(body), end + 2
    if kind == b"=":
        if body[3:4] != b":":
            raise ProtocolError("a verbatim string without its format")
        body = body[4:]
    return body, end + 2


def _aggregate(kind: bytes, rest: bytes, data: bytes | bytearray, position: int, depth: int) -> tuple[Reply, int]:
    count = parse_length(rest, ITEMS_MAX)
    if count < 0:
        return None, position
    pairs = kind in b"%|"
    items: list[Reply] = []
    for _ in range(count * 2 if pairs else count):
        item, position = parse_reply(data, position, depth + 1)
        items.append(item)
    if kind == b"|":
        return parse_reply(data, position, depth + 1)
    if kind == b">":
        return Push(tuple(items)), position
    if not pairs:
        return items, position
    try:
        return dict(zip(items[::2], items[1::2], strict=True)), position
    except TypeError:
        raise ProtocolError("a map whose name is an aggregate") from None


def _integer(rest: bytes) -> int:
    digits = rest[1:] if rest[:1] in (b"-", b"+") else rest
    if not digits.isdigit() or len(digits) > 64:
        raise ProtocolError(f"not an integer: {rest[:32]!r}")
    return int(rest)


def _error(line: bytes) -> ErrorReply:
    message = line.decode("utf-8", "replace")
    return ErrorReply(message.split(" ", 1)[0], message)
