"""Engines that share the rows of a node: what each sees of the others, what is refused, and how a spec opens them."""

from __future__ import annotations

import fcntl
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine import spec_base
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.node_tier.picture import _REJOIN_SECONDS as REJOIN_SECONDS
from spillway_connector.engine.node_tier.row_checks import NodeRowsSpec, RowChecks
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.errors import ConfigError, DeviceCopyError, HostMemoryError, TierTimeout
from spillway_connector.node.keeper import NodeKeeper
from spillway_connector.node.region import REMOVED_LEASE_MS, NodeRegion, agreed_region
from spillway_connector.plan import node_records
from spillway_connector.plan.node_index import DEAD_ROWS_KEPT_MS, FREE, READY, RESERVED, SEARCHED, WRITING
from spillway_connector.plan.node_records import RECORD_BYTES
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.plan.waiting import Turn
from spillway_connector.testing.generation import HIT, MISS, PENDING, make_node_tier
from spillway_connector.tiers.disk.slab.writers import new_number

ROWS, ROW_BYTES = 4, 4096
CONTEXT = ReqContext(req_id="r")
OURS, THEIRS = b"o" * 16, b"t" * 16


def key(number: int) -> OffloadKey:
    return OffloadKey(bytes([number]) * 36)


def long_key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(36, "big"))


