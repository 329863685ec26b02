from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.testing.fake_documents import messages_events, response_events
from spillway_gateway.upstream.usage import WHOLE_BYTES_MAX, ReplyUsage, Usage, usage_in_events, usage_in_reply

CHAT = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
TYPED = {"input_tokens": 9, "output_tokens": 4}


def test_usage_is_read_in_the_shape_of_each_api() -> None:
    assert usage_in_reply(json.dumps({"id": "x", "usage": CHAT}).encode()) == Usage(9, 4, 8)
    typed = {"usage": {**TYPED, "input_tokens_details": {"cached_tokens": 3}}}
    assert usage_in_reply(json.dumps(typed).encode()) == Usage(9, 4, 3)
    assert usage_in_events(b"".join(response_events("r", ["a"], "m", TYPED))) == Usage(9, 4, None)
    assert usage_in_events(messages_events(["a"], "m", TYPED)[0]) == Usage(9, 0, None)
    assert usage_in_events(b"".join(messages_events(["a"], "m", TYPED))) == Usage(9, 4, None)
    stream = b'data: {"choices":[]}\n\ndata: ' + json.dumps({"usage": CHAT}).encode() + b"\n\ndata: [DONE]\n\n"
    assert usage_in_events(stream) == Usage(9, 4, 8)


def long_reply(before: int, behind: int) -> bytes:
    usage = {**CHAT, "extra": {"nested": {}}}
    content = 'he said "usage": {"prompt_tokens": 0}'
    return json.dumps(
        {"ids": [7] * before, "usage": usage, "content": content, "prompt_token_ids": [123_456] * behind}
    ).encode()


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (100_000, 0), (0, 100_000), (50_000, 50_000)])
def test_usage_is_found_wherever_it_stands_in_a_long_reply(before: int, behind: int) -> None:
    assert usage_in_reply(long_reply(before, behind)) == Usage(9, 4, 8)


def test_an_event_of_any_length_is_read() -> None:
    document = {"usage": CHAT, "token_ids": [1] * WHOLE_BYTES_MAX}
    assert usage_in_events(b"data: " + json.dumps(document).encode() + b"\n\n") == Usage(9, 4, 8)


@given(st.lists(st.integers(0, 3_000), max_size=8))
def test_parts_of_a_reply_may_be_cut_anywhere(cuts: list[int]) -> None:
    reply = long_reply(300, 300)
    reader = ReplyUsage()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(reply)], strict=True):
        reader.feed(reply[start:end])

    assert reader.usage == Usage(9, 4, 8)


@pytest.mark.parametrize(
    "said",
    [b"", b"{}", b'{"usage":null}', b'{"usage":7}', b'{"usage"', b'{"text":"\\"usage\\": {}"}', b'{"usage":{}}'],
)
def test_a_reply_without_usage_gives_none(said: bytes) -> None:
    reader = ReplyUsage()
    reader.feed(said)
    nothing = Usage(None, None, None)
    assert usage_in_reply(said) in (None, nothing)
    assert usage_in_events(b"data: " + said + b"\n\n") in (None, nothing)
    assert reader.usage is None


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("usage"), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary() | json_like.map(lambda value: json.dumps({"usage": value}).encode()), st.booleans())
def test_any_bytes_are_read_without_an_error(data: bytes, as_event: bool) -> None:
    usage: Any = usage_in_events(b"data: " + data + b"\n\n") if as_event else usage_in_reply(data)
    assert usage is None or isinstance(usage, Usage)
    ReplyUsage().feed(data)
