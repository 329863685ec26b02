"""Clients of the endpoint picker's port that send without end, or read nothing."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from attack.raw_client import connect
from attack.target import MIB, Target
from hpack import Encoder

from spillway_gateway.picker.frames import FRAME_BYTES_MAX, PREFACE, Flag, Kind, frame
from spillway_gateway.picker.grpc_call import UNCOUNTED_BYTES
from spillway_gateway.picker.messages import SERVICE, HttpHeaders, ProcessingRequest

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"/{SERVICE}/Process"),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
BOUND = 64 * MIB
CONNECTIONS, CALLS, CALL_BYTES = 4, 100, 2 * MIB
UNREAD = 3
_HEADERS = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True)).SerializeToString()
OPENING = struct.pack(">BI", 0, len(_HEADERS)) + _HEADERS
FLOOD_BYTES = 8 * MIB


@pytest.fixture(scope="module")
def target_settings() -> dict[str, Any]:
    limits = {"bodiesBytesMax": BOUND, "bodyBytesMax": 32 * MIB}
    return {"picker": True, "settings": {"limits": limits, "connections": {"stalledSeconds": 1.0}}}


def pour(sock: socket.socket, data: bytes) -> bool:
    """Send the data. Returns False once the other side has closed, or takes nothing for a second."""
    sock.settimeout(1.0)
    try:
        sock.sendall(data)
        sock.setblocking(False)
        while sock.recv(MIB):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def opened(target: Target, stack: ExitStack) -> socket.socket:
    sock = stack.enter_context(connect(target.picker_port))
    sock.sendall(PREFACE + frame(Kind.SETTINGS, 0, 0))
    return sock


def test_calls_that_never_end_their_first_message_stay_within_the_budget_for_bodies(target: Target) -> None:
    """The calls have 800 MB, of which the gateway takes no more than limits.bodiesBytesMax and 64 KiB a call."""
    block = Encoder().encode(HEADERS, huffman=False)
    data = b"x" * FRAME_BYTES_MAX

    def attack() -> None:
        with ExitStack() as stack:
            sockets = [opened(target, stack) for _ in range(CONNECTIONS)]
            for number in range(1, 2 * CALLS, 2):
                for sock in sockets:
                    pour(sock, frame(Kind.HEADERS, Flag.END_HEADERS, number, block))
                    pour(sock, frame(Kind.DATA, 0, number, struct.pack(">BI", 0, 2 * CALL_BYTES)))
            for _ in range(CALL_BYTES // FRAME_BYTES_MAX):
                for sock in sockets:
                    for number in range(1, 2 * CALLS, 2):
                        if not pour(sock, frame(Kind.DATA, 0, number, data)):
                            break

    held = BOUND + CONNECTIONS * CALLS * UNCOUNTED_BYTES
    # Buffers that grow are moved, and the allocator keeps the holes: two to three times what is held.
    target.suffer(attack, rounds=1).assert_bearable(grown_mib_max=4 * held // MIB)


def flood(kind: str) -> Iterator[bytes]:
    """Packets of many small frames. resets, openings: of calls, without and with their first message."""
    encoder, number = Encoder(), 1
    block, later = encoder.encode(HEADERS), encoder.encode(HEADERS)  # the second time, all are in the encoder's table
    ping = frame(Kind.PING, 0, 0, bytes(8))
    while True:
        packet = bytearray()
        while len(packet) < 64 * 1024:
            if kind == "pings":
                packet += ping
            else:
                packet += frame(Kind.HEADERS, Flag.END_HEADERS, number, block)
                if kind == "openings":
                    packet += frame(Kind.DATA, 0, number, OPENING)
                if kind != "calls":
                    packet += frame(Kind.RST_STREAM, 0, number, bytes(4))
                block, number = later, number + 2
        yield bytes(packet)


@pytest.mark.parametrize("kind", ["pings", "calls", "resets", "openings"])
def test_a_flood_of_frames_delays_no_other_and_is_not_kept(target: Target, kind: str) -> None:
    def attack() -> None:
        with ExitStack() as stack:
            sock, sent = opened(target, stack), 0
            for packet in flood(kind):
                sent += len(packet)
                if not pour(sock, packet) or sent > FLOOD_BYTES:
                    break

    target.suffer(attack).assert_bearable(grown_mib_max=64)


def test_connections_that_read_nothing_are_closed(target: Target) -> None:
    """Each asks for answers of a megabyte, and reads none of them."""
    pings = frame(Kind.PING, 0, 0, bytes(8)) * 60_000

    def attack() -> None:
        with ExitStack() as stack:
            sockets = [opened(target, stack) for _ in range(UNREAD)]
            for sock in sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            left = list(sockets)
            while left:
                for sock in list(left):
                    sock.settimeout(0.05)
                    try:
                        sock.sendall(pings)
                    except TimeoutError:
                        continue
                    except OSError:
                        left.remove(sock)

    target.suffer(attack, rounds=1).assert_bearable(grown_mib_max=96)