class Node:
    """Engines of one machine, each as in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 100.0
        self.engines: list[NodeRows] = []

    def engine(self, namespace: bytes = OURS, *, floor_share: float = 0.0, rows: int = ROWS) -> NodeRows:
        region = NodeRegion(self.folder, rows, ROW_BYTES, new_number())
        tier = make_node_tier(region, namespace, True, floor_share, clock=lambda: self.seconds)
        assert isinstance(tier, NodeRows)
        self.engines.append(tier)
        return tier

    @contextmanager
    def lock_held(self) -> Iterator[None]:
        """Hold the lock as a process does that has stopped."""
        descriptor = os.open(next(self.folder.glob("rows-*/index")), os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    def kill(self, tier: NodeRows) -> None:
        """Release an engine's lease, as the kernel does when the engine's last process has ended."""
        tier._node.lease.release()
        self.engines.remove(tier)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "node")
    yield node
    for tier in node.engines:
        tier.shutdown()


def store(tier: NodeRows, *numbers: int) -> None:
    keys = [key(number) for number in numbers]
    output = tier.prepare_store(keys, CONTEXT)
    assert output is not None
    tier.complete_store(list(output.keys_to_store), CONTEXT, True)


def looked_up(tier: NodeRows, number: int) -> object:
    tier.sync()
    return tier.lookup(key(number), CONTEXT)


def see_nothing_of_it(tier: NodeRows) -> None:
    """Mark all that other engines have just changed as seen, as a defect might."""
    tier._seen_array[:] = tier._index.stamp_array
    tier._version[:] = tier._index.counts.tobytes()


def test_a_chunk_is_a_hit_for_every_engine_of_its_namespace_and_for_no_other(node: Node):
    first, second, other = node.engine(), node.engine(), node.engine(THEIRS)
    store(first, 1)
    assert looked_up(second, 1) is HIT
    assert looked_up(other, 1) is MISS
    assert [event.removed for event in second.take_events()] == [False]
    first_rows, second_rows = first.rows_of([key(1)]), second.rows_of([key(1)])
    assert first_rows == second_rows


def test_a_row_that_another_engine_takes_right_after_it_was_published_is_not_the_publisher_s_chunk(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """The engine publishes without the lock, and may be stopped before it notes what it has published."""
    first, second = node.engine(), node.engine()
    publish = first._index.publish

    def publish_and_stop(*given: Any) -> bool:
        published = publish(*given)
        store(second, 5, 6, 7, 8)  # takes every row
        return published

    monkeypatch.setattr(first._index, "publish", publish_and_stop)
    store(first, 1)
    monkeypatch.undo()
    assert looked_up(second, 1) is MISS
    assert looked_up(first, 1) is MISS
    assert looked_up(first, 5) is HIT


def test_a_load_of_a_row_that_the_engine_takes_for_another_chunk_s_is_refused_and_the_row_is_seen_anew(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 1)
    store(second, 5, 6, 7, 8)  # takes every row
    see_nothing_of_it(first)
    assert looked_up(first, 1) is HIT
    spec = first.prepare_load([key(1)], CONTEXT)
    with pytest.raises(DeviceCopyError):
        RowChecks(first._node).require(spec)
    first.complete_load([key(1)], CONTEXT)
    assert not any(map(first._index.is_pinned, range(ROWS)))
    assert looked_up(first, 1) is MISS
    assert looked_up(first, 5) is HIT


def test_an_engine_that_takes_a_row_for_its_own_chunk_s_does_not_give_it_away_while_another_writes_it(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 1, 2, 3, 4)
    assert second.prepare_store([key(5), key(6), key(7), key(8)], CONTEXT) is not None
    see_nothing_of_it(first)
    assert first.prepare_store([key(9)], CONTEXT) is None
    first.reset_cache()
    second.complete_store([key(5), key(6), key(7), key(8)], CONTEXT, True)
    assert looked_up(node.engine(), 5) is HIT


def test_an_engine_that_starts_finds_what_others_stored_though_none_of_them_runs(node: Node):
    first = node.engine()
    store(first, 1, 2)
    node.kill(first)
    assert looked_up(node.engine(), 2) is HIT


def test_a_chunk_that_another_engine_writes_is_waited_for_and_not_stored_twice(node: Node):
    first, second = node.engine(), node.engine()
    assert first.prepare_store([key(1)], CONTEXT) is not None
    assert looked_up(second, 1) is PENDING
    output = second.prepare_store([key(1), key(2)], CONTEXT)
    assert output is not None
    assert list(output.keys_to_store) == [key(2)]
    first.complete_store([key(1)], CONTEXT, True)
    assert looked_up(second, 1) is HIT


def test_a_failed_copy_is_no_hit_for_anyone(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    second.sync()
    first.complete_store([key(1)], CONTEXT, False)
    assert looked_up(second, 1) is MISS
    assert first.free_rows() == second.free_rows() == ROWS


def test_no_engine_evicts_what_another_one_reads(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 0, 1, 2, 3)
    first.prepare_load([key(0), key(1), key(2)], CONTEXT)
    second.sync()
    assert second.prepare_store([key(8), key(9)], CONTEXT) is None
    store(second, 9)
    assert looked_up(first, 3) is MISS
    first.complete_load([key(0), key(1), key(2)], CONTEXT)
    assert second.prepare_store([key(10), key(11)], CONTEXT) is not None


@pytest.mark.parametrize("few_rows", [0, 16])
def test_chunks_that_other_engines_read_stay_and_younger_ones_leave(
    node: Node, few_rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node_records, "FEW_ROWS", few_rows)
    first, second = node.engine(rows=8), node.engine(rows=8)
    store(first, *range(1, 9))
    second.sync()
    second.prepare_load([key(1), key(2), key(4)], CONTEXT)
    store(first, 11, 12, 13)
    assert {number for number in range(1, 14) if key(number) in first.ready} == {1, 2, 4, 7, 8, 11, 12, 13}
    assert first.prepare_store(list(map(key, range(21, 27))), CONTEXT) is None  # five may leave
    assert [looked_up(first, number) for number in (7, 8, 11, 12, 13)] == [HIT] * 5
    second.complete_load([key(1), key(2), key(4)], CONTEXT)
    store(first, *range(21, 27))
    assert [looked_up(second, number) for number in range(21, 27)] == [HIT] * 6


@pytest.mark.parametrize("read", [1, 40, 300])
def test_few_rows_are_looked_at_beyond_those_that_other_engines_read(
    node: Node, read: int, monkeypatch: pytest.MonkeyPatch
):
    first, second = node.engine(rows=4000), node.engine(rows=4000)
    numbers = list(map(long_key, range(4000)))
    first._spare_rows = (0).__index__  # type: ignore[method-assign]
    assert first.prepare_store(numbers, CONTEXT) is not None
    first.complete_store(numbers, CONTEXT, True)
    second.sync()
    second.prepare_read(numbers[:read], CONTEXT)  # for a shared tier, which leaves the order of use as it is
    asked: list[int] = []
    which_may_leave = first._index.which_may_leave
    monkeypatch.setattr(
        first._index, "which_may_leave", lambda rows: (asked.append(len(rows)), which_may_leave(rows))[1]
    )
    output = first.prepare_store([long_key(4000)], CONTEXT)
    assert output is not None and output.evicted_keys == [numbers[read]]
    assert 0 < sum(asked) < 100 + 10 * read, "of 4,000"


def test_an_eviction_passes_over_what_others_have_used_wherever_it_is_in_the_order(node: Node):
    first, second = node.engine(rows=80), node.engine(rows=80)
    first._spare_rows = (0).__index__  # type: ignore[method-assign]
    store(first, *range(80))
    second.sync()
    node.seconds += 1
    used = [*range(50), 55]
    second.touch(list(map(key, used)), CONTEXT)
    store(first, *range(100, 106))
    assert {number for number in range(80) if key(number) not in first.ready} == {50, 51, 52, 53, 54, 56}


def test_a_report_of_chunks_that_are_not_being_written_changes_nothing(node: Node):
    tier = node.engine()
    store(tier, 1)
    before = bytes(tier._index.counts)
    tier.complete_store([key(1), key(2)], CONTEXT, True)
    assert bytes(tier._index.counts) == before
    assert looked_up(tier, 1) is HIT


def test_a_store_remembers_what_it_reserved_and_not_what_an_engine_that_lost_its_place_wrote_since(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    tier = node.engine()
    reserve = tier._index.reserve

    def overwritten(rows: Any, place: int) -> object:
        stamps = reserve(rows, place)
        tier._index.stamps[rows[0]] += 1 << 20
        return stamps

    monkeypatch.setattr(tier._index, "reserve", overwritten)
    for few_rows in (16, 0):
        monkeypatch.setattr(node_records, "FEW_ROWS", few_rows)
        assert tier.prepare_store([key(1)], CONTEXT) is None
        assert not tier.is_joined
        node.seconds += REJOIN_SECONDS
        tier.sync()


def test_a_row_that_another_engine_reads_for_a_shared_tier_is_not_evicted_either(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 0, 1, 2, 3)
    assert first.prepare_read([key(number) for number in range(4)], CONTEXT) is not None
    second.sync()
    assert second.prepare_store([key(9)], CONTEXT) is None


def test_the_last_use_by_any_engine_decides_what_leaves(node: Node):
    first, second = node.engine(), node.engine()
    for number in range(4):
        node.seconds += 1
        store(first, number)
    node.seconds += 1
    second.sync()
    second.touch([key(0)], CONTEXT)
    store(first, 9)
    assert [looked_up(first, number) for number in range(2)] == [HIT, MISS]


def test_chunks_of_another_namespace_make_room_if_they_are_older_or_the_own_ones_in_use(node: Node):
    ours, theirs = node.engine(), node.engine(THEIRS)
    store(theirs, 0, 1, 2)
    node.seconds += 1
    store(ours, 0, 1, 2)
    assert ours.rows_of([key(0), key(1), key(2)])
    assert sum(looked_up(theirs, number) is HIT for number in range(3)) == 1
    node.seconds += 1
    theirs.touch([key(number) for number in range(3)], CONTEXT)
    store(ours, 3)  # one of its own is older
    assert sum(looked_up(theirs, number) is HIT for number in range(3)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_namespaces_divide_the_rows_by_use_and_each_gets_and_keeps_its_floor(node: Node, seed: int):
    chosen, rows, floor = random.Random(seed), 16, 4
    tiers = [node.engine(bytes([name]) * 16, floor_share=floor / rows, rows=rows) for name in range(3)]
    had = [0, 0, 0]
    for serial in range(200):
        node.seconds += 1
        turn = chosen.choice((0, 0, 0, 0, 0, 1, 1, 2))  # the first one uses it most
        keys = [OffloadKey(serial.to_bytes(2, "big") * 18 + bytes([at])) for at in range(chosen.randint(1, 3))]
        output = tiers[turn].prepare_store(keys, CONTEXT)
        assert output is not None
        tiers[turn].complete_store(keys, CONTEXT, True)
        for tier in tiers:
            tier.sync()
        has = [len(tier.ready) for tier in tiers]
        assert all(now >= min(before, floor) for now, before in zip(has, had, strict=True))
        assert has[turn] >= min(had[turn] + len(keys), floor)
        had = has
    assert sum(had) == rows
    assert min(had) >= floor


def test_a_namespace_that_is_used_no_longer_gives_its_floor_away(node: Node):
    ours, theirs = (node.engine(name, floor_share=0.25) for name in (OURS, THEIRS))
    store(theirs, 0)
    node.seconds += 3599
    store(ours, 1, 2, 3)
    assert ours.prepare_store([key(number) for number in (5, 6, 7, 8)], CONTEXT) is None
    assert looked_up(theirs, 0) is HIT
    node.seconds += 1
    store(ours, 5, 6, 7, 8)
    assert looked_up(theirs, 0) is MISS


def test_a_load_whose_rows_have_just_been_given_away_is_refused_and_lets_go_of_nothing_else(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 0, 1, 2, 3)
    second.sync()
    store(first, 6, 7, 8, 9)
    assert second.lookup(key(0), CONTEXT) is HIT  # a step's picture, which is late
    spec = second.prepare_load([key(0)], CONTEXT)
    with pytest.raises(DeviceCopyError):
        RowChecks(second._node).require(spec)
    second.complete_load([key(0)], CONTEXT)
    assert second.prepare_read([key(0)], CONTEXT) is None
    held = second.prepare_load([key(6)], CONTEXT)
    RowChecks(second._node).require(held)
    second.complete_load([key(6)], CONTEXT)
    assert first.prepare_store([key(number) for number in (20, 21, 22, 23)], CONTEXT) is not None


def test_a_refused_load_matches_no_row_not_even_one_that_was_never_used(node: Node):
    first, second = node.engine(), node.engine()
    first._index._words[SEARCHED] = 0
    spec = second.prepare_load([key(0)], CONTEXT)
    assert spec.block_ids.tolist() == [0]
    assert first._index.stamps[0] == 0, "row 0 was never used"
    with pytest.raises(DeviceCopyError):
        RowChecks(second._node).require(spec)
    second.complete_load([key(0)], CONTEXT)


def test_a_chunk_that_left_and_is_written_again_in_the_same_row_is_not_ready(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 1)
    assert looked_up(second, 1) is HIT
    row = first.rows_of([key(1)])
    first.reset_cache()
    first._index._words[SEARCHED] = 0
    assert first.prepare_store([key(1)], CONTEXT) is not None
    assert first.rows_of([key(1)]) == row
    assert looked_up(second, 1) is PENDING
    first.complete_store([key(1)], CONTEXT, True)
    assert looked_up(second, 1) is HIT


def test_a_row_that_changed_under_a_copy_fails_it(node: Node):
    tier = node.engine()
    store(tier, 1)
    spec = tier.prepare_load([key(1)], CONTEXT)
    assert isinstance(spec, NodeRowsSpec)
    checks = RowChecks(tier._node)
    checks.require(spec)
    checks.submitted(7, spec)
    checks.submitted(8, spec)
    assert checks.still_held(7)
    tier._index.stamp_array[spec.block_ids] += np.uint64(4)
    assert not checks.still_held(8)
    assert checks.still_held(9)  # of no load


def test_a_damaged_entry_of_the_index_is_no_hit(node: Node):
    first = node.engine()
    store(first, 1, 2)
    first._index.records.memory[first.rows_of([key(1)])[0] * RECORD_BYTES + 32] ^= 1  # of its key
    second = node.engine()
    assert [looked_up(second, number) for number in (1, 2)] == [MISS, HIT]


def test_what_a_killed_engine_wrote_and_read_is_released_once_its_device_is_still(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 0)
    first.prepare_load([key(0)], CONTEXT)
    first.prepare_store([key(1), key(2), key(3)], CONTEXT)
    assert looked_up(second, 1) is PENDING
    node.kill(first)
    node.seconds += 0.5
    assert looked_up(second, 1) is PENDING  # a copy of its device may still be under way
    assert second._index.count()[WRITING] == 3
    node.seconds += DEAD_ROWS_KEPT_MS / 1000
    assert looked_up(second, 1) is MISS
    assert second.prepare_store([key(number) for number in (6, 7, 8, 9)], CONTEXT) is not None


def test_a_reset_drops_the_chunks_for_all_engines_but_what_they_use(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 0, 1)
    second.sync()
    second.prepare_load([key(0)], CONTEXT)
    first.reset_cache()
    assert [looked_up(first, number) for number in (0, 1)] == [MISS, MISS]
    assert [looked_up(second, number) for number in (0, 1)] == [HIT, MISS]
    second.complete_load([key(0)], CONTEXT)
    store(first, 0)  # computed again
    assert looked_up(first, 0) is HIT
    store(first, 5, 6, 7)
    assert first.prepare_store([key(8)], CONTEXT) is not None


def test_what_a_session_left_over_here_and_another_engine_uses_does_not_leave_first(node: Node):
    one, other = node.engine(), node.engine()
    over = TenantContext("over", session=SessionHint(b"over", ended=True))
    store(one, 0)
    one.on_new_request(over)
    output = one.prepare_store([key(1)], over)
    assert output is not None
    one.complete_store([key(1)], over)
    one.on_request_finished(over)
    store(one, 2, 3)
    other.sync()
    node.seconds += 1.0
    other.touch([key(1)], CONTEXT)

    store(one, 4)
    assert {number for number in range(5) if looked_up(one, number) is HIT} == {1, 2, 3, 4}


def test_rows_under_way_at_a_reset_are_used_again_when_their_jobs_have_ended(node: Node):
    tier = node.engine()
    store(tier, 0)
    tier.prepare_load([key(0)], CONTEXT)
    tier.prepare_store([key(1)], CONTEXT)
    rows = tier.rows_of([key(0)]), tier.rows_of([key(1)])
    tier.reset_cache()
    assert tier.prepare_store([key(number) for number in (5, 6, 7, 8)], CONTEXT) is None
    for under_way in rows:
        tier.release(under_way)
    assert tier.prepare_store([key(number) for number in (5, 6, 7, 8)], CONTEXT) is not None


def test_a_refused_load_releases_no_row_that_another_engine_has_claimed_since(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 0, 1, 2, 3)
    second.sync()
    store(first, 6, 7, 8, 9)  # in the same rows
    second.prepare_load([key(0)], CONTEXT)  # refused
    first.reset_cache()
    store(first, 0)
    second.sync()
    rows = second.rows_of([key(0)])
    second.reset_cache()
    assert first.prepare_store([key(number) for number in (1, 2, 3, 4)], CONTEXT) is not None
    second.release(rows)
    assert first._index.count()[WRITING] == ROWS
    first.complete_store([key(number) for number in (1, 2, 3, 4)], CONTEXT, True)
    assert first.free_rows() == first._index.count()[0] == 0


def test_an_engine_whose_weights_change_neither_reads_nor_writes_the_rows_of_the_others(node: Node, caplog):
    first, second = node.engine(), node.engine()
    store(first, 1, 2)
    second.sync()
    second.prepare_store([key(3)], CONTEXT)
    second.prepare_load([key(2)], CONTEXT)
    second.weights_changed()
    second.reset_cache()
    assert "until its weights have a name: the weights" in caplog.text
    assert [looked_up(second, number) for number in (1, 2, 3)] == [MISS, MISS, MISS]
    assert second.prepare_store([key(4)], CONTEXT) is None
    assert second.free_rows() == 0
    assert looked_up(first, 1) is HIT


def test_an_engine_leaves_a_region_whose_files_were_removed(node: Node, caplog):
    tier = node.engine()
    store(tier, 1, 2)
    spec = tier.prepare_load([key(1)], CONTEXT)
    os.unlink(node.folder / f"rows-{ROW_BYTES}" / "index")
    node.seconds += 1.0  # until the next look at the files
    tier.sync()
    assert tier.prepare_store([key(3)], CONTEXT) is None
    assert "leaves the CPU tier of its node and serves without one until it is restarted" in caplog.text
    assert looked_up(tier, 2) is MISS
    RowChecks(tier._node).require(spec)  # the load under way ends as it began
    tier.complete_load([key(1)], CONTEXT)
    assert looked_up(tier, 1) is MISS
    tier.reset_cache()


def test_an_engine_says_that_it_has_to_be_restarted_if_the_files_were_replaced_while_it_was_away(node: Node, caplog):
    tier = node.engine()
    store(tier, 1)
    tier._leave("another process held the lock")
    assert "until it can be used again" in caplog.text
    for name in ("index", "rows"):
        os.unlink(node.folder / f"rows-{ROW_BYTES}" / name)
    opening(node.folder)(new_number()).close()
    node.seconds += 6.0
    tier.sync()
    assert "until it is restarted" in caplog.text
    assert "is another file" in caplog.text
    assert tier._files_are_gone


# -- how a region is opened


def opening(folder: Path, rows: int = ROWS) -> Callable[[int], NodeRegion]:
    return lambda number: NodeRegion(folder, rows, ROW_BYTES, number)


def test_a_region_of_another_size_is_refused_while_an_engine_uses_it_and_replaced_after_that(node: Node, caplog):
    tier = node.engine()
    store(tier, 1)
    with pytest.raises(HostMemoryError, match=r"in use by other engines, and it has 4 rows .* to have 5"):
        opening(node.folder, 5)(new_number())
    node.kill(tier)
    opening(node.folder, 5)(new_number()).close()
    assert "is replaced: it has 4 rows" in caplog.text
    with pytest.raises(HostMemoryError):
        NodeRegion(Path("/proc/none"), ROWS, ROW_BYTES, new_number())


def test_a_region_of_another_version_or_one_that_was_never_finished_is_replaced(node: Node, caplog):
    for word, why in ((1, "it has version 8"), (0, "it was never finished")):
        tier = node.engine()
        tier._index._words[word] = 8
        node.kill(tier)
        node.kill(node.engine())
        assert f"is replaced: {why}" in caplog.text


def test_a_folder_in_which_others_may_put_files_is_refused(tmp_path: Path):
    tmp_path.chmod(0o777)
    with pytest.raises(HostMemoryError, match="every user may write to it"):
        opening(tmp_path)(new_number())


def test_all_processes_of_an_engine_have_the_same_rows(tmp_path: Path, caplog):
    choice, folder = tmp_path / "engine.node", tmp_path / "node"
    first, second = (agreed_region(choice, opening(folder), may_be_private=False) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.lease.number == second.lease.number
    others = NodeRegion(folder, ROWS, ROW_BYTES, new_number())
    first.close()
    assert others.lease.is_held(second.lease.number)  # until its last process has ended
    second.close()
    assert not others.lease.is_held(second.lease.number)
    with caplog.at_level(logging.ERROR):
        private = tmp_path / "another.node"
        assert agreed_region(private, opening(folder, 5), may_be_private=True) is None
    assert "serves with a CPU tier of its own" in caplog.text
    others.close()
    assert agreed_region(private, opening(folder, 5), may_be_private=True) is None  # as its first process
    with pytest.raises(HostMemoryError):
        agreed_region(tmp_path / "third.node", opening(Path("/proc/none")), may_be_private=False)


@pytest.mark.parametrize("words", [b"", b"\xff\xfe", b"0x10", b"-1", b"private\n", bytes(100)])
def test_what_others_put_in_the_place_of_the_choice_is_named(tmp_path: Path, words: bytes):
    choice = tmp_path / "engine.node"
    choice.write_bytes(words)
    with pytest.raises(HostMemoryError, match=r"engine\.node is no file of an engine's"):
        agreed_region(choice, opening(tmp_path / "node"), may_be_private=True)


@pytest.mark.parametrize(
    "given",
    [{"eviction_policy": "arc"}, {"storing": "late"}, {"layerwise_loads": "on"}],
    ids=lambda given: next(iter(given)),
)
def test_what_the_tier_of_a_node_does_not_do_is_refused(given: dict[str, str]):
    settings = {"num_cpu_blocks": 4, "node_tier": {"bytes": "1MiB"}}
    assert ConnectorConfig.parse(settings).node_tier is not None
    with pytest.raises(ConfigError, match=f"{next(iter(given))}: .* and node_tier exclude each other"):
        ConnectorConfig.parse(settings | given)


SHAPE = {
    "rank_block_bytes": ROW_BYTES,
    "num_ranks": 1,
    "num_stages": 1,
    "ranks_hold_the_same": False,
    "tokens_per_block": 16,
    "tokens_per_hash": 16,
    "enable_events": False,
}


class _Spec(SpillwayOffloadingSpec):
    """The spec of this vLLM's generation, without the engine that vLLM's constructor reads."""

    def __init__(self, folder: Path, size_bytes: int = ROWS * ROW_BYTES, **more: str) -> None:
        self.extra_config = {"num_cpu_blocks": 2, "node_tier": {"bytes": size_bytes, "path": str(folder), **more}}
        self._begin(region_id=f"test-node-{os.getpid()}", **SHAPE)


def test_a_spec_uses_the_rows_of_the_node_and_rows_of_its_own_if_it_may_not(tmp_path: Path, monkeypatch):
    with pytest.raises(ConfigError, match="hold no chunk"):
        _Spec(tmp_path / "node", ROW_BYTES - 1)
    spec = _Spec(tmp_path / "node")
    assert spec._choice.exists()
    assert spec.num_rows == ROWS
    assert spec._open_region() is spec._node.memory
    assert spec._row_checks is not None
    facts = spec._open_facts_region(spec._open_region())
    spec_base.write_layout(facts.create_kv_memoryview().cast("B"), 0, ROW_BYTES, {"layers": []})
    monkeypatch.setattr(type(spec), "namespace", property(lambda _: type("N", (), {"digest16": OURS})))
    tier = spec.get_manager().primary_tier
    assert isinstance(tier, NodeRows)
    assert not spec._choice.exists()
    assert not facts.path.exists()

    beside = _Spec(tmp_path / "node", 9 * ROW_BYTES)
    assert beside._node is None
    assert (spec.node_tier_use, beside.node_tier_use) == ("shared", "private")
    assert beside.num_rows == 2
    beside._choice.unlink()
    tier.shutdown()
    facts.cleanup()


def test_a_spec_waits_for_the_keeper_if_the_rows_are_to_be_of_its_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(spec_base, "KEEPER_SECONDS", 0.0)
    alone = _Spec(tmp_path / "node", maker="keeper")
    assert alone._node is None
    alone._choice.unlink()
    NodeKeeper(tmp_path / "node", ROWS * ROW_BYTES, 1, lambda: (1 << 40, "test")).tick()  # it was asked
    spec = _Spec(tmp_path / "node", 2 * ROWS * ROW_BYTES, maker="keeper")
    assert spec._node is not None
    assert spec.num_rows == ROWS  # as they are
    spec._node.close()
    spec._choice.unlink()


def announced(tier: NodeRows) -> list[tuple[bool, int]]:
    """Whether it is gone and the number of each chunk that is announced."""
    tier.sync()
    return [(one.removed, single[0]) for one in tier.take_announcements() for single in one.keys]


def test_a_change_is_announced_by_the_engine_that_made_it_alone(node: Node):
    first, second = node.engine(), node.engine()
    (joined,) = first.take_announcements()
    assert list(second.take_announcements()) == [joined] and not joined.removed and not joined.keys
    store(first, 1, 2, 3, 4)
    assert announced(first) == [(False, 1), (False, 2), (False, 3), (False, 4)]
    assert announced(second) == []
    node.seconds += 20
    assert announced(second) == []
    store(second, 5)
    assert announced(second) == [(True, 1), (False, 5)]
    assert announced(first) == []


def test_engines_of_another_namespace_name_another_store_and_what_they_displace_is_announced(node: Node):
    first, other = node.engine(), node.engine(THEIRS)
    store(first, 1, 2, 3, 4)
    announced(first)
    assert {one.store_id for one in first.take_announcements()}.isdisjoint(
        one.store_id for one in other.take_announcements()
    )
    node.seconds += 20
    store(other, 9)
    assert announced(other) == [(False, 9)]
    assert announced(first) == [(True, 1)]


def test_what_an_engine_has_said_just_now_and_another_changes_it_says_anew(node: Node):
    """The events of two engines reach the gateway by two ways, so the later one may come first."""
    first, second = node.engine(), node.engine()
    store(first, 1, 2, 3, 4)
    announced(first)
    store(second, 5)
    assert announced(first) == [(True, 1)]
    store(second, 1)
    assert announced(first) == [(True, 2), (False, 1)]


@pytest.mark.parametrize("is_kept", [False, True], ids=["alone", "kept"])
def test_what_a_killed_engine_changed_last_is_announced_by_another_one(node: Node, is_kept: bool):
    """The engine that releases what the killed one had claimed announces it."""
    first, second = node.engine(), node.engine()
    keeper = NodeKeeper(node.folder, ROWS * ROW_BYTES, 1, lambda: (1 << 40, "test"), lambda: node.seconds)
    store(first, 1, 2, 3, 4)
    announced(second)
    node.seconds += 20
    store(first, 5)
    assert announced(second) == []
    node.kill(first)
    node.seconds += 0.5
    if is_kept:
        keeper.tick()
    announced(second)
    node.seconds += DEAD_ROWS_KEPT_MS / 1000
    if is_kept:
        keeper.tick()
    assert set(announced(second)) == {(True, 1), (False, 5)}


def test_a_reset_announces_what_it_has_dropped_from_the_node(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 1, 2)
    announced(first)
    second.sync()
    second.prepare_load([key(1)], CONTEXT)
    first.reset_cache()
    assert announced(first) == [(True, 2)]


def rejoin(node: Node, tier: NodeRows) -> None:
    node.seconds += 6
    tier.sync()


def test_an_engine_that_left_for_want_of_the_lock_comes_back(node: Node, caplog):
    first, second = node.engine(), node.engine()
    store(first, 1, 2)
    reading = second.prepare_load([key(1)], CONTEXT) if looked_up(second, 1) is HIT else None
    writing = second.prepare_store([key(3), key(4)], CONTEXT)
    assert isinstance(reading, NodeRowsSpec) and writing is not None
    with node.lock_held():
        assert second.prepare_store([key(9)], CONTEXT) is None
        assert looked_up(second, 2) is MISS
        second.complete_store([key(3)], CONTEXT, True)  # cannot be published
        rejoin(node, second)
        assert looked_up(second, 2) is MISS
    rejoin(node, second)
    assert "again" in caplog.text
    assert [looked_up(second, number) for number in (1, 2, 3, 4)] == [HIT, HIT, MISS, PENDING]
    assert looked_up(first, 3) is MISS  # its row is free
    second.complete_store([key(4)], CONTEXT, True)
    assert looked_up(first, 4) is HIT
    assert RowChecks(second._node)._holds(reading)
    second.complete_load([key(1)], CONTEXT)
    store(first, 5, 6)  # evicts the oldest two, which no engine reads any more: one row is free
    assert looked_up(second, 1) is MISS


def test_an_engine_that_left_and_was_reset_meanwhile_takes_nothing_of_before(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 1)
    assert looked_up(second, 1) is HIT
    with node.lock_held():
        assert second.prepare_store([key(9)], CONTEXT) is None
        second.reset_cache()
    store(first, 2)
    rejoin(node, second)
    assert [looked_up(second, number) for number in (1, 2)] == [MISS, HIT]


def test_an_engine_whose_weights_changed_does_not_come_back(node: Node):
    first, second = node.engine(), node.engine()
    store(first, 1)
    second.weights_changed()
    rejoin(node, second)
    assert looked_up(second, 1) is MISS


def test_weights_that_have_a_name_are_shared_under_it_and_former_ones_stay_for_others(node: Node):
    first, second, third = node.engine(), node.engine(), node.engine(THEIRS)
    store(first, 1)
    store(third, 2)
    assert looked_up(second, 1) is HIT
    second.weights_changed()
    second.reset_cache()
    second.use_namespace(THEIRS)
    assert second.is_joined
    assert [looked_up(second, number) for number in (1, 2)] == [MISS, HIT]
    assert looked_up(first, 1) is HIT
    store(second, 3)
    assert [looked_up(tier, 3) for tier in (third, first)] == [HIT, MISS]
    second.weights_changed()
    second.reset_cache()
    second.use_namespace(OURS)
    assert [looked_up(second, number) for number in (1, 2, 3)] == [HIT, MISS, MISS]
    store(second, 4, 5, 6)  # the oldest of the other name leave
    assert [looked_up(third, number) for number in (2, 3)] == [MISS, MISS]


def test_weights_can_be_named_again_if_a_shared_tier_could_not_be_opened_under_their_name(node: Node):
    engine, shared = node.engine(), Mock(spec=PrefixTier)
    named: Any = SimpleNamespace(digest16=THEIRS)
    manager: Any = SimpleNamespace(primary_tier=engine, secondary_tiers=[shared])
    engine.weights_changed()
    engine.reset_cache()
    shared.use_namespace.side_effect = ConfigError("a disk is missing")
    with pytest.raises(ConfigError):
        TieringManager.use_namespace(manager, named)
    assert not engine.is_joined
    shared.use_namespace.side_effect = None
    TieringManager.use_namespace(manager, named)
    assert engine.is_joined


def test_a_store_under_way_while_the_weights_are_named_leaves_no_row_claimed(node: Node):
    first, second = node.engine(), node.engine()
    output = second.prepare_store([key(1)], CONTEXT)
    assert output is not None
    rows = second.rows_of([key(1)])
    second.weights_changed()
    second.reset_cache()
    second.use_namespace(THEIRS)
    assert first._index.count()[WRITING] == 1
    second.release(rows)
    assert first._index.count()[WRITING] == 0


def test_a_named_engine_announces_what_it_finds_under_the_name_in_another_store(node: Node):
    first, second = node.engine(THEIRS), node.engine()
    store(first, 1)
    store(second, 2)
    [_, stored] = list(second.take_announcements())
    second.weights_changed()
    second.reset_cache()
    second.use_namespace(THEIRS)
    left, joined, found = second.take_announcements()
    assert left.removed and not left.keys and left.store_id == stored.store_id
    assert not joined.removed and joined.store_id == found.store_id != left.store_id
    assert [bytes(each) for each in found.keys] == [bytes(key(1))]


def test_an_engine_that_joins_announces_what_it_finds_and_one_that_leaves_that_it_loads_no_more(node: Node):
    first = node.engine()
    store(first, 1)
    node.kill(first)
    second = node.engine()
    assert announced(second) == [(False, 1)]
    second.weights_changed()
    (left,) = second.take_announcements()
    assert left.removed and not left.keys


def test_what_a_step_stored_and_reads_for_a_shared_tier_is_published_at_its_end_without_a_lock(node: Node, monkeypatch):
    first, second = node.engine(), node.engine()
    for number in (1, 2):
        first.prepare_store([key(number)], CONTEXT)
    taken: list[int] = []
    change = first._node.change
    monkeypatch.setattr(first._node, "change", lambda *given: [taken.append(1), change(*given)][1])
    with first.together():
        for number in (1, 2):
            first.complete_store([key(number)], CONTEXT, True)
            for _ in range(2):  # one for each shared tier
                assert first.prepare_read([key(number)], CONTEXT) is not None
        assert taken == []
        assert looked_up(second, 1) is PENDING
    assert taken == []
    assert [looked_up(second, number) for number in (1, 2)] == [HIT, HIT]
    assert second.prepare_store([key(number) for number in (6, 7, 8)], CONTEXT) is None  # they are being read
    for number in (1, 2, 1, 2):
        first.complete_read([key(number)], CONTEXT)
    assert second.prepare_store([key(number) for number in (6, 7, 8)], CONTEXT) is not None


@pytest.mark.parametrize("first_ends", ["the load of before", "the load of after"])
def test_a_row_that_is_read_again_under_a_former_name_stays_until_both_loads_have_ended(node: Node, first_ends: str):
    first, second = node.engine(), node.engine()
    store(first, 1)
    first.prepare_load([key(1)], CONTEXT)
    rows = first.rows_of([key(1)])
    first.weights_changed()
    first.reset_cache()
    first.use_namespace(OURS)
    first.prepare_load([key(1)], CONTEXT)
    ends = [lambda: first.release(rows), lambda: first.complete_load([key(1)], CONTEXT)]
    for end in ends if first_ends == "the load of before" else reversed(ends):
        assert second.prepare_store([key(number) for number in (6, 7, 8, 9)], CONTEXT) is None
        end()
    assert second.prepare_store([key(number) for number in (6, 7, 8, 9)], CONTEXT) is not None


def test_what_was_stored_is_published_though_the_lock_cannot_be_had(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    with node.lock_held(), first.together():
        first.complete_store([key(1)], CONTEXT, True)
        assert first.prepare_read([key(1)], CONTEXT) is not None
    assert [looked_up(tier, 1) for tier in (first, second)] == [HIT, HIT]
    first.complete_read([key(1)], CONTEXT)


def test_what_was_not_published_when_an_engine_left_is_published_when_it_comes_back(node: Node, monkeypatch):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    with first.together():
        first.complete_store([key(1)], CONTEXT, True)
        assert first.prepare_read([key(1)], CONTEXT) is not None
        monkeypatch.setattr(first._node, "change", Mock(side_effect=TierTimeout("held")))
        assert first.prepare_store([key(2)], CONTEXT) is None
        monkeypatch.undo()
    assert looked_up(second, 1) is PENDING
    rejoin(node, first)
    assert [looked_up(tier, 1) for tier in (first, second)] == [HIT, HIT]
    first.complete_read([key(1)], CONTEXT)


def remove_lease(tier: NodeRows) -> None:
    """Delete the lease of an engine that runs, as an operator does who cleans up."""
    (tier._node.path / "writers" / f"{tier._node.lease.number:016x}").unlink()


def be_taken_for_dead(node: Node, tier: NodeRows, judge: NodeRows) -> None:
    """Let an engine be taken for dead: its lease is gone, and it is stopped for longer than any step lasts."""
    remove_lease(tier)
    for seconds in (0.5, REMOVED_LEASE_MS / 1000, DEAD_ROWS_KEPT_MS / 1000):
        node.seconds += seconds
        judge.sync()


def test_an_engine_that_was_taken_for_dead_publishes_nothing_and_leaves(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    be_taken_for_dead(node, first, second)
    store(second, 6, 7, 8, 9)
    with first.together():
        first.complete_store([key(1)], CONTEXT, True)
    assert not first.is_joined
    assert looked_up(second, 1) is MISS
    assert [looked_up(second, number) for number in (6, 7, 8, 9)] == [HIT] * 4


def test_an_engine_that_was_taken_for_dead_publishes_no_row_that_the_one_in_its_place_is_writing(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    be_taken_for_dead(node, first, second)
    second._index._engines[2:, 1] = 1 << 60  # the others have been free for a shorter time
    third = node.engine()
    assert third._place == first._place
    third.prepare_store([key(number) for number in (6, 7, 8, 9)], CONTEXT)
    with first.together():
        first.complete_store([key(1)], CONTEXT, True)
    assert not first.is_joined
    assert [looked_up(second, number) for number in (6, 7, 8, 9)] == [PENDING] * 4


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_engine_that_was_taken_for_dead_neither_pins_nor_unpins_for_the_one_in_its_place(node: Node, is_reset: bool):
    first, second = node.engine(), node.engine()
    store(second, 1)
    first.sync()
    first.prepare_load([key(1)], CONTEXT)
    rows = first.rows_of([key(1)])
    if is_reset:
        first.reset_cache()
    first.prepare_store([key(2)], CONTEXT)
    be_taken_for_dead(node, first, second)
    second._index._engines[2:, 1] = 1 << 60  # the others have been free for a shorter time
    third = node.engine()
    assert third._place == first._place
    third.prepare_load([key(1)], CONTEXT)
    first.release(rows) if is_reset else first.complete_load([key(1)], CONTEXT)
    assert [row for row in range(ROWS) if second._index.is_pinned(row)] == rows
    with first.together():
        first.complete_store([key(2)], CONTEXT, True)
        assert first.prepare_read([key(2)], CONTEXT) is None
    assert [row for row in range(ROWS) if second._index.is_pinned(row)] == rows


def test_an_engine_whose_lease_is_removed_within_a_long_step_keeps_its_rows_for_it(node: Node):
    """The engine's devices go on writing although, without the lease, nothing tells others that it runs."""
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    remove_lease(first)
    for _ in range(20):
        node.seconds += 2.5 * DEAD_ROWS_KEPT_MS / 1000
        second.sync()
    assert second._index.count()[WRITING] == 1
    assert second.prepare_store([key(number) for number in (6, 7, 8, 9)], CONTEXT) is None
    with first.together():
        first.complete_store([key(1)], CONTEXT, True)
    assert looked_up(second, 1) is HIT


