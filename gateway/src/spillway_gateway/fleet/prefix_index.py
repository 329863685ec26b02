"""The prefix index: which engine holds which block in which tier, by the gateway's own request keys.

Two keys per block. The engine key comes with the events, belongs to one engine, and serves only to apply removals,
parents and tier moves. The request key is the gateway's chained hash over the tokens (routing/prefix.py), equal for all
engines of a model. A prompt is hashed once and looked up once, whatever hash and seed its engines use.

The index is bounded in bytes and evicts the least recently used blocks. On the event loop only; operations on all
blocks of an engine are iterators of short steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from spillway_gateway.fleet.block_census import blocks_held_alone
from spillway_gateway.fleet.block_holders import EXPECTED_SHARE, STEP_BLOCKS, BlockHolders
from spillway_gateway.fleet.block_runs import read_spans
from spillway_gateway.fleet.block_sizes import BlockSizes
from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, ENGINE_MASK
from spillway_gateway.fleet.engine_blocks import EARLY_MAX, EngineBlocks, StoredChain, chain_of, scoped_key
from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from spillway_gateway.fleet.expected_blocks import Expected, ExpectedBlocks
from spillway_gateway.fleet.prefix_match import StoreOf, StoreReaders, match_blocks
from spillway_gateway.fleet.shared_stores import SharedReach, SharedStores
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import TOKEN_BYTES, chain_key, namespace_key
from spillway_gateway.turns import Turns

SWEEP_STEPS_PER_ITERATION = 8  # of the event loop: under 5 ms
# KV cache groups of hybrid models whose blocks limit how far a prefix reaches; other groups are ignored.
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})


class PrefixIndex:
    """The index of one model.

    model: seeds the request keys. bytes_max, orphans_max: bounds; orphans_max for each engine.
    default_block_tokens: until an event names a block size. clock: monotonic seconds. sweeps: turns of steps over all
    blocks, as hundreds of engines may leave at once.
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
        self._orphans_max = orphans_max
        self._clock = clock
        self._held = BlockHolders(bytes_max)
        self._shards, self._shard_mask = self._held.table.shards, self._held.table.shard_mask
        self._engines: dict[str, EngineBlocks] = {}
        self._sizes = BlockSizes(model, default_block_tokens, self._engines)
        self._stores = SharedStores(clock)
        self._expected = ExpectedBlocks()
        self._readers: dict[bool, StoreReaders] = {}  # by whether loads have to pay; computed when it is absent
        self._hidden_mask = 0  # device bits of engines whose device is being cleared
        self.mismatched_blocks_total = 0
        self.sweeps = Turns(SWEEP_STEPS_PER_ITERATION)

    @property
    def bytes_max(self) -> int:
        """The bound on all of it."""
        return self._held.bytes_max

    def bound(self, bytes_max: int) -> None:
        """Hold no more bytes than that from now on."""
        self._held.bytes_max = bytes_max

    @property
    def evicted_blocks_total(self) -> int:
        """Blocks that made way for others."""
        return self._held.evicted_total

    @property
    def orphans_dropped_total(self) -> int:
        """Stored-events whose parent did not come."""
        return self._held.orphans_dropped_total

    @property
    def unknown_blocks_total(self) -> int:
        """Blocks announced without tokens, of which no event with tokens came."""
        return self._held.unknown_total

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
        return self._held.table.entries

    @property
    def estimated_bytes(self) -> int:
        """Memory of the index, from measured sizes per entry."""
        return self._held.blocks_bytes + self._held.waiting_bytes + self._expected.bytes

    @property
    def waiting_bytes(self) -> int:
        """Orphans, tombstones and early blocks of all engines and stores."""
        return self._held.waiting_bytes

    @property
    def shared_stores(self) -> int:
        """Stores of which the index knows anything, including the CPU tiers of nodes."""
        return len(self._stores)

    def shared_reach_of(self, engine_name: str) -> SharedReach:
        """Count the blocks that an engine can load from stores, by their type."""
        return self._stores.reach_of(engine_name)

    def stores_of(self, engine_name: str) -> frozenset[str]:
        """The names of the stores that an engine loads from."""
        return self._stores.names_of(engine_name)

    def declined_stores_of(self, engine_name: str) -> frozenset[str]:
        """Return those of the stores from which loads do not pay for the engine."""
        return self._stores.declined_names_of(engine_name)

    def namespace(self, cache_salt: str | None = None, lora: str | None = None) -> int:
        """Start of the key chain for prompts with this salt and adapter."""
        return namespace_key(self._model, lora, cache_salt)

    # -- engines -----------------------------------------------------------------------------------------------------

    def add_engine(self, name: str) -> None:
        """Index events of this engine from now on. No effect if it is there."""
        if name not in self._engines:
            self._add_engine(name)

    def _add_engine(self, name: str) -> None:
        self._engines[name] = self._held.add()
        self._sizes.engines_changed()

    def retire_engine(self, name: str) -> Iterator[None]:
        """Remove an engine. At once its name is free for another one and nothing of it is matched; its entries are
        freed in steps. Exhaust the iterator: until then its slot is taken."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return iter(())
        engine.clear_waiting()
        engine.freed = True
        self._expected.forget_devices(1 << (engine.slot * BITS_PER_ENGINE))
        self._sizes.engines_changed()
        self._stores.leave_all(name)
        self.decline(name, frozenset())
        unused = self._stores.pop_unused()
        for store in unused:
            store.clear_waiting()
            store.freed = True
        return self._free([engine, *unused])

    def clear_engine(self, name: str) -> Iterator[None]:
        """Drop all blocks of an engine that stays, and from which stores it loads; what lies in these stays known, with
        or without its tokens, and what it declines. Events applied from now on count at once. It works in steps, like
        retire_engine()."""
        declined = self._stores.declined_by(name)
        before = self._engines.get(name)
        early = before.early_of_stores() if before is not None else None
        steps = self.retire_engine(name)
        self._add_engine(name)
        if early:
            self._engines[name].early = early
        self.decline(name, declined)
        return steps

    def clear_device(self, name: str) -> Iterator[None]:
        """The engine's device was reset; its other tiers may hold their blocks. In steps, during which nothing of the
        device is matched and none of the engine's events may be applied."""
        engine = self._engines.get(name)
        if engine is None:
            return
        device = 1 << (engine.slot * BITS_PER_ENGINE)
        self._hidden_mask |= device
        self._expected.forget_devices(device)
        try:
            for shard, key, entry in self._held.table.sweep():
                if entry is None:
                    yield
                    continue
                entry.changed()
                entry.speculative_mask &= ~device
                if entry.mask & device:
                    entry.mask &= ~device
                    if not entry.mask >> (engine.slot * BITS_PER_ENGINE) & ENGINE_MASK:
                        for scoped in self._held.unlink_all(engine, entry):
                            self._held.keep_tombstone(engine, scoped, key)
                self._held.table.drop_if_unused(shard, key, entry)
        finally:
            self._hidden_mask &= ~device

    def _free(self, holders: list[EngineBlocks]) -> Iterator[None]:
        bits = 0
        for holder in holders:
            bits |= ENGINE_MASK << (holder.slot * BITS_PER_ENGINE)
        for shard, key, entry in self._held.table.sweep():
            if entry is None:
                yield
                continue
            entry.mask &= ~bits
            entry.speculative_mask &= ~bits
            entry.changed()
            for holder in holders:
                self._held.unlink_all(holder, entry)
            self._held.table.drop_if_unused(shard, key, entry)
        for holder in holders:
            del self._held.slots[holder.slot]

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, engine_name: str, event: KvEvent, *, seen: bool = False) -> None:
        """apply_in_steps() at once."""
        for _ in self.apply_in_steps(engine_name, event, seen=seen):
            pass

    def apply_in_steps(self, engine_name: str, event: KvEvent, *, seen: bool = False) -> Iterator[None]:
        """Apply one event of one engine. Repeats are harmless; unknown engines are ignored. No other event of the
        engine may be applied before the last step.

        seen: it was applied before, and the engine's entries dropped since. The store's entries were not dropped: of
        such an event of a store, only the engine that loads from it counts, since another engine may have changed the
        store's contents.
        """
        engine = self._engines.get(engine_name)
        if engine is None:
            return
        if isinstance(event, BlockStored | BlockRemoved) and event.store is not None:
            yield from self._apply_to_store(engine_name, engine, event, event.store, seen=seen)
        elif isinstance(event, BlockStored):
            yield from self._store(engine, event)
        elif isinstance(event, BlockRemoved):
            yield from self._remove(engine, event)
        elif isinstance(event, AllBlocksCleared):
            yield from self.clear_device(engine_name)

    def _store(self, engine: EngineBlocks, event: BlockStored) -> Iterator[None]:
        if event.spec_kind not in _PREFIX_KINDS:
            return
        if not event.token_ids:
            yield from self._store_by_key(engine, event, engine)
            return
        if not self._sizes.accept(engine, event.block_tokens, len(event.block_hashes)):
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
            yield from self._store_chain(engine, chain, parent)
            if engine.has_orphans:
                for scoped in chain.engine_keys:
                    waiting.extend(engine.take_children(scoped))
            if waiting:
                yield
        self._held.evict()

    def _apply_to_store(
        self, engine_name: str, engine: EngineBlocks, event: BlockStored | BlockRemoved, store_id: str, *, seen: bool
    ) -> Iterator[None]:
        store = self._stores.blocks_of(store_id)
        if isinstance(event, BlockRemoved) and not event.block_hashes:
            self._stores.leave(store_id, engine_name)
            self._readers.clear()
            return
        if store is None:
            if self._stores.full:
                self._held.unknown_total += len(event.block_hashes)
                return
            store = self._held.add()
            self._stores.add(store_id, store)
        if self._stores.join(store_id, engine_name):
            self._readers.clear()
        if seen:
            return
        if isinstance(event, BlockStored):
            yield from self._store_by_key(engine, event, store)
            return
        yield from self._remove(store, event, engine)

    def _store_by_key(self, engine: EngineBlocks, event: BlockStored, holder: EngineBlocks) -> Iterator[None]:
        """Apply an event without tokens, as lower tiers send it: the device's event of the same blocks has the tokens.
        That event comes first if the engine computed the blocks, and later if it loaded them. holder: the engine
        itself, or a store."""
        for position, engine_key in enumerate(event.block_hashes, 1):
            if position % STEP_BLOCKS == 0:
                self._held.bound_waiting()
                self._held.evict()
                yield
            scoped = scoped_key(engine_key, event.group)
            key = holder.request_keys.get(scoped)
            if key is None:
                key = engine.request_keys.get(scoped, engine.tombstones.get(scoped, holder.tombstones.get(scoped)))
            if key is not None:
                self._held.hold(holder, key, scoped, event.tier)
                continue
            if engine.groups and event.group not in engine.groups:
                self._held.unknown_total += 1  # of a group that does not limit a prefix
                continue
            engine.keep_early(scoped, holder, event.tier)
            if len(engine.early) > EARLY_MAX:
                engine.drop_oldest_early()
                self._held.unknown_total += 1
        self._held.bound_waiting()
        self._held.evict()

    def _parent_key(self, engine: EngineBlocks, chain: StoredChain) -> int | None:
        if chain.parent is None:
            return chain.root
        known = engine.request_keys.get(chain.parent)
        return known if known is not None else engine.tombstones.get(chain.parent)

    def _store_chain(self, engine: EngineBlocks, chain: StoredChain, parent: int) -> Iterator[None]:
        size = chain.block_tokens * TOKEN_BYTES
        tokens, extras, tier = chain.tokens, chain.extras, chain.tier
        key = parent
        for position, scoped in enumerate(chain.engine_keys):
            if position and position % STEP_BLOCKS == 0:
                self._held.evict()
                yield
            extra = extras[position] if position < len(extras) else b""
            key = chain_key(key, tokens[position * size : (position + 1) * size], extra)
            self._held.hold(engine, key, scoped, tier)
            if tier is Tier.DEVICE:
                self._expected.announced(key, 1 << (engine.slot * BITS_PER_ENGINE))
            if engine.early:
                for holder, lower in engine.take_early(scoped):
                    self._held.hold(holder, key, scoped, lower)

    def _keep_orphan(self, engine: EngineBlocks, chain: StoredChain) -> None:
        engine.keep_orphan(chain)
        while engine.orphans_held > self._orphans_max:
            self._held.orphans_dropped_total += engine.drop_oldest_orphans()
        self._held.bound_waiting()

    def _remove(self, holder: EngineBlocks, event: BlockRemoved, engine: EngineBlocks | None = None) -> Iterator[None]:
        """engine: the engine that announces it, if the holder is a store."""
        if engine is None and event.group not in holder.groups and holder.groups:
            return
        device = holder.slot * BITS_PER_ENGINE
        for position, engine_key in enumerate(event.block_hashes, 1):
            if position % STEP_BLOCKS == 0:
                yield
            scoped = scoped_key(engine_key, event.group)
            if engine is not None:
                engine.drop_early(scoped, holder, event.tier)
            key = holder.request_keys.get(scoped)
            if key is None:
                holder.drop_early(scoped, holder, event.tier)
                continue
            self._expected.forget(key)
            entry = self._shards[key & self._shard_mask][key]
            entry.mask &= ~(1 << (device + event.tier))
            entry.speculative_mask &= ~(1 << device)
            entry.changed()
            if not entry.mask >> device & ENGINE_MASK:
                self._held.unlink(holder, scoped, key)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def expect(
        self, engine_name: str, keys: Sequence[int], until: float, *, on_device: int | None = None
    ) -> tuple[Expected, ...]:
        """A prompt was routed: count its blocks as held by its engine until `until`, in the clock's seconds, after
        those that it is known to hold. No block of the index is evicted for them. Returns what withdraw() takes.
        on_device: how many blocks match() has found on the engine's device just now."""
        engine = self._engines.get(engine_name)
        if engine is None:
            return ()
        device = 1 << (engine.slot * BITS_PER_ENGINE)
        bytes_max = self.bytes_max // EXPECTED_SHARE
        now = self._clock()
        if on_device is not None and self._expected.by_key.keys().isdisjoint(keys[:on_device]):
            held = on_device  # nothing that match() has found there is only expected
        else:
            held = 0 if device & self._hidden_mask else self._held_blocks(device, keys, now)
        if held == len(keys):
            return ()
        return self._expected.expect(device, keys[held:], until, now=now, bytes_max=bytes_max)

    def _held_blocks(self, device: int, keys: Sequence[int], now: float) -> int:
        """Return how many of a prompt's blocks, from its first one on, are known to be on that device; expected ones do
        not count."""
        held = 0
        for span in read_spans(self._shards, self._shard_mask, keys, {}, now):
            if not span.device & device:
                break
            held += span.blocks
        return held

    def withdraw(self, expected: tuple[Expected, ...]) -> None:
        """The engine did not accept the prompt."""
        self._expected.withdraw(expected)

    def accepted(
        self, engine_name: str, keys: Sequence[int], until: float | None, expected: tuple[Expected, ...] = ()
    ) -> Iterator[None]:
        """The engine accepted the prompt, which counts as use of its blocks.

        Args:
            engine_name: The engine.
            keys: Request keys of the prompt's blocks.
            until: For an engine without events, which then holds them in the index until that time, or until an eighth
                of it before; None: its events say what it holds.
            expected: What expect() returned. They are forgotten once the index has them.
        """
        for start in range(0, len(keys), STEP_BLOCKS):
            if start:
                yield
            engine = self._engines.get(engine_name)  # may be gone, or another one, since the last step
            if engine is None:
                return
            self._held.use(engine, keys[start : start + STEP_BLOCKS], until, self._clock())
        if until is not None:
            self.withdraw(expected)

    def decline(self, engine_name: str, types: frozenset[str]) -> None:
        """Record the types of shared tiers from which loads do not pay for the engine, so it finds nothing there. From
        all other types loads pay."""
        self._stores.decline(engine_name, types)
        self._readers.clear()

    def _store_readers(self, *, paying: bool = False) -> StoreReaders:
        readers = self._readers.get(paying)
        if readers is None:
            bit_of = lambda name: 1 << (self._engines[name].slot * BITS_PER_ENGINE)  # noqa: E731
            readers = self._readers[paying] = self._stores.readers(bit_of, paying=paying)
        return readers

    def held_alone(self, pods: Mapping[str, str]) -> Iterator[dict[str, int] | None]:
        """The blocks that only one pod holds or can load; see block_census.py. pods: by engine."""
        slots = {engine.slot: pods[name] for name, engine in self._engines.items() if name in pods}
        return blocks_held_alone(self._held.table, slots, self._store_readers())

    def in_a_store(self, keys: Sequence[int]) -> int:
        """Count a prompt's blocks, from its first one on, that lie in stores of shared tiers that any engine loads
        from."""
        stores = 0
        for bit, _, what in self._store_readers():
            if what is not StoreOf.NODE:
                stores |= bit
        for position, key in enumerate(keys):
            entry = self._shards[key & self._shard_mask].get(key)
            if entry is None or not entry.mask & stores:
                return position
        return len(keys)

    def match(self, keys: Sequence[int], tokens_per_block: int) -> dict[str, HeldPrefix]:
        """Return how much of a prompt each engine holds, or loads from shared tiers that it does not decline; engines
        that hold nothing are absent. This does not count as use of the blocks: accepted() on the chosen engine does."""
        devices = self._sizes.devices(tokens_per_block)
        device_blocks, shared_blocks, below_blocks, total_blocks = match_blocks(
            self._shards,
            self._shard_mask,
            keys,
            devices,
            stores=self._store_readers(paying=True),
            expected=self._expected.by_key,
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
                device = device_blocks.get(bit, 0)
                shared = shared_blocks.get(bit, 0)
                held[name] = HeldPrefix(
                    device_tokens=device * tokens_per_block,
                    cpu_tokens=(total - device - shared) * tokens_per_block,
                    shared_tokens=shared * tokens_per_block,
                    below_tokens=below_blocks.get(bit, 0) * tokens_per_block,
                )
        return held
