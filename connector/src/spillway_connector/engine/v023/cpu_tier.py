"""The CPU tier in vLLM 0.23: its answers and events, and its ARC policy."""

from __future__ import annotations

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus

from spillway_connector.engine.cpu_tier.arc_rows import ArcRows
from spillway_connector.engine.cpu_tier.lru_rows import LruRows
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.node_tier.rows import NodeRows


class _CpuEvents(CpuTier):
    @override
    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys=keys, medium=CPULoadStoreSpec.medium(), removed=removed)


class _LruAnswers(_CpuEvents, LruRows):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if the chunk is ready, None if it is being written, False if it is not here."""
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
