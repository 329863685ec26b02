from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.upstream.sse import EVENT_BYTES_MAX, EventFramer, count_events, is_done

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def events_of(texts: list[str], line_end: bytes) -> bytes:
    return b"".join(b"data: " + json.dumps({"text": text}).encode() + line_end * 2 for text in texts)


@given(st.lists(st.text(), min_size=1, max_size=6), st.sampled_from(LINE_ENDS), st.data())
def test_events_come_out_whole_wherever_reads_cut_them(texts: list[str], line_end: bytes, data: st.DataObject) -> None:
    stream = events_of(texts, line_end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    framer, given_out = EventFramer(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        given_out.append(framer.feed(stream[start:end]))
        assert framer.at_boundary
        for event in given_out[-1].split(line_end * 2)[:-1]:
            assert json.loads(event.removeprefix(b"data: "))["text"] in texts
        assert not given_out[-1] or given_out[-1].endswith(line_end * 2)

    assert b"".join(given_out) + framer.rest() == stream
    assert framer.rest() == b""


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_no_byte_is_lost_or_added(chunks: list[bytes]) -> None:
    framer = EventFramer()
    assert b"".join([framer.feed(chunk) for chunk in chunks]) + framer.rest() == b"".join(chunks)


@given(st.lists(st.binary(max_size=40), max_size=12), st.sets(st.integers(0, 11)))
def test_the_beginning_of_an_event_may_be_asked_for(chunks: list[bytes], asked_behind: set[int]) -> None:
    framer, given_out = EventFramer(), b""
    for at, chunk in enumerate(chunks):
        given_out += framer.feed(chunk)
        if at in asked_behind and framer.holds_part:
            given_out += framer.part()
            assert not framer.at_boundary and given_out == b"".join(chunks[: at + 1])
    assert given_out + framer.rest() == b"".join(chunks)


def test_an_event_without_end_is_passed_on_in_parts() -> None:
    framer = EventFramer()
    part = b"data: " + b"x" * 100_000
    out = b"".join(framer.feed(part) for _ in range(12))

    assert len(out) > EVENT_BYTES_MAX and not framer.at_boundary
    assert framer.feed(b"end\n\n") == b"end\n\n"
    assert framer.at_boundary and framer.feed(b"data: next") == b""


@pytest.mark.parametrize("line_end", LINE_ENDS)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_long_event_ends_wherever_reads_cut_its_blank_line(line_end: bytes, cut: int) -> None:
    framer = EventFramer(bytes_max=10)
    event = b"data: " + b"x" * 20 + 2 * line_end
    for part in (event[:-cut], event[-cut:]):
        framer.feed(part)

    assert framer.at_boundary and framer.feed(b"data: next") == b""


def test_events_are_counted_by_line_and_not_by_text() -> None:
    stream = b'data: {"text":"data: data:"}\n\n: ping\n\nevent: a\ndata: {}\n\ndata: [DONE]\n\n'
    assert count_events(stream) == 2
    assert count_events(b"data: {}\n\n") == 1


@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_the_end_is_an_event_of_its_own(line_end: bytes) -> None:
    assert is_done(b"data: {}\n\ndata: [DONE]" + line_end * 2)
    assert not is_done(b'data: {"text":"data: [DONE]"}' + line_end * 2)
