"""Sets and removes top-level members of a JSON body without touching any other byte.

Re-serialising would change number formats, escapes and key order, which clients and engines may rely on. Used for the
model's name in place of an alias, for a tenant's salt, a session, and what a client may not send; every other body
passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.json_walk import JsonWalk, Member

_blanks = re.compile(rb"[ \t\r\n]*+").match
_opening = re.compile(rb"[ \t\r\n]*+\{[ \t\r\n]*+(?=([^ \t\r\n]))").match

MemberValue = str | bool | int | Mapping[str, Any] | None  # None: no such member


class Opening(NamedTuple):
    """The opening of an object: the first byte after its brace, and whether it has no member."""

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
    return edited(body, replacements(body, walk.members.get(name, ()), value))


def insert_member(body: Body, name: str, value: MemberValue) -> Body:
    """body: a valid JSON object without a top-level `name`. It becomes the first member."""
    opening = opening_of(body, len(body))
    assert opening is not None
    at, _, text = insertion(opening, name, value)
    return body[:at] + text + body[at:]


def replacements(body: Body, members: Sequence[Member], value: MemberValue) -> list[Edit]:
    """Return edits that give each of the members its value, or remove it. members: in order."""
    if value is not None:
        text = msgspec.json.encode(value)
        return [Edit(member.start, member.end, text) for member in members]
    edits: list[Edit] = []
    for member in members:
        key = body.rfind(b'"', 0, body.rfind(b'"', 0, member.start))
        after = _behind_blanks(body, member.end)
        if body[after] == ord(","):
            edits.append(Edit(key, _behind_blanks(body, after + 1), b""))
            continue
        while edits and edits[-1].end == key:  # the last members of the object: with the comma before them
            key = edits.pop().start
        before = len(body[:key].rstrip(b" \t\r\n")) - 1
        edits.append(Edit(before if body[before] == ord(",") else key, member.end, b""))
    return edits


def _behind_blanks(body: Body, at: int) -> int:
    found = _blanks(body, at)
    assert found is not None  # of nothing too
    return found.end()


def opening_of(body: Body, bytes_max: int) -> Opening | None:
    """Find where the object begins, in the first bytes of the body; None if they do not show it."""
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
