"""The CPU tier in vLLM 0.23: its answers and events, and its ARC policy."""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.tier import ArcRows, CpuTier, LruRows
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.node.region import NodeRegion


def make_cpu_tier(num_rows: int, region: HostRegion, policy: str, enable_events: bool) -> CpuTier:
    """policy: "lru" or "arc"."""
    kind = LruCpuTier if policy == "lru" else ArcCpuTier
    return kind(num_rows, region, enable_events=enable_events)


def make_node_tier(
    region: NodeRegion,
    namespace: bytes,
    enable_events: bool,
    floor_share: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> CpuTier:
    """Raises HostMemoryError."""
    return NodeCpuTier(region, namespace, floor_share=floor_share, enable_events=enable_events, clock=clock)


class _CpuEvents(CpuTier):
    @override
    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys=keys, medium=CPULoadStoreSpec.medium(), removed=removed)


class _LruAnswers(_CpuEvents, LruRows):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: ready. None: being written. False: not here."""
        return True if key in self.ready else (None if key in self._rows else False)


class LruCpuTier(_LruAnswers):
    """LruRows with the answers and events of vLLM 0.23."""


class NodeCpuTier(NodeRows, _LruAnswers):
    """NodeRows with the answers and events of vLLM 0.23."""


class ArcCpuTier(_CpuEvents, ArcRows):
    """ArcRows with the names of vLLM 0.23."""

    @override
    def _row_of(self, status: BlockStatus) -> int:
        return int(status.block_id)

    @override
    def _drop_all(self) -> int:
        self._policy.clear()
        self._resident.clear()
        return int(self._num_allocated_blocks)

    @override
    def free_rows(self) -> int:
        return int(self._get_num_free_blocks())
