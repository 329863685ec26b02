"""Duties of a manager that came with vLLM 0.30: to tell where a hit came from, and to keep part of a failed job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.stock.tiers import SpillwayNvmeTier, SpillwayRedisTier
from spillway_connector.engine.v030 import tier_adapter, tiering
from spillway_connector.testing.generation import STEP_END, SpillwayTieringManager, make_cpu_tier
from spillway_connector.testing.memory import unnamed_region

ROWS = 8
KEYS = [bytes([number]) * 36 for number in range(3)]
ASKING, LATER = ReqContext(req_id="asking"), ReqContext(req_id="later")
needs_sources = pytest.mark.skipif(tiering.HOST_SOURCE is None, reason="vLLM 0.30 does not ask where a hit came from")


class StorageTier(SecondaryTierManager):
    """One of vLLM's: it holds every chunk, and ends each load as the test sets it."""

    medium = Medium.STORAGE

    def __init__(self) -> None:
        self.tier_type, self.locality = "storage", None
        self.loads: list[TransferJob] = []
        self.results: list[JobResult] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.results.append(JobResult(job_metadata.job_id, success=True))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.loads.append(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended, self.results = self.results, []
        return ended

    def drain_jobs(self) -> None: ...

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()


@pytest.fixture
def tier() -> StorageTier:
    return StorageTier()


@pytest.fixture
def manager(tier: StorageTier) -> Iterator[Any]:
    region = unnamed_region(ROWS, 4096)
    config = ConnectorConfig.parse({"num_cpu_blocks": ROWS, "promotion_in_flight_fraction": 1.0})
    primary = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    manager = SpillwayTieringManager(primary, [tier], ROWS, config, chunk_tokens=16, chunk_bytes=4096)
    for context in (ASKING, LATER):
        manager.on_new_request(context)
    yield manager
    region.cleanup()


def promote(manager: Any, tier: StorageTier, **result: Any) -> list[LookupResult]:
    """The answers to one request once the load of all KEYS has ended so."""
    for key in KEYS:
        assert manager.lookup(key, ASKING) is LookupResult.HIT_PENDING
    manager.on_schedule_end(*STEP_END)
    tier.results = [JobResult(job.job_id, **result) for job in tier.loads]
    manager.on_schedule_end(*STEP_END)
    return [manager.primary_tier.lookup(key, ASKING) for key in KEYS]


HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.mark.parametrize(
    ("good", "answers"),
    [(None, [MISS, MISS, MISS]), ((), [MISS, MISS, MISS]), ((0, 2), [HIT, MISS, HIT]), ((0, 1, 2), [HIT, HIT, HIT])],
)
def test_a_failed_job_keeps_the_chunks_that_its_tier_names(
    manager: Any, tier: StorageTier, good: tuple[int, ...] | None, answers: list[LookupResult]
) -> None:
    named = None if good is None else tuple(KEYS[at] for at in good)
    assert promote(manager, tier, success=False, successful_keys=named) == answers
    assert manager.primary_tier.used_rows() == answers.count(HIT)


def test_a_job_that_succeeds_keeps_all(manager: Any, tier: StorageTier) -> None:
    assert promote(manager, tier, success=True) == [HIT, HIT, HIT]


@needs_sources
def test_a_hit_is_of_the_tier_it_was_promoted_from_and_later_of_the_cpu_tier(manager: Any, tier: StorageTier) -> None:
    promote(manager, tier, success=True)
    assert {manager.get_load_source(key, ASKING).value for key in KEYS} == {"disk"}
    assert {manager.get_load_source(key, LATER).value for key in KEYS} == {"host"}


@needs_sources
@pytest.mark.parametrize("end", ["request", "reset"])
def test_nothing_is_kept_of_requests_that_are_gone(manager: Any, tier: StorageTier, end: str) -> None:
    promote(manager, tier, success=True)
    manager.on_request_finished(ASKING) if end == "request" else manager.reset_cache()
    assert manager._load_sources == {}


@needs_sources
def test_a_remote_store_is_no_disk() -> None:
    assert tier_adapter.SharedTierAdapter.cache_hit_source.value == SpillwayNvmeTier.cache_hit_source.value == "disk"
    for remote in (tier_adapter.RemoteTierAdapter, SpillwayRedisTier):
        assert remote.cache_hit_source.value == "external_unspecified"


def test_each_short_name_leads_to_its_adapter() -> None:
    tier_adapter.register_tiers()
    for name, adapter in (("nvme", tier_adapter.SharedTierAdapter), ("redis", tier_adapter.RemoteTierAdapter)):
        assert SecondaryTierFactory._registry[name]() is adapter
