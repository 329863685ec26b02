from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.upstream.forward import reply_headers, request_head


def test_internal_and_hop_by_hop_headers_of_callers_are_dropped() -> None:
    head = request_head(
        b"/v1/completions",
        b"engine:8100",
        [
            (b"host", b"outside"),
            (b"connection", b"close, x-private"),
            (b"x-private", b"1"),
            (b"transfer-encoding", b"chunked"),
            (b"content-length", b"999"),
            (b"x-data-parallel-rank", b"3"),
            (b"x-spillway-engine", b"spoof"),
            (b"x-request-id", b"caller"),
            (b"traceparent", b"00-abc"),
            (b"authorization", b"Bearer k"),
        ],
        12,
        b"mine",
    )

    assert head == (
        b"POST /v1/completions HTTP/1.1\r\nhost: engine:8100\r\ntraceparent: 00-abc\r\nauthorization: Bearer k\r\n"
        b"accept-encoding: identity\r\nx-request-id: mine\r\ncontent-length: 12\r\n\r\n"
    )


def test_no_client_agrees_with_an_engine_on_a_form_that_the_gateway_does_not_read() -> None:
    asked = ("Accept-Encoding", "Range", "If-Range", "If-None-Match", "If-Modified-Since", "If-Match", "TE", "Trailer")
    head = request_head(b"/", b"e", [(name.lower().encode(), b"gzip") for name in asked], 1, b"id")

    assert head == (
        b"POST / HTTP/1.1\r\nhost: e\r\naccept-encoding: identity\r\nx-request-id: id\r\ncontent-length: 1\r\n\r\n"
    )


def test_a_reply_has_what_its_reader_needs() -> None:
    needed = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", b"12"),
        (b"metadata", b'{"data": []}'),
        (b"retry-after", b"3"),
    ]

    assert sorted(reply_headers([(b"server", b"uvicorn"), (b"date", b"now"), *needed])) == sorted(needed)


NAMES = st.one_of(
    st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1).map(str.encode),
    st.sampled_from(
        [
            *(b"location", b"content-location", b"refresh", b"link", b"set-cookie", b"clear-site-data", b"alt-svc"),
            *(b"x-request-id", b"x-accel-redirect", b"x-sendfile", b"x-envoy-immediate-health-check-fail"),
            *(b"endpoint-load-metrics", b"cache-control", b"vary", b"content-security-policy", b"content-disposition"),
            *(b"content-encoding", b"transfer-encoding", b"trailer", b"www-authenticate", b"x-spillway-engine"),
            *(b"access-control-allow-origin", b"grpc-status", b"x-should-retry", b"server-timing", b"metadata"),
            *(b"content-type", b"content-length", b"retry-after", b"connection"),
        ]
    ),
)
VALUES = st.sampled_from([b"http://10.0.0.1/internal", b"text/html", b"metadata", b"application/json", b"0", b""])


@given(st.lists(st.tuples(NAMES, VALUES)))
def test_an_engine_sets_no_other_header_of_what_clients_get(headers: list[tuple[bytes, bytes]]) -> None:
    kept = reply_headers(headers)

    names = [name for name, _ in kept]
    assert set(names) <= {b"content-type", b"content-length", b"metadata", b"retry-after"}
    assert len(set(names)) == len(names) and b"content-type" in names
    assert dict(kept)[b"content-type"] in (b"application/json", b"application/octet-stream")


@pytest.mark.parametrize(
    "kind",
    [
        *(b"text/html", b"TEXT/HTML; charset=utf-8", b"image/svg+xml", b"application/xhtml+xml", b"text/xml"),
        *(b"multipart/x-mixed-replace", b"application/javascript", b"text/plainly", b"x", b"", b";application/json"),
    ],
)
def test_an_engines_page_is_none_in_a_browser(kind: bytes) -> None:
    assert reply_headers([(b"content-type", kind)]) == [(b"content-type", b"application/octet-stream")]


@pytest.mark.parametrize("kind", [b"application/json", b"Text/Event-Stream; charset=utf-8", b"text/plain;charset=x"])
def test_what_vllm_answers_keeps_its_type(kind: bytes) -> None:
    assert reply_headers([(b"content-type", kind)]) == [(b"content-type", kind)]


def test_the_rank_of_the_gateway_stands_in_place_of_the_callers() -> None:
    head = request_head(b"/v1/completions", b"e", [(b"x-data-parallel-rank", b"3")], 1, b"id", rank=0)

    assert head.count(b"x-data-parallel-rank") == 1 and b"\r\nx-data-parallel-rank: 0\r\n" in head
