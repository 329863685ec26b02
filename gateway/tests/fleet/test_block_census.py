from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet import block_census
from spillway_gateway.fleet.block_census import blocks_held_alone
from spillway_gateway.fleet.block_table import BITS_PER_ENGINE, SHARDED_BYTES_MIN, BlockTable, Entry
from spillway_gateway.fleet.event_decoder import Tier

ENGINES = 4
PODS = {0: "a", 1: "a", 2: "b", 3: "c"}  # two ranks of one pod
STORES = 2
engine_sets = st.sets(st.integers(0, ENGINES - 1))
blocks = st.lists(
    st.tuples(st.sets(st.tuples(st.integers(0, ENGINES - 1), st.sampled_from(Tier))), st.sets(st.integers(0, 1))),
    max_size=30,
)


def table_of(masks: list[int], bytes_max: int = 0) -> BlockTable:
    made = BlockTable(bytes_max)
    for key, mask in enumerate(masks):
        made.shards[key & made.shard_mask][key] = Entry(mask=mask)
        made.entries += 1
    return made


def counted(table: BlockTable, pods: dict[int, str], stores: tuple[tuple[int, int, bool], ...] = ()) -> dict[str, int]:
    *steps, counts = blocks_held_alone(table, pods, stores)
    assert counts is not None and not any(steps)
    return counts


def bit(slot: int, tier: Tier = Tier.DEVICE) -> int:
    return 1 << (slot * BITS_PER_ENGINE + tier)


@given(blocks, st.lists(engine_sets, min_size=STORES, max_size=STORES), engine_sets)
def test_a_block_is_lost_with_a_pod_if_no_other_pod_holds_it_or_could_load_it(
    held: list[tuple[set[tuple[int, Tier]], set[int]]], readers: list[set[int]], gone: set[int]
) -> None:
    store_bits = [bit(ENGINES + store, Tier.SHARED) for store in range(STORES)]
    masks = [
        sum(bit(slot, tier) for slot, tier in holders) | sum(store_bits[store] for store in stores)
        for holders, stores in held
    ]
    stores = tuple((store_bits[store], sum(map(bit, readers[store])), False) for store in range(STORES))
    pods = {slot: pod for slot, pod in PODS.items() if slot not in gone}

    expected: dict[str, int] = {}
    for holders, in_stores in held:
        slots = {slot for slot, _ in holders} | {slot for store in in_stores for slot in readers[store]}
        left = {pods[slot] for slot in slots if slot in pods}
        for pod in left if len(left) == 1 else ():
            expected[pod] = expected.get(pod, 0) + 1
    assert counted(table_of(masks), pods, stores) == expected


def test_a_large_table_is_counted_in_part_and_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_census, "COUNTED_MAX", 4096)
    entries = 65_536
    table = table_of([bit(key % 2048 // 1536) for key in range(entries)], SHARDED_BYTES_MIN)
    looked = sum(1 for _ in table.sweep(16))
    counts = counted(table, PODS)

    assert looked <= 4096 + entries // 4096 + 1
    assert counts == {"a": entries}


def test_a_small_table_is_one_shard_and_counted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_census, "COUNTED_MAX", 10)
    assert counted(table_of([bit(2)] * 35), PODS) == {"b": 35}
