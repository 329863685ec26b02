"""gRPC over HTTP/2 as the endpoint picker speaks it, against the h2 package, grpcio's client and bytes of anyone."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import uvloop
from hpack import Encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spillway_gateway.client.open_connections import (
    ENDS_PER_ITERATION,
    FRAMES_PER_ITERATION,
    REQUESTS_PER_ITERATION,
    OpenConnections,
)
from spillway_gateway.config.certificate import Certificate
from spillway_gateway.config.settings import ConnectionsConfig, TlsConfig
from spillway_gateway.picker import grpc_connection, outgoing
from spillway_gateway.picker.frames import FRAME_BYTES_MAX, PREFACE, WINDOW_BYTES_MAX, Code, Flag, Kind, frame
from spillway_gateway.picker.grpc_call import (
    CALL_WINDOW_BYTES,
    MESSAGE_BYTES_MAX,
    UNCOUNTED_BYTES,
    Call,
    CallFailed,
    Status,
)
from spillway_gateway.picker.grpc_connection import CONNECTION_WINDOW_BYTES, GrpcConnection
from spillway_gateway.picker.messages import HttpHeaders, ProcessingRequest
from spillway_gateway.picker.server import EndpointPicker
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.running import until

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Service/Echo"),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


async def echo(call: Call) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


async def hold(call: Call) -> None:
    await asyncio.Event().wait()


async def fail(call: Call) -> None:
    raise ZeroDivisionError


METHODS = {b"/test.Service/Echo": echo, b"/test.Service/Hold": hold, b"/test.Service/Fail": fail}


OPEN = OpenConnections(ConnectionsConfig(), 100_000)  # no bound is reached


class Wire(asyncio.Transport):
    """A connection's transport, whose bytes a test takes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unread = 0  # bytes that the client's socket does not take
        self.reading = True
        self.closed = False

    def writelines(self, list_of_data: Any) -> None:
        for part in list_of_data:
            self.written += part

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class Peer:
    """A client of one connection in memory, by the h2 package."""

    def __init__(self, opened: OpenConnections = OPEN, **initial: int) -> None:
        self.wire = Wire()
        self.connection = GrpcConnection(METHODS, set(), opened)
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="ascii"))
        values = {getattr(h2.settings.SettingCodes, name): value for name, value in initial.items()}
        self.http.local_settings = h2.settings.Settings(client=True, initial_values=values)
        self.http.max_inbound_frame_size = initial.get("MAX_FRAME_SIZE", FRAME_BYTES_MAX)
        self.messages: dict[int, bytearray] = {}  # stream -> bytes of its messages
        self.trailers: dict[int, dict[str, str]] = {}
        self.resets: dict[int, int] = {}

    async def connect(self) -> Peer:
        self.connection.connection_made(self.wire)
        self.http.initiate_connection()
        await self.exchange()
        return self

    def call(self, number: int, path: str = "/test.Service/Echo", **changed: str) -> None:
        headers = dict(REQUEST) | {":path": path} | {name.replace("_", "-"): text for name, text in changed.items()}
        self.http.send_headers(number, list(headers.items()))

    async def send(self, number: int, data: bytes) -> None:
        """All of it, or what the call takes until it is reset, within the window."""
        left = memoryview(data)
        while left and number not in self.resets:
            size = min(len(left), FRAME_BYTES_MAX, self.http.local_flow_control_window(number))
            self.http.send_data(number, bytes(left[:size]))
            left = left[size:]
            await self.exchange()

    async def exchange(self, cut: Callable[[bytes], Iterator[bytes]] = lambda data: iter([data])) -> None:
        """Pass bytes both ways until neither side has any more."""
        while True:
            for piece in cut(self.http.data_to_send()):
                self.connection.data_received(piece)
            for _ in range(3):
                await asyncio.sleep(0)
            if not self.wire.written:
                return
            data = bytes(self.wire.written)
            self.wire.written.clear()
            for event in self.http.receive_data(data):
                self._take(event)

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.messages.setdefault(event.stream_id, bytearray()).extend(event.data)
            self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            found = {str(name): str(value) for name, value in event.headers}
            if "grpc-status" in found or found.get(":status") != "200":
                self.trailers[event.stream_id] = found
        elif isinstance(event, h2.events.StreamReset):
            self.resets[event.stream_id] = int(event.error_code)


def packed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


