"""From what obstore raises to a tier's error, with a sentence that says what to do. Pure."""

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

_CODE = re.compile(r"<Code>([A-Za-z0-9.]+)</Code>")
_STATUS = re.compile(r"status code: ([0-9]{3})")
_TEXT_MAX = 300

_REFUSALS: dict[str, tuple[RefusedReason, str]] = {
    "RequestTimeTooSkewed": (
        RefusedReason.AUTHENTICATION,
        "the clock of this node and the store's differ by too much for a signature; set it (NTP)",
    ),
    "AccessDenied": (
        RefusedReason.PERMISSION,
        "the credentials lack a right; the tier needs s3:GetObject, s3:PutObject, s3:DeleteObject on the prefix and "
        "s3:ListBucket on the bucket, without which a missing object is answered like a forbidden one",
    ),
    "QuotaExceeded": (RefusedReason.NO_SPACE, "the bucket's quota is used up; raise it, or shorten the lifecycle rule"),
}
_REFUSALS |= dict.fromkeys(
    ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"),
    (
        RefusedReason.AUTHENTICATION,
        "the credentials have expired; those of a workload identity renew themselves, those of a Secret need a new "
        "one and a restart",
    ),
)
_REFUSALS |= dict.fromkeys(
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure", "InvalidSecurity"),
    (RefusedReason.AUTHENTICATION, "the store does not accept these credentials; compare them with the store's"),
)
_REFUSALS |= dict.fromkeys(
    ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    (RefusedReason.OTHER, "the bucket is in another region; correct the region"),
)
_REFUSALS |= dict.fromkeys(
    ("XMinioStorageFull", "InsufficientStorage"), (RefusedReason.NO_SPACE, "the store has no room left")
)
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"})
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
        return TierUnreachable(
            UnreachableReason.ROOT_MISSING, f"{place}: there is no such bucket ({code}); make it, or correct the name"
        )
    if isinstance(error, FileNotFoundError):
        return TierMiss()
    if code in _REFUSALS:
        reason, sentence = _REFUSALS[code]
        return TierRefused(reason, f"{place}: {code}: {sentence}")
    if code in _THROTTLED or status in (429, 503):
        return TierRefused(
            RefusedReason.THROTTLED,
            f"{place}: {code or status}: the store asks for fewer requests a second, and did so again after each "
            "pause; larger chunks (offload.blocksPerChunk) or fewer s3.connections make fewer",
        )
    if "169.254." in said or "metadata" in said:
        return TierRefused(
            RefusedReason.AUTHENTICATION,
            f"{place}: no credentials: none are in the environment, and the node's metadata service gave none; name a "
            "Secret, or annotate the service account",
        )
    if isinstance(error, UnauthenticatedError):
        return TierRefused(RefusedReason.AUTHENTICATION, f"{place}: {said}")
    if isinstance(error, PermissionDeniedError):
        return TierRefused(RefusedReason.PERMISSION, f"{place}: {_REFUSALS['AccessDenied'][1]}")
    if "configured region" in said:
        return TierRefused(RefusedReason.OTHER, f"{place}: the bucket is in another region; correct the region")
    if status is not None:
        return TierRefused(RefusedReason.OTHER, f"{place}: {said}")
    return TierUnreachable(_why_silent(error), f"{place}: {said}")


def _why_silent(error: Exception) -> UnreachableReason:
    whole = str(error).lower()
    if "certificate" in whole or "tls" in whole:
        return UnreachableReason.TLS
    if "body" in whole or "incomplete" in whole or "connection reset" in whole or "connection closed" in whole:
        return UnreachableReason.DISCONNECTED
    return UnreachableReason.CONNECT


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return None if found is None else int(found[1])


def _first_lines(error: Exception) -> str:
    """Without obstore's debugging text, which repeats the request."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())[:_TEXT_MAX]
