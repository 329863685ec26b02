"""The messages between the router process and its front processes, and their frames.

A frame is its length, four bytes in network order, and a msgpack array that begins with the message's tag. Both ends
are of one installation and one start, so the format has no version. design/20261125.gateway-processes.md says why.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import msgspec

from spillway_gateway.access.keys import Priority, Tenant
from spillway_gateway.routing.fleet_view import HeldPrefix, Leg
from spillway_gateway.routing.route import Decision

FRAME_BYTES_MAX = 16 * 1024 * 1024
_LENGTH = struct.Struct("!I")
FamilySamples = dict[str, list[tuple[str, tuple[str, ...], float]]]  # family -> (series, names and values of labels, _)
Headers = list[tuple[bytes, bytes]]


class FrameError(Exception):
    """The received bytes are no message: the connection cannot go on."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """number: the request's number, chosen by the front; the answer has the same."""


# -- from a front ------------------------------------------------------------------------------------------------------


class Listening(Message, tag=1, frozen=True):
    """The front accepts connections."""


class Begin(Message, tag=2, frozen=True):
    """A request of a tenant with limits; Settle follows if it is not refused."""

    number: int
    tenant: Tenant
    prompt_tokens: int


class Settle(Message, tag=3, frozen=True):
    """The request has ended: what it takes beyond what it took (access/limits.py)."""

    number: int
    requests: int
    prompt_tokens: int
    reply_tokens: int


class Route(Message, tag=4, frozen=True):
    """Choose an engine. first: enter the queue before; Left follows in every case. keys, other_keys: of blocks, eight
    bytes each in the machine's order. hints: say which engine would be chosen while the request waits, and what it
    could load. detailed: the answer has all candidates."""

    number: int
    first: bool
    model: str
    tenant: str
    priority: Priority
    request_id: bytes
    keys: bytes
    tokens_per_block: int
    prompt_tokens: int
    text_tokens: int | None
    spread_key: int
    other_keys: dict[int, bytes]
    tried: tuple[str, ...]
    only: str | None
    session: int | None
    adapter: str | None
    hints: bool
    detailed: bool
    leg: Leg


class Kind(IntEnum):
    """The outcome of an attempt, as the methods of fleet.attempt.Attempt name it."""

    PREFILL_ASSUMED = 0
    FIRST_BYTE = 1  # of a plain reply
    FIRST_BYTE_MEASURED = 2  # of a stream
    BEGAN = 3
    SUCCEEDED = 4
    FAILED = 5
    CLOSED = 6
    CLOSED_WHOLE = 7
    ACCEPTED = 8
    COMPUTED = 9
    COUNTED = 10


class Report(Message, tag=5, frozen=True):
    """events: what became of the request's attempt since the last report, with monotonic seconds or a number."""

    number: int
    events: tuple[tuple[Kind, float], ...]
    left: bool  # the request has ended, and with it its attempt and its place


class EngineFault(IntEnum):
    """A fault of an engine that a request found, as the methods of upstream.router.Router name it."""

    REFUSED = 0
    FAILED = 1
    LACKS_ADAPTER = 2


class EngineFaultReport(Message, tag=6, frozen=True):
    """text: The engine's answer, or the adapter's name."""

    model: str
    engine: str
    fault: EngineFault
    text: str


class Noted(Message, tag=7, frozen=True):
    """The first byte of an engine's reply came, or (without one) an answer was continued. It is for the live page."""

    model: str
    engine: str | None
    seconds: float


class Cached(Message, tag=8, frozen=True):
    """The prompt tokens that were expected and those that were reported to be cached. It is for the live page."""

    model: str
    expected: HeldPrefix
    cached: int


class OwnResponse(Message, tag=9, frozen=True):
    """An engine stores this response."""

    response: str
    tenant: str
    model: str
    engine: str


class ResponseTokens(Message, tag=10, frozen=True):
    response: str
    tenant: str
    tokens: int


class FindOwner(Message, tag=11, frozen=True):
    number: int
    response: str
    tenant: str


class Operator(Message, tag=12, frozen=True):
    """GET of an operator's route on the clients' listener."""

    number: int
    path: str
    headers: Headers


class Counts(Message, tag=13, frozen=True):
    """All counts of the front since its start. asked: the number of the question, 0 for none."""

    asked: int
    families: FamilySamples


class Ended(Message, tag=14, frozen=True):
    """The engine of the request's attempt has ended. digest, body_bytes: of upstream.suspects.Fingerprint; again,
    begun: as Suspects.judge."""

    number: int
    digest: bytes
    body_bytes: int
    again: bool
    begun: bool