LENGTHS = st.sampled_from([0, 1, 7, 300, 16_379, 16_384, 70_000, 300_000])


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(LENGTHS, max_size=5), max_size=4),
    window=st.sampled_from([1, 1_000, 65_535, 1_000_000]),
    frame_bytes=st.sampled_from([16_384, 60_000]),
    seed=st.integers(),
)
@example([[300_000]], 1_000, 16_384, 0)
def test_all_messages_return_whole_whatever_frames_pieces_and_windows(
    lengths: list[list[int]], window: int, frame_bytes: int, seed: int
) -> None:
    """Several calls at once, whose bytes are sent in pieces of any size and in frames that overlap messages."""
    draw = random.Random(seed)
    if window == 1:
        lengths = [[min(length, 300) for length in each] for each in lengths]

    def cut(data: bytes) -> Iterator[bytes]:
        while data:
            size = draw.choice([1, 9, 100, 5_000, 200_000, 200_000])
            yield data[:size]
            data = data[size:]

    async def test() -> None:
        peer = await Peer(INITIAL_WINDOW_SIZE=window, MAX_FRAME_SIZE=frame_bytes).connect()
        sent = {
            2 * at + 1: b"".join(packed(draw.randbytes(length)) for length in each) for at, each in enumerate(lengths)
        }
        left = dict(sent)
        for number in sent:
            peer.call(number)
        while left:
            number = draw.choice(list(left))
            room = min(peer.http.local_flow_control_window(number), peer.http.max_outbound_frame_size)
            size = min(room, draw.choice([1, 5, 6, 1_000, 16_384, 16_384, 16_384]), len(left[number]))
            padded = draw.choice([None, None, None, 3]) if size + 4 <= room else None
            last = size == len(left[number])
            peer.http.send_data(number, left[number][:size], end_stream=last, pad_length=padded)
            left[number] = left[number][size:]
            if last:
                del left[number]
            if not size or draw.random() < 0.3:
                await peer.exchange(cut)
        await peer.exchange(cut)
        assert {number: bytes(peer.messages.get(number, b"")) for number in sent} == sent
        assert [peer.trailers[number]["grpc-status"] for number in sent] == ["0"] * len(sent)
        assert not peer.resets and not peer.wire.closed

    run(test())


