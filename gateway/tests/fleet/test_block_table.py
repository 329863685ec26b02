from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet import block_table
from spillway_gateway.fleet.block_table import COMPACT_EVICTIONS_MIN, SHARDED_BYTES_MIN, BlockTable, Entry, HolderKey


def table(keys: list[int], bytes_max: int = 0) -> BlockTable:
    made = BlockTable(bytes_max)
    for key in keys:
        made.shards[key & made.shard_mask][key] = Entry(mask=1)
        made.entries += 1
    return made


def test_a_small_table_evicts_in_exact_order_of_use() -> None:
    made = table([1, 2, 3])
    made.shards[0].move_to_end(1)
    order = [key for key in made.shards[0]]
    for _ in order:
        assert made.evict_one() is not None

    assert order == [2, 3, 1]
    assert (made.entries, made.evict_one()) == (0, None)


@given(keys=st.sets(st.integers(0, (1 << 64) - 1), max_size=300))
def test_shards_are_evicted_in_turn_until_all_are_empty(keys: set[int]) -> None:
    made = table(sorted(keys), SHARDED_BYTES_MIN)
    evicted = 0
    for _ in range(len(made.shards) * (len(keys) + 1)):
        evicted += made.evict_one() is not None

    assert evicted == len(keys)
    assert made.entries == sum(map(len, made.shards)) == 0


def test_compaction_keeps_the_shards_which_are_frozen_and_makes_them_small() -> None:
    made = table(list(range(3 * COMPACT_EVICTIONS_MIN)))
    shard, before = made.shards[0], sys.getsizeof(made.shards[0])
    for _ in range(5 * COMPACT_EVICTIONS_MIN // 2):
        made.evict_one()

    assert made.shards[0] is shard and sys.getsizeof(shard) < before
    assert list(shard) == list(range(5 * COMPACT_EVICTIONS_MIN // 2, 3 * COMPACT_EVICTIONS_MIN))


def test_a_sweep_yields_between_steps_and_skips_what_was_removed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "SWEEP_STEP", 2)
    made = table([1, 2, 3, 4, 5])
    seen = []
    for shard, key, entry in made.sweep():
        if entry is None:
            shard.pop(4, None)
        else:
            seen.append(key)

    assert seen == [1, 2, 3, 5]


def test_an_entry_is_dropped_only_when_nothing_refers_to_it() -> None:
    made = table([1])
    shard, entry = made.shards[0], made.shards[0][1]
    for kept in (Entry(mask=1), Entry(speculative_mask=1), Entry(keys=HolderKey(0, 7, None))):
        made.drop_if_unused(shard, 1, kept)
        assert made.entries == 1

    entry.mask = 0
    made.drop_if_unused(shard, 1, entry)
    assert (made.entries, len(shard)) == (0, 0)
