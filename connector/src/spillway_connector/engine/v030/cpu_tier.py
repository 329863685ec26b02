"""The CPU tier in vLLM 0.30 and later: its answers and events, and its ARC policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier import CpuTier, LruRows


def make_cpu_tier(num_rows: int, region: HostRegion, policy: str, enable_events: bool) -> CpuTier:
    """policy: "lru" or "arc"."""
    kind = LruCpuTier if policy == "lru" else ArcCpuTier
    return kind(num_rows, region, enable_events=enable_events)


class LruCpuTier(LruRows):
    """LruRows with the answers and events of vLLM 0.30 and later."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        super().__init__(num_rows, region, enable_events)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT_PENDING: its row is being written."""
        if key in self.ready:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._rows else LookupResult.MISS

    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed)


class ArcCpuTier(CpuTier, CPUOffloadingManager):
    """Upstream's ARC, with the two sets beside it."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        CPUOffloadingManager.__init__(self, num_rows, cache_policy="arc", enable_events=enable_events)
        CpuTier.__init__(self, region, enable_events)
        if hasattr(CPUOffloadingManager, "_prepare_load"):
            self.prepare_read = self._read_unrecorded
        self._resident: set[OffloadKey] = set()
        self.resident = self._resident

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = CPUOffloadingManager.prepare_store(self, keys, req_context)
        if output is not None:
            for gone in (self._resident, self.ready):
                gone.difference_update(output.evicted_keys)
            self._resident.update(output.keys_to_store)
            self._log(output.evicted_keys, output.keys_to_store)
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = [key for key in keys if key in self._resident and key not in self.ready]
        CPUOffloadingManager.complete_store(self, keys, req_context, success)
        if success:
            self.ready.update(written)
        else:
            self._resident.difference_update(written)
        self._log(written)

    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        return [self._chunk_status(key).chunk_id for key in keys]

    def _rows_in_use(self) -> Counter[int]:
        chunks = [self._chunk_status(key) for key in self._resident]
        return Counter({chunk.chunk_id: abs(chunk.ref_cnt) for chunk in chunks if chunk.ref_cnt})

    def _drop_all(self) -> int:
        rows = self._num_allocated_chunks
        CPUOffloadingManager.reset_cache(self)
        self._num_allocated_chunks = rows  # upstream begins anew from row 0, jobs under way or not
        self._resident.clear()
        return rows

    def free_rows(self) -> int:
        return self._get_num_free_chunks()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return CPUOffloadingManager.on_new_request(self, req_context)

    def _read_unrecorded(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pins the rows for a store to a shared tier, which 0.32 does not count as a request's use of them."""
        return self._prepare_load(keys, req_context, record_access=False)

    def _chunk_status(self, key: OffloadKey) -> ChunkStatus:
        """Its `ref_cnt` is -1 while it is being written, else the number of its readers."""
        chunk = self._policy.get(key)
        assert chunk is not None, "a resident chunk has a row"
        return chunk

    def _log(self, *changed: Iterable[OffloadKey]) -> None:
        for keys in changed:
            self.changed_chunks.add(keys)
