"""The cache salts that the gateway gives to engines, and what they tell of whose blocks are whose.

    spillway-tenant:TENANT:DIVISION   with API keys: TENANT is the same for all requests of a tenant
    spillway-client:SALT              without them: SALT is the client's own

vLLM 0.23 hashes a salt and an adapter's name alike, so both have a prefix that no adapter's name has.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

import msgspec

SECRET_BYTES_MIN = 32  # of the secret that all salts are derived from
SALT_CHARS_MAX = 128
TENANT_PREFIX = "spillway-tenant:"
CLIENT_PREFIX = "spillway-client:"
_TENANT_CHARS = 22  # base64url of 16 bytes
_tenant = re.compile(re.escape(TENANT_PREFIX) + rf"[A-Za-z0-9_-]{{{_TENANT_CHARS}}}(?=:)").match


def tenant_salt(secret: bytes, tenant: str, client_salt: str | None) -> str:
    """A tenant's cache_salt, made of two HMAC-SHA256 (RFC 2104) in base64url. Pure.

    The engine hashes it into every block, so no tenant can hit another's prefix cache. client_salt divides the
    tenant's own cache further; quotas, sessions and purges go by the tenant's part alone (see account_of).

    The two names are encoded as one JSON list, so no pair of them can be written as another pair.
    """
    whose = _digest(secret, ["spillway tenant 1", tenant])[:_TENANT_CHARS]
    return f"{TENANT_PREFIX}{whose}:{_digest(secret, ['spillway cache salt 1', tenant, client_salt])}"


def client_salt(given: str) -> str:
    """The cache_salt of a client that has no key. A long one by its hash: vLLM 0.32 takes SALT_CHARS_MAX at most."""
    long = SALT_CHARS_MAX - len(CLIENT_PREFIX) < len(given) <= SALT_CHARS_MAX
    return CLIENT_PREFIX + (_base64(hashlib.sha256(given.encode()).digest()) if long else given)


def account_of(cache_salt: str) -> str:
    """The account under which a tier counts the blocks of a salt: the tenant if the gateway names one, else the salt
    itself as its client wrote it."""
    whose = _tenant(cache_salt)
    return whose[0] if whose is not None else cache_salt.removeprefix(CLIENT_PREFIX)


def _digest(secret: bytes, names: list[str | None]) -> str:
    return _base64(hmac.digest(secret, msgspec.json.encode(names), hashlib.sha256))


def _base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
