"""Which engine holds which block in which tier, by the gateway's own request keys.

Two keys per block. The engine key comes with the events, belongs to one engine, and serves only to apply removals,
parents and tier moves. The request key is the gateway's chained hash over the tokens (routing/prefix.py), equal for all
engines of a model. A prompt is hashed once and looked up once, whatever hash and seed its engines use.

The index is bounded in bytes and evicts the least recently used blocks. On the event loop only; operations on all
blocks of an engine are iterators of short steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, ENGINE_MASK, BlockTable, Entry
from spillway_gateway.fleet.engine_blocks import (
    GHOST_BYTES,
    EngineBlocks,
    StoredChain,
    chain_of,
    scoped_key,
    sizes_in_use,
)
from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from spillway_gateway.fleet.prefix_match import match_blocks
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import TOKEN_BYTES, chain_key, namespace_key

logger = logging.getLogger(__name__)

# Measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 240
HOLDER_BYTES = 220  # engine key -> request key, and the way back
WAITING_SHARE = 8  # orphans and ghosts of all engines may take an eighth of the bound
SIZES_MATCHED_MAX = 4  # block sizes for which each prompt is hashed; a rolling change of blockSize makes two

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
        self._default_block_tokens = default_block_tokens
        self._sizes: tuple[int, ...] = ()
        self._clock = clock
        self._table = BlockTable(bytes_max)
        self._shards, self._shard_mask = self._table.shards, self._table.shard_mask
        self._engines: dict[str, EngineBlocks] = {}
        self._slots: dict[int, EngineBlocks] = {}  # by slot; engines that are being retired included
        self._devices_of_size: dict[int, int] = {}  # block size -> device bits; emptied when engines or sizes change
        self._hidden_mask = 0  # device bits of engines whose device is being cleared
        self._holders = 0
        self.evicted_blocks_total = 0
        self.orphans_dropped_total = 0
        self.unknown_blocks_total = 0
        self.mismatched_blocks_total = 0

    @property
    def block_tokens(self) -> int:
        """Tokens per block of most engines; the default until an event names a size."""
        return self._sizes[0] if self._sizes else self._default_block_tokens

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Every size in use, that of most engines first; more than one while engines are configured differently."""
        return self._sizes or (self._default_block_tokens,)

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
        """Orphans and ghosts of all engines."""
        return sum([engine.waiting_bytes for engine in self._engines.values()])

    def namespace(self, cache_salt: str | None = None, lora: str | None = None) -> int:
        """Start of the key chain for prompts with this salt and adapter."""
        return namespace_key(self._model, lora, cache_salt)

    # -- engines -----------------------------------------------------------------------------------------------------

    def add_engine(self, name: str) -> None:
        """Index events of this engine from now on. No effect if it is there."""
        if name not in self._engines:
            self._add_engine(name)

    def _add_engine(self, name: str) -> None:
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._engines[name] = self._slots[slot] = EngineBlocks(slot)
        self._devices_of_size = {}

    def retire_engine(self, name: str) -> Iterator[None]:
        """Remove an engine. At once its name is free for another one and nothing of it is matched; its entries are
        freed in steps. Exhaust the iterator: until then its slot is taken."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return iter(())
        self._devices_of_size = {}
        engine.clear_waiting()
        self._sizes_changed()
        return self._free(engine)

    def clear_engine(self, name: str) -> Iterator[None]:
        """Drop all blocks of an engine that stays; events applied from now on count at once. In steps, as
        retire_engine()."""
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

    def _free(self, engine: EngineBlocks) -> Iterator[None]:
        bits = ENGINE_MASK << (engine.slot * BITS_PER_ENGINE)
        for shard, key, entry in self._table.sweep():
            if entry is None:
                yield
                continue
            entry.mask &= ~bits
            entry.speculative_mask &= ~bits
            self._unlink_all(engine, entry)
            self._table.drop_if_unused(shard, key, entry)
        del self._slots[engine.slot]

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

    def apply(self, engine_name: str, event: KvEvent) -> None:
        """Apply one event of one engine. Repeats are harmless; unknown engines are ignored."""
        engine = self._engines.get(engine_name)
        if engine is None:
            return
        if isinstance(event, BlockStored):
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
            self._store_by_key(engine, event)
            return
        if not self._accept_block_size(engine, event.block_tokens):
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

    def _store_by_key(self, engine: EngineBlocks, event: BlockStored) -> None:
        """An event without tokens, as the CPU tier of 0.23 sends it: an earlier event had the tokens of its blocks."""
        for engine_key in event.block_hashes:
            scoped = scoped_key(engine_key, event.group)
            key = engine.request_keys.get(scoped, engine.ghosts.get(scoped))
            if key is None:
                self.unknown_blocks_total += 1
            else:
                self._hold(engine, key, scoped, event.tier)
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
            most = max(self._engines.values(), key=lambda engine: engine.waiting_bytes)
            if most.orphans_held:
                self.orphans_dropped_total += most.drop_oldest_orphans()
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

    def _accept_block_size(self, engine: EngineBlocks, block_tokens: int) -> bool:
        """False for a partial block, as newer engines announce them.

        The engine's largest size is its block size, since a partial block may be the first to arrive. Keys of different
        sizes never meet, so engines of several sizes share one index; blocks that an engine stored under a smaller size
        stay until it removes them.
        """
        if engine.block_tokens is None or block_tokens > engine.block_tokens:
            engine.block_tokens = block_tokens
            self._sizes_changed()
        return block_tokens == engine.block_tokens

    def _sizes_changed(self) -> None:
        sizes = sizes_in_use(iter(self._engines.values()))
        if sizes == self._sizes:
            return
        if len(sizes) > 1:
            engines = self._engines.items()
            users = [
                f"{size} tokens: {', '.join(name for name, engine in engines if engine.block_tokens == size)}"
                for size in sizes
            ]
            ignored = f"; only the first {SIZES_MATCHED_MAX} are matched" if len(sizes) > SIZES_MATCHED_MAX else ""
            logger.warning(
                "model %s: its engines use different block sizes (%s)%s", self._model, "; ".join(users), ignored
            )
        self._sizes = sizes[:SIZES_MATCHED_MAX]
        self._devices_of_size = {}

    def _devices(self, block_tokens: int) -> int:
        """Device bits of the engines that can hold blocks of this size; those of unknown size included."""
        devices = self._devices_of_size.get(block_tokens)
        if devices is None:
            devices = 0
            for engine in self._engines.values():
                if engine.block_tokens in (None, block_tokens):
                    devices |= 1 << (engine.slot * BITS_PER_ENGINE)
            self._devices_of_size[block_tokens] = devices
        return devices

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
        devices = self._devices(tokens_per_block)
        device_blocks, shared_blocks, total_blocks = match_blocks(
            self._shards, self._shard_mask, keys, devices, hidden=self._hidden_mask, now=self._clock()
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
