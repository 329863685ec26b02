"""Replaces the model's name in a JSON body without touching any other byte.

Re-serialising would change number formats, escapes and key order, which clients and engines may rely on. Used only for
aliases; every other body passes as it came.
"""

from __future__ import annotations

import re

import msgspec

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]:,]', re.DOTALL)


def replace_model(body: bytes, model: str) -> bytes:
    """body: a valid JSON object. Every top-level "model" string is replaced: parsers differ on which of two counts."""
    replacement = msgspec.json.encode(model)
    pieces: list[bytes] = []
    copied = 0
    for start, end in _model_values(body):
        pieces.append(body[copied:start])
        pieces.append(replacement)
        copied = end
    pieces.append(body[copied:])
    return b"".join(pieces)


def _model_values(body: bytes) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    depth = 0
    key: bytes | None = None  # the last string at depth 1, until ':' or ',' tells what it was
    after_colon = False
    wanted = False
    for match in _TOKEN.finditer(body):
        token = match.group()
        first = token[:1]
        if first in b"{[":
            depth += 1
            wanted = False
        elif first in b"}]":
            depth -= 1
        elif depth != 1:
            continue
        elif first == b'"':
            if after_colon:
                if wanted:
                    spans.append(match.span())
            else:
                key = token
        elif first == b":":
            after_colon = True
            wanted = key is not None and _is_model(key)
        elif first == b",":
            after_colon = wanted = False
            key = None
    return spans


def _is_model(key: bytes) -> bool:
    return key == b'"model"' or (b"\\" in key and msgspec.json.decode(key) == "model")
