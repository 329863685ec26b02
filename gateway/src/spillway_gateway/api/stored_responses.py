"""Which engine keeps which stored response: GET /v1/responses/{id}, its cancel, and requests that continue one.

The store is in the engine's process, so such a request can only go where the response was made. An id that this gateway
has not seen, or that another tenant made, does not exist: guessing would show one tenant another's text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

OWNERS_MAX = 65_536
_ID = re.compile(rb'"id":\s?"([A-Za-z0-9_.\-]{1,256})"')
_SCAN_BYTES = 4096


class Owner(NamedTuple):
    """tokens: of the response and of all before it, as far as its usage has told."""

    tenant: str
    model: str
    engine: str
    tokens: int = 0


class ResponseOwners:
    """The last OWNERS_MAX responses by id."""

    def __init__(self, owners_max: int = OWNERS_MAX) -> None:
        self._owners: OrderedDict[str, Owner] = OrderedDict()
        self._owners_max = owners_max

    def note(self, reply_start: bytes, owner: Owner) -> str | None:
        """The response's id. reply_start: a plain reply, or a stream's first events; the first id in either is it."""
        found = _ID.search(reply_start, 0, _SCAN_BYTES)
        if found is None:
            return None
        response_id = found.group(1).decode()
        known = self._owners.get(response_id)
        if known is not None and known.tenant != owner.tenant:
            return None  # a client may choose an id, and must not take another tenant's response by choosing its
        self._owners[response_id] = owner
        if len(self._owners) > self._owners_max:
            self._owners.popitem(last=False)
        return response_id

    def count(self, response_id: str, tokens: int) -> None:
        """What a request that continues this response has to read, once that is known."""
        owner = self._owners.get(response_id)
        if owner is not None:
            self._owners[response_id] = owner._replace(tokens=tokens)

    def of(self, response_id: str, tenant: str) -> Owner | None:
        """None for an unknown id and for another tenant's alike."""
        owner = self._owners.get(response_id)
        return owner if owner is not None and owner.tenant == tenant else None
