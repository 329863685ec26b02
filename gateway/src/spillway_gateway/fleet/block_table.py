"""The blocks of a prefix index: who holds each, in which tier, in order of use. On the event loop only.

Holders are bits of one integer per block, BITS_PER_ENGINE for each engine, so one step down a chain tests all engines
at once.

The event loop also serves streams, so no operation may take long, however many blocks there are. Entries lie in many
small dicts, because a dict that grows is copied as a whole. A pass over all entries yields after SWEEP_STEP of them.

Nothing of an entry is an object that the cyclic garbage collector visits, but for a tuple of each run of blocks. Blocks
that come and go in equal numbers hide from its thresholds, so it would meet those of many steps at once. The dicts are
the same ones for the life of the table, because the process freezes those that exist when it starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

SWEEP_STEP = 250  # entries between two yields, about a millisecond
COMPACT_EVICTIONS_MIN = 100
SHARDS = 256
SHARDED_BYTES_MIN = 8 * 1024 * 1024  # a smaller table is one dict, whose order of use is exact

BITS_PER_ENGINE = 4
ENGINE_MASK = (1 << BITS_PER_ENGINE) - 1


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks with equal holders.

    device: device bits of the engines that have them or will have them. mask: as an entry's.
    """

    device: int
    mask: int
    blocks: int


class BlockRun(msgspec.Struct, gc=False):
    """Consecutive blocks whose holders were read together (block_runs.py)."""

    spans: tuple[Span, ...] = ()
    until: float = 0.0  # monotonic seconds; 0: a block has changed since
    used_at: int | None = None  # `BlockTable.added` when the run was last moved to the end of the order of use


class HolderKey(msgspec.Struct, frozen=True, gc=False):
    """A key by which a holder names a block. others: the block's further keys."""

    slot: int
    scoped: int  # the engine key within its KV cache group
    others: HolderKey | None


class Entry(msgspec.Struct, gc=False):
    """One block. mask: bit `slot * BITS_PER_ENGINE + tier` for each engine that holds it in a tier. Whoever changes
    who holds it calls changed()."""

    mask: int = 0
    speculative_mask: int = 0  # device bits of engines without events that accepted a prompt with this block
    speculative_until: float = 0.0  # monotonic seconds
    keys: HolderKey | None = None  # of all holders
    run: BlockRun | None = None  # the one that was read last with this block
    short_run: BlockRun | None = None  # the same of short ones

    def changed(self) -> None:
        """Note a change: results that were read with this block have to be read again."""
        if self.run is not None:
            self.run.until = 0.0
        if self.short_run is not None:
            self.short_run.until = 0.0

    def speculate(self, device: int, until: float, now: float) -> None:
        """An engine without events counts as having it. device: its bit. until, now: monotonic seconds."""
        if self.speculative_until <= now:
            self.speculative_mask = 0
        self.speculative_mask |= device
        self.speculative_until = max(self.speculative_until, until)
        self.changed()

    def holder_keys(self) -> Iterator[HolderKey]:
        """The keys of all holders, in no order."""
        each = self.keys
        while each is not None:
            yield each
            each = each.others

    def drop_keys(self, slot: int, scoped: int | None = None) -> None:
        """Forget the keys of a holder. scoped: this one alone."""
        kept = None
        for each in self.holder_keys():
            if each.slot != slot or scoped not in (None, each.scoped):
                kept = HolderKey(each.slot, each.scoped, kept)
        self.keys = kept


Shard = OrderedDict[int, Entry]  # by request key, least recently used first


class BlockTable:
    """Entries by request key. Callers on the hot path index `shards[key & shard_mask]` themselves."""

    __slots__ = (
        "_next_compacted",
        "_next_evicted",
        "_until_compacted",
        "added",
        "entries",
        "shard_mask",
        "shards",
    )

    def __init__(self, bytes_max: int) -> None:
        shards = SHARDS if bytes_max >= SHARDED_BYTES_MIN else 1
        self.shards: list[Shard] = [OrderedDict() for _ in range(shards)]
        self.shard_mask = shards - 1  # of the key's lowest bits
        self.entries = 0
        self.added = 0  # entries, ever
        self._next_evicted = 0  # shard
        self._next_compacted = 0  # shard
        self._until_compacted = COMPACT_EVICTIONS_MIN  # evictions

    def sweep(self, stride: int = 1) -> Iterator[tuple[Shard, int, Entry | None]]:
        """Yield the entries of each `stride`-th shard that exist from the start of the sweep to the moment of their
        turn. After SWEEP_STEP entries the entry is None: the caller yields to the event loop, and the table may
        change."""
        position = 0
        for at in range(0, len(self.shards), stride):
            for key in list(self.shards[at]):
                position += 1
                if position % SWEEP_STEP == 0:
                    yield self.shards[at], key, None
                entry = self.shards[at].get(key)  # may be gone since the pause
                if entry is not None:
                    yield self.shards[at], key, entry

    def add(self, shard: Shard, key: int) -> Entry:
        """A new entry, used last."""
        entry = shard[key] = Entry()
        self.entries += 1
        self.added += 1
        return entry

    def drop_if_unused(self, shard: Shard, key: int, entry: Entry) -> None:
        """Remove the entry if no engine holds it and no key of an engine leads to it."""
        if not (entry.mask or entry.speculative_mask or entry.keys):
            del shard[key]
            self.entries -= 1

    def evict_one(self) -> Entry | None:
        """Remove and return the least recently used entry of the next shard, None if that one is empty. Shards take
        turns: keys are hashes, so all shards hold about as many entries."""
        shard = self.shards[self._next_evicted & self.shard_mask]
        self._next_evicted += 1
        if not shard:
            return None
        _, entry = shard.popitem(last=False)
        self.entries -= 1
        entry.changed()
        self._until_compacted -= 1
        if self._until_compacted <= 0:
            self._compact_one()
        return entry

    def _compact_one(self) -> None:
        """Copy the next shard into a new dict. A dict keeps the places of removed keys until it is full and then grows
        threefold; full shards lose entries as fast as they gain them. Filled in turn they keep memory level, while
        otherwise all of them would grow at about the same time."""
        shard = self.shards[self._next_compacted & self.shard_mask]
        self._next_compacted += 1
        entries = shard.copy()
        shard.clear()
        shard.update(entries)
        self._until_compacted = max(COMPACT_EVICTIONS_MIN, self.entries // len(self.shards) // 5)
