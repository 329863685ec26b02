"""A request's hints about its session, for routing and for the tiers of the engines.

The session goes to the engine in the body's `kv_transfer_params`, as `spillway_session` (engine_fields.py): a hash of
tenant and name, whether this is its last request, and when the next one is expected.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.fleet.sessions import SessionKey
from spillway_settings.session_sources import BODY
from spillway_settings.wire import SESSION_ENDED, SESSION_ID, SESSION_RETURN_SECONDS, SESSION_RETURN_SECONDS_MAX

END_HEADER = b"x-session-end"
RETURN_HEADER = b"x-session-return-seconds"
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_ENDS = {b"true": True, b"1": True, b"false": False, b"0": False}
_ID_BYTES = 8


class SessionSources:
    """Headers and members of the body that may name a session, and the length that a name may have."""

    def __init__(self, sources: Sequence[str], name_bytes_max: int) -> None:
        self._name_bytes_max = name_bytes_max
        self._in_order = [source if source.startswith(BODY) else source.lower().encode() for source in sources]
        self._headers = frozenset(source for source in self._in_order if isinstance(source, bytes))

    def name(self, headers: Mapping[bytes, bytes], in_body: Mapping[str, str]) -> bytes | None:
        """Return the session's name from the first source that has one; an empty or too long value names nothing.

        Args:
            headers: the first values of the request's, by lower-case names.
            in_body: the names in the body, by source.
        """
        if not in_body and self._headers.isdisjoint(headers):
            return None
        for source in self._in_order:
            if isinstance(source, bytes):
                name = headers.get(source, b"").strip()
            else:  # a text has at least as many bytes as characters
                name = in_body.get(source, "")[: self._name_bytes_max + 1].encode("utf-8", "surrogatepass")
            if 0 < len(name) <= self._name_bytes_max:
                return name
        return None


class SessionHint(NamedTuple):
    """key: its name for routing. member: what the engine gets."""

    key: SessionKey
    member: dict[str, str | bool | float]


def session_hint(tenant: str, headers: Mapping[bytes, bytes], name: bytes | None) -> SessionHint | None:
    """Return the hint; None if the request names no session. Raises ClientBadRequest for an unreadable end or return.

    Args:
        tenant: the session's tenant: two tenants that give one name have two sessions.
        headers: the first values of the request's, for its end and its return.
        name: as SessionSources found it.
    """
    ended, return_seconds = _ended(headers), _return_seconds(headers)
    if name is None:
        return None
    # With the tenant in it: on routes without a salt the engine cannot tell tenants apart.
    owner = tenant.encode()
    digest = hashlib.blake2b(b"%d:" % len(owner) + owner + name, digest_size=_ID_BYTES)
    member: dict[str, str | bool | float] = {SESSION_ID: digest.hexdigest()}
    if ended:
        member[SESSION_ENDED] = True
    if return_seconds is not None:
        member[SESSION_RETURN_SECONDS] = return_seconds
    return SessionHint(SessionKey.of(tenant, name), member)


def _ended(headers: Mapping[bytes, bytes]) -> bool:
    given = headers.get(END_HEADER)
    if given is None:
        return False
    ended = _ENDS.get(given.strip().lower())
    if ended is None:
        raise ClientBadRequest(f"{END_HEADER.decode()}: {_shown(given)} given; send true or false")
    return ended


def _return_seconds(headers: Mapping[bytes, bytes]) -> float | None:
    given = headers.get(RETURN_HEADER)
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
