"""The engine that served each session last: bounded, least recently used first out, and apart for each tenant.

A session is what a client names (spillway_settings.session_sources). Names are kept as hashes: two names of one
tenant that share a hash share an engine, which costs time at most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

import xxhash


class SessionKey(NamedTuple):
    """One session of one tenant."""

    tenant: str
    digest: int

    @classmethod
    def of(cls, tenant: str, name: bytes) -> SessionKey:
        return cls(tenant, xxhash.xxh3_64_intdigest(name))


class Sessions:
    """The sessions of one model. On the event loop.

    An entry takes about 200 bytes. At a tenant's bound its own oldest session is forgotten; at the bound of all, the
    oldest one of the tenant that has been idle longest.
    """

    def __init__(self, tenant_entries_max: int, entries_max: int) -> None:
        self._tenant_entries_max = min(tenant_entries_max, entries_max)
        self._entries_max = entries_max
        # Tenant -> a session's engine, and when it was served last in monotonic seconds.
        self._tenants: OrderedDict[str, OrderedDict[int, tuple[str, float]]] = OrderedDict()
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def engine_of(self, key: SessionKey) -> str | None:
        """The engine that served it last; None if it is not known."""
        own = self._tenants.get(key.tenant)
        last = own.get(key.digest) if own is not None else None
        return None if last is None else last[0]

    def served(self, key: SessionKey, engine: str, now: float) -> None:
        """The session's request goes to this engine. now: monotonic seconds."""
        own = self._tenants.setdefault(key.tenant, OrderedDict())
        self._tenants.move_to_end(key.tenant)
        self._entries += key.digest not in own
        own[key.digest] = engine, now
        own.move_to_end(key.digest)
        if len(own) > self._tenant_entries_max:
            own.popitem(last=False)
            self._entries -= 1
        elif self._entries > self._entries_max:
            idlest, oldest = next(iter(self._tenants.items()))
            oldest.popitem(last=False)
            self._entries -= 1
            if not oldest:
                del self._tenants[idlest]

    def alive(self, since: float) -> Counter[str]:
        """Sessions that were served since then, by the engine that served them last. since: monotonic seconds."""
        found: Counter[str] = Counter()
        for own in reversed(self._tenants.values()):
            newest = True
            for engine, at in reversed(own.values()):
                if at < since:
                    break
                found[engine] += 1
                newest = False
            if newest:  # this tenant was served before then, and so were those before it
                break
        return found
