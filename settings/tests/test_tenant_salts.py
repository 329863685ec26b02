from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_settings.tenant_salts import (
    CLIENT_PREFIX,
    SALT_CHARS_MAX,
    TENANT_PREFIX,
    account_of,
    client_salt,
    tenant_salt,
)

SECRET = b"s" * 32


@given(st.text(), st.none() | st.text(), st.text(), st.none() | st.text())
def test_salts_differ_wherever_tenant_or_own_salt_do(
    tenant: str, own: str | None, other: str, other_own: str | None
) -> None:
    salt = tenant_salt(SECRET, tenant, own)

    assert (salt == tenant_salt(SECRET, other, other_own)) == ((tenant, own) == (other, other_own))
    assert salt != tenant_salt(b"t" * 32, tenant, own)
    assert salt.isascii() and not salt.startswith(account_of(tenant_salt(b"t" * 32, tenant, own)))


@given(st.text(), st.none() | st.text(), st.text(), st.none() | st.text())
def test_a_tenant_is_one_account_whatever_salts_its_clients_send(
    tenant: str, own: str | None, other: str, other_own: str | None
) -> None:
    account = account_of(tenant_salt(SECRET, tenant, own))

    assert (account == account_of(tenant_salt(SECRET, other, other_own))) == (tenant == other)
    assert account.startswith(TENANT_PREFIX)


@given(st.text(min_size=1), st.text(min_size=1))
def test_without_keys_each_salt_is_an_account(one: str, other: str) -> None:
    assert client_salt(one).startswith(CLIENT_PREFIX)
    assert (account_of(client_salt(one)) == account_of(client_salt(other))) == (one == other)


@given(st.text(), st.none() | st.text(), st.text(min_size=1))
def test_no_client_without_a_key_writes_a_tenants_salt(tenant: str, own: str | None, sent: str) -> None:
    salt = tenant_salt(SECRET, tenant, own)

    assert client_salt(sent) != salt
    assert client_salt(salt) != salt


@given(st.text("ab", min_size=100, max_size=140), st.text("ab", min_size=100, max_size=140))
def test_no_salt_becomes_too_long_by_its_prefix(one: str, other: str) -> None:
    assert (client_salt(one) == client_salt(other)) == (one == other)
    assert len(client_salt(one)) <= SALT_CHARS_MAX or len(one) > SALT_CHARS_MAX
    assert len(tenant_salt(SECRET, one, other)) <= SALT_CHARS_MAX


def test_a_salt_that_no_gateway_wrote_is_its_own_account() -> None:
    for salt in ("alice", TENANT_PREFIX, TENANT_PREFIX + "short:", TENANT_PREFIX + "a" * 22, "x" + TENANT_PREFIX):
        assert account_of(salt) == salt
