"""Which engine holds which block in which tier, by the gateway's own request keys.

Two keys per block. The engine key comes with the events, belongs to one engine, and serves only to apply removals,
parents and tier moves. The request key is the gateway's chained hash over the tokens (routing/prefix.py), equal for all
engines of a model. A prompt is hashed once and looked up once, whatever hash and seed its engines use.

The index is bounded in bytes and evicts the least recently used blocks. On the event loop only; operations on all
blocks of an engine are iterators of short steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from spillway_gateway.fleet.block_sizes import BlockSizes
from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, ENGINE_MASK, BlockTable, Entry
from spillway_gateway.fleet.engine_blocks import (
    EARLY_MAX,
    GHOST_BYTES,
    EngineBlocks,
    StoredChain,
    chain_of,
    scoped_key,
)
from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from spillway_gateway.fleet.prefix_match import StoreReaders, match_blocks
from spillway_gateway.fleet.shared_stores import SharedReach, SharedStores
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import TOKEN_BYTES, chain_key, namespace_key

# Measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 240
HOLDER_BYTES = 220  # engine key -> request key, and the way back
WAITING_SHARE = 8  # orphans and ghosts of all engines may take an eighth of the bound

# KV cache groups of hybrid models whose blocks limit how far a prefix reaches; other groups are ignored.
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})


class PrefixIndex:
    """The index of one model.

    model: seeds the request keys. bytes_max, orphans_max: bounds; orphans_max for each engine.
    default_block_tokens: until an event names a block size. clock: monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        *,
        bytes_max: int,
        orphans_max: int,
        default_block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self.bytes_max = bytes_max
        self._orphans_max = orphans_max
        self._clock = clock
        self._table = BlockTable(bytes_max)
        self._shards, self._shard_mask = self._table.shards, self._table.shard_mask
        self._engines: dict[str, EngineBlocks] = {}
        self._sizes = BlockSizes(model, default_block_tokens, self._engines)
        self._slots: dict[int, EngineBlocks] = {}  # by slot; stores, and engines that are being retired, included
        self._stores = SharedStores(clock)
        self._readers: StoreReaders | None = None  # None: to be computed
        self._hidden_mask = 0  # device bits of engines whose device is being cleared
        self._holders = 0
        self.evicted_blocks_total = 0
        self.orphans_dropped_total = 0
        self.unknown_blocks_total = 0
        self.mismatched_blocks_total = 0

    @property
    def block_tokens(self) -> int:
        """Tokens per block of most engines; the default until an event names a size."""
        return self._sizes.in_use[0]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Every size in use, that of most engines first; more than one while engines are configured differently."""
        return self._sizes.in_use

    def block_tokens_of(self, engine_name: str) -> int:
        """Tokens per block of one engine; those of most engines until its events name a size."""
        engine = self._engines.get(engine_name)
        return engine.block_tokens if engine is not None and engine.block_tokens is not None else self.block_tokens

    @property
    def blocks(self) -> int:
        """Blocks that any engine holds or may hold."""
        return self._table.entries

    @property
    def estimated_bytes(self) -> int:
        """Memory of the index, from measured sizes per entry."""
        return self._blocks_bytes() + self.waiting_bytes

    def _blocks_bytes(self) -> int:
        return self._table.entries * ENTRY_BYTES + self._holders * HOLDER_BYTES

    @property
    def waiting_bytes(self) -> int:
        """Orphans, ghosts and early blocks of all engines and stores."""
        return sum([holder.waiting_bytes for holder in self._slots.values()])

    @property
    def shared_stores(self) -> int:
        """Stores of shared tiers of which anything is known."""
        return len(self._stores)

    def shared_reach_of(self, engine_name: str) -> SharedReach:
        """What an engine can load of them."""
        return self._stores.reach_of(engine_name)

    def namespace(self, cache_salt: str | None = None, lora: str | None = None) -> int:
        """Start of the key chain for prompts with this salt and adapter."""
        return namespace_key(self._model, lora, cache_salt)

    # -- engines -----------------------------------------------------------------------------------------------------

    def add_engine(self, name: str) -> None:
        """Index events of this engine from now on. No effect if it is there."""
        if name not in self._engines:
            self._add_engine(name)

    def _add_engine(self, name: str) -> None:
        slot = self._free_slot()
        self._engines[name] = self._slots[slot] = EngineBlocks(slot)
        self._sizes.engines_changed()

    def _free_slot(self) -> int:
        return next(number for number in range(len(self._slots) + 1) if number not in self._slots)

    def retire_engine(self, name: str) -> Iterator[None]:
        """Remove an engine. At once its name is free for another one and nothing of it is matched; its entries are
        freed in steps. Exhaust the iterator: until then its slot is taken."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return iter(())
        engine.clear_waiting()
        self._sizes.engines_changed()
        self._stores.leave_all(name)
        self._readers = None
        unused = self._stores.pop_unused()
        for store in unused:
            store.clear_waiting()
        return self._free([engine, *unused])

    def clear_engine(self, name: str) -> Iterator[None]:
        """Drop all blocks of an engine that stays, and from which stores it loads; what lies in these stays known.
        Events applied from now on count at once. In steps, as retire_engine()."""
        steps = self.retire_engine(name)
        self._add_engine(name)
        return steps

    def clear_device(self, name: str) -> Iterator[None]:
        """The engine's device was reset; its other tiers may hold their blocks. In steps, during which nothing of the
        device is matched and none of the engine's events may be applied."""
        engine = self._engines.get(name)
        if engine is None:
            return
        device = 1 << (engine.slot * BITS_PER_ENGINE)
        self._hidden_mask |= device
        try:
            for shard, key, entry in self._table.sweep():
                if entry is None:
                    yield
                    continue
                entry.speculative_mask &= ~device
                if entry.mask & device:
                    entry.mask &= ~device
                    if not entry.mask >> (engine.slot * BITS_PER_ENGINE) & ENGINE_MASK:
                        for scoped in self._unlink_all(engine, entry):
                            self._keep_ghost(engine, scoped, key)
                self._table.drop_if_unused(shard, key, entry)
        finally:
            self._hidden_mask &= ~device

    def _free(self, holders: list[EngineBlocks]) -> Iterator[None]:
        bits = 0
        for holder in holders:
            bits |= ENGINE_MASK << (holder.slot * BITS_PER_ENGINE)
        for shard, key, entry in self._table.sweep():
            if entry is None:
                yield
                continue
            entry.mask &= ~bits
            entry.speculative_mask &= ~bits
            for holder in holders:
                self._unlink_all(holder, entry)
            self._table.drop_if_unused(shard, key, entry)
        for holder in holders:
            del self._slots[holder.slot]

    def _unlink_all(self, engine: EngineBlocks, entry: Entry) -> list[int]:
        """Remove the engine's keys from an entry and return them."""
        removed = [scoped for slot, scoped in entry.engine_keys if slot == engine.slot]
        if removed:
            entry.engine_keys = tuple([pair for pair in entry.engine_keys if pair[0] != engine.slot])
            for scoped in removed:
                if engine.request_keys.pop(scoped, None) is not None:
                    self._holders -= 1
        return removed

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, engine_name: str, event: KvEvent, *, seen: bool = False) -> None:
        """Apply one event of one engine. Repeats are harmless; unknown engines are ignored.

        seen: it was applied before, and the engine's entries dropped since. A store's were not: of its events only
        counts which engine loads from it, since another engine may have changed its contents.
        """
        engine = self._engines.get(engine_name)
        if engine is None:
            return
        if isinstance(event, BlockStored | BlockRemoved) and event.store is not None:
            self._apply_to_store(engine_name, engine, event, event.store, seen=seen)
        elif isinstance(event, BlockStored):
            self._store(engine, event)
        elif isinstance(event, BlockRemoved):
            self._remove(engine, event)
        elif isinstance(event, AllBlocksCleared):
            for _ in self.clear_device(engine_name):
                pass

    def _store(self, engine: EngineBlocks, event: BlockStored) -> None:
        if event.spec_kind not in _PREFIX_KINDS:
            return
        if not event.token_ids:
            self._store_by_key(engine, event, engine)
            return
        if not self._sizes.accept(engine, event.block_tokens):
            self.mismatched_blocks_total += len(event.block_hashes)
            return
        engine.groups.add(event.group)
        waiting = [chain_of(self._model, event)]
        while waiting:  # a loop, as a chain of orphans may be longer than the interpreter's stack
            chain = waiting.pop()
            parent = self._parent_key(engine, chain)
            if parent is None:
                self._keep_orphan(engine, chain)
                continue
            self._store_chain(engine, chain, parent)
            for scoped in chain.engine_keys:
                waiting.extend(engine.take_children(scoped))
        self._evict()

    def _apply_to_store(
        self, engine_name: str, engine: EngineBlocks, event: BlockStored | BlockRemoved, store_id: str, *, seen: bool
    ) -> None:
        store = self._stores.blocks_of(store_id)
        if isinstance(event, BlockRemoved) and not event.block_hashes:
            self._stores.leave(store_id, engine_name)
            self._readers = None
            return
        if store is None:
            if self._stores.full:
                self.unknown_blocks_total += len(event.block_hashes)
                return
            slot = self._free_slot()
            store = self._slots[slot] = self._stores.add(store_id, slot)
        if self._stores.join(store_id, engine_name):
            self._readers = None
        if seen:
            return
        if isinstance(event, BlockStored):
            self._store_by_key(engine, event, store)
            return
        for engine_key in event.block_hashes:
            engine.drop_early(scoped_key(engine_key, event.group), store, event.tier)
        self._remove(store, event)

    def _store_by_key(self, engine: EngineBlocks, event: BlockStored, holder: EngineBlocks) -> None:
        """An event without tokens, as lower tiers' are: the device's event of the same blocks has them. It comes first
        where the engine computed them, and later where it loaded them. holder: the engine itself, or a store."""
        for engine_key in event.block_hashes:
            scoped = scoped_key(engine_key, event.group)
            key = holder.request_keys.get(scoped)
            if key is None:
                key = engine.request_keys.get(scoped, engine.ghosts.get(scoped, holder.ghosts.get(scoped)))
            if key is not None:
                self._hold(holder, key, scoped, event.tier)
                continue
            if engine.groups and event.group not in engine.groups:
                self.unknown_blocks_total += 1  # of a group that does not limit a prefix
                continue
            engine.keep_early(scoped, holder, event.tier)
            if len(engine.early) > EARLY_MAX:
                engine.drop_oldest_early()
                self.unknown_blocks_total += 1
        self._bound_waiting()
        self._evict()

    def _parent_key(self, engine: EngineBlocks, chain: StoredChain) -> int | None:
        if chain.parent is None:
            return chain.root
        known = engine.request_keys.get(chain.parent)
        return known if known is not None else engine.ghosts.get(chain.parent)

    def _store_chain(self, engine: EngineBlocks, chain: StoredChain, parent: int) -> None:
        size = chain.block_tokens * TOKEN_BYTES
        tokens, extras, tier = chain.tokens, chain.extras, chain.tier
        key = parent
        for position, scoped in enumerate(chain.engine_keys):
            extra = extras[position] if position < len(extras) else b""
            key = chain_key(key, tokens[position * size : (position + 1) * size], extra)
            self._hold(engine, key, scoped, tier)
            if engine.early:
                for holder, lower in engine.take_early(scoped):
                    if self._slots.get(holder.slot) is holder:
                        self._hold(holder, key, scoped, lower)

    def _keep_orphan(self, engine: EngineBlocks, chain: StoredChain) -> None:
        engine.keep_orphan(chain)
        while engine.orphans_held > self._orphans_max:
            self.orphans_dropped_total += engine.drop_oldest_orphans()
        self._bound_waiting()

    def _keep_ghost(self, engine: EngineBlocks, scoped: int, key: int) -> None:
        engine.keep_ghost(scoped, key)
        if len(engine.ghosts) * GHOST_BYTES * len(self._engines) > self.bytes_max // WAITING_SHARE:
            engine.drop_oldest_ghost()

    def _bound_waiting(self) -> None:
        """Drop from the engine with the most, so that one that sends only orphans costs the others nothing."""
        while self.waiting_bytes > self.bytes_max // WAITING_SHARE:
            most = max(self._slots.values(), key=lambda holder: holder.waiting_bytes)
            if most.orphans_held:
                self.orphans_dropped_total += most.drop_oldest_orphans()
            elif most.early:
                most.drop_oldest_early()
                self.unknown_blocks_total += 1
            else:
                most.drop_oldest_ghost()

    def _hold(self, engine: EngineBlocks, key: int, scoped: int, tier: Tier) -> None:
        shard = self._shards[key & self._shard_mask]
        entry = shard.get(key)
        if entry is None:
            entry = shard[key] = Entry()
            self._table.entries += 1
        else:
            shard.move_to_end(key)
        entry.mask |= 1 << (engine.slot * BITS_PER_ENGINE + tier)
        known = engine.request_keys.get(scoped)
        if known == key:
            return
        if known is not None:  # a 64-bit engine key that names another block now
            self._unlink(engine, scoped, known)
        engine.ghosts.pop(scoped, None)
        engine.request_keys[scoped] = key
        entry.engine_keys = (*entry.engine_keys, (engine.slot, scoped))
        self._holders += 1

    def _remove(self, engine: EngineBlocks, event: BlockRemoved) -> None:
        if event.group not in engine.groups and engine.groups:
            return
        for engine_key in event.block_hashes:
            scoped = scoped_key(engine_key, event.group)
            key = engine.request_keys.get(scoped)
            if key is None:
                engine.drop_early(scoped, engine, event.tier)
                continue
            entry = self._shards[key & self._shard_mask][key]
            entry.mask &= ~(1 << (engine.slot * BITS_PER_ENGINE + event.tier))
            entry.speculative_mask &= ~(1 << (engine.slot * BITS_PER_ENGINE))
            if not entry.mask >> (engine.slot * BITS_PER_ENGINE) & ENGINE_MASK:
                self._unlink(engine, scoped, key)

    def _unlink(self, engine: EngineBlocks, scoped: int, key: int) -> None:
        """The engine holds this block in no tier any more; its key becomes a ghost."""
        del engine.request_keys[scoped]
        self._holders -= 1
        self._keep_ghost(engine, scoped, key)
        shard = self._shards[key & self._shard_mask]
        entry = shard[key]
        entry.engine_keys = tuple(pair for pair in entry.engine_keys if pair != (engine.slot, scoped))
        if not any(slot == engine.slot for slot, _ in entry.engine_keys):
            entry.mask &= ~(ENGINE_MASK << (engine.slot * BITS_PER_ENGINE))
        self._table.drop_if_unused(shard, key, entry)

    def _evict(self) -> None:
        blocks_bytes_max = self.bytes_max - self.waiting_bytes
        while self._table.entries and self._blocks_bytes() > blocks_bytes_max:
            entry = self._table.evict_one()
            if entry is None:
                continue
            self.evicted_blocks_total += 1
            for slot, scoped in entry.engine_keys:
                del self._slots[slot].request_keys[scoped]
                self._holders -= 1

    # -- prompts -----------------------------------------------------------------------------------------------------

    def speculate(self, engine_name: str, keys: Sequence[int], until: float) -> None:
        """Count a routed prompt's blocks as held by its engine until an event confirms it or `until`, in the clock's
        seconds."""
        engine = self._engines.get(engine_name)
        if engine is None:
            return
        bit = 1 << (engine.slot * BITS_PER_ENGINE)
        now = self._clock()
        shards, shard_mask = self._shards, self._shard_mask
        for key in keys:
            shard = shards[key & shard_mask]
            entry = shard.get(key)
            if entry is None:
                entry = shard[key] = Entry()
                self._table.entries += 1
            else:
                shard.move_to_end(key)
                if entry.speculative_until <= now:
                    entry.speculative_mask = 0
            entry.speculative_mask |= bit
            entry.speculative_until = max(entry.speculative_until, until)
        if self._blocks_bytes() > self.bytes_max - self.bytes_max // WAITING_SHARE:
            self._evict()

    def match(self, keys: Sequence[int], tokens_per_block: int) -> dict[str, HeldPrefix]:
        """How much of a prompt each engine holds; engines that hold nothing are absent. Does not count as use of the
        blocks: speculate() on the chosen engine does."""
        devices = self._sizes.devices(tokens_per_block)
        if self._readers is None:
            self._readers = self._stores.readers(lambda name: 1 << (self._engines[name].slot * BITS_PER_ENGINE))
        device_blocks, shared_blocks, total_blocks = match_blocks(
            self._shards,
            self._shard_mask,
            keys,
            devices,
            stores=self._readers,
            hidden=self._hidden_mask,
            now=self._clock(),
        )
        held: dict[str, HeldPrefix] = {}
        if not total_blocks:
            return held
        for name, engine in self._engines.items():
            bit = engine.slot * BITS_PER_ENGINE
            total = total_blocks.get(bit, 0)
            if total:
                device = device_blocks[bit]
                shared = shared_blocks.get(bit, 0)
                held[name] = HeldPrefix(
                    device_tokens=device * tokens_per_block,
                    cpu_tokens=(total - device - shared) * tokens_per_block,
                    shared_tokens=shared * tokens_per_block,
                )
        return held