async def test_a_message_longer_than_its_window_arrives_and_one_longer_than_the_bound_ends_its_call() -> None:
    peer = await Peer(INITIAL_WINDOW_SIZE=WINDOW_BYTES_MAX).connect()
    peer.http.increment_flow_control_window(2**30)
    long = packed(random.Random(1).randbytes(MESSAGE_BYTES_MAX))
    for number, data in ((1, long), (3, struct.pack(">BI", 0, MESSAGE_BYTES_MAX + 1))):
        peer.call(number)
        await peer.send(number, data)
    assert peer.messages[1] == long and 1 not in peer.trailers
    assert peer.trailers[3]["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED)) and peer.resets == {3: Code.NO_ERROR}


async def test_a_call_that_nobody_reads_stops_at_its_window_and_holds_up_no_other() -> None:
    peer = await Peer().connect()
    sent, number = 0, 1
    while sent < 2 * CONNECTION_WINDOW_BYTES:
        peer.call(number, "/test.Service/Hold")
        await peer.exchange()
        message = packed(b"x" * 10_000)
        while peer.http.local_flow_control_window(number) >= len(message):
            peer.http.send_data(number, message)
            sent += len(message)
            await peer.exchange()
        assert peer.http.remote_settings.initial_window_size == CALL_WINDOW_BYTES
        number += 2
    peer.call(number)
    peer.http.send_data(number, packed(b"through"), end_stream=True)
    await peer.exchange()
    assert bytes(peer.messages[number]) == packed(b"through")


@pytest.mark.parametrize(
    ("changed", "data", "expected"),
    [
        ({"path": "/test.Service/None"}, b"", {"grpc-status": "12"}),
        ({"path": "/test.Service/Fail"}, packed(b""), {"grpc-status": "2"}),
        ({"content_type": "text/plain"}, b"", {":status": "415"}),
        ({}, struct.pack(">BI", 1, 0), {"grpc-status": "12"}),
    ],
    ids=["no such method", "handler fails", "no gRPC", "compressed"],
)
async def test_a_call_that_cannot_be_served_ends_with_a_status(
    changed: dict[str, str], data: bytes, expected: dict[str, str]
) -> None:
    peer = await Peer().connect()
    peer.call(1, **changed)
    peer.http.send_data(1, data)
    await peer.exchange()
    assert expected.items() <= peer.trailers[1].items()
    assert peer.resets == {1: Code.NO_ERROR} and not peer.wire.closed


BLOCK = Encoder().encode(REQUEST, huffman=False)
LONG = bytes(FRAME_BYTES_MAX)
# A header of 4,000 bytes that enters the decoder's table, and is named again by one byte each.
EXPANDING = Encoder().encode([("x", "y" * 4_000)], huffman=False) + 100 * b"\xbe"
OPENING = PREFACE + frame(Kind.SETTINGS, 0, 0)
BEGUN = OPENING + frame(Kind.HEADERS, Flag.END_HEADERS, 1, BLOCK)
ENDED = OPENING + frame(Kind.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1, BLOCK)


def blocked(*headers: tuple[str, str]) -> bytes:
    return OPENING + frame(Kind.HEADERS, Flag.END_HEADERS, 1, Encoder().encode(headers, huffman=False))


def settings_frame(name: int, value: int) -> bytes:
    return OPENING + frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", name, value))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Code.PROTOCOL_ERROR),
        (PREFACE + frame(Kind.PING, 0, 0, bytes(8)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.DATA, 0, 0, b"x"), Code.PROTOCOL_ERROR),
        (BEGUN + frame(Kind.DATA, Flag.PADDED, 1, b"\x05x"), Code.PROTOCOL_ERROR),
        (BEGUN + frame(Kind.DATA, 0, 1, bytes(FRAME_BYTES_MAX + 1)), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Kind.HEADERS, Flag.END_HEADERS, 2, BLOCK), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.HEADERS, Flag.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), Code.COMPRESSION_ERROR),
        (OPENING + frame(Kind.HEADERS, 0, 1, BLOCK) + frame(Kind.PING, 0, 0, bytes(8)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.HEADERS, 0, 1, BLOCK) + frame(Kind.CONTINUATION, 0, 3), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.HEADERS, 0, 1) + 17 * frame(Kind.CONTINUATION, 0, 1), Code.ENHANCE_YOUR_CALM),
        (OPENING + frame(Kind.HEADERS, 0, 1) + 5 * frame(Kind.CONTINUATION, 0, 1, LONG), Code.ENHANCE_YOUR_CALM),
        (OPENING + frame(Kind.HEADERS, Flag.END_HEADERS, 1, EXPANDING), Code.COMPRESSION_ERROR),
        (OPENING + frame(Kind.CONTINUATION, Flag.END_HEADERS, 1, BLOCK), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.RST_STREAM, 0, 1, bytes(4)), Code.PROTOCOL_ERROR),
        (BEGUN + frame(Kind.RST_STREAM, 0, 1, bytes(3)), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Kind.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.SETTINGS, 0, 0, b"x"), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Kind.SETTINGS, Flag.ACK, 0, b"x"), Code.FRAME_SIZE_ERROR),
        (settings_frame(2, 2), Code.PROTOCOL_ERROR),
        (settings_frame(4, 2**31), Code.FLOW_CONTROL_ERROR),
        (settings_frame(5, 16_383), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.PUSH_PROMISE, 0, 1, bytes(4)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Kind.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.PRIORITY, 0, 0, bytes(5)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.WINDOW_UPDATE, 0, 0, bytes(4)), Code.PROTOCOL_ERROR),
        (OPENING + frame(Kind.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), Code.FLOW_CONTROL_ERROR),
        (OPENING + frame(Kind.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), Code.PROTOCOL_ERROR),
    ],
)
async def test_bytes_that_break_a_rule_of_the_connection_end_it(sent: bytes, code: Code) -> None:
    peer = Peer()
    peer.connection.connection_made(peer.wire)
    peer.connection.data_received(sent)
    assert peer.wire.closed
    assert frames(peer.wire)[-1][::3] == (Kind.GOAWAY, struct.pack(">II", peer.connection._highest, code))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (BEGUN + frame(Kind.WINDOW_UPDATE, 0, 1, bytes(4)), Code.PROTOCOL_ERROR),
        (BEGUN + frame(Kind.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), Code.FLOW_CONTROL_ERROR),
        (BEGUN + frame(Kind.HEADERS, Flag.END_HEADERS, 1, BLOCK), Code.PROTOCOL_ERROR),
        (BEGUN + frame(Kind.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
        (BEGUN + 17 * frame(Kind.DATA, 0, 1, b"\0\0\0\x3f\xfb" + bytes(FRAME_BYTES_MAX - 5)), Code.FLOW_CONTROL_ERROR),
        (ENDED + frame(Kind.DATA, 0, 1, b"x"), Code.STREAM_CLOSED),
        (ENDED + frame(Kind.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1, BLOCK), Code.STREAM_CLOSED),
        (blocked(*REQUEST[1:]), Code.PROTOCOL_ERROR),
        (blocked(*REQUEST[:1], *REQUEST), Code.PROTOCOL_ERROR),
        (blocked(*REQUEST[4:], *REQUEST[:4]), Code.PROTOCOL_ERROR),
        (blocked(*REQUEST, ("connection", "close")), Code.PROTOCOL_ERROR),
        (blocked(*REQUEST[:5], ("X-Upper", "1")), Code.PROTOCOL_ERROR),
        (blocked(*REQUEST[:4], (":status", "200")), Code.PROTOCOL_ERROR),
        (blocked(*REQUEST[:4], ("te", "gzip")), Code.PROTOCOL_ERROR),
    ],
)
async def test_bytes_that_break_a_rule_of_a_call_end_that_call_alone(sent: bytes, code: Code) -> None:
    peer = Peer()
    peer.connection.connection_made(peer.wire)
    peer.connection.data_received(sent)
    await asyncio.sleep(0)
    assert (Kind.RST_STREAM, 0, 1, struct.pack(">I", code)) in frames(peer.wire)
    peer.wire.written.clear()
    echoed = packed(b"still here")
    peer.connection.data_received(frame(Kind.HEADERS, Flag.END_HEADERS, 3, BLOCK))
    peer.connection.data_received(frame(Kind.DATA, Flag.END_STREAM, 3, echoed))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (Kind.DATA, 0, 3, echoed) in frames(peer.wire) and not peer.wire.closed


