"""What the scheduler's process gets: the CPU tier's rows, and the shared tiers that fill them."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.kv_layout import write_layout
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.memory import mapped_bytes

ROWS, ROW_BYTES = 3, 3 << 20
LAYOUT = {"layers": ["as a worker registered them"]}


class _Tier(SecondaryTierManager):
    def __init__(self) -> None:
        self.tier_type = "any"

    def lookup(self, key, req_context):
        return False

    def submit_store(self, job_metadata):
        pass

    def submit_load(self, job_metadata):
        pass

    def get_finished_jobs(self):
        return []

    def on_new_request(self, req_context):
        return RequestOffloadingContext()


@pytest.fixture
def region():
    region = HostRegion(region_path(f"test-spec-{os.getpid()}"), ROWS, ROW_BYTES)
    yield region
    region.cleanup()


def make_spec(region: HostRegion, tiers: int) -> SimpleNamespace:
    if tiers:
        write_layout(region.create_kv_memoryview().cast("B"), 0, ROW_BYTES, LAYOUT)
    return SimpleNamespace(
        _manager=None,
        _layouts=[],
        _open_region=lambda: region,
        _create_tier=lambda config, view: _Tier(),
        vllm_config=SimpleNamespace(kv_events_config=None),
        num_blocks=ROWS,
        eviction_policy="lru",
        secondary_tier_configs=[{}] * tiers,
        config=ConnectorConfig.parse({"num_cpu_blocks": ROWS}),
        gpu_block_size=(128,),
        geometry=ChunkGeometry(rank_block_bytes=ROW_BYTES, blocks_per_chunk=1, num_ranks=1),
    )


def make_manager(region: HostRegion, tiers: int):
    return SpillwayOffloadingSpec.get_manager(make_spec(region, tiers))


def test_a_shared_tiers_first_load_meets_no_page_faults(region: HostRegion):
    make_manager(region, tiers=1)
    deadline = time.monotonic() + 60
    while mapped_bytes(region.address) < region.size_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_without_a_shared_tier_this_process_touches_no_row(region: HostRegion):
    make_manager(region, tiers=0)
    assert region._populating is None
    assert mapped_bytes(region.address) == 0


def test_a_shared_tier_hears_how_the_workers_registered_their_caches(region: HostRegion):
    spec = make_spec(region, tiers=1)
    SpillwayOffloadingSpec.get_manager(spec)
    assert spec._layouts == [LAYOUT]
