"""The table of blocks, their holders and their keys, bounded in bytes.

A holder is an engine or the store of a shared tier; its slot is its place in the masks of the table's entries. On the
event loop only, in steps: whoever adds blocks adds STEP_BLOCKS at most between two calls of evict().
"""

from __future__ import annotations

from collections.abc import Sequence

from spillway_gateway.fleet.block_runs import use_runs
from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, ENGINE_MASK, BlockTable, Entry, HolderKey
from spillway_gateway.fleet.engine_blocks import TOMBSTONE_BYTES, EngineBlocks
from spillway_gateway.fleet.event_decoder import Tier
from spillway_gateway.routing.prefix import RUN_BLOCKS

# Measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 240
HOLDER_BYTES = 190  # engine key -> request key, and the way back
WAITING_SHARE = 8  # orphans and tombstones of all engines may take an eighth of the bound
EXPECTED_SHARE = 16  # blocks of prompts that engines have yet to accept or to announce may take a sixteenth
STEP_BLOCKS = 4 * RUN_BLOCKS  # added, touched or removed between two yields, about a millisecond
EVICTIONS_MAX = 2 * STEP_BLOCKS  # in one step: more than it adds


class BlockHolders:
    """slots: holders by slot, including those that are being freed."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.table = BlockTable(bytes_max)
        self._shards, self._shard_mask = self.table.shards, self.table.shard_mask
        self.slots: dict[int, EngineBlocks] = {}
        self.keys = 0  # of all holders
        self.evicted_total = 0
        self.orphans_dropped_total = 0
        self.unknown_total = 0

    @property
    def blocks_bytes(self) -> int:
        """Memory of blocks and their holders, from measured sizes."""
        return self.table.entries * ENTRY_BYTES + self.keys * HOLDER_BYTES

    @property
    def waiting_bytes(self) -> int:
        """Orphans, tombstones and early blocks of all holders."""
        return sum([holder.waiting_bytes for holder in self.slots.values()])

    def add(self) -> EngineBlocks:
        """A new holder."""
        slot = next(number for number in range(len(self.slots) + 1) if number not in self.slots)
        holder = self.slots[slot] = EngineBlocks(slot)
        return holder

    def hold(self, holder: EngineBlocks, key: int, scoped: int, tier: Tier) -> None:
        """The holder has the block in that tier."""
        if holder.freed:  # a store that was forgotten while an engine kept an early block of it, or between two steps
            return
        shard = self._shards[key & self._shard_mask]
        entry = shard.get(key)
        if entry is None:
            entry = self.table.add(shard, key)
        else:
            shard.move_to_end(key)
        mask = entry.mask | 1 << (holder.slot * BITS_PER_ENGINE + tier)
        if mask != entry.mask:
            entry.mask = mask
            entry.changed()
        known = holder.request_keys.get(scoped)
        if known == key:
            return
        if known is not None:  # a 64-bit engine key that names another block now
            self.unlink(holder, scoped, known)
        holder.tombstones.pop(scoped, None)
        holder.request_keys[scoped] = key
        entry.keys = HolderKey(holder.slot, scoped, entry.keys)
        self.keys += 1

    def unlink(self, holder: EngineBlocks, scoped: int, key: int) -> None:
        """The engine holds this block in no tier any more; its key becomes a tombstone."""
        del holder.request_keys[scoped]
        self.keys -= 1
        self.keep_tombstone(holder, scoped, key)
        shard = self._shards[key & self._shard_mask]
        entry = shard[key]
        entry.drop_keys(holder.slot, scoped)
        if not any(each.slot == holder.slot for each in entry.holder_keys()):
            entry.mask &= ~(ENGINE_MASK << (holder.slot * BITS_PER_ENGINE))
            entry.changed()
        self.table.drop_if_unused(shard, key, entry)

    def unlink_all(self, holder: EngineBlocks, entry: Entry) -> list[int]:
        """Remove the engine's keys from an entry and return them."""
        removed = [each.scoped for each in entry.holder_keys() if each.slot == holder.slot]
        if removed:
            entry.drop_keys(holder.slot)
            for scoped in removed:
                if holder.request_keys.pop(scoped, None) is not None:
                    self.keys -= 1
        return removed

    def keep_tombstone(self, holder: EngineBlocks, scoped: int, key: int) -> None:
        """Keep the key of a block that the holder has in no tier any more."""
        holder.keep_tombstone(scoped, key)
        if len(holder.tombstones) * TOMBSTONE_BYTES * len(self.slots) > self.bytes_max // WAITING_SHARE:
            holder.drop_oldest_tombstone()

    def bound_waiting(self) -> None:
        """Drop waiting entries of the engine that has most of them, so that an engine that sends only orphans costs the
        others nothing."""
        while self.waiting_bytes > self.bytes_max // WAITING_SHARE:
            most = max(self.slots.values(), key=lambda holder: holder.waiting_bytes)
            if most.orphans_held:
                self.orphans_dropped_total += most.drop_oldest_orphans()
            elif most.early:
                most.drop_oldest_early()
                self.unknown_total += 1
            else:
                most.drop_oldest_tombstone()

    def evict(self) -> None:
        """Evict blocks above the bound, after each step, which adds STEP_BLOCKS at most. If more than that lies above
        the bound, because a smaller bound was configured, it is evicted over further steps."""
        blocks_bytes_max = self.bytes_max - self.bytes_max // EXPECTED_SHARE - self.waiting_bytes
        evicted = 0
        while self.table.entries and self.blocks_bytes > blocks_bytes_max and evicted < EVICTIONS_MAX:
            entry = self.table.evict_one()
            if entry is None:
                continue
            evicted += 1
            for each in entry.holder_keys():
                del self.slots[each.slot].request_keys[each.scoped]
                self.keys -= 1
        self.evicted_total += evicted

    def use(self, holder: EngineBlocks, keys: Sequence[int], until: float | None, now: float) -> None:
        """A prompt uses these blocks. until: the holder counts as having them until then; None: its events say so."""
        added = self.table.added
        use_runs(self.table, keys, 1 << (holder.slot * BITS_PER_ENGINE), until, now)
        if self.table.added != added:
            self.evict()