def test_an_engine_that_was_taken_for_dead_claims_no_row_before_it_sees_that(node: Node):
    first, second = node.engine(), node.engine()
    be_taken_for_dead(node, first, second)
    assert first.prepare_store([key(1)], CONTEXT) is None
    assert not first.is_joined and first._files_are_gone
    assert second._index.count()[FREE] == ROWS


def test_no_chunk_leaves_for_the_reserve_that_a_client_retains_or_a_waiting_request_needs(node: Node):
    tier = node.engine()
    tier._spare_rows = (3).__index__  # type: ignore[method-assign]
    store(tier, 1, 2, 3, 4)
    tier.waiting.begin("waits", b"", Turn(0, 1), [key(2)], 0.0)
    store(tier, 5)
    assert [looked_up(tier, number) for number in range(1, 6)] == [MISS, HIT, HIT, HIT, HIT]
    tier.waiting.end("waits")
    tier.hold(b"", 0.5, 60.0, [key(3)])
    store(tier, 6)
    assert [looked_up(tier, number) for number in range(2, 7)] == [HIT, HIT, MISS, HIT, HIT]


def stop_at_a_stamp(node: Node, tier: NodeRows, judge: NodeRows, meanwhile: Callable[[], object]) -> None:
    """Stop an engine between its look at a row and its next stamp, until it is taken for dead and others have acted."""

    class Stopped:
        def __init__(self, stamps: memoryview) -> None:
            self.stamps = stamps

        def __getitem__(self, row: int) -> int:
            return self.stamps[row]

        def __setitem__(self, row: int, stamp: int) -> None:
            tier._index.stamps = self.stamps
            be_taken_for_dead(node, tier, judge)
            meanwhile()
            self.stamps[row] = stamp

    tier._index.stamps = Stopped(tier._index.stamps)  # type: ignore[assignment]


