"""Request heads without an end, before a key was sent."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from attack.raw_client import pour
from attack.target import MIB, Target

ENDLESS = 60 * MIB
PART = 256 * 1024


def endless(start: bytes, unit: bytes) -> Iterable[bytes]:
    part = unit * (PART // len(unit))
    yield start
    for _ in range(ENDLESS // len(part)):
        yield part


LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = LINE + b"transfer-encoding: chunked\r\n\r\n"
HEADS = {
    "small headers": (LINE, b"a:b\r\n"),
    "one header's value": (LINE + b"a: ", b"x"),
    "one header's name": (LINE, b"x"),
    "the target": (b"GET /", b"x"),
    "the query": (b"GET /health?", b"x"),
    "small trailers": (CHUNKED + b"0\r\n", b"a:b\r\n"),
    "one trailer": (CHUNKED + b"0\r\na: ", b"x"),
    "a chunk's extension": (CHUNKED + b"1;", b"x"),
    "empty lines before a request": (b"", b"\r\n"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_without_an_end_delays_no_other_client(target: Target, name: str) -> None:
    start, unit = HEADS[name]
    target.suffer(lambda: pour(target.port, endless(start, unit))).assert_bearable(grown_mib_max=16)


def test_nor_do_many_at_once(target: Target) -> None:
    def attack() -> None:
        for start, unit in HEADS.values():
            pour(target.port, endless(start, unit))

    target.suffer(attack).assert_bearable(grown_mib_max=32)
