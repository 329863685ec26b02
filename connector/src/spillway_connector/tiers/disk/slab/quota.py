"""Quotas in the slab layout: what each tenant holds in the size classes of one root, and which of its entries are
evicted.

Every size class's index counts slots by tenant in a small table (``tenant_used``). Several tenants may share a place in
it, so the table is an upper bound: above the quota, the slots themselves are counted. All under the root's lock, so the
quota holds for all processes together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.tiers.disk.slab.index import SlabIndex, tenant_place
from spillway_connector.tiers.disk.slab.index_reader import open_index
from spillway_connector.tiers.disk.slab.policy import FREE, tenant_victim

Evict = Callable[[SlabIndex, int], None]
Choose = Callable[[SlabIndex, int], int | None]
"""Which entry of a tenant leaves for its next one; None if it has none."""


def oldest_of(index: SlabIndex, tenant: int) -> int | None:
    return tenant_victim(index.queues, index.tenant, index.used_s, tenant)


def make_tenant_room(
    index: SlabIndex,
    tenant: int,
    max_bytes: int,
    other_folders: list[Path],
    evict: Evict,
    *,
    choose: Choose = oldest_of,
) -> int | None:
    """Evict entries of ``tenant`` until one more slot of ``index`` is within ``max_bytes``.

    other_folders: of the root's other size classes. choose: which entry of ``index`` leaves. Returns a slot of
    ``index`` that was evicted, which the caller may claim; None if none had to be. Raises TierRefused(NO_SPACE),
    OSError."""
    slot_bytes = index.shape.slot_bytes
    at_most = index.tenant_bytes_at_most(tenant) + sum(_bytes_at_most(folder, tenant) for folder in other_folders)
    if at_most + slot_bytes <= max_bytes:
        return None
    opened = (SlabIndex.open(folder, writable=True) for folder in other_folders)
    indexes = [index, *(other for other in opened if other is not None)]
    held = sum(_slots_of(each, tenant) * each.shape.slot_bytes for each in indexes)
    freed: int | None = None
    while held + slot_bytes > max_bytes:
        # Other size classes first: they belong to a model or layout that the tenant no longer uses, or that shares the
        # node.
        for each in reversed(indexes):
            victim = (choose if each is index else oldest_of)(each, tenant)
            if victim is not None:
                evict(each, victim)
                if each is not index:
                    each.announce()  # the holder of the lock announces those of its own size class
                held -= each.shape.slot_bytes
                freed = victim if each is index else None
                break
        else:
            raise TierRefused(
                RefusedReason.NO_SPACE,
                f"tenant_max_bytes: {max_bytes} leaves tenant {tenant.to_bytes(8, 'little').hex()} no room for a frame "
                f"of {slot_bytes} bytes; raise tenant_max_bytes",
            )
    return freed


def _slots_of(index: SlabIndex, tenant: int) -> int:
    return int(np.count_nonzero((index.tenant == np.uint64(tenant)) & (index.state != FREE)))


def _bytes_at_most(folder: Path, tenant: int) -> int:
    """SlabIndex.tenant_bytes_at_most of another size class."""
    with open_index(folder) as index:
        return 0 if index is None else index.element("tenant_used", tenant_place(tenant)) * index.shape.slot_bytes
