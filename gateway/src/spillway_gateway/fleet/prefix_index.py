"""Which engine holds which block in which tier, by the gateway's own request keys.

Two keys per block. The engine key comes with the events, belongs to one engine, and serves only to apply removals,
parents and tier moves. The request key is the gateway's chained hash over the tokens (routing/prefix.py), equal for all
engines of a model. A prompt is hashed once and looked up once, whatever hash and seed its engines use.

Holders are bits of one integer per block, four bits per engine, so that one step down the chain tests all engines at
once. The index is bounded in bytes; the least recently used block goes first. Runs on the event loop only.

The loop serves streams too, so nothing here may take long at once, however many blocks there are: entries lie in many
small tables, as a table that grows is copied as a whole; they are of a kind that the cyclic garbage collector does not
visit; and what concerns all blocks of an engine is done in steps.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from spillway_gateway.fleet.engine_blocks import (
    GHOST_BYTES,
    EngineBlocks,
    StoredChain,
    chain_of,
    scoped_key,
    sizes_in_use,
)
from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import TOKEN_BYTES, chain_key, namespace_key

logger = logging.getLogger(__name__)

# Measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 240
HOLDER_BYTES = 220  # engine key -> request key, and the way back
WAITING_SHARE = 8  # an eighth of the bound, at most, for orphans and ghosts of all engines
SIZES_MATCHED_MAX = 4  # block sizes that each prompt is hashed for; a rolling change of blockSize makes two
SWEEP_STEP = 250  # entries looked at between two returns to the event loop: about a millisecond
COMPACT_EVICTIONS_MIN = 100
SHARDS = 256
SHARDED_BYTES_MIN = 8 * 1024 * 1024  # a smaller index is one table, whose order of use is exact

_BITS = 4
_SLOT_BITS = (1 << _BITS) - 1
# Groups of hybrid models that do not decide how far a prefix reaches are left out.
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})


class _Entry(msgspec.Struct, gc=False):
    mask: int = 0
    speculative_mask: int = 0
    speculative_until: float = 0.0
    engine_keys: tuple[tuple[int, int], ...] = ()  # (slot, engine key)


_Table = OrderedDict[int, _Entry]


class PrefixIndex:
    """The index of one model.

    model: seeds the request keys. bytes_max, orphans_max: bounds. clock: monotonic seconds.
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
        shards = SHARDS if bytes_max >= SHARDED_BYTES_MIN else 1
        self._tables: list[_Table] = [OrderedDict() for _ in range(shards)]  # by the key's lowest bits
        self._table_of = shards - 1
        self._blocks = 0
        self._next_evicted = 0  # table that gives the next block when there are too many
        self._next_compacted = 0
        self._until_compacted = COMPACT_EVICTIONS_MIN  # evictions
        self._engines: dict[str, EngineBlocks] = {}
        self._slots: dict[int, EngineBlocks] = {}  # by slot; those of engines that are being retired included
        self._devices_of_size: dict[int, int] = {}  # block size -> device bits of engines; emptied when they change
        self._hidden_mask = 0  # device bits of engines whose device is being cleared
        self._holders = 0
        self.evicted_blocks_total = 0
        self.orphans_dropped_total = 0
        self.unknown_blocks_total = 0
        self.mismatched_blocks_total = 0

    @property
    def block_tokens(self) -> int:
        """Tokens per block of most engines, once an event has named it."""
        return self._sizes[0] if self._sizes else self._default_block_tokens

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Every size in use, that of most engines first; more than one while engines are configured differently."""
        return self._sizes or (self._default_block_tokens,)

    def block_tokens_of(self, engine_name: str) -> int:
        """Tokens per block of one engine; of most engines while it has named none."""
        engine = self._engines.get(engine_name)
        return engine.block_tokens if engine is not None and engine.block_tokens is not None else self.block_tokens

    @property
    def blocks(self) -> int:
        return self._blocks

    @property
    def estimated_bytes(self) -> int:
        return self._blocks_bytes() + self.waiting_bytes

    def _blocks_bytes(self) -> int:
        return self._blocks * ENTRY_BYTES + self._holders * HOLDER_BYTES

    @property
    def waiting_bytes(self) -> int:
        """Orphans and ghosts of all engines."""
        return sum([engine.waiting_bytes for engine in self._engines.values()])

    def namespace(self, cache_salt: str | None = None, lora: str | None = None) -> int:
        return namespace_key(self._model, lora, cache_salt)

    def add_engine(self, name: str) -> None:
        if name not in self._engines:
            self._add_engine(name)

    def _add_engine(self, name: str) -> None:
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._engines[name] = self._slots[slot] = EngineBlocks(slot)
        self._devices_of_size = {}

    def retire_engine(self, name: str) -> Iterator[None]:
        """Forget an engine for good. Its name is free for another one at once, and nothing of it is matched any more;
        its entries are freed in steps: exhaust the iterator, or its slot stays taken."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return iter(())
        self._devices_of_size = {}
        engine.forget_waiting()
        self._sizes_changed()
        return self._free(engine)

    def clear_engine(self, name: str) -> Iterator[None]:
        """Forget everything about an engine that stays; what it tells from now on counts at once. As retire_engine."""
        steps = self.retire_engine(name)
        self._add_engine(name)
        return steps

    def clear_device(self, name: str) -> Iterator[None]:
        """The engine's device holds nothing any more; other tiers may. In steps, during which nothing of the engine is
        matched and none of its events may be applied."""
        engine = self._engines.get(name)
        if engine is None:
            return
        device = 1 << (engine.slot * _BITS)
        self._hidden_mask |= device
        try:
            for table, key, entry in self._each_entry():
                if entry is None:
                    yield
                    continue
                entry.speculative_mask &= ~device
                if entry.mask & device:
                    entry.mask &= ~device
                    if not entry.mask >> (engine.slot * _BITS) & _SLOT_BITS:
                        for scoped in self._release(engine, entry):
                            self._keep_ghost(engine, scoped, key)
                self._drop_unused(table, key, entry)
        finally:
            self._hidden_mask &= ~device

    def _free(self, engine: EngineBlocks) -> Iterator[None]:
        bits = _SLOT_BITS << (engine.slot * _BITS)
        for table, key, entry in self._each_entry():
            if entry is None:
                yield
                continue
            entry.mask &= ~bits
            entry.speculative_mask &= ~bits
            self._release(engine, entry)
            self._drop_unused(table, key, entry)
        del self._slots[engine.slot]

    def _each_entry(self) -> Iterator[tuple[_Table, int, _Entry | None]]:
        """Every entry that was there at the start and still is; with None for an entry whenever SWEEP_STEP were looked
        at."""
        position = 0
        for at in range(len(self._tables)):
            for key in list(self._tables[at]):
                position += 1
                if position % SWEEP_STEP == 0:
                    yield self._tables[at], key, None
                table = self._tables[at]  # another one after a pause in which it was compacted
                entry = table.get(key)
                if entry is not None:
                    yield table, key, entry

    def _release(self, engine: EngineBlocks, entry: _Entry) -> list[int]:
        """Take the engine's own keys off an entry; returns them."""
        mine = [scoped for slot, scoped in entry.engine_keys if slot == engine.slot]
        if mine:
            entry.engine_keys = tuple([pair for pair in entry.engine_keys if pair[0] != engine.slot])
            for scoped in mine:
                if engine.request_keys.pop(scoped, None) is not None:
                    self._holders -= 1
        return mine

    def _drop_unused(self, table: _Table, key: int, entry: _Entry) -> None:
        if not (entry.mask or entry.speculative_mask or entry.engine_keys):
            del table[key]
            self._blocks -= 1

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
            self._store_known(engine, event)
            return
        if not self._learn_block_tokens(engine, event.block_tokens):
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

    def _store_known(self, engine: EngineBlocks, event: BlockStored) -> None:
        """An event without tokens (the CPU tier of 0.23) moves blocks whose tokens an earlier event told."""
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
        key = parent
        for position, scoped in enumerate(chain.engine_keys):
            extra = chain.extras[position] if position < len(chain.extras) else b""
            key = chain_key(key, chain.tokens[position * size : (position + 1) * size], extra)
            self._hold(engine, key, scoped, chain.tier)

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
        """The engine with the most gives first, so that one that only sends orphans costs the others nothing."""
        while self.waiting_bytes > self.bytes_max // WAITING_SHARE:
            most = max(self._engines.values(), key=lambda engine: engine.waiting_bytes)
            if most.orphans_held:
                self.orphans_dropped_total += most.drop_oldest_orphans()
            else:
                most.drop_oldest_ghost()

    def _hold(self, engine: EngineBlocks, key: int, scoped: int, tier: Tier) -> None:
        table = self._tables[key & self._table_of]
        entry = table.get(key)
        if entry is None:
            entry = table[key] = _Entry()
            self._blocks += 1
        else:
            table.move_to_end(key)
        entry.mask |= 1 << (engine.slot * _BITS + tier)
        known = engine.request_keys.get(scoped)
        if known == key:
            return
        if known is not None:  # a 64-bit engine key that names another block now
            self._forget(engine, scoped, known)
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
            entry = self._tables[key & self._table_of][key]
            entry.mask &= ~(1 << (engine.slot * _BITS + event.tier))
            entry.speculative_mask &= ~(1 << (engine.slot * _BITS))
            if not entry.mask >> (engine.slot * _BITS) & _SLOT_BITS:
                self._forget(engine, scoped, key)

    def _forget(self, engine: EngineBlocks, scoped: int, key: int) -> None:
        """The engine holds this block in no tier any more."""
        del engine.request_keys[scoped]
        self._holders -= 1
        self._keep_ghost(engine, scoped, key)
        table = self._tables[key & self._table_of]
        entry = table[key]
        entry.engine_keys = tuple(pair for pair in entry.engine_keys if pair != (engine.slot, scoped))
        if not any(slot == engine.slot for slot, _ in entry.engine_keys):
            entry.mask &= ~(_SLOT_BITS << (engine.slot * _BITS))
        self._drop_unused(table, key, entry)

    def _learn_block_tokens(self, engine: EngineBlocks, block_tokens: int) -> bool:
        """False for a partial block, as newer engines announce them.

        The engine's largest size wins, since a partial block may be the first to arrive. Keys of different sizes never
        meet, so engines of several sizes live in one index; what an engine stored under a smaller size stays until it
        removes it.
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
                    devices |= 1 << (engine.slot * _BITS)
            self._devices_of_size[block_tokens] = devices
        return devices

    def _evict(self) -> None:
        blocks_bytes_max = self.bytes_max - self.waiting_bytes
        while self._blocks and self._blocks_bytes() > blocks_bytes_max:
            table = self._tables[self._next_evicted & self._table_of]
            self._next_evicted += 1  # in turn: keys are hashes, so all tables hold about as much
            if not table:
                continue
            _, entry = table.popitem(last=False)
            self._blocks -= 1
            self.evicted_blocks_total += 1
            for slot, scoped in entry.engine_keys:
                del self._slots[slot].request_keys[scoped]
                self._holders -= 1
            self._until_compacted -= 1
            if self._until_compacted <= 0:
                self._compact_one()

    def _compact_one(self) -> None:
        """A dict keeps the places of what was taken out until it is full and then grows threefold. Tables that are
        full change places as fast as they gain them, so each is copied from time to time, one after the other: memory
        then stays level instead of swinging with all tables at once."""
        at = self._next_compacted & self._table_of
        self._next_compacted += 1
        self._tables[at] = self._tables[at].copy()
        self._until_compacted = max(COMPACT_EVICTIONS_MIN, self._blocks // len(self._tables) // 5)

    # -- look-ups ----------------------------------------------------------------------------------------------------

    def speculate(self, engine_name: str, keys: Sequence[int], until: float) -> None:
        """Count a routed prompt's blocks as held by its engine until an event says so, or until the given time."""
        engine = self._engines.get(engine_name)
        if engine is None:
            return
        bit = 1 << (engine.slot * _BITS)
        now = self._clock()
        tables, table_of = self._tables, self._table_of
        for key in keys:
            table = tables[key & table_of]
            entry = table.get(key)
            if entry is None:
                entry = table[key] = _Entry()
                self._blocks += 1
            else:
                table.move_to_end(key)
                if entry.speculative_until <= now:
                    entry.speculative_mask = 0
            entry.speculative_mask |= bit
            entry.speculative_until = max(entry.speculative_until, until)
        if self._blocks_bytes() > self.bytes_max - self.bytes_max // WAITING_SHARE:
            self._evict()

    def match(self, keys: Sequence[int], tokens_per_block: int) -> dict[str, HeldPrefix]:
        """How much of a prompt each engine holds; engines that hold nothing are absent.

        An engine first takes the longest start held on its device, then goes on from there through its CPU tier and
        the shared tier, which every engine of the model can read. Counts as no use: that is what speculate() is for.
        """
        now = self._clock()
        devices = self._devices(tokens_per_block)
        on_device = devices & ~self._hidden_mask
        loading = 0
        device_blocks: dict[int, int] = {}
        shared_blocks: dict[int, int] = {}
        total_blocks: dict[int, int] = {}
        visible = ~self._hidden_mask
        position = 0
        tables, table_of = self._tables, self._table_of
        for key in keys:
            entry = tables[key & table_of].get(key)
            if entry is None:
                break
            device = entry.mask
            if entry.speculative_until > now:
                device |= entry.speculative_mask
            still = on_device & device
            if still == on_device and not loading:  # most blocks: all that had the ones before have this one
                position += 1
                continue
            mask = entry.mask & visible
            fallen = on_device ^ still
            if fallen:
                for bit in _bits(fallen):
                    device_blocks[bit] = position
                loading |= fallen
            on_device = still
            if loading:
                cpu = loading & (mask >> Tier.CPU)
                if mask >> Tier.SHARED & devices:
                    for bit in _bits(loading & ~cpu):
                        shared_blocks[bit] = shared_blocks.get(bit, 0) + 1
                else:
                    for bit in _bits(loading & ~cpu):
                        total_blocks[bit] = position
                    loading = cpu
            if not on_device and not loading:
                break
            position += 1
        for bit in _bits(on_device):
            device_blocks[bit] = position
            total_blocks[bit] = position
        for bit in _bits(loading):
            total_blocks[bit] = position
        held: dict[str, HeldPrefix] = {}
        for name, engine in self._engines.items():
            bit = engine.slot * _BITS
            total = total_blocks.get(bit, 0)
            if total:
                device_count = device_blocks[bit]
                shared = shared_blocks.get(bit, 0)
                held[name] = HeldPrefix(
                    device_tokens=device_count * tokens_per_block,
                    cpu_tokens=(total - device_count - shared) * tokens_per_block,
                    shared_tokens=shared * tokens_per_block,
                )
        return held


def _bits(mask: int) -> Iterator[int]:
    """Positions of the set bits."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
