"""Frames between processes: whatever is sent arrives, and what is no message ends the connection."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_gateway.access.keys import Priority, Tenant
from spillway_gateway.processes import messages
from spillway_gateway.processes.messages import (
    FRAME_BYTES_MAX,
    FrameError,
    Frames,
    Kind,
    Message,
    append_frame,
    from_front,
    from_router,
)
from spillway_gateway.routing.fleet_view import Leg

ROUTE = messages.Route(
    7,
    True,
    "m",
    "t",
    Priority.LOW,
    b"id",
    b"8 bytes.",
    128,
    130,
    None,
    2**64 - 1,
    {16: b""},
    ("e",),
    None,
    3,
    None,
    True,
    False,
    Leg.OPEN,
)
SAID = [
    ROUTE,
    messages.Begin(1, Tenant("t", frozenset({"m"}), Priority.HIGH, concurrent_requests_max=3), 12),
    messages.Report(1, ((Kind.FIRST_BYTE_MEASURED, 1.5), (Kind.CLOSED_WHOLE, 2.0)), True),
    messages.Counts(0, {"family": [("family_total", ("model", "m"), 2.0)]}),
    messages.Listening(),
]
texts = st.text(max_size=20)
numbers = st.integers(0, 2**64 - 1)
said = st.one_of(
    st.sampled_from(SAID),
    st.builds(messages.FindOwner, numbers, texts, texts),
    st.builds(messages.EngineFaultReport, texts, texts, st.sampled_from(messages.EngineFault), texts),
    st.builds(messages.Operator, numbers, texts, st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)))),
)


def framed(sent: list[Message]) -> bytes:
    buffer = bytearray()
    for message in sent:
        append_frame(message, buffer)
    return bytes(buffer)


@settings(max_examples=50)
@given(st.lists(said, max_size=4), st.lists(st.integers(1, 40), max_size=12))
def test_messages_arrive_in_order_however_the_bytes_are_cut(sent: list[Message], cuts: list[int]) -> None:
    data, frames, received = framed(sent), Frames(from_front), []
    for cut in cuts:
        received += frames.feed(data[:cut])
        data = data[cut:]
    received += frames.feed(data)

    assert received == sent


@settings(max_examples=50)
@given(st.lists(said, min_size=1, max_size=3), st.data())
def test_a_truncated_frame_waits_for_its_rest(sent: list[Message], data: st.DataObject) -> None:
    whole = framed(sent)
    cut = data.draw(st.integers(len(framed(sent[:-1])), len(whole) - 1))

    assert Frames(from_front).feed(whole[:cut]) == sent[:-1]


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_or_wait_and_never_become_what_was_not_said(data: bytes) -> None:
    for decoder in (from_front, from_router):
        try:
            received = Frames(decoder).feed(data)
        except FrameError:
            continue
        assert all(isinstance(message, Message) for message in received)


@given(st.binary(min_size=1, max_size=200))
def test_a_whole_frame_of_random_bytes_is_a_message_or_refused(data: bytes) -> None:
    frame = struct.pack("!I", len(data)) + data
    try:
        (message,) = Frames(from_front).feed(frame)
    except FrameError as error:
        assert "no message" in str(error)
    else:
        assert isinstance(message, Message)


def test_a_length_above_the_bound_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameError, match=f"more than {FRAME_BYTES_MAX}"):
        Frames(from_front).feed(struct.pack("!I", FRAME_BYTES_MAX + 1))


def test_a_message_above_the_bound_is_not_sent_and_leaves_the_others() -> None:
    buffer = bytearray()
    append_frame(ROUTE, buffer)
    before = bytes(buffer)
    with pytest.raises(ValueError, match="more than"):
        append_frame(messages.OperatorAnswer(1, 200, [], bytes(FRAME_BYTES_MAX)), buffer)

    assert buffer == before


def test_one_side_s_messages_are_none_of_the_other_s() -> None:
    with pytest.raises(FrameError):
        Frames(from_router).feed(framed([ROUTE]))
