"""What a request says of its session, for routing and for the tiers of the engines.

The session goes to the engine in the body's `kv_transfer_params`, as `spillway_session` (engine_fields.py): a hash of
tenant and name, whether this is its last request, and when the next one is expected.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.upstream.forward import Headers, header
from spillway_settings.wire import SESSION_ENDED, SESSION_ID, SESSION_RETURN_SECONDS, SESSION_RETURN_SECONDS_MAX

SESSION_HEADER = b"x-session-id"
END_HEADER = b"x-session-end"
RETURN_HEADER = b"x-session-return-seconds"
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_ENDS = {b"true": True, b"1": True, b"false": False, b"0": False}
_ID_BYTES = 8


class SessionHint(NamedTuple):
    """key: for routing. member: for the engine."""

    key: SessionKey
    member: dict[str, str | bool | float]


def session_hint(tenant: str, headers: Headers, in_body: str | None) -> SessionHint | None:
    """None if the request names no session; the header goes before the body. Raises ClientBadRequest for an end or
    a return that cannot be read."""
    ended, return_seconds = _ended(headers), _return_seconds(headers)
    name = header(headers, SESSION_HEADER)
    if not name:
        if in_body is None:
            return None
        name = in_body.encode("utf-8", "surrogatepass")
    # With the tenant in it: on routes without a salt the engine cannot tell tenants apart.
    owner = tenant.encode()
    digest = hashlib.blake2b(b"%d:" % len(owner) + owner + name, digest_size=_ID_BYTES)
    member: dict[str, str | bool | float] = {SESSION_ID: digest.hexdigest()}
    if ended:
        member[SESSION_ENDED] = True
    if return_seconds is not None:
        member[SESSION_RETURN_SECONDS] = return_seconds
    return SessionHint(SessionKey.of(tenant, name), member)


def _ended(headers: Headers) -> bool:
    given = header(headers, END_HEADER)
    if given is None:
        return False
    ended = _ENDS.get(given.strip().lower())
    if ended is None:
        raise ClientBadRequest(f"{END_HEADER.decode()}: {_shown(given)} given; send true or false")
    return ended


def _return_seconds(headers: Headers) -> float | None:
    given = header(headers, RETURN_HEADER)
    if given is None:
        return None
    seconds = float(given) if _SECONDS.fullmatch(given) else -1.0
    if not 0 <= seconds <= SESSION_RETURN_SECONDS_MAX:
        raise ClientBadRequest(
            f"{RETURN_HEADER.decode()}: {_shown(given)} given; send the seconds until the session's next request, 0 to "
            f"{SESSION_RETURN_SECONDS_MAX}"
        )
    return seconds


def _shown(given: bytes) -> str:
    return repr(given[:40].decode("latin-1"))
