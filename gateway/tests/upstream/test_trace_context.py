from __future__ import annotations

from spillway_gateway.upstream.trace_context import trace_id


def test_the_trace_of_a_request_is_its_callers() -> None:
    given = [(b"traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-00"), (b"tracestate", b"x=1")]
    assert trace_id(given) == "ab" * 16


def test_what_is_no_trace_id_is_not_logged() -> None:
    assert trace_id([(b"traceparent", b'00-"injected\n')]) is None
    assert trace_id([]) is None