def frames(wire: Wire) -> list[tuple[int, int, int, bytes]]:
    """Type, flags, stream, payload."""
    found, data = [], bytes(wire.written)
    while data:
        high, low, kind, flags, number = struct.unpack_from(">HBBBI", data)
        end = 9 + (high << 8 | low)
        found.append((kind, flags, number, data[9:end]))
        data = data[end:]
    return found


@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(
    st.lists(
        st.builds(
            frame,
            st.integers(0, 11),
            st.integers(0, 255),
            st.integers(0, 5),
            st.one_of(st.binary(max_size=40), st.just(BLOCK), st.just(packed(b"x" * 30)), st.just(bytes(4))),
        ),
        max_size=12,
    )
)
def test_no_frames_raise_and_what_ends_the_connection_is_named(sent: list[bytes]) -> None:
    async def test() -> None:
        peer = Peer()
        peer.connection.connection_made(peer.wire)
        peer.connection.data_received(OPENING)
        for each in sent:
            peer.connection.data_received(each)
            await asyncio.sleep(0)
        named = [each for each in frames(peer.wire) if each[0] == Kind.GOAWAY]
        assert bool(named) == peer.wire.closed
        peer.connection.connection_lost(None)
        await until(lambda: not peer.connection._unfinished)
        assert not peer.connection._calls

    run(test())


async def test_a_client_that_reads_nothing_is_read_no_more_until_it_does() -> None:
    peer = await Peer().connect()
    peer.connection.pause_writing()
    assert not peer.wire.reading
    peer.call(1)
    peer.http.send_data(1, packed(b"later"))
    await peer.exchange()
    assert 1 not in peer.messages
    peer.connection.resume_writing()
    assert peer.wire.reading
    await peer.exchange()
    assert bytes(peer.messages[1]) == packed(b"later")


async def test_calls_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = await Peer().connect()
    monkeypatch.setattr(grpc_connection, "CALLS_MAX", 2)
    for number in (1, 3, 5):
        peer.call(number, "/test.Service/Hold")
    await peer.exchange()
    assert peer.resets == {5: Code.REFUSED_STREAM}


async def test_a_connection_that_closes_lets_its_calls_end_and_takes_no_more() -> None:
    peer = await Peer().connect()
    peer.call(1)
    await peer.exchange()
    closing = asyncio.create_task(peer.connection.close(30))
    await asyncio.sleep(0)
    peer.call(3)
    peer.http.send_data(1, packed(b"last words"), end_stream=True)
    peer.connection.data_received(peer.http.data_to_send())
    await closing
    found = frames(peer.wire)
    assert (Kind.GOAWAY, 0, 0, struct.pack(">II", 1, Code.NO_ERROR)) in found
    assert (Kind.RST_STREAM, 0, 3, struct.pack(">I", Code.REFUSED_STREAM)) in found
    assert (Kind.DATA, 0, 1, packed(b"last words")) in found and peer.wire.closed


async def test_a_call_whose_client_leaves_is_told_and_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway_gateway.picker.grpc_call.END_SECONDS", 0.01)
    peer = await Peer().connect()
    peer.call(1, "/test.Service/Hold")
    peer.http.send_data(1, packed(b"first"))
    await peer.exchange()
    (call,) = peer.connection._calls.values()
    ended = asyncio.Event()
    call.on_end = ended.set
    peer.http.reset_stream(1)
    await peer.exchange()
    assert ended.is_set() and not peer.connection._calls
    await until(lambda: not peer.connection._unfinished)
    await call.write(b"an unread message")


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_grpcs_own_client_calls_it_on_both_event_loops(runner: Any, encrypted: bool, tmp_path: Path) -> None:
    async def refuse(call: Call) -> None:
        raise CallFailed(Status.NOT_FOUND, "100 % of \u00e9 are missing")

    pair = make_pair("gateway")
    files = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    for file, content in zip(files, pair, strict=True):
        file.write_bytes(content)
    context = Certificate(TlsConfig(str(files[0]), str(files[1])), "h2").context if encrypted else None

    def channel(port: int) -> grpc.aio.Channel:
        address = f"127.0.0.1:{port}"
        if not encrypted:
            return grpc.aio.insecure_channel(address)
        options = [("grpc.ssl_target_name_override", "127.0.0.1")]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pair[0]), options)

    async def test() -> None:
        connections: set[GrpcConnection] = set()
        methods = {**METHODS, b"/test.Service/Refuse": refuse}
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: GrpcConnection(methods, connections, OPEN), "127.0.0.1", 0, ssl=context
        )
        async with channel(server.sockets[0].getsockname()[1]) as client:
            sent = [b"x" * size for size in (0, 5, 3_000_000)]
            for _ in range(3):
                call = client.stream_stream("/test.Service/Echo")()
                for message in sent:
                    await call.write(message)
                    assert await call.read() == message
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.unary_unary("/test.Service/Refuse")(b"")
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert refused.value.details() == "100 % of \u00e9 are missing"
        server.close()
        await asyncio.gather(*(each.close(5) for each in list(connections)))

    runner(test())


