"""Connections that send nothing, or half of a request."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from attack.paced_stream import SECONDS_MAX
from attack.raw_client import answer_time, closed, connect, plain_request, pour, read_all
from attack.target import MIB, Target
from stack_driver.deadlines import eventually

DESCRIPTORS = 256
UPLOADS = 12
UPLOAD_BYTES = 59 * MIB
HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
HALF_A_BODY = HALF_A_HEAD + b"content-length: 1000\r\n\r\n{"


@pytest.fixture(scope="module")
def target_settings() -> dict[str, Any]:
    bounds = {"headSeconds": 1.0, "stalledSeconds": 1.0, "idleSeconds": 1.0}
    return {"settings": {"connections": bounds, "timeouts": {"bodyReadSeconds": 1.0}}}


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD, HALF_A_BODY], ids=["nothing", "half a head", "half a body"])
def test_connections_that_fall_silent_are_closed_and_delay_no_other(target: Target, sent: bytes) -> None:
    def attack() -> None:
        sockets = [connect(target.port) for _ in range(500)]
        for sock in sockets:
            sock.sendall(sent)
        left = list(sockets)

        def all_closed() -> bool:
            left[:] = [sock for sock in left if not closed(sock)]
            return not left

        eventually("all are closed", all_closed, SECONDS_MAX)
        for sock in sockets:
            sock.close()

    target.suffer(attack).assert_bearable(grown_mib_max=32)


@pytest.mark.parametrize("start", [HALF_A_HEAD + b"a: ", HALF_A_BODY], ids=["a head", "a body"])
def test_a_trickle_does_not_keep_a_connection(target: Target, start: bytes) -> None:
    with connect(target.port) as sock:
        sock.sendall(start)

        def trickled_out() -> bool:
            try:
                sock.setblocking(True)
                sock.sendall(b"x")
            except ConnectionError:
                return True
            return closed(sock)

        eventually("the trickle is ended", trickled_out, SECONDS_MAX)


def test_silent_connections_leave_room_for_requests_probes_and_engines(start_target: Any) -> None:
    """The connections are more than the process has descriptors."""
    target = start_target(descriptors=DESCRIPTORS)
    silent: list[socket.socket] = []

    def attack() -> None:
        for _ in range(2 * DESCRIPTORS):
            silent.append(connect(target.port))
        for _ in range(2 * DESCRIPTORS):
            silent.append(connect(target.ops_port))
        answer_time(target.ops_port)
        answer_time(target.port)
        for _ in range(8):
            with connect(target.port) as sock:
                sock.sendall(plain_request("hello").replace(b"host", b"connection: close\r\nhost"))
                assert read_all(sock).startswith(b"HTTP/1.1 200 ")

    target.suffer(attack).assert_bearable(grown_mib_max=32)
    for sock in silent:
        sock.close()


def test_uploads_that_do_not_end_stay_within_one_bound(target: Target) -> None:
    """Twelve of 59 MB; the gateway takes no more of them than limits.bodiesBytesMax."""

    def attack() -> None:
        head = HALF_A_HEAD + b"content-length: %d\r\n\r\n" % UPLOAD_BYTES
        with ThreadPoolExecutor(UPLOADS) as uploads:
            parts = [head, *[b"x" * MIB] * (UPLOAD_BYTES // MIB - 1)]
            replies = list(uploads.map(lambda _: pour(target.port, parts), range(UPLOADS)))
        assert any(b"gateway_overloaded" in reply or not reply for reply in replies)

    target.suffer(attack).assert_bearable(grown_mib_max=320)
