"""Spillway's classes in the tests of vLLM 0.23."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import LoadStoreSpec

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import HostCopier
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.engine.v023 import connector
from spillway_connector.engine.v023.cpu_tier import ArcCpuTier
from spillway_connector.engine.v023.handlers import CopyHandler
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.stats import SpillwayStats
from spillway_connector.engine.v023.tier_adapter import SharedTierAdapter
from spillway_connector.engine.v023.tiering import SpillwayTieringManager
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker.copy_jobs import Sides
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.generation import make_cpu_tier, patch_vllm
from spillway_connector.testing.memory import unnamed_region
from upstream.mock_manager import answering_prefixes
from upstream.substitution import Substitutes

_ROW_BYTES = 4096


class _NoMemory:
    """The part of a region that a CPU tier touches without copying anything."""

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(_ROW_BYTES)).cast("b", (1, _ROW_BYTES))


def cpu_tier(num_blocks: int, cache_policy: str = "lru", enable_events: bool = False, **_: Any) -> Any:
    """Substitute for CPUOffloadingManager."""
    return make_cpu_tier(num_blocks, _NoMemory(), cache_policy, enable_events)  # type: ignore[arg-type]


def primary_tier(num_blocks: int, mmap_region: Any, **_: Any) -> ArcCpuTier:
    """Substitute for CPUPrimaryTierOffloadingManager: ARC, whose rows vLLM's tests can look at, as they are vLLM's."""
    return ArcCpuTier(num_blocks, mmap_region)


def tiering_manager(primary_tier: Any, secondary_tiers: list[Any]) -> SpillwayTieringManager:
    """Substitute for TieringOffloadingManager, with room for as many promotions as vLLM would make."""
    config = ConnectorConfig.parse(
        {
            "num_cpu_blocks": 5,
            "promotion_in_flight_fraction": 1.0,
            "promotion_per_request_fraction": 1.0,
        }
    )
    return SpillwayTieringManager(primary_tier, secondary_tiers, 5, config, chunk_tokens=16, chunk_bytes=_ROW_BYTES)


class NvmeTier(SharedTierAdapter):
    """Substitute for FileSystemTierManager. Lookups are asked again until the tier has answered, as the scheduler
    does."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, root_dir: str, **_: Any
    ) -> None:
        rows = primary_kv_view.cast("B")
        row_bytes = rows.nbytes // primary_kv_view.shape[0]
        rows.release()
        spec = SimpleNamespace(
            geometry=SimpleNamespace(payload_bytes=row_bytes, row_bytes=row_bytes),
            namespace=Namespace.of({"model": "upstream"}),
            announces_blocks=False,
        )
        super().__init__(spec, primary_kv_view, "nvme", path=root_dir, mode="files")  # type: ignore[arg-type]

    def lookup(self, key: Any, req_context: Any) -> bool | None:
        deadline = time.monotonic() + 30.0
        while (answer := super().lookup(key, req_context)) is None and time.monotonic() < deadline:
            self.on_schedule_end()
            time.sleep(0.001)
        return answer

    def get_finished_jobs(self) -> Any:
        """vLLM's tests stop asking after 50 ms without an end."""
        deadline = time.monotonic() + 10.0
        while not (ended := list(super().get_finished_jobs())) and self._shared.has_work():
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return ended


class Handlers:
    """Substitute for CpuGpuOffloadingHandlers: both directions, on host memory."""

    def __init__(self, kv_caches: Any, block_size_factor: int, num_cpu_blocks: int, mmap_region: Any = None) -> None:
        page_bytes = sum(cache.page_size_bytes for cache in kv_caches.tensors)
        geometry = ChunkGeometry(rank_block_bytes=page_bytes, blocks_per_chunk=block_size_factor, num_ranks=1)
        region = unnamed_region(num_cpu_blocks, geometry.row_bytes)
        layout = copy_layout(kv_caches, region, geometry, rank=0)
        rows = torch.frombuffer(region._mapping, dtype=torch.int8).view(num_cpu_blocks, geometry.row_bytes)
        offsets = [
            block_size_factor * sum(cache.page_size_bytes for cache in kv_caches.tensors[:index])
            for index in range(len(kv_caches.tensors))
        ]
        host = [
            rows[:, start : start + block_size_factor * cache.page_size_bytes]
            for start, cache in zip(offsets, kv_caches.tensors, strict=True)
        ]
        device = [cache.tensor for cache in kv_caches.tensors]
        self.gpu_to_cpu_handler = Handler(Direction.STORE, layout, device, host, kv_caches.group_data_refs)
        self.cpu_to_gpu_handler = Handler(Direction.LOAD, layout, host, device, kv_caches.group_data_refs)


