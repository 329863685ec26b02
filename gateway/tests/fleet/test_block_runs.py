from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import astuple

from spillway_gateway.fleet.block_holders import ENTRY_BYTES
from spillway_gateway.fleet.block_runs import SHORT_RUN_BLOCKS, USED_AGAIN_SHARE, read_spans, use_runs
from spillway_gateway.fleet.block_table import BlockTable
from spillway_gateway.routing.prefix import RUN_BLOCKS

NOW = 10.0
RUN = range(RUN_BLOCKS)


def table_of(keys: Sequence[int], mask: int = 1) -> BlockTable:
    made = BlockTable(1000 * ENTRY_BYTES)
    for key in keys:
        made.add(made.shards[0], key).mask = mask
    return made


def spans(table: BlockTable, keys: Sequence[int]) -> list[tuple[int, int, int]]:
    return [astuple(span) for span in read_spans(table.shards, table.shard_mask, keys, {}, NOW)]


def test_equal_holders_are_one_span() -> None:
    table = table_of(range(RUN_BLOCKS + 2))
    table.shards[0][3].mask = 5
    table.shards[0][RUN_BLOCKS].mask = 5

    found = [(1, 1, 3), (5, 5, 1), (1, 1, RUN_BLOCKS - 4), (5, 5, 1), (1, 1, 1)]
    assert spans(table, range(RUN_BLOCKS + 9)) == found
    assert spans(table, range(RUN_BLOCKS + 9)) == found


def test_a_run_is_read_once_until_one_of_its_blocks_changes() -> None:
    table = table_of(RUN)
    assert spans(table, RUN) == [(1, 1, RUN_BLOCKS)]

    table.shards[0][7].mask = 2
    assert spans(table, RUN) == [(1, 1, RUN_BLOCKS)], "nothing was said of a change"
    table.shards[0][7].changed()
    assert spans(table, RUN) == [(1, 1, 7), (2, 2, 1), (1, 1, RUN_BLOCKS - 8)]


def test_the_end_of_a_prompt_is_read_once_too() -> None:
    end = range(RUN_BLOCKS + 2 * SHORT_RUN_BLOCKS + 1)
    table = table_of(end)
    assert spans(table, end) == [(1, 1, RUN_BLOCKS), (1, 1, SHORT_RUN_BLOCKS), (1, 1, SHORT_RUN_BLOCKS), (1, 1, 1)]

    for changed in (RUN_BLOCKS, end[-1]):
        table.shards[0][changed].mask = 2
    found = [(1, 1, RUN_BLOCKS), (1, 1, SHORT_RUN_BLOCKS), (1, 1, SHORT_RUN_BLOCKS), (2, 2, 1)]
    assert spans(table, end) == found, "nothing was said of a change, but no run has the last block"
    table.shards[0][RUN_BLOCKS].changed()
    assert spans(table, end) == [found[0], (2, 2, 1), (1, 1, SHORT_RUN_BLOCKS - 1), *found[2:]]


def test_short_and_long_prompts_with_one_beginning_do_not_disturb_each_other() -> None:
    table = table_of(RUN)
    short = RUN[:SHORT_RUN_BLOCKS]
    for _ in range(2):
        assert spans(table, RUN) == [(1, 1, RUN_BLOCKS)]
        assert spans(table, short) == [(1, 1, SHORT_RUN_BLOCKS)]
    table.shards[0][0].mask = 2
    assert spans(table, RUN) == [(1, 1, RUN_BLOCKS)] and spans(table, short) == [(1, 1, SHORT_RUN_BLOCKS)]

    table.shards[0][0].changed()

    assert spans(table, RUN) == [(2, 2, 1), (1, 1, RUN_BLOCKS - 1)]
    assert spans(table, short) == [(2, 2, 1), (1, 1, SHORT_RUN_BLOCKS - 1)]


def test_a_block_that_is_evicted_ends_its_run() -> None:
    table = table_of([*range(1, RUN_BLOCKS), 0])
    assert spans(table, RUN) == [(1, 1, RUN_BLOCKS)]

    table.evict_one()

    assert spans(table, RUN) == [(1, 1, 1)]


def test_a_block_of_two_runs_changes_both() -> None:
    """Prompts that part within a run: what was read last is remembered, and nothing outlives a change."""
    ends = [[*range(RUN_BLOCKS - 1), 1000 + prompt] for prompt in range(2)]
    table = table_of([*ends[0], ends[1][-1]])
    for _ in range(2):
        for keys in ends:
            assert spans(table, keys) == [(1, 1, RUN_BLOCKS)]

    table.shards[0][0].mask = 2
    table.shards[0][0].changed()

    for keys in ends:
        assert spans(table, keys) == [(2, 2, 1), (1, 1, RUN_BLOCKS - 1)]


def test_a_block_that_counts_until_some_time_is_read_each_time() -> None:
    table = table_of(RUN)
    entry = table.shards[0][0]
    entry.speculative_mask, entry.speculative_until = 4, NOW + 1

    def at(now: float) -> list[tuple[int, int, int]]:
        return [astuple(span) for span in read_spans(table.shards, 0, RUN, {}, now)]

    assert at(NOW) == [(5, 1, 1), (1, 1, RUN_BLOCKS - 1)]
    assert at(NOW + 2) == [(1, 1, RUN_BLOCKS)]


def test_a_run_in_use_stays_among_the_last_used() -> None:
    """The blocks that come in between are newer, but no more of them than the table's share for runs in use allows."""
    table = table_of(RUN)
    spans(table, RUN)
    for key in range(1000, 3000):
        table.add(table.shards[0], key)
        use_runs(table, RUN, 1, None, NOW)
        if table.entries > 1000:
            assert table.evict_one() is not None

    order = list(table.shards[0])
    assert set(RUN) <= set(order)
    assert min(order.index(key) for key in RUN) >= len(order) - len(order) // USED_AGAIN_SHARE - RUN_BLOCKS


def test_blocks_that_are_in_no_run_are_used_one_by_one() -> None:
    table = table_of([1, 2, 3])

    use_runs(table, [1, 9], 1, None, NOW)

    assert list(table.shards[0]) == [2, 3, 1]