def publish_late(node: Node, tier: NodeRows, judge: NodeRows, meanwhile: Callable[[], object]) -> None:
    stop_at_a_stamp(node, tier, judge, meanwhile)
    tier.complete_store([key(1)], CONTEXT, True)


def sweep(node: Node, tier: NodeRows) -> None:
    node.seconds += 0.5
    tier.sync()


@pytest.mark.parametrize("numbers", [(), (6, 7, 8, 9)])
def test_a_claim_that_stopped_until_its_engine_was_taken_for_dead_is_none_and_its_row_is_free_soon(
    node: Node, numbers: tuple[int, ...], caplog
):
    first, second = node.engine(), node.engine()
    first._spare_rows = (1).__index__  # type: ignore[method-assign]
    store(first, 2)
    stop_at_a_stamp(node, first, second, lambda: store(second, *numbers))
    assert first.prepare_store([key(1)], CONTEXT) is None
    assert not first.is_joined and first._files_are_gone
    assert looked_up(second, 1) is (MISS if numbers else PENDING)
    sweep(node, second)
    assert looked_up(second, 1) is MISS
    assert "damaged" in caplog.text
    assert second._index.count()[FREE] == second.free_rows() == (1 if numbers else ROWS - 1)


def test_a_row_that_was_published_late_holds_nothing_and_is_free_soon(node: Node, caplog):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    publish_late(node, first, second, lambda: store(second, 6, 7, 8, 9))
    assert second._index.lost(second._place)
    sweep(node, first)
    assert not first.is_joined
    sweep(node, second)
    assert not second._index.lost(second._place)
    assert "damaged" in caplog.text
    assert second._index.count() == {FREE: 1, WRITING: 0, READY: 3, RESERVED: 0} and second.free_rows() == 1
    store(second, 1)
    assert sum(looked_up(second, number) is HIT for number in (1, 6, 7, 8, 9)) == 4


