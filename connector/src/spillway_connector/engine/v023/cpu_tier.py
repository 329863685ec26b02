"""The CPU tier in vLLM 0.23: its answers and events, and its ARC policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier import CpuTier, LruRows


def make_cpu_tier(num_rows: int, region: HostRegion, policy: str, enable_events: bool) -> CpuTier:
    """policy: "lru" or "arc"."""
    kind = LruCpuTier if policy == "lru" else ArcCpuTier
    return kind(num_rows, region, enable_events=enable_events)


class LruCpuTier(LruRows):
    """LruRows with the answers and events of vLLM 0.23."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        super().__init__(num_rows, region, enable_events)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: ready. None: being written. False: not here."""
        return True if key in self.ready else (None if key in self._rows else False)

    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys=keys, medium=CPULoadStoreSpec.medium(), removed=removed)


class ArcCpuTier(CpuTier, CPUOffloadingManager):
    """Upstream's ARC, with the two sets beside it."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        CPUOffloadingManager.__init__(self, num_rows, cache_policy="arc", enable_events=enable_events)
        CpuTier.__init__(self, region, enable_events)
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
        return [self._block_of(key).block_id for key in keys]

    def _rows_in_use(self) -> Counter[int]:
        blocks = [self._block_of(key) for key in self._resident]
        return Counter({block.block_id: abs(block.ref_cnt) for block in blocks if block.ref_cnt})

    def _drop_all(self) -> int:
        self._policy.clear()
        self._resident.clear()
        return self._num_allocated_blocks

    def free_rows(self) -> int:
        return self._get_num_free_blocks()

    def _block_of(self, key: OffloadKey) -> BlockStatus:
        """Its `ref_cnt` is -1 while it is being written, else the number of its readers."""
        block = self._policy.get(key)
        assert block is not None, "a resident chunk has a row"
        return block

    def _log(self, *changed: Iterable[OffloadKey]) -> None:
        for keys in changed:
            self.changed_chunks.add(keys)
