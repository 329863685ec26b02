from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import ReqContext

from spillway_connector.engine.requests.tenancy import (
    TenantContext,
    retention_of,
    session_of,
    session_of_context,
    tenant_of,
    tenant_of_context,
)
from spillway_connector.engine.requests.transfer_params import accepted
from spillway_connector.plan.sessions import SessionFollower, SessionHint
from spillway_connector.tiers.tier import NO_TENANT
from spillway_settings.tenant_salts import client_salt, tenant_salt
from spillway_settings.wire import SESSION_RETURN_SECONDS_MAX


def test_requests_without_a_salt_have_no_tenant():
    assert tenant_of(None) == tenant_of("") == NO_TENANT
    assert tenant_of_context(ReqContext(req_id="r")) == NO_TENANT


@pytest.mark.parametrize("salt", [5, 0.5, True, [], ["a"], {"a": 1}, b"a", object()])
def test_a_salt_that_is_no_text_names_no_tenant(salt: object):
    assert tenant_of(salt) == NO_TENANT


def test_half_of_a_surrogate_pair_is_a_salt_as_any_other():
    assert (
        len({tenant_of(salt) for salt in ("\ud800", "a\ud800", "\udfff", "spillway-tenant:" + "a" * 22 + ":\ud800")})
        == 4
    )


def test_the_same_salt_is_the_same_tenant_on_every_engine():
    assert tenant_of("alice").hex() == "71b278f3dc434447"


texts = st.text(st.characters(codec="utf-8"), min_size=1)


@given(texts, texts)
def test_other_salts_are_other_tenants(one: str, other: str):
    assert len(tenant_of(one)) == 8
    assert (tenant_of(one) == tenant_of(other)) == (one == other)


@given(texts, texts, st.none() | texts, st.none() | texts)
def test_a_tenant_of_the_gateway_is_one_tenant_whatever_salts_it_sends(
    one: str, other: str, own: str | None, other_own: str | None
):
    secret = b"s" * 32
    found = tenant_of(tenant_salt(secret, one, own)), tenant_of(tenant_salt(secret, other, other_own))

    assert (found[0] == found[1]) == (one == other)


def test_a_salt_counts_alike_through_the_gateway_and_without():
    assert tenant_of(client_salt("alice")) == tenant_of("alice")


def test_a_tenant_with_a_salt_for_each_request_displaces_no_others_session():
    honest = [tenant_of(tenant_salt(b"s" * 32, name, None)) for name in ("a", "b", "c")]
    follower = SessionFollower(sessions_max=64)
    returns = SessionHint(b"one", return_seconds=60.0)
    for tenant in honest:
        follower.begin_request(tenant, returns, 0.0)
    for number in range(1_000):
        greedy = tenant_of(tenant_salt(b"s" * 32, "greedy", str(number)))
        follower.begin_request(greedy, returns._replace(session=b"%d" % number), 1.0)

    assert all(follower.is_expected(tenant, returns) for tenant in honest)


def test_a_salt_never_shows():
    assert "alice" not in repr(TenantContext(req_id="r", tenant=tenant_of("alice")))


def test_the_session_is_what_the_gateway_wrote():
    params = {"spillway_session": {"id": "8f0c", "ended": True, "return_seconds": 30}}

    assert session_of(params) == SessionHint(b"8f0c", True, 30.0)
    assert session_of({"spillway_session": {"id": "8f0c"}}) == SessionHint(b"8f0c")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["spillway_session", "id", "ended", "return_seconds"]), inner)
    ),
)


@given(json_values)
def test_anything_else_is_no_session_or_one_within_bounds(params: object):
    hint = session_of(params)

    assert hint is None or (
        hint.session
        and isinstance(hint.ended, bool)
        and (hint.return_seconds is None or 0 <= hint.return_seconds <= SESSION_RETURN_SECONDS_MAX)
    )


def test_a_session_counts_within_its_tenant():
    hint = SessionHint(b"one")

    assert session_of_context(ReqContext(req_id="r")) is None
    assert session_of_context(TenantContext("r", tenant=tenant_of("a"), session=hint)) == (tenant_of("a"), hint)


def test_a_retention_is_read_from_the_transfer_params():
    marks = [[1024, 3600], [None, 300.5]]
    assert retention_of({"spillway_retention": {"marks": marks, "share": 0.25}}) == (
        ((1024, 3600.0), (None, 300.5)),
        0.25,
    )


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        "x",
        {},
        {"marks": [[1, 2]]},
        {"marks": [], "share": 0.1},
        {"marks": [[1, 2]] * 5, "share": 0.1},
        {"marks": [[1, 2]], "share": 1.5},
        {"marks": [[1, 2]], "share": True},
        {"marks": [[1, 2]], "share": float("nan")},
        {"marks": [[1, -2]], "share": 0.1},
        {"marks": [[-1, 2]], "share": 0.1},
        {"marks": [[1.5, 2]], "share": 0.1},
        {"marks": [[True, 2]], "share": 0.1},
        {"marks": [[1, 10**9]], "share": 0.1},
        {"marks": [[1, float("inf")]], "share": 0.1},
        {"marks": [[1, 2, 3]], "share": 0.1},
        {"marks": [{"tokens": 1}], "share": 0.1},
        {"marks": [[1, 2], "x"], "share": 0.1},
    ],
)
def test_a_retention_that_is_not_well_formed_is_none(given: object):
    assert retention_of({"spillway_retention": given}) is None
    assert accepted({"spillway_retention": given}) is None
