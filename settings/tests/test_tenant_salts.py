from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_settings.tenant_salts import tenant_salt


@given(st.text(), st.none() | st.text(), st.text(), st.none() | st.text())
def test_salts_differ_wherever_tenant_or_own_salt_do(
    tenant: str, own: str | None, other: str, other_own: str | None
) -> None:
    salt = tenant_salt(b"s" * 32, tenant, own)

    assert (salt == tenant_salt(b"s" * 32, other, other_own)) == ((tenant, own) == (other, other_own))
    assert salt != tenant_salt(b"t" * 32, tenant, own)
    assert len(salt) == 43 and salt.isascii()
