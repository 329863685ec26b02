"""The load generator on scripted bytes: what counts, and as what. No clock decides anything here."""

from __future__ import annotations

import asyncio
import itertools
from time import perf_counter

import pytest
from gateway_load.load_generator import Arrivals, Client, Measured, requests_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: 4\r\n\r\nokay"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STREAM = CHUNKED + b"8\r\ndata: a\n\r\n8\r\ndata: b\n\r\n10\r\ndata: [DONE]\n\n  \r\n0\r\n\r\n"
REQUESTS = list(requests_of([b"{}", b'{"a":1}'], 80))


class Wire(asyncio.Transport):
    """A transport that records what the client sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True


def connected(*, stream: bool) -> tuple[Client, Wire, Measured]:
    """A client that has sent its first request, inside the measured window."""
    measured, wire = Measured(), Wire()
    client = Client(itertools.cycle(REQUESTS), stream, measured)
    client.connection_made(wire)
    client.measuring = True
    client.send_next()
    return client, wire, measured


async def test_a_whole_reply_counts_and_the_next_request_leaves() -> None:
    client, wire, measured = connected(stream=False)
    client.data_received(WHOLE)
    client.data_received(WHOLE)

    assert len(measured.whole) == 2 and measured.failures == 0
    assert wire.sent == [REQUESTS[0], REQUESTS[1], REQUESTS[0]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 10_000])
@pytest.mark.parametrize("reply", [WHOLE, STREAM])
async def test_replies_are_the_same_however_their_bytes_come_apart(size: int, reply: bytes) -> None:
    client, wire, measured = connected(stream=reply is STREAM)
    for start in range(0, len(reply), size):
        assert len(measured.whole) == 0
        client.data_received(reply[start : start + size])

    assert len(measured.whole) == 1 and len(wire.sent) == 2
    assert measured.failures == 0
    if reply is STREAM:
        assert measured.events == 3 and len(measured.first_event) == 1
        assert measured.first_event[0] <= measured.whole[0]


def test_requests_have_a_head_with_their_length() -> None:
    for request, body in zip(requests_of([b"{}", b'{"a":1}'], 80, key="k"), (b"{}", b'{"a":1}'), strict=True):
        head, _, rest = request.partition(b"\r\n\r\n")
        assert rest == body and f"content-length: {len(body)}".encode() in head and b"Bearer k" in head


async def test_outside_the_window_nothing_counts() -> None:
    client, wire, measured = connected(stream=True)
    client.measuring = False
    client.data_received(STREAM)

    assert (len(measured.whole), measured.events, len(measured.first_event)) == (0, 0, 0)
    assert len(wire.sent) == 2


async def test_a_stopping_client_sends_no_more_and_rests() -> None:
    client, wire, measured = connected(stream=False)
    client.stopping = True
    client.data_received(WHOLE)

    assert len(wire.sent) == 1 and client.idle.done()
    assert measured.failures == 0


async def test_another_status_is_a_failure_and_is_quoted() -> None:
    client, wire, measured = connected(stream=False)
    client.data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")

    assert wire.aborted and measured.failures == 1 and "503 Busy" in measured.first_failure
    client.connection_lost(None)
    assert measured.failures == 1 and client.idle.done()


async def test_a_connection_that_ends_in_the_middle_is_a_failure() -> None:
    client, _, measured = connected(stream=False)
    client.data_received(WHOLE[:-1])
    client.connection_lost(None)

    assert measured.failures == 1 and "closed" in measured.first_failure
    assert client.idle.done() and len(measured.whole) == 0


async def test_requests_that_arrive_wait_for_a_connection_and_their_time_counts_from_the_arrival() -> None:
    measured, wire, arrivals = Measured(), Wire(), Arrivals(per_second=1.0)
    client = Client(itertools.cycle(REQUESTS), False, measured, arrivals)
    client.connection_made(wire)
    client.measuring = True
    client.send_next()
    assert not wire.sent, "nothing has arrived"
    arrivals.arrive(perf_counter())
    arrivals.arrive(perf_counter() - 100.0)
    assert len(wire.sent) == 1, "the connection is busy"
    client.data_received(WHOLE)
    assert len(wire.sent) == 2
    client.data_received(WHOLE)
    assert len(wire.sent) == 2 and measured.whole[1] >= 100.0
    assert measured.failures == 0 and not client.idle.done()
    client.stop()
    assert client.idle.done()
