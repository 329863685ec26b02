"""Spillway's classes in the tests of vLLM 0.32."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, RequestOffloadingContext, ScheduleEndContext

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.stock import tiers
from spillway_connector.engine.stock.tiers import SpillwayNvmeTier
from spillway_connector.engine.v030 import connector
from spillway_connector.engine.v030.cpu_tier import ArcCpuTier
from spillway_connector.engine.v030.scheduler import RequestState, SpillwayConnectorScheduler
from spillway_connector.engine.v030.tiering import SpillwayTieringManager
from spillway_connector.engine.v030.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker.copy_jobs import Sides
from spillway_connector.namespace import Namespace
from spillway_connector.testing.generation import make_cpu_tier
from spillway_connector.tiers.disk.files.tier import FileTier
from upstream.mock_manager import answering_prefixes
from upstream.substitution import Substitutes

_ROW_BYTES = 4096
_CONTEXT = ReqContext(req_id="upstream")
_NO_ENGINE = SimpleNamespace(scheduler_half=None, salt_of=lambda request_id: None)


class _NoMemory:
    """The part of a region that a CPU tier touches without copying anything."""

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(_ROW_BYTES)).cast("b", (1, _ROW_BYTES))


def cpu_tier(num_chunks: int, cache_policy: str = "lru", enable_events: bool = False, **_: Any) -> Any:
    """Substitute for CPUOffloadingManager, whose events are compared with its medium."""
    tier = make_cpu_tier(num_chunks, _NoMemory(), cache_policy, enable_events)  # type: ignore[arg-type]
    tier.medium = Medium.CPU  # type: ignore[attr-defined]
    return tier


def primary_tier(num_chunks: int, mmap_region: Any, **_: Any) -> ArcCpuTier:
    """Substitute for CPUPrimaryTierOffloadingManager: ARC, whose rows vLLM's tests can look at, as they are vLLM's."""
    return ArcCpuTier(num_chunks, mmap_region)


class Manager(SpillwayTieringManager):
    """Substitute for TieringOffloadingManager, with room for as many promotions as vLLM would make. vLLM's tests look
    up which requests it has seen."""

    def __init__(self, primary_tier: Any, secondary_tiers: list[Any], **_: Any) -> None:
        config = ConnectorConfig.parse(
            {
                "num_cpu_blocks": 5,
                "promotion_in_flight_fraction": 1.0,
                "promotion_per_request_fraction": 1.0,
            }
        )
        super().__init__(primary_tier, secondary_tiers, 5, config, chunk_tokens=16, chunk_bytes=_ROW_BYTES)
        self._req_state: dict[str, ReqContext] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._req_state[req_context.req_id] = req_context
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        del self._req_state[req_context.req_id]
        super().on_request_finished(req_context)


class NvmeTier(SpillwayNvmeTier):
    """Substitute for FileSystemTierManager. Lookups are asked again until the tier has answered, as the scheduler
    does."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, root_dir: str, **given: Any
    ) -> None:
        options = {name: given[name] for name in ("locality", "backpressure_detector") if name in given}
        # vLLM's mocked spec has no engine behind it, of which the namespace is made.
        with (
            patch.object(tiers, "engine_objects", lambda spec: _NO_ENGINE),
            patch.object(tiers, "stock_namespace", lambda *_: Namespace.of({"model": "upstream"})),
        ):
            super().__init__(offloading_spec, primary_kv_view, tier_type, path=root_dir, mode="files", **options)

        self.file_mapper = SimpleNamespace(get_file_name=self._file_of)

    def _file_of(self, key: Any) -> str:
        backend = self._shared._tier
        assert isinstance(backend, FileTier)
        return backend._path(key)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        deadline = time.monotonic() + 30.0
        while (answer := super().lookup(key, req_context)) is LookupResult.RETRY and time.monotonic() < deadline:
            self.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
            time.sleep(0.001)
        return answer

    def drain_jobs(self) -> None:
        """vLLM's tests drain a tier to see its jobs ended, and go on with it."""
        self._shared.drain(60.0)


def lookup_and_wait(tier: NvmeTier, keys: list[Any], ctx: Any = _CONTEXT, timeout: float = 1.0) -> list[LookupResult]:
    """Stands in for a function of vLLM's test, which reads the queue of its tier's lookups."""
    return [tier.lookup(key, ctx) for key in keys]


class StubbedScheduler(SpillwayConnectorScheduler):
    """vLLM's tests replace `_maximal_prefix_lookup`, which Spillway calls only for models with several KV groups. They
    count the chunks of windows that vLLM's own rule stores."""

    def _chooses_windows(self) -> bool:
        return False

    def _lookup(self, req_status: Any, max_num_new_tokens: int | None = None) -> int | None:
        if "_maximal_prefix_lookup" in vars(self):
            return self._look_up_groups(req_status, max_num_new_tokens)
        return super()._lookup(req_status, max_num_new_tokens)


class SingleStores(SpillwayConnectorWorker):
    """vLLM's tests end each store alone, and their worker takes no others."""

    def _store(self, copy_id: int, stores: Sequence[Sides]) -> bool:
        assert self.worker is not None
        return len(stores) == 1 and self.worker.submit_store(copy_id, *stores[0])


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


class _AnyTouch:
    """vLLM 0.32 touches nothing: its CPU tier orders chunks when a request finishes. Spillway touches at look-ups."""

    def __call__(self, keys: Any, req_context: Any) -> None: ...

    def assert_not_called(self) -> None: ...


def make_worker(original: Any) -> Any:
    """The worker half that vLLM's tests import and build."""

    def make(*arguments: Any, **options: Any) -> Any:
        with patch.object(worker, "OffloadingConnectorWorker", SingleStores):
            return original(*arguments, **options)

    return make


def mock_spec(original: Any) -> Any:
    class MockOffloadingSpec(original):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            answering_prefixes(self.manager, LookupResult.HIT, LookupResult.MISS)
            self.manager.touch = _AnyTouch()

    return MockOffloadingSpec


def _instead(ours: Any) -> Any:
    return lambda theirs: ours


_CONNECTOR = "kv_connector/unit/offloading_connector"

SUBSTITUTES: Substitutes = {
    "kv_offload/cpu/test_manager.py": {"CPUOffloadingManager": _instead(cpu_tier)},
    "kv_offload/tiering/test_tiering_offloading.py": {
        "CPUPrimaryTierOffloadingManager": _instead(primary_tier),
        "TieringOffloadingManager": _instead(Manager),
    },
    "kv_offload/tiering/test_fs_tier.py": {
        "FileSystemTierManager": _instead(NvmeTier),
        "lookup_and_wait": _instead(lookup_and_wait),
    },
    f"{_CONNECTOR}/utils.py": {
        "OffloadingConnector": spillway_connector,
        "KVTransferConfig": transfer_config,
        "MockOffloadingSpec": mock_spec,
    },
    f"{_CONNECTOR}/test_scheduler.py": {"RequestOffloadState": _instead(RequestState)},
    f"{_CONNECTOR}/test_worker.py": {"_make_worker": make_worker},
    f"{_CONNECTOR}/test_metrics.py": {"OffloadingConnector": spillway_connector},
    f"{_CONNECTOR}/test_worker_metadata.py": {"OffloadingWorkerMetadata": _instead(SpillwayWorkerMetadata)},
}
