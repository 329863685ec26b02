"""One holder's side of the prefix index: the keys of the blocks that an engine or a shared store has.

It also keeps what may yet become, or may explain, such a key: chains whose parent is unknown (orphans), blocks that are
in none of the holder's tiers any more (tombstones), and blocks announced without tokens before any event had their
tokens (early). These three are counted in bytes, as their number depends on the engine.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from spillway_gateway.fleet.event_decoder import BlockStored, Tier, split_extras
from spillway_gateway.routing.prefix import extra_bytes, namespace_key, token_bytes

TOMBSTONES_MAX = 16_384
# Measured with tracemalloc on CPython 3.11, rounded up.
TOMBSTONE_BYTES = 200
EARLY_MAX = 16_384
EARLY_BYTES = 300
_CHAIN_BYTES = 500  # the object, its lists and its place in the table of orphans
_HASH_BYTES = 48  # an integer above 2**30 and its place in a list
_EXTRA_BYTES = 60  # a bytes object and its place in a list


class StoredChain(msgspec.Struct, gc=False):  # holds numbers and bytes alone
    """Consecutive blocks of one stored-event.

    parent: scoped engine key of the block before them, or None; `root` is then the request key of their namespace.
    """

    engine_keys: list[int]  # scoped, in order
    tokens: bytes  # as token_bytes() gives them, block_tokens of them for each key
    block_tokens: int
    extras: list[bytes]  # per block, or empty
    tier: Tier
    parent: int | None
    root: int

    @property
    def held_bytes(self) -> int:
        """Memory that keeping it takes."""
        extras = sum(map(len, self.extras)) + _EXTRA_BYTES * len(self.extras)
        return _CHAIN_BYTES + len(self.tokens) + _HASH_BYTES * len(self.engine_keys) + extras


def chain_of(model: str, event: BlockStored) -> StoredChain:
    """The chain of an event that has tokens."""
    parent = None if event.parent_hash is None else scoped_key(event.parent_hash, event.group)
    root = 0
    if parent is None:
        first = split_extras(event.extra_keys[0] if event.extra_keys else None, event.lora_name)
        root = namespace_key(model, event.lora_name, first.cache_salt)
    extras: list[bytes] = []
    if any(event.extra_keys):
        extras = [extra_bytes(split_extras(raw, event.lora_name).others) if raw else b"" for raw in event.extra_keys]
    return StoredChain(
        engine_keys=[scoped_key(engine_key, event.group) for engine_key in event.block_hashes],
        tokens=token_bytes(event.token_ids),
        block_tokens=event.block_tokens,
        extras=extras,
        tier=event.tier,
        parent=parent,
        root=root,
    )


def scoped_key(engine_key: int, group: int) -> int:
    """An engine key within its KV cache group."""
    return engine_key | group << 64 if group else engine_key


class EngineBlocks:
    """One engine's side of the index; `slot` is its place in the masks of holders."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.freed = False  # gone or forgotten: nothing may be added to it, its entries are being freed
        self.block_tokens: int | None = None  # the block size of its events (block_sizes.py)
        self.blocks_of_size = 0  # of that size, since it is the engine's
        self.other_size: tuple[int, int] | None = None  # another size, and its blocks since block_tokens were seen
        self.request_keys: dict[int, int] = {}  # scoped engine key -> request key
        # Blocks in no tier any more: a late event of a lower tier or a late child still needs the mapping.
        self.tombstones: OrderedDict[int, int] = OrderedDict()
        # Announced in some tier without tokens, before the device's event with them: an engine that loads a block
        # below its device announces it there first. By scoped key: each holder and tier.
        self.early: OrderedDict[int, list[tuple[EngineBlocks, Tier]]] = OrderedDict()
        self.groups: set[int] = set()
        self.orphans_held = 0
        self.orphan_bytes = 0
        self._orphans: OrderedDict[int, list[StoredChain]] = OrderedDict()  # by the unknown parent, oldest first

    @property
    def waiting_bytes(self) -> int:
        """The bytes of orphans, tombstones and early blocks."""
        return self.orphan_bytes + len(self.tombstones) * TOMBSTONE_BYTES + len(self.early) * EARLY_BYTES

    @property
    def has_orphans(self) -> bool:
        return bool(self._orphans)

    def keep_tombstone(self, scoped: int, key: int) -> None:
        """Keep the mapping of a block that is in no tier any more."""
        self.tombstones[scoped] = key
        if len(self.tombstones) > TOMBSTONES_MAX:
            self.tombstones.popitem(last=False)

    def keep_early(self, scoped: int, holder: EngineBlocks, tier: Tier) -> None:
        """Keep that `holder` has a block whose tokens are not known yet."""
        held = self.early.setdefault(scoped, [])
        if (holder, tier) not in held:
            held.append((holder, tier))

    def take_early(self, scoped: int) -> list[tuple[EngineBlocks, Tier]]:
        """Remove and return what was kept of a block whose tokens are known now."""
        return self.early.pop(scoped, [])

    def early_of_stores(self) -> OrderedDict[int, list[tuple[EngineBlocks, Tier]]]:
        """Return what was announced early of other holders than the engine itself."""
        held = ((scoped, [each for each in early if each[0] is not self]) for scoped, early in self.early.items())
        return OrderedDict((scoped, others) for scoped, others in held if others)

    def drop_early(self, scoped: int, holder: EngineBlocks, tier: Tier) -> None:
        """The block has left that tier."""
        held = self.early.get(scoped)
        if held is not None and (holder, tier) in held:
            held.remove((holder, tier))
            if not held:
                del self.early[scoped]

    def drop_oldest_early(self) -> None:
        """Drop the block that was announced first."""
        self.early.popitem(last=False)

    def keep_orphan(self, chain: StoredChain) -> None:
        """Keep a chain until its parent arrives."""
        assert chain.parent is not None
        self._orphans.setdefault(chain.parent, []).append(chain)
        self.orphans_held += 1
        self.orphan_bytes += chain.held_bytes

    def take_children(self, scoped: int) -> list[StoredChain]:
        """Remove and return the orphans whose parent is this block."""
        return self._without(self._orphans.pop(scoped)) if scoped in self._orphans else []

    def drop_oldest_orphans(self) -> int:
        """Drop the orphans of the parent that was missed first; returns their number."""
        return len(self._without(self._orphans.popitem(last=False)[1]))

    def drop_oldest_tombstone(self) -> None:
        """Drop the tombstone that was kept first."""
        self.tombstones.popitem(last=False)

    def clear_waiting(self) -> None:
        """Drop all orphans, tombstones and early blocks."""
        self.tombstones.clear()
        self.early.clear()
        self._orphans.clear()
        self.orphans_held = 0
        self.orphan_bytes = 0

    def _without(self, chains: list[StoredChain]) -> list[StoredChain]:
        self.orphans_held -= len(chains)
        self.orphan_bytes -= sum(chain.held_bytes for chain in chains)
        return chains
