"""Sets a top-level text of a JSON body without touching any other byte.

Re-serialising would change number formats, escapes and key order, which clients and engines may rely on. Used for the
model's name behind an alias and for a tenant's salt; every other body passes as it came.
"""

from __future__ import annotations

import re

import msgspec

# Text in runs: one alternative per character would take as long as everything else together.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]', re.DOTALL)
_BLANKS = b" \t\r\n"


def replace_text(body: bytes, name: str, value: str) -> bytes:
    """body: a valid JSON object. Every top-level `name` gets the value, as parsers differ on which of two counts."""
    replacement = msgspec.json.encode(value)
    pieces: list[bytes] = []
    copied = 0
    for start, end in _values_of(body, name):
        pieces.append(body[copied:start])
        pieces.append(replacement)
        copied = end
    pieces.append(body[copied:])
    return b"".join(pieces)


def insert_text(body: bytes, name: str, value: str) -> bytes:
    """body: a valid JSON object without a top-level `name`. It becomes the first member."""
    inside = body.index(b"{") + 1
    empty = body[inside:].lstrip(_BLANKS).startswith(b"}")
    member = msgspec.json.encode(name) + b":" + msgspec.json.encode(value) + (b"" if empty else b",")
    return body[:inside] + member + body[inside:]


def _values_of(body: bytes, name: str) -> list[tuple[int, int]]:
    """Spans of the values of top-level members called `name`."""
    plain = msgspec.json.encode(name)
    spans: list[tuple[int, int]] = []
    depth = 0
    key: bytes | None = None  # the last text at depth 1, until ':' or ',' tells what it was
    start: int | None = None  # of a wanted value
    in_value = False
    for match in _TOKEN.finditer(body):
        token = match.group()
        first = token[:1]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 0 and start is not None:
                spans.append(_trimmed(body, start, match.start()))
                start = None
        elif depth != 1:
            continue
        elif first == b'"':
            if not in_value:
                key = token
        elif first == b":":
            in_value = True
            if key is not None and (key == plain or (b"\\" in key and msgspec.json.decode(key) == name)):
                start = match.end()
        else:
            if start is not None:
                spans.append(_trimmed(body, start, match.start()))
                start = None
            in_value = False
            key = None
    return spans


def _trimmed(body: bytes, start: int, end: int) -> tuple[int, int]:
    value = body[start:end]
    return start + len(value) - len(value.lstrip(_BLANKS)), start + len(value.rstrip(_BLANKS))
