"""The CPU tier in vLLM 0.30 and later: its answers and events, and its ARC policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from spillway_connector.engine.cpu_tier.arc_rows import ArcRows
from spillway_connector.engine.cpu_tier.lru_rows import LruRows
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.node_tier.rows import NodeRows

_HAS_LOST = "metadata_only" in {field.name for field in fields(OffloadingEvent)}  # since 0.33


class _CpuEvents(CpuTier):
    @override
    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed)

    @override
    def _lost(self, keys: list[OffloadKey]) -> None:
        if _HAS_LOST and self.events is not None and keys:
            only_metadata: dict[str, Any] = {"metadata_only": True}
            self.events.append(replace(self._event(keys, removed=True), **only_metadata))

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        """A chunk whose store failed may be here again by another one: then its description is still needed."""
        events = super().take_events()
        if not _HAS_LOST:
            return events
        final = (self._gone(event) if getattr(event, "metadata_only", False) else event for event in events)
        return [event for event in final if event.keys]

    def _gone(self, lost: OffloadingEvent) -> OffloadingEvent:
        return replace(lost, keys=[key for key in lost.keys if key not in self.resident])


class _LruAnswers(_CpuEvents, LruRows):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT_PENDING: its row is being written."""
        if key in self.ready:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._rows else LookupResult.MISS


class LruCpuTier(_LruAnswers):
    """LruRows with the answers and events of vLLM 0.30 and later."""


class NodeCpuTier(NodeRows, _LruAnswers):
    """NodeRows with the answers and events of vLLM 0.30 and later."""


class ArcCpuTier(_CpuEvents, ArcRows):
    """ArcRows with the names of vLLM 0.30 and later, and reads for shared tiers that count as no use."""

    @override
    def _row_of(self, status: ChunkStatus) -> int:
        return int(status.chunk_id)

    @override
    def _drop_all(self) -> int:
        rows = int(self._num_allocated_chunks)
        CPUOffloadingManager.reset_cache(self)
        self._num_allocated_chunks = rows  # vLLM begins again from row 0, jobs under way or not
        self._resident.clear()
        return rows

    @override
    def free_rows(self) -> int:
        return int(self._get_num_free_chunks())

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return CPUOffloadingManager.on_new_request(self, req_context)

    @override
    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec | None:
        """A read for a shared tier, which 0.32 does not count as a request's use of the rows."""
        if hasattr(CPUOffloadingManager, "_prepare_load"):
            return self._prepare_load(keys, req_context, record_access=False)
        return super().prepare_read(keys, req_context)