async def test_a_window_that_shrinks_below_what_was_sent_stops_a_call_until_it_has_grown_by_that() -> None:
    peer = await Peer(INITIAL_WINDOW_SIZE=100).connect()
    peer.call(1)
    await peer.exchange()
    peer.connection.data_received(frame(Kind.DATA, 0, 1, packed(bytes(495))))
    await asyncio.sleep(0)
    peer.connection.data_received(frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", 4, 40)))
    for more, expected in ((60, 100), (1, 101), (1_000, 500)):
        peer.connection.data_received(frame(Kind.WINDOW_UPDATE, 0, 1, struct.pack(">I", more)))
        for _ in range(3):
            await asyncio.sleep(0)
        sent = sum(len(payload) for kind, _, _, payload in frames(peer.wire) if kind == Kind.DATA)
        assert sent == expected


async def test_a_call_that_its_client_resets_keeps_nothing_once_its_handler_has_returned() -> None:
    peer = await Peer().connect()
    peer.call(1)
    peer.http.send_data(1, packed(b"first"))
    await peer.exchange()
    (call,) = peer.connection._calls.values()
    assert call.task is not None
    task = weakref.ref(call.task)
    peer.http.reset_stream(1)
    await peer.exchange()
    assert not peer.connection._unfinished
    del call
    gc.collect()
    assert task() is None


async def test_what_was_under_way_when_a_call_ended_gets_no_second_reset() -> None:
    peer = await Peer().connect()
    peer.call(1, "/test.Service/None")
    await peer.exchange()
    assert peer.resets == {1: Code.NO_ERROR}
    peer.connection.data_received(frame(Kind.DATA, 0, 1, packed(b"late")))
    peer.connection.data_received(frame(Kind.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1, BLOCK))
    await asyncio.sleep(0)
    assert not peer.wire.written and not peer.wire.closed


async def test_a_stream_that_ends_within_a_message_ends_its_call_with_a_failure() -> None:
    peer = await Peer().connect()
    peer.call(1)
    peer.http.send_data(1, packed(b"whole") + packed(b"half")[:-1], end_stream=True)
    await peer.exchange()
    assert bytes(peer.messages[1]) == packed(b"whole")
    assert peer.trailers[1]["grpc-status"] == str(int(Status.INVALID_ARGUMENT))


async def test_requests_of_one_packet_begin_over_iterations_and_those_that_left_meanwhile_do_not() -> None:
    begun: list[int] = [0]  # in each iteration

    async def application(scope: Any, receive: Any, send: Any) -> None:
        begun[-1] += 1

    picker = EndpointPicker(application, OpenConnections(ConnectionsConfig(), 1024), lambda: True, lambda: 2**20)
    peer = Peer()
    peer.connection = GrpcConnection({b"/test.Service/Echo": picker.process}, set(), OPEN)
    peer.connection.connection_made(peer.wire)
    opening = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True)).SerializeToString()
    calls, left = 10 * REQUESTS_PER_ITERATION, 5
    data, numbers = OPENING, range(1, 2 * calls, 2)
    for number in numbers:
        data += frame(Kind.HEADERS, Flag.END_HEADERS, number, BLOCK) + frame(Kind.DATA, 0, number, packed(opening))
    peer.connection.data_received(data)
    for _ in range(3):
        begun.append(0)
        await asyncio.sleep(0)
    for number in numbers[-left:]:
        peer.connection.data_received(frame(Kind.RST_STREAM, 0, number, bytes(4)))
    while peer.connection._unfinished:
        begun.append(0)
        await asyncio.sleep(0)
    assert max(begun) <= REQUESTS_PER_ITERATION + 1 and sum(begun) == calls - left


def opening_of(number: int, *, message: bool) -> bytes:
    headers = frame(Kind.HEADERS, Flag.END_HEADERS, number, BLOCK)
    return headers + frame(Kind.DATA, 0, number, packed(b"first")) if message else headers


