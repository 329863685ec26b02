"""Finds the top-level members of a JSON object in steps of a bounded size, so that a long body is scanned between other
work. Pure.

Nested values are skipped by their strings and brackets alone. The result is right for every document that a JSON parser
accepts; an invalid document may pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.upstream.forward import Body

_BLANKS = re.compile(rb"[ \t\r\n]*+")
_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # the inside of a string
# A string, or a quote whose string does not end in this step, or a bracket.
_NESTED = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
# A key without escapes and its colon; then, unless the value is nested or does not end in this step, the value and what
# follows it.
_MEMBER = re.compile(
    rb'[ \t\r\n]*+"([^"\\]*+)"[ \t\r\n]*+:[ \t\r\n]*+'
    rb'(?:("[^"\\]*+(?:\\.[^"\\]*+)*+"|[^ \t\r\n,:"{}\[\]]++)[ \t\r\n]*+([,}]))?+',
    re.DOTALL,
)
_SCALAR = re.compile(rb'[^ \t\r\n,:"{}\[\]]*+')
_QUOTE, _COLON, _COMMA, _OPEN, _CLOSE = b'":,{}'
_BEGINS = b"{["
DEPTH_MAX = 1000  # about what Python's own parser takes, and so an engine
REPEATS_MAX = 1024  # of one name: code that changes a member edits each of them
KEY_BYTES_MAX = 512  # every wanted name is shorter, with each character escaped


class NotAnObject(Exception):
    """The document is no JSON object; the message names the position."""


class Member(NamedTuple):
    """A value at body[start:end], and how many strings and arrays or objects it holds, itself included. text_bytes: of
    its strings."""

    start: int
    end: int
    strings: int
    containers: int
    text_bytes: int


class _Next(Enum):
    """The token that has to come next."""

    OBJECT = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    SCALAR = auto()  # the rest of one
    NESTED = auto()  # the rest of an array or object
    STRING = auto()  # the rest of one
    COMMA_OR_END = auto()
    NOTHING = auto()


class JsonWalk:
    """One document. names: of the members to find; of a name that is repeated, all are kept, up to REPEATS_MAX."""

    def __init__(self, body: Body, names: Iterable[str]) -> None:
        self._body = body
        self._names = {name.encode(): name for name in names}
        self.at = 0  # bytes scanned
        self._next = _Next.OBJECT
        self._depth = 1
        self._string_is_key = False
        self._key_start = 0
        self._value_start = 0
        self._name: str | None = None
        self._before = (0, 0, 0)  # the three counts where the value begins
        self.members: dict[str, list[Member]] = {}
        self.inside = 0  # the first byte after the object's opening brace
        self.empty = True  # no member was seen
        self.strings = 0
        self.containers = 0
        self.text_bytes = 0

    def advance(self, bytes_max: int) -> bool:
        """Scan this number of further bytes; True at the end. Raises NotAnObject, ClientBadRequest for a name that is
        repeated too often, and RecursionError for values nested deeper than DEPTH_MAX."""
        end = min(self.at + bytes_max, len(self._body))
        while self.at < end:
            if self._next is _Next.NESTED:
                self._nested(end)
            elif self._next is _Next.STRING:
                self._string(end)
            elif self._next is _Next.SCALAR:
                self.at = _SCALAR.match(self._body, self.at, end).end()  # type: ignore[union-attr]
                if self.at < end:
                    self._end_value()
            elif self._next in (_Next.KEY, _Next.KEY_OR_END) and self._member(end):
                pass
            else:
                self.at = _BLANKS.match(self._body, self.at, end).end()  # type: ignore[union-attr]
                if self.at < end:
                    self._structure(self._body[self.at])
        if self.at < len(self._body):
            return False
        if self._next is not _Next.NOTHING:
            raise NotAnObject("it ends too early")
        return True

    def _member(self, end: int) -> bool:
        """A member in one match, the common case; False if its bytes have to be read one by one."""
        match = _MEMBER.match(self._body, self.at, end)
        if match is None:
            return False
        self.empty = False
        key = match[1]
        self.strings += 1
        self.text_bytes += len(key)
        self.at = match.end()
        if match[3] is None:
            self._name = self._names.get(bytes(key))
            self._next = _Next.VALUE
            return True
        start, stop = match.span(2)
        text = self._body[start] == _QUOTE
        self.strings += text
        text_bytes = stop - start - 2 if text else 0
        self.text_bytes += text_bytes
        name = self._names.get(bytes(key))
        if name is not None:
            self._keep(name, Member(start, stop, int(text), 0, text_bytes))
        self._next = _Next.KEY if match[3] == b"," else _Next.NOTHING
        return True

    def _structure(self, byte: int) -> None:
        """One byte at the top level that is not blank."""
        expected, at = self._next, self.at
        self.at += 1
        if expected is _Next.VALUE:
            self._value_start = at
            self._before = (self.strings, self.containers, self.text_bytes)
            if byte == _QUOTE:
                self._string_is_key, self._next = False, _Next.STRING
            elif byte in _BEGINS:
                self.containers += 1
                self._depth, self._next = 2, _Next.NESTED
            elif byte in b",:}]":
                raise NotAnObject(f"a value is missing at byte {at}")
            else:
                self._next = _Next.SCALAR
        elif byte == _QUOTE and expected in (_Next.KEY, _Next.KEY_OR_END):
            self.empty = False
            self._key_start, self._string_is_key, self._next = at, True, _Next.STRING
        elif byte == _COLON and expected is _Next.COLON:
            self._next = _Next.VALUE
        elif byte == _COMMA and expected is _Next.COMMA_OR_END:
            self._next = _Next.KEY
        elif byte == _CLOSE and expected in (_Next.COMMA_OR_END, _Next.KEY_OR_END):
            self._next = _Next.NOTHING
        elif byte == _OPEN and expected is _Next.OBJECT:
            self.containers += 1
            self.inside = self.at
            self._next = _Next.KEY_OR_END
        else:
            raise NotAnObject(f"unexpected byte {at}")

    def _nested(self, end: int) -> None:
        body, depth, strings, containers, text_bytes = self._body, self._depth, 0, 0, 0
        deepest = 0
        begin, self.at = self.at, end
        for match in _NESTED.finditer(body, begin, end):
            start, stop = match.span()
            byte = body[start]
            if byte == _QUOTE:
                if stop - start == 1:  # its end lies beyond this step
                    self._string_is_key, self._next, self.at = False, _Next.STRING, stop
                    break
                strings += 1
                text_bytes += stop - start - 2
            elif byte in _BEGINS:
                depth += 1
                containers += 1
                deepest = max(deepest, depth)
            else:
                depth -= 1
                if depth == 1:
                    self.at = stop
                    break
        self._depth = depth
        self.strings += strings
        self.containers += containers
        self.text_bytes += text_bytes
        if deepest > DEPTH_MAX:
            raise RecursionError
        if depth == 1:
            self._end_value()

    def _string(self, end: int) -> None:
        """Continue in a string, after its opening quote."""
        begin = self.at
        at = _TEXT.match(self._body, begin, end).end()  # type: ignore[union-attr]
        if at == end:
            self.at = at
        elif self._body[at] != _QUOTE:  # a backslash, and what it escapes lies beyond this step
            self.at = at = min(at + 2, len(self._body))
        self.text_bytes += at - begin
        if at < end and self._body[at] == _QUOTE:
            self.at = at + 1
            self.strings += 1
            if self._string_is_key:
                key = self._body[self._key_start : self.at] if self.at - self._key_start <= KEY_BYTES_MAX else b""
                self._name = self._wanted(key)
                self._next = _Next.COLON
            elif self._depth > 1:
                self._next = _Next.NESTED
            else:
                self._end_value()

    def _keep(self, name: str, member: Member) -> None:
        found = self.members.setdefault(name, [])
        if len(found) == REPEATS_MAX:
            raise ClientBadRequest(f"The request body has {name!r} more than {REPEATS_MAX} times; send it once", name)
        found.append(member)

    def _end_value(self) -> None:
        if self._name is not None:
            strings, containers, text_bytes = self._before
            member = Member(
                self._value_start,
                self.at,
                self.strings - strings,
                self.containers - containers,
                self.text_bytes - text_bytes,
            )
            self._keep(self._name, member)
            self._name = None
        self._depth, self._next = 1, _Next.COMMA_OR_END

    def _wanted(self, key: Body) -> str | None:
        """key: the key with its quotes."""
        if b"\\" not in key:
            return self._names.get(bytes(key[1:-1]))
        try:
            return self._names.get(msgspec.json.decode(key, type=str).encode())
        except (msgspec.DecodeError, UnicodeError):
            return None  # no parser reads it as a wanted name