def test_a_damaged_row_is_not_free_while_it_is_read_or_may_be_written(node: Node):
    first, second, third = node.engine(), node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    (row,) = first.rows_of([key(1)])
    publish_late(node, first, second, lambda: second.prepare_store([key(number) for number in (6, 7, 8, 9)], CONTEXT))
    for tier in (second, third) * 2:
        sweep(node, tier)
    assert third._index.lost(third._place) == [row]
    second.complete_store([key(number) for number in (6, 7, 8, 9)], CONTEXT, True)
    assert not second.is_joined
    node.kill(second)
    sweep(node, third)
    third._index.pin([row], 40)
    for _ in range(4):
        sweep(node, third)
    assert third._index.lost(third._place) == [row]
    third._index.unpin([row], 40)
    sweep(node, third)
    assert third._index.count() == {FREE: 1, WRITING: 0, READY: 3, RESERVED: 0}
    assert [looked_up(third, number) for number in (6, 7, 8, 9)] == [HIT, HIT, HIT, MISS]


def test_a_damaged_row_that_the_engine_reads_itself_is_free_when_its_load_has_ended(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)

    def store_and_read() -> None:
        store(second, 6, 7, 8, 9)
        second.prepare_load([key(number) for number in (6, 7, 8, 9)], CONTEXT)

    publish_late(node, first, second, store_and_read)
    for _ in range(3):
        sweep(node, second)
    assert second._index.lost(second._place)
    second.complete_load([key(number) for number in (6, 7, 8, 9)], CONTEXT)
    sweep(node, second)
    assert second._index.count() == {FREE: 1, WRITING: 0, READY: 3, RESERVED: 0}
    assert not second._index._pin_array.any()


