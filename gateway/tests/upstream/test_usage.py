from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.testing.fake_documents import messages_events, response_events
from spillway_gateway.upstream.usage import SCAN_BYTES_MAX, Usage, read_usage

CHAT = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
TYPED = {"input_tokens": 9, "output_tokens": 4}


def test_each_api_tells_its_own_way() -> None:
    assert read_usage(json.dumps({"id": "x", "usage": CHAT}).encode()) == Usage(9, 4, 8)
    assert read_usage(json.dumps({"usage": {**TYPED, "input_tokens_details": {"cached_tokens": 3}}}).encode()) == Usage(
        9, 4, 3
    )
    assert read_usage(b"".join(response_events("r", ["a"], "m", TYPED))) == Usage(9, 4, None)
    assert read_usage(messages_events(["a"], "m", TYPED)[0]) == Usage(9, 0, None)
    assert read_usage(b"".join(messages_events(["a"], "m", TYPED))) == Usage(9, 4, None)
    stream = b'data: {"choices":[]}\n\ndata: ' + json.dumps({"usage": CHAT}).encode() + b"\n\ndata: [DONE]\n\n"
    assert read_usage(stream) == Usage(9, 4, 8)


def test_the_end_of_a_long_reply_is_enough() -> None:
    long = {"data": [0.123456] * SCAN_BYTES_MAX, "usage": {**CHAT, "extra": {"nested": {}}}}
    assert read_usage(json.dumps(long).encode()) == Usage(9, 4, 8)
    assert read_usage(json.dumps({"usage": CHAT, "data": "x" * SCAN_BYTES_MAX}).encode()) is None


@pytest.mark.parametrize(
    "said",
    [b"", b"{}", b'{"usage":null}', b'{"usage":7}', b'data: {"usage"', b'{"text":"\\"usage\\": {}"}', b'"usage"'],
)
def test_nothing_is_made_up(said: bytes) -> None:
    assert read_usage(said) is None


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("usage"), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary() | json_like.map(lambda value: json.dumps({"usage": value}).encode()), st.booleans())
def test_any_bytes_are_read_without_an_error(data: bytes, as_event: bool) -> None:
    told: Any = read_usage(b"data: " + data + b"\n\n" if as_event else data)
    assert told is None or isinstance(told, Usage)
