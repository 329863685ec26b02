"""Turns obstore's exceptions into a tier's errors, with the sentence of explanations.py that gives the remedy. Pure."""

from __future__ import annotations

import re

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from spillway_connector.errors import (
    RefusedReason,
    TierError,
    TierMiss,
    TierRefused,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.explanations import explanation

TIER_TYPE = "s3"
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_STATUS = re.compile(r"status code: ([0-9]{3})")
_TEXT_MAX = 300
# Addresses of what gives credentials, not of the store: the node's metadata service, STS.
_IDENTITY = re.compile(r"169\.254\.|/latest/(?:api/token|meta-data)|//sts[.-]|AssumeRoleWithWebIdentity")
# The message of rustls without the address.
_TLS = re.compile(r"certificate|invalidmessage|alertreceived|handshake|tls")
# An object of which a part came; obstore asks for the rest by a range, which not every store gives.
_HALF = re.compile(r"body|incomplete|connection reset|connection closed|content-range")

_REASONS = {
    "RequestTimeTooSkewed": RefusedReason.CLOCK_SKEW,
    "AccessDenied": RefusedReason.PERMISSION,
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"),
        RefusedReason.CREDENTIALS_EXPIRED,
    ),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure", "InvalidSecurity"),
        RefusedReason.AUTHENTICATION,
    ),
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
        RefusedReason.WRONG_REGION,
    ),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"), RefusedReason.NO_SPACE),
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"),
        RefusedReason.THROTTLED,
    ),
}
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName"})
_NO_CONDITIONS = frozenset({"NotImplemented", "MethodNotAllowed"})


def code_of(error: Exception) -> str | None:
    """The store's own word for what is wrong. A reply to HEAD has none."""
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def lacks_conditional_writes(error: Exception) -> bool:
    """Whether the store takes no write under a condition (If-None-Match)."""
    return code_of(error) in _NO_CONDITIONS or _status(error) == 501


def explained(error: Exception, place: str) -> TierError:
    """The tier's error for what obstore raised.

    place: the store as its messages call it. Raises what is neither obstore's nor the system's error.
    """
    if not isinstance(error, BaseError | OSError):
        raise error
    code, status, said = code_of(error), _status(error), _first_lines(error)
    if code in _NO_BUCKET:
        reason = UnreachableReason.BUCKET_MISSING
        return TierUnreachable(reason, f"{place}: {code}: {explanation(reason, TIER_TYPE)}")
    if isinstance(error, FileNotFoundError):
        return TierMiss()
    refused = _refused(error, code, status, said)
    if refused is None:
        return TierUnreachable(_why_silent(error), f"{place}: {said}")
    words = said if refused is RefusedReason.OTHER else str(explanation(refused, TIER_TYPE))
    if refused is RefusedReason.NO_CREDENTIALS:
        words = f"{words}: {said}"
    named = code or status
    return TierRefused(refused, f"{place}: {words}" if named is None else f"{place}: {named}: {words}")


def _refused(error: Exception, code: str | None, status: int | None, said: str) -> RefusedReason | None:
    """Return why the store refused; None if it gave no answer."""
    reason = None if code is None else _REASONS.get(code)
    if _IDENTITY.search(said) and reason is not RefusedReason.CREDENTIALS_EXPIRED:
        return RefusedReason.NO_CREDENTIALS
    if reason is not None:
        return reason
    if status in (429, 503):
        return RefusedReason.THROTTLED
    if isinstance(error, UnauthenticatedError):
        return RefusedReason.AUTHENTICATION
    if isinstance(error, PermissionDeniedError):
        return RefusedReason.PERMISSION
    if "configured region" in said:
        return RefusedReason.WRONG_REGION
    return None if status is None else RefusedReason.OTHER


def _why_silent(error: Exception) -> UnreachableReason:
    causes = str(error).rpartition("inner:")[2].lower()
    if _TLS.search(causes):
        return UnreachableReason.TLS
    return UnreachableReason.DISCONNECTED if _HALF.search(causes) else UnreachableReason.CONNECT


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return None if found is None else int(found[1])


def _first_lines(error: Exception) -> str:
    """Return the message without obstore's debugging text, which repeats the request."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())[:_TEXT_MAX]
