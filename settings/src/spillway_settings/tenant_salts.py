"""The cache salt of a tenant: what the gateway gives to engines, and what tells an operator which blocks are whose."""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec

SECRET_BYTES_MIN = 32  # of the secret that all salts are derived from


def tenant_salt(secret: bytes, tenant: str, client_salt: str | None) -> str:
    """A tenant's cache_salt: 43 characters, base64url of HMAC-SHA256 (RFC 2104). Pure.

    The engine hashes it into every block, so no tenant can hit another's prefix cache. client_salt divides the
    tenant's own cache further.

    The two names are encoded as one JSON list, so no pair of them can be written as another pair.
    """
    message = msgspec.json.encode(["spillway cache salt 1", tenant, client_salt])
    digest = hmac.digest(secret, message, hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