class Handler(CopyHandler):
    """Spillway's handler, with the tensors beside it that vLLM's test fills and compares."""

    def __init__(
        self, direction: Direction, layout: Any, source: list[Any], target: list[Any], groups: list[Any]
    ) -> None:
        super().__init__(direction, layout, HostCopier(direction))
        self.src_tensors, self.dst_tensors, self.kv_cache_groups_data_refs = source, target, groups
        self._transfers: list[Any] = []

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> bool:
        self._transfers.append(SimpleNamespace(job_id=job_id))
        return super().transfer_async(job_id, spec)


class StubbedScheduler(SpillwayConnectorScheduler):
    """vLLM's tests replace `_maximal_prefix_lookup`, which Spillway calls only for models with several KV groups."""

    def _lookup(self, req_status: Any, max_num_new_tokens: int | None = None) -> int | None:
        if "_maximal_prefix_lookup" in vars(self):
            return self._look_up_groups(req_status, max_num_new_tokens)
        return super()._lookup(req_status, max_num_new_tokens)


class SingleStores(SpillwayConnectorWorker):
    """vLLM's tests end each store alone, and their handler takes no others."""

    def _store(self, copy_id: int, stores: Sequence[Sides]) -> bool:
        return len(stores) == 1 and bool(self.worker.transfer_async(copy_id, stores[0]))


def spillway_connector(original: Any) -> Any:
    """Substitute for OffloadingConnector."""
    connector.SpillwayConnectorScheduler = StubbedScheduler  # type: ignore[misc]
    connector.SpillwayConnectorWorker = SingleStores  # type: ignore[misc]
    return connector.SpillwayConnector


def transfer_config(original: Any) -> Any:
    """vLLM's connector, asked for by name, becomes Spillway's, which insists on its failure policy."""

    def make(**options: Any) -> Any:
        if options.get("kv_connector") == "OffloadingConnector":
            options |= {
                "kv_connector": "SpillwayConnector",
                "kv_connector_module_path": "spillway_connector.engine.connector",
                "kv_load_failure_policy": "recompute",
            }
        return original(**options)

    return make


def mock_spec(original: Any) -> Any:
    class MockOffloadingSpec(original):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            answering_prefixes(self.manager, True, False)

    return MockOffloadingSpec


def scheduler_with_lookup(original: Any) -> Any:
    """`object.__new__` of the class in the module's globals, with a mocked manager."""

    def make(results: Any) -> Any:
        scheduler = original(results)
        answering_prefixes(scheduler.manager, True, False)
        return scheduler

    return make


def patched_scheduler(original: Any) -> Any:
    """vLLM's scheduler as Spillway patches it in each engine."""
    patch_vllm("failed-loads", "group-hits")
    return original


def _instead(ours: Any) -> Any:
    return lambda theirs: ours


_CONNECTOR = "kv_connector/unit/offloading_connector"

SUBSTITUTES: Substitutes = {
    "kv_offload/cpu/test_manager.py": {"CPUOffloadingManager": _instead(cpu_tier)},
    "kv_offload/cpu/test_gpu_worker.py": {"CpuGpuOffloadingHandlers": _instead(Handlers)},
    "kv_offload/tiering/test_tiering_offloading.py": {
        "CPUPrimaryTierOffloadingManager": _instead(primary_tier),
        "TieringOffloadingManager": _instead(tiering_manager),
    },
    "kv_offload/tiering/test_fs_tier.py": {"FileSystemTierManager": _instead(NvmeTier)},
    f"{_CONNECTOR}/utils.py": {
        "OffloadingConnector": spillway_connector,
        "KVTransferConfig": transfer_config,
        "MockOffloadingSpec": mock_spec,
    },
    f"{_CONNECTOR}/test_scheduler.py": {"_make_scheduler_with_lookup": scheduler_with_lookup},
    f"{_CONNECTOR}/test_metrics.py": {
        "OffloadingConnector": spillway_connector,
        "OffloadingConnectorStats": _instead(SpillwayStats),
    },
    f"{_CONNECTOR}/test_worker_metadata.py": {"OffloadingWorkerMetadata": _instead(SpillwayWorkerMetadata)},
    "kv_connector/unit/test_kv_load_failure_recovery.py": {"create_scheduler": patched_scheduler},
    "kv_connector/unit/test_invalid_blocks_correctness.py": {"create_scheduler": patched_scheduler},
    "kv_connector/unit/test_error_propagation.py": {"create_scheduler": patched_scheduler},
}
