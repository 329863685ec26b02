"""The CPU tier's rows by vLLM's ARC. The room of a generation of vLLM completes the class."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.holding_arc import HoldingArc
from spillway_connector.engine.cpu_tier.tier import CpuTier


class ArcRows(CpuTier, CPUOffloadingManager):
    """vLLM's ARC, with the two sets beside it; what clients asked to retain leaves last."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        CPUOffloadingManager.__init__(self, num_rows, cache_policy="arc", enable_events=enable_events)
        CpuTier.__init__(self, num_rows, region, enable_events)
        self._policy = HoldingArc(num_rows, self._held)
        self._resident: set[OffloadKey] = set()
        self.resident = self._resident

    @abstractmethod
    def _row_of(self, status: Any) -> int:
        """status: the state that vLLM's policy keeps for a chunk."""

    def _held(self) -> AbstractSet[OffloadKey]:
        self._holds.expire(self._clock())
        return self._holds.keys

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = CPUOffloadingManager.prepare_store(self, keys, req_context)
        if output is not None:
            for gone in (self._resident, self.ready):
                gone.difference_update(output.evicted_keys)
            self._resident.update(output.keys_to_store)
            self.changed_chunks.add(output.evicted_keys)
            self.changed_chunks.add(output.keys_to_store)
        return output

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = [key for key in keys if key in self._resident and key not in self.ready]
        CPUOffloadingManager.complete_store(self, keys, req_context, success)
        if success:
            self.ready.update(written)
        else:
            self._resident.difference_update(written)
        self.changed_chunks.add(written)

    @override
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        return [self._row_of(self._status_of(key)) for key in keys]

    @override
    def _rows_in_use(self) -> Counter[int]:
        chunks = [self._status_of(key) for key in self._resident]
        return Counter({self._row_of(chunk): abs(chunk.ref_cnt) for chunk in chunks if chunk.ref_cnt})

    def _status_of(self, key: OffloadKey) -> Any:
        """Return a chunk's status. Its `ref_cnt` is -1 while it is being written, else the number of its readers."""
        status = self._policy.get(key)
        assert status is not None, "a resident chunk has a row"
        return status
