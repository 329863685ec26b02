"""Headers to and from a proxy's messages."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.picker import mutations
from spillway_gateway.picker.messages import APPEND, HttpHeaders, ProcessingRequest, ProcessingResponse
from spillway_gateway.upstream.forward import Headers, request_head

NAMES = st.sampled_from([b"accept", b"authorization", b"x-a", b"x-b", b"x-spillway-route", b"connection", b"host"])
VALUES = st.sampled_from([b"", b"1", b"two", "\u00e9".encode("latin-1"), b"a, b"])
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


def applied(given: Headers, mutation: Any) -> dict[bytes, list[bytes]]:
    """The headers as a proxy has them after a mutation, which removes first and sets in order."""
    left: dict[bytes, list[bytes]] = {}
    for name, value in given:
        if name.decode() not in mutation.remove_headers:
            left.setdefault(name, []).append(value)
    for option in mutation.set_headers:
        name = option.header.key.encode()
        before = left.get(name, []) if option.append_action == APPEND else []
        left[name] = [*before, option.header.raw_value]
    return left


@given(HEADERS, st.sampled_from([b"/v1/completions", b"/base/v1/completions?a=b"]))
def test_the_engine_gets_the_head_that_the_gateway_would_send(headers: Headers, path: bytes) -> None:
    given = [(b":method", b"POST"), (b":path", b"/v1/completions"), (b":authority", b"chat"), *headers]
    head = request_head(path, b"engine:8000", headers, 7, b"id-1")
    answer = ProcessingResponse.FromString(mutations.request_to_engine(given, head, "10.0.0.1:8000"))
    found = applied(given, answer.request_headers.response.header_mutation)
    wanted: dict[bytes, list[bytes]] = {}
    for line in head.rstrip(b"\r\n").split(b"\r\n")[1:]:
        name, _, value = line.partition(b": ")
        wanted.setdefault(name, []).append(value)
    for name in (b"host", b"content-length"):
        wanted.pop(name, None)
    assert {name: values for name, values in found.items() if name[:1] != b":" and name != b"host"} == {
        **wanted,
        b"x-gateway-destination-endpoint": [b"10.0.0.1:8000"],
    }
    assert found[b":path"] == [path]
    lb = answer.dynamic_metadata["envoy.lb"]
    assert dict(lb) == {"x-gateway-destination-endpoint": "10.0.0.1:8000"}


@given(st.binary(max_size=200_000), st.booleans())
def test_pieces_are_the_body_in_order_and_one_is_the_last(body: bytes, last: bool) -> None:
    pieces = [
        ProcessingResponse.FromString(each).response_body.response.body_mutation.streamed_response
        for each in mutations.reply_body_pieces(body, last=last)
    ]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [last]
    assert all(len(piece.body) < 64 * 1024 for piece in pieces)
    request = [
        ProcessingResponse.FromString(each).request_body.response.body_mutation.streamed_response
        for each in mutations.request_body_pieces(body, last=last)
    ]
    assert b"".join(piece.body for piece in request) == body and request[-1].end_of_stream is last


def test_a_proxy_may_send_values_as_text_or_as_bytes() -> None:
    message = HttpHeaders()
    for key, fields in (("X-Text", {"value": "caf\u00e9"}), ("x-bytes", {"raw_value": b"\xff"})):
        message.headers.headers.add(key=key, **fields)
    assert mutations.headers_of(message.headers) == [(b"x-text", "caf\u00e9".encode()), (b"x-bytes", b"\xff")]


@given(HEADERS)
def test_trailers_pass_neither_way(headers: Headers) -> None:
    named = {name.decode() for name, _ in headers} - {"host"}
    request = ProcessingResponse.FromString(mutations.without_request_trailers(headers)).request_trailers
    reply = ProcessingResponse.FromString(mutations.without_reply_trailers(headers)).response_trailers
    for answer in (request, reply):
        assert set(answer.header_mutation.remove_headers) == named and not answer.header_mutation.set_headers


def test_the_subset_is_read_as_a_list_or_as_text() -> None:
    request = ProcessingRequest()
    assert mutations.subset_of(request) is None
    hint = request.metadata_context.filter_metadata.add(key=mutations.SUBSET_NAMESPACE).value
    hint[mutations.SUBSET_KEY] = "10.0.0.1:80, 10.0.0.2:80,"
    assert mutations.subset_of(request) == {"10.0.0.1:80", "10.0.0.2:80"}
    hint[mutations.SUBSET_KEY] = ["[::1]:80"]
    assert mutations.subset_of(request) == {"[::1]:80"}
    hint[mutations.SUBSET_KEY] = []
    assert mutations.subset_of(request) == frozenset()