@pytest.mark.parametrize("message", [False, True], ids=["at once", "after a message"])
async def test_a_flood_of_calls_that_are_reset_starts_no_more_than_have_turns_and_keeps_nothing(
    message: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that are not reset wait meanwhile for all turns there are."""
    started, start = 0, GrpcConnection.start

    def counted(connection: GrpcConnection, call: Call) -> None:
        nonlocal started
        started += 1
        start(connection, call)

    monkeypatch.setattr(GrpcConnection, "start", counted)
    opened = OpenConnections(ConnectionsConfig(), 100_000)
    peer = await Peer(opened).connect()
    stay, floods = 4 * REQUESTS_PER_ITERATION, 1_000
    numbers = range(1, 2 * (stay + floods), 2)
    data = b"".join(opening_of(number, message=True) for number in numbers[:stay])
    for number in numbers[stay:]:
        data += opening_of(number, message=message) + frame(Kind.RST_STREAM, 0, number, bytes(4))
    opened.request_turns.cost_max = 0
    peer.connection.data_received(data)
    await until(lambda: peer.connection._highest == numbers[-1])
    await asyncio.sleep(0)
    assert len(peer.connection._unfinished) == len(opened.request_turns._waiting) == stay
    assert len(opened) == 1 + stay and not started
    opened.request_turns.cost_max = REQUESTS_PER_ITERATION
    await until(lambda: started == stay)
    peer.connection.connection_lost(None)
    await until(lambda: not peer.connection._unfinished)
    assert not len(opened)


OBJECTS_PER_CALL_MAX = 10  # that the garbage collector looks at; a call with a task has more than thirty


async def test_calls_that_wait_are_few_objects() -> None:
    """The garbage collector looks at those of thousands of calls in one go."""
    opened = OpenConnections(ConnectionsConfig(), 100_000)
    opened.request_turns.cost_max = 0
    peer = await Peer(opened).connect()
    await until(lambda: not peer.wire.written or not peer.wire.written.clear())
    gc.collect()
    before, numbers = len(gc.get_objects()), range(1, 2_000, 2)
    for number in numbers:
        peer.connection.data_received(opening_of(number, message=number % 4 == 1))
    await until(lambda: len(peer.connection._calls) == len(numbers))
    gc.collect()
    assert len(gc.get_objects()) - before <= OBJECTS_PER_CALL_MAX * len(numbers)
    peer.connection.connection_lost(None)


@pytest.mark.parametrize("message", [False, True], ids=["silent", "begun"])
async def test_calls_of_a_connection_that_ends_end_over_iterations(
    message: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, forget = [0], Call.forget

    def counted(call: Call) -> None:
        ended[-1] += 1
        forget(call)

    opened = OpenConnections(ConnectionsConfig(), 100_000)
    peer = await Peer(opened).connect()
    peer.connection._methods = {b"/test.Service/Echo": hold}
    numbers = range(1, 20 * ENDS_PER_ITERATION, 2)
    for number in numbers:
        peer.connection.data_received(opening_of(number, message=message))
    await until(lambda: len(peer.connection._calls) == len(numbers) and not opened.request_turns._waiting)
    monkeypatch.setattr(Call, "forget", counted)
    closing = asyncio.create_task(peer.connection.close(0.01))
    async with asyncio.timeout(60):
        while sum(ended) < len(numbers):
            ended.append(0)
            await asyncio.sleep(0)
    assert max(ended) <= 2 * ENDS_PER_ITERATION  # an iteration of the test ends in the middle of one of the loop's
    await closing
    await until(lambda: not peer.connection._unfinished)
    assert peer.wire.closed


async def test_a_window_for_which_thousands_of_calls_have_waited_is_filled_over_iterations() -> None:
    peer = await Peer(OpenConnections(ConnectionsConfig(), 100_000), INITIAL_WINDOW_SIZE=0).connect()
    message, calls = bytes(FRAME_BYTES_MAX), 400
    for number in range(1, 2 * calls, 2):
        data = opening_of(number, message=False) + frame(Kind.DATA, 0, number, packed(message)[:FRAME_BYTES_MAX])
        peer.connection.data_received(data + frame(Kind.DATA, 0, number, packed(message)[FRAME_BYTES_MAX:]))
    begun = peer.connection._calls
    await until(lambda: len(begun) == calls and all(call.unsent for call in begun.values()))
    peer.wire.written.clear()
    written = []
    peer.connection.data_received(frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
    peer.connection.data_received(frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)))
    async with asyncio.timeout(60):
        while any(call.unsent for call in begun.values()):
            await asyncio.sleep(0)
            written.append(len(peer.wire.written))
            peer.wire.written.clear()
    assert max(written) <= 2 * (outgoing.UNSENT_BYTES_MAX + 2 * FRAME_BYTES_MAX) < calls * FRAME_BYTES_MAX
    peer.connection.connection_lost(None)


MIB = 1024 * 1024
BOUNDS = ConnectionsConfig()


def tick(opened: OpenConnections, seconds: float) -> None:
    """Run a tick as it comes so many seconds from now."""
    opened.tick(asyncio.get_running_loop().time() + seconds)


async def test_what_calls_have_unread_stays_within_the_budget_and_is_given_back() -> None:
    opened = OpenConnections(BOUNDS, 1024, bodies_bytes_max=lambda: 8 * MIB)
    peers = [await Peer(opened).connect() for _ in range(4)]
    part = struct.pack(">BI", 0, MESSAGE_BYTES_MAX) + bytes(MIB)
    for peer in peers:
        for number in (1, 3, 5, 7):
            peer.call(number)
            left = memoryview(part)
            while left and number not in peer.resets:
                size = min(len(left), FRAME_BYTES_MAX, peer.http.local_flow_control_window(number))
                peer.http.send_data(number, bytes(left[:size]))
                left = left[size:]
                await peer.exchange()
                assert opened.body_budget.reserved_bytes <= 8 * MIB
    statuses = [int(each["grpc-status"]) for peer in peers for each in peer.trailers.values()]
    assert statuses and set(statuses) == {Status.RESOURCE_EXHAUSTED}
    before = opened.body_budget.reserved_bytes
    peers[0].http.reset_stream(1)
    peers[0].http.end_stream(3)
    await peers[0].exchange()
    assert opened.body_budget.reserved_bytes < before - 1.5 * MIB
    for peer in peers:
        peer.connection.connection_lost(None)
    await until(lambda: len(opened) == 0)
    assert opened.body_budget.reserved_bytes == 0 and opened.reply_budget.held_bytes == 0


async def test_what_is_unread_of_a_reply_counts_in_the_budget_for_replies_and_is_given_back() -> None:
    opened = OpenConnections(BOUNDS, 1024, bodies_bytes_max=lambda: MIB, replies_bytes_max=lambda: MIB)
    peer = await Peer(opened).connect()
    for number in (1, 3):
        peer.call(number, "/test.Service/Hold")
        await peer.exchange()
        peer.http.send_data(number, packed(bytes(9_995)))

    await peer.send(1, packed(bytes(89_995)))
    assert opened.body_budget.reserved_bytes == 100_000 - UNCOUNTED_BYTES
    for call in peer.connection._calls.values():
        call.begin_reply(opened.reply_budget)
    assert (opened.body_budget.reserved_bytes, opened.reply_budget.held_bytes) == (0, 100_000 - UNCOUNTED_BYTES)
    opened.body_budget.reserve(MIB, 1)  # by others
    await peer.send(1, packed(bytes(99_995)))
    opened.reply_budget.hold(MIB)
    await peer.send(3, packed(bytes(199_995)))
    assert opened.reply_budget.held_bytes == MIB + 200_000 + 210_000 - 2 * UNCOUNTED_BYTES and not peer.trailers
    peer.call(5)
    await peer.exchange()
    peer.connection._calls[5].begin_reply(opened.reply_budget)
    await peer.send(5, packed(bytes(MIB)))
    assert peer.trailers[5]["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))
    assert opened.reply_budget.held_bytes == MIB + 200_000 + 210_000 - 2 * UNCOUNTED_BYTES
    peer.http.reset_stream(1)
    await peer.exchange()
    assert opened.reply_budget.held_bytes == MIB + 210_000 - UNCOUNTED_BYTES
    peer.connection.connection_lost(None)
    assert opened.reply_budget.held_bytes == MIB and opened.body_budget.reserved_bytes == MIB


async def test_a_call_without_a_message_and_a_connection_without_a_frame_end_after_the_time_for_a_head() -> None:
    opened = OpenConnections(BOUNDS, 1024)
    peer = await Peer(opened).connect()
    for number in (1, 3, 5):
        peer.call(number)
    peer.http.send_data(1, packed(b"whole")[:-1])
    peer.http.send_data(5, packed(b"whole"))
    await peer.exchange()
    silent = [Peer(opened), Peer(opened)]
    for each in silent:
        each.connection.connection_made(each.wire)
    silent[1].connection.data_received(OPENING + frame(Kind.HEADERS, 0, 1, BLOCK))
    tick(opened, BOUNDS.head_seconds - 1)
    assert not any(each.wire.closed for each in silent)
    tick(opened, BOUNDS.head_seconds + 1)
    await peer.exchange()
    ended = {number: int(found["grpc-status"]) for number, found in peer.trailers.items()}
    assert ended == {1: Status.DEADLINE_EXCEEDED, 3: Status.DEADLINE_EXCEEDED} and not peer.wire.closed
    assert all(each.wire.closed for each in silent)


async def test_a_client_that_reads_nothing_of_a_call_or_of_a_connection_is_ended_and_counts_until_then() -> None:
    opened = OpenConnections(BOUNDS, 1024)
    peer = await Peer(opened, INITIAL_WINDOW_SIZE=100).connect()
    echoed = packed(bytes(1_000))
    for number in (1, 3):
        peer.connection.data_received(frame(Kind.HEADERS, Flag.END_HEADERS, number, BLOCK))
        peer.connection.data_received(frame(Kind.DATA, 0, number, echoed))
    unread = Peer(opened)
    unread.connection.connection_made(unread.wire)
    unread.wire.unread = 500
    for _ in range(3):
        await asyncio.sleep(0)
    tick(opened, 1)
    assert opened.reply_budget.held_bytes == 2 * (len(echoed) - 100) + 500
    peer.connection.data_received(frame(Kind.WINDOW_UPDATE, 0, 1, struct.pack(">I", 10)))
    tick(opened, BOUNDS.stalled_seconds)
    tick(opened, BOUNDS.stalled_seconds + 3)
    await asyncio.sleep(0)
    resets = [each[2:] for each in frames(peer.wire) if each[0] == Kind.RST_STREAM]
    assert resets == [(3, struct.pack(">I", Code.CANCEL))], "the other one has read some bytes"
    assert unread.wire.closed and not peer.wire.closed


async def flow(call: Call) -> None:
    while not call.ended:
        await call.write(bytes(1_000))


async def test_a_client_that_reads_more_slowly_than_it_is_sent_is_not_ended() -> None:
    """The call's unread bytes stay the same meanwhile, and the connection's grow."""
    opened = OpenConnections(BOUNDS, 1024)
    peer = await Peer(opened, INITIAL_WINDOW_SIZE=100).connect()
    peer.connection._methods = {b"/test.Service/Echo": flow}
    peer.connection.data_received(frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", MIB)))
    peer.connection.data_received(frame(Kind.HEADERS, Flag.END_HEADERS, 1, BLOCK) + frame(Kind.DATA, 0, 1, packed(b"")))
    (call,) = peer.connection._calls.values()
    for second in range(2, 2 * int(BOUNDS.stalled_seconds)):
        await until(lambda: bool(call.unsent))
        peer.wire.unread += 1
        tick(opened, second)
        peer.connection.data_received(frame(Kind.WINDOW_UPDATE, 0, 1, struct.pack(">I", 1_005)))
    assert not peer.wire.closed and not call.ended
    peer.connection.connection_lost(None)


async def test_calls_count_among_the_connections_that_may_be_open() -> None:
    opened = OpenConnections(ConnectionsConfig(), 4)  # of one address: 3
    peer = await Peer(opened).connect()
    for number in (1, 3, 5):
        peer.call(number, "/test.Service/Hold")
        peer.http.send_data(number, packed(b"first"))
    await peer.exchange()
    assert {number: int(found["grpc-status"]) for number, found in peer.trailers.items()} == {
        5: Status.RESOURCE_EXHAUSTED
    }
    other = Peer(opened)
    other.connection.connection_made(other.wire)
    assert other.wire.closed and not other.wire.written
    other.connection.connection_lost(None)
    peer.http.reset_stream(1)
    await peer.exchange()
    for call in list(peer.connection._unfinished):
        assert call.task is not None
        call.task.cancel()
    await until(lambda: not peer.connection._unfinished)
    idle = await Peer(opened).connect()
    assert not idle.wire.closed and len(opened) == 2


@pytest.mark.parametrize("lost", [True, False], ids=["a lost connection", "a packet of resets"])
async def test_calls_that_end_at_once_end_over_iterations(lost: bool) -> None:
    peer = await Peer(OpenConnections(ConnectionsConfig(), 100_000)).connect()
    calls, ended = 10 * ENDS_PER_ITERATION, [0]

    def count() -> None:
        ended[-1] += 1

    numbers = range(1, 2 * calls, 2)
    for number in numbers:
        peer.connection.data_received(
            frame(Kind.HEADERS, Flag.END_HEADERS, number, BLOCK) + frame(Kind.DATA, 0, number, packed(b"first"))
        )
    begun = peer.connection._calls
    await until(lambda: len(begun) == calls and all(call.task is not None for call in begun.values()))
    for call in peer.connection._calls.values():
        call.on_end = count
    if lost:
        peer.connection.connection_lost(None)
    else:
        peer.connection.data_received(b"".join(frame(Kind.RST_STREAM, 0, number, bytes(4)) for number in numbers))
    async with asyncio.timeout(60):
        while sum(ended) < calls:
            ended.append(0)
            await asyncio.sleep(0)
    assert max(ended) <= ENDS_PER_ITERATION + 1
    await until(lambda: not peer.connection._unfinished)


@pytest.mark.parametrize(("kind", "cost"), [(Kind.PING, 1), (Kind.HEADERS, grpc_connection.BLOCK_COST)])
async def test_a_packet_of_thousands_of_frames_is_read_over_iterations_and_in_order(
    kind: Kind, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled, handle = [0], GrpcConnection._handle

    def counted(connection: GrpcConnection, read: Any) -> None:
        handled[-1] += cost
        handle(connection, read)

    monkeypatch.setattr(GrpcConnection, "_handle", counted)
    peer = await Peer(OpenConnections(ConnectionsConfig(), 100_000)).connect()
    packet = frame(Kind.HEADERS, Flag.END_HEADERS, 1, BLOCK)
    for number in range(3, 6_000, 2):
        packet += frame(kind, Flag.END_HEADERS, number, BLOCK) if kind == Kind.HEADERS else frame(kind, 0, 0, bytes(8))
    peer.connection.data_received(packet + frame(Kind.DATA, Flag.END_STREAM, 1, packed(b"last"))[:-1])
    peer.connection.data_received(b"t")
    async with asyncio.timeout(60):
        while (Kind.DATA, 0, 1, packed(b"last")) not in frames(peer.wire):
            assert not peer.wire.closed
            handled.append(0)
            await asyncio.sleep(0)
    assert FRAMES_PER_ITERATION <= max(handled) <= FRAMES_PER_ITERATION + 2 * grpc_connection.BLOCK_COST
    assert peer.wire.reading
