"""Count of the blocks that would be lost with each pod: those that no other pod holds and that no other pod could
load.

A pass over the table in short steps. Keys are hashes, so of a large table every n-th shard is counted and stands for
the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, BlockTable
from spillway_gateway.fleet.prefix_match import StoreReaders, set_bits

COUNTED_MAX = 16_384  # entries of one pass, about 60 ms of the event loop in steps of one


def blocks_held_alone(
    table: BlockTable, pods: Mapping[int, str], stores: StoreReaders
) -> Iterator[dict[str, int] | None]:
    """Count them.

    Args:
        table: The blocks of one model.
        pods: The pod behind each engine's slot; several data parallel ranks share one.
        stores: Who loads from which store.

    Yields:
        None after each step, and at last the blocks by pod; a pod that holds none alone is absent.
    """
    stride = max(1, -(-table.entries // COUNTED_MAX))
    first_of: dict[str, int] = {}  # pod -> one slot that stands for all of its slots
    of_slot = {slot: first_of.setdefault(pod, slot) for slot, pod in pods.items()}
    readers_of = [(bit, _pods(readers, of_slot)) for bit, readers, _ in stores]
    scale = len(table.shards) / len(range(0, len(table.shards), stride))
    counts: dict[str, int] = {}
    memo: dict[int, int | None] = {}  # mask -> the slot that stands for the pod; masks repeat
    for _, _, entry in table.sweep(stride):
        if entry is None:
            yield None
            continue
        mask = entry.mask
        if mask not in memo:
            memo[mask] = _only_holder(mask, of_slot, readers_of)
        only = memo[mask]
        if only is not None:
            counts[pods[only]] = counts.get(pods[only], 0) + 1
    yield {pod: round(scale * count) for pod, count in counts.items()}


def _only_holder(mask: int, of_slot: Mapping[int, int], stores: list[tuple[int, set[int]]]) -> int | None:
    """The one pod that has a block on its device, in its CPU tier or in a store that it alone loads from."""
    holders = _pods(mask, of_slot)
    for bit, readers in stores:
        if mask & bit:
            holders |= readers
    return holders.pop() if len(holders) == 1 else None


def _pods(mask: int, of_slot: Mapping[int, int]) -> set[int]:
    slots = {bit // BITS_PER_ENGINE for bit in set_bits(mask)}
    return {of_slot[slot] for slot in slots if slot in of_slot}
