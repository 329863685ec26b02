"""The stores that engines share: what lies in each, and which engines load from it. Most are those of shared tiers;
one is the CPU tier of a node.

A store belongs to no engine: its blocks stay known while engines restart or go. Its name (connector,
namespace.py) covers namespace and place, so its engines hash alike and load each other's blocks, and no
other engine can. In the index a store is a holder of blocks with a slot of its own, like an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from spillway_gateway.fleet.block_table import BITS_PER_ENGINE
from spillway_gateway.fleet.engine_blocks import EngineBlocks
from spillway_gateway.fleet.event_decoder import Tier
from spillway_gateway.fleet.prefix_match import StoreOf, StoreReaders
from spillway_settings.wire import STORE_TYPES, names_a_node, type_of_store

STORES_MAX = 256  # of one model; those of more nodes, or of fleets gone within the hour, are not indexed
_FARTHEST = len(STORE_TYPES)
UNUSED_SECONDS = 3600.0  # without any engine, after which what is known of a store is dropped


class SharedReach(NamedTuple):
    """Numbers of blocks known to lie in the stores of shared tiers that an engine loads from, by their type.
    node_blocks: in the CPU tier of its node; None if it shares none."""

    blocks: dict[str, int]
    node_blocks: int | None


@dataclass
class _Store:
    blocks: EngineBlocks
    engines: set[str] = field(default_factory=set)
    unused_since: float | None = None


class SharedStores:
    """The stores of one model. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stores: dict[str, _Store] = {}
        self._declined: dict[str, frozenset[str]] = {}  # by engine, types of shared tiers that it does not load from

    @property
    def full(self) -> bool:
        return len(self._stores) >= STORES_MAX

    def __len__(self) -> int:
        return len(self._stores)

    def blocks_of(self, store_id: str) -> EngineBlocks | None:
        """Return the blocks of a store; None: nothing is known of it."""
        store = self._stores.get(store_id)
        return None if store is None else store.blocks

    def add(self, store_id: str, blocks: EngineBlocks) -> None:
        """A store that was not known before."""
        self._stores[store_id] = _Store(blocks, unused_since=self._clock())

    def join(self, store_id: str, engine_name: str) -> bool:
        """The engine loads from it. False if that was known."""
        store = self._stores[store_id]
        if engine_name in store.engines:
            return False
        store.engines.add(engine_name)
        store.unused_since = None
        return True

    def leave(self, store_id: str, engine_name: str) -> None:
        """The engine no longer loads from it."""
        store = self._stores.get(store_id)
        if store is not None:
            self._leave(store, engine_name)

    def leave_all(self, engine_name: str) -> None:
        """Forget the engine."""
        for store in self._stores.values():
            self._leave(store, engine_name)

    def decline(self, engine_name: str, types: frozenset[str]) -> None:
        """The engine computes what lies in shared tiers of these types, and loads from all others."""
        if types:
            self._declined[engine_name] = types
        else:
            self._declined.pop(engine_name, None)

    def declined_by(self, engine_name: str) -> frozenset[str]:
        """The types of shared tiers that the engine declines."""
        return self._declined.get(engine_name, frozenset())

    def names_of(self, engine_name: str) -> frozenset[str]:
        """The stores that the engine loads from."""
        return frozenset([store_id for store_id, store in self._stores.items() if engine_name in store.engines])

    def declined_names_of(self, engine_name: str) -> frozenset[str]:
        """Return those of its stores that the engine declines."""
        types = self.declined_by(engine_name)
        return frozenset([name for name in self.names_of(engine_name) if type_of_store(name) in types])

    def reach_of(self, engine_name: str) -> SharedReach:
        """The reach of one engine."""
        blocks: dict[str, int] = {}
        node_blocks: int | None = None
        for name, store in self._stores.items():
            if engine_name not in store.engines:
                continue
            if names_a_node(name):
                node_blocks = (node_blocks or 0) + len(store.blocks.request_keys)
            else:
                kind = type_of_store(name)
                blocks[kind] = blocks.get(kind, 0) + len(store.blocks.request_keys)
        return SharedReach(blocks, node_blocks)

    def pop_unused(self) -> list[EngineBlocks]:
        """Forget the stores that no engine has used for UNUSED_SECONDS; their blocks are to be freed."""
        due = self._clock() - UNUSED_SECONDS
        unused = [
            store_id
            for store_id, store in self._stores.items()
            if store.unused_since is not None and store.unused_since <= due
        ]
        return [self._stores.pop(store_id).blocks for store_id in unused]

    def readers(self, device_bit_of: Callable[[str], int], *, paying: bool = False) -> StoreReaders:
        """Return the readers of each store in use, as prefix_match takes them. paying: without the engines that
        decline its type."""
        found: list[tuple[int, int, StoreOf]] = []
        nearest: dict[str, int] = {}  # by engine, of the types of shared tiers that it loads from
        for name, store in self._stores.items():
            if not names_a_node(name):
                for engine in store.engines:
                    nearest[engine] = min(nearest.get(engine, _FARTHEST), _distance(name))
        for name, store in self._stores.items():
            if not store.engines:
                continue
            if names_a_node(name):
                bit = 1 << (store.blocks.slot * BITS_PER_ENGINE + Tier.CPU)
                found.append((bit, _union(map(device_bit_of, store.engines)), StoreOf.NODE))
                continue
            bit = 1 << (store.blocks.slot * BITS_PER_ENGINE + Tier.SHARED)
            kind = type_of_store(name)
            loading = {engine for engine in store.engines if not paying or kind not in self.declined_by(engine)}
            above = {engine for engine in loading if nearest[engine] >= _distance(name)}
            for engines, what in ((above, StoreOf.SHARED), (loading - above, StoreOf.BELOW)):
                if engines:
                    found.append((bit, _union(map(device_bit_of, engines)), what))
        return tuple(found)

    def _leave(self, store: _Store, engine_name: str) -> None:
        store.engines.discard(engine_name)
        if not store.engines and store.unused_since is None:
            store.unused_since = self._clock()


def _distance(store_id: str) -> int:
    """The place of its type among STORE_TYPES; of any other type, behind them."""
    kind = type_of_store(store_id)
    return STORE_TYPES.index(kind) if kind in STORE_TYPES else _FARTHEST


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
