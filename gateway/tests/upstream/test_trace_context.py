from __future__ import annotations

import re

from spillway_gateway.upstream.trace_context import new_traceparent, trace_id, with_trace


def test_made_where_absent_and_kept_where_present() -> None:
    given = [(b"traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-00"), (b"tracestate", b"x=1")]
    assert with_trace(given) is given
    assert trace_id(given) == "ab" * 16

    made = with_trace([(b"accept", b"*/*")])
    assert made[0] == (b"accept", b"*/*")
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", made[1][1])
    assert trace_id(made) == made[1][1][3:35].decode()
    assert new_traceparent() != new_traceparent()


def test_what_is_no_trace_id_is_not_logged() -> None:
    assert trace_id([(b"traceparent", b'00-"injected\n')]) is None
    assert trace_id([]) is None