FromFront = (
    Listening
    | Begin
    | Settle
    | Route
    | Report
    | EngineFaultReport
    | Noted
    | Cached
    | OwnResponse
    | ResponseTokens
    | FindOwner
    | Operator
    | Counts
    | Ended
)


# -- from the router ---------------------------------------------------------------------------------------------------


class Start(Message, tag=64, frozen=True):
    """config: JSON of the configuration, with the front's share of each bound. host, port: the address to listen on.
    picker_port: the endpoint picker's port; None: there is none."""

    config: bytes
    host: str
    port: int
    picker_port: int | None


class EngineSummary(Message, frozen=True):
    """An engine as fronts know it. config: JSON. is_rank: it is a data parallel rank (config/ranks.py)."""

    serial: int
    config: bytes
    is_rank: bool
    instance: str
    state: str
    answer: str
    withheld: str | None
    adapters: tuple[str, ...] | None
    vllm: tuple[int, int] | None


class ModelSummary(Message, frozen=True):
    name: str
    block_sizes: tuple[int, ...]
    tokenizer_usable: bool
    full: bool  # requests wait
    engines: tuple[EngineSummary, ...]


class State(Message, tag=65, frozen=True):
    """All models and engines."""

    models: tuple[ModelSummary, ...]


class Listed(Message, tag=66, frozen=True):
    """The page of models of an engine that State names; body: None if it gives none."""

    model: str
    serial: int
    body: bytes | None


class Configure(Message, tag=67, frozen=True):
    config: bytes


class Begun(Message, tag=68, frozen=True):
    number: int


class Refused(Message, tag=69, frozen=True):
    """error: the name of the class in errors.py."""

    number: int
    error: str
    text: str
    retry_after_seconds: int | None


class Routed(Message, tag=70, frozen=True):
    """decision: its candidates only if they were asked for. expected_prefill_seconds: the time until its prompt should
    be computed."""

    number: int
    decision: Decision
    expected_prefill_seconds: float


class Waiting(Message, tag=71, frozen=True):
    """The request waits, or its first leg is under way. At the moment it would go to this engine, which could load the
    first `tokens` tokens."""

    number: int
    engine: str
    tokens: int


class Notice(Message, tag=72, frozen=True):
    """A notice to all requests on an engine. ends: its time is over; otherwise it hangs."""

    model: str
    serial: int
    ends: bool


class OwnerIs(Message, tag=73, frozen=True):
    number: int
    model: str | None  # None: not known, or another tenant's
    engine: str
    tokens: int


class OperatorAnswer(Message, tag=74, frozen=True):
    number: int
    status: int
    headers: Headers
    body: bytes


class Count(Message, tag=75, frozen=True):
    """Answer with Counts."""

    number: int


class Drain(Message, tag=76, frozen=True):
    """Shut down; now: without waiting for running requests."""

    now: bool


class Judged(Message, tag=77, frozen=True):
    """Whether another engine may get the request."""

    number: int
    resend: bool


class Suspected(Message, tag=78, frozen=True):
    """A request that is refused until then, in monotonic seconds."""

    digest: bytes
    body_bytes: int
    until: float


class Progressed(Message, tag=79, frozen=True):
    """Engines whose metrics show that they have computed something lately."""

    serials: tuple[int, ...]


FromRouter = (
    Start
    | State
    | Listed
    | Configure
    | Begun
    | Refused
    | Routed
    | Waiting
    | Notice
    | OwnerIs
    | OperatorAnswer
    | Count
    | Drain
    | Judged
    | Suspected
    | Progressed
)


ANSWERS = (Begun, Refused, Routed, OwnerIs, OperatorAnswer, Judged)  # each to the question with its number


# -- frames ------------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
from_router: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter)


def append_frame(message: Message, buffer: bytearray) -> None:
    """Append the message's frame. Raises ValueError if it is too long; the buffer is then as before."""
    start = len(buffer)
    buffer += b"\0\0\0\0"
    _encoder.encode_into(message, buffer, start + _LENGTH.size)
    length = len(buffer) - start - _LENGTH.size
    if length > FRAME_BYTES_MAX:
        del buffer[start:]
        raise ValueError(f"a message of {length} bytes, more than {FRAME_BYTES_MAX}")
    _LENGTH.pack_into(buffer, start, length)


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decode = decoder.decode
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now. Raises FrameError."""
        if self._rest:
            data = self._rest + data
        messages = []
        view = memoryview(data)
        at, end = 0, len(data)
        while end - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {length} bytes, more than {FRAME_BYTES_MAX}")
            if end - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            try:
                messages.append(self._decode(view[at : at + length]))
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                raise FrameError(f"a frame that is no message: {error}") from error
            at += length
        self._rest = data[at:] if at < end else b""
        return messages
