from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.api.session_hints import SessionSources, session_hint
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.upstream.forward import first_values
from spillway_settings.session_sources import BODY, METADATA_USER_ID, PROMPT_CACHE_KEY, SESSION_SOURCES
from spillway_settings.wire import SESSION_RETURN_SECONDS_MAX

SOURCES = SessionSources(SESSION_SOURCES, 64)
IN_BODY = {PROMPT_CACHE_KEY: "key", METADATA_USER_ID: "user"}
HEADERS = [(name.encode(), name.encode()) for name in SESSION_SOURCES if not name.startswith(BODY)]


def test_the_first_source_that_a_request_has_names_its_session():
    for at in range(len(HEADERS)):
        assert SOURCES.name(first_values(HEADERS[at:]), IN_BODY) == HEADERS[at][1]
        assert SOURCES.name(first_values([*reversed(HEADERS[at:]), (b"user-agent", b"one")]), IN_BODY) == HEADERS[at][1]
    assert SOURCES.name(first_values([]), IN_BODY) == b"key"
    assert SOURCES.name(first_values([]), {METADATA_USER_ID: "user"}) == b"user"
    assert SOURCES.name(first_values([(b"user-agent", b"one")]), {}) is None


def test_operators_choose_the_sources_and_their_order():
    chosen = SessionSources([PROMPT_CACHE_KEY, "X-Team"], 64)

    assert chosen.name(first_values([(b"x-team", b"one"), *HEADERS]), IN_BODY) == b"key"
    assert chosen.name(first_values([*HEADERS, (b"x-team", b"one")]), {METADATA_USER_ID: "user"}) == b"one"
    assert chosen.name(first_values(HEADERS), {METADATA_USER_ID: "user"}) is None
    assert SessionSources([], 64).name(HEADERS, IN_BODY) is None


@pytest.mark.parametrize("nothing", [b"", b"  ", b"x" * 65])
def test_what_is_empty_or_too_long_leaves_it_to_the_next_source(nothing: bytes):
    assert SOURCES.name(first_values([(b"x-session-id", nothing), (b"session-id", b"one")]), {}) == b"one"
    assert SOURCES.name(first_values([(b"x-session-id", nothing)]), {PROMPT_CACHE_KEY: "\u4e2d" * 22}) is None
    assert SOURCES.name(first_values([(b"x-session-id", nothing)]), {PROMPT_CACHE_KEY: "\u4e2d" * 21}) is not None


def test_the_session_is_known_by_its_name_whoever_sent_it():
    hint = session_hint("a", first_values([(b"x-session-id", b"other")]), b"one")

    assert hint is not None
    assert hint.key == SessionKey.of("a", b"one")
    assert hint.member.keys() == {"id"}


def test_an_end_and_a_return_are_passed_to_the_engine():
    headers = [(b"x-session-id", b"one"), (b"x-session-end", b"True"), (b"x-session-return-seconds", b"12.5")]
    hint = session_hint("a", first_values(headers), b"one")

    assert hint is not None
    assert hint.member | {"id": ""} == {"id": "", "ended": True, "return_seconds": 12.5}


@pytest.mark.parametrize("given", [b"soon", b"-1", b"1e3", b"", b"nan", b"inf", b"604801"])
def test_a_return_that_is_no_time_is_refused(given: bytes):
    with pytest.raises(ClientBadRequest, match=f"x-session-return-seconds: .* 0 to {SESSION_RETURN_SECONDS_MAX}"):
        session_hint("a", first_values([(b"x-session-id", b"one"), (b"x-session-return-seconds", given)]), None)


def test_an_end_that_says_neither_is_refused():
    with pytest.raises(ClientBadRequest, match="x-session-end: 'maybe' given; send true or false"):
        session_hint("a", first_values([(b"x-session-end", b"maybe")]), None)


def test_without_a_name_there_is_no_session():
    assert (
        session_hint("a", first_values([(b"x-session-end", b"true"), (b"x-session-return-seconds", b"3")]), None)
        is None
    )


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)


@given(st.tuples(names, names), st.tuples(names, names))
def test_no_tenant_can_name_anothers_session(one: tuple[str, str], other: tuple[str, str]):
    first, second = (session_hint(tenant, {}, name.encode()) for tenant, name in (one, other))

    assert first is not None and second is not None
    assert (first.member["id"] == second.member["id"]) == (one == other)
