"""A tenant's cache salt. It is part of every block's hash in the engine, so no tenant can find another's blocks."""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec

SECRET_BYTES_MIN = 32


def tenant_salt(secret: bytes, tenant: str, client_salt: str | None) -> str:
    """43 characters, base64url of HMAC-SHA256. client_salt divides the tenant's own cache further, and never leaves it.

    The two names are encoded as one JSON list, so no pair of them can be written as another pair.
    """
    message = msgspec.json.encode(["spillway cache salt 1", tenant, client_salt])
    digest = hmac.digest(secret, message, hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
