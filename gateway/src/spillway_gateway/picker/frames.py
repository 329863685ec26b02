"""The frames of HTTP/2 (RFC 9113), as a gRPC server reads and writes them. Pure.

Header blocks are read by the hpack package. Those written are literals, so the encoder has no state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384  # of a frame's payload, as every peer has to take it
WINDOW_BYTES = 65_535  # of every window before a setting or update changes it
WINDOW_BYTES_MAX = 2**31 - 1
BLOCK_BYTES_MAX = 64 * 1024  # of a header block, compressed or not
BLOCK_FRAMES_MAX = 16
_HEAD = struct.Struct(">HBBBI")  # length (16 and 8 bits), type, flags, stream


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """Flags of frames. ACK and END_STREAM are one bit, of different frames. Plain numbers: those of enum are slow."""

    END_STREAM = 0x1
    ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """The settings of a connection that are used here."""

    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(IntEnum):
    """The reason for which a stream or connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer broke a rule that ends the connection."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFault(Exception):
    """The peer broke a rule that ends one stream."""

    def __init__(self, number: int, code: Code) -> None:
        super().__init__(code.name)
        self.number = number
        self.code = code


class Frame(NamedTuple):
    kind: int
    flags: int
    number: int  # of the stream; 0: of the connection
    payload: bytes


class FrameReader:
    """Cuts a client's bytes into frames."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._preface = True

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next(self) -> Frame | None:
        """Return the next frame; None if it is not complete. Raises ConnectionFault for bytes that are not HTTP/2 and
        for frames that are too long."""
        data, at = self._data, self._at
        if self._preface:
            if data[: len(PREFACE)] != PREFACE[: len(data)]:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the client does not speak HTTP/2")
            if len(data) < len(PREFACE):
                return None
            self._preface, at = False, len(PREFACE)
            self._at = at
        begin = at + _HEAD.size
        if len(data) < begin:
            return None
        high, low, kind, flags, number = _HEAD.unpack_from(data, at)
        end = begin + (high << 8 | low)
        if end - begin > FRAME_BYTES_MAX:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame has {end - begin} bytes")
        if len(data) < end:
            return None
        self._at = end
        return Frame(kind, flags, number & WINDOW_BYTES_MAX, data[begin:end])


def frame_head(kind: Kind, flags: int, number: int, payload_bytes: int) -> bytes:
    """The header before a frame's payload."""
    return _HEAD.pack(payload_bytes >> 8, payload_bytes & 0xFF, kind, flags, number)


def frame(kind: Kind, flags: int, number: int, payload: bytes = b"") -> bytes:
    return frame_head(kind, flags, number, len(payload)) + payload


def settings_frame(settings: dict[Setting, int]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings.items()))


def window_frame(number: int, more_bytes: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, number, struct.pack(">I", more_bytes))


def reset_frame(number: int, code: Code) -> bytes:
    return frame(Kind.RST_STREAM, 0, number, struct.pack(">I", code))


def goaway_frame(last: int, code: Code) -> bytes:
    """last: the number of the highest stream that is served."""
    return frame(Kind.GOAWAY, 0, 0, struct.pack(">II", last, code))


def settings_of(payload: bytes) -> Iterator[tuple[int, int]]:
    """Raises ConnectionFault for values that the protocol does not have."""
    if len(payload) % 6:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
    for name, value in struct.iter_unpack(">HI", payload):
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if name == Setting.INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
        if name == Setting.MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value < 2**24:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of its range")
        yield name, value


def number_in(frame: Frame) -> int:
    """Return the 31-bit number that is the whole payload of a frame."""
    if len(frame.payload) != 4:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame of 4 bytes has another length")
    return int.from_bytes(frame.payload, "big") & WINDOW_BYTES_MAX


def unpadded(frame: Frame) -> bytes:
    """The payload of DATA or HEADERS without padding and priority."""
    payload, begin, end = frame.payload, 0, len(frame.payload)
    if frame.flags & Flag.PADDED:
        begin = 1
        end -= payload[0] if payload else 1
    if frame.kind == Kind.HEADERS and frame.flags & Flag.PRIORITY:
        begin += 5
    if end < begin:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame's padding is longer than the frame")
    return payload[begin:end] if end - begin < len(payload) else payload


class HeaderBlocks:
    """Joins the frames of header blocks and decodes them."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=BLOCK_BYTES_MAX)
        self._first: Frame | None = None
        self._block = b""
        self._frames = 0

    @property
    def open_number(self) -> int:
        """The stream whose block is not complete; 0: none."""
        return self._first.number if self._first is not None else 0

    def add(self, frame: Frame) -> tuple[Frame, list[tuple[bytes, bytes]]] | None:
        """Add HEADERS, or a CONTINUATION of the open block. Return the block's first frame and headers once it is
        complete. Raises ConnectionFault."""
        if self._first is None:
            self._first, self._block, self._frames = frame, unpadded(frame), 0
        else:
            self._block += frame.payload
        self._frames += 1
        if len(self._block) > BLOCK_BYTES_MAX or self._frames > BLOCK_FRAMES_MAX:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a request has too many headers")
        if not frame.flags & Flag.END_HEADERS:
            return None
        first, self._first = self._first, None
        try:
            return first, [(name, value) for name, value in self._decoder.decode(self._block, raw=True)]
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"a header block cannot be decoded: {error}") from error


def well_formed(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether these are the headers of a request, by RFC 9113 (8.2, 8.3)."""
    pseudo: dict[bytes, bytes] = {}
    plain = False
    for name, value in headers:
        if name.startswith(b":"):
            if plain or name in pseudo or name not in _PSEUDO:
                return False
            pseudo[name] = value
        else:
            plain = True
            if name in _OF_CONNECTIONS or name != name.lower() or (name == b"te" and value != b"trailers"):
                return False
    return all(pseudo.get(name) for name in (b":method", b":scheme", b":path"))


_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_CONNECTIONS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as literals, without indexing and without the Huffman code."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in headers)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    length, left = bytearray(b"\x7f"), size - 127
    while left >= 128:
        length.append(left & 127 | 128)
        left >>= 7
    length.append(left)
    return bytes(length) + text
