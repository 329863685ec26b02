"""Tenant, session and retention of a request, for the accounting of tiers and the order of eviction.

The tenant is the one that the gateway names in the cache salt, or the salt itself, as eight bytes. The salt may be a
secret of the tenant: it is hashed here, at the edge, and neither kept nor logged. Session and retention are what the
gateway writes into `kv_transfer_params`; a session's name counts within the tenant, so no tenant can name another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from blake3 import blake3
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request

from spillway_connector.plan.holds import RetentionHint, RetentionMark
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.tiers.tier import NO_TENANT, TENANT_BYTES
from spillway_settings.tenant_salts import account_of
from spillway_settings.wire import (
    HAND_OVER_MEMBER,
    RETENTION_MARKS,
    RETENTION_MARKS_MAX,
    RETENTION_MEMBER,
    RETENTION_SECONDS_MAX,
    RETENTION_SHARE,
    SESSION_ENDED,
    SESSION_ID,
    SESSION_MEMBER,
    SESSION_RETURN_SECONDS,
    SESSION_RETURN_SECONDS_MAX,
)

_SESSION_NAME_CHARS_MAX = 64


@dataclass
class TenantContext(ReqContext):
    """vLLM's offloading context of a request, with its tenant, its session and what it asks to retain.

    hand_over: another engine goes on with the prompt. prefix: the request's chunks, if it is one of the newest
    (engine/manager/spills.py).
    """

    tenant: bytes = NO_TENANT
    session: SessionHint | None = None
    retention: RetentionHint | None = None
    hand_over: bool = False
    prefix: Sequence[OffloadKey] = ()


def context_of(request: Request, session: SessionHint | None, **fields: Any) -> TenantContext:
    """The context of a request of vLLM's scheduler.

    Args:
        fields: What the generation's ReqContext has besides.
    """
    context = TenantContext(**fields, tenant=tenant_of(getattr(request, "cache_salt", None)), session=session)
    if (params := request.kv_transfer_params) is not None:
        context.retention, context.hand_over = retention_of(params), is_handed_over(params)
    return context


UNKNOWN_REQUEST = ReqContext(req_id="")  # the last user of a chunk is not known: no shared tier gets the chunk


def tenant_of(cache_salt: object) -> bytes:
    """Eight bytes; NO_TENANT for a request without a salt. Takes whatever a client sent: an exception here would end
    the engine."""
    if not isinstance(cache_salt, str) or not cache_salt:
        return NO_TENANT
    return blake3(account_of(cache_salt).encode("utf-8", "surrogatepass")).digest(TENANT_BYTES)


def tenant_of_context(context: ReqContext) -> bytes:
    return context.tenant if isinstance(context, TenantContext) else NO_TENANT


def session_of(params: object) -> SessionHint | None:
    """The session in a request's kv_transfer_params, `{"spillway_session": {"id", "ended", "return_seconds"}}`.

    None if there is no hint or it is not well-formed: a hint never fails a request.
    """
    given = params.get(SESSION_MEMBER) if isinstance(params, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    name = given.get(SESSION_ID)
    if not isinstance(name, str) or not 0 < len(name) <= _SESSION_NAME_CHARS_MAX:
        return None
    return SessionHint(name.encode("utf-8", "surrogatepass"), given.get(SESSION_ENDED) is True, _return_seconds(given))


def _return_seconds(given: Mapping[str, Any]) -> float | None:
    seconds = given.get(SESSION_RETURN_SECONDS)
    return float(seconds) if _is_number(seconds, SESSION_RETURN_SECONDS_MAX) else None


def _is_number(value: object, most: float) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= most


def retention_of(params: object) -> RetentionHint | None:
    """The retention in a request's kv_transfer_params, `{"spillway_retention": {"marks": [[tokens, seconds], ...],
    "share"}}`; tokens is null for the whole prompt. None without one, and for one that is not well-formed."""
    given = params.get(RETENTION_MEMBER) if isinstance(params, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    marks, share = given.get(RETENTION_MARKS), given.get(RETENTION_SHARE)
    if not isinstance(marks, list) or not 0 < len(marks) <= RETENTION_MARKS_MAX or not _is_number(share, 1):
        return None
    read = [_mark(mark) for mark in marks]
    found = tuple(mark for mark in read if mark is not None)
    return RetentionHint(found, float(share)) if len(found) == len(read) else None


def _mark(given: object) -> RetentionMark | None:
    if not isinstance(given, list) or len(given) != 2:
        return None
    tokens, seconds = given
    if not _is_number(seconds, RETENTION_SECONDS_MAX) or not (tokens is None or (type(tokens) is int and tokens >= 0)):
        return None
    return RetentionMark(tokens, float(seconds))


def is_handed_over(params: object) -> bool:
    """Whether a request's kv_transfer_params say that another engine goes on with the prompt."""
    return isinstance(params, Mapping) and params.get(HAND_OVER_MEMBER) is True


def hands_over(context: ReqContext) -> bool:
    """Whether another engine goes on with the request's prompt."""
    return isinstance(context, TenantContext) and context.hand_over


def is_awaited(context: ReqContext) -> bool:
    """Whether another engine goes on with the request's prompt, or its client asked to retain it: it belongs in the
    shared tiers at once."""
    return isinstance(context, TenantContext) and (context.hand_over or context.retention is not None)


def session_of_context(context: ReqContext) -> tuple[bytes, SessionHint] | None:
    """The (tenant, session) of a request that names a session."""
    if isinstance(context, TenantContext) and context.session is not None:
        return context.tenant, context.session
    return None
