from __future__ import annotations

import pytest

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


def test_reply_keeps_what_belongs_to_the_client() -> None:
    kept = reply_headers(
        [
            (b"server", b"uvicorn"),
            (b"date", b"now"),
            (b"transfer-encoding", b"chunked"),
            (b"connection", b"keep-alive"),
            (b"content-type", b"application/json"),
            (b"endpoint-load-metrics", b"TEXT x=1"),
        ]
    )

    assert kept == [(b"content-type", b"application/json"), (b"endpoint-load-metrics", b"TEXT x=1")]


def test_the_rank_of_the_gateway_stands_in_place_of_the_callers() -> None:
    head = request_head(b"/v1/completions", b"e", [(b"x-data-parallel-rank", b"3")], 1, b"id", rank=0)

    assert head.count(b"x-data-parallel-rank") == 1 and b"\r\nx-data-parallel-rank: 0\r\n" in head


@pytest.mark.parametrize(
    "name",
    [
        *(b"location", b"content-location", b"refresh", b"link", b"via", b"set-cookie", b"clear-site-data"),
        *(b"strict-transport-security", b"report-to", b"x-request-id", b"alt-svc", b"x-accel-redirect", b"x-sendfile"),
        *(b"uri", b"forwarded", b"x-forwarded-host", b"proxy-status", b"set-cookie2", b"authentication-info"),
        *(b"proxy-authentication-info", b"x-envoy-immediate-health-check-fail", b"x-envoy-ratelimited"),
        *(b"x-original-url", b"x-rewrite-url", b"x-real-ip", b"x-host", b"x-lighttpd-send-file", b"grpc-status"),
        *(b"x-litespeed-location", b"surrogate-control", b"cdn-cache-control", b"cache-control", b"expires", b"etag"),
        *(b"last-modified", b"age", b"pragma", b"content-security-policy-report-only", b"speculation-rules"),
        *(b"accept-ch", b"critical-ch", b"origin-agent-cluster"),
    ],
)
def test_where_an_engine_redirects_and_what_it_would_have_kept_stays_inside(name: bytes) -> None:
    given = [(b"content-type", b"a/b"), (name, b"http://10.0.0.1/internal"), (name, b"again")]

    assert reply_headers(given) == [(b"content-type", b"a/b")]
