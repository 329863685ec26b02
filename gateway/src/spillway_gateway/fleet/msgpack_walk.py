"""Walks msgpack values in steps, so that a message of megabytes is decoded piece by piece. Pure.

msgspec decodes a message as a whole. Here the ends of values are found first, some thousand values in each step, and
msgspec then decodes slices that hold a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

STEP_VALUES = 4096  # between two yields, about a millisecond
VALUE_BYTES_MAX = 1024  # of an element of a list that is decoded in pieces, on average
_SLACK_BYTES = 64 * 1024

_decode = msgspec.msgpack.Decoder().decode

# A value's first byte -> the bytes of its head and body if that byte decides them, and the values inside it.
_BYTES = [0] * 256
_VALUES = [0] * 256
for _byte in (*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)):
    _BYTES[_byte] = 1
for _count in range(16):
    _BYTES[0x80 + _count], _VALUES[0x80 + _count] = 1, 2 * _count
    _BYTES[0x90 + _count], _VALUES[0x90 + _count] = 1, _count
for _count in range(32):
    _BYTES[0xA0 + _count] = 1 + _count
for _byte, _size in {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.items():
    _BYTES[_byte] = _size
for _power in range(5):
    _BYTES[0xD4 + _power] = 2 + (1 << _power)
# First byte -> the bytes of the length that follows it, and further bytes of the head.
_LENGTHS = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},
}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # bytes of the length, values for each


class NotMsgpack(Exception):
    """The bytes are no msgpack, or values are longer than what is expected here."""


class Container:
    """An array or a map whose values are read one after another or in pieces. at: of the next one. left: values."""

    __slots__ = ("_data", "at", "is_map", "left")

    def __init__(self, data: bytes, at: int) -> None:
        first = data[at] if at < len(data) else 0xC1
        if 0x80 <= first < 0xA0:
            self.left, start = first & 0x0F, at + 1
        elif first in _CONTAINERS:
            size, _ = _CONTAINERS[first]
            start = at + 1 + size
            self.left = int.from_bytes(data[at + 1 : start], "big")
        else:
            raise NotMsgpack(f"no array or map at byte {at}")
        self._data = data
        self.at = start
        self.is_map = 0x80 <= first < 0x90 or first in (0xDE, 0xDF)
        if self.is_map:
            self.left *= 2

    def skip(self) -> Generator[None, None, tuple[int, int]]:
        """Skip the next value and return where it begins and ends."""
        start = self.at
        self.at = yield from end_of(self._data, start, 1)
        self.left -= 1
        return start, self.at

    def take(self, count: int) -> Generator[None, None, list[object]]:
        """The next values, decoded; fewer if fewer are left."""
        count = min(count, self.left)
        start = self.at
        self.at = yield from end_of(self._data, start, count)
        self.left -= count
        if self.at - start > count * VALUE_BYTES_MAX + _SLACK_BYTES:
            raise NotMsgpack(f"{count} values of {self.at - start} bytes")
        return decoded(b"\xdd" + count.to_bytes(4, "big") + self._data[start : self.at])  # type: ignore[return-value]


def end_of(data: bytes, at: int, count: int) -> Generator[None, None, int]:
    """Find the end of `count` values. Yields after each STEP_VALUES. Raises NotMsgpack if the bytes end before them."""
    sizes, values = _BYTES, _VALUES
    walked = 0
    try:
        while count > 0:
            first = data[at]
            size = sizes[first]
            if size:
                at += size
                count += values[first] - 1
            elif first in _LENGTHS:
                size, further = _LENGTHS[first]
                at += 1 + size + further + int.from_bytes(data[at + 1 : at + 1 + size], "big")
                count -= 1
            elif first in _CONTAINERS:
                size, each = _CONTAINERS[first]
                count += int.from_bytes(data[at + 1 : at + 1 + size], "big") * each - 1
                at += 1 + size
            else:
                raise NotMsgpack(f"byte {first:#x} begins no value")
            walked += 1
            if walked % STEP_VALUES == 0:
                yield
    except IndexError:
        at = len(data) + 1
    if at > len(data):
        raise NotMsgpack("the bytes end within a value")
    return at


def decoded(data: bytes) -> object:
    """One value. Raises NotMsgpack."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
        raise NotMsgpack(str(error)) from error
