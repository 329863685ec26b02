"""The spec in the scheduler's process: the CPU tier's rows, and the shared tiers that fill them."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.device.cpu import HostCopier
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine import spec_base
from spillway_connector.engine.ipc.samples import Samples, sample_key
from spillway_connector.engine.layouts.kv_layout import write_layout
from spillway_connector.engine.layouts.packed_blocks import NOT_KNOWN_HERE
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.engine.worker.transports import OpenTransport
from spillway_connector.errors import ConfigError, WeightsUnknown
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.generation import scheduler_half
from spillway_connector.testing.memory import mapped_bytes

ROWS, ROW_BYTES = 3, 3 << 20
SHAPE = {
    "region_id": "unused",
    "rank_block_bytes": ROW_BYTES,
    "num_ranks": 1,
    "num_stages": 1,
    "ranks_hold_the_same": False,
    "tokens_per_block": 128,
    "tokens_per_hash": 128,
    "enable_events": False,
}
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

    def drain_jobs(self):
        pass

    def on_new_request(self, req_context):
        return RequestOffloadingContext()


@pytest.fixture
def region():
    region = HostRegion(region_path(f"test-spec-{os.getpid()}"), ROWS, ROW_BYTES)
    yield region
    region.cleanup()


class _Spec(SpillwayOffloadingSpec):
    """The spec of this vLLM's generation, without the engine that vLLM's constructor reads."""

    def __init__(self, region: HostRegion, tiers: int, **settings: object) -> None:
        self.extra_config = {"num_cpu_blocks": ROWS, "secondary_tiers": [{}] * tiers, **settings}
        self._begin(**SHAPE)
        self._region_of_test = region

    def _open_region(self) -> HostRegion:
        return self._region_of_test

    def _create_tier(self, config, view) -> SecondaryTierManager:
        return _Tier()


def make_spec(region: HostRegion, tiers: int, **settings: object) -> _Spec:
    if tiers:
        write_layout(region.create_kv_memoryview().cast("B"), 0, ROW_BYTES, LAYOUT)
    return _Spec(region, tiers, **settings)


def test_a_shared_tiers_first_load_meets_no_page_faults(region: HostRegion):
    make_spec(region, tiers=1).get_manager()
    deadline = time.monotonic() + 60
    while mapped_bytes(region.address) < region.size_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_without_a_shared_tier_this_process_touches_no_row(region: HostRegion):
    make_spec(region, tiers=0).get_manager()
    assert region._populating is None
    assert mapped_bytes(region.address) == 0


def test_an_engine_whose_weights_are_unknown_serves_without_its_shared_tiers(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    spec = make_spec(region, tiers=2)
    built: list[_Tier] = []
    ended: list[_Tier] = []

    def create(config: object, view: memoryview) -> SecondaryTierManager:
        if built:
            raise WeightsUnknown("model 'm': its folder holds no file of weights")
        built.append(_Tier())
        monkeypatch.setattr(built[0], "shutdown", lambda: ended.append(built[0]))
        return built[0]

    monkeypatch.setattr(spec, "_create_tier", create)
    manager = spec.get_manager()
    assert manager.secondary_tiers == []
    assert ended == built
    assert spec.not_shared == "model 'm': its folder holds no file of weights"
    assert "serves without its shared tiers: model 'm'" in caplog.text


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("storing", ["auto", "late", "eager"])
def test_storing_auto_may_wait_for_the_device_with_and_without_a_shared_tier(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch, is_known: bool, storing: str
):
    spec = make_spec(region, tiers=1, storing=storing)

    def create(config: object, view: memoryview) -> SecondaryTierManager:
        if not is_known:
            raise WeightsUnknown("model 'm': its folder holds no file of weights")
        return _Tier()

    monkeypatch.setattr(spec, "_create_tier", create)
    attention = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    half = scheduler_half(spec.get_manager(), [attention], settings=spec.settings)
    assert half.settings()["storing"] == storing
    assert (half.late_stores is None) == (storing == "eager")


def test_a_shared_tier_hears_how_the_workers_registered_their_caches(region: HostRegion):
    spec = make_spec(region, tiers=1)
    spec.get_manager()
    assert spec._layouts == [LAYOUT]


def test_generated_tokens_are_stored_unless_turned_off(region: HostRegion):
    spec = make_spec(region, tiers=0)
    assert not spec.offload_prompt_only
    spec.extra_config["generated_tokens"] = "off"
    spec._begin(**SHAPE)
    assert spec.offload_prompt_only


def test_every_call_gives_the_same_manager(region: HostRegion):
    spec = make_spec(region, tiers=0)
    assert spec.get_manager() is spec.get_manager()


def test_tiers_that_are_no_list_are_refused_by_name():
    spec = object.__new__(_Spec)
    spec.extra_config = {"num_cpu_blocks": ROWS, "secondary_tiers": {"type": "nvme"}}
    with pytest.raises(ConfigError, match=r"secondary_tiers: .* is not a list of tiers"):
        spec._begin(**SHAPE)


@pytest.mark.parametrize("several_nodes", [True, False])
def test_a_worker_takes_its_own_pages_first_where_there_are_several_memory_nodes(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch, several_nodes: bool
):
    spec = make_spec(region, tiers=0)
    spec.geometry = ChunkGeometry(ROW_BYTES // 3, 1, 3)
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(spec_base, "has_several_memory_nodes", lambda: several_nodes)
    monkeypatch.setattr(spec_base, "copy_layout", lambda *_: None)
    monkeypatch.setattr(spec, "_open_transport", lambda _: OpenTransport(HostCopier))
    monkeypatch.setattr(region, "claim", lambda *piece: taken.append(piece))
    monkeypatch.setattr(region, "claim_rest", lambda patience_seconds=5.0: taken.append((-1, patience_seconds)))
    spec._open_worker(None, rank=1)
    own = [(ROW_BYTES // 3, ROW_BYTES // 3), (-1, 5.0)]
    assert taken == (own if several_nodes else [(-1, 0)])
    said = Samples()
    assert spec.process_settings is not None
    spec.process_settings.add_to(said)
    rows = sample_key(metrics.PROCESS_SETTING, "worker-1", "cpu_blocks", str(region.num_rows))
    assert said.samples()[rows] == 1


def test_computing_while_loading_is_refused_in_a_pipeline():
    spec = _Spec.__new__(_Spec)
    spec.extra_config = {"num_cpu_blocks": ROWS, "compute_while_loading": "on"}
    with pytest.raises(
        ConfigError, match=r"compute_while_loading: 'on' takes requests out .* the 2 stages .* to 'off'"
    ):
        spec._begin(**SHAPE | {"num_ranks": 2, "num_stages": 2})
    spec._begin(**SHAPE)  # one stage has one step under way


def test_the_schedulers_process_cuts_rows_as_the_worker_does(monkeypatch: pytest.MonkeyPatch):
    """Only workers know how large the blocks of a packed model are."""
    region = f"test-spec-blocks-{os.getpid()}"
    monkeypatch.setattr(_Spec, "_open_region", SpillwayOffloadingSpec._open_region)
    monkeypatch.setattr(_Spec, "_open_transport", lambda _, __: SimpleNamespace())
    monkeypatch.setattr(spec_base, "transport_name", lambda _: "cpu")
    monkeypatch.setattr(spec_base, "copy_path", lambda _: "loop")

    def spec(rank_block_bytes: int) -> _Spec:
        monkeypatch.setitem(SHAPE, "rank_block_bytes", rank_block_bytes)
        monkeypatch.setitem(SHAPE, "region_id", region)
        return _Spec(None, 0)

    worker = spec(5000)
    worker.note_layout(LAYOUT)
    pages = torch.zeros((2, 5000), dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(pages, 5000)], [[CanonicalKVCacheRef(0, 5000)]])
    worker._open_worker(caches, 0)
    try:
        scheduler = spec(NOT_KNOWN_HERE)
        assert scheduler.geometry == worker.geometry
        assert scheduler.num_rows == worker.num_rows
    finally:
        worker._region.cleanup()
