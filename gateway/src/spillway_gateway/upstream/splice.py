"""Sets top-level members of a JSON body without touching any other byte.

Re-serialising would change number formats, escapes and key order, which clients and engines may rely on. Used for the
model's name in place of an alias, for a tenant's salt and for a session; every other body passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.json_walk import JsonWalk, Member

_opening = re.compile(rb"[ \t\r\n]*+\{[ \t\r\n]*+(?=([^ \t\r\n]))").match

MemberValue = str | bool | Mapping[str, Any]


class Opening(NamedTuple):
    """Of an object: the first byte after its brace, and whether it has no member."""

    inside: int
    empty: bool


class Edit(NamedTuple):
    """body[start:end] becomes the text."""

    start: int
    end: int
    text: bytes


def replace_text(body: Body, name: str, value: MemberValue) -> bytes:
    """body: a JSON object. Every top-level `name` gets the value, as parsers differ on which of two counts. Raises
    NotAnObject."""
    walk = JsonWalk(body, [name])
    walk.advance(len(body))
    return edited(body, replacements(walk.members.get(name, ()), value))


def insert_member(body: Body, name: str, value: MemberValue) -> Body:
    """body: a valid JSON object without a top-level `name`. It becomes the first member."""
    opening = opening_of(body, len(body))
    assert opening is not None
    at, _, text = insertion(opening, name, value)
    return body[:at] + text + body[at:]


def replacements(members: Iterable[Member], value: MemberValue) -> list[Edit]:
    """Edits that give each of the members the value."""
    text = msgspec.json.encode(value)
    return [Edit(member.start, member.end, text) for member in members]


def opening_of(body: Body, bytes_max: int) -> Opening | None:
    """None where the first bytes of the body do not show it."""
    match = _opening(body, 0, bytes_max)
    return None if match is None else Opening(body.index(b"{") + 1, match[1] == b"}")


def insertion(opening: Opening, name: str, value: MemberValue) -> Edit:
    """An edit that adds the member as the object's first."""
    member = msgspec.json.encode(name) + b":" + msgspec.json.encode(value) + (b"" if opening.empty else b",")
    return Edit(opening.inside, opening.inside, member)


def edited(body: Body, edits: Iterable[Edit]) -> bytes:
    """The body with all edits applied. They must be in order and not overlap."""
    pieces: list[Body] = []
    copied = 0
    for start, end, text in edits:
        pieces += (body[copied:start], text)
        copied = end
    pieces.append(body[copied:])
    return b"".join(pieces)
