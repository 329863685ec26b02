from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, Entry
from spillway_gateway.fleet.event_decoder import Tier
from spillway_gateway.fleet.prefix_match import StoreOf, match_blocks, set_bits

ENGINES = 3
STORES = 2
DEVICES = sum(1 << (slot * BITS_PER_ENGINE) for slot in range(ENGINES))
NOW = 10.0
tiers = st.sets(st.sampled_from(Tier))
# Per block of the prompt: the tiers of each engine that hold it, and the engines that may have it on their device.
blocks = st.lists(
    st.tuples(st.lists(tiers, min_size=ENGINES, max_size=ENGINES), st.sets(st.integers(0, ENGINES - 1)), st.booleans()),
    max_size=8,
)


def entry_of(held: list[set[Tier]], speculative: set[int], current: bool) -> Entry:
    return Entry(
        mask=sum(1 << (slot * BITS_PER_ENGINE + tier) for slot, tiers in enumerate(held) for tier in tiers),
        speculative_mask=sum(1 << (slot * BITS_PER_ENGINE) for slot in speculative),
        speculative_until=NOW + 1 if current else NOW,
    )


engine_sets = st.sets(st.integers(0, ENGINES - 1))


@given(
    prompt=blocks,
    in_stores=st.lists(st.sets(st.integers(0, STORES - 1)), min_size=8, max_size=8),
    engines_of=st.lists(engine_sets, min_size=STORES, max_size=STORES),
    what_is=st.lists(st.sampled_from(StoreOf), min_size=STORES, max_size=STORES),
    visible=engine_sets,
    sized=engine_sets,
)
def test_each_engine_is_matched_as_if_it_were_alone(
    prompt: list[tuple[list[set[Tier]], set[int], bool]],
    in_stores: list[set[int]],
    engines_of: list[set[int]],
    what_is: list[StoreOf],
    visible: set[int],
    sized: set[int],
) -> None:
    shard = OrderedDict((key, entry_of(*block)) for key, block in enumerate(prompt))
    of_nodes, nearest = ({store for store in range(STORES) if what_is[store] is what} for what in list(StoreOf)[:2])
    store_bits = [
        1 << ((ENGINES + store) * BITS_PER_ENGINE + (Tier.CPU if store in of_nodes else Tier.SHARED))
        for store in range(STORES)
    ]
    for key, stores in zip(shard, in_stores, strict=False):
        shard[key].mask |= sum(store_bits[store] for store in stores)
    readers = tuple(
        (store_bits[store], sum(1 << (slot * BITS_PER_ENGINE) for slot in engines_of[store]), what_is[store])
        for store in range(STORES)
    )
    devices = sum(1 << (slot * BITS_PER_ENGINE) for slot in sized)
    hidden = sum(1 << (slot * BITS_PER_ENGINE) for slot in range(ENGINES) if slot not in visible)

    device_blocks, shared_blocks, below_blocks, total_blocks = match_blocks(
        [shard], 0, range(len(prompt) + 1), devices, stores=readers, expected={}, hidden=hidden, now=NOW
    )

    for slot in range(ENGINES):
        counts, below = [0, 0, 0], 0  # device, CPU tier, shared tiers; of these the tier below
        on_device = True
        for (held, speculative, current), stores in zip(prompt, in_stores, strict=False):
            on_device = on_device and (Tier.DEVICE in held[slot] or (current and slot in speculative))
            if on_device:
                counts[Tier.DEVICE] += 1
            elif Tier.CPU in held[slot] or any(slot in engines_of[store] for store in stores & of_nodes):
                counts[Tier.CPU] += 1
            elif Tier.SHARED in held[slot] or any(slot in engines_of[store] for store in stores):
                counts[Tier.SHARED] += 1
                nearer = any(slot in engines_of[store] for store in stores & nearest)
                below += Tier.SHARED not in held[slot] and not nearer
            else:
                break
        expected = counts if slot in sized and slot in visible else [0, 0, 0]
        bit = slot * BITS_PER_ENGINE
        device, shared = device_blocks.get(bit, 0), shared_blocks.get(bit, 0)
        assert [device, total_blocks.get(bit, 0) - device - shared, shared] == expected
        assert below_blocks.get(bit, 0) == (below if expected is counts else 0)


@given(st.integers(0, 1 << 200))
def test_set_bits_are_the_mask(mask: int) -> None:
    positions = list(set_bits(mask))

    assert sum(1 << position for position in positions) == mask
    assert positions == sorted(set(positions))
