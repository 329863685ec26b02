"""The engine that stores each response: for GET /v1/responses/{id}, its cancel, and requests that continue one.

The store is in the engine's process, so such a request can only go to the engine that made the response. An id that
this gateway has not seen, or that another tenant owns, is not found: otherwise one tenant could read another's text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

OWNERS_MAX = 65_536
_ID = re.compile(rb'"id":\s?"([A-Za-z0-9_.\-]{1,256})"')
_SCAN_BYTES = 4096


class Owner(NamedTuple):
    """tokens: The tokens of the response and of all before it, as its usage reports them; 0 until then."""

    tenant: str
    model: str
    engine: str
    tokens: int = 0


def response_id_in(reply_start: bytes) -> str | None:
    """The first id in a plain reply or a stream's first events."""
    found = _ID.search(reply_start, 0, _SCAN_BYTES)
    return found.group(1).decode() if found is not None else None


class ResponseOwners:
    """The last responses by id, OWNERS_MAX of all tenants together: at the bound the tenant with the most loses its
    oldest."""

    def __init__(self, owners_max: int = OWNERS_MAX) -> None:
        self._owners: dict[str, Owner] = {}
        self._ids: dict[str, OrderedDict[str, None]] = {}  # of each tenant, the oldest first
        self._tenants_with: dict[int, dict[str, None]] = {}  # by the number of their responses
        self._most = 0  # responses of one tenant
        self._owners_max = owners_max

    def record(self, response_id: str, owner: Owner) -> bool:
        """Record the owner of a new response. False if another tenant owns it."""
        known = self._owners.get(response_id)
        if known is not None and known.tenant != owner.tenant:
            return False  # a client may choose the id, and must not take over another tenant's response
        self._owners[response_id] = owner
        ids = self._ids.setdefault(owner.tenant, OrderedDict())
        if known is None:
            self._counted(owner.tenant, len(ids), len(ids) + 1)
        ids[response_id] = None
        if len(self._owners) > self._owners_max:
            crowded = owner.tenant if len(ids) == self._most else next(iter(self._tenants_with[self._most]))
            self._forget_oldest(crowded)
        return True

    def _forget_oldest(self, tenant: str) -> None:
        ids = self._ids[tenant]
        self._counted(tenant, len(ids), len(ids) - 1)
        oldest, _ = ids.popitem(last=False)
        del self._owners[oldest]
        if not ids:
            del self._ids[tenant]

    def _counted(self, tenant: str, before: int, after: int) -> None:
        """A tenant has one response more or less than before."""
        if before:
            tenants = self._tenants_with[before]
            del tenants[tenant]
            if not tenants:
                del self._tenants_with[before]
        if after:
            self._tenants_with.setdefault(after, {})[tenant] = None
        if after > self._most or self._most not in self._tenants_with:
            self._most = after

    def set_tokens(self, response_id: str, tenant: str, tokens: int) -> None:
        """Record how many tokens a request that continues this response of the tenant will read."""
        owner = self.of(response_id, tenant)
        if owner is not None:
            self._owners[response_id] = owner._replace(tokens=tokens)

    def of(self, response_id: str, tenant: str) -> Owner | None:
        """The owner; None for an unknown id and for another tenant's."""
        owner = self._owners.get(response_id)
        return owner if owner is not None and owner.tenant == tenant else None