def test_a_free_row_that_was_published_late_is_counted_as_free_and_given_to_no_other_chunk_unseen(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    publish_late(node, first, second, lambda: None)
    assert second._index.free_rows == ROWS == second._index.count()[FREE] + 1
    store(second, 6, 7, 8, 9)
    assert [looked_up(second, number) for number in (1, 6, 7, 8, 9)] == [MISS, HIT, HIT, HIT, HIT]


def test_an_engine_whose_lease_is_removed_leaves_before_others_give_its_rows_away(node: Node, caplog):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    remove_lease(first)
    node.seconds += 0.9 * DEAD_ROWS_KEPT_MS / 1000
    second.sync()
    first.sync()
    assert not first.is_joined
    assert "lease" in caplog.text
    assert second.free_rows() == ROWS - 1


def test_what_an_engine_published_just_before_it_was_killed_is_seen_when_its_end_is(node: Node):
    first, second = node.engine(), node.engine()
    first.prepare_store([key(1)], CONTEXT)
    second.sync()
    first._index.counts = Mock(__getitem__=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        first.complete_store([key(1)], CONTEXT, True)
    assert looked_up(second, 1) is PENDING
    node.kill(first)
    node.seconds += 1
    assert looked_up(second, 1) is HIT


@pytest.mark.parametrize("used", [(0,), (0, 1, 2)])
def test_a_chunk_used_by_another_engine_outlives_those_behind_it(node: Node, used: tuple[int, ...]):
    first, second = node.engine(), node.engine()
    for number in range(4):
        node.seconds += 1
        store(first, number)
    node.seconds += 1
    second.sync()
    second.touch([key(number) for number in used], CONTEXT)
    store(first, 9)
    assert [number for number in range(4) if looked_up(first, number) is MISS] == [len(used)]


def test_a_store_for_which_rows_are_reserved_waits_for_no_lock_and_others_see_it(node: Node):
    first, second = node.engine(), node.engine()
    first._spare_rows = (2).__index__  # type: ignore[method-assign]
    store(first, 1)
    with node.lock_held():
        assert first.prepare_store([key(2), key(3)], CONTEXT) is not None
        assert looked_up(second, 2) is PENDING
        first.complete_store([key(2)], CONTEXT, True)
        assert looked_up(second, 2) is HIT
    first.complete_store([key(3)], CONTEXT, True)
    assert first.is_joined and looked_up(second, 3) is HIT
    assert (first.used_rows(), first.free_rows()) == (second.used_rows(), second.free_rows()) == (3, 1)


def end_by_kill(node: Node, tier: NodeRows) -> None:
    node.kill(tier)
    node.seconds += 1
    node.engines[0].sync()


def end_by_reset(_: Node, tier: NodeRows) -> None:
    tier.reset_cache()


def end_by_a_lost_lock(node: Node, tier: NodeRows) -> None:
    tier._leave("the lock was lost")
    node.seconds += 5
    tier.sync()


@pytest.mark.parametrize("end", [end_by_kill, end_by_reset, end_by_a_lost_lock])
def test_reserved_rows_are_one_engine_s_until_it_ends_or_resets_or_has_left(
    node: Node, end: Callable[[Node, NodeRows], None]
):
    other, tier = node.engine(), node.engine()
    tier._spare_rows = (2).__index__  # type: ignore[method-assign]
    store(tier, 1)
    assert other.free_rows() == 1
    other.sync()
    assert other.prepare_store([key(number) for number in (5, 6, 7)], CONTEXT) is None
    end(node, tier)
    node.seconds += 1
    other.sync()
    store(other, 5, 6, 7)
    assert looked_up(other, 7) is HIT


def test_a_reserve_that_cannot_be_had_keeps_no_store_from_its_rows(node: Node):
    tier = node.engine()
    tier._spare_rows = (2).__index__  # type: ignore[method-assign]
    store(tier, 1, 2, 3)
    assert tier.prepare_load([key(1), key(2)], CONTEXT)
    store(tier, 4, 5)
    assert [looked_up(tier, number) for number in (3, 4, 5)] == [MISS, HIT, HIT]


def test_a_chunk_that_two_engines_claim_at_the_same_moment_has_two_rows_and_both_may_leave(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    first, second = node.engine(), node.engine()
    claim = first._index.claim

    def claim_behind_another(*given: Any, **named: Any) -> object:
        monkeypatch.undo()
        store(second, 1)
        return claim(*given, **named)

    monkeypatch.setattr(first._index, "claim", claim_behind_another)
    store(first, 1)
    assert looked_up(first, 1) is looked_up(second, 1) is HIT
    assert first.rows_of([key(1)]) != second.rows_of([key(1)])
    for tier, numbers in ((first, (2, 3)), (second, (4, 5)), (first, (6, 7, 8, 9))):
        node.seconds += 1
        tier.sync()
        store(tier, *numbers)
    assert [looked_up(node.engine(), number) for number in range(6, 10)] == [HIT] * 4
