"""Counting a walk's frames by namespace and tenant, in memory that does not grow with their number. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from spillway_connector.tiers.inspection import StoredFrame

TENANTS_MAX = 100_000  # counted one by one, per store; further ones are counted together. About 30 MB


@dataclass(slots=True)
class Count:
    frames: int = 0
    stored_bytes: int = 0

    def add(self, stored_bytes: int) -> None:
        self.frames += 1
        self.stored_bytes += stored_bytes


@dataclass(slots=True)
class NamespaceCount:
    """oldest_s, newest_s: seconds since 1970 from which ages count, see StoredFrame.age_reference_s."""

    total: Count = field(default_factory=Count)
    oldest_s: float | None = None
    newest_s: float | None = None
    damage: Counter[str] = field(default_factory=Counter)
    tenants: dict[bytes, Count] = field(default_factory=dict)
    other_tenants: Count = field(default_factory=Count)
    unknown_tenant: Count = field(default_factory=Count)  # of frames whose header is damaged


class Census:
    """Frames are counted with :meth:`add`; the results are the attributes."""

    def __init__(self, tenants_max: int = TENANTS_MAX) -> None:
        self.total = Count()
        self.damage: Counter[str] = Counter()
        self.namespaces: dict[bytes, NamespaceCount] = {}
        self._tenants_left = tenants_max

    def add(self, frame: StoredFrame) -> None:
        self.total.add(frame.stored_bytes)
        here = self.namespaces.setdefault(frame.namespace, NamespaceCount())
        here.total.add(frame.stored_bytes)
        if frame.damage is not None:
            self.damage[str(frame.damage.reason)] += 1
            here.damage[str(frame.damage.reason)] += 1
        reference_s = frame.age_reference_s
        if reference_s is not None:
            here.oldest_s = reference_s if here.oldest_s is None else min(here.oldest_s, reference_s)
            here.newest_s = reference_s if here.newest_s is None else max(here.newest_s, reference_s)
        self._count_tenant(here, frame)

    def _count_tenant(self, here: NamespaceCount, frame: StoredFrame) -> None:
        if frame.tenant is None or frame.damage is not None:
            here.unknown_tenant.add(frame.stored_bytes)
            return
        count = here.tenants.get(frame.tenant)
        if count is None:
            if not self._tenants_left:
                here.other_tenants.add(frame.stored_bytes)
                return
            self._tenants_left -= 1
            count = here.tenants[frame.tenant] = Count()
        count.add(frame.stored_bytes)


def largest_first(tenants: dict[bytes, Count]) -> Iterator[tuple[bytes, Count]]:
    """Tenants by the bytes they hold."""
    return iter(sorted(tenants.items(), key=lambda item: (-item[1].stored_bytes, item[0])))
