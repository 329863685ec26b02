"""What each tenant holds of the pools of one root, and what it gives up for its own next entry.

Every pool's index counts slots by tenant in a small table (``tenant_used``). Several tenants may share a place in it,
so the table can only say "certainly within the quota"; where it does not, the slots are counted. All under the root's
lock, so the bound holds for all processes together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.tiers.disk.slab.index import SlabIndex, tenant_place
from spillway_connector.tiers.disk.slab.layout import HEADER_FIXED_BYTES, INDEX_NAME, PoolShape
from spillway_connector.tiers.disk.slab.policy import FREE, tenant_victim

Evict = Callable[[SlabIndex, int], None]


def make_tenant_room(
    own: SlabIndex, tenant: int, max_bytes: int, other_folders: list[Path], evict: Evict
) -> int | None:
    """Evict entries of ``tenant`` until one more slot of ``own`` is within ``max_bytes``.

    other_folders: of the root's other pools. Returns a slot of ``own`` that was evicted, which the caller may claim;
    None where none had to be. Raises TierRefused(NO_SPACE), OSError.
    """
    slot_bytes = own.shape.slot_bytes
    at_most = own.tenant_bytes_at_most(tenant) + sum(_bytes_at_most(folder, tenant) for folder in other_folders)
    if at_most + slot_bytes <= max_bytes:
        return None
    indexes = [own, *(index for folder in other_folders if (index := SlabIndex.open(folder, writable=True)))]
    held = sum(_slots_of(index, tenant) * index.shape.slot_bytes for index in indexes)
    freed: int | None = None
    while held + slot_bytes > max_bytes:
        # Of other pools first: they are of a model or layout that this tenant has moved on from, or shares the node.
        for index in reversed(indexes):
            victim = tenant_victim(index.queues, index.tenant, index.used_s, tenant)
            if victim is not None:
                evict(index, victim)
                held -= index.shape.slot_bytes
                freed = victim if index is own else None
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
    """The table's word for another pool, without mapping its index."""
    try:
        descriptor = os.open(folder / INDEX_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        shape = PoolShape.unpack(os.pread(descriptor, HEADER_FIXED_BYTES, 0))
        if shape is None:
            return 0
        at = shape.offsets()[0]["tenant_used"] + 4 * tenant_place(tenant)
        return int.from_bytes(os.pread(descriptor, 4, at), "little") * shape.slot_bytes
    finally:
        os.close(descriptor)
