from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.api.session_hints import session_hint
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.fleet.sessions import SessionKey
from spillway_settings.wire import SESSION_RETURN_SECONDS_MAX


def test_the_header_goes_before_the_body():
    hint = session_hint("a", [(b"x-session-id", b"one")], "two")

    assert hint is not None
    assert hint.key == SessionKey.of("a", b"one")
    assert hint == session_hint("a", [], "one")
    assert hint.member.keys() == {"id"}


def test_an_end_and_a_return_are_passed_to_the_engine():
    headers = [(b"x-session-id", b"one"), (b"x-session-end", b"True"), (b"x-session-return-seconds", b"12.5")]
    hint = session_hint("a", headers, None)

    assert hint is not None
    assert hint.member | {"id": ""} == {"id": "", "ended": True, "return_seconds": 12.5}


@pytest.mark.parametrize("given", [b"soon", b"-1", b"1e3", b"", b"nan", b"inf", b"604801"])
def test_a_return_that_is_no_time_is_refused(given: bytes):
    with pytest.raises(ClientBadRequest, match=f"x-session-return-seconds: .* 0 to {SESSION_RETURN_SECONDS_MAX}"):
        session_hint("a", [(b"x-session-id", b"one"), (b"x-session-return-seconds", given)], None)


def test_an_end_that_says_neither_is_refused():
    with pytest.raises(ClientBadRequest, match="x-session-end: 'maybe' given; send true or false"):
        session_hint("a", [(b"x-session-end", b"maybe")], None)


def test_without_a_name_there_is_no_session():
    assert session_hint("a", [(b"x-session-end", b"true"), (b"x-session-return-seconds", b"3")], None) is None


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)


@given(st.tuples(names, names), st.tuples(names, names))
def test_no_tenant_can_name_anothers_session(one: tuple[str, str], other: tuple[str, str]):
    first, second = session_hint(one[0], [], one[1]), session_hint(other[0], [], other[1])

    assert first is not None and second is not None
    assert (first.member["id"] == second.member["id"]) == (one == other)
