"""Match of a prompt's blocks with what is held, for all engines in one pass over its keys. Pure.

Each engine reads a prefix as vLLM does: the longest start on its device first, then onwards through its CPU tier and
the shared tier. A block of a store counts for the engines that load from it; if the store is the CPU tier of their
node, it counts as in the CPU tier. A block whose event names no store counts only for the engine that announced it. If
there are two shared tiers, the nearer one that has the block is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

from spillway_gateway.fleet.block_runs import read_spans
from spillway_gateway.fleet.block_table import Shard
from spillway_gateway.fleet.event_decoder import Tier
from spillway_gateway.fleet.expected_blocks import Expected
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import PromptBlocks


class StoreOf(IntEnum):
    """The kind of a store, as an engine sees it that loads from it."""

    NODE = 0  # its CPU tier
    SHARED = 1  # its shared tier, the nearest if there are several
    BELOW = 2  # one behind that


# Store -> its bit in masks of holders, device bits of engines that load from it, and what it is to these.
StoreReaders = tuple[tuple[int, int, StoreOf], ...]
Counts = dict[int, int]  # leading blocks by an engine's device bit, its slot times BITS_PER_ENGINE; absent: none


def match_blocks(
    shards: Sequence[Shard],
    shard_mask: int,
    keys: Sequence[int],
    devices: int,
    *,
    stores: StoreReaders,
    expected: Mapping[int, Expected],
    hidden: int,
    now: float,
) -> tuple[Counts, Counts, Counts, Counts]:
    """Match one prompt.

    keys: request keys of its blocks, in order. devices: device bits of the engines that can hold blocks of this size.
    stores: who loads from which store. expected: blocks of prompts that were routed. hidden: device bits that do not
    count now. now: monotonic seconds, for what counts until some time.

    Returns the blocks on the device, those read from shared tiers, those of them from the tier below another, and all
    of them; the rest is in the CPU tier.
    """
    on_device = devices & ~hidden
    visible = ~hidden
    loading = 0  # engines beyond their device's part, still in one of the lower tiers
    device_blocks: dict[int, int] = {}
    shared_blocks: dict[int, int] = {}
    below_blocks: dict[int, int] = {}
    total_blocks: dict[int, int] = {}
    position = 0
    node, nearest = StoreOf.NODE, StoreOf.SHARED
    for span in read_spans(shards, shard_mask, keys, expected, now):
        blocks = span.blocks
        still = on_device & span.device
        if still == on_device and not loading:  # most blocks: every engine that held the ones before holds this one
            position += blocks
            continue
        mask = span.mask & visible
        ended = on_device ^ still
        if ended:
            if position:
                for bit in set_bits(ended):
                    device_blocks[bit] = position
            loading |= ended
        on_device = still
        if loading:
            cpu = loading & (mask >> Tier.CPU)
            if cpu != loading:
                readable = mask >> Tier.SHARED
                below = 0
                for store, readers, what in stores:
                    if mask & store:
                        if what is nearest:
                            readable |= readers
                        elif what is node:
                            cpu |= loading & readers
                        else:
                            below |= readers
                if below:
                    below &= loading & ~cpu & ~readable
                    for bit in set_bits(below):
                        below_blocks[bit] = below_blocks.get(bit, 0) + blocks
                    readable |= below
                shared = loading & ~cpu & readable
                for bit in set_bits(shared):
                    shared_blocks[bit] = shared_blocks.get(bit, 0) + blocks
                if position:
                    for bit in set_bits(loading & ~cpu & ~readable):
                        total_blocks[bit] = position
                loading = cpu | shared
        if not on_device and not loading:
            break
        position += blocks
    if not position:
        return device_blocks, shared_blocks, below_blocks, total_blocks
    for bit in set_bits(on_device):
        device_blocks[bit] = position
        total_blocks[bit] = position
    for bit in set_bits(loading):
        total_blocks[bit] = position
    return device_blocks, shared_blocks, below_blocks, total_blocks


def set_bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def used(
    held: dict[str, HeldPrefix], prompt: PromptBlocks, keys: Sequence[int], tokens_per_block: int
) -> dict[str, HeldPrefix]:
    """The prefix that each engine would use of what it holds. An engine always computes a prompt's last token: if its
    device holds all blocks before the last one, it computes that block, and does not load it for its other tokens."""
    if len(keys) * tokens_per_block == prompt.prompt_tokens:
        before_last = prompt.prompt_tokens - tokens_per_block
        for name, found in held.items():
            if found.device_tokens and found.device_tokens >= before_last:
                held[name] = HeldPrefix(device_tokens=before_last)
    return held
