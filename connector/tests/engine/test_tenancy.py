from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import ReqContext

from spillway_connector.engine.tenancy import TenantContext, tenant_of, tenant_of_context
from spillway_connector.tiers.tier import NO_TENANT


def test_requests_without_a_salt_have_no_tenant():
    assert tenant_of(None) == tenant_of("") == NO_TENANT
    assert tenant_of_context(ReqContext(req_id="r")) == NO_TENANT


def test_the_same_salt_is_the_same_tenant_on_every_engine():
    assert tenant_of("alice").hex() == "71b278f3dc434447"


texts = st.text(st.characters(codec="utf-8"), min_size=1)


@given(texts, texts)
def test_other_salts_are_other_tenants(one: str, other: str):
    assert len(tenant_of(one)) == 8
    assert (tenant_of(one) == tenant_of(other)) == (one == other)


def test_a_salt_never_shows():
    assert "alice" not in repr(TenantContext(req_id="r", tenant=tenant_of("alice")))
