"""Resets while copies are under way: chunks are dropped at once, rows are released when their jobs end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.outputs import KVConnectorOutput

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.manager.early_loads import EarlyLoad
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, TierJobResult
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import (
    SpillwayTieringManager,
    copy_of,
    make_cpu_tier,
    rows_on_the_way,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import allocated, new_request, request_of
from spillway_connector.transfer.lookups import Answers, Lookup

ROWS, BLOCKS, BLOCK_TOKENS, RANKS = 8, 4, 16, 2
TOKENS = BLOCKS * BLOCK_TOKENS
CONTEXT = ReqContext(req_id="r")


def key(number: int) -> bytes:
    return bytes([number]) * 36


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = unnamed_region(ROWS, 4096)
    yield region
    region.cleanup()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_a_reset_drops_is_announced_once(region: HostRegion, policy: str):
    """A gateway would go on believing in those chunks otherwise. No event announced a chunk that was never ready."""
    tier = make_cpu_tier(ROWS, region, policy, enable_events=True)
    tier.on_new_request(CONTEXT)
    ready, written = [key(1), key(2)], [key(3)]
    assert tier.prepare_store(ready, CONTEXT) is not None
    tier.complete_store(ready, CONTEXT)
    assert tier.prepare_store(written, CONTEXT) is not None
    (stored,) = tier.take_events()
    tier.reset_cache()
    (removed,) = tier.take_events()
    assert removed.removed and (set(removed.keys), removed.medium) == (set(ready), stored.medium)
    tier.reset_cache()
    assert list(tier.take_events()) == []


def test_without_events_a_reset_keeps_none(region: HostRegion):
    tier = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    assert tier.prepare_store([key(1)], CONTEXT) is not None
    tier.complete_store([key(1)], CONTEXT)
    tier.reset_cache()
    assert list(tier.take_events()) == []


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(20))
def test_no_row_is_handed_out_while_a_job_may_use_it(region: HostRegion, policy: str, seed: int):
    """Random jobs on either side of resets; each has its chunks, and once these are dropped its rows."""
    dice = random.Random(seed)
    tier = make_cpu_tier(ROWS, region, policy, enable_events=False)
    jobs: list[tuple[bool, list[bytes], list[int]]] = []  # a store?, chunks, rows
    dropped: list[list[int]] = []  # rows of jobs

    def in_use() -> Counter[int]:
        return Counter(row for rows in [*(rows for _, _, rows in jobs), *dropped] for row in rows)

    for _ in range(300):
        action = dice.choice(["store", "store", "load", "end", "end", "end dropped", "reset"])
        keys = [key(number) for number in dice.sample(range(12), dice.randint(1, 4))]
        if action == "store":
            busy = in_use()
            output = tier.prepare_store(keys, CONTEXT)
            if output is not None and output.keys_to_store:
                rows = output.store_spec.block_ids.tolist()
                assert not set(rows) & set(busy), "a row was handed out while a job may use it"
                jobs.append((True, list(output.keys_to_store), rows))
        elif action == "load":
            ready = [one for one in keys if one in tier.ready]
            if ready:
                jobs.append((False, ready, tier.prepare_load(ready, CONTEXT).block_ids.tolist()))
        elif action == "end" and jobs:
            is_store, chunks, _ = jobs.pop(dice.randrange(len(jobs)))
            if is_store:
                tier.complete_store(chunks, CONTEXT, dice.random() < 0.8)
            else:
                tier.complete_load(chunks, CONTEXT)
        elif action == "end dropped" and dropped:
            tier.release(dropped.pop(dice.randrange(len(dropped))))
        elif action == "reset" and dice.random() < 0.3:
            assert [tier.rows_of(chunks) for _, chunks, _ in jobs] == [rows for *_, rows in jobs]
            tier.reset_cache()
            dropped += [rows for *_, rows in jobs]
            jobs.clear()
            assert not tier.resident and not tier.ready
            assert tier.quarantine == in_use()
    for rows in dropped:
        tier.release(rows)
    tier.reset_cache()
    for *_, rows in jobs:
        tier.release(rows)
    output = tier.prepare_store([key(100 + number) for number in range(ROWS)], CONTEXT)
    assert output is not None
    assert sorted(output.store_spec.block_ids.tolist()) == list(range(ROWS))


def test_a_row_that_no_job_uses_cannot_be_released(region: HostRegion):
    tier = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    tier.prepare_store([key(1)], CONTEXT)
    tier.reset_cache()
    tier.release([0])
    with pytest.raises(AssertionError, match="more often"):
        tier.release([0])


class HeldTier(PrefixTier):
    """Holds the keys in `holds`; its jobs end when the test chooses."""

    def __init__(self) -> None:
        self.tier_type = "held"
        self.answered_requests = ChangeLog()
        self.holds: set[bytes] = set()
        self.loads: list[Any] = []
        self.stores: list[Any] = []
        self.arrived: list[tuple[int, list[bytes]]] = []
        self.ended: list[TierJobResult] = []

    @property
    def open(self) -> bool:
        return True

    def lookup(self, key: bytes, req_context: ReqContext) -> bool:
        return key in self.holds

    def lookup_prefix(self, keys: Any, req_context: ReqContext) -> Answers:
        there = next((at for at, key in enumerate(keys) if key not in self.holds), len(keys))
        return Answers([Lookup.HIT] * there + [Lookup.MISS] * (there < len(keys)), float("inf"))

    def submit_store(self, job_metadata: Any) -> None:
        self.stores.append(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self.loads.append(job_metadata)

    def take_arrived(self) -> list[tuple[int, list[bytes]]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def get_finished_jobs(self) -> list[TierJobResult]:
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def end(self, jobs: list[Any]) -> None:
        self.ended.append(TierJobResult(jobs.pop(0).job_id, success=True, seconds=0.1))


class Rig:
    """The scheduler half for two ranks, over a CPU tier of eight rows and a tier that waits for the test."""

    def __init__(self, region: HostRegion) -> None:
        self.tier = HeldTier()
        options = {"num_cpu_blocks": ROWS, "prefill_tokens_per_second": 1.0}
        options |= {"promotion_in_flight_fraction": 1.0, "promotion_per_request_fraction": 1.0}
        self.manager = SpillwayTieringManager(
            make_cpu_tier(ROWS, region, "lru", enable_events=False),
            [self.tier],
            ROWS,
            ConnectorConfig.parse(options),
            chunk_tokens=BLOCK_TOKENS,
            chunk_bytes=4096,
            clock=SteppedClock(),
        )
        self.manager._gates[self.tier].load_rate.add(1e9, 1.0, 0.0)
        attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.half = scheduler_half(self.manager, [attention], num_ranks=RANKS)
        self.pool = BlockPool(64, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.half.device_blocks = self.pool

    @property
    def cpu_tier(self) -> Any:
        return self.manager.primary_tier

    def request(self, name: str, prompt: int) -> Any:
        request = request_of(
            name, [bytes([prompt, number]) * 16 for number in range(BLOCKS)], tokens=TOKENS, block_tokens=BLOCK_TOKENS
        )
        self.half.on_new_request(request)
        return request

    def step(self, **new: list[int]) -> Any:
        """new: device blocks of requests that are computed whole."""
        requests = [new_request(name, ids) for name, ids in new.items()]
        return self.half.build_connector_meta(step_output(dict.fromkeys(new, TOKENS), requests))

    def begin_store(self, name: str, prompt: int) -> tuple[int, list[int]]:
        """The job and its rows."""
        assert self.half.get_num_new_matched_tokens(self.request(name, prompt), 0) == (0, False)
        ((job_id, job),) = self.step(**{name: [1, 2, 3, 4]}).store_jobs.items()
        return job_id, copy_of(job)[1].block_ids.tolist()

    def begin_load(self, name: str, prompt: int) -> tuple[int, list[int]]:
        request = self.request(name, prompt)
        assert self.half.get_num_new_matched_tokens(request, 0) == (TOKENS, True)
        self.half.update_state_after_alloc(request, allocated([5, 6, 7, 8]), TOKENS)
        ((job_id, job),) = self.step().load_jobs.items()
        return job_id, copy_of(job)[0].block_ids.tolist()

    def report(self, job_id: int, ranks: int = RANKS, failed: bool = False) -> None:
        meta = SpillwayWorkerMetadata(completed_jobs={job_id: ranks}, failed_jobs={job_id} if failed else set())
        self.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def stored(self, prompt: int) -> None:
        job, _ = self.begin_store(f"writer of {prompt}", prompt)
        self.report(job)
        self.tier.end(self.tier.stores)
        self.step()

    def resets(self) -> dict[str, float]:
        stats = self.manager.take_samples()
        samples = {} if stats is None else stats.samples()
        return {one: samples.get(sample_key(metrics.CPU_TIER_RESETS, one), 0) for one in ("done", "refused")}


@pytest.fixture
def rig(region: HostRegion) -> Rig:
    return Rig(region)


def test_the_rows_of_a_store_are_released_when_every_rank_has_ended_it(rig: Rig):
    job, rows = rig.begin_store("old", 1)
    assert rig.half.reset_with_device()
    assert rig.cpu_tier.quarantine == Counter(rows)
    assert rig.step().jobs_to_flush == {job}
    rig.tier.holds = {bytes([2, number]) * 16 + bytes(4) for number in range(BLOCKS)}
    assert rig.half.get_num_new_matched_tokens(rig.request("reader", 2), 0) == (None, False)
    assert set(rows_on_the_way(rig.tier.loads[0])).isdisjoint(rows), "a promotion into a row of the old store"
    rig.report(job, ranks=1)
    assert rig.cpu_tier.quarantine == Counter(rows), "the other rank may still write them"
    rig.report(job, ranks=1, failed=True)
    assert not rig.cpu_tier.quarantine and not rig.half._reset_jobs and not rig.half._failed_jobs


def test_the_rows_of_a_load_are_released_when_every_rank_has_ended_it(rig: Rig):
    rig.stored(1)
    job, rows = rig.begin_load("loading", 1)
    rig.half.weights_changing("the test")
    assert rig.cpu_tier.quarantine == Counter(rows)
    rig.report(job, ranks=1)
    assert rig.cpu_tier.quarantine == Counter(rows)
    rig.report(job, ranks=1)
    assert not rig.cpu_tier.quarantine


def test_the_rows_of_a_promotion_and_of_a_cascade_are_released_when_the_tier_has_ended_them(rig: Rig):
    job, cascaded = rig.begin_store("writer", 1)
    rig.report(job)
    keys = [bytes([2, number]) * 16 + bytes(4) for number in range(BLOCKS)]
    rig.tier.holds = set(keys)
    rig.half.get_num_new_matched_tokens(rig.request("reader", 2), 0)
    promoted = rows_on_the_way(rig.tier.loads[0])
    assert rig.half.reset_with_device()
    assert rig.cpu_tier.quarantine == Counter(cascaded + promoted)
    assert not rig.cpu_tier.resident
    rig.tier.arrived.append((rig.tier.loads[0].job_id, keys[:2]))  # of chunks that are dropped
    rig.step()
    assert not rig.cpu_tier.resident
    rig.tier.end(rig.tier.stores)
    rig.step()
    assert rig.cpu_tier.quarantine == Counter(promoted)
    rig.tier.end(rig.tier.loads)
    rig.step()
    assert not rig.cpu_tier.quarantine and not rig.cpu_tier.resident
    assert not rig.manager._bounds.rows_in_flight and not rig.manager._reset_rows


def test_a_second_reset_before_the_workers_have_heard_of_the_first(rig: Rig):
    first, rows = rig.begin_store("first", 1)
    assert rig.half.reset_with_device()
    assert rig.half.reset_with_device()
    assert rig.cpu_tier.quarantine == Counter(rows)
    assert rig.step().jobs_to_flush == {first}
    rig.report(first)
    assert not rig.cpu_tier.quarantine


def test_what_an_early_load_has_not_loaded_stays_lost_however_often_it_is_given_up():
    load = EarlyLoad(CONTEXT, [key(number) for number in range(4)], [10, 11, 12, 13], 0)
    ready = {key(0)}
    assert load.due(ready, {key(number) for number in range(4)}).ready == [0]
    load.abandon(needed=True)
    load.abandon(needed=True)
    due = load.due(set(), set())
    assert (due.ready, sorted(due.lost), due.last) == ([], [1, 2, 3], True)


def test_a_reset_that_the_device_refuses_changes_nothing(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.stored(1)
    job, _ = rig.begin_store("running", 2)
    in_use = rig.pool.get_new_blocks(4)
    resident, ready, jobs = dict(rig.cpu_tier._rows), set(rig.cpu_tier.ready), dict(rig.half._jobs)
    rig.manager.take_samples()
    assert rig.half.reset_with_device() is False
    assert (dict(rig.cpu_tier._rows), rig.cpu_tier.ready, rig.half._jobs) == (resident, ready, jobs)
    assert not rig.cpu_tier.quarantine
    assert rig.resets() == {"done": 0, "refused": 1}
    assert "4 blocks are in use" in caplog.text
    rig.report(job)
    rig.pool.free_blocks(in_use)
    assert rig.half.reset_with_device() is True
    assert rig.resets() == {"done": 1, "refused": 0}


def test_requests_pass_again_when_the_load_that_they_made_way_for_has_failed(rig: Rig):
    """Nothing runs, nothing is copied, and a request whose whole load failed asks like all the others."""
    rig.stored(1)
    job, _ = rig.begin_load("loading", 1)
    rig.report(job, failed=True)
    rig.step()
    assert rig.half._gridlock
    assert rig.half.get_num_new_matched_tokens(rig.half._req_status["loading"].req, 0) == (None, False)
    rig.step()
    assert rig.half.get_num_new_matched_tokens(rig.half._req_status["loading"].req, 0) == (0, False)
