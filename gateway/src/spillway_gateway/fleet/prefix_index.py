"""Which engine holds which block in which tier, by the gateway's own request keys.

Two keys per block. The engine key comes with the events, belongs to one engine, and serves only to apply removals,
parents and tier moves. The request key is the gateway's chained hash over the tokens (routing/prefix.py), equal for all
engines of a model. A prompt is hashed once and looked up once, whatever hash and seed its engines use.

Holders are bits of one integer per block, four bits per engine, so that one step down the chain tests all engines at
once. The index is bounded in bytes; the least recently used block goes first. Runs on the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from spillway_gateway.fleet.event_extras import split_extras
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import chain_key, extra_bytes, namespace_key, token_bytes

# Measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 240
HOLDER_BYTES = 220  # engine key -> request key, and the way back
GHOSTS_MAX = 16_384
SWEEP_STEP = 2_000  # entries looked at between two returns to the event loop

_BITS = 4
_SLOT_BITS = (1 << _BITS) - 1
# Groups of hybrid models that do not decide how far a prefix reaches are left out.
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})


class _Entry:
    __slots__ = ("engine_keys", "mask", "speculative_mask", "speculative_until")

    def __init__(self) -> None:
        self.mask = 0
        self.speculative_mask = 0
        self.speculative_until = 0.0
        self.engine_keys: tuple[tuple[int, int], ...] = ()


class _EngineBlocks:
    """What is known of one engine's own keys."""

    __slots__ = ("ghosts", "groups", "orphans", "orphans_held", "request_keys", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.request_keys: dict[int, int] = {}
        # Keys of blocks that left every tier: a late event of a lower tier or a late child still needs the mapping.
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        self.orphans: OrderedDict[int, list[BlockStored]] = OrderedDict()  # by the unknown parent
        self.orphans_held = 0
        self.groups: set[int] = set()


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
        self._learned_block_tokens: int | None = None
        self._clock = clock
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._engines: dict[str, _EngineBlocks] = {}
        self._slots: dict[int, _EngineBlocks] = {}  # by slot; those of engines that are being retired included
        self._device_mask = 0  # the device bit of every known engine
        self._hidden_mask = 0  # all bits of engines that are being cleared
        self._holders = 0
        self.evicted_blocks_total = 0
        self.orphans_dropped_total = 0
        self.unknown_blocks_total = 0
        self.mismatched_blocks_total = 0

    @property
    def block_tokens(self) -> int:
        """Tokens per block: the engines' own once an event has named it."""
        return self._learned_block_tokens or self._default_block_tokens

    @property
    def blocks(self) -> int:
        return len(self._entries)

    @property
    def estimated_bytes(self) -> int:
        return len(self._entries) * ENTRY_BYTES + self._holders * HOLDER_BYTES

    def namespace(self, cache_salt: str | None = None, lora: str | None = None) -> int:
        return namespace_key(self._model, lora, cache_salt)

    def add_engine(self, name: str) -> None:
        if name in self._engines:
            return
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._engines[name] = self._slots[slot] = _EngineBlocks(slot)
        self._device_mask |= 1 << (slot * _BITS)

    def retire_engine(self, name: str) -> Iterator[None]:
        """Forget an engine for good. Its name is free for another one at once, and nothing of it is matched any more;
        its entries are freed in steps, as in clear_engine: exhaust the iterator, or its slot stays taken."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return iter(())
        self._device_mask &= ~(1 << (engine.slot * _BITS))
        return self._retire(engine)

    def _retire(self, engine: _EngineBlocks) -> Iterator[None]:
        yield from self._clear(engine)
        del self._slots[engine.slot]

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
            self._clear_device(engine)

    def _store(self, engine: _EngineBlocks, event: BlockStored) -> None:
        if event.spec_kind not in _PREFIX_KINDS:
            return
        if not event.token_ids:
            self._store_known(engine, event)
            return
        if not self._learn_block_tokens(event.block_tokens):
            self.mismatched_blocks_total += len(event.block_hashes)
            return
        engine.groups.add(event.group)
        waiting = [event]
        while waiting:  # a loop, as a chain of orphans may be longer than the interpreter's stack
            current = waiting.pop()
            parent = self._parent_key(engine, current)
            if parent is None:
                self._keep_orphan(engine, current)
                continue
            self._store_chain(engine, current, parent)
            for engine_key in current.block_hashes:
                children = engine.orphans.pop(_scoped(engine_key, current.group), None)
                if children:
                    engine.orphans_held -= len(children)
                    waiting.extend(children)
        self._evict()

    def _store_known(self, engine: _EngineBlocks, event: BlockStored) -> None:
        """An event without tokens (the CPU tier of 0.23) moves blocks whose tokens an earlier event told."""
        for engine_key in event.block_hashes:
            scoped = _scoped(engine_key, event.group)
            key = engine.request_keys.get(scoped, engine.ghosts.get(scoped))
            if key is None:
                self.unknown_blocks_total += 1
            else:
                self._hold(engine, key, scoped, event.tier)
        self._evict()

    def _parent_key(self, engine: _EngineBlocks, event: BlockStored) -> int | None:
        if event.parent_hash is None:
            extras = split_extras(event.extra_keys[0] if event.extra_keys else None, event.lora_name)
            return namespace_key(self._model, event.lora_name, extras.cache_salt)
        scoped = _scoped(event.parent_hash, event.group)
        known = engine.request_keys.get(scoped)
        return known if known is not None else engine.ghosts.get(scoped)

    def _store_chain(self, engine: _EngineBlocks, event: BlockStored, parent: int) -> None:
        data = token_bytes(event.token_ids)
        size = event.block_tokens * 4
        key = parent
        for position, engine_key in enumerate(event.block_hashes):
            raw = event.extra_keys[position] if position < len(event.extra_keys) else None
            extra = extra_bytes(split_extras(raw, event.lora_name).others) if raw else b""
            key = chain_key(key, data[position * size : (position + 1) * size], extra)
            self._hold(engine, key, _scoped(engine_key, event.group), event.tier)

    def _keep_orphan(self, engine: _EngineBlocks, event: BlockStored) -> None:
        assert event.parent_hash is not None
        engine.orphans.setdefault(_scoped(event.parent_hash, event.group), []).append(event)
        engine.orphans_held += 1
        while engine.orphans_held > self._orphans_max:
            _, dropped = engine.orphans.popitem(last=False)
            engine.orphans_held -= len(dropped)
            self.orphans_dropped_total += len(dropped)

    def _hold(self, engine: _EngineBlocks, key: int, scoped: int, tier: Tier) -> None:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
        else:
            self._entries.move_to_end(key)
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

    def _remove(self, engine: _EngineBlocks, event: BlockRemoved) -> None:
        if event.group not in engine.groups and engine.groups:
            return
        for engine_key in event.block_hashes:
            scoped = _scoped(engine_key, event.group)
            key = engine.request_keys.get(scoped)
            if key is None:
                continue
            entry = self._entries[key]
            entry.mask &= ~(1 << (engine.slot * _BITS + event.tier))
            entry.speculative_mask &= ~(1 << (engine.slot * _BITS))
            if not entry.mask >> (engine.slot * _BITS) & _SLOT_BITS:
                self._forget(engine, scoped, key)

    def _forget(self, engine: _EngineBlocks, scoped: int, key: int) -> None:
        """The engine holds this block in no tier any more."""
        del engine.request_keys[scoped]
        self._holders -= 1
        engine.ghosts[scoped] = key
        if len(engine.ghosts) > GHOSTS_MAX:
            engine.ghosts.popitem(last=False)
        entry = self._entries[key]
        entry.engine_keys = tuple(pair for pair in entry.engine_keys if pair != (engine.slot, scoped))
        if not any(slot == engine.slot for slot, _ in entry.engine_keys):
            entry.mask &= ~(_SLOT_BITS << (engine.slot * _BITS))
        if not entry.mask and not entry.speculative_mask:
            del self._entries[key]

    def _clear_device(self, engine: _EngineBlocks) -> None:
        base = engine.slot * _BITS
        device = 1 << base
        for scoped, key in list(engine.request_keys.items()):
            entry = self._entries[key]
            entry.mask &= ~device
            entry.speculative_mask &= ~device
            if not entry.mask >> base & _SLOT_BITS:
                self._forget(engine, scoped, key)

    def _learn_block_tokens(self, block_tokens: int) -> bool:
        """False for blocks of another size: partial blocks (newer engines) or an engine configured differently.

        The largest size seen wins, since a partial block may be the first to arrive.
        """
        learned = self._learned_block_tokens
        if learned is None:
            self._learned_block_tokens = block_tokens
        elif block_tokens > learned:
            self._learned_block_tokens = block_tokens
            self._wipe()
        return block_tokens == self._learned_block_tokens

    def _wipe(self) -> None:
        self._entries.clear()
        self._holders = 0
        for engine in self._slots.values():
            engine.request_keys.clear()
            engine.ghosts.clear()
            engine.orphans.clear()
            engine.orphans_held = 0

    def clear_engine(self, engine_name: str) -> Iterator[None]:
        """Forget everything about one engine, in steps; hidden from matches from the first step on.

        Yields after every SWEEP_STEP entries so that the caller can let other work run.
        """
        engine = self._engines.get(engine_name)
        if engine is not None:
            yield from self._clear(engine)

    def _clear(self, engine: _EngineBlocks) -> Iterator[None]:
        bits = _SLOT_BITS << (engine.slot * _BITS)
        self._hidden_mask |= bits
        try:
            engine.orphans.clear()
            engine.orphans_held = 0
            engine.groups.clear()
            for position, key in enumerate(list(self._entries)):
                entry = self._entries.get(key)
                if entry is not None:
                    self._strip(entry, key, engine, bits)
                if position % SWEEP_STEP == SWEEP_STEP - 1:
                    yield
            engine.ghosts.clear()
            if self._holders == 0:
                self._learned_block_tokens = None
        finally:
            self._hidden_mask &= ~bits

    def _strip(self, entry: _Entry, key: int, engine: _EngineBlocks, bits: int) -> None:
        entry.mask &= ~bits
        entry.speculative_mask &= ~bits
        kept = []
        for pair in entry.engine_keys:
            if pair[0] == engine.slot:
                if engine.request_keys.pop(pair[1], None) is not None:
                    self._holders -= 1
            else:
                kept.append(pair)
        entry.engine_keys = tuple(kept)
        if not entry.mask and not entry.speculative_mask:
            del self._entries[key]

    def _evict(self) -> None:
        while self._entries and self.estimated_bytes > self.bytes_max:
            _, entry = self._entries.popitem(last=False)
            self.evicted_blocks_total += 1
            for slot, scoped in entry.engine_keys:
                del self._slots[slot].request_keys[scoped]
                self._holders -= 1

    # -- look-ups ----------------------------------------------------------------------------------------------------

    def speculate(self, engine_name: str, keys: Sequence[int], until: float) -> None:
        """Count a routed prompt's blocks as held by its engine until an event says so, or until the given time."""
        engine = self._engines.get(engine_name)
        if engine is None:
            return
        bit = 1 << (engine.slot * _BITS)
        now = self._clock()
        entries = self._entries
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = _Entry()
            else:
                entries.move_to_end(key)
                if entry.speculative_until <= now:
                    entry.speculative_mask = 0
            entry.speculative_mask |= bit
            entry.speculative_until = max(entry.speculative_until, until)
        if self.estimated_bytes > self.bytes_max:
            self._evict()

    def match(self, keys: Sequence[int], tokens_per_block: int) -> dict[str, HeldPrefix]:
        """How much of a prompt each engine holds; engines that hold nothing are absent.

        An engine first takes the longest start held on its device, then goes on from there through its CPU tier and
        the shared tier, which every engine of the model can read.
        """
        now = self._clock()
        on_device = self._device_mask & ~self._hidden_mask
        loading = 0
        device_blocks: dict[int, int] = {}
        shared_blocks: dict[int, int] = {}
        total_blocks: dict[int, int] = {}
        visible = ~self._hidden_mask
        position = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            mask = entry.mask & visible
            device = mask | (entry.speculative_mask & visible if entry.speculative_until > now else 0)
            still = on_device & device
            fallen = on_device ^ still
            if fallen:
                for bit in _bits(fallen):
                    device_blocks[bit] = position
                loading |= fallen
            on_device = still
            if loading:
                cpu = loading & (mask >> Tier.CPU)
                if mask >> Tier.SHARED & self._device_mask:
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
        if held:
            for key in keys[:position]:
                self._entries.move_to_end(key)
        return held


def _scoped(engine_key: int, group: int) -> int:
    return engine_key | group << 64 if group else engine_key


def _bits(mask: int) -> Iterator[int]:
    """Positions of the set bits."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
